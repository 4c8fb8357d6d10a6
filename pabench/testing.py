"""``assert_kernel``: the kernel check from anybody's pytest.

from pabench.testing import assert_kernel

def test_my_kernel():
    assert_kernel(my_kernel, dtypes=["fp32", "bf16"])
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pabench.checks.kernel.case import KernelCase
from pabench.checks.kernel.faults import distinct_faults
from pabench.checks.kernel.run import judge_kernel_cases, plan_kernel_cases
from pabench.checks.kernel.shapes import hand_picked
from pabench.errors import UsageError
from pabench.models.load import require_device
from pabench.records import Record
from pabench.suite import load_suite
from pabench_kernels.contract import Kernel
from pabench_kernels.request import KernelRequest, parse_request, request_of
from pabench_kernels.stranger import as_kernel

__all__ = ["KernelVerdict", "assert_kernel"]

_MAX_EXAMPLES = 3


@dataclass(frozen=True)
class KernelVerdict:
    """What was judged, all of it right: a record per case, as ``pabench run`` stores them."""

    records: tuple[Record, ...]

    @property
    def passed(self) -> int:
        return sum(r.status == "PASS" for r in self.records)

    @property
    def skipped(self) -> dict[str, int]:
        """How many cases the kernel does not support, by reason."""
        return dict(Counter(r.message.removeprefix("unsupported: ") for r in self.records if r.status == "SKIPPED"))


def assert_kernel(
    kernel: Callable[..., Any] | str,
    *,
    shapes: Sequence[str] | None = None,
    probes: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    kv_dtype: str = "auto",
    block_size: int = 16,
    seed: int = 0,
    device: str = "cpu",
) -> KernelVerdict:
    """Judge ``kernel`` on generated batches against an fp64 oracle, in this process.

    ``kernel`` is a function ``fn(batch: PagedBatch) -> Tensor``, with optional attributes ``unsupported`` and
    ``phases``, or what ``-k`` takes. ``shapes`` are names or specs as ``--batch-spec`` takes them, all hand-picked ones
    by default; each meets every one of ``probes``, or one of all in turn where none is named. ``dtypes`` are fp32,
    bf16, fp16 and fp8 (bf16 over an fp8_e4m3 cache).

    Raises ``AssertionError`` with the sentences of ``pabench run`` if a case is wrong, if it raises, or if in one of
    ``dtypes`` no case at all was judged; ``UsageError`` for a name that means nothing, ``CannotJudge`` for a device
    that is not here. A Triton kernel on the CPU needs ``TRITON_INTERPRET=1`` before triton is imported.
    """
    require_device(device)
    for name, value in (("shapes", shapes), ("probes", probes), ("dtypes", dtypes)):
        if value is not None and (isinstance(value, str) or not value):
            raise UsageError(f"{name} must be a list of at least one name, got {value!r}")
    request = parse_request(kernel) if isinstance(kernel, str) else _request(kernel)
    chosen = list(shapes) if shapes is not None else hand_picked()
    check = {"batch_specs": chosen, "count": len(chosen) * len(probes or ["one in turn"])}
    suite = load_suite(
        "kernels",
        {
            "kernels": ["torch_paged"],  # which kernel is judged is not the suite's to say here
            "dtypes": list(dtypes),
            "kv_dtype": kv_dtype,
            "block_size": block_size,
            "kernel_check": {**check, **({"probes": list(probes)} if probes is not None else {})},
        },
    )
    cases = plan_kernel_cases(suite, [(request.name, request.text)], seed, device)
    records = tuple(
        judge_kernel_cases(
            cases,
            request,
            fail_on_fallback=True,
            begun=lambda _: None,
            crashed=lambda _: None,
            note=lambda _: None,
        )
    )
    bad = [(case, r) for case, r in zip(cases, records, strict=False) if r.status not in ("PASS", "SKIPPED")]
    if bad:
        raise AssertionError(_failure(request, records, bad))
    for case in cases:
        asked = case.trial.precision
        own = [r for r in records if (r.dtype, r.kv_dtype) == (asked.dtype, asked.kv_dtype)]
        if all(r.status == "SKIPPED" for r in own):
            raise AssertionError(_nothing_judged(request, asked.asked, own))
    return KernelVerdict(records)


def _request(fn: Callable[..., Any]) -> KernelRequest:
    """The request of a function object; its text is what a command line would name it by, where one could."""
    if isinstance(fn, Kernel):
        return request_of(fn, fn.name)
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        file = inspect.getsourcefile(fn)
    except TypeError:  # an object that is called
        file = None
    if file is None or getattr(fn, "__qualname__", "") != name or not name.isidentifier():
        return request_of(as_kernel(fn, name), "")
    path = os.path.relpath(file)
    return request_of(as_kernel(fn, f"{os.path.basename(file)}:{name}"), f"{path}:{name}")


def _failure(request: KernelRequest, records: Sequence[Record], bad: Sequence[tuple[KernelCase, Record]]) -> str:
    n = Counter(r.status for r in records)
    judged = len(records) - n["SKIPPED"]
    lines = [f"{request.name}: {len(bad)} of {judged} judged cases are wrong ({n['SKIPPED']} skipped)"]
    for fault in distinct_faults(records):
        what = fault.summary if fault.fault == "unknown" else f"{fault.fault}: {fault.summary}"
        lines.append(f"FAULT  {what}" + (f" ({fault.condition})" if fault.condition else ""))
    for case, r in bad[:_MAX_EXAMPLES]:
        lines += [
            f"{r.status}  {r.dtype} / {r.kv_dtype} {r.batch_spec} {r.probe}",
            f"  {r.message}",
            f"  {_again(case)}",
        ]
        if request.text:
            lines.append(f"  {r.repro}")
    if len(bad) > _MAX_EXAMPLES:
        lines.append(f"  and {len(bad) - _MAX_EXAMPLES} more")
    return "\n".join(lines)


def _again(case: KernelCase) -> str:
    t = case.trial
    kv_dtype = f", kv_dtype={t.precision.kv_dtype!r}" if t.precision.quantized and t.precision.asked != "fp8" else ""
    return (
        f"assert_kernel(…, shapes=[{t.shape.batch_spec!r}], probes=[{t.probe!r}], dtypes=[{t.precision.asked!r}]"
        f"{kv_dtype}, block_size={t.shape.block_size}, seed={t.seed})"
    )


def _nothing_judged(request: KernelRequest, dtype: str, records: Sequence[Record]) -> str:
    reasons = Counter(r.message.removeprefix("unsupported: ") for r in records)
    shown = "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common(_MAX_EXAMPLES))
    return f"{request.name}: nothing was judged in {dtype}, all {len(records)} cases were skipped: {shown}"
