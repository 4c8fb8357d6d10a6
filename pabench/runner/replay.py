"""A kernel case that failed is run once more in a fresh process: what is right there, earlier calls have spoilt."""

from __future__ import annotations

from collections.abc import Callable

from pabench.checks.kernel.case import KernelCase
from pabench.records import Diagnosis, Record

MAX_REPLAYS = 3  # per kernel


class Replayer:
    """Decides for each failed record of one kernel whether state of earlier calls is to blame.

    ``again(case)`` judges the case in a fresh process. A kind of failure is replayed until it fails there too, or
    until ``MAX_REPLAYS`` are spent; a kind whose replays all passed stays blamed on state.
    """

    def __init__(self, again: Callable[[KernelCase], Record]) -> None:
        self._again = again
        self._replays = 0
        self._stateful: dict[str, bool] = {}

    def __call__(self, case: KernelCase, record: Record, earlier: int) -> Record:
        """The record, blamed on state if so; ``earlier`` cases were judged in the same process before."""
        kind = record.reason or ""
        if record.status != "FAIL" or not earlier or self._stateful.get(kind) is False:
            return record
        if self._replays < MAX_REPLAYS:
            self._replays += 1
            fresh = self._again(case)
            self._stateful[kind] = fresh.status == "PASS"
            if fresh.status == "PASS":
                return _blamed(record, earlier, 0.9, "replayed alone in a fresh process, it passes")
        elif self._stateful.get(kind):
            why = f"not replayed, but all {MAX_REPLAYS} failures that were passed in a fresh process"
            return _blamed(record, earlier, 0.6, why)
        return record


def _blamed(record: Record, earlier: int, confidence: float, replay: str) -> Record:
    message = (
        f"plan_reuse: state left over from earlier calls leaks into this one ({earlier} cases came before it; "
        f"{replay}): {record.message}"
    )
    evidence = {**(record.diagnosis.evidence if record.diagnosis else {}), "replay": replay, "earlier_cases": earlier}
    diagnosis = Diagnosis(fault="plan_reuse", confidence=confidence, evidence=evidence)
    return record.model_copy(update={"message": message, "diagnosis": diagnosis})
