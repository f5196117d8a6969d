"""Algorithms as pure functions of tensors. A file here knows no model, no data and no device.

Whatever a configuration chooses by ``type:`` is a frozen dataclass whose fields are its parameters.
"""
