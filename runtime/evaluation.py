"""The loss on validation text: forward passes over the host's weights, shared out over the ranks.

A rank takes its batches through the model layer by layer, so every weight is read once. Each batch's loss has a place
of its own; their mean does not depend on the number of ranks.
"""

from collections.abc import Iterator

import torch

from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime import layers
from spipe.runtime.data import Corpus
from spipe.runtime.store import ParameterTable, Store


class Evaluation:
    """One rank's share: batches ``rank``, ``rank + num_ranks``, ... of ``num_batches`` microbatches of the plan."""

    def __init__(
        self, plan: Plan, rank: int, store: Store, device: torch.device, corpus: Corpus, rotary: layers.RotaryTable
    ) -> None:
        self.plan, self.store, self.device, self.rotary = plan, store, device, rotary
        num_batches = store.evaluations.shape[1]
        self.numbers = range(rank, num_batches, plan.layout.num_ranks)
        size = plan.microbatch_size
        self.batches = [
            torch.from_numpy(corpus.batch(0, number * size, size, plan.sequence)).to(device) for number in self.numbers
        ]

    def run(self, row: int) -> None:
        """Put the losses of this rank's batches into a row of ``store.evaluations``."""
        if not self.batches:
            return
        model, table = self.plan.model, self.store.table
        activations = [batch[:, :-1] for batch in self.batches]
        with torch.no_grad():
            for layer, parameters in layer_parameters(model, table, self.store.weights):
                on_device = {name: weight.to(self.device) for name, weight in parameters.items()}
                kind = model.layer_kind(layer)
                for number, x in enumerate(activations):
                    if kind == "embedding":
                        y = layers.embedding(on_device, x.contiguous())
                    elif kind == "block":
                        y = layers.block(on_device, x, model, self.rotary)
                    else:
                        y = layers.head(on_device, x, self.batches[number][:, 1:].contiguous(), model)
                    activations[number] = y
        for number, loss in zip(self.numbers, activations, strict=True):
            self.store.evaluations[row, number] = float(loss)


def layer_parameters(
    model: ModelSpec, table: ParameterTable, weights: torch.Tensor
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Every layer with views of its weights, from the bottom up; a tied head has the embedding's."""
    for layer in range(model.num_total_layers):
        views = {}
        for parameter in table.layers[layer]:
            owner = table.tied[0] if table.tied and parameter == table.tied[1] else parameter
            views[parameter.name] = weights[owner.first : owner.first + owner.count].view(owner.shape)
        yield layer, views
