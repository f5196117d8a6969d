"""What runs in a worker process: one reward, and batches of samples that the process which started it sends.

The first request is the reward, the others are lists of samples: pickles, from our own parent. An answer is a line of
JSON, since what a reward has done to this process must not reach the other one:

    {"request": its number, "values": [[number or null, reason], ...], "last": bool}
    {"request": its number, "error": [class in sfumato.errors, text]}

``last`` says that memory has run out and that no more should be sent; an error is a mistake that a person has to mend.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import select
import signal
from typing import BinaryIO

from sfumato.config.process_limits import lower_limit
from sfumato.errors import UserError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import Checked, describe_error, score_batch

LONGEST_REASON = 1000


def main(request_fd: int, reply_fd: int) -> None:
    """Loads the reward and answers requests until the parent closes its end of the pipe.

    Args:
        request_fd: descriptor of the pipe with requests.
        reply_fd: descriptor of the pipe for answers.
    """
    _end_with_parent(request_fd, reply_fd)
    for descriptor in (request_fd, reply_fd):
        os.set_inheritable(descriptor, False)
    lower_limit(resource.RLIMIT_CORE, 0)
    with open(request_fd, "rb") as requests, open(reply_fd, "w", encoding="ascii", buffering=1) as replies:
        reward, answer = _load_reward(requests)
        for number in itertools.count():
            replies.write(json.dumps({"request": number, **answer}) + "\n")
            if reward is None:
                return
            try:
                samples = pickle.load(requests)
            except EOFError:
                return
            answer = _answer_request(reward, samples)


def _end_with_parent(request_fd: int, reply_fd: int) -> None:
    """Forks a guard process that kills this process group once the parent is gone, even while ``score`` hangs."""
    if os.fork():
        return
    os.close(reply_fd)
    closed = select.poll()
    closed.register(request_fd, 0)  # no event but the hang-up
    closed.poll()
    os.killpg(0, signal.SIGKILL)


def _load_reward(requests: BinaryIO) -> tuple[Reward | None, dict[str, object]]:
    """The prepared reward and the first answer; None and an error where it cannot be loaded."""
    try:
        reward = pickle.load(requests)
        if reward.memory_mib:  # before prepare, so that what it loads counts
            lower_limit(resource.RLIMIT_AS, reward.memory_mib * 2**20)
        reward.prepare()
    except UserError as error:
        return None, _encode_error(error)
    except BaseException as error:
        return None, {"error": ["ConfigError", f"cannot be loaded in its process: {describe_error(error, None)}"]}
    return reward, {"values": [], "last": False}


def _answer_request(reward: Reward, samples: list[Sample]) -> dict[str, object]:
    try:
        values: Checked = score_batch(reward, samples)
    except UserError as error:
        return _encode_error(error)
    rows = [[None if reason else value, reason[:LONGEST_REASON]] for value, reason in values]
    return {"values": rows, "last": any(reason.startswith("MemoryError") for _, reason in values)}


def _encode_error(error: UserError) -> dict[str, object]:
    return {"error": [type(error).__name__, str(error)]}
