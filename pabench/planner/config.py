"""config.json → the shape of a model's KV cache. Plain JSON; transformers is asked only for what is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pabench.errors import CannotJudge, UsageError
from pabench.planner.config_weights import estimate_weights, widest_row
from pabench.planner.shape import LayerCache, ModelShape, dtype_name

# Names that older families use, and the usual one
_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}
_WINDOWED = {"sliding_attention"}
_FULL = {"full_attention", "attention", "hybrid", "chunked_attention", "global"}
_UNPAGED = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"}
# A window in the config means: on every layer. Elsewhere the config must list its layers' kinds
_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral"}
_HYBRIDS = ("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "state_size", "conv_L_cache", "linear_num_key_heads")


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape of the text model of a config.json. Weights are None where the config does not tell their number.

    Raises ``UsageError`` for a config that lacks or garbles a field, ``CannotJudge`` for an unknown kind of layer.
    """
    text = usual_names({**config, **(config.get("text_config") or {})})
    if not _says_all(text):
        text = _filled_in(config) or text
    layers = _layers(name, text)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return ModelShape(
        name=name,
        layers=layers,
        num_q_heads=_count(name, text, "num_attention_heads"),
        max_length=text.get("max_position_embeddings"),
        dtype=dtype_name(dtype, f"the dtype of '{name}'") if dtype in ("float32", "float16", "bfloat16") else "bf16",
        weights=estimate_weights(text, layers),
        hidden_size=text.get("hidden_size"),
        widest=widest_row(text),
        vocab_size=text.get("vocab_size") or 0,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a config file. Raises ``UsageError`` for anything else."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror or error}); check the path") from error
    except ValueError as error:
        raise UsageError(f"'{path}' is no JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise UsageError(f"'{path}' must hold a JSON object, the config.json of a model")
    return config


def usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the usual names beside the ones its family uses."""
    found = dict(config)
    for usual, others in _NAMES.items():
        if found.get(usual) is None:
            found[usual] = next((found[o] for o in others if found.get(o) is not None), None)
    return {key: value for key, value in found.items() if value is not None}


def _says_all(text: Mapping[str, Any]) -> bool:
    """Whether nothing that counts is left to the defaults of transformers' config class."""
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    windows_told = (
        text.get("sliding_window") is None
        or "layer_types" in text
        or text.get("use_sliding_window") is False
        or text.get("model_type") in _ALL_WINDOWED
    )
    hybrid_told = "layer_types" in text or not any(text.get(name) for name in _HYBRIDS)
    return all(name in text for name in needed) and windows_told and hybrid_told


def _filled_in(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The text config with the defaults of its class; None if this transformers does not know the family."""
    from transformers import AutoConfig

    from pabench.models.notices import quiet_transformers

    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with quiet_transformers():
            full = AutoConfig.for_model(str(config.get("model_type")), **rest).get_text_config()
    except Exception:  # an unknown or broken family: what it lacks is named below
        return None
    kinds = getattr(full, "layer_types", None) or getattr(full, "layers_block_type", None)
    return usual_names({**full.to_dict(), **({"layer_types": list(kinds)} if kinds else {})})


def _layers(name: str, text: Mapping[str, Any]) -> tuple[LayerCache, ...]:
    count = _count(name, text, "num_hidden_layers")
    kinds = text.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != count):
        raise UsageError(f"the layer_types of '{name}' must be a list of {count} kinds, one a layer")
    shared = text.get("num_kv_shared_layers") or 0  # the last ones read the keys and values of earlier layers
    layers = [_layer(name, text, i, None if kinds is None else kinds[i]) for i in range(count)]
    return tuple(LayerCache(0, 0) if i >= count - shared else layer for i, layer in enumerate(layers))


def _layer(name: str, text: Mapping[str, Any], index: int, kind: str | None) -> LayerCache:
    if kind in _UNPAGED:
        return LayerCache(0, 0)
    if kind is not None and kind not in _WINDOWED | _FULL:
        raise CannotJudge(
            f"layer {index} of '{name}' is a '{kind}', whose cache the planner does not know; "
            "give the attention's shape by --num-layers, --num-kv-heads and --head-dim"
        )
    window = text.get("sliding_window")
    if kind is None:
        windowed = window is not None and text.get("use_sliding_window") is not False
        windowed = windowed and text.get("model_type") in _ALL_WINDOWED
    else:
        windowed = kind in _WINDOWED
        if windowed and window is None:
            raise UsageError(f"layer {index} of '{name}' has a sliding window, but the config has no sliding_window")
    q_heads = _count(name, text, "num_attention_heads")
    if (rank := text.get("kv_lora_rank")) is not None:
        return LayerCache(1, rank + (text.get("qk_rope_head_dim") or 0), window if windowed else None, replicated=True)
    own = {}
    if kind == "full_attention" and text.get("global_head_dim"):
        own = {"head_dim": text["global_head_dim"], "heads": text.get("num_global_key_value_heads")}
    head_dim = own.get("head_dim") or text.get("head_dim") or _count(name, text, "hidden_size") // q_heads
    head_dim_v = own.get("head_dim") or text.get("v_head_dim") or head_dim
    kv_heads = own.get("heads") or _kv_heads(text, index, q_heads)
    return LayerCache(kv_heads, head_dim + head_dim_v, window if windowed else None)


def _kv_heads(text: Mapping[str, Any], index: int, q_heads: int) -> int:
    if text.get("multi_query") is not None and not text.get("new_decoder_architecture"):
        return 1 if text["multi_query"] else q_heads  # Falcon, GPT-BigCode
    heads = text.get("num_key_value_heads")
    if isinstance(heads, list):
        heads = heads[index] if index < len(heads) else None
    return heads or q_heads


def _count(name: str, text: Mapping[str, Any], field: str) -> int:
    value = text.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        got = "is missing" if value is None else f"is {json.dumps(value)}"
        raise UsageError(f"the config of '{name}' must have a whole number {field}, which {got}; mend the config.json")
    return value


def shape_from_numbers(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    latent_dim: int | None = None,
    num_q_heads: int | None = None,
    max_length: int | None = None,
    window: int | None = None,
) -> ModelShape:
    """A model given by the numbers of its attention alone; its weights are unknown."""
    layer = LayerCache(num_kv_heads, head_dim + (head_dim_v or head_dim), window)
    if latent_dim is not None:
        layer = LayerCache(1, latent_dim, window, replicated=True)
    return ModelShape("given by options", (layer,) * num_layers, num_q_heads, max_length)
