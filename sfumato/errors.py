"""Errors that a user can cause. A task prints them without a stack trace and exits with their exit code."""

import difflib
import errno
import re
from collections.abc import Sequence

LONG_VALUE = re.compile(r"(?<![^\s(\[{=:,])(['\"])((?:(?!\1)[^\n]){400,})\1|\S{1000,}")
"""Long values of the user's data in a message: 400 characters in quotes, or 1,000 without a space."""

LONGEST_LINE = 3000
"""Letters of the longest line of an error."""


def shorten_values(message: str) -> str:
    """A message in which long values of the user's are cut to their beginning and end, with their length."""

    def shorten(match: re.Match[str]) -> str:
        text = match[0]
        return f"{text[:160]}...({len(text):,} letters)...{text[-40:]}"

    lines = LONG_VALUE.sub(shorten, message).split("\n")
    # a line may still be long without one long value, such as a list of many names
    cut = (
        f"{line[:2000]}...({len(line):,} letters)...{line[-600:]}" if len(line) > LONGEST_LINE else line
        for line in lines
    )
    return "\n".join(cut)


class UserError(ValueError):
    """A mistake that the user can mend; the message names the thing and the remedy, and long values shortened."""

    exit_code = 2

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shorten_values(part) if isinstance(part, str) else part for part in arguments))


class ConfigError(UserError):
    """The configuration is wrong: an unknown key, a value of the wrong type, an impossible combination."""


class UnpredictedError(ConfigError):
    """The memory of a model cannot be predicted; a run of it may be right."""


class DataError(UserError):
    """A data file or a row of it is missing or broken; the message names file and row."""

    fatal = False  # whether it stops a run that leaves broken rows out


class OverlongError(DataError):
    """A sample is too long and the configuration says to stop there, however many broken rows it allows."""

    fatal = True


class FolderError(UserError):
    """The run folder holds another run, living, unfinished or finished; the message says what to do."""


class MissingDependencyError(UserError):
    """An optional package or program is not installed; the message holds the command that installs it."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model, or could not be written; the message names it."""

    exit_code = 3


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite; raised before any weight changes."""

    exit_code = 4


class RewardError(RuntimeError):
    """Rewards fail for more samples than the configuration allows."""

    exit_code = 5


class SelfCheckError(RuntimeError):
    """Replay and rollout disagree before the first update, so policy gradients would be wrong."""

    exit_code = 6


class OffloadedError(RuntimeError):
    """Weights or optimiser state were used while they were in CPU memory; the message says what brings them back."""


class WeightSyncError(RuntimeError):
    """The sampler did not get the weights that the actor sent; the message names version, ranks and weights."""

    exit_code = 7


class RanksMissingError(RuntimeError):
    """Ranks of a run did not find each other when it began; the message says where they were waited for."""

    exit_code = 8


class RoleLostError(RuntimeError):
    """Processes of a role died or hang, and nothing brings them back by itself."""

    exit_code = 8

    def __init__(self, role: str, ranks: Sequence[int], reason: str) -> None:
        """Names the role, or ``ray`` without ranks, the ranks that are lost, and why, with what they last wrote."""
        super().__init__(role, tuple(ranks), reason)
        self.role = role
        self.ranks = tuple(ranks)
        self.reason = reason

    def __str__(self) -> str:
        if not self.ranks:
            return f"{self.role}: {self.reason}"
        ranks = ", ".join(map(str, self.ranks))
        return f"role {self.role}, {'rank' if len(self.ranks) == 1 else 'ranks'} {ranks}: {self.reason}"


class ValuesLostError(RoleLostError):
    """Values that a role has made are gone with the machine that they lay on, whether the role lives or not."""


class PreemptedError(RuntimeError):
    """The run was asked to stop and has saved its state."""

    exit_code = 143  # 128 + SIGTERM, what schedulers expect of a process that obeyed

    def __init__(self, text: str, *, is_saved: bool = True) -> None:
        """``is_saved`` is False where the run could not go on to where it saves."""
        super().__init__(text)
        self.is_saved = is_saved


class StoppedError(KeyboardInterrupt):
    """The run was asked to stop before its first step, and nothing has to be finished or saved.

    Like the interrupt that it is, code that makes the best of errors lets it through.
    """

    exit_code = 143


def suggest(name: str, names: list[str]) -> str:
    """The end of a message about an unknown name: the nearest valid name, if one is near, and all valid names."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = f"valid here: {', '.join(names)}" if names else "no keys are valid here"
    return f"; did you mean {near[0]!r}? ({listing})" if near else f"; {listing}"


def describe_file_error(error: BaseException) -> str:
    """The file that an error of the file system names, and what to do; empty where the error may be our own mistake."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    remedies = {
        (errno.ENOSPC, errno.EDQUOT, errno.EROFS): "make room",
        (errno.EIO, errno.ESTALE, errno.ENOTCONN): "its disk or network file system fails: look at that first",
        (errno.EACCES, errno.EPERM): "this user may not, by the rights of the file or of a folder above it",
    }
    remedy = next((text for numbers, text in remedies.items() if error.errno in numbers), "")
    return f"{error.filename}: {error.strerror}; {remedy}" if remedy else ""
