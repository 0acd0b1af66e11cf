"""The step of BalancedMuon in Triton."""
