"""A program that makes in shared memory and in the folder of temporary files what vLLM makes there.

A process that it spawns maps the same segment, both share a semaphore, and a socket has a UUID as its name. Only their
ends, or Python's resource tracker, would remove these. It says what it has made in a line of JSON, then waits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
import uuid
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Event

from sfumato.rollout.engines.served.owner_process import mapped_inodes

SEGMENT_BYTES = 2**20


def attach(name: str, is_attached: Event) -> None:
    segment = SharedMemory(name=name)
    is_attached.set()
    time.sleep(600)
    segment.close()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    before = set(os.listdir("/dev/shm"))
    segment = SharedMemory(create=True, size=SEGMENT_BYTES)
    is_attached = context.Event()
    made = set(os.listdir("/dev/shm")) - before
    context.Process(target=attach, args=(segment.name, is_attached), daemon=True).start()
    path = f"{tempfile.gettempdir()}/{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        is_attached.wait()
        mapped = mapped_inodes(os.getpid())
        # entries know their inode: files of other processes may be gone by now
        entries = [entry for entry in os.scandir("/dev/shm") if entry.name in made]
        segments = sorted(entry.name for entry in entries if entry.inode() in mapped)
        print(json.dumps({"segments": segments, "socket": path}), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
