"""Training one network, in a form that can be saved and resumed."""
