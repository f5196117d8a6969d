"""Threads that open, decode and scale the media of several documents at a time; results do not depend on them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from sfumato.data.media.document_media import MediaRefs, Tensors
from sfumato.data.text.document import Document, TextSample

MOST_THREADS = 8
"""Most threads of a process that open media: Pillow, OpenCV and numpy release the interpreter's lock, Python code does
not."""


def open_ahead(samples: Sequence[TextSample], tensors: Callable[[MediaRefs], Tensors]) -> list[TextSample]:
    """The same samples, whose media threads have begun to open. ``MediaRefs.opened`` is the future of their tensors.

    Args:
        samples: their documents may have media. Rows are read in the calling thread, since tables need not be
            thread-safe.
        tensors: makes the tensors of a document; called in threads. What it raises, the future raises.
    """

    def start_opening(document: Document) -> Document:
        if document.images is None or not len(document.images.shapes):
            return document
        media = document.images.find()
        images = replace(document.images, find=lambda: media)
        return replace(document, images=replace(images, opened=_thread_pool().submit(tensors, images)))

    return [replace(sample, documents=tuple(map(start_opening, sample.documents))) for sample in samples]


def num_threads() -> int:
    """Threads that open media: this process's share of the CPUs, at most ``MOST_THREADS``."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # macOS binds no process to some of the CPUs
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cpus // ranks, MOST_THREADS), 1)


@functools.cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), "media")
