"""A job: a plan and how to run it; checked as a whole before any process starts."""

from dataclasses import dataclass, field
from pathlib import Path

from spipe.errors import SpipeError
from spipe.memory import memory
from spipe.plan import Plan
from spipe.runtime.data import Corpus
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.store import StoreLayout
from spipe.runtime.system import available_host_memory, require_host_memory

PROCESS_BYTES = 300 << 20
"""Resident memory of a rank's interpreter with PyTorch, without the plan's buffers."""
RUN_FILES = ("plan.json", "trace.json", "metrics.jsonl", "result.json")


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        plan: the plan.
        steps: training steps to run.
        output: run directory; must not hold a run, unless ``overwrite``.
        data: text file or folder; None for the default corpus.
        transport: one of ``spipe.runtime.transports.TRANSPORTS``.
        timeout_s: give up if no op completes for so long.
        trace_steps: how many of the last steps go into the trace.
        host_memory_bytes: what the host has; None: what it says.
        overwrite: replace the run that ``output`` holds, once all else was checked.
        dump_state: file for weights, masters and moments after the last step.
        hooks: faults for tests.
    """

    plan: Plan
    steps: int
    output: Path
    data: Path | None = None
    transport: str = "auto"
    timeout_s: float = 600.0
    trace_steps: int = 25
    host_memory_bytes: int | None = None
    overwrite: bool = False
    dump_state: Path | None = None
    hooks: TestHooks = field(default=NO_HOOKS)

    @property
    def num_ranks(self) -> int:
        return self.plan.layout.num_ranks

    @property
    def traced_from(self) -> int:
        """The first step that is traced."""
        return self.steps - min(self.trace_steps, self.steps)

    def store_layout(self) -> StoreLayout:
        return StoreLayout(self.plan, self.steps, self.steps - self.traced_from)

    def check(self) -> None:
        """Raises SpipeError if anything a user gave cannot work."""
        from spipe.runtime.devices import require_device
        from spipe.runtime.transports import choose_transport

        if self.steps < 1:
            raise SpipeError(f"steps = {self.steps} should be at least 1")
        if self.trace_steps < 0:
            raise SpipeError(f"trace_steps = {self.trace_steps} should be at least 0")
        if not self.timeout_s > 0:
            raise SpipeError(f"timeout_s = {self.timeout_s} should be positive")
        self.plan.require_runnable()
        hardware = self.plan.hardware
        hosts = hardware.host_of(self.num_ranks - 1) + 1
        if hosts > 1:
            raise SpipeError(
                f"the plan spreads {self.num_ranks} ranks over {hosts} hosts of {hardware.name}; runs use one host: "
                f"make a plan with at most {hardware.ranks_per_host} ranks"
            )
        require_device(hardware.device)
        choose_transport(self.transport, hardware.device, self.num_ranks, False)
        for name in RUN_FILES:
            if (self.output / name).exists() and not self.overwrite:
                raise SpipeError(f"{self.output} already holds a run ({name}); give another directory or remove it")
        if self.output.exists() and not self.output.is_dir():
            raise SpipeError(f"{self.output} is not a directory; give a new directory for the run")
        Corpus.load(self.data).check(self.plan.sequence, self.plan.model.vocab_size)
        available = self.host_memory_bytes or available_host_memory()
        require_host_memory(self.table_of_bytes(), available)

    def table_of_bytes(self) -> dict[str, int]:
        """Host memory of the run, itemised."""
        items = dict(memory(self.plan).hosts[0])
        region = self.store_layout().table_of_bytes()
        items["mailboxes"] = region["mailboxes"]
        items["flags and times"] = region["flags and times"]
        items["PyTorch processes"] = PROCESS_BYTES * self.num_ranks
        return items
