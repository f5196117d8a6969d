"""sfumato: pretraining, fine-tuning and reinforcement learning of generative models in linear PyTorch scripts.

Importing this package loads nothing heavy and changes nothing; import the part you need, such as
``sfumato.models.diffusion`` or ``sfumato.algorithms.dynamics``.
"""

__version__ = "0.1.0"
