"""Does the image show the text that the prompt asks for? Scored by optical character recognition (OCR)."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import shutil
import subprocess
import threading
import time
import unicodedata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np
from PIL import Image, ImageOps

from sfumato.errors import DataError, MissingDependencyError
from sfumato.rewards.base import Reward, Sample, load_once

if TYPE_CHECKING:
    from paddleocr import PaddleOCR, TextRecognition
    from rapidocr import RapidOCR
    from rapidocr.utils.output import RapidOCROutput

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')

_LINE_HEIGHT = 48  # what RapidOCR scales a line of text to
_MIN_ASPECT = 2
_PADDING = 127  # zero after normalisation, which is what RapidOCR pads with
_BLANK = np.full((_LINE_HEIGHT, _LINE_HEIGHT, 3), 255, np.uint8)

_INK_THRESHOLD = 32  # of 255, against the border's colour: above compression noise, below any legible contrast
_INK_MARGIN = 2
_TESSERACT_MIN_HEIGHT = 64
_TESSERACT_BORDER = 16  # Tesseract misses characters that touch the edge

_detect_lock = threading.Lock()


def ocr_target(prompt: str, metadata: Mapping[str, object]) -> str:
    """The text that an image of this prompt should show.

    Args:
        prompt: its first text in straight or curly double quotes is the target, unless metadata has one.
        metadata: the prompt's row; ``target`` counts unless it is None.

    Returns:
        The target as written, with at least one character that is not a space.

    Raises:
        DataError: there is no target, it is empty, not a text, or not clear; the message names the prompt.
    """
    target = metadata.get("target")
    if target is None:
        target = quoted_text(prompt)
        if target is None:
            raise DataError(
                f"the ocr reward finds no target for prompt {prompt!r}: put the text in double quotes into the prompt, "
                "or give the row a 'target'"
            )
    if not isinstance(target, str):
        raise DataError(f"the 'target' of prompt {prompt!r} must be a text, not {target!r}: write it in quotes")
    if not _normalise_text(target):
        raise DataError(f"the ocr target of prompt {prompt!r} is empty: give the text that the image should show")
    return target


def quoted_text(prompt: str) -> str | None:
    """The first text in straight or curly double quotes; None where there is none.

    Raises:
        DataError: when a double quote stands for inches, or has no partner, so that another text may be meant.
    """
    match = _QUOTED.search(prompt)
    if match is None:
        return None
    before_openings = prompt.split('"')[:-1:2]
    if prompt.count('"') % 2 or any(text[-1:].isdigit() for text in before_openings):
        raise DataError(
            f"it is not clear which text is quoted in prompt {prompt!r}: write inches as a word, close every quote, or "
            "give the row a 'target'"
        )
    return match.group(1) if match.group(1) is not None else match.group(2)


def ocr_text_score(text: str, target: str) -> float:
    """How close a recognised text is to its target, from 0 to 1.

    ``1 - min(levenshtein(text, target), len(target)) / len(target)``, case and all spaces ignored; 1 when the target
    stands anywhere in the text. From Flow-GRPO (Liu et al., 2025, https://arxiv.org/abs/2505.05470).

    Args:
        text: what was recognised, lines joined without separator; may be empty.
        target: at least one character that is not a space.

    Raises:
        DataError: the target is empty.
    """
    text, target = _normalise_text(text), _normalise_text(target)
    if not target:
        raise DataError("the target of an ocr score is empty")
    if target in text:
        return 1.0
    return 1.0 - min(levenshtein(text, target), len(target)) / len(target)


def levenshtein(first: Sequence[str], second: Sequence[str]) -> int:
    """Smallest number of insertions, deletions and replacements of characters, or words, from one to the other."""
    previous = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        current = [i]
        for j, b in enumerate(second, start=1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b)))
        previous = current
    return previous[-1]


def _normalise_text(text: str) -> str:
    # one character for what looks alike, such as the wide colon that engines for Chinese read in any line
    return "".join(unicodedata.normalize("NFKC", text).replace("\u2019", "'").split()).casefold()


def crop_to_ink(image: np.ndarray) -> np.ndarray | None:
    """The part of an image that differs from its border's median colour, with two pixels of margin.

    Args:
        image: uint8 [H, W, 3].

    Returns:
        A view, uint8 [h, w, 3]; None when the image is blank.
    """
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    background = np.median(border, axis=0)
    is_ink = cast("np.ndarray", (np.abs(image - background) > _INK_THRESHOLD).any(axis=2))
    if not is_ink.any():
        return None
    rows, columns = np.flatnonzero(is_ink.any(axis=1)), np.flatnonzero(is_ink.any(axis=0))
    first_row, first_column = max(rows[0] - _INK_MARGIN, 0), max(columns[0] - _INK_MARGIN, 0)
    return image[first_row : rows[-1] + _INK_MARGIN + 1, first_column : columns[-1] + _INK_MARGIN + 1]


@dataclass(frozen=True, kw_only=True)
class OcrReward(Reward):
    """Closeness of the text in the image to the text quoted in the prompt, from 0 to 1."""

    type: ClassVar[str] = "ocr"
    modality: ClassVar[str] = "image"

    engine: Literal["rapidocr", "tesseract", "paddleocr"] = "rapidocr"
    """What reads the image: the package RapidOCR or PaddleOCR, or the Tesseract program (English only)."""
    detect: bool = True
    """Find the text in the image first. False: the whole image is one line of text, which is read much faster."""
    num_threads: int = 1
    """Threads of the engine."""
    batch_size: int = 32
    """Lines of text that RapidOCR or PaddleOCR reads at once."""

    @property
    def cached(self) -> bool:  # type: ignore[override]
        """False where PaddleOCR reads lines in batches: its reading of a line depends on the other lines."""
        return self.engine != "paddleocr" or self.detect

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("num_threads", "batch_size")

    def prepare(self) -> None:
        """Loads the engine. Raises MissingDependencyError when it is not installed."""
        if self.engine == "tesseract":
            _find_tesseract()
        elif self.engine == "paddleocr":
            load_paddle(self.detect, self.batch_size, self.num_threads)
        else:
            engine = _load_rapidocr(self.batch_size, self.num_threads)
            if self.detect:
                _detect_and_read([_BLANK], engine)  # the detector loads at its first use

    def check_installed(self) -> str:
        """See ``Reward``."""
        if self.engine == "tesseract":
            _find_tesseract()
            return ""
        missing = [name for name in PACKAGES[self.engine] if importlib.util.find_spec(name) is None]
        if missing:
            raise _missing_engine(self.engine, f"No module named {missing[0]!r}")
        return (
            "" if self.engine == "rapidocr" else "whether PaddleOCR has its models, which it downloads at its first use"
        )

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row has no target."""
        ocr_target(prompt, metadata)

    def score(self, samples: list[Sample]) -> list[float]:
        """``ocr_text_score`` for each image. Raises DataError for a prompt without a target."""
        targets = [ocr_target(sample.prompt, sample.metadata) for sample in samples]
        texts = self.read([sample.pixels for sample in samples])
        return [ocr_text_score(text, target) for text, target in zip(texts, targets, strict=True)]

    def read(self, images: list[np.ndarray]) -> list[str]:
        """The recognised text of each image, uint8 [H, W, 3], lines joined without separator; "" where there is none.

        Raises:
            MissingDependencyError: the engine is not installed.
            RuntimeError: Tesseract failed; the message is its own.
            TimeoutError, subprocess.TimeoutExpired: Tesseract took longer than ``timeout_s``.
        """
        # a recogniser takes the whole picture for one line: without its empty border the text is larger
        if not self.detect:
            crops = [crop_to_ink(image) for image in images]
            texts = iter(self._read_parts([crop for crop in crops if crop is not None]))
            return ["" if crop is None else next(texts) for crop in crops]
        return self._read_parts(images)

    def _read_parts(self, images: list[np.ndarray]) -> list[str]:
        if self.engine == "tesseract":
            deadline = time.monotonic() + self.timeout_s
            page_mode = "3" if self.detect else "7"  # 3: find blocks of text; 7: one line of text
            with ThreadPoolExecutor(self.num_threads) as pool:
                return list(pool.map(lambda image: _read_with_tesseract(image, page_mode, deadline), images))
        # OpenCV's order of channels is what both packages take an array to have
        images = [np.ascontiguousarray(image[:, :, ::-1]) for image in images]
        if self.engine == "paddleocr":
            return read_with_paddle(images, self.detect, self.batch_size, self.num_threads)
        engine = _load_rapidocr(self.batch_size, self.num_threads)
        return _detect_and_read(images, engine) if self.detect else _read_lines(images, engine)


def _detect_and_read(images: list[np.ndarray], engine: RapidOCR) -> list[str]:
    with _detect_lock:  # the detector keeps state between its steps
        # with detection and recognition on, the output is that of the whole pipeline
        return ["".join(cast("RapidOCROutput", engine(image)).txts or ()) for image in images]


def _read_lines(images: list[np.ndarray], engine: RapidOCR) -> list[str]:
    """Reads images that are one line of text each.

    RapidOCR pads the lines of a batch to the widest one, and padding can change what is read. Lines are therefore
    padded to multiples of half their height and grouped by it: no text depends on the other images of its batch.
    """
    by_aspect: dict[int, list[int]] = {}
    for index, image in enumerate(images):
        height, width, _ = image.shape
        by_aspect.setdefault(max(2 * _MIN_ASPECT, math.ceil(2 * width / height)), []).append(index)
    texts = [""] * len(images)
    for halves, group in by_aspect.items():
        lines = []
        for index in group:
            line = np.pad(images[index], ((0, images[index].shape[0] % 2), (0, 0), (0, 0)), mode="edge")  # even height
            height, width, _ = line.shape
            missing = halves * height // 2 - width
            lines.append(np.pad(line, ((0, 0), (0, missing), (0, 0)), constant_values=_PADDING))
        for index, text in zip(group, cast("tuple[str, ...]", engine.recognize_txt(lines).txts), strict=True):
            texts[index] = text
    return texts


@load_once
def _load_rapidocr(batch_size: int, num_threads: int) -> RapidOCR:
    """The RapidOCR engine of these settings, one per process."""
    parameters = {
        "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
        "Rec.rec_batch_num": batch_size,
        "Rec.rec_img_shape": [3, _LINE_HEIGHT, _LINE_HEIGHT * _MIN_ASPECT],
        "Global.log_level": "error",  # it logs every image without text as a warning
    }
    try:
        from rapidocr import RapidOCR

        engine = RapidOCR(params=parameters)
        engine.recognize_txt([_BLANK])  # models load at first use
    except ImportError as error:
        raise _missing_engine("rapidocr", error) from error
    return engine


PACKAGES = {"rapidocr": ("rapidocr", "onnxruntime"), "paddleocr": ("paddleocr", "paddle")}
"""Modules that an engine imports."""

INSTALL = {"rapidocr": "rapidocr onnxruntime", "paddleocr": "'paddleocr>=3.0' paddlepaddle"}


def _missing_engine(engine: str, why: object) -> MissingDependencyError:
    return MissingDependencyError(
        f"the ocr reward with engine {engine} needs a package that is missing ({why}): pip install {INSTALL[engine]}"
    )


def _find_tesseract() -> str:
    program = shutil.which("tesseract")
    if program is None:
        raise MissingDependencyError(
            "the ocr reward with engine tesseract needs the program tesseract: apt-get install tesseract-ocr"
        )
    return program


def _read_with_tesseract(image: np.ndarray, page_mode: str, deadline: float) -> str:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("Tesseract took longer than timeout_s for this batch")
    picture = Image.fromarray(image)
    if picture.height < _TESSERACT_MIN_HEIGHT:
        picture = ImageOps.scale(picture, -(-_TESSERACT_MIN_HEIGHT // picture.height))
    # the border has the colour of the picture's first and last row, so that it adds no edge
    background = tuple(int(value) for value in np.median(image[[0, -1]].reshape(-1, 3), axis=0))
    buffer = io.BytesIO()
    ImageOps.expand(picture, _TESSERACT_BORDER, background).save(buffer, "PNG")
    command = [_find_tesseract(), "stdin", "stdout", "--psm", page_mode]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    try:
        done = subprocess.run(
            command, input=buffer.getvalue(), capture_output=True, check=True, timeout=remaining_s, env=environment
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"tesseract failed: {error.stderr.decode(errors='replace').strip()}") from error
    return "".join(done.stdout.decode().split())


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


@load_once
def load_paddle(detect: bool, batch_size: int, num_threads: int) -> PaddleOCR | TextRecognition:
    """PaddleOCR's pipeline, or with ``detect`` false its recogniser alone, one per process and setting.

    PaddleOCR downloads its PP-OCR models at the first use, unless they are installed.
    """
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
        raise _missing_engine("paddleocr", error) from error
