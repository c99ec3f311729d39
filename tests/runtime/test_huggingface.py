"""Model folders: what transformers writes we train, what we write it loads, with the same logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spipe.errors import SpipeError
from spipe.model import ModelSpec, from_huggingface
from spipe.plan import Plan
from spipe.runtime import RunResult, run
from spipe.runtime.checkpoint import export
from spipe.runtime.data import Corpus, TokenFeed
from spipe.runtime.huggingface import (
    ModelFolder,
    check_exportable,
    parameter_shapes,
    write_model,
)
from spipe.runtime.sample import Sampler
from spipe.runtime.tensor_file import TensorFile, TensorWriter

RunPlan = Callable[..., RunResult]
SmallPlan = Callable[..., Plan]

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "Mistral": {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 16},
    "Qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True},
}


def make_model(family: str, folder: Path, **options: Any) -> Any:
    """A random model of a family, saved; every parameter (norms and biases, too) is away from its initial value."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(tokens[None]).logits[0]
    return result


@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_in_and_out_with_its_logits(
    run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path, family: str
) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model(family, tmp_path / "model")
    tokens = torch.arange(7, 207, 2) % 256  # beyond the original range of the scaled positions
    expected = logits_of(model, tokens)
    assert torch.allclose(Sampler(tmp_path / "model").logits(tokens), expected, atol=1e-4, rtol=0)

    plan = small_plan(2, model=from_huggingface(tmp_path / "model"), optimizer={"learning_rate": 0.0})
    result = run_plan(plan, 1, output=tmp_path / "run", model_folder=tmp_path / "model", checkpoint_every=1)
    export(tmp_path / "run", tmp_path / "exported")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    assert type(again) is type(model)
    assert torch.equal(logits_of(again, tokens), expected)
    # The checkpoint itself is such a folder.
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    direct = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert torch.equal(logits_of(direct, tokens), expected)
    # What the run computed is what transformers computes.
    batches = [torch.from_numpy(TokenFeed(plan, Corpus.load()).batch(0, m)) for m in range(plan.num_microbatches)]
    losses = [
        torch.nn.functional.cross_entropy(logits_of(model, row[:-1]), row[1:]).item()
        for batch in batches
        for row in batch
    ]
    assert result.losses[0] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@pytest.mark.transformers
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_export_import_export_gives_the_same_bytes(
    run_plan: RunPlan, small_plan: SmallPlan, tmp_path: Path, family: str
) -> None:
    make_model(family, tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    source = tmp_path / "model"
    for number, ranks in enumerate((2, 1)):
        plan = small_plan(
            ranks, backward=2, model=from_huggingface(source), optimizer={"learning_rate": 0.0}, precision="bf16"
        )
        run_plan(plan, 1, output=tmp_path / f"run{number}", model_folder=source, checkpoint_every=1)
        source = tmp_path / f"export{number}"
        export(tmp_path / f"run{number}", source)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / f"export{n}").iterdir()} for n in range(2))
    assert first.keys() == second.keys() >= {"config.json", "model.safetensors"}
    assert first == second


MODEL = ModelSpec(name="m", num_layers=2, hidden_size=32, ffn_size=80, num_heads=4, num_kv_heads=2, vocab_size=256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder in five shards."""
    (tmp_path / "model").mkdir()
    generator = torch.Generator().manual_seed(0)
    write_model(
        tmp_path / "model", MODEL, "fp32", lambda name, out: out.normal_(generator=generator), shard_bytes=40_000
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 5
    return tmp_path / "model"


def test_a_shard_that_is_missing_or_cut_off_is_named(folder: Path) -> None:
    shard = folder / "model-00002-of-00005.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-4])
    with pytest.raises(SpipeError, match=r"model-00002-of-00005.safetensors: not a whole safetensors file"):
        ModelFolder(folder, MODEL)
    for damaged in (b"", b"12345", b"\xff" * 100, (50).to_bytes(8, "little") + b"{" * 50):
        shard.write_bytes(damaged)
        with pytest.raises(SpipeError, match=r"model-00002-of-00005.safetensors: not a whole safetensors file"):
            ModelFolder(folder, MODEL)
    shard.unlink()
    with pytest.raises(SpipeError, match=r"1 of 5 shards are missing: model-00002-of-00005.safetensors$"):
        ModelFolder(folder, MODEL)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SpipeError, match=r"index.json: not an index of safetensors"):
        ModelFolder(folder, MODEL)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(SpipeError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        ModelFolder(folder, MODEL)


def test_wrong_tensors_are_counted_and_ten_are_shown(folder: Path) -> None:
    wide = MODEL.model_copy(update={"ffn_size": 96})
    with pytest.raises(SpipeError, match=r"another model than the plan's: ffn_size = 80 there, 96 in the plan"):
        ModelFolder(folder, wide)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(SpipeError, match=r"6 of its tensors do not fit the model m: model.layers.0.mlp.gate_proj") as e:
        ModelFolder(folder, wide)
    assert "has the shape [80, 32], the model needs [96, 32]" in str(e.value)
    deeper = MODEL.model_copy(update={"num_layers": 4})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(SpipeError, match=r"18 of its tensors .*layers.2.* is missing.*; and 8 more$") as e:
        ModelFolder(folder, deeper)
    assert str(e.value).count(" is missing") == 10
    (folder / "config.json").write_text(json.dumps(config))
    bias = "model.layers.0.self_attn.o_proj.bias"
    with TensorWriter(folder / "more.safetensors", {bias: (torch.float32, (32,))}) as writer:
        writer.write(bias, torch.zeros(32))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][bias] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpipeError, match=r"o_proj.bias is not a parameter of this model"):
        ModelFolder(folder, MODEL)


def test_a_run_refuses_an_unfit_folder_and_leaves_nothing(folder: Path, small_plan: SmallPlan, tmp_path: Path) -> None:
    plan = small_plan(1, backward=1)  # of another model
    with pytest.raises(SpipeError, match="num_layers = 2 there, 6 in the plan"):
        run(plan, steps=1, output=tmp_path / "run", model_folder=folder)
    with pytest.raises(SpipeError, match="nowhere: there is no such folder"):
        run(plan, steps=1, output=tmp_path / "run", model_folder=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_models_that_no_family_has_are_refused() -> None:
    for model in (MODEL.model_copy(update={"qk_norm": True}), MODEL.model_copy(update={"family": "qwen2"})):
        with pytest.raises(SpipeError, match="does not go with family"):
            check_exportable(model)
    check_exportable(MODEL.model_copy(update={"family": "qwen2", "attention_bias": True}))


def test_tensors_are_read_in_pieces_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spipe.runtime.tensor_file._PIECE_BYTES", 24)
    values = torch.randn(7, 5)
    tensors = {"a": values, "empty": torch.empty(0, 3), "half": values.bfloat16()}
    with TensorWriter(tmp_path / "file", {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name in ("half", "a", "empty"):  # in any order
            writer.write(name, tensors[name])
    file = TensorFile(tmp_path / "file")
    for name, tensor in tensors.items():
        assert torch.equal(file.view(name), tensor)
        found = torch.full(tensor.shape, torch.nan)
        file.read_into(name, found)
        assert torch.equal(found, tensor.float())


def test_parameter_shapes_leave_out_a_tied_head() -> None:
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert parameter_shapes(MODEL).keys() - parameter_shapes(tied).keys() == {"lm_head.weight"}
