"""A job: a plan and how to run it; checked as a whole before any process starts."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from spipe.errors import SpipeError
from spipe.memory import EVALUATION_BATCHES, PROCESSES, MemoryReport, memory
from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime.checkpoint import FOLDER, START, Checkpoint, Position, find_checkpoints
from spipe.runtime.data import TOKENS_FILE, Corpus, Feed, TokenFeed, ValidationFeed, load_tokenizer
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.huggingface import ModelFolder, check_exportable
from spipe.runtime.network import DecoderNetwork, Network
from spipe.runtime.store import StoreLayout
from spipe.runtime.system import available_host_memory, require_host_memory

if TYPE_CHECKING:
    import torch

    from spipe.runtime.modules import ModuleSource

PROCESS_BYTES = 300 << 20
"""Resident memory of a rank's interpreter with PyTorch, without the plan's buffers."""
RUN_FILES = ("plan.json", "trace.json", "metrics.jsonl", "result.json")
INITIAL_FILE = "initial.safetensors"


def held(output: Path, name: str) -> SpipeError:
    """The error for a run directory that holds a file of another run."""
    return SpipeError(
        f"{output} already holds a run, finished or not ({name}); give another folder, --force to replace the run "
        "(overwrite=True in Python), or --resume to go on from its checkpoint"
    )


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        plan: the plan.
        steps: training steps, those before the checkpoint that the run goes on from included.
        output: run directory; must not hold a run, unless ``overwrite`` or the run goes on from there.
        data: token file, text file or folder; None for the default corpus.
        tokenizer: Hugging Face ``tokenizer.json`` for text; None: a token is a byte.
        token_bytes: bytes of a token in a ``.bin`` file; None: 2 if the vocabulary fits, else 4.
        validation_fraction: part of the data, at its end, that is for evaluation only.
        evaluate_every: steps between evaluations; None: none.
        transport: one of ``spipe.runtime.transports.TRANSPORTS``.
        timeout_s: give up if no op completes for so long.
        trace_steps: how many of the last steps go into the trace.
        host_memory_bytes: what the host has; None: what it says.
        overwrite: replace the run that ``output`` holds, once all else was checked.
        dump_state: file for weights, masters and moments after the last step.
        checkpoint_every: steps between checkpoints; None: none. With it the last step is saved, too, and so is the
            state when a signal ends the run early.
        keep: how many of the newest checkpoints are kept; None: all.
        resume: checkpoint folder to go on from.
        model_folder: Hugging Face model folder to start from, unless from a checkpoint; None: random weights.
        modules: a user's layers, loss and data; None for the built-in model.
        has_validation: whether that data holds some for evaluations.
        hooks: faults for tests.
    """

    plan: Plan
    steps: int
    output: Path
    data: Path | None = None
    tokenizer: Path | None = None
    token_bytes: int | None = None
    validation_fraction: float = 0.0
    evaluate_every: int | None = None
    transport: str = "auto"
    timeout_s: float = 600.0
    trace_steps: int = 25
    host_memory_bytes: int | None = None
    overwrite: bool = False
    dump_state: Path | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    resume: Path | None = None
    model_folder: Path | None = None
    modules: "ModuleSource | None" = None
    has_validation: bool = False
    hooks: TestHooks = field(default=NO_HOOKS)

    def __post_init__(self) -> None:
        adam = self.plan.optimizer
        if adam.learning_rate_schedule != "constant" and adam.total_steps is None and self.steps > adam.warmup_steps:
            adam = adam.replace(total_steps=self.steps)
            object.__setattr__(self, "plan", self.plan.model_copy(update={"optimizer": adam}))

    @property
    def num_ranks(self) -> int:
        return self.plan.layout.num_ranks

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """What the run goes on from."""
        return Checkpoint.load(self.resume) if self.resume else None

    @property
    def start(self) -> Position:
        """Where the run goes on from. A loss scale is that of the checkpoint if that was trained with one."""
        if self.checkpoint is None:
            return START
        position = self.checkpoint.position
        if self.plan.precision == self.checkpoint.precision:
            return position
        return replace(position, loss_scale=None, good_steps=0)

    @property
    def num_steps(self) -> int:
        """Steps of this run; inside, they are counted from 0."""
        return self.steps - self.start.step

    @property
    def saves(self) -> bool:
        return self.checkpoint_every is not None

    @property
    def continues_run(self) -> bool:
        """Whether the run goes on in the folder that its checkpoint is in."""
        return self.resume is not None and self.resume.resolve().is_relative_to((self.output / FOLDER).resolve())

    @property
    def traced_from(self) -> int:
        """The first step that is traced."""
        return self.num_steps - min(self.trace_steps, self.num_steps)

    @property
    def data_name(self) -> str:
        """The data as a checkpoint names it."""
        if self.modules is not None and self.modules.data is not None:
            return "data from Python"
        return "pydoc_data.topics" if self.data is None else str(self.data.resolve())

    @property
    def tokens_file(self) -> Path:
        """Where text is put that a tokenizer has turned into tokens."""
        return self.output / TOKENS_FILE

    @property
    def initial_file(self) -> Path:
        """Where the parameters of a user's layers start from."""
        return self.output / INITIAL_FILE

    def feeds(self) -> tuple[Feed, Feed | None]:
        """Microbatches to train on, and to validate on."""
        if self.modules is not None and self.modules.data is not None:
            return self.modules.load_feeds(self.plan, self.start)
        corpus, validation = self.corpora()
        feed = TokenFeed(self.plan, corpus, self.start.sequences)
        return feed, None if validation is None else ValidationFeed(self.plan, validation)

    def network(self, device: "torch.device") -> Network:
        """What computes the layers on a device."""
        if self.modules is not None:
            return self.modules.load_network(self.plan, device)
        return DecoderNetwork(self.plan, device)

    def corpora(self, tokens: Path | None = None) -> tuple[Corpus, Corpus | None]:
        """Text to train on, and to validate on; ``tokens``: the tokens of the text, if they are not yet in place."""
        path = (tokens or self.tokens_file) if self.tokenizer else self.data
        corpus = Corpus.load(path, self.token_width)
        if tokens is not None:
            corpus = replace(corpus, source=f"{self.data or 'the default text'}, by {self.tokenizer}")
        if not self.validation_fraction:
            return corpus, None
        return corpus.split(self.validation_fraction, self.plan.sequence)

    @property
    def token_width(self) -> int:
        """Bytes of a token in a ``.bin`` file."""
        return self.token_bytes or (2 if self.vocab_size <= 2**16 else 4)

    @property
    def vocab_size(self) -> int:
        """Token numbers that the model knows; all that fit in 2 bytes where it does not say."""
        return self.plan.model.vocab_size or 2**16

    @property
    def num_evaluations(self) -> int:
        """Evaluations that the run may have."""
        return 0 if self.evaluate_every is None else self.num_steps // self.evaluate_every + 3

    def memory(self) -> MemoryReport:
        """The plan's memory, with what evaluations need if there are any."""
        return memory(self.plan, evaluates=self.evaluate_every is not None)

    def store_layout(self) -> StoreLayout:
        return StoreLayout(
            self.plan,
            self.num_steps,
            self.num_steps - self.traced_from,
            (self.num_evaluations, EVALUATION_BATCHES),
        )

    def check(self) -> None:
        """Raises SpipeError if anything a user gave cannot work; the tokens of a tokenizer are checked once made."""
        from spipe.runtime.devices import require_device
        from spipe.runtime.layers import check_rotary
        from spipe.runtime.transports import choose_transport

        self._check_numbers()
        self.plan.require_runnable()
        if isinstance(self.plan.model, ModelSpec):
            check_rotary(self.plan.model)
        elif self.modules is None:
            raise SpipeError(
                f"the plan is for a list of layers ({self.plan.model.name}), which only Python has: train it with "
                "spipe.runtime.train(layers, loss, data, plan, ...)"
            )
        hardware = self.plan.hardware
        hosts = hardware.host_of(self.num_ranks - 1) + 1
        if hosts > 1:
            raise SpipeError(
                f"the plan spreads {self.num_ranks} ranks over {hosts} hosts of {hardware.name}; runs use one host: "
                f"make a plan with at most {hardware.ranks_per_host} ranks"
            )
        require_device(hardware.device)
        choose_transport(self.transport, hardware.device, self.num_ranks, False)
        self.check_output()
        self._check_start()
        if self.tokenizer:
            load_tokenizer(self.tokenizer)
        else:
            self.check_data()
        available = self.host_memory_bytes or available_host_memory()
        require_host_memory(self.table_of_bytes(), available)

    def check_output(self) -> None:
        """Raises SpipeError if the run directory holds another run, or is none."""
        if self.output.exists() and not self.output.is_dir():
            raise SpipeError(f"{self.output} is not a directory; give a new directory for the run")
        found = next((name for name in RUN_FILES if (self.output / name).exists()), None)
        if found and not self.overwrite and not self.continues_run:
            raise held(self.output, found)

    def _check_numbers(self) -> None:
        if self.steps < 1:
            raise SpipeError(f"steps = {self.steps} should be at least 1")
        if self.trace_steps < 0:
            raise SpipeError(f"trace_steps = {self.trace_steps} should be at least 0")
        if not self.timeout_s > 0:
            raise SpipeError(f"timeout_s = {self.timeout_s} should be positive")
        for name in ("checkpoint_every", "keep", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpipeError(f"{name} = {value} should be at least 1")
        if self.keep is not None and not self.saves:
            raise SpipeError("keep says how many checkpoints stay, but none are made; give checkpoint_every, too")
        if self.evaluate_every is not None and not self.validation_fraction and not self.has_validation:
            raise SpipeError("evaluate_every needs text to evaluate on; give validation_fraction, too (0.05, say)")
        adam = self.plan.optimizer
        if adam.learning_rate_schedule != "constant" and adam.total_steps is None:
            raise SpipeError(
                f"learning_rate_schedule = {adam.learning_rate_schedule!r}: warmup_steps = {adam.warmup_steps} should "
                f"be below the {self.steps} steps of the run; run more steps, or give total_steps"
            )

    def _check_start(self) -> None:
        if self.model_folder and not self.resume:
            ModelFolder(self.model_folder, check_exportable(self.plan.model))
        if self.checkpoint:
            self.checkpoint.check(self.plan)
            later = find_checkpoints(self.output)[-1:] if self.continues_run else []
            if later and Checkpoint.load(later[0]).position.step > self.start.step:
                raise SpipeError(
                    f"{self.output} has gone on to {later[0].name}; to go on from step {self.start.step} instead give "
                    "another output folder, or remove the later checkpoints"
                )
            if self.num_steps < 1:
                raise SpipeError(
                    f"{self.resume} has {self.start.step} steps behind it, steps = {self.steps} is the total to reach; "
                    f"give at least {self.start.step + 1}"
                )

    def check_data(self, tokens: Path | None = None) -> None:
        """Raises SpipeError unless there are sequences for this model's vocabulary in the data."""
        if self.modules is not None and self.modules.data is not None:
            return
        for corpus in self.corpora(tokens):
            if corpus is not None:
                if self.token_bytes is None:
                    corpus.check_width()
                corpus.check(self.plan.sequence, self.vocab_size)

    def table_of_bytes(self) -> dict[str, int]:
        """Host memory of the run, itemised."""
        items = dict(self.memory().hosts[0])
        region = self.store_layout().table_of_bytes()
        items["mailboxes"] = region["mailboxes"]
        items["flags and times"] = region["flags and times"]
        items[PROCESSES] = items[PROCESSES] or PROCESS_BYTES * self.num_ranks
        return items
