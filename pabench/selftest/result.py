"""What a selftest found, as plain data, and whether it is good enough to gate. No torch."""

from __future__ import annotations

from pydantic import computed_field

from pabench.record_groups import Group, Num

MIN_MUTANTS, MIN_CLEAN = 50, 500
MIN_NAMED = 0.9  # share of the killed mutants that are named right first


class MutantResult(Group):
    """One planted fault. ``checks``: column of the matrix → killed; a check in which it changed nothing is absent."""

    name: str
    what: str
    where: str  # "kernel" or "engine"
    fault: str
    mandatory: bool
    killed: bool
    named: str | None
    named_right: bool
    checks: dict[str, bool]
    todays_rules: dict[str, bool]  # rule → would have seen it


class CleanResult(Group):
    name: str
    alarm: str | None


class Bound(Group):
    """A share with its exact (Clopper–Pearson) 95 % interval."""

    count: int
    of: int
    low: Num
    high: Num


class SelftestResult(Group):
    """``mutants`` … ``matrix`` are the numbers that `--json` gives as ``selftest``."""

    kernel: str
    seed: int
    mutants: int
    killed: Bound
    named_first: Bound
    clean: int
    false_alarms: Bound
    survivors: tuple[str, ...]  # mandatory ones
    misnamed: tuple[str, ...]
    alarms: tuple[str, ...]
    duration_s: Num
    matrix: tuple[MutantResult, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gating(self) -> bool:
        """Whether these checks may decide what is merged."""
        return not self.shortcomings

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shortcomings(self) -> list[str]:
        """What is not good enough, in words; empty if nothing."""
        found = []
        if self.mutants < MIN_MUTANTS:
            found.append(f"only {self.mutants} mutants ran, {MIN_MUTANTS} are needed")
        if self.survivors:
            found.append(f"{len(self.survivors)} mandatory mutants live: {', '.join(self.survivors)}")
        if self.named_first.of and self.named_first.count < MIN_NAMED * self.named_first.of:
            found.append(f"only {self.named_first.count} of {self.named_first.of} were named right first")
        if self.clean < MIN_CLEAN:
            found.append(f"only {self.clean} clean cases ran, {MIN_CLEAN} are needed")
        if self.false_alarms.count:
            found.append(f"{self.false_alarms.count} false alarms, e.g. {self.alarms[0]}")
        return found


def bound(count: int, of: int) -> Bound:
    """Clopper & Pearson, 1934."""
    if of == 0:
        return Bound(count=0, of=0, low=0.0, high=1.0)
    from scipy.stats import binomtest

    interval = binomtest(count, of).proportion_ci(0.95, "exact")
    return Bound(count=count, of=of, low=float(interval.low), high=float(interval.high))
