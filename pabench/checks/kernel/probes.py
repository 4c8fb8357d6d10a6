"""What the queries, keys and values of a case hold: each probe sees what the others are blind to.

Shape legend: L tokens of a sequence, T its query tokens, Hq query heads, Hkv KV heads, D head_dim, Dv value head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pabench.capture.tensors import read_capture
from pabench.checks.kernel.shapes import Shape

NEEDLE_SCORE = 20.0  # e⁻²⁰ × 4096: what is not the needle weighs about a rounding in fp32; more where L is larger
NEEDLE_LENGTH = 4096
SINK_SHARE = 8.0  # × the weight of all other keys together
LEVEL_SCORE = 8.0  # a score off by 1 % moves the answer by 8 %
CODE_PERIOD = 19  # no block size: whole blocks must not sum to zero
DIGITS = ("block", "offset", "head", "seq")  # what a fingerprint names, digit by digit
_BASE, _DIGITS_EACH = 8, 3  # small integers are exact in every cache dtype

Overlay = Literal["plausible", "nan", "1e4"]
# content: judged against the oracle; invariance: against another call of the same kernel; captured: a model's own data
ProbeKind = Literal["content", "invariance", "captured"]


@dataclass(frozen=True)
class Content:
    """One sequence: query [T, Hq, D], key [L, Hkv, D], value [L, Hkv, Dv], fp32. ``given`` are the sinks and
    alibi_slopes [Hq] that belong to them, if any."""

    query: Tensor
    key: Tensor
    value: Tensor
    given: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """``overlay`` is what lies where nothing may be read: past the lengths and in blocks that nobody owns."""

    name: str
    make: Callable[[Shape, int, torch.Generator, float], Content]
    overlay: Overlay
    exact: bool = False  # judged by a count of slots in place of the three-way rule
    kind: ProbeKind = "content"
    integers: bool = False  # V holds small integers × v_scale: exact in every cache dtype


def iid(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """N(0, 1) keys and values; queries such that scores have a standard deviation of 2."""
    tokens, length = shape.seqs[seq]
    query = _normal(rng, tokens, shape.group * shape.kv_heads, shape.head_dim)
    return Content(query * (2 / (scale * math.sqrt(shape.head_dim))), *_normal_kv(shape, length, rng))


def count(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """q = 0, so every visible slot weighs the same; V is a balanced ±1 code, its last channel all ones."""
    tokens, length = shape.seqs[seq]
    query = torch.zeros(tokens, shape.group * shape.kv_heads, shape.head_dim)
    key, _ = _normal_kv(shape, length, rng)
    return Content(query, key, balanced_code(length, shape.kv_heads, shape.head_dim_v or shape.head_dim, rng))


def balanced_code(length: int, heads: int, dim: int, rng: torch.Generator) -> Tensor:
    """±1 [length, heads, dim]: every run of tokens sums to a small integer; the last channel is 1."""
    pairs = -(-length // (2 * CODE_PERIOD))
    first = torch.randint(0, 2, (pairs, CODE_PERIOD, heads, dim), generator=rng) * 2.0 - 1.0
    second = -first[:, torch.randperm(CODE_PERIOD, generator=rng)]
    code = torch.stack([first, second], 1).flatten(0, 2)[:length]
    code[..., -1] = 1.0
    return code


def needle(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """One key answers the query: the first, the last, or one at a block's edge. The answer is its value."""
    length = shape.seqs[seq][1]
    edge = min(max(length - 1, 0), shape.block_size * max(1, length // shape.block_size // 2))
    slots = (0, length - 1, edge, max(edge - 1, 0))
    content = _aligned(shape, seq, rng, scale, slots[seq % 4])
    return Content(content.query, content.key, _normal_kv(shape, length, rng)[1])


def fingerprint(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """One random key answers; V names block, offset, KV head and sequence, so the output says what was read."""
    length = shape.seqs[seq][1]
    slot = int(torch.randint(0, max(length, 1), (), generator=rng))
    content = _aligned(shape, seq, rng, scale, slot, one_direction=True)  # so that another head's slot answers too
    return Content(content.query, content.key, fingerprints(shape, seq))


def fingerprints(shape: Shape, seq: int) -> Tensor:
    """[L, Hkv, Dv]: 3 base-8 digits each of block, offset in the block, KV head and sequence, repeated; 1 is added."""
    length, dim = shape.seqs[seq][1], shape.head_dim_v or shape.head_dim
    position = torch.arange(length)
    parts = {
        "block": (position // shape.block_size)[:, None].expand(-1, shape.kv_heads),
        "offset": (position % shape.block_size)[:, None].expand(-1, shape.kv_heads),
        "head": torch.arange(shape.kv_heads)[None].expand(length, -1),
        "seq": torch.full((length, shape.kv_heads), seq),
    }
    digits = torch.stack([parts[n] // _BASE**i % _BASE for n in DIGITS for i in range(_DIGITS_EACH)], -1)
    repeats = -(-dim // digits.shape[-1])
    return digits.repeat(1, 1, repeats)[..., :dim].float() + 1


def read_fingerprint(row: Tensor) -> dict[str, int] | None:
    """What an output row [Dv] names; None where it is no fingerprint."""
    wanted = len(DIGITS) * _DIGITS_EACH
    if row.shape[0] < wanted or not bool(row.isfinite().all()):
        return None
    digits = row[:wanted].double() - 1
    if bool(((digits - digits.round()).abs() > 0.1).any()) or bool(((digits < -0.5) | (digits > _BASE - 0.5)).any()):
        return None
    numbers = digits.round().long().tolist()
    weights = [_BASE**i for i in range(_DIGITS_EACH)]
    return {
        name: sum(n * w for n, w in zip(numbers[i * _DIGITS_EACH :], weights, strict=False))
        for i, name in enumerate(DIGITS)
    }


def two_level(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """A random half of the keys scores 5 to 8, with value 0; the others score 0: the answer is e⁻ˢ × the others'."""
    tokens, length = shape.seqs[seq]
    query = torch.zeros(tokens, shape.group * shape.kv_heads, shape.head_dim)
    query[..., 0] = LEVEL_SCORE / scale * (1 - 0.2 * torch.rand(query.shape[:2], generator=rng))  # no lucky rounding
    high = torch.rand(length, shape.kv_heads, generator=rng) < 0.5
    key = torch.zeros(length, shape.kv_heads, shape.head_dim)
    key[..., 0] = high * (1 - 0.2 * torch.rand(shape.kv_heads, generator=rng))
    value = _normal_kv(shape, length, rng)[1].abs() + 0.5
    return Content(query, key, value.masked_fill(high[..., None], 0.0))


def captured(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """What a model computed, replayed."""
    assert shape.capture is not None
    _, tensors = read_capture(Path(shape.capture))
    query, key, value = (tensors.pop(name).float() for name in ("query", "key", "value"))
    return Content(query, key, value, tensors)


def _aligned(
    shape: Shape, seq: int, rng: torch.Generator, scale: float, slot: int, one_direction: bool = False
) -> Content:
    """Queries along one random direction per KV head or for all, one key along it; the others score about 0."""
    tokens, length = shape.seqs[seq]
    directions = 1 if one_direction else shape.kv_heads
    direction = torch.randint(0, 2, (directions, shape.head_dim), generator=rng) * 2.0 - 1.0
    direction = direction.expand(shape.kv_heads, -1)
    query = direction.repeat_interleave(shape.group, 0).expand(tokens, -1, -1)
    score = NEEDLE_SCORE + max(0.0, math.log(max(length, 1) / NEEDLE_LENGTH))  # sums lose the rest
    key = _normal(rng, length, shape.kv_heads, shape.head_dim) * (0.5 / score)
    if length:
        key[slot] = direction
    return Content(query * (score / (scale * shape.head_dim)), key, torch.empty(0))


def sink(shape: Shape, seq: int, rng: torch.Generator, scale: float) -> Content:
    """N(0, 1), but the first token takes most of the weight and holds little, as in trained models."""
    content, length = iid(shape, seq, rng, scale), shape.seqs[seq][1]
    if not length:
        return content
    direction = torch.randint(0, 2, (shape.kv_heads, shape.head_dim), generator=rng) * 2.0 - 1.0
    wanted = math.log(length) + 2.0 + math.log(SINK_SHARE)  # the others' scores have a variance of 4: mean weight e²
    query = content.query + direction.repeat_interleave(shape.group, 0) * (wanted / (scale * shape.head_dim))
    key, value = content.key.clone(), content.value.clone()
    key[0] = direction
    value[0] *= 0.1
    return Content(query, key, value)


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng)


def _normal_kv(shape: Shape, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    key = _normal(rng, length, shape.kv_heads, shape.head_dim)
    return key, _normal(rng, length, shape.kv_heads, shape.head_dim_v or shape.head_dim)


PROBES: dict[str, Probe] = {
    p.name: p
    for p in (
        Probe("count", count, "1e4", exact=True, integers=True),
        Probe("iid", iid, "plausible"),
        Probe("two_level", two_level, "1e4"),
        Probe("poison", iid, "nan"),
        Probe("needle", needle, "nan"),
        Probe("fingerprint", fingerprint, "1e4", integers=True),
        Probe("sink", sink, "plausible"),
        Probe("captured", captured, "nan", kind="captured"),
        Probe("batching", iid, "plausible", kind="invariance"),
        Probe("mutation", iid, "plausible", kind="invariance"),
        Probe("reuse", iid, "plausible", kind="invariance"),
        Probe("splits", iid, "plausible", kind="invariance"),
    )
}
