"""Writing checkpoints, by all ranks while training goes on.

Every rank writes the stages whose backward it runs, each as its last step is committed. A bucket's next STEP waits
until the bucket is written, and nothing else waits: the state is that of one step, whatever the others do meanwhile,
and no copy is held. All is written into a folder with another name and made durable; the renaming is what counts.
"""

import json
import math
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spipe
from spipe._native import AbortedError
from spipe.model import ModelSpec
from spipe.runtime import huggingface
from spipe.runtime.checkpoint import (
    FOLDER,
    FORMAT,
    MODEL_FOLDER,
    STATE,
    STATES,
    Position,
    find_checkpoints,
    original_config,
)
from spipe.runtime.region import DTYPES
from spipe.runtime.tensor_file import TensorWriter, sync_folder, write_text

if TYPE_CHECKING:
    from spipe.runtime.job import Job
    from spipe.runtime.settlement import MasterState
    from spipe.runtime.store import Parameter, Store

Bucket = tuple[int, int]
"""Stage number and bucket."""


class Saver:
    """Writes a rank's part of every checkpoint, in a thread of its own; rank 0 completes them."""

    def __init__(
        self, job: "Job", rank: int, store: "Store", masters: "MasterState", report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.job, self.rank, self.store, self.masters, self.report = job, rank, store, masters, report
        self.root = job.output / FOLDER
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unwritten: set[Bucket] = set()
        self._changed = threading.Condition()
        self._count = 0
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        if rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self.root.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._thread.start()

    def begin(self, position: Position, buckets: dict[Bucket, list["Parameter"]]) -> None:
        """A checkpoint is due: the state after ``position.step`` steps. Every rank calls this before its COMMITs."""
        self._tasks.put(lambda: self._open(position, buckets))
        if not buckets:
            self._tasks.put(self._complete)

    def committed(self, bucket: Bucket) -> None:
        """The bucket has the state of the checkpoint that was begun last; it will keep it until it is written."""
        with self._changed:
            self._unwritten.add(bucket)
        self._tasks.put(lambda: self._write(bucket))

    def wait_written(self, bucket: Bucket) -> None:
        """Return once the bucket may change. Raises AbortedError if the run has to stop."""
        with self._changed:
            while bucket in self._unwritten:
                self._changed.wait(0.5)
                if self.store.flags.get(self.store.layout.abort):
                    raise AbortedError

    def finish(self) -> None:
        """Wait until all that was begun is complete (or the run was aborted)."""
        self._tasks.put(None)
        self._thread.join()

    # In the thread

    def _work(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                task()
        except AbortedError:
            pass
        except Exception as error:
            reason = f"{error.strerror} ({error.filename or self.root})" if isinstance(error, OSError) else str(error)
            self.store.write_error(
                self.rank, f"rank {self.rank}, checkpoint: {reason}; the checkpoints before it are whole"
            )
            self.store.flags.abort(self.store.layout.abort)

    def _open(self, position: Position, buckets: dict[Bucket, list["Parameter"]]) -> None:
        self._began_s = time.monotonic()
        self._position, self._buckets, self._left = position, buckets, len(buckets)
        self._folder = self.root / f".step-{position.step:08d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writers: list[TensorWriter] = []
        frozen, trained = self.masters.frozen, [p for bucket in buckets.values() for p in bucket]
        if not buckets and not frozen:
            return
        dtype, fp32 = DTYPES[self.job.plan.precision], DTYPES["fp32"]
        in_order = sorted((*trained, *frozen), key=lambda p: (p.layer, p.first))
        weights = {self._name(p): (dtype, p.shape) for p in in_order}
        in_order = sorted(trained, key=lambda p: p.first)
        states = {f"{kind}.{self._name(p)}": (fp32, p.shape) for kind in STATES for p in in_order}
        self._writers = [
            TensorWriter(self._folder / _file_name("model", self.rank, self.job.num_ranks), weights),
            TensorWriter(self._folder / _file_name("optimizer", self.rank, self.job.num_ranks), states),
        ]
        for parameter in frozen:
            self._writers[0].write(self._name(parameter), self.store.weight(parameter))

    def _name(self, parameter: "Parameter") -> str:
        return huggingface.parameter_name(self.job.plan.model, parameter.layer, parameter.name)

    def _write(self, bucket: Bucket) -> None:
        model_file, state_file = self._writers
        for parameter in self._buckets[bucket]:
            name = self._name(parameter)
            model_file.write(name, self.masters.weight_of(parameter, self.store).cpu())
            for kind, tensor in zip(STATES, self.masters.of(parameter), strict=True):
                state_file.write(f"{kind}.{name}", tensor.cpu())
        if self.job.hooks.kill_in_checkpoint == (self.rank, self._position.step):
            os.kill(os.getpid(), signal.SIGKILL)
        with self._changed:
            self._unwritten.discard(bucket)
            self._changed.notify_all()
        self._left -= 1
        if not self._left:
            self._complete()

    def _complete(self) -> None:
        for writer in self._writers:
            writer.close()
        self._count += 1
        flags, first = self.store.flags, self.store.layout.arrivals["saved"]
        flags.set(first + self.rank, self._count)
        if self.rank:
            return
        num_ranks = self.job.num_ranks
        flags.wait_many(
            list(range(first, first + num_ranks)), [self._count] * num_ranks, math.inf, self.store.layout.abort
        )
        self._write_description()
        final = self.root / self._folder.name.removeprefix(".")
        if final.exists():  # of an earlier run that got further and was continued from before
            _remove(final)
        os.rename(self._folder, final)
        sync_folder(self.root)
        if self.job.keep is not None:
            for old in find_checkpoints(self.job.output)[: -self.job.keep]:
                if old != final:
                    _remove(old)
        seconds = time.monotonic() - self._began_s
        size = sum(path.stat().st_size for path in final.iterdir())
        self.report(
            {"message": f"checkpoint of step {self._position.step}: {final}, {size / 1e6:.1f} MB, {seconds:.2f} s"}
        )

    def _write_description(self) -> None:
        """What does not come from one rank alone; ``state.json`` is the last file."""
        plan, folder = self.job.plan, self._folder
        shapes = huggingface.parameter_shapes(plan.model)
        rank_of = {layer: stage.rank for stage in plan.layout.backward for layer in range(stage.first, stage.stop)}
        weight_map = {
            name: _file_name("model", rank_of[layer], self.job.num_ranks)
            for layer in range(plan.model.num_total_layers)
            for short in plan.model.parameter_shapes(plan.model.layer_kind(layer))
            if (name := huggingface.parameter_name(plan.model, layer, short)) in shapes
        }
        huggingface.write_index(folder, shapes, DTYPES[plan.precision], weight_map)
        if isinstance(plan.model, ModelSpec):
            config = huggingface.config_of(plan.model, plan.precision, original_config(self.job.output))
            write_text(folder / huggingface.CONFIG, json.dumps(config, indent=2) + "\n")
        huggingface.copy_extras(self.job.output / MODEL_FOLDER, folder)
        state = {
            "format": FORMAT,
            **asdict(self._position),
            "learning_rate": plan.optimizer.learning_rate_of(self._position.num_updates),
            "precision": plan.precision,
            "sequence": plan.sequence,
            "global_batch": plan.global_batch,
            "microbatch_size": plan.microbatch_size,
            "seed": plan.seed,
            "data": self.job.data_name,
            "plan": plan.digest(),
            "model": plan.model.model_dump(mode="json"),
            "spipe": spipe.__version__,
        }
        write_text(folder / STATE, json.dumps(state, indent=1) + "\n")
        sync_folder(folder)


def _file_name(kind: str, rank: int, num_ranks: int) -> str:
    return f"{kind}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that no half of it can be taken for one."""
    hidden = folder.with_name(f".{folder.name}-removed")
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
