"""What a device can give to the cache: total × utilization − used − weights − reserve, each term kept."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pabench.errors import CannotJudge
from pabench.planner.shape import DTYPE_BYTES, ModelShape

LOGIT_ROWS = 256
SAFETY_SHARE, SAFETY_MIN = Fraction(2, 100), 512 << 20


@dataclass(frozen=True)
class Device:
    """A memory that holds blocks. None is unknown, which is not 0; ``why`` then says what failed."""

    name: str
    kind: str  # cpu, cuda, rocm, mps, …
    total_bytes: int | None
    used_bytes: int | None
    why: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def known(self) -> tuple[int, int]:
        """(total, used) bytes. Raises ``CannotJudge`` if either is unknown."""
        if self.total_bytes is None or self.used_bytes is None:
            what = "total" if self.total_bytes is None else "used"
            reason = f" ({self.why})" if self.why else ""
            raise CannotJudge(
                f"the {what} memory of device '{self.name}' is unknown{reason}, and nothing can be planned on that; "
                "name it in a file with --devices FILE"
            )
        return self.total_bytes, self.used_bytes


@dataclass(frozen=True)
class Budget:
    """budget = max(0, usable − used − weights − activations − safety), in bytes; usable = ⌊total × utilization⌋."""

    total: int
    usable: int
    used: int
    weights: int
    activations: int
    safety: int

    @property
    def bytes(self) -> int:
        return max(0, self.usable - self.used - self.weights - self.activations - self.safety)


def exact(utilization: float) -> Fraction:
    """0.9 as nine tenths: products with byte counts are then exact."""
    return Fraction(repr(utilization))


def safety_reserve(device: Device) -> int:
    """max(2 % of the total, 512 MiB) on accelerators, where fragmentation and other tenants cannot be seen; else 0."""
    total, _ = device.known()
    return 0 if device.is_cpu else max(int(total * SAFETY_SHARE), SAFETY_MIN)


def activation_reserve(model: ModelShape, step_tokens: int, *, has_head: bool = True) -> int:
    """Bytes of one step's activations: a few rows per token, not one per layer, since inference keeps none.

    step_tokens × (4 hidden + 2 × widest row) elements of the model's dtype, and fp32 logits of 256 tokens at most (a
    step of more is mostly prefill, which wants few) on the device with the output matrix. Not divided by ranks.
    """
    rows = step_tokens * (4 * (model.hidden_size or 0) + 2 * model.widest) * DTYPE_BYTES[model.dtype]
    return rows + (4 * model.vocab_size * min(step_tokens, LOGIT_ROWS) if has_head else 0)


def weight_bytes(model: ModelShape, first: int, count: int, ranks: int = 1) -> int:
    """Bytes of layers ``first`` … ``first + count − 1``, of the embedding beside layer 0 and the head beside the last.

    Raises ``CannotJudge`` if the model's parameters are unknown. Embedding and head are divided over ranks.
    """
    if model.weights is None:
        raise CannotJudge(
            f"how much memory the weights of '{model.name}' take is unknown; give --weights loaded and a devices file "
            "whose used_bytes holds them, or a config.json"
        )
    if count == 0:
        return 0
    w, last = model.weights, first + count == len(model.layers)
    own = zip(w.layers[first : first + count], model.layers[first : first + count], strict=True)
    parameters = sum(layer.parameters(cache, ranks) for layer, cache in own)
    if first == 0:
        parameters += -(-w.embedding // ranks)
    if last:
        parameters += w.final + (0 if w.tied and first == 0 else -(-w.head // ranks))
    return parameters * DTYPE_BYTES[model.dtype]
