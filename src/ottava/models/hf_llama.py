"""Names and layouts of Llama weights: Ottava's and Hugging Face's, as one table, in both directions.

| Ottava                                     | Hugging Face                                            | rows                              |
|--------------------------------------------|---------------------------------------------------------|-----------------------------------|
| embedding.weight                           | model.embed_tokens.weight                               | ours may end in rows of padding   |
| layers.N.self_attention.layernorm_qkv      | model.layers.N.                                         |                                   |
|   .layer_norm_weight                       |   input_layernorm.weight                                | the same                          |
|   .weight                                  |   self_attn.q_proj / k_proj / v_proj.weight             | (queries, key, value) a kv head   |
| layers.N.self_attention.proj.weight        |   self_attn.o_proj.weight                               | the same                          |
| layers.N.layernorm_mlp.layer_norm_weight   |   post_attention_layernorm.weight                       | the same                          |
| layers.N.layernorm_mlp.fc1_gate_weight     |   mlp.gate_proj.weight                                  | the same                          |
| layers.N.layernorm_mlp.fc1_up_weight       |   mlp.up_proj.weight                                    | the same                          |
| layers.N.layernorm_mlp.fc2_weight          |   mlp.down_proj.weight                                  | the same                          |
| norm.weight                                | model.norm.weight                                       | the same                          |
| head.weight (not if tied)                  | lm_head.weight                                          | ours may end in rows of padding   |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ottava.models.llama import LlamaConfig

Layout = Literal["same", "qkv", "vocabulary"]


@dataclass(frozen=True)
class Row:
    """One line of the table, for one layer: our tensor, and the tensors of theirs that it is made of.

    >>> rows(LlamaConfig(layers=1))[2].theirs[0]
    'model.layers.0.self_attn.q_proj.weight'
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    config: LlamaConfig
    former: tuple[str, int] | None = None
    """In checkpoints before 0.2: the name of the matrix of which ours is the first (0) or second (1) half of the rows."""

    def export(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our tensor, whole, as theirs."""
        parts: tuple[Tensor, ...]
        if self.layout == "qkv":
            parts = _split_qkv(tensor, self.config)
        elif self.layout == "vocabulary":
            parts = (tensor[: self.config.vocab_size],)
        else:
            parts = (tensor,)
        return {name: part.contiguous() for name, part in zip(self.theirs, parts, strict=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Their tensors as ours."""
        parts = [tensors[name] for name in self.theirs]
        if self.layout == "qkv":
            return _join_qkv(parts, self.config)
        if self.layout == "vocabulary":
            padding = -parts[0].shape[0] % self.config.pad_vocab_to
            return torch.nn.functional.pad(parts[0], (0, 0, 0, padding))
        return parts[0]


def rows(config: LlamaConfig) -> list[Row]:
    """The table for a model of this shape, layer by layer.

    >>> len(rows(LlamaConfig(layers=2)))
    17
    """
    table = [Row("embedding.weight", ("model.embed_tokens.weight",), "vocabulary", config)]
    for n in range(config.layers):
        attention, mlp = f"layers.{n}.self_attention", f"layers.{n}.layernorm_mlp"
        their = f"model.layers.{n}"
        qkv = tuple(f"{their}.self_attn.{part}_proj.weight" for part in "qkv")
        after = f"{their}.post_attention_layernorm.weight"
        table += [
            Row(f"{attention}.layernorm_qkv.layer_norm_weight", (f"{their}.input_layernorm.weight",), "same", config),
            Row(f"{attention}.layernorm_qkv.weight", qkv, "qkv", config),
            Row(f"{attention}.proj.weight", (f"{their}.self_attn.o_proj.weight",), "same", config),
            Row(f"{mlp}.layer_norm_weight", (after,), "same", config),
            Row(f"{mlp}.fc1_gate_weight", (f"{their}.mlp.gate_proj.weight",), "same", config, (f"{mlp}.fc1_weight", 0)),
            Row(f"{mlp}.fc1_up_weight", (f"{their}.mlp.up_proj.weight",), "same", config, (f"{mlp}.fc1_weight", 1)),
            Row(f"{mlp}.fc2_weight", (f"{their}.mlp.down_proj.weight",), "same", config),
        ]
    table.append(Row("norm.weight", ("model.norm.weight",), "same", config))
    if not config.tie_embeddings:
        table.append(Row("head.weight", ("lm_head.weight",), "vocabulary", config))
    return table


def to_hf(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """A `state_dict()` of `Llama`, whole tensors, as Hugging Face names and shapes it.

    >>> hf.load_state_dict(to_hf(model.state_dict(), model.config), strict=not model.config.tie_embeddings)
    """
    return {name: tensor for row in rows(config) for name, tensor in row.export(state[row.ours]).items()}


def from_hf(tensors: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors as `Llama` names them. Missing, unknown and misshapen ones are named.

    >>> model.load_state_dict(from_hf(hf.state_dict(), model.config), strict=False)  # what is not weights stays
    """
    table = rows(config)
    wanted = {name for row in table for name in row.theirs}
    # A tied checkpoint may hold the head's copy as well; old ones hold the angles of rotary positions.
    ignorable = {n for n in tensors if n.endswith("rotary_emb.inv_freq")} | ({"lm_head.weight"} - wanted)
    missing, unknown = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted - ignorable)
    if missing or unknown:
        raise ValueError(
            f"These are not the weights of a Llama with {config.layers} layers: missing {missing[:4]} ({len(missing)} in all), "
            f"unknown {unknown[:4]} ({len(unknown)} in all)."
        )
    for name, shape in hf_shapes(config).items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} must have the shape {shape} for this config, got {tuple(tensors[name].shape)}.")
    out = {row.ours: row.load(tensors) for row in table}
    if config.tie_embeddings:
        out["head.weight"] = out["embedding.weight"]
    return out


def hf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of Hugging Face's tensors.

    >>> hf_shapes(LlamaConfig())["model.layers.0.self_attn.k_proj.weight"]
    (1024, 4096)
    """
    h, f, kv = config.hidden_size, config.ffn_hidden_size, config.kv_heads * config.head_channels
    shapes = {"q_proj": (h, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, h)}
    shapes |= {"gate_proj": (f, h), "up_proj": (f, h), "down_proj": (h, f)}
    shapes |= {"embed_tokens": (config.vocab_size, h), "lm_head": (config.vocab_size, h)}
    names = [name for row in rows(config) for name in row.theirs]
    return {name: shapes.get(name.split(".")[-2], (h,)) for name in names}


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """What Hugging Face's config.json says of such a model.

    >>> hf_config(LlamaConfig())["num_key_value_heads"]
    8
    """
    theirs = {name: getattr(config, ours) for ours, name in _CONFIG.items()}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **theirs}


def config_from_hf(found: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """The shape that a config.json describes; `changes` are fields of LlamaConfig. What Llama here does not have is an error.

    >>> config_from_hf(hf_config(LlamaConfig())) == LlamaConfig()
    True
    """
    try:
        return _config_from_hf(found, changes)
    except (KeyError, TypeError, AttributeError) as error:  # a stranger's values may be of any type
        raise ValueError(f"This config.json cannot be understood: {type(error).__name__} {str(error)[:80]}") from error


def _config_from_hf(found: Mapping[str, Any], changes: Mapping[str, Any]) -> LlamaConfig:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if type(found.get(name)) is not int or not 1 <= found[name] < 1 << 40:
            raise ValueError(f"This config.json has {name} {_brief(found.get(name))}: expected a number from 1.")
    rope = {**(found.get("rope_parameters") or {}), **(found.get("rope_scaling") or {})}
    # What changes the numbers of a model and cannot be seen in its tensors.
    for what, given, allowed in (
        ("model_type", found.get("model_type", "llama"), ("llama", "mistral")),
        ("hidden_act", found.get("hidden_act", "silu"), ("silu",)),
        ("attention_bias", found.get("attention_bias", False), (False,)),
        ("mlp_bias", found.get("mlp_bias", False), (False,)),
        ("sliding_window", found.get("sliding_window"), (None,)),
        ("partial_rotary_factor", found.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)), (1.0,)),
        ("rope type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
        ("head_dim", found.get("head_dim"), (None, found["hidden_size"] // found["num_attention_heads"])),
    ):
        if given not in allowed:
            raise ValueError(f"This config.json has {what} {_brief(given)}; Llama here has {allowed[-1]!r} alone.")
    flat = {"rope_theta": rope.get("rope_theta", 10000.0), "tie_word_embeddings": False, **found}
    flat.setdefault("num_key_value_heads", found["num_attention_heads"])
    for name, kinds in (
        *((name, (int,)) for name in ("num_key_value_heads", "max_position_embeddings")),
        *((name, (int, float)) for name in ("rope_theta", "rms_norm_eps")),
    ):
        if type(flat[name]) not in kinds or not 0 < flat[name] < 1 << 40:
            raise ValueError(f"This config.json has {name} {_brief(flat[name])}: expected a number above 0.")
    if type(flat["tie_word_embeddings"]) is not bool:
        raise ValueError(f"This config.json has tie_word_embeddings {_brief(flat['tie_word_embeddings'])}.")
    try:
        return LlamaConfig(**{**{ours: flat[name] for ours, name in _CONFIG.items()}, **changes})
    except ValueError as error:
        raise ValueError(f"This config.json makes no model: {error}") from error


def _brief(value: Any) -> str:
    """A value of a stranger's, of any size, in a message."""
    plain = type(value) in (str, float, bool, type(None)) or (type(value) is int and abs(value) < 1 << 64)
    return repr(value)[:60] if plain else f"({type(value).__name__})"


_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "max_length": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Field of LlamaConfig -> key of config.json."""


def _split_qkv(fused: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[kv_heads x (heads/kv_heads + 2) x channels, hidden] -> q, k, v."""
    queries = config.heads // config.kv_heads
    grouped = fused.view(config.kv_heads, queries + 2, config.head_channels, config.hidden_size)
    q, k, v = grouped.split((queries, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def _join_qkv(parts: list[Tensor], config: LlamaConfig) -> Tensor:
    """The inverse of `_split_qkv`."""
    grouped = [part.view(config.kv_heads, -1, config.head_channels, config.hidden_size) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)
