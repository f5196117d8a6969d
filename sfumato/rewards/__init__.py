"""Rewards, one file each: a frozen dataclass with a ``type`` is found by that name, nothing has to be registered."""
