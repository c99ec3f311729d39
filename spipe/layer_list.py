"""Layer-list specs: a model of any kind, as a list of layers whose shapes, operations and bytes were found by running
them once (``spipe.runtime.describe``).

It answers the same questions as ``spipe.model.ModelSpec``, so that everything that plans, simulates and runs takes
either. Numbers are per item, where a microbatch is ``microbatch_size`` items.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, Field, Tag, model_validator

from spipe.errors import SpipeError
from spipe.model import PASS_FACTOR, ModelSpec, PassName
from spipe.tensors import Shape, TensorSpec
from spipe.units import NonNegative, Spec


class LayerSpec(Spec):
    """One layer."""

    name: str
    """Class of the module."""
    parameters: dict[str, Shape]
    """Name inside the layer -> shape, in the order of the parameter store."""
    frozen: tuple[str, ...] = ()
    """Parameters with ``requires_grad`` off: not trained."""
    unused: tuple[str, ...] = ()
    """Parameters that no gradient reaches: not trained either."""
    output: Shape
    """Shape of the output for one item."""
    forward_flops: NonNegative
    """Operations of the forward pass for one item."""
    saved_elements: NonNegative
    """Elements that autograd saves for one item, the output included."""

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    @property
    def trained(self) -> dict[str, Shape]:
        """Parameters that are trained."""
        left_out = {*self.frozen, *self.unused}
        return {name: shape for name, shape in self.parameters.items() if name not in left_out}


class LayerListSpec(Spec):
    """A list of layers, each of one tensor to one tensor; the loss belongs to the last one."""

    name: Annotated[str, Field(min_length=1)] = "layers"
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1, max_length=2**16)]
    input: TensorSpec
    target: TensorSpec
    sequence: Annotated[int, Field(strict=True, ge=1)] = 1
    """Tokens of an item, or 1: what tokens per second count."""
    vocab_size: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Token numbers that the first layer knows, if it is an embedding."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, layer in enumerate(self.layers):
            unknown = [name for name in (*layer.frozen, *layer.unused) if name not in layer.parameters]
            if unknown:
                raise ValueError(f"layer {i}: frozen parameters {', '.join(unknown)} are not among its parameters")
        if not any(layer.trained for layer in self.layers):
            raise ValueError("no parameter is trained; at least one has to have requires_grad and reach the loss")
        return self

    # Layers

    @property
    def num_total_layers(self) -> int:
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """All of them: any may be in a stage of its own."""
        return len(self.layers)

    @property
    def max_sequence(self) -> int:
        return self.sequence

    def layer_kind(self, layer: int) -> str:
        """The number of the first layer that is like this one, as text."""
        if not 0 <= layer < len(self.layers):
            raise SpipeError(f"layer {layer} of {self.name}: should be 0 to {len(self.layers) - 1}")
        return self._kinds[layer]

    @cached_property
    def _kinds(self) -> list[str]:
        first: dict[LayerSpec, str] = {}
        return [first.setdefault(layer, str(i)) for i, layer in enumerate(self.layers)]

    def check_sequence(self, sequence: int) -> None:
        """Raises SpipeError for another sequence length than the layers were run with."""
        if sequence != self.sequence:
            raise SpipeError(
                f"sequence = {sequence}, but the layers of {self.name} were described with {self.sequence}; use that, "
                "or describe them again"
            )

    @property
    def hidden_size(self) -> int:
        """The widest activation: what the reachable rate of matrix products depends on."""
        return max((layer.output[-1] for layer in self.layers if layer.output), default=1)

    head_dim: ClassVar[int] = 0
    attention_size: ClassVar[int] = 0
    num_heads: ClassVar[int] = 0
    tied_embeddings: ClassVar[bool] = False

    def tied_parameters(self) -> tuple[tuple[int, str], tuple[int, str]] | None:
        """None: layers share no parameters."""
        return None

    # Parameters

    def parameter_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the parameter store."""
        return dict(self._layer(kind).parameters)

    def frozen_parameters(self, kind: str) -> frozenset[str]:
        """Names of parameters that are not trained."""
        layer = self._layer(kind)
        return frozenset({*layer.frozen, *layer.unused})

    def frozen_layers(self) -> frozenset[int]:
        """Layers with nothing to train: fetched, never stepped."""
        return frozenset(i for i in range(len(self.layers)) if not self.layer_num_trained(self.layer_kind(i)))

    def layer_num_parameters(self, kind: str) -> int:
        """Parameters of a layer, frozen ones included."""
        return self._layer(kind).num_parameters

    def layer_num_trained(self, kind: str) -> int:
        """Parameters of a layer that are trained."""
        return sum(map(math.prod, self._layer(kind).trained.values()))

    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    # Operations and bytes

    def layer_forward_flops(self, kind: str, num_sequences: int, sequence: int, *, causal: bool = False) -> float:
        """Operations of one layer's forward pass over ``num_sequences`` items."""
        return self._layer(kind).forward_flops * num_sequences

    def layer_flops(
        self, kind: str, pass_name: PassName, num_sequences: int, sequence: int, *, causal: bool = False
    ) -> float:
        """Operations of one pass: recompute 1 ×, backward 2 × the forward pass."""
        return PASS_FACTOR[pass_name] * self.layer_forward_flops(kind, num_sequences, sequence)

    def model_flops_per_token(self, sequence: int, *, causal: bool = False) -> float:
        """Operations of forward and backward of the whole model per token; recompute does not count."""
        return 3 * math.fsum(layer.forward_flops for layer in self.layers) / sequence

    def boundary_shape(self, layer: int, num_sequences: int, sequence: int) -> tuple[int, ...]:
        """Shape of what enters layer ``layer`` >= 1."""
        return TensorSpec(shape=self.layers[layer - 1].output).shape_of(num_sequences)

    def boundary_bytes(self, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """The largest activation between two layers."""
        sizes = (math.prod(layer.output) for layer in self.layers[:-1])
        return max(sizes, default=1) * num_sequences * element_bytes

    def input_tensors(self, num_sequences: int, sequence: int) -> tuple[TensorSpec, TensorSpec]:
        """What the first layer and the loss read of a microbatch; shapes per item."""
        return self.input, self.target

    def layer_activation_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """What autograd saves in one layer, its output included."""
        return math.ceil(self._layer(kind).saved_elements * num_sequences * element_bytes)

    def layer_backward_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """Temporaries of one layer's backward, roughly: two gradients as large as what was saved or a parameter."""
        layer = self._layer(kind)
        largest = max(map(math.prod, layer.parameters.values()), default=0)
        return math.ceil(2 * max(layer.saved_elements * num_sequences, largest) * element_bytes)

    def layer_forward_activation_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """Temporaries of one layer's forward, at most what autograd would save."""
        return self.layer_activation_bytes(kind, num_sequences, sequence, element_bytes)

    def _layer(self, kind: str) -> LayerSpec:
        return self.layers[int(kind)]


def _tag(data: Any) -> str:
    if isinstance(data, LayerListSpec) or (isinstance(data, Mapping) and "layers" in data):
        return "[layers]"
    return "[decoder]"


Model = Annotated[
    Annotated[ModelSpec, Tag("[decoder]")] | Annotated[LayerListSpec, Tag("[layers]")], Discriminator(_tag)
]
"""Any model that a plan can be for."""
