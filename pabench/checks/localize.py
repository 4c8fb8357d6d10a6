"""Where a model case goes wrong: the first wrong call, a close look at it, and what else must fail or pass with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pabench.checks.drift import Drift, first_drift
from pabench.checks.forensics import Forensics, examine
from pabench.checks.model import ModelOutcome, OnFallback, judge
from pabench.checks.naming import Cause, causes
from pabench.checks.scenarios import SCENARIOS, Driver, Scenario, ScenarioResult, run_scenario
from pabench.checks.shadow import SeenCall, ShadowObserver
from pabench.checks.shrink import shrink
from pabench.diagnose.conditions import condition
from pabench.diagnose.given import WrongInput, wrong_model_inputs
from pabench.engine.engine import PagedEngine
from pabench.errors import CannotJudge
from pabench.reference.run import ReferenceRun
from pabench_kernels.contract import PagedBatch
from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
from pabench_kernels.request import KernelRequest


@dataclass(frozen=True)
class SmallCall:
    """The first wrong call, shrunk; ``fault`` is what it is called by itself."""

    batch: PagedBatch
    fault: str


@dataclass
class _Looker:
    """Examines the first wrong attention call, and one wrong decode call of the same layer and sequence after it."""

    request: KernelRequest
    shrink: bool
    progress: Callable[[str], None]
    first: Forensics | None = None
    later: Forensics | None = None
    number: int = 0  # which prefill chunk or decode step of its sequence ``first`` is
    root: int = 0  # the sequence that its sequence was forked from, if it was
    small: SmallCall | None = None
    model_inputs: WrongInput | None = None  # the first thing that the model itself was told wrongly
    _numbers: Counter[tuple[int, str]] = field(default_factory=Counter)
    _busy: bool = False

    def __call__(self, engine: PagedEngine, shadow: ShadowObserver, seen: SeenCall) -> None:
        if self._busy:
            return
        if seen.layer == 0:
            self._numbers[seen.work.seq_id, seen.phase] += 1
            if self.model_inputs is None:
                self.model_inputs = _model_inputs(seen)
        if self.later is not None or not bool((seen.ratio(seen.out) > 1).any()):
            return
        first = self.first
        if first is not None and (
            seen.phase != "decode" or (seen.layer, seen.work.seq_id) != (first.layer, first.seq_id)
        ):
            return
        self._busy = True
        try:
            found = examine(engine, shadow, self.request, seen)
            if first is not None:
                self.later = found
                return
            self.first = found
            self.number = self._numbers[seen.work.seq_id, seen.phase] - 1
            self.root = [seen.work.seq_id, *shadow.forked_from(seen.work.seq_id)][-1]
            if self.shrink and not found.inputs:
                self.small = self._shrunk(seen)
        finally:
            self._busy = False

    def _shrunk(self, seen: SeenCall) -> SmallCall | None:
        def call(batch: PagedBatch) -> Tensor:
            return Dispatcher(self.request)(batch, seen.layer)

        found = shrink(seen.batch, call, self.progress)
        return None if found is None else SmallCall(*found)


@dataclass(frozen=True)
class Localization:
    """``scenario`` is None where the plain run of the case already fails. ``causes``: most likely first."""

    outcome: ModelOutcome
    scenario: Scenario | None
    results: tuple[ScenarioResult, ...]
    first: Forensics | None
    number: int
    root: int
    small: SmallCall | None
    drift: Drift | None
    causes: tuple[Cause, ...]
    condition: str | None

    @property
    def wrong(self) -> bool:
        return bool(self.causes)


def localize(
    reference: ReferenceRun,
    request: KernelRequest,
    *,
    block_size: int,
    token_budget: int,
    stop_tokens: Iterable[int],
    on_fallback: OnFallback = "fail",
    progress: Callable[[str], None] = lambda _: None,
    engine_type: type[PagedEngine] = PagedEngine,
    shrunk: bool = False,
) -> Localization:
    """Judge the case with a watcher on every attention call; where it passes, go through the scenarios too.

    ``shrunk``: make the first wrong call small, for a repro file.

    Raises ``CannotJudge`` where the kernel refuses the case. What a kernel raises passes through.
    """
    looker = _Looker(request, shrunk, progress)
    outcome = judge(
        reference,
        request,
        block_size=block_size,
        token_budget=token_budget,
        on_fallback=on_fallback,
        stop_tokens=stop_tokens,
        progress=progress,
        engine_type=engine_type,
        watch=looker,
    )
    if outcome.status == "SKIPPED":
        raise CannotJudge(f"nothing to localize: {outcome.message}")
    results: list[ScenarioResult] = []
    where: Scenario | None = None
    passed = outcome.status in ("PASS", "NEAR_TIE")
    for scenario in SCENARIOS.values() if passed else ():
        progress(f"scenario: {scenario.what}")
        looker = _Looker(request, shrunk, progress)
        result = _try(scenario, Driver(reference, Dispatcher(request), block_size, engine_type, looker))
        results.append(result)
        if not result.passed:
            where = scenario
            break
    drift = None
    told = looker.model_inputs
    unfinished = any(f.check == "contract" for f in outcome.findings)
    if looker.first is None and told is None and not passed and not unfinished:
        progress("comparing every module of the model")
        drift = first_drift(Driver(reference, Dispatcher(request), block_size, engine_type))
    failing = not passed or where is not None
    return Localization(
        outcome=outcome,
        scenario=where,
        results=tuple(results),
        first=looker.first,
        number=looker.number,
        root=looker.root,
        small=looker.small,
        drift=drift,
        causes=tuple(causes(outcome, looker.first, looker.later, where, drift, told)) if failing else (),
        condition=None if looker.first is not None and looker.first.repeated else _condition(outcome),
    )


def _model_inputs(seen: SeenCall) -> WrongInput | None:
    if seen.metadata is None:
        return None
    ids, positions = (x[0, seen.rows].tolist() for x in (seen.metadata.input_ids, seen.metadata.position_ids))
    found = wrong_model_inputs(ids, positions, seen.work.tokens, seen.work.start)
    return found[0] if found else None


def _try(scenario: Scenario, driver: Driver) -> ScenarioResult:
    try:
        return run_scenario(scenario, driver)
    except ContractBrokenError as error:
        dtype = driver.reference.path.loaded.model.dtype
        return ScenarioResult(scenario, driver.shadow.report(dtype), driver.stats, str(error))


def _condition(outcome: ModelOutcome) -> str | None:
    """What separates the wrong attention calls of the plain run from the right ones."""
    if outcome.candidate is None:
        return None
    dtype: torch.dtype = outcome.candidate.reference.path.loaded.model.dtype
    facts = list(outcome.candidate.shadow.facts(dtype))
    return condition([f for f, bad in facts if bad], [f for f, bad in facts if not bad])
