"""The loss on validation text: forward passes over the host's weights, shared out over the ranks.

A rank takes its batches through the model layer by layer, so every weight is read once. Each batch's loss has a place
of its own; their mean does not depend on the number of ranks.
"""

from collections.abc import Iterator

import torch

from spipe.layer_list import Model
from spipe.plan import Plan
from spipe.runtime.data import Feed
from spipe.runtime.network import Network
from spipe.runtime.region import DTYPES
from spipe.runtime.store import ParameterTable, Store


class Evaluation:
    """One rank's share: batches ``rank``, ``rank + num_ranks``, ... of ``num_batches`` microbatches of the plan."""

    def __init__(self, plan: Plan, rank: int, store: Store, device: torch.device, feed: Feed, network: Network) -> None:
        self.plan, self.store, self.device, self.network = plan, store, device, network
        num_batches = store.evaluations.shape[1]
        self.numbers = range(rank, num_batches, plan.layout.num_ranks)
        dtype = DTYPES[plan.precision]
        self.batches = [
            [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in feed.tensors(0, number)]
            for number in self.numbers
        ]

    def run(self, row: int) -> None:
        """Put the losses of this rank's batches into a row of ``store.evaluations``."""
        if not self.batches:
            return
        model, table = self.plan.model, self.store.table
        activations = [inputs for inputs, _ in self.batches]
        with torch.no_grad():
            for layer, parameters in layer_parameters(model, table, self.store.weights):
                on_device = {name: weight.to(self.device) for name, weight in parameters.items()}
                for number, (_, target) in enumerate(self.batches):
                    activations[number] = self.network(layer, on_device, activations[number], target, None)
                del on_device  # before the next layer's are there
        for number, loss in zip(self.numbers, activations, strict=True):
            self.store.evaluations[row, number] = float(loss)


def layer_parameters(
    model: Model, table: ParameterTable, weights: torch.Tensor
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Every layer with views of its weights, from the bottom up; a tied head has the embedding's."""
    for layer in range(model.num_total_layers):
        views = {}
        for parameter in table.layers[layer]:
            owner = table.tied[0] if table.tied and parameter == table.tied[1] else parameter
            views[parameter.name] = weights[owner.first : owner.first + owner.count].view(owner.shape)
        yield layer, views
