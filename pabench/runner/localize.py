"""``pabench localize``: one model, one kernel, one precision, looked at closely in a child process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pabench.cases import Precision, precisions
from pabench.errors import ExecutionError, PabenchError, UsageError
from pabench.localization import CauseFound, LocalizationReport, ReproFile
from pabench.models.load import ModelSource, require_device, resolve_model
from pabench.prompts import Prompt, choose, read_prompts
from pabench.runner.child import emit_crash
from pabench.runner.events import At, Began, Emit, Note
from pabench.runner.one_job import Refusal, run_job
from pabench.runner.options import RunOptions, Watcher
from pabench.runner.replay_call import ReplayJob, replay_job
from pabench.runner.requests import describe_requests
from pabench.runner.worker import start_server
from pabench.suite import Suite


@dataclass(frozen=True)
class LocalizeJob:
    suite: Suite
    source: ModelSource
    kernel_text: str
    precision: Precision
    prompts: tuple[Prompt, ...]
    options: RunOptions
    repro: Path | None  # a file; None: none is written


def localize_case(suite: Suite, options: RunOptions, watcher: Watcher, repro: Path | None) -> LocalizationReport:
    """``suite`` must name one model, one kernel and one dtype. Raises ``PabenchError`` for what cannot be done."""
    if not options.in_process:
        start_server(("model",))
    require_device(options.device)
    if repro is not None:
        _check_target(repro)
    kinds = (("-m", suite.models), ("-k", suite.kernels), ("--dtype", suite.dtypes))
    for flag, given in kinds:
        if len(given) != 1:
            raise UsageError(f"localize looks at one case; {flag} must name one, got {', '.join(given) or 'none'}")
    (request,) = describe_requests(suite.kernels, options)
    (model,) = suite.models
    (precision,) = precisions(suite)
    chosen = read_prompts(options.prompts_file) if options.prompts_file else choose(suite.prompts.kinds, options.seed)
    source = resolve_model(model, offline=options.offline)
    job = LocalizeJob(suite, source, request.text, precision, tuple(chosen), options, repro)
    found = run_job(localize_job, job, watcher, hang_timeout_s=options.hang_timeout_s, in_process=options.in_process)
    assert isinstance(found, LocalizationReport)
    return found if found.repro is None or options.in_process else _replayed(found, request.text, options, watcher)


def _check_target(file: Path) -> None:
    """Raises ``UsageError`` for a place that cannot hold the file, before minutes of work."""
    if file.is_dir():
        raise UsageError(f"--repro '{file}' is a folder; name a file in it")
    parent = next(p for p in file.absolute().parents if p.exists())
    if not parent.is_dir():
        raise UsageError(f"repro file '{file}' cannot be written: '{parent}' is no folder; give another --repro or -o")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"repro file '{file}' cannot be written: '{parent}' is read-only; give another --repro or -o")


def _replayed(found: LocalizationReport, kernel_text: str, options: RunOptions, watcher: Watcher) -> LocalizationReport:
    """A repro file is kept only if a fresh process fails on it too; else the fault is in what the process keeps."""
    assert found.repro is not None
    watcher.note("replaying the call in a fresh process")
    path = Path(found.repro.file)
    job = ReplayJob(path.absolute(), kernel_text, options.device)
    again = run_job(replay_job, job, watcher, hang_timeout_s=options.hang_timeout_s)
    if again.status != "PASS":
        return found
    path.unlink(missing_ok=True)
    left_over = CauseFound(
        fault="plan_reuse", confidence=0.9, clause="in a fresh process the same call comes out right"
    )
    others = tuple(c for c in found.causes if c.fault != "plan_reuse")
    note = "a fresh process does not have the fault: it comes from what is left over of earlier calls"
    return found.model_copy(update={"repro": None, "repro_note": note, "causes": (left_over, *others)})


def localize_job(job: LocalizeJob, emit: Emit) -> Iterator[LocalizationReport | Refusal]:
    """What runs in the child."""
    from pabench_kernels.trace import watched

    emit(Began("localize"))
    places = [At(-1, "")]

    def at(layer: int, phase: str) -> None:
        places[0] = At(layer, phase)
        emit(places[0])

    try:
        with watched(at):
            yield _localize(job, emit)
    except PabenchError as error:
        yield Refusal(error)
    except Exception as error:
        emit_crash(error, emit)
        where = "" if places[0].layer < 0 else f" in layer {places[0].layer}, {places[0].phase}"
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield Refusal(ExecutionError(f"the kernel raised {text}{where}"))


def _localize(job: LocalizeJob, emit: Emit) -> LocalizationReport:
    from pabench.checks.localize import localize
    from pabench.checks.localize_report import report_of
    from pabench.models.shelf import ModelShelf
    from pabench.reference.run import run_reference
    from pabench.runner.model_judging import stop_tokens, tokenize
    from pabench.torch_dtypes import TORCH_DTYPES
    from pabench_kernels.request import parse_request

    def note(text: str) -> None:
        emit(Note(text))

    precision = job.precision
    note(f"loading {job.source.name}")
    loaded = ModelShelf(job.source, job.options.device).get(TORCH_DTYPES[precision.dtype])
    request = parse_request(job.kernel_text)
    reference = run_reference(
        loaded,
        [tokenize(loaded, prompt, job.suite) for prompt in job.prompts],
        job.suite.max_new_tokens,
        kv_dtype=TORCH_DTYPES[precision.kv_dtype] if precision.quantized else None,
        progress=note,
    )
    try:
        found = localize(
            reference,
            request,
            block_size=job.suite.block_size,
            token_budget=job.suite.token_budget,
            stop_tokens=stop_tokens(loaded),
            on_fallback=job.options.on_fallback,
            progress=note,
            shrunk=job.repro is not None,
        )
    finally:
        reference.close()
    repro, why_not = None, None
    if job.repro is not None and found.first is not None:
        if found.first.inputs:
            why_not = "the kernel was given wrong inputs, so there is no call of it to replay"
        elif found.small is None:
            why_not = "by itself the call comes out right: the failure depends on something outside of it"
        else:
            try:
                repro = _write(job, found.small, request.name, found.first.layer, found.causes[0].fault)
            except PabenchError as error:  # what was found is worth more than the file
                why_not = str(error)
    return report_of(
        found,
        model=job.source.name,
        kernel=request.name,
        dtype=precision.dtype,
        kv_dtype=precision.kv_dtype,
        block_size=job.suite.block_size,
        prompts=[p.id for p in job.prompts],
        repro=repro,
        repro_note=why_not,
    )


def _write(job: LocalizeJob, small: object, kernel: str, layer: int, fault: str) -> ReproFile:
    from pabench.checks.localize import SmallCall
    from pabench.repro.format import ReproMeta
    from pabench.repro.tensors import write_repro

    assert isinstance(small, SmallCall)
    assert job.repro is not None
    batch = small.batch
    meta = ReproMeta(
        kernel=kernel,
        origin=f"{job.source.name}, {job.precision.asked}, layer {layer}, seed {job.options.seed}",
        fault=fault,
        layer=layer,
        num_blocks=int(batch.key_cache.shape[0]),
        scale=float(batch.scale),
        causal=batch.causal,
        sliding_window=batch.sliding_window,
        logits_soft_cap=batch.logits_soft_cap,
    )
    size = write_repro(job.repro, meta, batch)
    command = shlex.join(["pabench", "replay", str(job.repro), "-k", job.kernel_text])
    return ReproFile(file=str(job.repro), bytes=size, fault=fault, command=command)
