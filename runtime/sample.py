"""Text from a trained model: forward passes in fp32, every weight read from its file when its layer is due."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from spipe.errors import SpipeError, unknown
from spipe.model import from_huggingface
from spipe.runtime import layers
from spipe.runtime.checkpoint import find_checkpoint
from spipe.runtime.data import VOCABULARY, load_tokenizer
from spipe.runtime.huggingface import CONFIG, ModelFolder, parameter_name

DEVICES = ("cpu", "cuda")


class Sampler:
    """A model folder, ready to continue token sequences.

    Keys and values of tokens that it has seen are kept, so that the next token takes one pass over the weights with one
    token; a text that does not go on from the last one starts anew.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.model = from_huggingface(folder)
        self.weights = ModelFolder(folder, self.model)
        self.seen: list[int] = []
        self.past: list[layers.KeysAndValues] = []

    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits (V,) of what follows some tokens."""
        if not self.past or tokens[:-1] != self.seen:
            self.seen, self.past = [], [layers.KeysAndValues() for _ in range(self.model.num_layers)]
        new = tokens[len(self.seen) :]
        logits = self.logits(torch.tensor(new), len(self.seen), self.past)[-1]
        self.seen = list(tokens)
        return logits

    def logits(
        self, tokens: torch.Tensor, first: int = 0, past: Sequence[layers.KeysAndValues] | None = None
    ) -> torch.Tensor:
        """Logits (s, V) in fp32, on the CPU, for tokens (s,); ``first``: tokens that are in ``past``."""
        model, tied = self.model, self.model.tied_parameters()
        stop = first + len(tokens)
        rotary = layers.RotaryTable.build(model, stop, torch.float32, self.device).part(first, stop)
        x = tokens[None].to(self.device)
        with torch.no_grad():
            for layer in range(model.num_total_layers):
                kind = model.layer_kind(layer)
                parameters = {}
                for name in model.parameter_shapes(kind):
                    owner = tied[0] if tied and (layer, name) == tied[1] else (layer, name)
                    key = parameter_name(model, *owner)
                    parameters[name] = self.weights.files[key].view(key).to(self.device).float()
                if kind == "embedding":
                    x = layers.embedding(parameters, x)
                elif kind == "block":
                    x = layers.block(parameters, x, model, rotary, past=past[layer - 1] if past else None)
                else:
                    x = layers.logits(parameters, x, model)
        return x[0].cpu()


def generate(
    source: Path, prompt: str, max_tokens: int, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0,
    device: str = "cpu",
) -> Iterator[str]:  # fmt: skip
    """The text that follows ``prompt``, piece by piece; the same seed gives the same text.

    Args:
        source: a run folder, a checkpoint, or a model folder. With a ``tokenizer.json`` in it tokens are that
            tokenizer's, otherwise bytes.
        temperature: 0 for the likeliest token each time.
        top_k: only among so many of the likeliest.
        device: ``cpu`` or ``cuda``, where layers are computed one by one.

    Raises:
        SpipeError: if there is no model, nothing to go on from, or no such device.
    """
    if not temperature >= 0:
        raise SpipeError(f"temperature = {temperature} should be at least 0")
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise SpipeError("device = cuda, but PyTorch finds no CUDA device here; use cpu")
    has_model = (source / CONFIG).is_file() and not (source / "plan.json").is_file()
    folder = source if has_model else find_checkpoint(source)
    if not (folder / CONFIG).is_file():
        raise SpipeError(f"{folder}: no {CONFIG}; text comes from built-in models, not from a list of layers")
    sampler = Sampler(folder, device)
    vocab_size = sampler.model.vocab_size
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        tokens, decode = list(tokenizer.encode(prompt).ids), tokenizer.decode
    elif vocab_size < VOCABULARY:
        raise SpipeError(f"{folder}: no tokenizer.json, and a vocabulary of {vocab_size} does not hold all bytes")
    else:
        tokens = list(prompt.encode())

        def decode(numbers: list[int]) -> str:
            return bytes(number for number in numbers if number < VOCABULARY).decode(errors="replace")

    if not tokens:
        raise SpipeError("the prompt is empty; give at least one character to go on from")
    if max(tokens) >= vocab_size:
        raise SpipeError(f"{folder}: token {max(tokens)} of the prompt, but the vocabulary has {vocab_size} entries")
    generator = torch.Generator().manual_seed(seed)

    def pieces() -> Iterator[str]:
        longest = sampler.model.max_sequence or 1 << 62
        new: list[int] = []
        shown = ""
        for _ in range(max_tokens):
            logits = sampler.next_logits((tokens + new)[-longest:])
            new.append(_choose(logits, temperature, top_k, generator))
            text = decode(new)
            if not text.endswith("\ufffd"):  # the character is not yet whole
                yield text[len(shown) :]
                shown = text
        yield decode(new)[len(shown) :]

    return pieces()


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
