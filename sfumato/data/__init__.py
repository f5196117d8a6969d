"""Data: rows, and batches in an order that is a function of (seed, epoch), whose positions are integers."""
