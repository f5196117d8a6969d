"""sfumato: pretraining, fine-tuning and reinforcement learning of generative models in linear PyTorch scripts.

Importing this package loads nothing heavy and changes nothing; import the part you need, such as
``sfumato.models.diffusion`` or ``sfumato.algorithms.dynamics``.
"""

import sys

from sfumato.moved import keep_old_names

__version__ = "0.2.0"

if sys.platform == "win32":
    raise ImportError("sfumato runs on Linux and on macOS; on Windows, install it inside WSL (wsl --install)")
keep_old_names()
