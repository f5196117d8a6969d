"""Optimisers, learning-rate schedules and moving averages."""
