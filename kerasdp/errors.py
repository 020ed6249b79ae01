"""Defines the errors that end a run: each is one line for the user, and an exit code."""


class RunError(Exception):
    """A run that has to end. Its text is a whole message: what was expected, what was received, what to do."""

    exit_code = 1


class UserError(RunError, ValueError):
    """A flag, an argument or a file that cannot be used as given."""

    exit_code = 2


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""


class ReplicasDifferError(RunError):
    """The replicas of one model no longer hold the same weights."""


class PreemptedError(RunError):
    """A signal asked the run to end; it has saved a checkpoint, from which it can resume."""

    # Grid Engine requeues a job that ends with this code; other schedulers can be told to.
    exit_code = 99


class CheckpointError(RunError):
    """A checkpoint that cannot be used: corrupt, truncated, or of a newer format."""


class WorkerError(RunError):
    """A worker process died or raised; the text holds that worker's error."""


def from_name(name: str, message: str) -> RunError | None:
    """Rebuilds a `RunError` that crossed a process border.

    Args:
        name: the name of its class.
        message: its text.

    Returns:
        The error, or None where no class of this module has that name.
    """
    for kind in (
        UserError, NonFiniteLossError, ReplicasDifferError, PreemptedError, CheckpointError, WorkerError, RunError
    ):  # fmt: skip
        if name == kind.__name__:
            return kind(message)
    return None
