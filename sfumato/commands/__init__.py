"""What the command line does besides training."""
