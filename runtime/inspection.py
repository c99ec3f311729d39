"""What a plan has to know of a user's layers, found by running each of them on one microbatch.

Every layer runs in a copy on the CPU: twice forward with the same seed, because ranks compute layers again, and once
backward. What could not be trained in pieces on several ranks is refused here, by the number and class of the layer.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.flop_counter import FlopCounterMode

from spipe.errors import SpipeError
from spipe.layer_list import LayerListSpec, LayerSpec
from spipe.runtime.data import Corpus
from spipe.runtime.modules import Loss, is_data_set, pair_of, spec_of, stacked
from spipe.runtime.tensor_file import DTYPE_NAMES


def describe(
    layers: Sequence[nn.Module],
    loss: Loss,
    data: Any = None,
    *,
    microbatch_size: int = 1,
    sequence: int = 1,
    token_bytes: int = 2,
    name: str = "layers",
) -> LayerListSpec:
    """A model spec of some layers: shapes, operations and bytes per item.

    Args:
        layers: modules, each of one tensor to one tensor; the first one takes the input of a microbatch.
        loss: (output of the last layer, target) -> mean loss, a scalar.
        data: as for ``train``; one microbatch is taken from it.
        microbatch_size: items of that microbatch; plans may have others.
        sequence: tokens of an item, where data are tokens or text.
        token_bytes: bytes of a token in a ``.bin`` file.

    Raises:
        SpipeError: for layers that cannot be trained this way, saying which and why.
    """
    check_modules(layers)
    if not callable(loss):
        raise SpipeError(f"loss is a {type(loss).__name__}; it should be a function of (output, target)")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise SpipeError(f"the loss {type(loss).__name__} has parameters; put what is trained into the last layer")
    tokens = data is None or isinstance(data, str | Path)
    if tokens:
        batch = torch.from_numpy(Corpus.load(data, token_bytes).batch(0, 0, microbatch_size, sequence))
        x, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    else:
        x, target = _first_microbatch(data, microbatch_size)
    inputs, targets = (spec_of(what, tensor, microbatch_size) for what, tensor in (("input", x), ("target", target)))
    found = []
    with torch.random.fork_rng(devices=[]):
        for i, layer in enumerate(layers):
            last = i == len(layers) - 1
            probe = _Probe(i, layer, x, microbatch_size, (loss, target) if last else None)
            found.append(probe.spec)
            x = probe.output
    embedding = next((part for part in layers[0].modules() if isinstance(part, nn.Embedding)), None)
    return LayerListSpec(
        name=name,
        layers=tuple(found),
        input=inputs,
        target=targets,
        sequence=sequence,
        vocab_size=embedding.num_embeddings if embedding is not None and tokens else None,
    )


def _first_microbatch(data: Any, microbatch_size: int) -> tuple[Tensor, Tensor]:
    """Raises SpipeError unless the data give the same again, without the generator that layers draw from."""
    state, found = torch.get_rng_state(), []
    for _ in range(2):
        batch = stacked(data, 0, 0, microbatch_size) if is_data_set(data) else data(0, 0)
        found.append(pair_of(batch))
    if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        raise SpipeError(
            "the data are others when they are asked for again; ranks ask more than once: what is random has to be a "
            "function of the item, or of step and microbatch"
        )
    if not torch.equal(torch.get_rng_state(), state):
        raise SpipeError(
            "the data draw from PyTorch's default generator, which layers draw from at the same time; use a "
            "torch.Generator of their own, seeded by the item, or by step and microbatch"
        )
    return found[0]


def check_modules(layers: Sequence[nn.Module]) -> None:
    """Raises SpipeError unless these are modules on the CPU that share no parameters."""
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        raise SpipeError(f"layers is a single {type(layers).__name__}; give a list of modules, one a layer")
    if not len(layers):
        raise SpipeError("there are no layers; give at least one module")
    owners: dict[int, tuple[int, str]] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise SpipeError(f"layer {i} is a {type(layer).__name__}, not a torch.nn.Module; wrap it in one")
        label = f"layer {i} ({type(layer).__name__})"
        if any(is_parametrized(part) for part in layer.modules()):
            raise SpipeError(
                f"{label} is parametrized (weight_norm, say), which cannot be sent to other processes; use "
                "torch.nn.utils.parametrize.remove_parametrizations, or write the layer out"
            )
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            _check_tensor(label, name, tensor)
        for name, parameter in layer.named_parameters():
            other, other_name = owners.setdefault(id(parameter), (i, name))
            if other != i:
                raise SpipeError(
                    f"{label}: parameter {name} is also {other_name} of layer {other}; layers cannot share parameters: "
                    "give each its own, or make the two one layer"
                )
            if parameter.dtype not in DTYPE_NAMES:
                raise SpipeError(
                    f"{label}: parameter {name} is of type {parameter.dtype}; it can be float32, bfloat16 or float16: "
                    "convert the layer with .float()"
                )


def _check_tensor(label: str, name: str, tensor: Tensor) -> None:
    """Raises SpipeError unless a parameter or buffer has values in this process's memory."""
    if nn.parameter.is_lazy(tensor):
        raise SpipeError(f"{label}: {name} has no shape yet; run the layer once before it is described")
    if tensor.device.type != "cpu":
        raise SpipeError(
            f"{label}: {name} is on device {tensor.device}; layers come with values on the CPU (module.cpu()), the "
            "ranks bring them to the devices of the plan"
        )


class _Probe:
    """One layer, run: ``spec`` and ``output``."""

    def __init__(
        self, number: int, layer: nn.Module, x: Tensor, num_items: int, loss: tuple[Loss, Tensor] | None
    ) -> None:
        self.label = f"layer {number} ({type(layer).__name__})"
        self.loss = loss
        module = self._copied(layer)
        parameters = dict(module.named_parameters())
        dtype = next((p.dtype for p in parameters.values()), x.dtype)
        if x.is_floating_point():
            x = x.detach().to(dtype).requires_grad_(number > 0)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        again = self._run_first(module, x, parameters)
        saved: dict[int, float] = {}
        kept_elsewhere = {t.untyped_storage().data_ptr() for t in (*parameters.values(), *module.buffers(), x)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in kept_elsewhere:
                saved[storage.data_ptr()] = storage.nbytes() / dtype.itemsize
            return tensor

        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            y = self._call(module, x)
        self._check_repeated(again, y.detach(), buffers, dict(module.named_buffers()))
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        unused = self._without_gradient(trained, x, self._result(y), number)
        shape = y.shape if not loss else y.shape[:1]
        if loss is None and (not y.dim() or y.shape[0] % num_items):
            raise SpipeError(
                f"{self.label}: output of shape {list(y.shape)} for {num_items} items; its first dimension should be a "
                f"multiple of {num_items}"
            )
        saved.setdefault(y.untyped_storage().data_ptr(), y.numel())
        self.output = y.detach()
        self.spec = LayerSpec(
            name=type(layer).__name__,
            parameters={name: tuple(p.shape) for name, p in parameters.items()},
            frozen=tuple(name for name in parameters if name not in trained),
            unused=tuple(name for name in parameters if name in unused),
            output=(shape[0] // num_items, *shape[1:]) if shape else (),
            forward_flops=counter.get_total_flops() / num_items,
            saved_elements=sum(saved.values()) / num_items,
        )

    def _copied(self, layer: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(layer)
        except RuntimeError as error:
            raise SpipeError(f"{self.label} cannot be copied ({error}); make it without tensors of a graph") from None

    def _run_first(self, module: nn.Module, x: Tensor, parameters: dict[str, nn.Parameter]) -> Tensor:
        """The output. Raises SpipeError if the input or a parameter is changed in place."""
        before, versions = x._version, {name: p._version for name, p in parameters.items()}
        with torch.no_grad():
            y = self._call(module, x)
        if x._version != before:
            raise SpipeError(
                f"{self.label} changes its input in place; the input is needed again for the backward pass: leave "
                "inplace=True out, or work on a copy"
            )
        for name, version in versions.items():
            if parameters[name]._version != version:
                raise SpipeError(
                    f"{self.label} changes its parameter {name} in the forward pass; layers are computed more than "
                    "once, on several ranks: only the optimizer changes parameters"
                )
        return y

    def _check_repeated(self, y: Tensor, again: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Raises SpipeError unless two calls gave the same output and left the buffers as they were."""
        for name, buffer in after.items():
            if not torch.equal(before[name], buffer):
                raise SpipeError(
                    f"{self.label}: buffer {name} changes in the forward pass; layers are computed more than once, on "
                    "several ranks, so that such state would differ: use a layer without it (LayerNorm or GroupNorm "
                    "instead of BatchNorm), or put it in eval mode"
                )
        if bool(y.isnan().any()):
            raise SpipeError(f"{self.label}: its output has NaN; look at its input, initial values and type")
        if not torch.equal(y, again):
            raise SpipeError(
                f"{self.label} gives another result when it is run again with the same seed; what it draws has to come "
                "from PyTorch's default generator, and nothing may be kept from call to call"
            )

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        try:
            y = module(x)
        except Exception as error:
            raise SpipeError(
                f"{self.label} cannot take an input of shape {list(x.shape)} and type {x.dtype}: {error}"
            ) from None
        if not isinstance(y, Tensor) or not y.is_floating_point():
            what = f"type {y.dtype}" if isinstance(y, Tensor) else f"class {type(y).__name__}"
            raise SpipeError(f"{self.label}: its output is of {what}; a layer returns one floating tensor")
        if y.device != x.device:
            raise SpipeError(
                f"{self.label}: its output is on device {y.device}, its input on {x.device}; a layer stays on the "
                "device of its input: use x.device where it makes tensors"
            )
        return y

    def _result(self, y: Tensor) -> Tensor:
        """The output, or the loss if this is the last layer."""
        if self.loss is None:
            return y
        function, target = self.loss
        try:
            value = function(y, target)
        except Exception as error:
            raise SpipeError(
                f"the loss cannot take an output of shape {list(y.shape)} and a target of shape {list(target.shape)}: "
                f"{error}"
            ) from None
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise SpipeError(f"the loss gave {what}; it should be a scalar tensor, the mean over the microbatch")
        return value

    def _without_gradient(self, trained: dict[str, nn.Parameter], x: Tensor, y: Tensor, number: int) -> set[str]:
        """Parameters that no gradient reaches. Raises SpipeError if none reaches the input of a layer above others."""
        wanted: list[Tensor] = [*trained.values(), *([x] if number else [])]
        if not wanted:
            return set()
        if not y.requires_grad:
            raise SpipeError(f"{self.label}: its output does not depend on its input in a way that has a gradient")
        gradients = torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
        if number and gradients[-1] is None:
            raise SpipeError(f"{self.label}: no gradient reaches its input, so that no layer below could be trained")
        return {name for name, gradient in zip(trained, gradients, strict=False) if gradient is None}
