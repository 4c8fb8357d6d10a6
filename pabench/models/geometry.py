"""The attention geometry of a model, out of its transformers config; what cannot be paged is refused here, by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pabench.errors import CannotJudge

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_BYPASSES = frozenset({"falcon", "bloom", "mpt", "gpt_neo", "xglm"})
_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class AttentionGeometry:
    """Shape of the attention of every layer. A window of W lets a query see the W newest keys, its own included."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    sliding_windows: tuple[int | None, ...]  # one a layer
    soft_cap: float | None
    has_sinks: bool
    max_length: int  # tokens
    vocab_size: int


def describe_attention(config_or_model: PreTrainedConfig | PreTrainedModel) -> AttentionGeometry:
    """Raises ``CannotJudge`` naming the architecture and the reason if its attention cannot run paged."""
    whole: Any = getattr(config_or_model, "config", config_or_model)
    config = whole.get_text_config()
    if reason := _why_not(config, config_or_model):
        raise CannotJudge(
            f"architecture '{config.model_type}' cannot be run paged: {reason}; "
            "use a model whose attention goes through transformers' AttentionInterface, such as Llama, Qwen or Gemma"
        )
    num_q_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_q_heads
    return AttentionGeometry(
        num_layers=config.num_hidden_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=_num_kv_heads(config, num_q_heads),
        head_dim=head_dim,
        head_dim_v=getattr(config, "v_head_dim", None) or head_dim,
        sliding_windows=_windows(config),
        soft_cap=getattr(config, "attn_logit_softcapping", None),
        has_sinks=config.model_type == "gpt_oss",
        max_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


def _num_kv_heads(config: Any, num_q_heads: int) -> int:
    if hasattr(config, "multi_query"):  # GPT-BigCode
        return 1 if config.multi_query else num_q_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or num_q_heads
    return kv_heads


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return tuple(window if uses else None for _ in range(config.num_hidden_layers))
    return tuple(window if kind == _WINDOWED else None for kind in kinds)


def _why_not(config: Any, config_or_model: object) -> str | None:
    """Why this attention does not fit one pool of K/V blocks a layer behind one attention call a layer, or None."""

    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    kinds = set(getattr(config, "layer_types", None) or ()) - {_WINDOWED, _FULL}
    reasons = {
        "its attention is computed inside the layer and bypasses AttentionInterface": config.model_type in _BYPASSES
        or _bypasses(config_or_model),
        "it caches a compressed latent in place of keys and values (MLA)": has("kv_lora_rank"),
        f"some of its layers are no causal attention ({', '.join(sorted(kinds))})": bool(kinds),
        "some of its layers are convolutions": config.model_type.startswith("lfm2"),
        "some of its layers are state-space models": any(
            has(name) for name in ("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "state_size")
        ),
        "it has cross-attention": any(
            has(name) for name in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers")
        ),
        "its attention is bidirectional": has("use_bidirectional_attention") or "bert" in config.model_type,
        "some of its layers share another layer's keys and values": has("num_kv_shared_layers"),
        "its layers differ in head count or head size": has("global_head_dim")
        or isinstance(getattr(config, "num_key_value_heads", None), list),
        "its config does not say how many heads, layers, positions or tokens it has": any(
            getattr(config, name, None) is None
            for name in (
                "num_attention_heads",
                "num_hidden_layers",
                "hidden_size",
                "max_position_embeddings",
                "vocab_size",
            )
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _bypasses(model: object) -> bool:
    """Whether no module of the model is written in a file that knows AttentionInterface; class flags do not tell."""
    modules = getattr(model, "modules", None)
    return modules is not None and not any(
        hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in modules()
    )
