"""Model folders as Hugging Face's transformers reads and writes them: ``config.json`` and safetensors, whole or in
shards with an index.

The layers keep the names and shapes of that format, so a parameter's name there is its layer's prefix and its own name.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from spipe.errors import SpipeError
from spipe.layer_list import LayerListSpec, Model
from spipe.model import ModelSpec, from_huggingface
from spipe.runtime.region import DTYPES
from spipe.runtime.tensor_file import TensorFile, TensorWriter, write_text

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EXTRAS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of a model folder that are passed on as they are."""
SHARD_BYTES = 5 << 30
SHOWN = 10
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parameter_name(model: Model, layer: int, name: str) -> str:
    """The name in a model folder: ``model.layers.3.mlp.up_proj.weight`` for layer 4's ``mlp.up_proj.weight``, or for
    layer 8's where blocks are split.

    Parameters of a list of layers have the names of an ``nn.Sequential`` of them.
    """
    if isinstance(model, LayerListSpec):
        return f"{layer}.{name}"
    kind = model.layer_kind(layer)
    if kind == "embedding":
        return f"model.embed_tokens.{name}"
    if kind != "head":
        return f"model.layers.{model.whole_layer(layer) - 1}.{name}"
    return name if name.startswith("lm_head.") else f"model.{name}"


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, a tied head's left out, from the bottom of the model to its top."""
    tied = model.tied_parameters()
    return {
        parameter_name(model, layer, name): shape
        for layer in range(model.num_total_layers)
        for name, shape in model.parameter_shapes(model.layer_kind(layer)).items()
        if tied is None or (layer, name) != tied[1]
    }


def check_same_model(model: Model, other: Model, source: str) -> None:
    """Raises SpipeError naming the fields in which ``source`` differs from the plan's model."""
    ours, theirs = (_what_is_trained(spec) for spec in (model, other))
    ours, theirs = ({key: table.get(key) for key in ours | theirs} for table in (ours, theirs))
    differing = [
        f"{key} = {theirs[key]!r} there, {ours[key]!r} in the plan" for key in ours if ours[key] != theirs[key]
    ]
    if differing:
        shown = "; ".join(differing[:SHOWN]) + (f"; and {len(differing) - SHOWN} more" * (len(differing) > SHOWN))
        raise SpipeError(f"{source} is of another model than the plan's: {shown}; use a plan for it")


def _what_is_trained(model: Model) -> dict[str, Any]:
    """What a checkpoint of the model depends on."""
    if isinstance(model, ModelSpec):
        return model.model_dump(exclude={"name", "family", "max_sequence", "split_blocks"})
    kinds = [model.layer_kind(i) for i in range(model.num_total_layers)]
    shapes = {
        f"{i}.{name}": [*shape, *(["frozen"] if name in model.frozen_parameters(kind) else [])]
        for i, kind in enumerate(kinds)
        for name, shape in model.parameter_shapes(kind).items()
    }
    return {"num_layers": model.num_total_layers, **shapes}


class ModelFolder:
    """The weights of a model folder, checked against a model; nothing is read before it is asked for."""

    def __init__(self, folder: Path, model: ModelSpec) -> None:
        """Raises SpipeError if the folder lacks files or tensors, or if shapes differ: all of them, ten shown."""
        self.folder = folder
        if not folder.is_dir():
            raise SpipeError(f"{folder}: there is no such folder; give one with config.json and safetensors")
        check_same_model(model, from_huggingface(folder), str(folder))
        self.files = self._open()
        problems, shapes = [], parameter_shapes(model)
        for name, shape in shapes.items():
            if name not in self.files:
                problems.append(f"{name} is missing")
            elif (found := self.files[name].entries[name].shape) != shape:
                problems.append(f"{name} has the shape {list(found)}, the model needs {list(shape)}")
        ignored = ("lm_head.weight",) if model.tied_embeddings else ()
        problems += [
            f"{name} is not a parameter of this model"
            for name in self.files
            if name not in shapes and name not in ignored and not name.endswith("rotary_emb.inv_freq")
        ]
        require_none(problems, f"{folder}: {{count}} of its tensors do not fit the model {model.name}")

    def _open(self) -> dict[str, TensorFile]:
        index = self.folder / INDEX
        if not index.exists():
            if not (self.folder / WEIGHTS).exists():
                raise SpipeError(f"{self.folder}: neither {WEIGHTS} nor {INDEX}; only safetensors can be read")
            file = TensorFile(self.folder / WEIGHTS)
            return dict.fromkeys(file.entries, file)
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpipeError(f"{index}: not an index of safetensors ({error}); copy or download it again") from None
        missing = [name for name in names if not (self.folder / name).is_file()]
        require_none(missing, f"{self.folder}: {{count}} of {len(names)} shards are missing")
        shards = {name: TensorFile(self.folder / name) for name in names}
        absent = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in shards[shard].entries]
        require_none(absent, f"{self.folder}: {{count}} tensors are not in the shard that {INDEX} names")
        return {name: shards[shard] for name, shard in weight_map.items()}

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a tensor with a parameter, converting its type."""
        self.files[name].read_into(name, target)


def require_none(problems: list[str], message: str) -> None:
    """Raises SpipeError with ``message`` (``{count}`` filled in) and the first problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise SpipeError(f"{message.format(count=len(problems))}: {'; '.join(problems[:SHOWN])}{more}")


def config_of(model: ModelSpec, precision: str, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``config.json`` of a model: what the spec says over what ``original`` holds besides."""
    family = _ARCHITECTURES[model.family]
    config: dict[str, Any] = dict(original or {})
    for key in ("rope_parameters", "torch_dtype"):  # said below, in words that every version reads
        config.pop(key, None)
    config |= {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": model.family,
        "dtype": _TORCH_NAMES[precision],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.family != "qwen2":
        config["attention_bias"] = False
    config.setdefault("max_position_embeddings", model.max_sequence or 1 << 20)
    if model.family == "mistral":
        config.setdefault("sliding_window", None)
    if model.family in ("qwen2", "qwen3"):
        config.setdefault("use_sliding_window", False)
    for key in ("bos_token_id", "eos_token_id"):  # the defaults of the library may lie outside of the vocabulary
        config.setdefault(key, None)
    return dict(sorted(config.items()))


def check_exportable(model: Model) -> ModelSpec:
    """The model. Raises SpipeError for one that no family of transformers has."""
    if isinstance(model, LayerListSpec):
        raise SpipeError(
            f"{model.name} is a list of layers, which transformers does not know; a checkpoint's model-*.safetensors "
            "are the state_dict of an nn.Sequential of them"
        )
    needs = {"attention_bias": model.family == "qwen2", "qk_norm": model.family == "qwen3"}
    for field, value in needs.items():
        if getattr(model, field) != value:
            raise SpipeError(
                f"{model.name}: {field} = {getattr(model, field)} does not go with family = {model.family!r}; "
                "transformers has biases in qwen2 and q/k norms in qwen3 only: change the model's family"
            )
    return model


def write_model(
    folder: Path,
    model: ModelSpec,
    precision: str,
    read_into: Callable[[str, torch.Tensor], None],
    *,
    original: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config and weights in the type ``precision``; the same weights give the same bytes.

    Args:
        read_into: fills a tensor with a parameter, converting its type.
        original: a config whose other keys are kept.
        shard_bytes: a file is as large as fits below this, or one tensor.
    """
    shapes, dtype = parameter_shapes(model), DTYPES[precision]
    shards = _shards(shapes, dtype, shard_bytes)
    names = [WEIGHTS] if len(shards) == 1 else _shard_names(len(shards))
    for name, members in zip(names, shards, strict=True):
        with TensorWriter(folder / name, {member: (dtype, shapes[member]) for member in members}) as writer:
            for member in members:
                tensor = torch.empty(shapes[member], dtype=dtype)
                read_into(member, tensor)
                writer.write(member, tensor)
    if len(shards) > 1:
        write_index(folder, shapes, dtype, {m: n for n, members in zip(names, shards, strict=True) for m in members})
    write_text(folder / CONFIG, json.dumps(config_of(model, precision, original), indent=2) + "\n")


def write_index(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, weight_map: Mapping[str, str]
) -> None:
    """The file that says which shard a parameter is in."""
    total = sum(_size(shapes[name], dtype) for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def copy_extras(source: Path, target: Path, names: Iterable[str] = EXTRAS) -> None:
    """Copy the tokenizer and what else belongs to a model but is not trained."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = _size(shape, dtype)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards
