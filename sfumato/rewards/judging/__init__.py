"""What is put to judges, and how their replies are read."""
