"""Compute ops of stages recorded as CUDA graphs and replayed: one launch instead of some fifty a layer.

A graph reads and writes fixed addresses: the weights' slot and the gradients' slab of its op, and one buffer each for
what goes in and what comes out. All graphs of a rank share these and one pool for what lies between, because the ops of
a lane run one after the other, and nothing of an op is left in the pool but between a recompute and its backward, which
follow each other. Recording runs no kernel; libraries must have been used on the same streams before.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

cuda: Any = torch.cuda


class RecordedStages:
    """Graphs of one rank's compute ops, by a key: ops of one key use the same addresses."""

    def __init__(
        self, boundary: torch.Tensor, num_outputs: int, recording: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """
        Args:
            boundary: any tensor with shape, type and device of an activation.
            num_outputs: the most that a forward returns.
            recording: entered to record an op, with its backward if it has one.
        """
        self._recording = recording
        self._pool = cuda.graph_pool_handle() if boundary.is_cuda else None
        self._input, self._gradient = torch.zeros_like(boundary), torch.zeros_like(boundary)
        self._outputs = [torch.zeros_like(boundary) for _ in range(num_outputs)]
        self._forwards: dict[Hashable, tuple[Any, int]] = {}
        self._backwards: dict[Hashable, tuple[Any, Any]] = {}

    def forward(
        self, key: Hashable, x: torch.Tensor, run: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What ``run`` returns for x, activations; called without autograd."""
        if key not in self._forwards:
            count = 0

            def body() -> list[torch.Tensor]:
                nonlocal count
                results = run(self._input)
                count = len(results)
                return results

            with self._recording():
                graph = self._record(body)
            self._forwards[key] = graph, count
        graph, count = self._forwards[key]
        self._input.copy_(x)
        graph.replay()
        return [output.clone() for output in self._outputs[:count]]

    def recompute(
        self, key: Hashable, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor],
        accumulate: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:  # fmt: skip
        """``run`` with autograd on x; the backward of the same key must follow.

        Args:
            accumulate: goes backward from (output of ``run``, its gradient), and adds up the weights' gradients.
        """
        if key not in self._backwards:
            x_leaf = self._input.detach().requires_grad_()
            saved: list[torch.Tensor] = []

            def again() -> list[torch.Tensor]:
                with torch.enable_grad():
                    saved[:] = [run(x_leaf)]
                return []

            def back() -> list[torch.Tensor]:
                accumulate(saved.pop(), self._gradient)
                gradient, x_leaf.grad = x_leaf.grad, None
                assert gradient is not None
                return [gradient]

            with self._recording():
                self._backwards[key] = self._record(again), self._record(back)
        self._input.copy_(x)
        self._backwards[key][0].replay()

    def backward(self, key: Hashable, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the recompute's x, for the gradient of its output."""
        self._gradient.copy_(gradient)
        self._backwards[key][1].replay()
        return self._outputs[0].clone()

    def _record(self, body: Callable[[], Sequence[torch.Tensor]]) -> Any:
        graph = cuda.CUDAGraph()
        # Other lanes go on meanwhile, so that only this thread is kept from what cannot be recorded.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = body()
            with torch.no_grad():
                for output, result in zip(self._outputs, results, strict=False):
                    output.copy_(result)
            del results
        finally:
            graph.capture_end()
        return graph
