"""Model specs: parameter counts, operations, files, and what a wrong value is answered with."""

import json
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.model import LAYER_KINDS, MODELS, ModelSpec, from_huggingface, load_model

SMALL = {"name": "small", "num_layers": 2, "hidden_size": 64, "ffn_size": 96, "num_heads": 4, "vocab_size": 100}

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def write_config(folder: Path, config: dict[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.738),
        ("llama2-13b", 13.016),
        ("llama2-70b", 68.977),
        ("llama3-8b", 8.030),
        ("qwen3-1.7b", 1.721),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
    ],
)
def test_public_models_have_their_known_parameter_count(name: str, billions: float) -> None:
    assert load_model(name).num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("name", ["10b", "19b", "30b", "40b", "52b", "69b", "88b", "110b"])
def test_published_sizes_are_near_their_name(name: str) -> None:
    assert load_model(name).num_parameters() / 1e9 == pytest.approx(float(name[:-1]), rel=0.09)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_built_in_survives_json_and_sums_up(model: ModelSpec) -> None:
    again = ModelSpec.model_validate(json.loads(json.dumps(model.model_dump(mode="json"))))
    assert again == model
    assert hash(again) == hash(model)
    layers = [model.layer_kind(layer) for layer in range(model.num_total_layers)]
    assert layers[0] == "embedding"
    assert layers[-1] == "head"
    assert layers.count("block") == model.num_layers
    total = sum(model.layer_num_parameters(kind) for kind in layers)
    assert total - model.num_parameters() == (model.vocab_size * model.hidden_size if model.tied_embeddings else 0)


def test_parameters_of_a_block_come_in_a_fixed_order() -> None:
    model = ModelSpec(**SMALL, num_kv_heads=2, head_dim=8, attention_bias=True, qk_norm=True)
    assert list(model.parameter_shapes("block").items()) == [
        ("input_layernorm.weight", (64,)),
        ("self_attn.q_proj.weight", (32, 64)),
        ("self_attn.q_proj.bias", (32,)),
        ("self_attn.k_proj.weight", (16, 64)),
        ("self_attn.k_proj.bias", (16,)),
        ("self_attn.v_proj.weight", (16, 64)),
        ("self_attn.v_proj.bias", (16,)),
        ("self_attn.q_norm.weight", (8,)),
        ("self_attn.k_norm.weight", (8,)),
        ("self_attn.o_proj.weight", (64, 32)),
        ("post_attention_layernorm.weight", (64,)),
        ("mlp.gate_proj.weight", (96, 64)),
        ("mlp.up_proj.weight", (96, 64)),
        ("mlp.down_proj.weight", (64, 96)),
    ]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_parts_of_split_blocks_add_up_to_blocks(model: ModelSpec) -> None:
    split = model.replace(split_blocks=True)
    assert split.num_parameters() == model.num_parameters()
    assert split.model_flops_per_token(512, causal=True) == model.model_flops_per_token(512, causal=True)
    assert len(split.layer_kinds) == len(model.layer_kinds) + 1
    kinds = [split.layer_kind(layer) for layer in range(split.num_total_layers)]
    assert kinds == ["embedding", *["attention", "mlp"] * model.num_layers, "head"]
    whole = [split.whole_layer(layer) for layer in range(split.num_total_layers)]
    numbers = [number for number in range(1, model.num_layers + 1) for _ in "ab"]
    assert whole == [0, *numbers, model.num_layers + 1]
    assert [model.whole_layer(layer) for layer in range(model.num_total_layers)] == list(range(model.num_total_layers))
    shape = 2, 512, 2
    attention, mlp = (model.parameter_shapes(part) for part in ("attention", "mlp"))
    assert [*attention.items(), *mlp.items()] == list(model.parameter_shapes("block").items())
    for combined, amount in (
        (sum, lambda kind: model.layer_num_parameters(kind)),
        (sum, lambda kind: model.layer_forward_flops(kind, 2, 512)),
        (sum, lambda kind: model.layer_activation_bytes(kind, *shape)),
        (max, lambda kind: model.layer_backward_bytes(kind, *shape)),
        (max, lambda kind: model.layer_forward_activation_bytes(kind, *shape)),
    ):
        assert combined(amount(part) for part in ("attention", "mlp")) == amount("block") > 0


def test_tied_embeddings_are_used_twice_and_counted_once() -> None:
    untied, tied = ModelSpec(**SMALL), ModelSpec(**SMALL, tied_embeddings=True)
    assert untied.tied_parameters() is None
    assert tied.tied_parameters() == ((0, "weight"), (3, "lm_head.weight"))
    assert tied.parameter_shapes("head") == untied.parameter_shapes("head")
    assert untied.num_parameters() - tied.num_parameters() == 100 * 64


def test_operations_follow_the_published_formulas() -> None:
    model = load_model("10b")
    b, s, h, f, v, layers = 2, 1024, 4096, 11008, 50304, 48
    tokens = b * s
    block = 2 * tokens * (4 * h * h + 3 * h * f) + 4 * tokens * s * h
    assert model.layer_forward_flops("block", b, s) == block
    assert model.layer_forward_flops("block", b, s, causal=True) == block - 2 * tokens * s * h
    assert model.layer_forward_flops("head", b, s) == 2 * tokens * h * v
    assert model.layer_forward_flops("embedding", b, s) == 0
    assert model.layer_flops("block", "recompute", b, s) == block
    assert model.layer_flops("block", "backward", b, s) == 2 * block
    # The published TFLOP/s assume f = 8h/3, so 10b's larger f gives slightly more.
    published = 60 * layers * h * h * (1 + 1 / 5 + s / (5 * h) + v / (10 * layers * h))
    assert model.model_flops_per_token(s) == pytest.approx(published, rel=0.01)


def test_grouped_key_value_heads_cost_less() -> None:
    full, grouped = ModelSpec(**SMALL), ModelSpec(**SMALL, num_kv_heads=1)
    saved = full.layer_forward_flops("block", 1, 8) - grouped.layer_forward_flops("block", 1, 8)
    assert saved == 2 * 8 * 2 * 64 * (64 - 16)
    assert full.layer_num_parameters("block") - grouped.layer_num_parameters("block") == 2 * 64 * (64 - 16)
    assert grouped.layer_activation_bytes("block", 1, 8, 2) < full.layer_activation_bytes("block", 1, 8, 2)


def test_bytes_of_boundaries_and_activations() -> None:
    model = ModelSpec(**SMALL)
    assert model.boundary_bytes(3, 10, 2) == 3 * 10 * 64 * 2
    assert model.layer_activation_bytes("block", 1, 10, 2) == 10 * (2 * (4 * 64 + 4 * 64 + 3 * 96) + 4 * 4)
    assert model.layer_activation_bytes("head", 1, 10, 2) == 10 * (2 * 64 + 4 * 100)
    assert model.layer_activation_bytes("embedding", 1, 10, 2) == 80
    assert model.layer_forward_activation_bytes("block", 2, 10, 2) < model.layer_activation_bytes("block", 2, 10, 2)


# Mebibytes by which PyTorch 2.11 raised its peak on an H200 in bf16, for (b, s, h, FFN, heads, key/value heads, V, q/k
# norm): forward of a block alone, what its recompute keeps, the peak of both passes; forward and peak of the head (in
# the fourth and fifth case its logits come in chunks).
MEASURED = [
    ((2, 2048, 4096, 11008, 32, 32, 32000, False), (322.0, 514.5, 686.5, 1282.0, 1532.0)),
    ((1, 2048, 4096, 11008, 32, 32, 32000, False), (161.0, 257.3, 386.3, 641.0, 766.0)),
    ((2, 1024, 2048, 5504, 16, 16, 32000, False), (80.5, 128.6, 171.6, 633.0, 758.0)),
    ((4, 2048, 4096, 11008, 32, 32, 32000, False), (644.0, 1029.1, 1373.1, 832.0, 1146.0)),
    ((2, 2048, 4096, 14336, 32, 8, 128256, False), (400.0, 544.5, 768.5, 799.9, 1833.9)),
    ((2, 2048, 2560, 9728, 32, 8, 32000, True), (268.0, 404.2, 556.2, 1270.0, 1520.0)),
]


@pytest.mark.parametrize(("shape", "measured"), MEASURED)
def test_activations_are_those_measured(shape: tuple[Any, ...], measured: tuple[float, ...]) -> None:
    b, s, hidden, ffn, heads, kv_heads, vocabulary, qk_norm = shape
    model = ModelSpec(
        name="m", num_layers=1, hidden_size=hidden, ffn_size=ffn, num_heads=heads, num_kv_heads=kv_heads,
        vocab_size=vocabulary, qk_norm=qk_norm,
    )  # fmt: skip
    saved = {kind: model.layer_activation_bytes(kind, b, s, 2) for kind in LAYER_KINDS}
    found = (
        model.layer_forward_activation_bytes("block", b, s, 2),
        saved["block"],
        saved["block"] + model.layer_backward_bytes("block", b, s, 2),
        model.layer_forward_activation_bytes("head", b, s, 2),
        saved["head"] + model.layer_backward_bytes("head", b, s, 2),
    )
    assert [num_bytes / 2**20 for num_bytes in found] == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize(
    ("config", "millions"),
    [(LLAMA3, 8030.261), (MISTRAL, 7241.732), (QWEN2, 494.033), (QWEN3, 1720.575)],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
def test_hugging_face_configs_of_the_four_families(tmp_path: Path, config: dict[str, object], millions: float) -> None:
    path = write_config(tmp_path, config)
    model = from_huggingface(path)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=1e-3)
    assert model.family == config["model_type"]
    assert model == load_model(path) == load_model(tmp_path) == from_huggingface(tmp_path)


def test_built_ins_equal_their_hugging_face_configs(tmp_path: Path) -> None:
    for name, config in (("llama3-8b", LLAMA3), ("qwen3-1.7b", QWEN3)):
        folder = tmp_path / name
        folder.mkdir()
        write_config(folder, config)
        assert load_model(folder) == MODELS[name]


def test_a_sliding_window_limits_the_sequence_only_where_it_is_used(tmp_path: Path) -> None:
    assert from_huggingface(write_config(tmp_path, MISTRAL)).max_sequence == 4096
    assert from_huggingface(write_config(tmp_path, MISTRAL | {"sliding_window": None})).max_sequence == 32768
    assert from_huggingface(write_config(tmp_path, QWEN2 | {"sliding_window": 128})).max_sequence == 32768
    used = QWEN2 | {"sliding_window": 128, "use_sliding_window": True}
    model = from_huggingface(write_config(tmp_path, used))
    model.check_sequence(128)
    with pytest.raises(SpipeError, match=r"sequence = 129.*1 to 128"):
        model.check_sequence(129)


def test_rotary_scaling_is_kept_in_both_spellings(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    old = from_huggingface(write_config(tmp_path, LLAMA3 | {"rope_scaling": scaling}))
    assert old.rope_scaling == scaling
    config = {key: value for key, value in LLAMA3.items() if not key.startswith("rope")}
    new = from_huggingface(write_config(tmp_path, config | {"rope_parameters": scaling | {"rope_theta": 500000.0}}))
    assert new == old
    plain = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert from_huggingface(write_config(tmp_path, plain)).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"num_key_value_heads": 5}, "num_heads = 32 should be a multiple of num_kv_heads = 5"),
        ({"num_hidden_layers": 0}, "num_layers = 0 should be greater than or equal to 1"),
    ],
)
def test_unfit_hugging_face_configs_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write_config(tmp_path, LLAMA3 | changes)
    with pytest.raises(SpipeError) as caught:
        load_model(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_config_without_a_size_names_it(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA3.items() if key != "vocab_size"}
    with pytest.raises(SpipeError, match="missing vocab_size"):
        load_model(write_config(tmp_path, config))


def test_own_fields_from_toml_and_json(tmp_path: Path) -> None:
    fields = {key: value for key, value in SMALL.items() if key != "name"}
    toml, as_json = tmp_path / "mine.toml", tmp_path / "mine.json"
    toml.write_text("\n".join(f"{key} = {value}" for key, value in fields.items()))
    as_json.write_text(json.dumps(fields))
    assert load_model(toml) == load_model(str(as_json)) == ModelSpec(**(SMALL | {"name": "mine"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -64}, "hidden_size = -64 should be greater than or equal to 1"),
        ({"hidden_size": 66}, "hidden_size = 66 does not divide by num_heads = 4"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0 should be a valid integer"),
        ({"num_layers": True}, "num_layers = True should be a valid integer"),
        ({"num_kv_heads": 3}, "num_heads = 4 should be a multiple of num_kv_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7 should be even"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon = nan should be"),
        ({"rope_theta": 0}, "rope_theta = 0 should be greater than 0"),
        ({"family": "gpt"}, "family = 'gpt' should be 'llama', 'mistral', 'qwen2' or 'qwen3'"),
        ({"hiden_size": 64}, "unknown key 'hiden_size'; nearest: hidden_size"),
        ({"max_sequence": 0}, "max_sequence = 0 should be greater than or equal to 1"),
        ({"num_layers": 10**9}, "num_layers = 1000000000 should be less than or equal to 65536"),
    ],
)
def test_bad_fields_are_named_with_value_and_what_is_allowed(changes: dict[str, object], message: str) -> None:
    for build in (lambda fields: ModelSpec(**fields), ModelSpec.model_validate):
        with pytest.raises(SpipeError) as caught:
            build(SMALL | changes)
        assert message in str(caught.value)


def test_replace_checks_again() -> None:
    with pytest.raises(SpipeError, match="num_heads = 4 should be a multiple of num_kv_heads = 3"):
        ModelSpec(**SMALL).replace(num_kv_heads=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3-7b", "unknown model 'llama3-7b'; nearest: llama3-8b"),
        ("nowhere/config.json", "no such file or folder"),
        ("nowhere.toml", "no such file or folder"),
    ],
)
def test_unknown_models(name: str, message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        load_model(name)


def test_broken_files_name_the_place(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = 'x'\nnum_layers = = 3\n")
    with pytest.raises(SpipeError, match=r"broken\.toml: .*line 2"):
        load_model(broken)
    listing = tmp_path / "list.json"
    listing.write_text("[1]")
    with pytest.raises(SpipeError, match="expected a table of fields, found list"):
        load_model(listing)


def test_unknown_layers_and_passes() -> None:
    model = ModelSpec(**SMALL)
    with pytest.raises(SpipeError, match="layer 4 of small: should be 0 to 3"):
        model.layer_kind(4)
    with pytest.raises(SpipeError, match="unknown layer kind 'blok'"):
        model.parameter_shapes("blok")  # type: ignore[arg-type]
    with pytest.raises(SpipeError, match="unknown pass 'forwards'"):
        model.layer_flops("block", "forwards", 1, 1)  # type: ignore[arg-type]
