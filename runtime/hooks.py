"""Faults on request, for tests: what a run does to itself when asked to."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class TestHooks:
    """Each field is off by default.

    Attributes:
        overflow: (step, backward stage) pairs; the first gradient element of that stage becomes infinite.
        huge: steps in which the tied weight's first gradient element is so large, in both uses, that the sum overflows.
        poison: fill every buffer with NaN once its content is no longer needed.
        delay_s: sleep a random time up to this before every op.
        kill: (rank, step): that rank kills its own process at the first op of that step.
        fail: (rank, step, op text): that rank raises an error in that op.
        hang: (rank, step, op text): that op does not end.
        kill_in_checkpoint: (rank, step): that rank kills its own process while it writes the checkpoint of that step.
    """

    __test__ = False

    overflow: tuple[tuple[int, int], ...] = ()
    huge: tuple[int, ...] = ()
    poison: bool = False
    delay_s: float = 0.0
    kill: tuple[int, int] | None = None
    fail: tuple[int, int, str] | None = None
    hang: tuple[int, int, str] | None = None
    kill_in_checkpoint: tuple[int, int] | None = None

    def delay(self, generator: random.Random) -> float:
        """Seconds to sleep before an op."""
        return generator.random() ** 4 * self.delay_s


NO_HOOKS = TestHooks()
