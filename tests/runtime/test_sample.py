"""Text that grows token by token, with keys and values kept, is the text of whole passes."""

from pathlib import Path

import pytest
import torch

from spipe.model import ModelSpec
from spipe.runtime import layers
from spipe.runtime.huggingface import write_model
from spipe.runtime.sample import Sampler, generate

MODELS = [
    ModelSpec(name="m", num_layers=3, hidden_size=32, ffn_size=48, num_heads=4, num_kv_heads=2, vocab_size=256),
    ModelSpec(
        name="q", num_layers=2, hidden_size=32, ffn_size=48, num_heads=4, vocab_size=256, qk_norm=True, family="qwen3",
        tied_embeddings=True, max_sequence=12,
    ),
]  # fmt: skip


def folder_of(model: ModelSpec, folder: Path) -> Path:
    def fill(name: str, out: torch.Tensor) -> None:
        layers.initialize(model, 0, 0, name, out)
        out.mul_(8.0 if out.dim() > 1 else 1.0)  # far from uniform

    folder.mkdir()
    write_model(folder, model, "fp32", fill)
    return folder


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_kept_keys_and_values_give_the_same_text(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(model, tmp_path / "model")
    kept, tokens = Sampler(folder), [5, 200, 31]
    for count in range(8):
        tokens.append((37 * count) % 256)
        whole = Sampler(folder).logits(torch.tensor(tokens))[-1]
        torch.testing.assert_close(kept.next_logits(tokens), whole, rtol=1e-4, atol=1e-4)
        assert kept.past[0].keys is not None
        assert kept.past[0].keys.shape[2] == len(tokens)
    torch.testing.assert_close(  # another text does not go on from this one
        kept.next_logits([9, 9]), Sampler(folder).logits(torch.tensor([9, 9]))[-1], rtol=1e-4, atol=1e-4
    )
    texts = ["".join(generate(folder, "abc", 20, temperature=t, seed=4)) for t in (0.0, 1.0)]
    monkeypatch.setattr(Sampler, "next_logits", lambda self, tokens: self.logits(torch.tensor(tokens))[-1])
    assert texts == ["".join(generate(folder, "abc", 20, temperature=t, seed=4)) for t in (0.0, 1.0)]
    assert len(set(texts)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_gpu_gives_the_logits_of_the_cpu(model: ModelSpec, tmp_path: Path) -> None:
    folder, tokens = folder_of(model, tmp_path / "model"), [5, 200, 31]
    one, other = Sampler(folder), Sampler(folder, "cuda")
    for token in (7, 8, 9):
        torch.testing.assert_close(other.next_logits(tokens), one.next_logits(tokens), rtol=1e-3, atol=1e-3)
        tokens.append(token)
    assert list(generate(folder, "abc", 4, device="cuda", seed=1)) == list(
        generate(folder, "abc", 4, device="cuda", seed=1)
    )
