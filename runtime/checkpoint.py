"""Checkpoints: what they are, and how they are found, checked, read and exported. ``spipe.runtime.saver`` writes them.

A checkpoint is a folder ``step-00000050``: a model folder as transformers reads it (``config.json``, weights by name),
the masters and moments by the same names, and ``state.json``. Nothing in it depends on layout, schedule or device.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from spipe.errors import SpipeError
from spipe.layer_list import Model
from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime import huggingface
from spipe.runtime.tensor_file import TensorFile
from spipe.units import read_table

if TYPE_CHECKING:
    from spipe.runtime.settlement import MasterState
    from spipe.runtime.store import Store

FORMAT = 1
FOLDER, STATE, MODEL_FOLDER = "checkpoints", "state.json", "model"
STATES = ("master", "first_moment", "second_moment")


Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Position:
    """Where training stands: steps and sequences done, and the optimizer's scalars.

    ``loss_scale`` is None before the first step: the plan says.
    """

    step: Count = 0
    sequences: Count = 0
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    num_updates: Count = 0
    good_steps: Count = 0


START = Position()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    position: Position
    model: Model
    precision: str
    seed: int
    data: str
    sequence: int | None = None
    global_batch: int | None = None
    microbatch_size: int | None = None

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        """Read what ``state.json`` says. Raises SpipeError, naming the file, if it is none of ours."""
        file = folder / STATE
        try:
            state = json.loads(file.read_text())
            if state["format"] != FORMAT:
                raise SpipeError(f"{file}: format {state['format']!r}; this version reads {FORMAT}")
            fields = {key: state[key] for key in ("step", "sequences", "loss_scale", "num_updates", "good_steps")}
            position = TypeAdapter(Position).validate_python(fields)
            model = TypeAdapter(Model).validate_python(state["model"])
            named = re.fullmatch(r"step-(\d+)", folder.name)
            if named and int(named[1]) != position.step:
                raise ValueError(f"the folder is of step {int(named[1])}, the file of step {position.step}")
            shape = (state.get(name) for name in ("sequence", "global_batch", "microbatch_size"))
            return cls(folder, position, model, state["precision"], state["seed"], state["data"], *shape)
        except OSError as error:
            raise SpipeError(f"{file}: cannot read the checkpoint ({error.strerror})") from None
        except SpipeError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise SpipeError(f"{file}: not the state of a checkpoint ({reason}); use another checkpoint") from None

    def check(self, plan: Plan) -> None:
        """Raises SpipeError unless a run of ``plan`` can go on from here: model, seed, every tensor in its shape."""
        huggingface.check_same_model(plan.model, self.model, str(self.folder))
        if plan.seed != self.seed:
            raise SpipeError(
                f"{self.folder} was trained with seed {self.seed}, the plan has {plan.seed}, so the order of the data "
                f"would change; use a plan with seed {self.seed}"
            )
        files = self.files() | self.weight_files()
        problems = []
        frozen = _frozen_names(plan.model)
        for name, shape in huggingface.parameter_shapes(plan.model).items():
            for key in [name] if name in frozen else [f"{kind}.{name}" for kind in STATES]:
                if key not in files:
                    problems.append(f"{key} is missing")
                elif (found := files[key].entries[key].shape) != shape:
                    problems.append(f"{key} has the shape {list(found)}, the model needs {list(shape)}")
        huggingface.require_none(problems, f"{self.folder}: {{count}} tensors are not as the model needs them")

    def changes(self, plan: Plan, data: str) -> list[str]:
        """What is not as it was before the checkpoint, in words."""
        found = []
        if self.data != data:
            found.append(
                f"the checkpoint was trained on {self.data}, this run trains on {data}, from sequence "
                f"{self.position.sequences} on"
            )
        for name, before, now in (
            ("precision", self.precision, plan.precision),
            ("sequence", self.sequence, plan.sequence),
            ("global_batch", self.global_batch, plan.global_batch),
            ("microbatch_size", self.microbatch_size, plan.microbatch_size),
        ):
            if before not in (None, now):
                also = {
                    "sequence": ": sequences are other parts of the text now",
                    "microbatch_size": ": gradients are rounded in another order, so that not every bit stays",
                }.get(name, "")
                found.append(f"the checkpoint was trained with {name} = {before}, this run has {now}{also}")
        missing = huggingface.parameter_shapes(plan.model).keys() - self.weight_files().keys()
        if missing:
            found.append(
                f"{self.folder}: {len(missing)} weights are missing ({min(missing)}, for one); the run makes them from "
                "the masters, but the folder is no whole model"
            )
        return found

    def files(self) -> dict[str, TensorFile]:
        """The file of every master and moment."""
        files = [TensorFile(path) for path in sorted(self.folder.glob("optimizer-*.safetensors"))]
        return {name: file for file in files for name in file.entries}

    def weight_files(self) -> dict[str, TensorFile]:
        """The file of every weight."""
        files = [TensorFile(path) for path in sorted(self.folder.glob("model*.safetensors"))]
        return {name: file for file in files for name in file.entries}


def _frozen_names(model: Model) -> set[str]:
    kinds = [model.layer_kind(i) for i in range(model.num_total_layers)]
    return {
        huggingface.parameter_name(model, i, name)
        for i, kind in enumerate(kinds)
        for name in model.frozen_parameters(kind)
    }


def find_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in (run_folder / FOLDER).glob(f"step-*/{STATE}"))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest one of a run folder. Raises SpipeError if there is none."""
    if (path / STATE).is_file():
        return path
    found = find_checkpoints(path)
    if not found:
        raise SpipeError(
            f"{path} is no checkpoint and no run folder with one; give a folder like RUNDIR/{FOLDER}/step-00000050"
        )
    return found[-1]


def load_state(folder: Path, model: Model, masters: "MasterState", store: "Store") -> None:
    """Fill a rank's masters and moments, and its weights, which are the masters rounded."""
    checkpoint = Checkpoint.load(folder)
    files, weights = checkpoint.files(), checkpoint.weight_files() if masters.frozen else {}
    for parameter in masters.frozen:
        name = huggingface.parameter_name(model, parameter.layer, parameter.name)
        weights[name].read_into(name, store.weight(parameter).view(parameter.shape))
    for parameter in masters.parameters:
        name = huggingface.parameter_name(model, parameter.layer, parameter.name)
        with masters.filling(parameter, store) as state:
            for kind, tensor in zip(STATES, state, strict=True):
                files[f"{kind}.{name}"].read_into(f"{kind}.{name}", tensor)


def load_model(folder: Path, model: ModelSpec, masters: "MasterState", store: "Store") -> None:
    """Fill a rank's masters and weights from a model folder; moments stay zero."""
    source = huggingface.ModelFolder(folder, model)
    for parameter in masters.parameters:
        with masters.filling(parameter, store) as (master, _, _):
            source.read_into(huggingface.parameter_name(model, parameter.layer, parameter.name), master)


def load_weights(file: Path, masters: "MasterState", store: "Store") -> None:
    """Fill a rank's masters and weights from a file with the names of a list of layers; moments stay zero."""
    source = TensorFile(file)
    for parameter in masters.frozen:
        source.read_into(parameter.label, store.weight(parameter).view(parameter.shape))
    for parameter in masters.parameters:
        with masters.filling(parameter, store) as (master, _, _):
            source.read_into(parameter.label, master)


def original_config(run_folder: Path) -> dict[str, Any] | None:
    """``config.json`` of the model that a run started from, if it did from one."""
    file = run_folder / MODEL_FOLDER / huggingface.CONFIG
    with contextlib.suppress(OSError, ValueError):
        config: dict[str, Any] = json.loads(file.read_text())
        return config
    return None


def export(source: Path, target: Path, precision: str | None = None) -> None:
    """Write a checkpoint's model as a new folder for transformers; the same weights give the same bytes.

    Args:
        source: a checkpoint, or a run folder, whose newest one is taken.
        target: the new folder.
        precision: type of the weights (they are rounded from the masters); None: as they were trained.

    Raises:
        SpipeError: if there is no whole checkpoint, transformers has no such model, or ``target`` exists.
    """
    checkpoint = Checkpoint.load(find_checkpoint(source))
    model = huggingface.check_exportable(checkpoint.model)
    if target.exists():
        raise SpipeError(f"{target} exists; give the name of a new folder")
    files = checkpoint.files()
    temporary = target.with_name(f".{target.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        original = read_table(checkpoint.folder / huggingface.CONFIG)
        huggingface.write_model(
            temporary,
            model,
            precision or checkpoint.precision,
            lambda name, out: files[f"master.{name}"].read_into(f"master.{name}", out),
            original=original,
        )
        huggingface.copy_extras(checkpoint.folder, temporary)
        os.rename(temporary, target)
    except KeyError as error:
        raise SpipeError(f"{checkpoint.folder}: {error} is missing; use another checkpoint") from None
    except OSError as error:
        raise SpipeError(f"{target}: cannot write the model there ({error.strerror}); give another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
