"""Errors that a user can cause. A task prints them without a stack trace and exits with their exit code."""


class UserError(ValueError):
    """A mistake that the user can mend; the message names the thing and the remedy."""

    exit_code = 2


class ConfigError(UserError):
    """The configuration is wrong: an unknown key, a value of the wrong type, an impossible combination."""


class DataError(UserError):
    """A data file or a row of it is missing or broken; the message names file and row."""

    fatal = False  # whether it stops a run that leaves broken rows out


class OverlongError(DataError):
    """A sample is too long and the configuration says to stop there, however many broken rows it allows."""

    fatal = True


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


class PreemptedError(RuntimeError):
    """The run was asked to stop and has saved its state."""

    exit_code = 143  # 128 + SIGTERM, what schedulers expect of a process that obeyed
