"""What needs Triton. Nothing outside imports it but inside a function, when it is wanted."""
