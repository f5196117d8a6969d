"""The networks behind learned rewards: loading from local folders, and the arithmetic of their published scores."""
