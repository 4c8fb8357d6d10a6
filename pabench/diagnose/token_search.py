"""Which tokens are left out, seen too many, or read from a neighbour? Searched in one wrong row, then held against all.

With weights w = exp(score) over all of a sequence's tokens, leaving out a set changes Σ w·v and Σ w by sums that one
cumulative sum gives for every range at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pabench.diagnose.hypotheses import PARTITIONS, Hypothesis
from pabench.diagnose.observed import Match, Observed, distance, distances
from pabench.diagnose.setting import Setting

MAX_PERIOD, MAX_PERIODIC = 33, 2048  # periods tried, and the longest sequence in which they are
BEST = 3  # candidates of each family that are held against all rows


@dataclass(frozen=True)
class _Row:
    """One wrong row: unnormalised weights over every token, visible or not."""

    weight: Tensor  # fp64 [L]
    value: Tensor  # fp64 [L, Dv]
    visible: Tensor  # bool [L]
    rest: float  # what the sink adds to the denominator
    out: Tensor  # fp64 [Dv], what was found
    position: int

    def total(self) -> tuple[Tensor, Tensor]:
        w = self.weight * self.visible
        return w @ self.value, w.sum() + self.rest


def token_matches(observed: Sequence[Observed], limit: float) -> list[Match]:
    """Ranges, single tokens and periods that explain all rows; the best few of each kind are tried."""
    seen, row = _worst_row(observed)
    found = []
    for candidate in _candidates(seen.setting, row):
        d = distance(observed, candidate, limit)
        if d <= limit:
            found.append(Match(candidate.fault, candidate.what, d))
    return found


def _worst_row(observed: Sequence[Observed]) -> tuple[Observed, _Row]:
    errors = [distances(seen, seen.setting) for seen in observed]
    at = max(range(len(observed)), key=lambda n: float(errors[n].max()))
    seen, s = observed[at], observed[at].setting
    t, h = divmod(int(errors[at].argmax()), errors[at].shape[1])
    scores, mask = s.scores()[h, t], s.visible()[t]
    top = scores.max()
    sink = 0.0
    if s.sinks is not None:
        top = torch.maximum(top, s.sinks[h].double())
        sink = float((s.sinks[h].double() - top).exp())
    row = _Row((scores - top).exp(), s.values()[:, h], mask, sink, seen.out[t, h], int(s.positions[t]))
    return seen, row


def _candidates(s: Setting, row: _Row) -> Iterator[Hypothesis]:
    num, den = row.total()
    w = row.weight * row.visible
    wv = w[:, None] * row.value
    lo, hi = _ends(row.visible)

    def best(nums: Tensor, dens: Tensor) -> list[int]:
        off = (nums / dens[:, None].clamp_min(1e-300) - row.out).norm(dim=-1).nan_to_num(torch.inf)
        return [int(k) for k in off.topk(min(BEST, len(off)), largest=False).indices]

    for k in best(num - wv, den - w):
        if bool(row.visible[k]):
            yield from _hidden(k, k + 1, row.position, s)
    sums, weights = wv.cumsum(0), w.cumsum(0)
    for k in best(num - sums, den - weights):  # tokens lo…k left out
        yield from _hidden(lo, k + 1, row.position, s)
    for k in best(sums, weights):  # tokens k+1… left out
        if k + 1 < hi:
            yield from _hidden(k + 1, hi, row.position, s)
    for size in dict.fromkeys((s.block_size, *PARTITIONS)):
        if 1 < size < s.length:
            part = torch.arange(s.length, device=w.device) // size
            n = int(part[-1]) + 1
            block_wv = torch.zeros(n, wv.shape[1], dtype=wv.dtype, device=w.device).index_add_(0, part, wv)
            block_w = torch.zeros(n, dtype=w.dtype, device=w.device).index_add_(0, part, w)
            for k in best(num - block_wv, den - block_w):
                yield from _hidden(k * size, min((k + 1) * size, s.length), row.position, s)
    yield from _shown(s, row, num, den)
    yield from _neighbour(s, row, num, den)
    if s.length <= MAX_PERIODIC:
        yield from _periodic(s, w, wv, num, den, best)


def _ends(visible: Tensor) -> tuple[int, int]:
    where = torch.nonzero(visible).flatten()
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)


def _hidden(begin: int, end: int, position: int, s: Setting) -> Iterator[Hypothesis]:
    """Positions begin…end−1 left out of every row; then the same relative to the query, and to the window's edge."""
    n = "token" if end - begin == 1 else "tokens"
    which = f"{n} {begin}" if end - begin == 1 else f"{n} {begin} to {end - 1}"
    yield Hypothesis(
        "missing_tokens",
        f"{which} were left out",
        lambda s: s.masked(lambda m: m & ((s.j < begin) | (s.j >= end))) if s.length > begin else None,
    )
    near, far = position - end + 1, position - begin
    fault = "sliding_window" if s.window is not None and far == s.window - 1 else "missing_tokens"
    yield Hypothesis(
        fault,
        f"the keys {near} to {far} before each query were left out",
        lambda s: s.masked(lambda m: m & ((s.i - s.j < near) | (s.i - s.j > far))),
    )


def _shown(s: Setting, row: _Row, num: Tensor, den: Tensor) -> Iterator[Hypothesis]:
    """Masked tokens next to the visible ones: newer than the query, or behind the window."""
    lo, hi = _ends(row.visible)
    hidden = row.weight * ~row.visible
    for fault, span in (("extra_tokens", slice(hi, s.length)), ("sliding_window", slice(0, lo))):
        w = hidden[span] if fault == "extra_tokens" else hidden[span].flip(0)
        v = row.value[span] if fault == "extra_tokens" else row.value[span].flip(0)
        if not len(w):
            continue
        off = ((num + (w[:, None] * v).cumsum(0)) / (den + w.cumsum(0))[:, None] - row.out).norm(dim=-1)
        for k in off.topk(min(BEST, len(off)), largest=False).indices.tolist():
            n = k + 1
            if fault == "extra_tokens":
                yield Hypothesis(
                    fault,
                    f"each query saw {n} tokens after its own",
                    lambda s, n=n: s.masked(lambda m: m | ((s.j > s.i) & (s.j <= s.i + n))),  # type: ignore[misc]
                )
            else:
                yield Hypothesis(
                    fault,
                    f"the window were {n} tokens too long",
                    lambda s, n=n: None if s.window is None else replace(s, window=s.window + n),  # type: ignore[misc]
                )


def _neighbour(s: Setting, row: _Row, num: Tensor, den: Tensor) -> Iterator[Hypothesis]:
    """The slot before, or behind, is read in place of one."""
    for step, name in ((-1, "before"), (1, "behind")):
        source = (s.j + step).clamp(0, s.length - 1)
        w = row.weight * row.visible
        other = row.weight[source] * row.visible
        change = other[:, None] * row.value[source] - w[:, None] * row.value
        off = ((num + change) / (den + other - w)[:, None] - row.out).norm(dim=-1).nan_to_num(torch.inf)
        for k in off.topk(min(BEST, len(off)), largest=False).indices.tolist():
            yield Hypothesis(
                "wrong_block",
                f"the slot {name} were read in place of that of token {k}",
                lambda s, k=k, step=step: _moved(s, k, step),  # type: ignore[misc]
            )


def _moved(s: Setting, k: int, step: int) -> Setting | None:
    if not (k < s.length and 0 <= k + step < s.length):
        return None
    tokens = s.j.clone()
    tokens[k] = k + step
    return s.reading(tokens)


def _periodic(
    s: Setting, w: Tensor, wv: Tensor, num: Tensor, den: Tensor, best: Callable[[Tensor, Tensor], list[int]]
) -> Iterator[Hypothesis]:
    pairs = [(p, r) for p in range(2, min(MAX_PERIOD, s.length)) for r in range(p)]
    if not pairs:
        return
    period, rest = torch.tensor(pairs, device=w.device).T
    lost = (s.j[None] % period[:, None] == rest[:, None]).double()
    for k in best(num - lost @ wv, den - lost @ w):
        p, r = pairs[k]
        yield Hypothesis(
            "missing_tokens",
            f"every {p}th token were left out, beginning with token {r}",
            lambda s, p=p, r=r: s.masked(lambda m: m & (s.j % p != r)),  # type: ignore[misc]
        )
