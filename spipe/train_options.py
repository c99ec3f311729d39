"""The options of a training run, said once: for `spipe run`, for `python -m spipe.runtime` and as keys of train.toml.

What they mean together is checked by ``spipe.train_config.TrainConfig``, which has a field of each name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "path", "count", "count or 0", "number", "positive", "flag"]


@dataclass(frozen=True)
class TrainOption:
    """One option.

    Attributes:
        name: as a key of train.toml.
        kind: what its value is.
        metavar: how help calls the value.
        help: one or two sentences.
        flag: how it is written, if not as its name with dashes.
        short: a letter for it.
    """

    name: str
    kind: Kind
    metavar: str
    help: str
    flag: str = ""
    short: str = ""

    @property
    def spelling(self) -> str:
        """As on the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    def parse(self, text: object) -> object:
        """The value of a text. Raises ValueError saying what is wrong."""
        return _PARSERS[self.kind](text)


def whole_number(text: object, minimum: int = 1) -> int:
    """Raises ValueError, naming the value and what is allowed."""
    try:
        number = int(str(text))
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise ValueError(f"{text} is not a whole number of at least {minimum}")
    return number


def positive_number(text: object) -> float:
    """Raises ValueError unless it is a finite number above 0."""
    number = _float(text)
    if not 0 < number < math.inf:
        kind = "finite number" if number == math.inf else "number"
        raise ValueError(f"{text} is not a {kind} above 0")
    return number


def _number(text: object) -> float:
    number = _float(text)
    if math.isnan(number) and str(text).lower() != "nan":
        raise ValueError(f"{text} is not a number")
    return number


def _float(text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        return math.nan


_PARSERS: dict[Kind, Callable[[object], object]] = {
    "text": str,
    "path": str,
    "count": whole_number,
    "count or 0": lambda text: whole_number(text, 0),
    "number": _number,
    "positive": positive_number,
    "flag": bool,
}

TRAIN_OPTIONS = (
    TrainOption("steps", "count", "K", "Training steps, those before a checkpoint included."),
    TrainOption("output", "path", "RUNDIR", "New folder for the run.", short="-o"),
    TrainOption(
        "data",
        "path",
        "PATH",
        "Token file (.bin, .npy); any other file, whose bytes are used as they are; or a folder, whose text files "
        "(UTF-8) are used; default: Python's documentation.",
    ),
    TrainOption("tokenizer", "path", "FILE", "Hugging Face tokenizer.json for text; default: bytes."),
    TrainOption("token_bytes", "count", "2|4", "Bytes of a token in a .bin file; default: by the vocabulary."),
    TrainOption("validation_fraction", "number", "X", "Part of the data, at its end, for evaluation only."),
    TrainOption("evaluate_every", "count", "K", "Evaluate every K steps, and after the last."),
    TrainOption(
        "checkpoint_every",
        "count",
        "K",
        "Save every K steps, after the last one, and on SIGTERM, SIGINT and SIGUSR1, which then end the run.",
    ),
    TrainOption("keep", "count", "N", "Keep the newest N checkpoints; default: all."),
    TrainOption(
        "resume",
        "text",
        "DIR|auto",
        "Go on from a checkpoint, or from the newest one of a run folder; auto: of RUNDIR, if it has one.",
    ),
    TrainOption(
        "model_folder", "path", "FOLDER", "Hugging Face model folder to start from; default: random.", flag="--from"
    ),
    TrainOption("learning_rate", "number", "X", "Instead of the plan's, as all below."),
    TrainOption("learning_rate_schedule", "text", "NAME", "constant, linear, cosine or wsd, after the warm-up."),
    TrainOption("warmup_steps", "count or 0", "K", "Updates over which the learning rate rises."),
    TrainOption("total_steps", "count", "K", "Where the schedule ends; default: --steps."),
    TrainOption("decay_steps", "count", "K", "Of wsd; default: a tenth of all."),
    TrainOption("minimum_learning_rate", "number", "X", "Where the schedule ends."),
    TrainOption("beta1", "number", "X", "Of AdamW."),
    TrainOption("beta2", "number", "X", "Of AdamW."),
    TrainOption("epsilon", "number", "X", "Of AdamW."),
    TrainOption("weight_decay", "number", "X", "Of matrices; norms and biases have none."),
    TrainOption("max_norm", "number", "X", "Clip the gradients' global norm to this."),
    TrainOption(
        "gradient_precision", "text", "TYPE", "Gradients add up in fp32, bf16 or fp16; default: as the plan has it."
    ),
    TrainOption("dropout", "number", "X", "Of what attention and feed-forward add; exact under recompute."),
    TrainOption("z_loss", "number", "X", "Times the squared log-sum-exp of the logits, added to the loss (1e-4, say)."),
    TrainOption("device", "text", "cpu|cuda", "Refuse to run unless the plan is for this device."),
    TrainOption("transport", "text", "NAME", "auto, host, peer or nccl (CUDA), gloo (CPU)."),
    TrainOption("timeout_s", "positive", "S", "Give up if nothing completes for so long; default: 600."),
    TrainOption("trace_steps", "count", "N", "How many of the last steps go into trace.json; default: 25."),
    TrainOption("host_memory_gib", "positive", "GIB", "Memory of this machine, if it shows less than it has."),
    TrainOption(
        "gpu_memory_limit_gib",
        "positive",
        "GIB",
        "Of each GPU; refused if the plan needs more.",
        flag="--gpu-memory-limit",
    ),
    TrainOption("deterministic", "flag", "", "On GPUs, only kernels that repeat their result."),
    TrainOption("compile_layers", "flag", "", "On GPUs, blocks go through torch.compile.", flag="--compile"),
    TrainOption("cuda_graphs", "flag", "", "On GPUs, blocks are recorded and replayed.", flag="--cuda-graphs"),
    TrainOption("tensorboard", "flag", "", "Also write RUNDIR/tensorboard."),
    TrainOption("wandb", "text", "PROJECT", "Also send metrics to this project of Weights & Biases."),
)
