"""Two stored runs, case by case: what got better, worse, appeared or vanished, and whether that is a regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pabench.errors import CannotJudge
from pabench.record_groups import Group, Num
from pabench.records import Record, RunHeader, Summary
from pabench.verdict import EXIT_CODES, PASSED, UNJUDGED, WRONG, Verdict

Change = Literal["worse", "vanished", "still_failing", "unjudged", "better", "appeared", "unchanged"]
StoredRun = tuple[RunHeader, Sequence[Record]]
_PRECEDENCE = (4, 1, 3, 0)
_VERDICTS: dict[int, Verdict] = {code: verdict for verdict, code in EXIT_CODES.items()}


class Side(Group):
    """One of the two runs, as the comparison names it."""

    id: str
    suite: str | None
    kernels: list[str]
    n_cases: int
    summary: Summary


class CasePair(Group):
    """One case in both runs, or in one. ``exit_code`` is what this case alone would end with."""

    pair_key: str
    change: Change
    regression: bool
    exit_code: int
    base: str | None
    candidate: str | None
    base_kernel: str | None
    candidate_kernel: str | None
    kld_over_floor: tuple[Num | None, Num | None] = (None, None)
    message: str = ""


class Difference(Group):
    name: str
    base: str | int | None
    candidate: str | int | None


class Comparison(Group):
    """``compare --json`` is this object."""

    base: Side
    candidate: Side
    cases: list[CasePair]
    environment: list[Difference]
    notes: list[str]
    verdict: Verdict
    exit_code: int

    def of(self, change: Change) -> list[CasePair]:
        return [c for c in self.cases if c.change == change]


def compare(base: StoredRun, candidate: StoredRun) -> Comparison:
    """Pair by ``pair_key`` (with the kernel beside it unless each run names exactly one) and judge each pair.

    A case that passed and now fails, or is gone, is a regression. A wrong answer is never passed over, also where it
    was wrong before. Raises CannotJudge where a run is empty or pairs two of its own cases under one key.
    """
    (base_header, base_records), (cand_header, cand_records) = base, candidate
    for header, records in (base, candidate):
        if not records:
            raise CannotJudge(f"run '{header.run.id}' holds no finished case: there is nothing to compare")
    with_kernel = not (len(_kernels(base_records)) == len(_kernels(cand_records)) == 1)
    old, new = _by_key(base_header, base_records, with_kernel), _by_key(cand_header, cand_records, with_kernel)
    seeds = base_header.run.seed, cand_header.run.seed
    if not old.keys() & new.keys() and seeds[0] != seeds[1]:
        raise CannotJudge(
            f"the runs have no case in common: one was made with --seed {seeds[0]}, the other with --seed {seeds[1]}, "
            "and another seed is another test; run the candidate with the base's seed"
        )
    unfinished = cand_header.summary.verdict in ("running", "interrupted")
    cases = [_judge(key, old.get(key), new.get(key), unfinished) for key in dict.fromkeys([*old, *new])]
    codes = {c.exit_code for c in cases}
    if not any(r.status not in UNJUDGED for r in cand_records):
        codes.add(3)
    exit_code = next(code for code in _PRECEDENCE if code in codes)
    return Comparison(
        base=_side(base_header, base_records),
        candidate=_side(cand_header, cand_records),
        cases=cases,
        environment=_differences(base_header, cand_header),
        notes=_notes(base_header, cand_header, old, new),
        verdict=_VERDICTS[exit_code],
        exit_code=exit_code,
    )


def _judge(key: str, old: Record | None, new: Record | None, unfinished: bool) -> CasePair:
    was = None if old is None else old.status
    now = None if new is None else new.status
    change: Change
    regression, code = False, 0
    if now is None:
        change, regression = "vanished", was in PASSED and not unfinished
        code = 1 if regression else 0 if was == "SKIPPED" else 3
    elif now == "ERROR" or now in WRONG:
        code = 4 if now == "ERROR" else 1
        regression = was in PASSED
        change = "appeared" if was is None else "worse" if regression or was in UNJUDGED else "still_failing"
    elif now in UNJUDGED:
        regression = was in PASSED
        code = 3 if now == "INCONCLUSIVE" or was not in (None, "SKIPPED", "INCONCLUSIVE") else 0
        change = "appeared" if was is None else "unchanged" if was == now else "worse" if regression else "unjudged"
    else:
        change = "appeared" if was is None else "unchanged" if was in PASSED else "better"
    return CasePair(
        pair_key=key,
        change=change,
        regression=regression,
        exit_code=code,
        base=was,
        candidate=now,
        base_kernel=None if old is None else old.kernel,
        candidate_kernel=None if new is None else new.kernel,
        kld_over_floor=(_kld(old), _kld(new)),
        message="" if new is None else new.message,
    )


def _kld(record: Record | None) -> float | None:
    return None if record is None or record.logits is None else record.logits.ratio_to_floor


def _kernels(records: Sequence[Record]) -> list[str]:
    return sorted({r.kernel for r in records if r.kernel is not None})


def _by_key(header: RunHeader, records: Sequence[Record], with_kernel: bool) -> dict[str, Record]:
    out: dict[str, Record] = {}
    for r in records:
        key = f"{r.pair_key} kernel={r.kernel}" if with_kernel and r.kernel is not None else r.pair_key
        if key in out:
            raise CannotJudge(f"run '{header.run.id}' has two cases for '{key}': they cannot be paired")
        out[key] = r
    return out


def _side(header: RunHeader, records: Sequence[Record]) -> Side:
    return Side(
        id=header.run.id,
        suite=header.run.suite,
        kernels=_kernels(records),
        n_cases=len(records),
        summary=header.summary,
    )


def _differences(base: RunHeader, candidate: RunHeader) -> list[Difference]:
    pairs = [
        (n, getattr(base.environment, n), getattr(candidate.environment, n))
        for n in type(base.environment).model_fields
    ]
    pairs.append(("seed", base.run.seed, candidate.run.seed))
    return [Difference(name=n, base=b, candidate=c) for n, b, c in pairs if b != c]


def _notes(base: RunHeader, candidate: RunHeader, old: dict[str, Record], new: dict[str, Record]) -> list[str]:
    """What a status does not show: a run that never ended, a result that another kernel now computes."""
    notes = [
        f"the {side} run '{h.run.id}' did not finish"
        for side, h in (("base", base), ("candidate", candidate))
        if h.summary.verdict in ("running", "interrupted")
    ]
    for key in old.keys() & new.keys():
        was, now = old[key].execution, new[key].execution
        if was is not None and now is not None and was.proof != now.proof:
            by = f", computed by {', '.join(f.to for f in now.fallbacks)}" if now.fallbacks else ""
            notes.append(f"{key}: proof was '{was.proof}' and is now '{now.proof}'{by}")
    return sorted(notes)
