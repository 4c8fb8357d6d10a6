"""How many parameters a config implies, per layer: enough to say which layers fit where (within 1 % of the truth)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pabench.planner.shape import LayerCache, LayerWeights, Weights

# Two matrices in the MLP (up, down), with biases; all other families have three (gate, up, down)
_UNGATED = {"gpt2", "gpt_bigcode", "gptj", "gpt_neox", "gpt_neo", "opt", "phi", "falcon", "bloom", "mpt", "starcoder2"}
_TIED_UNLESS_TOLD = {"gpt2", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "starcoder2", "cohere", "cohere2"}
_LEARNED_POSITIONS = {"gpt2", "gpt_bigcode", "opt"}


def estimate_weights(text: Mapping[str, Any], layers: Sequence[LayerCache]) -> Weights | None:
    """The parameters of a decoder-only transformer, its MLPs dense or of experts, its attention plain or MLA.

    None where the config does not tell: layers that are no attention, MLPs that differ in size. Source: the matrices
    of transformers' modelling files, counted; norms and biases as a few rows of the hidden size.
    """
    hidden, vocab = text.get("hidden_size"), text.get("vocab_size")
    regular = all(layer.kv_heads for layer in layers) and not isinstance(text.get("intermediate_size"), list)
    if not regular or not isinstance(hidden, int) or not isinstance(vocab, int) or _inner(text) is None:
        return None
    family = str(text.get("model_type", ""))
    embedding = vocab * hidden
    if family in _LEARNED_POSITIONS:
        embedding += (text.get("max_position_embeddings") or 0) * hidden
    tied = text.get("tie_word_embeddings", family in _TIED_UNLESS_TOLD or family.startswith("gemma"))
    return Weights(
        layers=tuple(_layer(text, i, layer) for i, layer in enumerate(layers)),
        embedding=embedding,
        head=vocab * hidden,
        final=2 * hidden,
        tied=bool(tied),
    )


def widest_row(text: Mapping[str, Any]) -> int:
    """Elements of the widest row that a layer makes of one token: an MLP's input pair, or Q, K and V."""
    q_heads = text.get("num_attention_heads") or 1
    head_dim = text.get("head_dim") or (text.get("hidden_size") or 0) // q_heads
    active = (text.get("num_experts_per_tok") or 0) * (text.get("moe_intermediate_size") or 0)
    return max(_inner(text) or 0, active, 3 * q_heads * head_dim)


def _inner(text: Mapping[str, Any]) -> int | None:
    inner = text.get("intermediate_size")
    if inner is None and text.get("model_type") in _UNGATED:
        return 4 * int(text["hidden_size"])
    return inner if isinstance(inner, int) else None


def _layer(text: Mapping[str, Any], index: int, layer: LayerCache) -> LayerWeights:
    hidden = text["hidden_size"]
    heads = text["num_attention_heads"]
    small = 6 * hidden if text.get("model_type") not in _UNGATED else 6 * hidden + (_inner(text) or 0)
    mlp, router = _mlp(text, index)
    if layer.replicated:
        sharded, replicated = _latent_attention(text)
        return LayerWeights(sharded + mlp, 0, replicated + router + small)
    head_dim = text.get("head_dim") or hidden // heads
    head_dim_v = text.get("v_head_dim") or head_dim
    query_and_out = hidden * heads * (head_dim + head_dim_v)
    return LayerWeights(query_and_out + mlp, hidden * layer.elements(), router + small)


def _latent_attention(text: Mapping[str, Any]) -> tuple[int, int]:
    """MLA (DeepSeek-V2): (what heads divide, what every rank holds) of one layer."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    latent, rope = text["kv_lora_rank"], text.get("qk_rope_head_dim") or 0
    nope, value = text.get("qk_nope_head_dim") or 0, text.get("v_head_dim") or 0
    q_rank = text.get("q_lora_rank")
    query = (q_rank or hidden) * heads * (nope + rope)
    down = hidden * (latent + rope) + (hidden * q_rank if q_rank else 0)
    return query + latent * heads * (nope + value) + heads * value * hidden, down


def _mlp(text: Mapping[str, Any], index: int) -> tuple[int, int]:
    """(parameters of the MLP or of all experts, of the router) of a layer."""
    hidden, inner = text["hidden_size"], _inner(text) or 0
    matrices = 2 if text.get("model_type") in _UNGATED else 3
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((text[name] for name in names if text.get(name)), 0)
    step = text.get("decoder_sparse_step") or 1
    dense = index < (text.get("first_k_dense_replace") or 0) or index in (text.get("mlp_only_layers") or ())
    if not experts or dense or (index + 1) % step:
        return matrices * hidden * inner, 0
    expert = text.get("moe_intermediate_size") or inner
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * expert
    return matrices * hidden * (experts * expert + shared), experts * hidden
