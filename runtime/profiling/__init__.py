"""Measure a machine: the topology, copies, the host's memory and optimizer, layers. Start with ``profile``."""

import datetime
import gc
from collections.abc import Callable, Sequence

import torch

from spipe.errors import SpipeError
from spipe.model import ModelSpec
from spipe.profile import Profile, Sample
from spipe.runtime.devices import require_device, start_autograd
from spipe.runtime.profiling import copies, host, layers, machine
from spipe.runtime.profiling.layers import Shape
from spipe.runtime.profiling.process import process_bytes

Progress = Callable[[int, int, str], None]
Task = tuple[str, Callable[[], list[Sample]]]


def profile(
    shapes: Sequence[Shape],
    *,
    device: str | None = None,
    threads: int = 1,
    effort: float = 1.0,
    progress: Progress = lambda done, total, what: None,
) -> Profile:
    """Measure this machine; takes one to two minutes with few shapes.

    Args:
        shapes: whose layers are measured.
        device: ``cuda`` or ``cpu``; None: ``cuda`` where there is one.
        threads: device ``cpu``: cores that a rank computes with.
        effort: time spent on each measurement, against the usual.
        progress: called before each part with the number of parts done, of all, and what comes next.

    Raises:
        SpipeError: if there is no such device, or nothing to measure.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    if not shapes:
        raise SpipeError("a profile needs the shape of at least one model's layers")
    for model, size, sequence, _ in shapes:
        model.check_sequence(sequence)
        if size < 1:
            raise SpipeError(f"microbatch_size = {size} should be at least 1")
    found = Profile({**machine.facts(device), "compute_threads": threads, "date": datetime.date.today().isoformat()})
    start_autograd(torch.device(device))
    before = torch.get_num_threads()
    tasks = _tasks(shapes, device, threads, effort)
    try:
        for number, (what, task) in enumerate(tasks):
            progress(number, len(tasks), what)
            _measure(found, what, task)
    finally:
        torch.set_num_threads(before)
    found.machine["load"] = machine.load()
    try:
        found.machine["process_bytes"] = process_bytes(device)
    except RuntimeError as error:
        found.notes.append(f"memory of a rank's process: not measured ({error})")
    progress(len(tasks), len(tasks), "done")
    return found


def _tasks(shapes: Sequence[Shape], device: str, threads: int, effort: float) -> list[Task]:
    dtype, most = "bf16" if device == "cuda" else "fp32", host.optimizer_threads(device)
    tasks: list[Task] = [("memory bandwidth of the host", lambda: host.triad(effort))]
    tasks.append(("optimizer by threads", lambda: host.adam(dtype, most, effort)))
    if device == "cuda":
        tasks.append(("optimizer beside copies", lambda: copies.adam_beside_copies(dtype, most, effort)))
        tasks.append(("page-locking", lambda: copies.page_lock(effort)))
        tasks.append(("copies between host and GPU", lambda: copies.host_copies(effort)))
        tasks.append(("copies between GPUs", lambda: copies.peer_copies(effort)))
        tasks.append(("memory of the GPU", lambda: copies.device_copy(effort)))
    else:
        tasks.append(("copies in memory", lambda: host.memory_copies(effort)))
    tasks.append(("host issue", lambda: layers.issue(device)))
    dtypes = sorted({*(shape[3] for shape in shapes), *(("bf16", "fp16", "fp32") if device == "cuda" else ("fp32",))})
    for each in dtypes:
        tasks.append((f"matrix products, {each}", lambda each=each: layers.matmul(device, each, threads, effort)))  # type: ignore[misc]  # a lambda with defaults
    for shape in shapes:
        what = f"layers of {shape[0].name}, {shape[1]} x {shape[2]} {shape[3]}"
        tasks.append((what, lambda shape=shape: layers.layers(shape, device, threads, effort)))  # type: ignore[misc]  # as above
    return tasks


def _measure(found: Profile, what: str, task: Callable[[], list[Sample]]) -> None:
    """One part; what runs out of memory, or is refused by the driver, becomes a note."""
    try:
        found.samples += task()
    except (RuntimeError, MemoryError, OSError) as error:
        found.notes.append(f"{what}: not measured ({str(error).splitlines()[0]})")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shapes_of(
    models: Sequence[ModelSpec], microbatch_sizes: Sequence[int], sequences: Sequence[int], dtypes: Sequence[str]
) -> list[Shape]:
    """All combinations."""
    return [(m, b, s, d) for m in models for d in dtypes for s in sequences for b in microbatch_sizes]


__all__ = ["Profile", "Sample", "profile", "shapes_of"]
