"""Data: rows, batches whose order is a function of (seed, epoch), and positions that are integers."""
