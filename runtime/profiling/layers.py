"""Layers on their own: forward, recompute and backward of each kind, matrix products, and what issuing an op costs.

A round of a layer is what a step does with it: forward without autograd, forward with it, backward into gradients that
are there. Rounds follow each other without a pause, so that a device has the clocks of a long run. A layer is what the
device needs for it: on CUDA all but the two ends of a model are recorded and replayed, as in a run, so that a host that
issues kernels more slowly than they run has no part in it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
Rounds = list[tuple[float, float, float]]
"""Seconds of the three passes."""
PASSES = ("forward", "recompute", "backward")
_WARM_S = {"cuda": 0.5, "cpu": 0.03}
_ROUNDS_S = {"cuda": 1.2, "cpu": 0.6}
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200
_IN_A_ROW = 6  # rounds that the driver's queue has room for, of less than a hundred launches each


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
        layer = _build(model, kind, size, sequence, dtype, device)
        if device == "cpu":
            timed = _cpu_round(_clock(threads))
        else:
            timed = _cuda_rounds(_one_by_one(layer) if kind in ("embedding", "head") else _recorded(layer))
        rounds = _rounds(layer, timed, device, effort)
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


def _rounds(layer: _Layer, timed: Callable[[_Layer, int], Rounds], device: str, effort: float) -> Rounds:
    """Seconds of forward, recompute and backward in every round, once the device is warm."""
    begin = time.perf_counter()
    timed(layer, 2)
    once_s = timed(layer, 1)[-1]
    while time.perf_counter() - begin < _WARM_S[device] * effort:
        once_s = timed(layer, 1)[-1]
    total_s = max(sum(once_s), 1e-6)
    return timed(layer, min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_ROUNDS_S[device] * effort / total_s))))


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


Pass = Callable[[], object]


def _one_by_one(layer: _Layer) -> tuple[Pass, Pass, Pass]:
    """The passes of a layer, to be called in this order."""
    outputs: list[torch.Tensor] = []
    return layer.forward, lambda: outputs.append(layer.recompute()), lambda: layer.backward(outputs.pop())


def _recorded(layer: _Layer) -> tuple[Pass, Pass, Pass]:
    """The same, each recorded as a CUDA graph."""
    passes, pool, stream = _one_by_one(layer), cuda.graph_pool_handle(), cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):  # libraries must have been used on it before
        for _ in range(2):
            for work in passes:
                work()

    def record(work: Pass) -> Pass:
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=pool, stream=stream):
            work()
        return graph.replay  # type: ignore[no-any-return]  # torch's

    first, second, third = map(record, passes)
    return first, second, third


def _cuda_rounds(passes: tuple[Pass, Pass, Pass]) -> Callable[[_Layer, int], Rounds]:
    """Rounds timed by events of the stream."""

    def run(layer: _Layer, count: int) -> Rounds:
        rows = []
        for _ in range(count):
            row = [cuda.Event(enable_timing=True) for _ in range(1 + len(passes))]
            row[0].record()
            for work, event in zip(passes, row[1:], strict=True):
                work()
                event.record()
            rows.append(row)
        cuda.synchronize()
        return [(1e-3 * a.elapsed_time(b), 1e-3 * b.elapsed_time(c), 1e-3 * c.elapsed_time(d)) for a, b, c, d in rows]

    return run


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
    """What the host does for one op: on CUDA issuing each pass of a block, and replaying one that was recorded; else
    handing over to a waiting thread."""
    if device == "cpu":
        return [Sample("issue", {"device": device}, _handovers())]
    one_by_one = zip(PASSES, zip(*_issue_rounds(device), strict=True), strict=True)
    return [
        *(Sample("issue", {"device": device, "pass_name": name}, seconds) for name, seconds in one_by_one),
        Sample("issue", {"device": device, "replayed": True}, _replay_times(device)),
    ]


def _small_block(device: str) -> _Layer:
    """A block with next to no work."""
    model = ModelSpec(name="issue", num_layers=1, hidden_size=64, ffn_size=64, num_heads=1, vocab_size=64)
    return _build(model, "block", 1, 16, "bf16", device)


def _issue_rounds(device: str, count: int = 10) -> Rounds:
    """Seconds until the passes of a small block return, some rounds in a row: the first is slower."""
    layer = _small_block(device)
    once = _cpu_round(time.perf_counter)  # the host's clock, and nothing waits for the device but at the end of a round
    once(layer, 1)
    found = []
    for _ in range(count):
        if device == "cuda":
            cuda.synchronize()
        found += once(layer, 1 + _IN_A_ROW)[1:]
    return found


def _replay_times(device: str, count: int = 30) -> tuple[float, ...]:
    """Seconds in which the host replays a recorded pass: copies in and out, and an event at both ends, included."""
    layer = _small_block(device)
    replay, _, _ = _recorded(layer)
    target, times = torch.empty_like(layer.x), []
    for _ in range(count):
        begin = time.perf_counter()
        cuda.Event(enable_timing=True).record()
        target.copy_(layer.x.detach())
        replay()
        target.clone()
        cuda.Event(enable_timing=True).record()
        times.append(time.perf_counter() - begin)
        if not len(times) % _IN_A_ROW:
            cuda.synchronize()
    return tuple(times[_IN_A_ROW:])


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
