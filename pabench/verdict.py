"""Statuses, and the one rule by which the statuses of all cases become a verdict and an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeInt

from pabench.record_groups import Group

if TYPE_CHECKING:
    from pabench.records import Record

Status = Literal["PASS", "FAIL", "NEAR_TIE", "DEGENERATE", "INCONCLUSIVE", "SKIPPED", "ERROR"]
Verdict = Literal["running", "passed", "failed", "could_not_judge", "error", "nothing_ran", "interrupted"]

PASSED: frozenset[str] = frozenset({"PASS", "NEAR_TIE"})
WRONG: frozenset[str] = frozenset({"FAIL", "DEGENERATE"})
UNJUDGED: frozenset[str] = frozenset({"SKIPPED", "INCONCLUSIVE"})
EXIT_CODES: dict[Verdict, int] = {
    "passed": 0,
    "failed": 1,
    "could_not_judge": 3,
    "error": 4,
    "nothing_ran": 5,
    "interrupted": 130,
}


class Summary(Group):
    """Counts by status; ``failed`` counts DEGENERATE too. ``exit_code`` is null while the run is running."""

    passed: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    near_tie: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    inconclusive: NonNegativeInt = 0
    errors: NonNegativeInt = 0
    verdict: Verdict = "running"
    exit_code: int | None = None

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.near_tie + self.skipped + self.inconclusive + self.errors


def unjudged_pairs(
    records: Iterable[Record], requested: Iterable[tuple[str | None, str]] = ()
) -> list[tuple[str | None, str]]:
    """(kernel, check) pairs that were asked for and have no judged case: the run says nothing about them."""
    seen: dict[tuple[str | None, str], bool] = dict.fromkeys(requested, False)
    for r in records:
        pair = (r.kernel, r.check)
        seen[pair] = seen.get(pair, False) or r.status not in UNJUDGED
    return [pair for pair, judged in seen.items() if not judged]


def summarize(
    records: Iterable[Record], *, requested: Iterable[tuple[str | None, str]] = (), interrupted: bool = False
) -> Summary:
    """Counts, verdict and exit code (precedence 4, 1, 3, 5, 0).

    A SKIPPED case changes nothing as long as its kernel × check has a judged case; ``requested`` names (kernel, check)
    pairs that must be judged even if they left no record.
    """
    records = list(records)
    n = Counter(r.status for r in records)
    verdict: Verdict = "passed"
    if interrupted:
        verdict = "interrupted"
    elif n["ERROR"]:
        verdict = "error"
    elif n["FAIL"] or n["DEGENERATE"]:
        verdict = "failed"
    elif not records:
        verdict = "nothing_ran"
    elif n["INCONCLUSIVE"] or unjudged_pairs(records, requested):
        verdict = "could_not_judge"
    return Summary(
        passed=n["PASS"],
        failed=n["FAIL"] + n["DEGENERATE"],
        near_tie=n["NEAR_TIE"],
        skipped=n["SKIPPED"],
        inconclusive=n["INCONCLUSIVE"],
        errors=n["ERROR"],
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
    )
