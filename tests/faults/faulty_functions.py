"""Reward functions that do what they should not to the sample whose prompt is "bad", and score the others 1."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

LEAKED = []


def sleep_on(sample) -> float:
    if sample.prompt == "bad":
        time.sleep(600)
    return 1.0


def compute_on(sample) -> float:
    if sample.prompt == "bad":
        re.match(r"(a+)+$", "a" * 64 + "b")  # one call of C code that holds the interpreter's lock for years
    return 1.0


def ignore_signals(sample) -> float:
    if sample.prompt == "bad":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(600)
            except BaseException:
                continue
    return 1.0


def crash(sample) -> float:
    if sample.prompt == "bad":
        ctypes.string_at(0)
    return 1.0


def leave(sample) -> float:
    if sample.prompt == "bad":
        os._exit(3)
    return 1.0


def leave_politely(sample) -> float:
    if sample.prompt == "bad":
        sys.exit("enough")
    return 1.0


def always_crash(sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def leak(sample) -> float:
    if sample.prompt == "bad":
        while True:
            LEAKED.append(bytearray(2**24))
    return 1.0


def return_garbage(sample):
    return {"a": 1} if sample.prompt == "bad" else 1.0


def return_nan(sample):
    return float("nan") if sample.prompt == "bad" else 1.0


def return_nothing(sample):
    return None if sample.prompt == "bad" else 1.0


class WordlessError(Exception):
    """Neither its text nor its pickle can be had."""

    def __init__(self, one, two) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_wordlessly(sample) -> float:
    if sample.prompt == "bad":
        raise WordlessError(1, 2)
    return 1.0


def write_into_its_pipes(sample) -> float:
    if sample.prompt == "bad":
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, b'{"values": [[99.0, ""]], "last": false, "error": 1}\n' * 1000)
            except OSError:
                continue
    return 1.0


def talk(sample) -> float:
    print("a lot of words", flush=True)
    sys.stdout.write("no end of line")
    return 1.0


def start_children(sample) -> float:
    """Leaves processes behind that hold every pipe they can, then hangs."""
    if sample.prompt == "bad":
        with open(sample.metadata["file"], "w", encoding="ascii") as file:
            if (child := os.fork()) == 0:
                time.sleep(600)
            other = subprocess.Popen(["sleep", "600"], close_fds=False)
            file.write(f"{os.getpid()} {child} {other.pid}")
        time.sleep(600)
    return 1.0


async def sleep_asynchronously(sample) -> float:
    await asyncio.sleep(600 if sample.prompt == "bad" else 0.01)
    return 1.0


async def raise_asynchronously(sample) -> float:
    await asyncio.sleep(0)
    if sample.prompt == "bad":
        raise ConnectionError("no judge there")
    return 1.0


async def block_the_loop(sample) -> float:
    if sample.prompt == "bad":
        time.sleep(600)
    return 1.0


def wrong_number(samples) -> list[float]:
    return [1.0] * (len(samples) + any(sample.prompt == "bad" for sample in samples))


def needs_a_package(sample) -> float:
    import a_package_that_nobody_has  # noqa: F401

    return 1.0
