"""A user's layers on the ranks: modules, loss and data travel pickled, parameters do not.

A rank computes a layer by calling its module with the weights that the plan has put into a slot. Classes and functions
are found again by name, as with every use of processes: those of a script need the usual ``if __name__ ==
"__main__":`` around what the script does, those of a notebook a file of their own.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spipe.errors import SpipeError
from spipe.layer_list import LayerListSpec
from spipe.plan import Plan
from spipe.runtime.checkpoint import Position
from spipe.runtime.data import Feed, shuffled
from spipe.runtime.layers import Parameters
from spipe.runtime.network import seed_generator
from spipe.runtime.region import DTYPES
from spipe.tensors import TensorSpec

Loss = Callable[[Tensor, Tensor], Tensor]
_preparing = False


@dataclass(frozen=True)
class ModuleSource:
    """What a rank needs to make the layers, the loss and the data again."""

    network: bytes
    data: bytes | None
    """Training and validation data; None: tokens, which the job names."""
    main: dict[str, Any] = field(default_factory=dict)
    """How to find modules, and the classes of the main program."""

    @classmethod
    def of(cls, layers: Sequence[nn.Module], loss: Loss, data: tuple[Any, Any] | None) -> "ModuleSource":
        """Raises SpipeError for what cannot be sent to another process."""
        network = _pickled("layers and loss", (list(layers), loss))
        pickled = None if data is None else _pickled("data", data)
        known: dict[str, Any] = dict(spawn.get_preparation_data("rank"))
        wanted = {"sys_path"}
        if b"__main__" in network + (pickled or b""):
            wanted |= {"init_main_from_name", "init_main_from_path"}
        return cls(network, pickled, {key: known[key] for key in wanted & known.keys()})

    def load_network(self, plan: Plan, device: torch.device) -> "ModuleNetwork":
        """The layers, with parameters that hold nothing."""
        with self._main_program():
            modules, loss = _Unpickler(io.BytesIO(self.network)).load()
        return ModuleNetwork(plan, modules, loss, device)

    def load_feeds(self, plan: Plan, start: Position) -> tuple[Feed, Feed | None]:
        """Training data from a position on, and validation data."""
        assert self.data is not None
        with self._main_program():
            data, validation = pickle.loads(self.data)
        return feed_of(data, plan, start), None if validation is None else feed_of(validation, plan, Position())

    @contextmanager
    def _main_program(self) -> Iterator[None]:
        global _preparing
        _preparing = True
        try:
            spawn.prepare(self.main)
            yield
        except AttributeError as error:
            raise SpipeError(
                f"a rank cannot find a class or function of the layers, loss or data ({error}); put it into a module "
                "or script file, at the top level"
            ) from None
        finally:
            _preparing = False


def require_main_program() -> None:
    """Raises SpipeError if a rank is only reading the script that started it."""
    if _preparing:
        raise SpipeError(
            'the script trains when it is imported: put what it does under `if __name__ == "__main__":`, because the '
            "ranks import it to find its classes"
        )


class _Pickler(pickle.Pickler):
    """Leaves the values of parameters out."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            return id(obj), tuple(obj.shape), obj.dtype, obj.requires_grad
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> Any:
        key, shape, dtype, requires_grad = pid
        if key not in self.made:
            self.made[key] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
        return self.made[key]


def _pickled(what: str, value: Any) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SpipeError(
            f"{what} cannot be sent to the ranks ({error}); use classes and functions from the top level of a module "
            "or script, no lambdas, open files or local functions"
        ) from None
    return file.getvalue()


class ModuleNetwork:
    """A list of modules as a network; see ``spipe.runtime.network``."""

    def __init__(self, plan: Plan, modules: Sequence[nn.Module], loss: Loss, device: torch.device) -> None:
        assert isinstance(plan.model, LayerListSpec)
        self.model, self.microbatch_size, self.device = plan.model, plan.microbatch_size, device
        self.modules, self.loss, self.dtype = list(modules), loss, DTYPES[plan.precision]
        parts = [part for module in self.modules for part in module.modules()]
        self._trains = {part: part.training for part in parts}
        self._evaluating = False
        for part in parts:
            for name, buffer in part.named_buffers(recurse=False):
                dtype = self.dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(device, dtype)

    def __call__(
        self, layer: int, parameters: Parameters, x: Tensor, target: Tensor | None, seed: int | None,
        output: bool = True,
    ) -> Tensor:  # fmt: skip
        self._set_mode(evaluating=seed is None)
        if seed is not None:
            seed_generator(self.device, seed)
        y: Tensor = functional_call(self.modules[layer], dict(parameters), (x,))
        if layer < len(self.modules) - 1:
            shape = self.model.boundary_shape(layer + 1, self.microbatch_size, self.model.sequence)
            if y.shape != shape:
                raise SpipeError(
                    f"layer {layer} ({self.model.layers[layer].name}): output of shape {list(y.shape)}, not "
                    f"{list(shape)} as described; shapes may not depend on the data"
                )
            if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                y = y.clone()  # the input's place is used again before the output is read
            return y.to(self.dtype).contiguous()
        return y if target is None else self.loss(y, target)

    def _set_mode(self, *, evaluating: bool) -> None:
        """Modules in evaluation mode, or as they came."""
        if evaluating != self._evaluating:
            self._evaluating = evaluating
            for part, trains in self._trains.items():
                part.training = trains and not evaluating


# Data


def feed_of(data: Any, plan: Plan, start: Position) -> Feed:
    """Microbatches from a function or a data set. Raises SpipeError for anything else."""
    if is_data_set(data):
        return DatasetFeed(data, plan, start.sequences)
    return FunctionFeed(data, plan, start.step)


def is_data_set(data: Any) -> bool:
    """Whether data are a data set, not a function. Raises SpipeError if they are neither."""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, type | str | Path):
        return True
    if callable(data) and not isinstance(data, type):
        return False
    raise SpipeError(
        f"data is a {type(data).__name__}; it should be a path of tokens or text, a function of (step, microbatch), or "
        "a data set with a length whose items are (input, target)"
    )


@dataclass(frozen=True)
class FunctionFeed:
    """Microbatches from a function of (step, microbatch) that returns (input, target)."""

    function: Callable[[int, int], tuple[Tensor, Tensor]]
    plan: Plan
    first_step: int = 0

    def tensors(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return checked(self.function(self.first_step + step, microbatch), self.plan)


@dataclass(frozen=True)
class DatasetFeed:
    """Microbatches of a data set whose items are (input, target), in an order of its own for every epoch."""

    items: Any
    plan: Plan
    position: int = 0

    def tensors(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, stacked along a new first dimension."""
        size = self.plan.microbatch_size
        first = self.position + step * self.plan.global_batch + microbatch * size
        return checked(stacked(self.items, self.plan.seed, first, size), self.plan)


def stacked(items: Any, seed: int, first: int, count: int) -> Any:
    """Items ``first`` to ``first + count`` of a training, counted through its epochs, stacked."""
    if not len(items):
        raise SpipeError("the data set is empty; give one with at least one item")
    places = shuffled(seed, first, count, len(items))
    chosen = [items[int(i)] for i in places]
    try:
        return torch.utils.data.default_collate(chosen)
    except (RuntimeError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise SpipeError(
            f"items {', '.join(map(str, places[:3]))}, ... of the data set cannot be stacked ({reason}); every item is "
            "(input, target), of the same shapes"
        ) from None


def checked(batch: Any, plan: Plan) -> tuple[Tensor, Tensor]:
    """A microbatch as described. Raises SpipeError naming what differs."""
    model, size = plan.model, plan.microbatch_size
    inputs, targets = pair_of(batch)
    specs = model.input_tensors(size, plan.sequence)
    for what, tensor, spec in zip(("input", "target"), (inputs, targets), specs, strict=True):
        shape = spec.shape_of(size)
        if tuple(tensor.shape) != shape or dtype_name(tensor) != spec.dtype:
            raise SpipeError(
                f"the {what} of a microbatch has shape {list(tensor.shape)} and type {tensor.dtype}; {size} items as "
                f"described have {list(shape)}, {spec.dtype}"
            )
    return inputs, targets


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """(input, target) tensors. Raises SpipeError for anything else."""
    if not isinstance(batch, Sequence) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise SpipeError(f"data gave a {type(batch).__name__}; a microbatch is (input, target), two tensors")
    if where := {part.device.type for part in batch} - {"cpu"}:
        raise SpipeError(f"data gave a tensor on device {where.pop()}; give tensors on the CPU, ranks move them")
    return batch[0], batch[1]


def dtype_name(tensor: Tensor) -> str:
    """The type as ``TensorSpec`` has it."""
    return "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def spec_of(what: str, tensor: Tensor, num_items: int) -> TensorSpec:
    """Description of a tensor of a microbatch. Raises SpipeError for a type that cannot be moved."""
    name = dtype_name(tensor)
    if name not in ("float", "int64", "int32", "int16", "uint8", "bool"):
        raise SpipeError(
            f"the {what} is of type {tensor.dtype}; it can be floating, int64, int32, int16, uint8 or bool"
        )
    if not tensor.dim() or tensor.shape[0] % num_items:
        raise SpipeError(
            f"the {what} of {num_items} items has shape {list(tensor.shape)}; its first dimension should be a multiple "
            f"of {num_items}"
        )
    return TensorSpec.model_validate({"shape": (tensor.shape[0] // num_items, *tensor.shape[1:]), "dtype": name})
