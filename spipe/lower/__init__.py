"""Lower a compute order to a program: add weights, messages, stage inputs, gradients, the optimizer, and one order.

Works on integers; op objects exist only at the edges. Each module adds the ops of one concern and the dependencies that
make it correct. Slot reuse is a dependency like any other; what a slot's first user of a step waits for is the last
user of that slot in the previous step (``carried``).
"""

from spipe.errors import SpipeError
from spipe.layout import Layout
from spipe.lower.compute import add_compute
from spipe.lower.draft import Draft
from spipe.lower.messages import add_activations, add_gradients, add_tokens, message_slots
from spipe.lower.optimizer import add_gradient_offload, add_optimizer
from spipe.lower.order import Graph
from spipe.lower.stage_inputs import add_stage_inputs
from spipe.lower.weights import add_weights
from spipe.options import Options
from spipe.pause import collector_paused
from spipe.program import Program
from spipe.schedules import ComputeOrder

MAX_COMPUTE_OPS = 1_000_000
"""A program with more would take minutes to lower and gigabytes to hold."""


def require_size(layout: Layout, num_microbatches: int) -> None:
    """Raises SpipeError if the program would have more than MAX_COMPUTE_OPS compute ops."""
    num_forward, num_backward = len(layout.forward), len(layout.backward)
    count = num_microbatches * (num_forward + 2 * num_backward)
    if count > MAX_COMPUTE_OPS:
        raise SpipeError(
            f"{num_microbatches} microbatches through {num_forward} forward and {num_backward} backward stages are "
            f"{count} compute ops a step; the limit is {MAX_COMPUTE_OPS}: use larger microbatches or fewer stages"
        )


def lower(
    layout: Layout,
    order: ComputeOrder,
    num_microbatches: int,
    options: Options | None = None,
    *,
    tied: bool = False,
    frozen: frozenset[int] = frozenset(),
) -> Program:
    """The program of one training step.

    Args:
        layout: stages and ranks.
        order: each rank's compute order, from a generator in ``spipe.schedules``.
        num_microbatches: microbatches per step.
        options: slots, routes and optimizer order.
        tied: the embedding's weight is also the head's: one parameter, stepped once with both gradients.
        frozen: layers with nothing to train: no OFFLOAD_GRAD, STEP or COMMIT for buckets that hold no other.

    Raises:
        SpipeError: if the dependencies are cyclic (too few slots for this order), naming the ops and numbers.
    """
    if num_microbatches < 1:
        raise SpipeError(f"a step needs at least one microbatch, got {num_microbatches}")
    require_size(layout, num_microbatches)
    with collector_paused():
        return _graph(Draft(layout, num_microbatches, options or Options(), tied, frozen), order).program()


def _graph(draft: Draft, order: ComputeOrder) -> Graph:
    """All ops of the step, and what waits for what."""
    add_compute(draft, order)
    fetches = add_weights(draft)
    loads = add_tokens(draft)
    messages = add_activations(draft)
    add_stage_inputs(draft)
    messages += add_gradients(draft)
    offloads = add_gradient_offload(draft)
    add_optimizer(draft, fetches, loads, offloads)
    graph = Graph(draft)
    graph.wait(message_slots(draft, messages, graph.earliest_ends()))
    return graph


__all__ = ["MAX_COMPUTE_OPS", "lower", "require_size"]
