"""Models: what a task builds, trains and saves."""
