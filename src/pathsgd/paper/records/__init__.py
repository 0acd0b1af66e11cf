"""What is kept on disk of runs and studies."""
