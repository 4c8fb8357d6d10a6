"""The only orchestrator: Suite → cases → checks → records. A crash in one case costs that case."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import Literal, Protocol

import torch

from pabench.cases import ModelCase, Precision, config_of, inputs_digest, precisions, repro_command
from pabench.checks.kernel.case import KernelCase
from pabench.checks.kernel.faults import distinct_faults
from pabench.checks.kernel.run import judge_kernel_cases, plan_kernel_cases
from pabench.checks.model import OnFallback, judge
from pabench.checks.model_record import record_groups
from pabench.environment import collect, git_state
from pabench.errors import UsageError, failure_fields
from pabench.models.load import LoadedModel, ModelSource, load_model, require_device, resolve_model
from pabench.process_state import process_state_kept
from pabench.prompts import Prompt, choose, read_prompts
from pabench.records import Record, RunHeader, RunInfo, summarize
from pabench.reference.run import ReferenceRun, run_reference
from pabench.results import RunFolder
from pabench.resume import claim, find_unfinished
from pabench.suite import Suite
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.registry import UnknownKernelError
from pabench_kernels.request import KernelRequest, parse_request, split_requests


class Watcher(Protocol):
    """Is told what happens, for progress display."""

    def begin(self, total: int, done: int) -> None: ...
    def note(self, text: str) -> None: ...
    def crashed(self, error: BaseException) -> None: ...
    def case_done(self, record: Record) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """What a run needs besides its suite."""

    argv: tuple[str, ...]
    output: Path
    seed: int = 0
    device: str = "cpu"
    on_fallback: OnFallback = "fail"
    offline: bool = False
    prompts_file: str | None = None
    resume: bool = False
    suite_text: str | None = None  # what the user named the suite by, where that is a file
    capture: Path | None = None  # where attention calls of model cases are written to


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    header: RunHeader
    records: tuple[Record, ...]


def run_suite(suite: Suite, options: RunOptions, watcher: Watcher) -> FinishedRun:
    """Judge every case of ``suite``; each is stored as it finishes. Raises ``PabenchError`` before the first case for
    what the user must mend. After ``KeyboardInterrupt`` the run folder says "interrupted" and the exception goes on."""
    require_device(options.device)
    requests = _requests(suite.kernels)
    prompts: Sequence[Prompt] = ()
    sources: Sequence[ModelSource] = ()
    if "model" in suite.checks:
        prompts = (
            read_prompts(options.prompts_file) if options.prompts_file else choose(suite.prompts.kinds, options.seed)
        )
        sources = [resolve_model(name, offline=options.offline) for name in suite.models]
    if len({s.name for s in sources}) < len(sources):
        raise UsageError(
            f"two models would be recorded under one name: {', '.join(s.name for s in sources)}; rename one"
        )
    kernel_cases: list[KernelCase] = []
    if "kernel" in suite.checks:
        kernel_cases = plan_kernel_cases(suite, requests, options.seed, options.device)
    cases = _plan(suite, options, requests, prompts, sources)
    config, config_hash = config_of(
        suite,
        options.seed,
        prompts,
        device=options.device,
        on_fallback=options.on_fallback,
        model_fingerprints={s.name: s.fingerprint for s in sources},
        kernel_sources={r.name: r.source_digest() for r in requests},
    )
    git = git_state()
    output = options.output.absolute()  # a kernel may change the working directory
    unfinished = find_unfinished(output, config_hash) if options.resume else None
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
        config=config,
        config_hash=config_hash,
        seed=options.seed,
        git=git,
    )
    header = RunHeader(run=info, environment=collect(options.device))
    folder.start(header)
    started = time.monotonic()
    case_ids = [*(c.case_id for c in kernel_cases), *(c.case_id for c in cases)]
    watcher.begin(len(case_ids), sum(case_id in folder.finished for case_id in case_ids))

    def finish(verdict: Literal["interrupted"] | None = None) -> RunHeader:
        summary = summarize(folder.records, requested=set(product([r.name for r in requests], suite.checks)))
        if verdict:
            summary = summary.model_copy(update={"verdict": verdict, "exit_code": 130})
        done = header.model_copy(
            update={
                "summary": summary,
                "diagnoses": distinct_faults(folder.records),
                "run": info.model_copy(
                    update={
                        "finished_utc": datetime.now(UTC).isoformat(timespec="seconds"),
                        "duration_s": round(time.monotonic() - started, 1),
                        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    }
                ),
            }
        )
        folder.finish(done)
        return done

    records = chain(
        judge_kernel_cases(
            kernel_cases,
            requests,
            finished=folder.finished,
            fail_on_fallback=options.on_fallback == "fail",
            crashed=watcher.crashed,
            note=watcher.note,
        ),
        _judge_all(suite, options, requests, prompts, sources, cases, folder.finished, watcher),
    )
    try:
        for record in records:
            folder.append(record)
            watcher.case_done(record)
    except KeyboardInterrupt:
        finish("interrupted")
        raise
    finally:
        lock.release()
    return FinishedRun(folder.path, finish(), tuple(folder.records))


def _requests(kernels: Iterable[str]) -> list[KernelRequest]:
    try:
        requests = [parse_request(text) for text in split_requests(list(kernels))]
    except UnknownKernelError as error:
        raise UsageError(str(error)) from error
    if not requests:
        raise UsageError("no kernel was given; name one with -k, see `pabench list kernels`")
    chosen: dict[str, KernelRequest] = {}
    for r in requests:
        if chosen.setdefault(r.name, r).files != r.files:
            raise UsageError(f"'{chosen[r.name].text}' and '{r.text}' would both be recorded as '{r.name}'; rename one")
    return list(chosen.values())


def _plan(
    suite: Suite,
    options: RunOptions,
    requests: Sequence[KernelRequest],
    prompts: Sequence[Prompt],
    sources: Sequence[ModelSource],
) -> list[ModelCase]:
    cases = []
    named = zip(suite.models, sources, strict=True)
    for (model, source), precision, request in product(named, precisions(suite), requests):
        repro = repro_command(
            suite,
            options.suite_text or suite.name,
            model,
            request.text,
            precision,
            seed=options.seed,
            prompts_file=options.prompts_file,
            device=options.device,
            on_fallback=options.on_fallback,
        )
        digest = inputs_digest(suite, prompts, source.fingerprint)
        cases.append(ModelCase(source.name, request.name, request.text, precision, suite.block_size, digest, repro))
    return cases


def _judge_all(
    suite: Suite,
    options: RunOptions,
    requests: Sequence[KernelRequest],
    prompts: Sequence[Prompt],
    sources: Sequence[ModelSource],
    cases: Sequence[ModelCase],
    finished: set[str],
    watcher: Watcher,
) -> Iterator[Record]:
    """One record per case not yet finished; cases that share a reference run one after the other."""
    by_name = {r.name: r for r in requests}
    for source in sources:
        shelf = _Shelf(source, options.device)
        for precision in precisions(suite):
            group = [
                c for c in cases if c.model == source.name and c.precision == precision and c.case_id not in finished
            ]
            if not group:
                continue
            try:
                watcher.note(f"{source.name} {precision.asked}: loading")
                reference = _reference(shelf, precision, suite, prompts, watcher)
            except Exception as error:
                watcher.crashed(error)
                yield from (_failed(case, error) for case in group)
                continue
            try:
                for case in group:
                    yield _judge_one(case, by_name[case.kernel], reference, suite, options, watcher)
            finally:
                reference.close()


class _Shelf:
    """Models of one source by dtype: the one in use and its oracle; others are dropped."""

    def __init__(self, source: ModelSource, device: str) -> None:
        self.source = source
        self.device = device
        self._loaded: dict[torch.dtype, LoadedModel] = {}

    def get(self, dtype: torch.dtype) -> LoadedModel:
        if dtype not in self._loaded:
            self._loaded[dtype] = load_model(self.source, dtype=dtype, device=self.device)
        return self._loaded[dtype]

    def keep(self, dtypes: set[torch.dtype]) -> None:
        self._loaded = {d: m for d, m in self._loaded.items() if d in dtypes}
        gc.collect()

    def oracle(self, dtype: torch.dtype) -> LoadedModel | None:
        """The model in fp32, or fp64 where fp32 is judged; None where it does not fit in half the free memory."""
        wanted = torch.float64 if dtype == torch.float32 else torch.float32
        self.keep({dtype, wanted})
        if wanted not in self._loaded:
            parameters = sum(p.numel() for p in self.get(dtype).model.parameters())
            if self.device == "cpu" and parameters * wanted.itemsize > _free_memory() / 2:
                return None
        return self.get(wanted)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _reference(
    shelf: _Shelf, precision: Precision, suite: Suite, prompts: Sequence[Prompt], watcher: Watcher
) -> ReferenceRun:
    loaded = shelf.get(TORCH_DTYPES[precision.dtype])
    token_ids = [_tokenize(loaded, prompt, suite) for prompt in prompts]
    oracle = shelf.oracle(loaded.model.dtype)
    return run_reference(
        loaded,
        token_ids,
        suite.max_new_tokens,
        kv_dtype=TORCH_DTYPES[precision.kv_dtype] if precision.quantized else None,
        oracle_model=oracle,
        progress=lambda text: watcher.note(f"{loaded.name} {precision.asked}: {text}"),
    )


def _tokenize(loaded: LoadedModel, prompt: Prompt, suite: Suite) -> list[int]:
    """Token ids; a bank prompt is cut to the suite's length, a user's own is refused if the model cannot hold it."""
    ids: list[int] = list(loaded.tokenizer(prompt.text)["input_ids"])
    if prompt.kind != "file":
        ids = ids[: suite.prompts.max_tokens]
    limit = loaded.geometry.max_length
    if len(ids) + suite.max_new_tokens > limit:
        raise UsageError(
            f"prompt '{prompt.id}' has {len(ids)} tokens; with {suite.max_new_tokens} new ones it exceeds the "
            f"{limit} tokens of {loaded.name}; shorten it or lower --max-new-tokens"
        )
    if not ids:
        raise UsageError(f"prompt '{prompt.id}' has no tokens; give some text")
    return ids


def _stop_tokens(loaded: LoadedModel) -> list[int]:
    config = getattr(loaded.model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = loaded.tokenizer.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def _judge_one(
    case: ModelCase,
    request: KernelRequest,
    reference: ReferenceRun,
    suite: Suite,
    options: RunOptions,
    watcher: Watcher,
) -> Record:
    started = time.monotonic()
    if reference.nonfinite:
        return _record(
            case,
            status="SKIPPED",
            reason="reference_nonfinite",
            message=f"the dense reference itself is NaN or Inf in {case.precision.asked} at {reference.nonfinite} "
            f"positions; {case.model} does not support this dtype",
        )
    try:
        with process_state_kept():
            outcome = judge(
                reference,
                request,
                block_size=case.block_size,
                token_budget=suite.token_budget,
                on_fallback=options.on_fallback,
                stop_tokens=_stop_tokens(reference.path.loaded),
                capture=options.capture,
                progress=lambda text: watcher.note(f"{case.model} {case.precision.asked} {case.kernel}: {text}"),
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a kernel that calls sys.exit has crashed, whatever its code
        watcher.crashed(error)
        return _failed(case, error)
    return _record(
        case,
        status=outcome.status,
        reason=outcome.reason,
        message=outcome.message,
        duration_s=round(time.monotonic() - started, 2),
        **record_groups(outcome),
    )


def _failed(case: ModelCase, error: BaseException) -> Record:
    return _record(case, **failure_fields(error))


def _record(case: ModelCase, **fields: object) -> Record:
    return Record.model_validate(
        {
            "case_id": case.case_id,
            "pair_key": case.pair_key,
            "check": "model",
            "model": case.model,
            "kernel": case.kernel,
            "dtype": case.precision.dtype,
            "kv_dtype": case.precision.kv_dtype,
            "block_size": case.block_size,
            "repro": case.repro,
            **fields,
        }
    )
