"""The layers against straightforward formulas, initial values, and the optimizer against torch's."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import Reference

from spipe.errors import SpipeError
from spipe.model import MODELS, ModelSpec
from spipe.plan import Plan
from spipe.runtime import fused, layers

MODEL = ModelSpec(
    name="odd", num_layers=2, hidden_size=24, ffn_size=40, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=50,
    attention_bias=True, qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize(("tokens", "chunk", "z_loss"), [(12, 5, 0.0), (12, 4, 0.3), (7, 1, 0.0), (7, 7, 0.1)])
def test_a_loss_in_chunks_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int, z_loss: float
) -> None:
    """Loss and gradients, in float64 precision of the comparison; a chunk holds ``chunk`` tokens."""
    monkeypatch.setattr("spipe.model.MAX_LOGITS", chunk * 50 + 49)
    model = ModelSpec(name="m", num_layers=1, hidden_size=16, ffn_size=16, num_heads=2, vocab_size=50)
    assert model.loss_chunk_tokens(tokens) == chunk
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((1, tokens, 16), generator=generator)
    weight, norm = torch.randn((50, 16), generator=generator), torch.rand(16, generator=generator)
    labels = torch.randint(0, 50, (1, tokens), generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in (x, norm, weight)]
        if dtype is torch.float32:
            loss = layers.head(
                {"norm.weight": leaves[1], "lm_head.weight": leaves[2]}, leaves[0], labels, model, z_loss
            )
        else:
            y = torch.nn.functional.rms_norm(leaves[0], (16,), leaves[1], model.norm_epsilon)
            logits = (y @ leaves[2].T).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
            loss = loss + z_loss * logits.logsumexp(1).square().mean()
        (loss * 7).backward()
        found.append([loss.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


def _parameters(model: ModelSpec, kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = model.parameter_shapes(kind)  # type: ignore[arg-type]
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def _norm(x: torch.Tensor, weight: torch.Tensor, model: ModelSpec) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt() * weight


def _plain_block(p: dict[str, torch.Tensor], x: torch.Tensor, model: ModelSpec) -> torch.Tensor:
    """The same block with complex rotations, an explicit mask and explicit key/value groups."""
    b, s, _ = x.shape
    d, groups = model.head_dim, model.num_heads // model.num_kv_heads
    y = _norm(x, p["input_layernorm.weight"], model)
    heads = {}
    for name in "qkv":
        z = y @ p[f"self_attn.{name}_proj.weight"].T + p.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
        heads[name] = z.view(b, s, -1, d)
    angles = torch.arange(s)[:, None] / model.rope_theta ** (torch.arange(0, d, 2) / d)
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    for name in "qk":
        if model.qk_norm:
            heads[name] = _norm(heads[name], p[f"self_attn.{name}_norm.weight"], model)
        turned = torch.complex(heads[name][..., : d // 2], heads[name][..., d // 2 :]) * turn
        heads[name] = torch.cat((turned.real, turned.imag), -1)
    out = torch.zeros(b, s, model.num_heads, d)
    for head in range(model.num_heads):
        q, k, v = heads["q"][:, :, head], heads["k"][:, :, head // groups], heads["v"][:, :, head // groups]
        scores = q @ k.transpose(1, 2) / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
        out[:, :, head] = scores.softmax(-1) @ v
    x = x + out.reshape(b, s, -1) @ p["self_attn.o_proj.weight"].T
    y = _norm(x, p["post_attention_layernorm.weight"], model)
    gate = y @ p["mlp.gate_proj.weight"].T
    return x + (gate * gate.sigmoid() * (y @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T


@pytest.mark.parametrize("model", [MODEL, MODELS["tiny"]], ids=lambda model: model.name)
def test_a_block_is_what_its_formula_says(model: ModelSpec) -> None:
    p = _parameters(model, "block")
    x = torch.randn(2, 9, model.hidden_size, generator=torch.Generator().manual_seed(1))
    rotary = layers.RotaryTable.build(model, 9, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(layers.block(p, x, model, rotary), _plain_block(p, x, model), rtol=1e-4, atol=1e-4)


def test_the_head_is_a_mean_over_tokens() -> None:
    p, labels = _parameters(MODEL, "head"), torch.randint(50, (2, 5))
    x = torch.randn(2, 5, 24)
    logits = _norm(x, p["norm.weight"], MODEL) @ p["lm_head.weight"].T
    expected = torch.stack([F.cross_entropy(logits[i], labels[i]) for i in range(2)]).mean()
    torch.testing.assert_close(layers.head(p, x, labels, MODEL), expected)
    half = {name: value.bfloat16() for name, value in p.items()}
    assert layers.head(half, x.bfloat16(), labels, MODEL).dtype == torch.float32


def test_scaled_rotary_positions() -> None:
    def table(scaling: dict[str, object] | None) -> torch.Tensor:
        model = MODEL.model_copy(update={"rope_scaling": scaling})
        return layers.RotaryTable.build(model, 32, torch.float32, torch.device("cpu")).sin

    plain, linear = table(None), table({"rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(linear[::2], plain[:16])
    llama3 = table(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    torch.testing.assert_close(llama3[:, 0], plain[:, 0])  # fast rotations stay as they are
    torch.testing.assert_close(llama3[8, 3].asin() * 8, plain[8, 3].asin())  # slow ones are stretched
    with pytest.raises(SpipeError, match="'yarn' cannot be run"):
        table({"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(SpipeError, match="lacks 'factor'"):
        table({"rope_type": "linear"})


def test_initial_values_depend_on_seed_layer_and_name_alone() -> None:
    model = MODELS["tiny"]

    def initial(seed: int, layer: int, name: str, threads: int = 1) -> torch.Tensor:
        out = torch.zeros(700, 1000)
        layers.initialize(model, seed, layer, name, out, threads)
        return out

    a = initial(0, 1, "mlp.up_proj.weight")
    assert torch.equal(a, initial(0, 1, "mlp.up_proj.weight", threads=3))
    for other in (initial(1, 1, "mlp.up_proj.weight"), initial(0, 2, "mlp.up_proj.weight"), initial(0, 1, "x.weight")):
        assert not torch.equal(a, other)
        assert abs(torch.corrcoef(torch.stack((a.view(-1), other.view(-1))))[0, 1]) < 0.01
    assert abs(a.std() - 0.02) < 1e-4
    assert abs(a.mean()) < 1e-4
    assert abs(initial(0, 1, "mlp.down_proj.weight").std() - 0.02 / math.sqrt(12)) < 1e-4
    assert (initial(0, 1, "input_layernorm.weight") == 1).all()
    assert (initial(0, 1, "self_attn.q_proj.bias") == 0).all()


def test_200_steps_have_the_losses_of_torch_adamw(small_plan: Callable[..., Plan]) -> None:
    optimizer = {"learning_rate": 5e-4, "weight_decay": 0.1}
    model = ModelSpec(name="two", num_layers=2, hidden_size=32, ffn_size=80, num_heads=4, vocab_size=256)
    plan = small_plan(1, backward=1, model=model, microbatches=2, sequence=16, optimizer=optimizer)
    ours = Reference(plan)
    theirs = Reference(plan)
    adam = plan.optimizer
    matrices = [master for master in theirs.masters.values() if master.dim() > 1]
    others = [master for master in theirs.masters.values() if master.dim() == 1]
    torch_adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.epsilon,
    )
    theirs.weights = theirs.masters
    for _ in range(200):
        ours.step()
        totals = theirs.gradients(len(theirs.losses))
        for key, master in theirs.masters.items():
            master.grad = totals[key]
        torch_adamw.step()
    assert ours.losses[-1] < ours.losses[0] - 0.5
    worst = max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert worst < 1e-5


FUSED_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", FUSED_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 12), (32, 8, 128)])
def test_fused_rotary_positions_have_the_bits_of_single_operations(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    """Forward and backward, with the strides that projections give queries and keys."""
    generator = torch.Generator(device).manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    angles = torch.randn((7, size // 2), generator=generator, device=device)
    cos, sin = (torch.cat((x, x), 1).to(dtype) for x in (angles.cos(), angles.sin()))
    q, k = (random(2, 7, count, size).transpose(1, 2).requires_grad_() for count in (heads, kv_heads))
    ours, plain = fused.rotate(q, k, cos, sin), tuple(fused.rotate_eager(x, cos, sin) for x in (q, k))
    gradients = [random(*x.shape) for x in ours]
    for x, y in zip(ours, plain, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(
        torch.autograd.grad(ours, (q, k), gradients), torch.autograd.grad(plain, (q, k), gradients), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", FUSED_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_swiglu_is_that_of_single_operations_and_keeps_its_two_inputs(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(device).manual_seed(4)
    gate, up, gradient = (torch.randn((3, 5, 77), generator=generator, device=device).to(dtype) for _ in range(3))
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (gate, up)]
    assert torch.equal(fused.swiglu(*turned), fused.swiglu(gate, up))
    leaves = gate.requires_grad_(), up.requires_grad_()
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ours = fused.swiglu(gate, up)
    assert sorted(kept) == sorted(leaf.data_ptr() for leaf in leaves)
    plain = F.silu(gate) * up
    found = (ours, *torch.autograd.grad(ours, leaves, gradient))
    expected = (plain, *torch.autograd.grad(plain, leaves, gradient))
    for x, y in zip(found, expected, strict=True):
        if device == "cpu":
            assert torch.equal(x, y)
        else:  # exponentials differ in their last bits
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [layers.block, layers.attention, layers.feed_forward], ids=lambda part: part.__name__)
def test_without_its_output_a_layer_has_the_gradients_that_it_has_with_it(
    device: str, dtype: torch.dtype, part: Callable[..., torch.Tensor]
) -> None:
    """To the bit: what is left out is a product that no gradient needs."""
    rotary = layers.RotaryTable.build(MODEL, 12, dtype, torch.device(device))
    parameters = {name: value.to(device, dtype) for name, value in _parameters(MODEL, "block").items()}
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn((3, 12, MODEL.hidden_size), generator=generator).to(device, dtype) for _ in range(2))
    found = []
    for output in (True, False):
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        leaf = x.clone().requires_grad_()
        arguments = () if part is layers.feed_forward else (rotary,)
        y = part(leaves, leaf, MODEL, *arguments, output=output)
        assert y.shape == x.shape
        with torch.no_grad():
            y.fill_(math.nan)  # nothing reads it
        torch.autograd.backward(y, dy)
        found.append([leaf.grad, *(value.grad for value in leaves.values())])
    assert sum(gradient is not None for gradient in found[0]) > 3
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_what_is_trained_decides_which_gradients_a_layer_without_output_has() -> None:
    x, y, weight = torch.randn(2, 3, 4), torch.randn(2, 3, 5).requires_grad_(), torch.randn(4, 5)
    layers.UnseenSum.apply(x, y, weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(y.grad, weight.sum(0).expand_as(y))
    assert weight.grad is None


def test_dropout_draws_its_mask_with_the_output() -> None:
    rotary = layers.RotaryTable.build(MODEL, 4, torch.float32, torch.device("cpu"))
    x, found = torch.randn(1, 4, MODEL.hidden_size), []
    for output in (True, False):
        torch.manual_seed(0)
        found.append(layers.block(_parameters(MODEL, "block"), x, MODEL, rotary, 0.5, output=output))
    assert torch.equal(*found)
