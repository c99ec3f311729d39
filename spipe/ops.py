"""Operations: what a rank does, named the same in simulator, runtime, traces and tests.

An op is ``(kind, stage, index, visit)``. The stage is named with its pass: ``F3`` (forward stage 3), ``B5`` (backward
stage 5); ops of a whole rank use the pseudo-stage ``R2``. The index is a microbatch for compute and messages, and a
bucket (a group of layers of the stage) for weight ops. A stage whose weights are fetched several times in a step
numbers its visits. Seconds and bytes are never part of an op: they belong to the cost model.

Text form and parser are inverses::

    FORWARD F3 m2      SEND_GRADIENT B1 m0      FETCH B5 b0 v1      VALIDATE R2
"""

import re
from dataclasses import dataclass
from enum import IntEnum

from spipe.errors import SpipeError


class Kind(IntEnum):
    """What an op does. Messages are named by their consumer: SEND and RECV carry the same stage and microbatch."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    FREE = 3
    FETCH = 4
    OFFLOAD_GRAD = 5
    LOAD_TOKENS = 6
    STORE_STAGE_INPUT = 7
    LOAD_STAGE_INPUT = 8
    SEND_ACTIVATION = 9
    RECV_ACTIVATION = 10
    SEND_GRADIENT = 11
    RECV_GRADIENT = 12
    SEND_STAGE_INPUT = 13
    RECV_STAGE_INPUT = 14
    STEP = 15
    COMMIT = 16
    VALIDATE = 17
    BARRIER = 18
    STORE_WEIGHTS = 19
    WEIGHT_GRADIENT = 20
    """The second half of a backward that is split in two: BACKWARD then only makes the gradient of the input."""


COMPUTE = frozenset({Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, Kind.SEND_STAGE_INPUT})
RECVS = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT, Kind.RECV_STAGE_INPUT})
COLLECTIVES = frozenset({Kind.VALIDATE, Kind.BARRIER})
WEIGHT_OPS = frozenset({Kind.FETCH, Kind.OFFLOAD_GRAD, Kind.STEP, Kind.COMMIT, Kind.STORE_WEIGHTS})
PARTNER = {
    Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECV_GRADIENT,
    Kind.SEND_STAGE_INPUT: Kind.RECV_STAGE_INPUT,
}

_TEXT = re.compile(r"([A-Z_]+) ([FBR])(\d+)(?: m(\d+))?(?: b(\d+))?(?: v(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One operation of one rank in one step.

    Attributes:
        kind: what is done.
        stage: ``F<k>``, ``B<k>`` or ``R<rank>``.
        index: microbatch or bucket; 0 for ops of a whole stage or rank.
        visit: which fetch of the weights this is, for FETCH and FREE.
    """

    kind: Kind
    stage: str
    index: int = 0
    visit: int = 0

    def __str__(self) -> str:
        if self.kind in COLLECTIVES:
            return f"{self.kind.name} {self.stage}"
        if self.kind is Kind.FREE:
            return f"{self.kind.name} {self.stage} v{self.visit}"
        if self.kind is Kind.FETCH:
            return f"{self.kind.name} {self.stage} b{self.index} v{self.visit}"
        letter = "b" if self.kind in WEIGHT_OPS else "m"
        return f"{self.kind.name} {self.stage} {letter}{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that ``str`` would print as ``text``. Raises SpipeError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match and match[1] in Kind.__members__:
            number = match[4] if match[4] is not None else match[5]
            op = cls(Kind[match[1]], match[2] + match[3], int(number or 0), int(match[6] or 0))
            if str(op) == " ".join(text.split()):
                return op
        raise SpipeError(f"not an op: {text!r}; expected something like 'FORWARD F3 m2' or 'FETCH B5 b0 v1'")
