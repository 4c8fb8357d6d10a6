"""``pabench replay FILE``: the call of a repro file, judged with any kernel, in a child process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pabench.errors import CannotJudge, PabenchError, UsageError
from pabench.localization import ReplayReport
from pabench.repro.format import ReproMeta, read_meta
from pabench.runner.events import Began, Emit
from pabench.runner.one_job import Refusal, run_job
from pabench.runner.options import RunOptions, Watcher
from pabench.runner.requests import describe_requests
from pabench.runner.worker import start_server


@dataclass(frozen=True)
class ReplayJob:
    path: Path
    kernel_text: str
    device: str


def replay_file(path: Path, kernel: str | None, options: RunOptions, watcher: Watcher) -> ReplayReport:
    """Judge it with ``kernel``, or with the one that failed. Raises ``PabenchError`` for what cannot be done."""
    meta: ReproMeta = read_meta(path)
    if kernel is None and ".py:" in meta.kernel and not Path(meta.kernel.partition(".py:")[0] + ".py").is_file():
        raise UsageError(f"'{path.name}' keeps no folder of its kernel; name it with -k FOLDER/{meta.kernel}")
    if not options.in_process:
        start_server()
    (request,) = describe_requests([kernel or meta.kernel], options)
    job = ReplayJob(path.absolute(), request.text, options.device)
    found = run_job(replay_job, job, watcher, hang_timeout_s=options.hang_timeout_s, in_process=options.in_process)
    assert isinstance(found, ReplayReport)
    return found


def replay_job(job: ReplayJob, emit: Emit) -> Iterator[ReplayReport | Refusal]:
    """What runs in the child."""
    emit(Began("replay"))
    try:
        yield _replay(job)
    except PabenchError as error:
        yield Refusal(error)


def _replay(job: ReplayJob) -> ReplayReport:
    from pabench.checks.kernel.case import nan_in_new_tensors
    from pabench.checks.replay import judge_call
    from pabench.repro.tensors import read_repro
    from pabench_kernels.dispatch import ContractBrokenError, Dispatcher
    from pabench_kernels.request import parse_request

    meta, batch = read_repro(job.path, job.device)
    request = parse_request(job.kernel_text)
    dispatcher = Dispatcher(request)
    shape = (
        f"{batch.num_seqs} sequence{'s' * (batch.num_seqs != 1)}, {batch.num_tokens} query "
        f"token{'s' * (batch.num_tokens != 1)}, longest "
        f"{batch.max_seq_len}, {batch.num_q_heads}/{batch.num_kv_heads} heads, head_dim {batch.head_dim}, block size "
        f"{batch.block_size}, {str(batch.query.dtype).removeprefix('torch.')} over "
        f"{str(batch.key_cache.dtype).removeprefix('torch.')}"
    )

    def report(
        status: str, fault: str | None, clauses: list[str], numbers: tuple[int, int, int, float]
    ) -> ReplayReport:
        rows, beyond, nonfinite, ratio = numbers
        return ReplayReport(
            kernel=request.name,
            status=status,
            rows=rows,
            rows_beyond=beyond,
            nonfinite=nonfinite,
            error_over_tolerance=ratio,
            fault=fault,
            clauses=clauses,
            was=meta.fault,
            origin=meta.origin,
            shape=shape,
        )

    try:
        with nan_in_new_tensors():
            out = dispatcher(batch, layer=meta.layer)
    except ContractBrokenError as error:
        return report("FAIL", "unknown", [str(error)], (0, 0, 0, float("inf")))
    if dispatcher.fallbacks:
        reasons = "; ".join(dict.fromkeys(r for key in dispatcher.fallbacks for r in key.reasons))
        raise CannotJudge(f"{request.name} does not support this call: {reasons}")
    verdict = judge_call(batch, out)
    if verdict.rows == 0:
        raise CannotJudge("the call has no query tokens; nothing was judged")
    if dispatcher.proof() == "fell_back":
        entered = ", ".join(sorted({name for _, name, _, _ in dispatcher.intruders()}))
        numbers = (verdict.rows, verdict.rows_beyond, verdict.nonfinite, verdict.ratio)
        return report("FAIL", "fallback", [f"{request.name} entered {entered} from inside"], numbers)
    if dispatcher.proof() == "unknown":
        raise CannotJudge(f"no launch of {request.name} was counted, so what computed the result is unknown")
    numbers = (verdict.rows, verdict.rows_beyond, verdict.nonfinite, verdict.ratio)
    if verdict.passed:
        return report("PASS", None, [], numbers)
    explained = verdict.explain()
    fault = ("nonfinite" if verdict.nonfinite else "unknown") if explained is None else explained.fault
    clauses = [] if explained is None else [f"as if {m.what}" for m in explained.matches[:3]]
    if explained is not None and not explained.matches and explained.note:
        clauses = [explained.note]
    return report("FAIL", fault, clauses, numbers)
