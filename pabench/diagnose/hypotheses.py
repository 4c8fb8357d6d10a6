"""What could be wrong, one thing at a time: an argument dropped, doubled or misread. Each is a fault of the contract.

A factor that nothing given explains is no hypothesis: it would explain anything (see ``explain.free_factor``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pabench.diagnose.setting import Setting

Change = Callable[[Setting], Setting | None]  # None: it would change nothing here
PARTITIONS = (16, 32, 64, 128, 256, 512, 1024)  # keys a split kernel may take at a time
SPLITS = (2, 4, 8, 16)
OTHER_FP8 = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e5m2: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Hypothesis:
    """``what`` completes "as if …"."""

    fault: str
    what: str
    change: Change


def argument_hypotheses() -> Iterator[Hypothesis]:
    """Everything but what is read from where."""
    yield from _softmax_scale()
    yield from _soft_cap()
    yield from _alibi()
    yield from _sink()
    yield from _window()
    yield from _kv_scale()
    yield from _masks()
    yield from _precision()
    yield from _split_merge()


def _softmax_scale() -> Iterator[Hypothesis]:
    for what, scale in (
        ("the softmax scale were 1/√D, whatever is given", lambda s: s.query.shape[-1] ** -0.5),
        ("the softmax scale were left out", lambda s: 1.0),
        ("the softmax scale were applied twice", lambda s: s.scale**2),
        ("the softmax scale were inverted", lambda s: 1 / s.scale),
        ("the softmax scale were √D", lambda s: s.query.shape[-1] ** 0.5),
    ):

        def change(s: Setting, scale: Callable[[Setting], float] = scale) -> Setting | None:
            return None if math.isclose(scale(s), s.scale, rel_tol=1e-6) else replace(s, scale=scale(s))

        yield Hypothesis("softmax_scale", what, change)


def _soft_cap() -> Iterator[Hypothesis]:
    def dropped(s: Setting) -> Setting | None:
        return None if s.cap is None else replace(s, cap=None)

    def twice(s: Setting) -> Setting | None:
        cap = s.cap
        return None if cap is None else replace(s, on_raw=lambda x: cap * torch.tanh(x / cap))

    def unscaled(s: Setting) -> Setting | None:
        cap = s.cap
        return (
            None
            if cap is None
            else replace(s, cap=None, on_raw=lambda x: cap * torch.tanh(x / s.scale / cap) * s.scale)
        )

    def after_alibi(s: Setting) -> Setting | None:
        cap = s.cap
        if cap is None or s.slopes is None:
            return None
        return replace(s, cap=None, on_scores=lambda x: cap * torch.tanh(x / cap))

    yield Hypothesis("soft_cap", "the soft cap were dropped", dropped)
    yield Hypothesis("soft_cap", "the soft cap were applied twice", twice)
    yield Hypothesis("soft_cap", "the soft cap bounded q·k before the scale", unscaled)
    yield Hypothesis("soft_cap", "the soft cap came after ALiBi", after_alibi)


def _alibi() -> Iterator[Hypothesis]:
    def with_slopes(order: Callable[[Tensor, Setting], Tensor]) -> Change:
        return lambda s: None if s.slopes is None else replace(s, slopes=order(s.slopes, s))

    def moved(distance: Callable[[Setting], Tensor]) -> Change:
        def change(s: Setting) -> Setting | None:
            slopes = s.slopes
            if slopes is None:
                return None
            return replace(s, on_scores=lambda x: x + slopes.double()[:, None, None] * (distance(s) - (s.j - s.i)))

        return change

    yield Hypothesis("alibi", "ALiBi were dropped", lambda s: None if s.slopes is None else replace(s, slopes=None))
    yield Hypothesis("alibi", "ALiBi had the other sign", with_slopes(lambda x, s: -x))
    yield Hypothesis("alibi", "ALiBi took |distance|", moved(lambda s: (s.j - s.i).abs()))
    yield Hypothesis("alibi", "ALiBi slopes were in reverse order", with_slopes(lambda x, s: x.flip(0)))
    yield Hypothesis("alibi", "ALiBi slopes were taken by KV head", with_slopes(lambda x, s: x[s.kv_head]))
    yield Hypothesis("alibi", "ALiBi slopes were those of the next head", with_slopes(lambda x, s: x.roll(-1)))
    yield Hypothesis("alibi", "one head's ALiBi slope served all", with_slopes(lambda x, s: x[:1].expand_as(x)))
    half = with_slopes(lambda x, s: torch.cat([x[: len(x) // 2], x[: len(x) - len(x) // 2]]))
    yield Hypothesis("alibi", "ALiBi slopes of the first half of the heads served both halves", half)
    yield Hypothesis("alibi", "ALiBi counted positions inside the block", moved(lambda s: s.j % s.block_size - s.i))
    yield Hypothesis("alibi", "ALiBi took query positions from the chunk", moved(lambda s: s.j - s.i + s.chunk_begin))


def _sink() -> Iterator[Hypothesis]:
    def times(count: Callable[[Setting], int]) -> Change:
        def change(s: Setting) -> Setting | None:
            n = count(s)
            return None if s.sinks is None or n == 1 else replace(s, sinks=s.sinks.double() + math.log(n))

        return change

    def order(pick: Callable[[Tensor, Setting], Tensor]) -> Change:
        return lambda s: None if s.sinks is None else replace(s, sinks=pick(s.sinks, s))

    yield Hypothesis("sink", "sinks were dropped", lambda s: None if s.sinks is None else replace(s, sinks=None))
    yield Hypothesis("sink", "sinks were counted twice", times(lambda s: 2))
    for size in PARTITIONS:
        parts = times(lambda s, size=size: -(-s.length // size))  # type: ignore[misc]
        yield Hypothesis("sink", f"the sink joined the denominator once per {size} keys", parts)
    yield Hypothesis("sink", "sinks were taken by KV head", order(lambda x, s: x[s.kv_head]))
    yield Hypothesis("sink", "one head's sink served all", order(lambda x, s: x[:1].expand_as(x)))


def _window() -> Iterator[Hypothesis]:
    def by(extra: int) -> Change:
        return lambda s: None if s.window is None else replace(s, window=max(1, s.window + extra))

    def from_end(s: Setting) -> Setting | None:
        window = s.window
        return None if window is None else s.masked(lambda m: m & (s.j > s.length - 1 - window))

    def whole_blocks(s: Setting) -> Setting | None:
        window = s.window
        if window is None:
            return None
        first = (s.i - window + 1).clamp(min=0) // s.block_size * s.block_size
        return replace(s, window=None, on_mask=lambda m: m & (s.j >= first))

    def two_sided(s: Setting) -> Setting | None:
        window = s.window
        return None if window is None or s.causal else s.masked(lambda m: m & (s.j < s.i + window))

    dropped: Change = lambda s: None if s.window is None else replace(s, window=None)  # noqa: E731
    yield Hypothesis("sliding_window", "the window were dropped", dropped)
    for extra in (1, -1):
        sign = "too long" if extra > 0 else "too short"
        yield Hypothesis("sliding_window", f"the window were one token {sign}", by(extra))
    yield Hypothesis("sliding_window", "the window were measured from the end of the sequence", from_end)
    yield Hypothesis("sliding_window", "the window were rounded to whole blocks", whole_blocks)
    yield Hypothesis("sliding_window", "the window bounded keys on both sides", two_sided)


def _kv_scale() -> Iterator[Hypothesis]:
    def scales(k: Callable[[Setting], Tensor], v: Callable[[Setting], Tensor]) -> Change:
        def change(s: Setting) -> Setting | None:
            if not s.has_scales:
                return None
            new_k, new_v = k(s), v(s)
            if torch.equal(new_k, s.k_scale) and torch.equal(new_v, s.v_scale):
                return None
            return replace(s, k_scale=new_k, v_scale=new_v)

        return change

    own_k, own_v = (lambda s: s.k_scale), (lambda s: s.v_scale)
    for name, which in (("k_scale", "k"), ("v_scale", "v"), ("both scales", "kv")):
        changes: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
            ("dropped", torch.ones_like),
            ("applied twice", torch.square),
            ("inverted", torch.reciprocal),
            ("taken from the first head for all", lambda x: x[:1].expand_as(x)),
            ("taken from the next head", lambda x: x.roll(-1)),
            ("taken from the head before", lambda x: x.roll(1)),
            ("taken in reverse order of heads", lambda x: x.flip(0)),
            ("the heads' mean", lambda x: x.mean().expand_as(x)),
        )
        for what, f in changes:

            def k(s: Setting, f: Callable[[Tensor], Tensor] = f, which: str = which) -> Tensor:
                return f(s.k_scale) if "k" in which else s.k_scale

            def v(s: Setting, f: Callable[[Tensor], Tensor] = f, which: str = which) -> Tensor:
                return f(s.v_scale) if "v" in which else s.v_scale

            yield Hypothesis("kv_scale", f"{name} were {what}", scales(k, v))
    yield Hypothesis("kv_scale", "k_scale and v_scale changed places", scales(own_v, own_k))
    yield Hypothesis("kv_scale", "V were dequantised with k_scale", scales(own_k, own_k))
    yield Hypothesis("kv_scale", "K were dequantised with v_scale", scales(own_v, own_v))


def _masks() -> Iterator[Hypothesis]:
    """Tokens hidden or shown by rule; ``token_search`` looks for any others."""
    noncausal: Change = lambda s: replace(s, causal=False) if s.causal and not _sees_all(s) else None  # noqa: E731
    yield Hypothesis("extra_tokens", "the causal mask were dropped", noncausal)
    one_more: Change = lambda s: replace(s, positions=s.positions + 1) if not _sees_all(s) else None  # noqa: E731
    yield Hypothesis("extra_tokens", "each query saw the token after its own", one_more)
    newest: Change = lambda s: s.masked(lambda m: m & (s.j < s.i)) if s.length > 1 else None  # noqa: E731
    yield Hypothesis("missing_tokens", "each query's own token, the newest, were hidden", newest)
    shorter: Change = lambda s: replace(s, positions=(s.positions - 1).clamp(min=0)) if s.length > 1 else None  # noqa: E731
    yield Hypothesis("missing_tokens", "the sequence were one token shorter", shorter)
    newest_of_all: Change = lambda s: s.masked(lambda m: m & (s.j < s.length - 1)) if s.length > 1 else None  # noqa: E731
    yield Hypothesis("missing_tokens", "the sequence's last token were hidden", newest_of_all)

    def ends(s: Setting) -> Setting | None:
        block, last = s.j // s.block_size, (s.length - 1) // s.block_size
        return None if last < 2 else s.masked(lambda m: m & ((block == 0) | (block == last)))

    yield Hypothesis("missing_tokens", "only the first and the last block were read", ends)

    def whole(s: Setting, size: int | None) -> Setting | None:
        size = size or s.block_size
        end = s.length // size * size
        return None if end in (0, s.length) else s.masked(lambda m: m & (s.j < end))

    for size in (None, *PARTITIONS):
        whole_ones: Change = lambda s, size=size: whole(s, size)  # type: ignore[misc]  # noqa: E731
        what = f"what is behind the last whole {'block' if size is None else f'{size} keys'} were left out"
        yield Hypothesis("missing_tokens", what, whole_ones)
    no_past: Change = lambda s: s.masked(lambda m: m & (s.j >= s.chunk_begin)) if s.is_chunk else None  # noqa: E731
    yield Hypothesis("chunk_dependence", "a continued chunk saw no past", no_past)

    def from_zero(s: Setting) -> Setting | None:
        local = s.i - s.chunk_begin
        return s.masked(lambda m: (s.j <= local).expand_as(m)) if s.is_chunk else None

    yield Hypothesis("chunk_dependence", "a continued chunk stood at the beginning of its sequence", from_zero)
    moved: Change = lambda s: replace(s, positions=s.positions - s.chunk_begin) if s.is_chunk else None  # noqa: E731
    yield Hypothesis("chunk_dependence", "query positions of a continued chunk began at 0", moved)


def _sees_all(s: Setting) -> bool:
    return not s.causal or bool((s.positions >= s.length - 1).all())


def _precision() -> Iterator[Hypothesis]:
    fp8 = torch.float8_e4m3fn
    yield Hypothesis(
        "precision",
        "weights were rounded to fp8 after the softmax",
        lambda s: replace(s, on_probs=lambda p: p.float().to(fp8).double()),
    )
    yield Hypothesis(
        "precision",
        "the output went through fp8",
        lambda s: replace(s, on_out=lambda x: x.float().clamp(-448, 448).to(fp8).double()),
    )

    def rounded(s: Setting, dtype: torch.dtype) -> Setting | None:
        if s.dtype != torch.float32:
            return None
        narrow = [x.float().to(dtype).double() for x in (s.query, s.key, s.value)]
        return replace(s, query=narrow[0], key=narrow[1], value=narrow[2], on_out=lambda x: x.to(dtype).double())

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        change: Change = lambda s, dtype=dtype: rounded(s, dtype)  # type: ignore[misc]  # noqa: E731
        yield Hypothesis("dtype_ignored", f"fp32 inputs and output were rounded to {name}", change)

    def other(s: Setting) -> Setting | None:
        kind = OTHER_FP8.get(s.key.dtype)
        return None if kind is None else replace(s, key=s.key.view(kind), value=s.value.view(kind))

    yield Hypothesis("dtype_ignored", "the fp8 cache were read as the other fp8 kind", other)


def _split_merge() -> Iterator[Hypothesis]:
    def parts(s: Setting, size: int) -> list[slice]:
        return [slice(b, min(b + size, s.length)) for b in range(0, s.length, size)]

    def averaged(s: Setting, size: int) -> Setting | None:
        if s.length <= size:
            return None

        def merge(p: Tensor) -> Tensor:
            out, n = torch.zeros_like(p), torch.zeros_like(p[..., :1])
            for part in parts(s, size):
                total = p[..., part].sum(-1, keepdim=True)
                out[..., part] = torch.where(total > 0, p[..., part] / total, 0.0)
                n += total > 0
            return out / n.clamp(min=1)

        return replace(s, on_probs=merge)

    def without_part(which: int) -> Callable[[Setting, int], Setting | None]:
        def change(s: Setting, size: int) -> Setting | None:
            if s.length <= size:
                return None
            lost = parts(s, size)[which]
            return replace(s, on_probs=lambda p: p.masked_fill((s.j >= lost.start) & (s.j < lost.stop), 0.0))

        return change

    for what, make in (
        ("partial results were averaged without their weights", averaged),
        ("the last part's result were dropped and its weight kept", without_part(-1)),
        ("the first part's result were dropped and its weight kept", without_part(0)),
    ):
        for size in PARTITIONS:
            change: Change = lambda s, make=make, size=size: make(s, size)  # type: ignore[misc]  # noqa: E731
            yield Hypothesis("split_merge", f"{what} ({size} keys a part)", change)
        for n in SPLITS:
            change = lambda s, make=make, n=n: make(s, -(-s.length // n)) if s.length >= n else None  # type: ignore[misc]  # noqa: E731
            yield Hypothesis("split_merge", f"{what} ({n} parts)", change)
