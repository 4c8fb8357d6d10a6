"""What the planner knows of a model: the KV cache of each layer, and the weights that stand beside it."""

from __future__ import annotations

from dataclasses import dataclass

from pabench.errors import UsageError, did_you_mean

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = 4  # scales are fp32
ALIASES = {"fp8": "fp8_e4m3", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "half": "fp16"}


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of a token: ``kv_heads`` × ``width`` elements, width = head_dim of K + head_dim of V.

    MLA keeps one latent of width kv_lora_rank + rope_dim, which every rank needs whole (``replicated``). 0 heads is a
    layer without a paged cache. A window of W lets a query see the W newest keys, its own included.
    """

    kv_heads: int
    width: int
    window: int | None = None
    replicated: bool = False

    def heads_of_rank(self, ranks: int) -> int:
        """KV heads one of ``ranks`` holds: max(1, heads / ranks); see ``check_ranks`` for what is allowed."""
        if self.replicated or self.kv_heads == 0:
            return self.kv_heads
        return max(1, self.kv_heads // ranks)

    def elements(self, ranks: int = 1) -> int:
        """Elements a token needs here on one rank (e_l of the formulas)."""
        return self.heads_of_rank(ranks) * self.width

    def scales(self, ranks: int = 1) -> int:
        """Scales of one block or token: one for K and one for V of each head, one for a latent."""
        return self.heads_of_rank(ranks) * (1 if self.replicated else 2)


@dataclass(frozen=True)
class LayerWeights:
    """Parameters of one layer: those that ranks divide, those of K and V (which follow the KV heads), the rest."""

    sharded: int
    key_value: int
    replicated: int

    def parameters(self, cache: LayerCache, ranks: int = 1) -> int:
        key_value = self.key_value
        if cache.kv_heads:
            key_value = key_value * cache.heads_of_rank(ranks) // cache.kv_heads
        return -(-self.sharded // ranks) + key_value + self.replicated


@dataclass(frozen=True)
class Weights:
    """Parameters of a model. Tied: the head reads the embedding, so a device that has both ends holds it once."""

    layers: tuple[LayerWeights, ...]
    embedding: int
    head: int  # the output matrix; equal to the embedding's if tied
    final: int = 0  # the last norm and what else belongs to no layer
    tied: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it. ``weights`` None: unknown; ``dtype`` is that of weights and activations."""

    name: str
    layers: tuple[LayerCache, ...]
    num_q_heads: int | None = None
    max_length: int | None = None  # tokens
    dtype: str = "bf16"
    weights: Weights | None = None
    hidden_size: int | None = None
    widest: int = 0  # elements of the widest row a layer makes of a token: the MLP's, or Q, K and V together
    vocab_size: int = 0

    def elements(self) -> int:
        """Σ e_l: elements that one token needs in all layers."""
        return sum(layer.elements() for layer in self.layers)


def dtype_name(text: str, option: str) -> str:
    """A recorded dtype name. Raises ``UsageError`` for any other."""
    name = ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        raise UsageError(f"{option}: unknown dtype '{text}'; {did_you_mean(text, [*DTYPE_BYTES, 'fp8'])}")
    return name


def check_ranks(model: ModelShape, ranks: int) -> None:
    """Raises ``UsageError`` for a number of tensor-parallel ranks that cannot share the model's heads evenly."""
    if ranks < 1:
        raise UsageError(f"--tp must be at least 1, got {ranks}")
    reasons = []
    for heads in sorted({layer.kv_heads for layer in model.layers if layer.kv_heads and not layer.replicated}):
        if ranks <= heads and heads % ranks:
            reasons.append(f"{heads} KV heads cannot be divided by {ranks}")
        if ranks > heads and ranks % heads:
            reasons.append(f"{ranks} is no multiple of {heads} KV heads, so they cannot be repeated evenly")
    if model.num_q_heads is None:
        if ranks > 1:
            raise UsageError(f"--tp {ranks} needs the number of query heads; give --num-q-heads")
    elif model.num_q_heads % ranks:
        reasons.append(f"{model.num_q_heads} query heads cannot be divided by {ranks}")
    if reasons:
        allowed = [r for r in range(1, (model.num_q_heads or 1) + 1) if _divides(model, r)]
        raise UsageError(f"--tp {ranks} is impossible: {'; '.join(reasons)}; use {', '.join(map(str, allowed))}")


def _divides(model: ModelShape, ranks: int) -> bool:
    heads = {layer.kv_heads for layer in model.layers if layer.kv_heads and not layer.replicated}
    even = all(h % ranks == 0 or ranks % h == 0 for h in heads)
    return even and (model.num_q_heads or 1) % ranks == 0


def kv_head_of_rank(rank: int, ranks: int, kv_heads: int) -> range:
    """The KV heads that ``rank`` holds: a slice of them, or head ⌊rank / (ranks / heads)⌋ where heads are repeated."""
    if ranks <= kv_heads:
        each = kv_heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank // (ranks // kv_heads)
    return range(head, head + 1)
