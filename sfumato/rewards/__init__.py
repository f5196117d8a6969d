"""Rewards: a frozen dataclass with a ``type`` in any module here is found by that name, without being registered."""
