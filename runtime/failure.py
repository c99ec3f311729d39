"""How a run that started can end badly."""


class RunFailedError(RuntimeError):
    """A run ended before its last step; the message says which rank, lane and op, and why."""


class AbortedRunError(RuntimeError):
    """This rank stopped because the run was aborted; the reason is in the store's errors."""
