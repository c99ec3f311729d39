"""Layers on their own: forward, recompute and backward of each kind, matrix products, and what issuing an op costs.

A round of a layer is what a step does with it: forward without autograd, forward with it, backward into gradients that
are there. Rounds follow each other without a pause, so that a device has the clocks of a long run. A layer is what the
device needs for it: where the host issues its kernels more slowly than they run, it gets a lead.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from spipe import _native
from spipe.hardware import MeasuredLayer
from spipe.model import LayerKind, ModelSpec
from spipe.profile import Sample
from spipe.runtime import layers as model_layers
from spipe.runtime.profiling.repeat import repeat, synchronized
from spipe.runtime.region import DTYPES

cuda: Any = torch.cuda
Shape = tuple[ModelSpec, int, int, str]
"""Model, sequences per microbatch, tokens per sequence, dtype."""
PASSES = ("forward", "recompute", "backward")
_WARM_S = {"cuda": 0.5, "cpu": 0.03}
_ROUNDS_S = {"cuda": 1.2, "cpu": 0.6}
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200
_LED = 6  # rounds that are issued ahead, of less than a hundred launches each
_LATE = 0.7  # of a round's time: a host that takes longer to issue it is late now and then
_LEAD_SIZE = 8192


@dataclass(frozen=True)
class _Layer:
    """A layer with its weights and gradients on a device, and what goes in and comes back."""

    run: Callable[[torch.Tensor], torch.Tensor]
    leaves: list[torch.Tensor]
    gradients: list[torch.Tensor]
    x: torch.Tensor
    dy: torch.Tensor

    def forward(self) -> None:
        with torch.no_grad():
            self.run(self.x)

    def recompute(self) -> torch.Tensor:
        with torch.enable_grad():
            return self.run(self.x)

    def backward(self, y: torch.Tensor) -> None:
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            leaf.grad = gradient
        torch.autograd.backward(y, self.dy)
        self.x.grad = None


def layers(shape: Shape, device: str, threads: int, effort: float) -> list[Sample]:
    """All passes of all layer kinds of a model for one microbatch."""
    model, size, sequence, dtype = shape
    torch.set_num_threads(threads)
    found = []
    for kind in dict.fromkeys((*model.layer_kinds, "block")):
        rounds = _rounds(_build(model, kind, size, sequence, dtype, device), device, threads, effort)
        about = {
            "layer_kind": kind, "microbatch_size": size, "sequence": sequence, "dtype": dtype,
            "threads": threads, "head_dim": model.head_dim, **MeasuredLayer.shape_of(model, kind),
        }  # fmt: skip
        for name, seconds in zip(PASSES, zip(*rounds, strict=True), strict=True):
            found.append(Sample("layer", {**about, "pass_name": name}, seconds))
    return found


def _build(model: ModelSpec, kind: LayerKind, size: int, sequence: int, dtype_name: str, device: str) -> _Layer:
    dtype, generator = DTYPES[dtype_name], torch.Generator(device).manual_seed(0)

    def random(*shape: int, std: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(std).to(dtype)

    parameters = {
        name: (random(*shape) if len(shape) > 1 else torch.ones(shape, device=device, dtype=dtype)).requires_grad_()
        for name, shape in model.parameter_shapes(kind).items()
    }
    leaves = list(parameters.values())
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    tokens = torch.randint(0, model.vocab_size, (size, sequence), generator=generator, device=device)
    hidden = random(size, sequence, model.hidden_size, std=1.0)
    if kind == "embedding":
        return _Layer(lambda x: model_layers.embedding(parameters, x), leaves, gradients, tokens, hidden)
    x = hidden.requires_grad_()
    if kind == "head":
        one = torch.ones((), device=device)  # the loss of logits is fp32
        return _Layer(lambda x: model_layers.head(parameters, x, tokens, model), leaves, gradients, x, one)
    dy = random(size, sequence, model.hidden_size, std=1e-3)
    if kind == "mlp":
        return _Layer(lambda x: model_layers.feed_forward(parameters, x, model), leaves, gradients, x, dy)
    rotary = model_layers.RotaryTable.build(model, sequence, dtype, torch.device(device))
    part = model_layers.block if kind == "block" else model_layers.attention
    return _Layer(lambda x: part(parameters, x, model, rotary), leaves, gradients, x, dy)


def _rounds(layer: _Layer, device: str, threads: int, effort: float) -> list[tuple[float, float, float]]:
    """Seconds of forward, recompute and backward in every round. With one thread on the CPU: processor time."""
    timed: Callable[[_Layer, int], Rounds] = _CudaRounds(layer) if device == "cuda" else _cpu_round(_clock(threads))
    begin = time.perf_counter()
    timed(layer, 2)
    once_s = timed(layer, 1)[-1]
    while time.perf_counter() - begin < _WARM_S[device] * effort:
        once_s = timed(layer, 1)[-1]
    total_s = max(sum(once_s), 1e-6)
    return timed(layer, min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_ROUNDS_S[device] * effort / total_s))))


Rounds = list[tuple[float, float, float]]


def _clock(threads: int) -> Callable[[], float]:
    """Processor time, which other programs do not disturb, where one thread does the work."""
    return time.thread_time if threads == 1 else time.perf_counter


def _cpu_round(clock: Callable[[], float]) -> Callable[[_Layer, int], Rounds]:
    def run(layer: _Layer, count: int) -> Rounds:
        found = []
        for _ in range(count):
            times = [clock()]
            layer.forward()
            times.append(clock())
            y = layer.recompute()
            times.append(clock())
            layer.backward(y)
            times.append(clock())
            del y
            found.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        return found

    return run


class _CudaRounds:
    """Rounds in a row, timed by events of the stream.

    Where issuing a round takes about as long as the round, matrix products keep the device busy until some rounds are
    issued: few enough for the driver's queue.
    """

    def __init__(self, layer: _Layer) -> None:
        self._square = torch.randn(_LEAD_SIZE, _LEAD_SIZE, device=layer.x.device).to(torch.bfloat16)
        self._product = torch.empty_like(self._square)
        self._lead(2)
        lead_s = repeat(synchronized(lambda: self._lead(1)), 0.0)
        self._issue_s, self._lead_s = self._issue_time(layer), median(lead_s)
        self._leads = True
        self._leads = self._issue_s > _LATE * sum(self(layer, _LED)[-1])

    def _issue_time(self, layer: _Layer) -> float:
        """Seconds until a round is issued, the second time."""
        for _ in range(2):
            cuda.synchronize()
            begin = time.perf_counter()
            self._issue(layer)
            issue_s = time.perf_counter() - begin
        cuda.synchronize()
        return issue_s

    def _lead(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._square, self._square, out=self._product)

    def _issue(self, layer: _Layer) -> list[Any]:
        four = [cuda.Event(enable_timing=True) for _ in range(4)]
        four[0].record()
        layer.forward()
        four[1].record()
        y = layer.recompute()
        four[2].record()
        layer.backward(y)
        four[3].record()
        return four

    def __call__(self, layer: _Layer, count: int) -> Rounds:
        events = []
        for number in range(count):
            if self._leads and number % _LED == 0:
                self._lead(math.ceil(2 * _LED * self._issue_s / self._lead_s))
            events.append(self._issue(layer))
        cuda.synchronize()
        return [(1e-3 * a.elapsed_time(b), 1e-3 * b.elapsed_time(c), 1e-3 * c.elapsed_time(d)) for a, b, c, d in events]


def matmul(device: str, dtype: str, threads: int, effort: float) -> list[Sample]:
    """A large square matrix product."""
    torch.set_num_threads(threads)
    size = 8192 if device == "cuda" else 768
    square = torch.randn(size, size, device=device).to(DTYPES[dtype])
    if device == "cuda":
        eight = repeat(synchronized(lambda: square @ square, 8), effort, warm_s=0.5)
        times = tuple(seconds / 8 for seconds in eight)
    else:
        times = repeat(lambda: square @ square, 0.3 * effort, clock=_clock(threads))
    return [Sample("matmul", {"dtype": dtype, "flops": 2 * size**3, "threads": threads}, times)]


def issue(device: str) -> list[Sample]:
    """What the host does for one op: on CUDA issuing each pass of a block, else handing over to a waiting thread."""
    if device == "cpu":
        return [Sample("issue", {"device": device}, _handovers())]
    return [
        Sample("issue", {"device": device, "pass_name": name}, seconds)
        for name, seconds in zip(PASSES, zip(*_issue_rounds(device), strict=True), strict=True)
    ]


def _issue_rounds(device: str, count: int = 10) -> Rounds:
    """Seconds until the passes of a block with next to no work return, some rounds in a row: the first is slower."""
    model = ModelSpec(name="issue", num_layers=1, hidden_size=64, ffn_size=64, num_heads=1, vocab_size=64)
    layer = _build(model, "block", 1, 16, "bf16", device)
    once = _cpu_round(time.perf_counter)  # the host's clock, and nothing waits for the device but at the end of a round
    once(layer, 1)
    found = []
    for _ in range(count):
        if device == "cuda":
            cuda.synchronize()
        found += once(layer, 1 + _LED)[1:]
    return found


def _handovers(count: int = 200) -> tuple[float, ...]:
    """Seconds from setting a flag to the waiting thread's answer, one way."""
    memory = torch.zeros(2 * _native.Flags.BYTES_PER_FLAG + 64, dtype=torch.uint8)
    flags = _native.Flags(-(-memory.data_ptr() // 64) * 64, 2)

    def answer() -> None:
        for turn in range(1, count + 1):
            flags.wait(0, turn, 10.0)
            flags.set(1, turn)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for turn in range(1, count + 1):
        time.sleep(0.0005)  # the other thread is asleep when the flag is set
        begin = time.perf_counter()
        flags.set(0, turn)
        flags.wait(1, turn, 10.0)
        times.append((time.perf_counter() - begin) / 2)
    thread.join()
    return tuple(times)
