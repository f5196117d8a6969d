"""Reading text with PaddleOCR, as an engine of the ``ocr`` reward."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from sfumato.errors import MissingDependencyError

_lock = threading.Lock()  # Paddle's predictors keep state, and functools.cache alone would load twice


def read_with_paddle(images: list[np.ndarray], detect: bool, batch_size: int, num_threads: int) -> list[str]:
    """The text of each image, lines joined without separator.

    Args:
        images: uint8 [H, W, 3], blue green red as OpenCV has them.
        detect: find the text first; otherwise each image is one line.
        batch_size: lines that are read at once.
        num_threads: of the engine.

    Raises:
        MissingDependencyError: PaddleOCR 3 or Paddle is not installed.
    """
    with _lock:
        engine = load_paddle(detect, batch_size, num_threads)
        if detect:
            return ["".join(result["rec_texts"]) for image in images for result in engine.predict(image)]
        return [result["rec_text"] for result in engine.predict(images, batch_size=batch_size)] if images else []


@functools.cache
def load_paddle(detect: bool, batch_size: int, num_threads: int) -> Any:
    """The pipeline, or the recogniser alone; it fetches its PP-OCR models at the first use, unless they are there."""
    try:
        from paddleocr import PaddleOCR, TextRecognition

        if not detect:
            return TextRecognition(cpu_threads=num_threads)
        return PaddleOCR(
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            text_recognition_batch_size=batch_size,
            cpu_threads=num_threads,
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"the ocr reward with engine paddleocr needs a package that is missing ({error}): "
            "pip install 'paddleocr>=3.0' paddlepaddle"
        ) from error
