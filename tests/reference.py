"""A plain training loop: one process, the whole model at once, no program, no executor.

It shares with the runtime only the layer functions and the text. Microbatches come in order; every use of a parameter
has its own gradient, accumulated in the gradient dtype; the two uses of a tied weight are added once, the lower layer's
first.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spipe.plan import Plan
from spipe.runtime import layers
from spipe.runtime.adam_reference import adamw_step_tensors, as_array, sum_of_squares
from spipe.runtime.data import Corpus, TokenFeed
from spipe.runtime.network import draw_seed, seed_generator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Reference:
    """A model in training. ``state`` maps ``master.3.mlp.up_proj.weight`` and the like to tensors."""

    plan: Plan
    data: Path | None = None
    losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)
    overflow: tuple[tuple[int, int], ...] = ()
    """(step, layer): make the first gradient element of the layer infinite."""
    device: str = "cpu"
    """Where losses and gradients are computed; the optimizer is on the CPU."""

    def __post_init__(self) -> None:
        plan, model = self.plan, self.plan.model
        self.dtype, self.gradient_dtype = DTYPES[plan.precision], DTYPES[plan.gradient_dtype]
        self.feed = TokenFeed(plan, Corpus.load(self.data))
        self.kinds = [model.layer_kind(i) for i in range(model.num_total_layers)]
        tied = model.tied_parameters()
        self.alias = {tied[1]: tied[0]} if tied else {}
        self.masters, self.first, self.second = {}, {}, {}
        self.weights: dict[tuple[int, str], torch.Tensor] = {}
        for i, kind in enumerate(self.kinds):
            for name, shape in model.parameter_shapes(kind).items():
                if (i, name) not in self.alias:
                    master = torch.zeros(shape)
                    layers.initialize(model, plan.seed, i, name, master)
                    self.masters[i, name] = master
                    self.first[i, name], self.second[i, name] = torch.zeros(shape), torch.zeros(shape)
                    self.weights[i, name] = master.to(self.dtype)
        self.rotary = layers.RotaryTable.build(model, plan.sequence, self.dtype, torch.device(self.device))
        self.scale = plan.loss_scale.initial if plan.precision == "fp16" else 1.0
        self.updates = self.good_steps = 0

    def run(self, steps: int) -> "Reference":
        for _ in range(steps):
            self.step()
        return self

    def loss(self, uses: list[dict[str, torch.Tensor]], tokens: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Mean loss of one microbatch; tokens (b, s + 1)."""
        plan, step = self.plan, len(self.losses)
        x = layers.embedding(uses[0], tokens[:, :-1].contiguous())
        for i, p in enumerate(uses[1:-1]):
            seed_generator(torch.device(self.device), draw_seed(plan.seed, step, microbatch, i + 1))
            if self.kinds[i + 1] == "mlp":
                x = layers.feed_forward(p, x, plan.model, plan.dropout)
            else:
                part = layers.block if self.kinds[i + 1] == "block" else layers.attention
                x = part(p, x, plan.model, self.rotary, plan.dropout)
        return layers.head(uses[-1], x, tokens[:, 1:].contiguous(), plan.model, plan.z_loss)

    def gradients(self, step: int) -> dict[tuple[int, str], torch.Tensor]:
        """Gradients of every use of a parameter, scaled by the loss scale; appends the step's loss."""
        plan, model = self.plan, self.plan.model
        uses: list[dict[str, torch.Tensor]] = [
            {
                n: self.weights[self.alias.get((i, n), (i, n))].to(self.device, copy=True).requires_grad_()
                for n in model.parameter_shapes(k)
            }
            for i, k in enumerate(self.kinds)
        ]
        totals = {
            (i, n): torch.zeros(use.shape, dtype=self.gradient_dtype, device=self.device)
            for i, p in enumerate(uses)
            for n, use in p.items()
        }
        losses = []
        for m in range(plan.num_microbatches):
            tokens = torch.from_numpy(self.feed.batch(step, m))
            loss = self.loss(uses, tokens.to(self.device), m)
            loss.backward(torch.tensor(self.scale / plan.num_microbatches, device=self.device))
            losses.append(float(loss.detach()))
            for (i, n), total in totals.items():
                total.add_(uses[i][n].grad)
                uses[i][n].grad = None
        self.losses.append(sum(losses) / len(losses))
        for when, layer in self.overflow:
            if when == step:
                next(total for (i, _), total in totals.items() if i == layer).view(-1)[0] = float("inf")
        return {key: total.cpu() for key, total in totals.items()}

    def step(self) -> None:
        """One training step; nothing but the loss scale changes if a gradient is not finite."""
        torch.set_num_threads(self.plan.compute_threads)
        step, adam = len(self.losses), self.plan.optimizer
        totals = self.gradients(step)
        if not all(bool(total.isfinite().all()) for total in totals.values()):
            self.skipped.append(step)
            self.good_steps = 0
            if self.plan.precision == "fp16":
                self.scale = max(self.scale / 2, min(self.scale, self.plan.loss_scale.minimum))
            return
        self.updates += 1
        second_use = {owner: totals[use] for use, owner in self.alias.items()}
        clipping = self.clipping(totals, second_use)
        for key, master in self.masters.items():
            adamw_step_tensors(
                totals[key],
                master,
                self.first[key],
                self.second[key],
                self.weights[key],
                gradient2=second_use.get(key),
                step=self.updates,
                learning_rate=adam.learning_rate_of(self.updates - 1),
                beta1=adam.beta1,
                beta2=adam.beta2,
                epsilon=adam.epsilon,
                weight_decay=adam.weight_decay if master.dim() > 1 else 0.0,
                gradient_scale=clipping / self.scale,
            )
        self.good_steps += 1
        if self.plan.precision == "fp16" and self.good_steps >= self.plan.loss_scale.window:
            self.scale, self.good_steps = self.scale * 2, 0

    def clipping(
        self, totals: dict[tuple[int, str], torch.Tensor], second_use: dict[tuple[int, str], torch.Tensor]
    ) -> float:
        """What this step's gradients are multiplied by; a tied weight counts once, with the sum of its gradients."""
        max_norm = self.plan.optimizer.max_norm
        if max_norm is None:
            return 1.0
        squares = [
            sum_of_squares(as_array(totals[key]), as_array(second_use[key]) if key in second_use else None)
            for key in self.masters
        ]
        norm = math.sqrt(math.fsum(squares)) / self.scale
        self.norms.append(norm)
        if norm <= max_norm:
            return 1.0
        self.clipped.append(len(self.losses) - 1)
        return max_norm / norm

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """All state by name, as the runtime's ``dump_state`` has it."""
        kinds = {
            "weight": self.weights,
            "master": self.masters,
            "first_moment": self.first,
            "second_moment": self.second,
        }
        return {f"{kind}.{i}.{n}": value for kind, values in kinds.items() for (i, n), value in values.items()}


def differences(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ (or that only one side has)."""
    names = sorted(state.keys() ^ other.keys())
    for name in sorted(state.keys() & other.keys()):
        a, b = state[name].contiguous(), other[name].contiguous()
        if a.dtype != b.dtype or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            names.append(name)
    return names
