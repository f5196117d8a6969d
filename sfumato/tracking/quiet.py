"""What libraries would say in the middle of a run's own lines."""

from __future__ import annotations

import os
import sys


def quiet_other_bars() -> None:
    """Keeps progress bars of libraries that are not loaded yet, also in processes started from here, out of the log."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # transformers obeys the first
        os.environ.setdefault(name, "1")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


def quiet_libraries() -> None:
    """Keeps libraries' notices and bars out of the log; their errors still show."""
    quiet_other_bars()
    import diffusers
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
