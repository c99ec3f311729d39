"""What computes a model's layers: the built-in ones here, a user's modules in ``spipe.runtime.modules``.

A layer is computed more than once, on any rank: in a forward pass, in a recompute, in an evaluation. Whatever it draws
at random comes from a generator that is seeded before every layer by the run's seed, the step, the microbatch and the
layer; so a recompute draws what the forward drew, in every layout.
"""

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime import layers
from spipe.runtime.layers import Parameters
from spipe.runtime.region import DTYPES


class Network(Protocol):
    """A model's layers as one function."""

    def __call__(
        self, layer: int, parameters: Parameters, x: Tensor, target: Tensor | None, seed: int | None,
        output: bool = True,
    ) -> Tensor:  # fmt: skip
        """The output of a layer; of the last one, where there is a target, the mean loss.

        Args:
            layer: its number.
            parameters: name -> weight, on the device.
            x: what enters the layer: for layer 0 the microbatch's inputs.
            target: labels, for the last layer.
            seed: of what the layer draws at random; None in an evaluation, which draws nothing.
            output: False: the result may be without values, because only its graph is needed.
        """


def draw_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The generator's seed for one layer of one microbatch; ``step`` counts from the start of training."""
    key = f"{seed}/{step}/{microbatch}/{layer}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default generator of a device."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(seed)


class DecoderNetwork:
    """The built-in decoder: ``spipe.runtime.layers`` with a plan's options."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        assert isinstance(plan.model, ModelSpec)
        self.model, self.device, self.dropout, self.z_loss = plan.model, device, plan.dropout, plan.z_loss
        self.rotary = layers.RotaryTable.build(plan.model, plan.sequence, DTYPES[plan.precision], device)
        self.block, self.attention, self.feed_forward = layers.block, layers.attention, layers.feed_forward
        self.is_compiled = plan.compile_layers
        if self.is_compiled:
            self.block, self.attention, self.feed_forward = (
                torch.compile(part, dynamic=False) for part in (self.block, self.attention, self.feed_forward)
            )

    def __call__(
        self, layer: int, parameters: Parameters, x: Tensor, target: Tensor | None, seed: int | None,
        output: bool = True,
    ) -> Tensor:  # fmt: skip
        kind = self.model.layer_kind(layer)
        if kind == "embedding":
            return layers.embedding(parameters, x)
        if kind != "head":
            dropout = self.dropout if seed is not None else 0.0
            if seed is not None and dropout:
                seed_generator(self.device, seed)
            output = output or self.is_compiled  # or there would be a second graph to compile
            if kind == "mlp":
                return self.feed_forward(parameters, x, self.model, dropout, output)
            part = self.block if kind == "block" else self.attention
            return part(parameters, x, self.model, self.rotary, dropout, None, output)
        if target is None:
            target = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        return layers.head(parameters, x, target, self.model, self.z_loss if seed is not None else 0.0)
