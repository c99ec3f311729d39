"""Model specs: the shapes, parameters, operations and bytes of a LLaMA-like model, layer by layer.

A model is a list of layers: the embedding, ``num_layers`` transformer blocks, the head (final norm and LM head). With
``split_blocks`` a block is two layers, attention and feed-forward (mlp), so that stages can be cut between them.
Legend: b sequences of s tokens, T = b·s, h hidden size, f FFN size, a = heads·head_dim, k = kv_heads·head_dim,
V vocabulary, e bytes per element.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from spipe.errors import SpipeError, unknown
from spipe.tensors import TensorSpec
from spipe.units import Flag, Positive, Spec, read_table

LayerKind = Literal["embedding", "block", "attention", "mlp", "head"]
PassName = Literal["forward", "recompute", "backward"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]

MAX_LOGITS = 2**27
"""Logits that may exist at a time: half a GiB of them in fp32."""
LAYER_KINDS: tuple[LayerKind, ...] = ("embedding", "block", "attention", "mlp", "head")
BLOCK_PARTS: tuple[LayerKind, ...] = ("attention", "mlp")
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
# Operations of a pass in units of the forward pass.
PASS_FACTOR: dict[PassName, int] = {"forward": 1, "recompute": 1, "backward": 2}

Size = Annotated[int, Field(strict=True, ge=1, le=2**24)]
Count = Annotated[int, Field(strict=True, ge=1, le=2**16)]
CountOrDefault = Annotated[int, Field(strict=True, ge=0, le=2**16)]


class ModelSpec(Spec):
    """A decoder-only model with RMS norms, rotary positions, (grouped-query) attention and a SwiGLU feed-forward."""

    name: Annotated[str, Field(min_length=1)]
    num_layers: Count
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Size
    ffn_size: Size
    num_heads: Count
    num_kv_heads: CountOrDefault = 0
    """Key/value heads; left out (or 0): as many as ``num_heads``."""
    head_dim: CountOrDefault = 0
    """Width of a head; left out (or 0): ``hidden_size / num_heads``."""
    vocab_size: Size
    tied_embeddings: Flag = False
    """Embedding and LM head are one parameter."""
    norm_epsilon: Positive = 1e-5
    rope_theta: Positive = 10000.0
    attention_bias: Flag = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: Flag = False
    """RMS norm of every query and key head (Qwen3)."""
    max_sequence: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Longest sequence the model is meant for; None: no limit."""
    rope_scaling: dict[str, JsonValue] | None = None
    """Hugging Face's ``rope_scaling``, kept as it is."""
    family: Family = "llama"
    split_blocks: Flag = False
    """Attention and feed-forward of a block are layers of their own. The same model, parameters and results."""

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
            if not data.get("num_kv_heads"):
                data["num_kv_heads"] = heads
            if not data.get("head_dim") and hidden % heads == 0:
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if not self.head_dim:
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not divide by num_heads = {self.num_heads}; "
                "change one of them or give head_dim"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} should be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} should be even (rotary positions turn pairs)")
        return self

    # Layers

    @property
    def num_total_layers(self) -> int:
        """Embedding, blocks (or their parts) and head."""
        return len(self._kinds)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers that this model has, from the bottom up."""
        return tuple(dict.fromkeys(self._kinds))

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        block: tuple[LayerKind, ...] = BLOCK_PARTS if self.split_blocks else ("block",)
        return "embedding", *block * self.num_layers, "head"

    @property
    def attention_size(self) -> int:
        """Width of all query heads together, a."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together, k."""
        return self.num_kv_heads * self.head_dim

    def layer_kind(self, layer: int) -> LayerKind:
        """Kind of layer 0 .. ``num_total_layers`` - 1."""
        if not 0 <= layer < self.num_total_layers:
            raise SpipeError(f"layer {layer} of {self.name}: should be 0 to {self.num_total_layers - 1}")
        return self._kinds[layer]

    def whole_layer(self, layer: int) -> int:
        """The number that a layer, or the block it is part of, has where blocks are not split: 0 is the embedding."""
        parts = len(BLOCK_PARTS) if self.split_blocks else 1
        return -(-layer // parts) if layer < self.num_total_layers - 1 else self.num_layers + 1

    # Parameters

    def parameter_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Name (as in Hugging Face, inside the layer) -> shape, in the order of the parameter store."""
        if kind not in LAYER_KINDS:
            raise unknown("layer kind", kind, LAYER_KINDS)
        return dict(self._shapes[kind])

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        shapes: dict[str, dict[str, tuple[int, ...]]]
        shapes = {kind: self._shapes_of(kind) for kind in LAYER_KINDS if kind != "block"}
        return {**shapes, "block": {name: shape for part in BLOCK_PARTS for name, shape in shapes[part].items()}}

    def _shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        h, f, a, k, v = self.hidden_size, self.ffn_size, self.attention_size, self.kv_size, self.vocab_size
        if kind == "embedding":
            return {"weight": (v, h)}
        if kind == "head":
            return {"norm.weight": (h,), "lm_head.weight": (v, h)}
        if kind == "mlp":
            return {
                "post_attention_layernorm.weight": (h,),
                "mlp.gate_proj.weight": (f, h),
                "mlp.up_proj.weight": (f, h),
                "mlp.down_proj.weight": (h, f),
            }
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,)}
        for projection, rows in (("q_proj", a), ("k_proj", k), ("v_proj", k)):
            shapes[f"self_attn.{projection}.weight"] = (rows, h)
            if self.attention_bias:
                shapes[f"self_attn.{projection}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes | {"self_attn.o_proj.weight": (h, a)}

    def frozen_parameters(self, kind: str) -> frozenset[str]:
        """Names of parameters that are not trained: none."""
        return frozenset()

    def layer_num_parameters(self, kind: str) -> int:
        """Parameters that one layer uses; a tied LM head counts in both layers that use it."""
        total = 0
        for shape in self.parameter_shapes(kind).values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def layer_num_trained(self, kind: str) -> int:
        """Parameters of a layer that are trained: all."""
        return self.layer_num_parameters(kind)

    def frozen_layers(self) -> frozenset[int]:
        """Layers with nothing to train: none."""
        return frozenset()

    def tied_parameters(self) -> tuple[tuple[int, str], tuple[int, str]] | None:
        """The two (layer, name) that are one parameter, if embeddings are tied."""
        if not self.tied_embeddings:
            return None
        return (0, "weight"), (self.num_total_layers - 1, "lm_head.weight")

    def num_parameters(self) -> int:
        """Parameters of the model; a tied one counts once."""
        blocks = self.num_layers * self.layer_num_parameters("block")
        ends = self.layer_num_parameters("embedding") + self.layer_num_parameters("head")
        return blocks + ends - (self.vocab_size * self.hidden_size if self.tied_embeddings else 0)

    # Operations (2 per multiply-add)

    def layer_forward_flops(self, kind: str, num_sequences: int, sequence: int, *, causal: bool = False) -> float:
        """Operations of one layer's forward pass over b = ``num_sequences`` sequences of s = ``sequence`` tokens.

        Attention: 2T(2ha + 2hk) + 4Tsa; mlp: 6Thf; block: both; head: 2ThV; embedding: 0. The term with s counts the
        full score matrix, as the published TFLOP/s do; ``causal`` halves it, which is what a causal attention kernel
        does.
        """
        tokens, h = num_sequences * sequence, self.hidden_size
        if kind == "embedding":
            return 0.0
        if kind == "head":
            return 2.0 * tokens * h * self.vocab_size
        attention = 2.0 * tokens * h * (2 * self.attention_size + 2 * self.kv_size)
        attention += (2.0 if causal else 4.0) * tokens * sequence * self.attention_size
        mlp = 6.0 * tokens * h * self.ffn_size
        return _of_block(kind, attention, mlp, attention + mlp)

    def layer_flops(
        self, kind: str, pass_name: PassName, num_sequences: int, sequence: int, *, causal: bool = False
    ) -> float:
        """Operations of one pass of a layer: recompute 1 ×, backward 2 × the forward pass."""
        if pass_name not in PASS_FACTOR:
            raise unknown("pass", pass_name, PASS_FACTOR)
        return PASS_FACTOR[pass_name] * self.layer_forward_flops(kind, num_sequences, sequence, causal=causal)

    def output_share(self, kind: LayerKind, sequence: int) -> float:
        """Share of a layer's forward operations in the product that only its output needs, and no backward."""
        width = {"block": self.ffn_size, "mlp": self.ffn_size, "attention": self.attention_size}.get(kind)
        if width is None:
            return 0.0
        return 2 * sequence * width * self.hidden_size / self.layer_forward_flops(kind, 1, sequence, causal=True)

    def model_flops_per_token(self, sequence: int, *, causal: bool = False) -> float:
        """Operations of forward and backward of the whole model per token; recompute does not count."""
        block = self.layer_forward_flops("block", 1, sequence, causal=causal)
        head = self.layer_forward_flops("head", 1, sequence, causal=causal)
        return 3 * (self.num_layers * block + head) / sequence

    # Bytes

    def boundary_bytes(self, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """An activation (or its gradient) between two layers."""
        return num_sequences * sequence * self.hidden_size * element_bytes

    def boundary_shape(self, layer: int, num_sequences: int, sequence: int) -> tuple[int, ...]:
        """Shape of what enters layer ``layer`` >= 1."""
        return num_sequences, sequence, self.hidden_size

    def input_tensors(self, num_sequences: int, sequence: int) -> tuple[TensorSpec, TensorSpec]:
        """What the first layer and the loss read of a microbatch: token ids and labels; shapes per sequence."""
        tokens = TensorSpec(shape=(1, sequence), dtype="int64")
        return tokens, tokens

    def loss_chunk_tokens(self, tokens: int) -> int:
        """Tokens whose logits are computed at a time: all of them, or so many that they are MAX_LOGITS elements."""
        return tokens if tokens * self.vocab_size <= MAX_LOGITS else max(1, MAX_LOGITS // self.vocab_size)

    def layer_activation_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """What autograd saves in one layer between recompute and backward, its output included and its input not
        (attention without a score matrix).

        In elements per token: attention and mlp each the normed input and the output 2h. Attention: queries and output
        2a; keys and values 2k (with q/k norms also their inputs, and the queries as attention reads them: 2a + k); and
        4 bytes per head for the log-sum-exp (and for each q/k norm). Mlp: gate, up and the product 3f.
        Block: both. Head: normed input h and, in fp32, the log-softmax V; in chunks only the former. Embedding: token
        ids.
        """
        tokens, h = num_sequences * sequence, self.hidden_size
        if kind == "embedding":
            return 8 * tokens
        if kind == "head":
            whole = self.loss_chunk_tokens(tokens) == tokens
            return tokens * (element_bytes * h + 4 * self.vocab_size * whole)
        attention = 2 * (h + self.attention_size + self.kv_size)
        heads = self.num_heads
        if self.qk_norm:
            attention += 2 * self.attention_size + self.kv_size
            heads += self.num_heads + self.num_kv_heads
        attention_bytes = tokens * (element_bytes * attention + 4 * heads)
        mlp_bytes = tokens * element_bytes * (2 * h + 3 * self.ffn_size)
        return _of_block(kind, attention_bytes, mlp_bytes, attention_bytes + mlp_bytes)

    def layer_backward_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """The largest temporaries of one layer's backward pass, beyond what autograd saved.

        Attention and mlp: the gradient of one product, and that of another or of a weight; block: the larger of the
        two. Head: two gradients of the logits in fp32; in chunks one chunk of logits and their gradient, and the
        gradients of input and weight.
        """
        tokens, h = num_sequences * sequence, self.hidden_size
        if kind == "embedding":
            return self.vocab_size * h * element_bytes
        if kind == "head":
            chunk, weight = self.loss_chunk_tokens(tokens), self.vocab_size * h * element_bytes
            if chunk == tokens:
                return max(8 * tokens * self.vocab_size, element_bytes * tokens * self.vocab_size + weight)
            return tokens * h * element_bytes + weight + chunk * self.vocab_size * (4 + element_bytes)
        width = _of_block(kind, self.attention_size, self.ffn_size, max(self.attention_size, self.ffn_size))
        return element_bytes * (tokens * width + max(tokens * width, width * h))

    def layer_forward_activation_bytes(self, kind: str, num_sequences: int, sequence: int, element_bytes: int) -> int:
        """The largest temporaries of one layer's forward pass without autograd, its output included.

        Attention and mlp: residual and normed input 2h, and queries, keys, values and output 2a + 2k, or gate, up and
        product 3f; block: the larger of the two. Head: normed input, logits, and in fp32 logits and log-softmax; in
        chunks without the latter.
        """
        tokens, h = num_sequences * sequence, self.hidden_size
        if kind == "embedding":
            return tokens * h * element_bytes
        if kind == "head":
            chunk = self.loss_chunk_tokens(tokens)
            in_fp32 = 8 if chunk == tokens else 4
            return tokens * h * element_bytes + chunk * self.vocab_size * (element_bytes + in_fp32)
        attention, mlp = 2 * (self.attention_size + self.kv_size), 3 * self.ffn_size
        return tokens * element_bytes * (2 * h + _of_block(kind, attention, mlp, max(attention, mlp)))

    def check_sequence(self, sequence: int) -> None:
        """Raises `SpipeError` if the model is not meant for sequences this long."""
        if sequence < 1 or (self.max_sequence is not None and sequence > self.max_sequence):
            limit = "or more" if self.max_sequence is None else f"to {self.max_sequence} (max_sequence)"
            raise SpipeError(f"sequence = {sequence}: {self.name} takes 1 {limit}")


Amount = TypeVar("Amount", int, float)


def _of_block(kind: str, attention: Amount, mlp: Amount, both: Amount) -> Amount:
    """What a layer of a kind has of something that the parts of a block have."""
    amounts = {"attention": attention, "mlp": mlp, "block": both}
    if kind not in amounts:
        raise unknown("layer kind", kind, LAYER_KINDS)
    return amounts[kind]


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int, **rest: Any) -> ModelSpec:
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, ffn_size=ffn, num_heads=heads, vocab_size=vocab, **rest
    )


def _qwen3(name: str, layers: int, hidden: int, ffn: int, heads: int, *, tied: bool) -> ModelSpec:
    more = {"num_kv_heads": 8, "head_dim": 128, "norm_epsilon": 1e-6, "rope_theta": 1e6, "max_sequence": 40960}
    return _llama(name, layers, hidden, ffn, heads, 151936, tied_embeddings=tied, qk_norm=True, family="qwen3", **more)


MODELS: dict[str, ModelSpec] = {
    model.name: model
    for model in (
        _llama("tiny", 6, 128, 352, 4, 256, max_sequence=512),
        # The sizes of the published SPipe runs (PACT 2025).
        _llama("10b", 48, 4096, 11008, 2, 50304),
        _llama("19b", 48, 5632, 13312, 4, 50304),
        _llama("30b", 96, 5120, 12800, 4, 50304),
        _llama("40b", 96, 5888, 15360, 4, 50304),
        _llama("52b", 96, 6656, 17920, 8, 50304),
        _llama("69b", 96, 7680, 20480, 8, 50304),
        _llama("88b", 192, 6144, 16384, 16, 50304),
        _llama("110b", 192, 6912, 18432, 16, 50304),
        _llama("llama2-7b", 32, 4096, 11008, 32, 32000, max_sequence=4096),
        _llama("llama2-13b", 40, 5120, 13824, 40, 32000, max_sequence=4096),
        _llama("llama2-70b", 80, 8192, 28672, 64, 32000, num_kv_heads=8, max_sequence=4096),
        _llama("llama3-8b", 32, 4096, 14336, 32, 128256, num_kv_heads=8, rope_theta=500000.0, max_sequence=8192),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12288, 32, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 25600, 64, tied=False),
    )
}

# Where a config.json leaves a value out, Hugging Face's own default for that model type holds.
_KV_HEADS_DEFAULT: dict[str, int | None] = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_DIM_DEFAULT: dict[str, int] = {"qwen3": 128}


def from_huggingface(path: str | Path) -> ModelSpec:
    """A spec from a Hugging Face ``config.json`` (or the folder that holds it).

    A sliding attention window becomes a limit on the sequence length, below which it makes no difference.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    config = read_table(file)
    return _from_config(config, name=file.resolve().parent.name or "model", source=str(file))


def _from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise SpipeError(f"{source}: model_type = {family!r}; supported are {', '.join(FAMILIES)}")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        rope = {}
    refused = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_bias": family != "qwen2" and bool(config.get("attention_bias")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
        "num_experts": bool(config.get("num_experts")),
        "num_local_experts": bool(config.get("num_local_experts")),
    }
    for key, unfit in refused.items():
        if unfit:
            raise SpipeError(
                f"{source}: {key} = {config[key]!r} is not supported; supported are dense models with silu, biases "
                "only on Qwen2's query, key and value projections, and full rotary positions"
            )
    limits = [config.get("max_position_embeddings")]
    if config.get("use_sliding_window", family == "mistral"):
        limits.append(config.get("sliding_window"))
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_size": "intermediate_size",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
    }
    missing = [key for key in names.values() if key not in config]
    if missing:
        raise SpipeError(f"{source}: missing {', '.join(missing)}")
    fields = {field: config[key] for field, key in names.items()}
    fields |= {
        "name": name,
        "num_kv_heads": config.get("num_key_value_heads", _KV_HEADS_DEFAULT[family]) or 0,
        "head_dim": config.get("head_dim", _HEAD_DIM_DEFAULT.get(family)) or 0,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "attention_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "max_sequence": min((limit for limit in limits if limit is not None), default=None),
        "rope_scaling": rope or None,
        "family": family,
    }
    return ModelSpec.from_table(fields, source)


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A built-in model by name, or one from a file: a Hugging Face ``config.json`` or its folder, or a ``.toml`` or
    ``.json`` file with the fields of `ModelSpec`.
    """
    text = str(name_or_path)
    if text in MODELS:
        return MODELS[text]
    path = Path(name_or_path)
    if path.is_dir():
        return from_huggingface(path)
    if not path.is_file():
        if path.suffix in (".json", ".toml") or "/" in text:
            raise SpipeError(f"model {text!r}: there is no such file or folder")
        raise unknown("model", text, MODELS, "Or give a path to a config.json, its folder, or a .toml file.")
    data = read_table(path)
    if "model_type" in data:
        return _from_config(data, name=path.resolve().parent.name or "model", source=text)
    return ModelSpec.from_table({"name": path.stem} | data, text)
