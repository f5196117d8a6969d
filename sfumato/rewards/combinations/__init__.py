"""What is optimised, made of the values of the rewards."""
