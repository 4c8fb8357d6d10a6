"""Awkward shapes, each with a readable id: the ones that broke kernels before, then a table in which any two values of
lengths, phase, heads, head_dim, block size, feature, scales and layout meet at least once. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pabench.batch_spec import Seqs, format_batch_spec, parse_batch_spec
from pabench.capture.meta import built_in_captures, read_meta
from pabench.errors import UsageError, did_you_mean
from pabench.pairwise import covering_rows

Layout = Literal["plain", "padded", "interleaved"]
Border = Literal["none", "2^16 ids", "2^31 bytes", "2^31 elements"]
MAX_WORK = 20_000_000  # multiply-adds of q·k in one case: what keeps the whole table within minutes on two cores


@dataclass(frozen=True)
class Shape:
    """One batch, but for its numbers. ``seqs`` holds (query tokens, tokens in the cache) of each sequence."""

    name: str
    seqs: Seqs
    block_size: int = 16
    group: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    causal: bool = True
    window: int | None = None
    alibi: bool = False
    cap: float | None = None
    sinks: bool = False
    scales: Literal["none", "tensor", "head", "token"] = "none"
    layout: Layout = "plain"
    odd_scale: bool = False  # a softmax scale that is not 1/√head_dim
    border: Border = "none"  # block ids, or where they lie, on both sides of this
    scale: float | None = None  # the softmax scale, where it is not left to the check
    capture: str | None = None  # the file of the captured attention call that it is the shape of

    @property
    def batch_spec(self) -> str:
        """As recorded: "name:8q1s4k"."""
        return f"{self.name}:{format_batch_spec(self.seqs)}"

    @property
    def work(self) -> int:
        return sum(q * s for q, s in self.seqs) * self.group * self.kv_heads * self.head_dim


def find_shape(text: str, block_size: int) -> Shape:
    """A shape of the table by name or recorded spec, or any spec with ordinary heads. Raises ``UsageError``."""
    if text.endswith(".json"):
        return captured_shape(Path(text))
    name, _, spec = text.rpartition(":")
    table = {shape.name: shape for shape in shapes()}
    for candidate in (text, name):
        if candidate in table:
            return table[candidate]
    if name not in ("", "spec") or "q" not in spec or "-" in spec:
        raise UsageError(
            f"unknown batch spec '{text}'; {did_you_mean(name or text, table)} (or give one like 8q1s4k_2q2k)"
        )
    try:
        return Shape("spec", parse_batch_spec(spec), block_size=block_size)
    except ValueError as error:
        raise UsageError(str(error)) from error


@cache
def shapes() -> tuple[Shape, ...]:
    """The whole table, hand-picked shapes first."""
    captured = map(captured_shape, built_in_captures().values())
    return (*_named(), *captured, *_query_lengths(), *_pairwise(), *_call_orders())


def hand_picked() -> list[str]:
    """Names of the shapes that are not drawn pairwise: one of each kind of trouble."""
    return [shape.name for shape in (*_named(), *_call_orders())]


def captured_shape(path: Path) -> Shape:
    """The shape of a captured attention call. Raises ``UsageError`` for what is none."""
    meta = read_meta(path)
    return Shape(
        f"captured-{path.stem}",
        ((meta.query_tokens, meta.length),),
        group=meta.q_heads // meta.kv_heads,
        kv_heads=meta.kv_heads,
        head_dim=meta.head_dim,
        head_dim_v=None if meta.head_dim_v == meta.head_dim else meta.head_dim_v,
        causal=meta.causal,
        window=meta.window,
        alibi=meta.alibi,
        cap=meta.soft_cap,
        sinks=meta.sinks,
        scale=meta.scale,
        capture=str(path),
    )


def _decode(*lens: int) -> Seqs:
    return tuple((1, length) for length in lens)


def _edges(block: int) -> tuple[int, ...]:
    return (block + 1, block - 1, block)


def _named() -> tuple[Shape, ...]:
    mixed: Seqs = ((1, 40), (5, 21), (1, 17), (16, 16), (1, 0), (9, 33))
    b256, b512 = _decode(*_edges(256)), _decode(*_edges(512))
    return (
        Shape("plain-decode", _decode(17, 0, 40, 1, 16, 15)),
        Shape("plain-prefill", ((17, 17), (1, 1), (33, 33), (16, 16))),
        Shape("plain-mixed", mixed),
        Shape("gqa71-decode", _decode(33, 1, 9), group=71, kv_heads=1),
        Shape("gqa71-prefill", ((7, 33), (9, 9)), group=71, kv_heads=1),
        Shape("mha5-d40", _decode(31, 16), group=1, kv_heads=5, head_dim=40),
        Shape("kv-heads-17", _decode(17, 5), group=2, kv_heads=17, head_dim=32),
        Shape("head-dim-33", ((4, 19), (1, 8)), head_dim=33),
        Shape("head-dim-256", _decode(17, 40), head_dim=256),
        Shape("value-dim-smaller", _decode(17, 33), head_dim=64, head_dim_v=40),
        Shape("value-dim-larger", ((5, 18), (3, 3)), head_dim=40, head_dim_v=72),
        Shape("block-1", _decode(2, 0, 1, 9), block_size=1),
        Shape("block-256", b256, block_size=256, group=2, kv_heads=1, head_dim=40),
        Shape("block-512", b512, block_size=512, group=1, kv_heads=1, head_dim=40),
        Shape("block-size-is-kv-heads", ((1, 10), (4, 8), (1, 3)), block_size=3, kv_heads=3),
        Shape("tile-edges", _decode(127, 128, 129), group=2),
        Shape("partition-edges", _decode(511, 512, 513), group=1),
        Shape("past-4k", _decode(4096 + 33, 3), group=2, kv_heads=1),
        Shape("past-4k-chunk", ((5, 4096 + 37),), group=2, kv_heads=1, head_dim=32),
        Shape("past-8k", _decode(8192 + 35), group=1, kv_heads=1, head_dim=32, block_size=32),
        Shape("long-empty-short", _decode(1200, 0, 1, 600), group=1, kv_heads=2),
        Shape("one-token-prefill-run", ((2, 2), (3, 3), (4, 4), (8, 8))),
        Shape("chunk-33-of-80", ((33, 80), (31, 64), (15, 128), (17, 49))),
        Shape("chunk-127", ((127, 190), (64, 64)), group=2, kv_heads=1),
        Shape("window-1", ((1, 17), (1, 0), (6, 40), (1, 1)), window=1),
        Shape("window-edges", _decode(15, 16, 17, 64, 80), window=16),
        Shape("window-freed-blocks", ((1, 300), (4, 99), (1, 101)), window=20, kv_heads=1),
        Shape("bidirectional", ((9, 9), (5, 20), (1, 16)), causal=False),
        Shape("bidirectional-window", ((9, 9), (5, 20), (1, 16)), causal=False, window=9),
        Shape("alibi", ((1, 70), (6, 16), (1, 1)), alibi=True),
        Shape("soft-cap", ((1, 70), (6, 16), (1, 1)), cap=2.5),
        Shape("sinks", ((1, 70), (6, 16), (1, 0)), sinks=True),
        Shape("everything", mixed, alibi=True, cap=8.0, sinks=True, window=21, block_size=7, odd_scale=True),
        Shape("per-head-scales", ((1, 40), (6, 16)), kv_heads=3, scales="head"),
        Shape("scale-0.3", ((1, 40), (6, 16)), odd_scale=True),
        Shape("padded-cache", ((1, 40), (6, 16), (1, 17)), layout="padded"),
        Shape("interleaved-cache", ((1, 40), (6, 16), (1, 17)), layout="interleaved"),
        Shape("per-token-scales", ((1, 40), (6, 16), (1, 17)), kv_heads=3, scales="token"),
        Shape("ids-past-65536", _decode(40, 17), block_size=1, group=2, kv_heads=1, head_dim=32, border="2^16 ids"),
        Shape("offsets-past-2-gib", _decode(75, 40), group=2, kv_heads=1, head_dim=32, border="2^31 bytes"),
        Shape("offsets-past-2-gi", ((1, 75), (5, 40)), group=2, kv_heads=1, head_dim=32, border="2^31 elements"),
        Shape("past-64k", _decode(65536 + 33, 3), group=2, kv_heads=1, head_dim=32),
        Shape("context-65535", _decode(65535), group=1, kv_heads=1, head_dim=32, block_size=64),
        Shape("past-64k-chunk", ((5, 65536 + 137),), group=1, kv_heads=1, head_dim=32, block_size=64),
    )


def _call_orders() -> tuple[Shape, ...]:
    """Alike but for their lengths, a long batch before a short one and the other way round: what is left over from a
    larger or a smaller call shows in the next."""
    longer, shorter = ((1, 200), (1, 90), (1, 33)), ((1, 40), (1, 17), (1, 5))
    return (
        Shape("plan-larger", longer),
        Shape("plan-smaller", shorter),
        Shape("plan-larger-again", ((1, 210), (1, 95), (1, 36))),
        Shape("plan-prefill-larger", ((50, 120), (33, 33), (17, 64))),
        Shape("plan-prefill-smaller", ((5, 30), (3, 3), (7, 16))),
    )


_QUERY_LENGTHS = (*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 127, 128, 129)


def _query_lengths() -> tuple[Shape, ...]:
    """Each query length with and without past × window × batch, pairwise."""
    found = []
    for q, past, window, batch in covering_rows((_QUERY_LENGTHS, (0, 45), (None, 13), (1, 3))):
        seqs = ((q, q + past), (1, past + 1), (max(1, q - 1), q + past + 20))[:batch]
        name = f"q{q}-past{past}-{'full' if window is None else 'window'}-x{batch}"
        found.append(Shape(name, seqs, group=2, kv_heads=1, window=window))
    return tuple(found)


_PHASES = ("decode", "prefill", "chunked", "mixed")
_LENGTHS = ("short", "block", "tile", "tile2", "partition")
_HEADS = ((1, 4), (2, 3), (3, 2), (5, 2), (7, 1), (8, 2), (16, 1), (71, 1), (1, 17))  # (group, KV heads)
_HEAD_DIMS = (40, 64, 80, 96, 128, 256)
_BLOCK_SIZES = (1, 3, 16, 17, 32, 64, 128, 256)
_FEATURES = ("none", "window", "alibi", "cap", "sinks", "odd-scale", "bidirectional", "all")
_SCALES = ("none", "tensor", "head")
_LAYOUTS = ("plain", "padded", "interleaved")


def _pairwise() -> tuple[Shape, ...]:
    rows = covering_rows((_PHASES, _LENGTHS, _HEADS, _HEAD_DIMS, _BLOCK_SIZES, _FEATURES, _SCALES, _LAYOUTS))
    return tuple(_shape(*row) for row in rows)


def _shape(
    phase: str, lengths: str, heads: tuple[int, int], dim: int, block: int, feature: str, scales: Any, layout: Any
) -> Shape:
    b = block
    lens = {
        "short": (1, 0, 2, 7),
        "block": (b + 1, max(b - 1, 1), b, 2 * b + 1),
        "tile": (129, 127, 128),
        "tile2": (257, 255, 256),
        "partition": (513, 511, 512),
    }[lengths]
    group, kv_heads = heads
    window = min(max(lens), {"short": 3, "block": b, "tile": 16, "tile2": 128, "partition": 100}[lengths])
    shape = Shape(
        name=f"{phase}-{lengths}-b{block}-g{group}x{kv_heads}-d{dim}-{feature}-{scales}-{layout}",
        seqs=tuple((_query_tokens(phase, i, length), length) for i, length in enumerate(lens)),
        block_size=block,
        group=group,
        kv_heads=kv_heads,
        head_dim=dim,
        causal=feature != "bidirectional",
        window=window if feature in ("window", "all") else None,
        alibi=feature in ("alibi", "all"),
        cap=5.0 if feature in ("cap", "all") else None,
        sinks=feature in ("sinks", "all"),
        scales=scales,
        layout=layout,
        odd_scale=feature in ("odd-scale", "all"),
    )
    while shape.work > MAX_WORK:  # fewer query tokens, never shorter sequences: lengths are what bugs hide behind
        shape = replace(shape, seqs=tuple((q if q <= 2 else q // 2, s) for q, s in shape.seqs))
        if all(q <= 2 for q, _ in shape.seqs):
            break
    return shape


def _query_tokens(phase: str, i: int, length: int) -> int:
    chunk = (5, 17, 32, 9)[i % 4]
    wanted = {"decode": 1, "prefill": length, "chunked": max(2, chunk), "mixed": (1, chunk, length)[i % 3]}[phase]
    return max(1, min(length, wanted))
