"""Algorithms as pure functions of tensors. Files here depend on no model, no data and no device.

Each choice that a configuration makes by ``type:`` is a frozen dataclass, whose fields are its parameters.
"""
