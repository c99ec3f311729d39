"""Tensors of a microbatch, described: what layers take in and what the loss is held against."""

import math
from typing import Annotated, Literal

from pydantic import Field

from spipe.units import Spec

Extent = Annotated[int, Field(strict=True, ge=0)]
Shape = tuple[Extent, ...]
DtypeName = Literal["float", "int64", "int32", "int16", "uint8", "bool"]
ITEM_BYTES: dict[str, int] = {"int64": 8, "int32": 4, "int16": 2, "uint8": 1, "bool": 1}


class TensorSpec(Spec):
    """A tensor of a microbatch: its shape for one item, whose first extent grows with the number of items, and its
    type; ``float`` is the plan's precision."""

    shape: Shape
    dtype: DtypeName = "float"

    def shape_of(self, num_items: int) -> tuple[int, ...]:
        """Shape for a microbatch."""
        return (self.shape[0] * num_items, *self.shape[1:]) if self.shape else ()

    def num_bytes(self, num_items: int, element_bytes: int) -> int:
        """Bytes for a microbatch, at ``element_bytes`` of a float."""
        return math.prod(self.shape_of(num_items)) * ITEM_BYTES.get(self.dtype, element_bytes)
