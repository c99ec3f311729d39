"""The systems that ``bench_train.py`` compares with, each on the same model, initial weights and tokens.

A system is a function that trains what a ``Work`` says in this process (or in this rank of ``torchrun``) and returns
its numbers. The model is plain PyTorch: embedding, blocks with RMS norms, rotary positions, causal SDPA and SwiGLU,
head; a checkpoint per block; cross entropy in fp32. Everyone trains with AdamW on fp32 masters.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spipe.model import ModelSpec
from spipe.plan import Plan
from spipe.runtime import layers as our_layers
from spipe.runtime.data import Corpus, TokenFeed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Work:
    """What every system is given.

    Attributes:
        plan_file: model, batch, precision, optimizer and the cap on GPU memory; only we follow its layout and schedule.
        steps, warmup: timed steps, and steps before them.
        data: the text that all microbatches are cut from; None for the default one.
        output: folder for what a system writes.
        num_gaps: how many of the compute lane's gaps to print.
    """

    plan_file: str
    steps: int
    warmup: int
    data: str | None
    output: str
    num_gaps: int = 0

    @classmethod
    def load(cls, path: str) -> "Work":
        return cls(**json.loads(Path(path).read_text()))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @cached_property
    def plan(self) -> Plan:
        return Plan.load(self.plan_file)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.plan.precision]

    @property
    def on_gpu(self) -> bool:
        return self.plan.hardware.device == "cuda"

    @cached_property
    def feed(self) -> TokenFeed:
        return TokenFeed(self.plan, Corpus.load(self.data))

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one microbatch, both (b, s): the same for every system."""
        tokens = torch.from_numpy(self.feed.batch(step, microbatch))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def initial(self, name: str) -> Tensor:
        """Initial value (fp32, CPU) of a parameter of ``make_layers``: the same for every system."""
        layer, _, name = name.removeprefix("layers.").partition(".")
        model = self.plan.model
        value = torch.empty(model.parameter_shapes(model.layer_kind(int(layer)))[name])
        our_layers.initialize(model, self.plan.seed, int(layer), name, value, CORES)
        return value

    def limit_gpu_memory(self, index: int) -> None:
        """Cap what PyTorch may take on one GPU."""
        share = self.plan.hardware.accelerator.memory_bytes / torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), index)


# The model. Names and shapes of parameters are those of ``ModelSpec.parameter_shapes``.


@lru_cache
def rotary(
    sequence: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (s, head_dim)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(sequence, dtype=torch.float64).outer(frequencies).repeat(1, 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        hidden, heads, kv = model.hidden_size, model.attention_size, model.kv_size
        self.q_proj = nn.Linear(hidden, heads, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        head_dim = self.model.head_dim
        q, k, v = (p(x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        turn = rotary(x.shape[1], head_dim, self.model.rope_theta, x.dtype, x.device)
        mixed = F.scaled_dot_product_attention(rotate(q, *turn), rotate(k, *turn), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down_proj = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = FeedForward(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def make_layers(model: ModelSpec) -> nn.Sequential:
    """Embedding, blocks, head: tokens (b, s) -> logits (b, s, V)."""
    blocks = (Block(model) for _ in range(model.num_layers))
    return nn.Sequential(nn.Embedding(model.vocab_size, model.hidden_size), *blocks, Head(model))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class CheckpointedModel(nn.Module):
    """Tokens and labels (b, s) -> loss; every block is recomputed in the backward pass."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.layers = make_layers(model)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        embedding, *blocks, head = self.layers
        x = embedding(tokens)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return cross_entropy(head(x), labels)


# What is measured.


@dataclass
class Timed:
    """Losses and seconds of steps; a step lasts from the return of the one before to its own."""

    work: Work
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def run(self, step: Callable[[int], float], extra_warmup: int = 0) -> "Timed":
        """``step`` trains on the batches of the step whose number it gets and returns the loss."""
        for index in (*[0] * extra_warmup, *range(self.work.warmup + self.work.steps)):
            begin = time.perf_counter()
            self.losses.append(step(index))
            self.times.append(time.perf_counter() - begin)
        return self

    def result(self, gpu_peak_bytes: int) -> dict[str, Any]:
        return {
            "step_times_s": self.times[-self.work.steps :],
            "losses": self.losses,
            "gpu_peak_bytes": gpu_peak_bytes,
        }


def gpu_peak_bytes() -> int:
    """Most that PyTorch reserved on any GPU of this process."""
    return max((torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())), default=0)


# The systems.


def roundpipe(work: Work, *, exact: bool) -> dict[str, Any]:
    """RoundPipe in one process with all GPUs; ``exact`` waits for the optimizer, else weights are one step old."""
    from roundpipe import RoundPipe, RoundPipeRunConfig
    from roundpipe.optim import Adam

    for index in range(torch.cuda.device_count()):
        work.limit_gpu_memory(index)
    plan, adam = work.plan, work.plan.optimizer
    with torch.device("meta"):
        plain = make_layers(plan.model).to(work.dtype)
    plain = plain.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(work.initial(name))
    config = RoundPipeRunConfig(num_microbatch=plan.num_microbatches, recompute_grain="layer")
    model = RoundPipe(plain, optim_dtype=torch.float32, model_run_config=config)
    optimizer = Adam(
        model.optim_parameters(), lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.epsilon,
        weight_decay=adam.weight_decay, decoupled_weight_decay=True,
    )  # fmt: skip

    def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) / plan.num_microbatches

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(number: int) -> float:
        batches = [work.batch(number, i) for i in range(plan.num_microbatches)]
        tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = model.forward_backward(input_args=(tokens,), label=labels, loss_fn=mean_loss)
        model.step(update, is_async=not exact)
        return float(loss)

    # Steps overlap when weights may be stale: one more until they do so evenly.
    timed = Timed(work).run(step, extra_warmup=0 if exact else 1)
    model.optim_updated.wait()
    return timed.result(gpu_peak_bytes())


def roundpipe_stale(work: Work) -> dict[str, Any]:
    return roundpipe(work, exact=False)


def roundpipe_exact(work: Work) -> dict[str, Any]:
    return roundpipe(work, exact=True)


class Ranks:
    """This process among those of ``torchrun``."""

    def __init__(self, work: Work) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.work = work
        self.device = torch.device("cpu")
        if work.on_gpu:
            index = int(os.environ["LOCAL_RANK"])
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
            work.limit_gpu_memory(index)
        torch.set_num_threads(max(1, CORES // self.size))
        self.num_microbatches = work.plan.num_microbatches // self.size

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's microbatches of a step, on its device."""
        for i in range(self.num_microbatches):
            tokens, labels = self.work.batch(step, self.rank + i * self.size)
            yield tokens.to(self.device), labels.to(self.device)

    def mean(self, loss: Tensor) -> float:
        """The loss over all ranks. On the GPU this also waits for all work so far."""
        loss = loss.detach().float()
        dist.all_reduce(loss)
        return float(loss) / self.size

    def result(self, timed: Timed) -> dict[str, Any]:
        peak = torch.tensor(gpu_peak_bytes(), device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return timed.result(int(peak))


def fsdp2(work: Work) -> dict[str, Any]:
    """FSDP2 with parameters, gradients and optimizer on the CPU; gradients are reduced once a step."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    ranks, adam = Ranks(work), work.plan.optimizer
    dist.init_process_group("cpu:gloo,cuda:nccl" if work.on_gpu else "gloo")
    with torch.device("meta"):
        model = CheckpointedModel(work.plan.model)
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=work.dtype, reduce_dtype=work.dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=True) if work.on_gpu else OffloadPolicy(),
    }
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            shards = work.initial(name).chunk(ranks.size)
            if ranks.rank < len(shards):
                parameter.to_local().copy_(shards[ranks.rank])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.epsilon,
        weight_decay=adam.weight_decay, fused=True,
    )  # fmt: skip

    def step(number: int) -> float:
        total = torch.zeros((), device=ranks.device)
        for i, (tokens, labels) in enumerate(ranks.batches(number)):
            model.set_requires_gradient_sync(i == ranks.num_microbatches - 1)
            loss = model(tokens, labels) / ranks.num_microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return ranks.mean(total)

    return ranks.result(Timed(work).run(step))


def deepspeed(work: Work) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 with parameters and optimizer on the CPU."""
    import deepspeed

    ranks, plan, adam = Ranks(work), work.plan, work.plan.optimizer
    offload = {"device": "cpu", "pin_memory": work.on_gpu}
    optimizer = {
        "lr": adam.learning_rate, "betas": [adam.beta1, adam.beta2], "eps": adam.epsilon,
        "weight_decay": adam.weight_decay,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": ranks.num_microbatches,
        "bf16": {"enabled": plan.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {"type": "AdamW", "params": optimizer},
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = CheckpointedModel(plan.model)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if ranks.rank == 0:
                parameter.copy_(work.initial(name))
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(number: int) -> float:
        total = torch.zeros((), device=ranks.device)
        for tokens, labels in ranks.batches(number):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / ranks.num_microbatches
        return ranks.mean(total)

    return ranks.result(Timed(work).run(step))


def reference(work: Work) -> dict[str, Any]:
    """The whole model on one device: plain autograd, gradients in the precision of the weights, fp32 masters."""
    plan, adam = work.plan, work.plan.optimizer
    device = torch.device("cuda" if work.on_gpu else "cpu")
    with torch.device("meta"):
        model = CheckpointedModel(plan.model).to(work.dtype)
    model = model.to_empty(device=device)
    masters = {name: work.initial(name).to(device) for name, _ in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        masters.values(), lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.epsilon,
        weight_decay=adam.weight_decay,
    )  # fmt: skip

    @torch.no_grad()
    def weights_from_masters() -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(masters[name])

    def step(number: int) -> float:
        total = 0.0
        for i in range(plan.num_microbatches):
            tokens, labels = work.batch(number, i)
            loss = model(tokens.to(device), labels.to(device)) / plan.num_microbatches
            loss.backward()
            total += float(loss.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        weights_from_masters()
        return total

    weights_from_masters()
    return Timed(work).run(step).result(gpu_peak_bytes())


@dataclass(frozen=True)
class Peer:
    """A system as the benchmark starts it.

    Attributes:
        run: trains in this process, or in each process of ``torchrun``.
        package: what has to be installed.
        exact: whether a step uses the weights of the step before, by the system's own documentation.
        torchrun: whether it wants a process per GPU.
    """

    run: Callable[[Work], dict[str, Any]]
    package: str
    exact: bool
    torchrun: bool


PEERS = {
    "roundpipe": Peer(roundpipe_stale, "roundpipe", exact=False, torchrun=False),
    "roundpipe-exact": Peer(roundpipe_exact, "roundpipe", exact=True, torchrun=False),
    "deepspeed": Peer(deepspeed, "deepspeed", exact=True, torchrun=True),
    "fsdp2": Peer(fsdp2, "torch", exact=True, torchrun=True),
}
