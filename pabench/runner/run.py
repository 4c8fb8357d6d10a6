"""A run: planned, judged, stored. This process plans and stores; kernels run in its children."""

from __future__ import annotations

import resource
import time
from contextlib import closing
from datetime import UTC, datetime
from itertools import product
from typing import Literal

from pabench.checks.kernel.faults import distinct_faults
from pabench.environment import collect, git_state
from pabench.models.load import require_device
from pabench.records import RunHeader, RunInfo, summarize
from pabench.results import RunFolder
from pabench.resume import claim, find_unfinished
from pabench.runner.judge import Judging
from pabench.runner.options import FinishedRun, RunOptions, Watcher
from pabench.runner.plan import make_plan
from pabench.runner.worker import start_server
from pabench.suite import Suite


def run_suite(suite: Suite, options: RunOptions, watcher: Watcher) -> FinishedRun:
    """Judge every case of ``suite``; each is stored as it finishes. Raises ``PabenchError`` before the first case for
    what the user must mend. After ``KeyboardInterrupt`` the run folder says "interrupted" and the exception goes on."""
    if not options.in_process:
        start_server(suite.checks)  # imports while this process plans
    require_device(options.device)
    plan = make_plan(suite, options)
    git = git_state()
    output = options.output.absolute()  # a kernel may change the working directory
    unfinished = find_unfinished(output, plan.config_hash) if options.resume else None
    if unfinished is not None:
        folder, lock = unfinished
    else:
        folder = RunFolder.create(output, device=options.device, git_sha=git.sha)
        lock = claim(folder.path)
    info = RunInfo(
        id=folder.run_id,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=list(options.argv),
        suite=suite.name,
        config=plan.config,
        config_hash=plan.config_hash,
        seed=options.seed,
        git=git,
    )
    header = RunHeader(run=info, environment=collect(options.device))
    folder.start(header)
    started = time.monotonic()
    watcher.begin(len(plan.case_ids), sum(case_id in folder.finished for case_id in plan.case_ids))
    judging = Judging(suite, options, plan, watcher)

    def finish(verdict: Literal["interrupted"] | None = None) -> RunHeader:
        summary = summarize(folder.records, requested=set(product([r.name for r in plan.requests], suite.checks)))
        if verdict:
            summary = summary.model_copy(update={"verdict": verdict, "exit_code": 130})
        own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        done = header.model_copy(
            update={
                "summary": summary,
                "diagnoses": distinct_faults(folder.records),
                "run": info.model_copy(
                    update={
                        "finished_utc": datetime.now(UTC).isoformat(timespec="seconds"),
                        "duration_s": round(time.monotonic() - started, 1),
                        "peak_rss_bytes": own_peak + judging.peak_rss_bytes,
                    }
                ),
            }
        )
        folder.finish(done)
        return done

    try:
        with closing(judging.records(folder.finished)) as records:
            for record in records:
                folder.append(record)
                watcher.case_done(record)
    except KeyboardInterrupt:
        finish("interrupted")
        raise
    finally:
        lock.release()
    order = {case_id: i for i, case_id in enumerate(plan.case_ids)}
    folder.records.sort(key=lambda r: order.get(r.case_id, len(order)))
    return FinishedRun(folder.path, finish(), tuple(folder.records))
