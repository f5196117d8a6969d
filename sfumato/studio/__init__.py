"""Shows runs in a browser while they train: a reader of run folders without a state of its own."""
