"""Free-running greedy text of the candidate, each token held against what the dense path would have said there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TokenClass = Literal["identical", "near_tie", "beyond_noise", "degenerate"]


@dataclass(frozen=True)
class Divergence:
    """Where text ``prompt`` first parts. ``margin``: the reference's logit of its own token less the candidate's."""

    prompt: int
    index: int  # 0-based generated-token position
    reference_token: int
    candidate_token: int
    margin: float


@dataclass(frozen=True)
class FreeRun:
    """One sequence's greedy outputs up to end-of-text. ``later_margin``: the largest margin after the divergence, by
    the dense path teacher-forced on the candidate's own text."""

    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    divergence: Divergence | None
    later_margin: float = 0.0


def until_stop(tokens: Sequence[int], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Tokens before the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_tokens:
            return tuple(tokens[:i])
    return tuple(tokens)


def repeats(tokens: Sequence[int], *, longest_period: int = 4, least: int = 12) -> bool:
    """Whether a text ends in one short phrase over and over: ``least`` tokens of a period ≤ ``longest_period``."""
    for period in range(1, longest_period + 1):
        run = 0
        for a, b in zip(reversed(tokens), reversed(tokens[:-period]), strict=False):
            if a != b:
                break
            run += 1
        if run + period >= max(least, 3 * period) and run > 0:
            return True
    return False


def degenerate(run: FreeRun) -> str | None:
    """In words, how the candidate's text has collapsed where the reference's has not; None if it has not."""
    if run.reference and not run.candidate:
        return "empty"
    if repeats(run.candidate) and not repeats(run.reference):
        return "one phrase repeated"
    if len(run.candidate) < len(run.reference) // 2:
        return f"shorter, {len(run.candidate)} tokens of {len(run.reference)}"
    return None


def classify(run: FreeRun, margin_tolerance: float) -> TokenClass:
    """A text that parts at a margin inside the tolerance, and goes on as the dense path would have, is a near tie.

    NaN margins are beyond noise. A collapsed text is a near tie only if the dense path explains every token of it.
    """
    if run.divergence is None:
        return "identical"
    if run.divergence.margin <= margin_tolerance and run.later_margin <= margin_tolerance:
        return "near_tie"
    return "degenerate" if degenerate(run) else "beyond_noise"


def prefix_match(run: FreeRun) -> float:
    """Share of the reference's tokens before the first divergence."""
    if run.divergence is None:
        return 1.0
    return run.divergence.index / max(len(run.reference), 1)
