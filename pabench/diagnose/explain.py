"""Which hypothesis gives the very output that was found? Only one that explains all rows, and alone, is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pabench.diagnose.hypotheses import Hypothesis, argument_hypotheses
from pabench.diagnose.observed import Match, Observed, distance, distances, truth_distance
from pabench.diagnose.read_hypotheses import read_hypotheses
from pabench.diagnose.setting import attend
from pabench.diagnose.token_search import token_matches

MATCH = 1.5  # × the tolerance: a hypothesis may amplify honest errors, dropped scales and caps above all
GAIN = 3.0  # how much nearer than the truth it must be, and than any hypothesis of another fault
SURE = 10.0
CLEAR = 6.0
LOOSE = frozenset({"split_merge", "wrong_block"})  # faults whose hypotheses are many: a range of tokens may fit as well


@dataclass(frozen=True)
class Explanation:
    """``matches`` all explain the rows; ``fault`` is "unknown" unless they agree."""

    fault: str
    confidence: float
    matches: tuple[Match, ...] = ()
    factor: float | None = None
    note: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.fault for m in self.matches))


def explain(observed: Sequence[Observed], only: frozenset[str] | None = None) -> Explanation:
    """Try every hypothesis, or ``only`` those of these words."""
    truth = truth_distance(observed)
    limit = min(MATCH, truth / GAIN)
    first = [_one_row(observed)]
    if only is not None:
        tried = (h for h in all_hypotheses() if h.what in only)
        kept = [Match(h.fault, h.what, d) for h in tried if (d := distance(observed, h, limit)) <= limit]
        if any("query heads" in what for what in only):
            kept += head_matches(observed, limit)
        fault = kept[0].fault if len({m.fault for m in kept}) == 1 else "unknown"
        return Explanation(fault, 0.8 if kept else 0.0, tuple(kept))
    found = [
        Match(h.fault, h.what, d)
        for h in all_hypotheses()
        if distance(first, h) <= limit and (d := distance(observed, h, limit)) <= limit
    ]
    found += head_matches(observed, limit)
    if {m.fault for m in found} <= LOOSE and truth > CLEAR:  # of thousands of tokens one fits any small error
        found += token_matches(observed, limit)
    if not found:
        factor, note = free_factor(observed, limit)
        return Explanation("unknown", 0.0, factor=factor, note=note)
    found.sort(key=lambda m: m.distance)
    near = tuple(m for m in found if m.distance <= GAIN * max(found[0].distance, 0.3))
    faults = {m.fault for m in near}
    if len(faults) > 1:
        return Explanation("unknown", 0.0, near)
    return Explanation(near[0].fault, 0.95 if truth > SURE * max(near[0].distance, 0.3) else 0.8, near)


@cache
def all_hypotheses() -> tuple[Hypothesis, ...]:
    return (*argument_hypotheses(), *read_hypotheses())


def _one_row(observed: Sequence[Observed]) -> Observed:
    """The token with the worst row: what it refutes need not be held against the others."""
    errors = [float(distances(seen, seen.setting).max()) for seen in observed]
    seen = observed[errors.index(max(errors))]
    t = int(distances(seen, seen.setting).amax(1).argmax())
    rows = slice(t, t + 1)
    setting = replace(seen.setting, query=seen.setting.query[rows], positions=seen.setting.positions[rows])
    return Observed(setting, seen.out[rows], seen.limit[rows], seen.wrong[rows], seen.absolute)


def head_matches(observed: Sequence[Observed], limit: float) -> list[Match]:
    """Whether each wrong row is what another KV head would give, the same for all rows of a query head."""
    kv_heads = observed[0].setting.kv_heads
    if kv_heads == 1:
        return []
    worst = torch.zeros(kv_heads, observed[0].out.shape[1], dtype=torch.float64)
    for seen in observed:
        for k in range(kv_heads):
            heads = torch.full_like(seen.setting.kv_head, k)
            worst[k] = torch.maximum(worst[k], distances(seen, replace(seen.setting, kv_head=heads)).amax(0).cpu())
    own = observed[0].setting.kv_head.cpu()
    wrong = torch.stack([seen.wrong.any(0).cpu() for seen in observed]).any(0)
    reads, errors = worst.argmin(0), worst.amin(0)
    if float(errors.max()) > limit or bool((reads == own)[wrong].any()):
        return []
    wrong_heads: list[int] = torch.nonzero(wrong).flatten().tolist()
    read: list[int] = reads[wrong].tolist()
    what = f"query heads {_some(wrong_heads)} read KV heads {_some(read)}{_pattern(reads, own, kv_heads)}"
    return [Match("head_map", what, float(errors.max()), {"heads": wrong_heads, "kv_heads_read": read})]


def _pattern(reads: Tensor, own: Tensor, kv_heads: int) -> str:
    h = torch.arange(len(reads))
    for name, order in (
        ("h mod Hkv", h % kv_heads),
        ("the next KV head", (own + 1) % kv_heads),
        ("the KV head before", (own - 1) % kv_heads),
        ("reverse order", kv_heads - 1 - own),
        ("KV head 0 for all", torch.zeros_like(h)),
    ):
        if torch.equal(reads, order):
            return f" ({name})"
    return ""


def free_factor(observed: Sequence[Observed], limit: float) -> tuple[float | None, str]:
    """A factor on the output or on the softmax scale that explains the rows; as nothing given has it, no fault."""
    found, truth = [], []
    for seen in observed:
        out, _ = attend(seen.setting)
        found.append(seen.out[seen.wrong].flatten())
        truth.append(out[seen.wrong].flatten())
    x, y = torch.cat(truth), torch.cat(found)
    factor = float(x @ y / (x @ x)) if float(x @ x) > 0 else 0.0
    whole = Hypothesis("unknown", "", lambda s: replace(s, v_scale=s.v_scale * factor))
    if distance(_only_wrong(observed), whole, limit) <= limit:
        return factor, f"the output is {factor:.4g} × what it should be" if factor else "the output is zero"
    low, high = math.log(0.1), math.log(10.0)
    best = 0.0
    for _ in range(4):  # coarse, then finer around the best
        points = [low + (high - low) * k / 12 for k in range(13)]
        best = min(points, key=lambda p: _scaled(observed, math.exp(p)))
        low, high = best - (high - low) / 12, best + (high - low) / 12
    if _scaled(observed, math.exp(best)) <= limit:
        return math.exp(best), f"as if the softmax scale were {math.exp(best):.4g} × the given one"
    return None, ""


def _scaled(observed: Sequence[Observed], factor: float) -> float:
    return distance(observed, Hypothesis("unknown", "", lambda s: replace(s, scale=s.scale * factor)))


def _only_wrong(observed: Sequence[Observed]) -> list[Observed]:
    """Rows that are right are no evidence against a factor on the wrong ones."""
    loose = torch.finfo(torch.float64).max
    return [replace(seen, limit=torch.where(seen.wrong, seen.limit, loose)) for seen in observed]


def _some(numbers: Sequence[int], limit: int = 6) -> str:
    text = ", ".join(map(str, numbers[:limit]))
    return text + (", …" if len(numbers) > limit else "")
