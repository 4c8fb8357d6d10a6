"""The model check's work, where transformers is imported: the cases of a job, which share their references."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pabench.cases import ModelCase, Precision, precisions
from pabench.checks.kernel.run import device_is_lost
from pabench.checks.model import judge
from pabench.checks.model_record import record_groups
from pabench.errors import UsageError, failure_fields
from pabench.models.load import LoadedModel
from pabench.models.shelf import ModelShelf
from pabench.process_state import process_state_kept
from pabench.prompts import Prompt
from pabench.records import Record
from pabench.reference.run import ReferenceRun, run_reference
from pabench.runner.child import emit_crash
from pabench.runner.events import At, Began, Emit, Note
from pabench.runner.model_job import ModelJob
from pabench.runner.records import model_record
from pabench.suite import Suite
from pabench.torch_dtypes import TORCH_DTYPES
from pabench_kernels.request import KernelRequest, parse_request
from pabench_kernels.trace import watched


def judge_models(job: ModelJob, emit: Emit) -> Iterator[Record]:
    """One record per case; cases that share a reference run one after the other. Stops early where the device is lost,
    which only a new process gets back."""
    requests: dict[str, KernelRequest] = {}
    for source in job.sources:
        shelf = ModelShelf(source, job.device)
        for precision in precisions(job.suite):
            group = [c for c in job.cases if c.model == source.name and c.precision == precision]
            if not group:
                continue
            try:
                emit(Note(f"{source.name} {precision.asked}: loading"))
                reference = _reference(shelf, precision, job, lambda text: emit(Note(text)))
            except Exception as error:
                emit_crash(error, emit)
                yield from (model_record(case, **failure_fields(error)) for case in group)
                continue
            try:
                for case in group:
                    emit(Began(case.case_id))
                    if case.kernel not in requests:
                        requests[case.kernel] = parse_request(case.kernel_text)
                    record = _judge_one(case, requests[case.kernel], reference, job, emit)
                    yield record
                    if record.status == "ERROR" and device_is_lost(job.device):
                        return
            finally:
                reference.close()


def _reference(shelf: ModelShelf, precision: Precision, job: ModelJob, note: Callable[[str], None]) -> ReferenceRun:
    loaded = shelf.get(TORCH_DTYPES[precision.dtype])
    token_ids = [_tokenize(loaded, prompt, job.suite) for prompt in job.prompts]
    oracle = shelf.oracle(loaded.model.dtype)
    return run_reference(
        loaded,
        token_ids,
        job.suite.max_new_tokens,
        kv_dtype=TORCH_DTYPES[precision.kv_dtype] if precision.quantized else None,
        oracle_model=oracle,
        progress=lambda text: note(f"{loaded.name} {precision.asked}: {text}"),
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
    job: ModelJob,
    emit: Emit,
) -> Record:
    started = time.monotonic()
    if reference.nonfinite:
        return model_record(
            case,
            status="SKIPPED",
            reason="reference_nonfinite",
            message=f"the dense reference itself is NaN or Inf in {case.precision.asked} at {reference.nonfinite} "
            f"positions; {case.model} does not support this dtype",
        )
    try:
        with process_state_kept(), watched(lambda layer, phase: emit(At(layer, phase))):
            outcome = judge(
                reference,
                request,
                block_size=case.block_size,
                token_budget=job.suite.token_budget,
                on_fallback=job.on_fallback,
                stop_tokens=_stop_tokens(reference.path.loaded),
                capture=job.capture,
                progress=lambda text: emit(Note(f"{case.model} {case.precision.asked} {case.kernel}: {text}")),
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a kernel that calls sys.exit has crashed, whatever its code
        emit_crash(error, emit)
        return model_record(case, **failure_fields(error))
    return model_record(
        case,
        status=outcome.status,
        reason=outcome.reason,
        message=outcome.message,
        duration_s=round(time.monotonic() - started, 2),
        **record_groups(outcome),
    )
