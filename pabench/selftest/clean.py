"""Honest kernels through the same checks: whatever fails here is a false alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial, judge_kernel
from pabench.checks.kernel.shapes import find_shape
from pabench.checks.localize import localize
from pabench.process_state import process_state_kept
from pabench.selftest.kernel_part import SHAPES, probes_of
from pabench.selftest.model_part import BLOCK_SIZE, TOKEN_BUDGET, References
from pabench_kernels.request import KernelRequest, parse_request

PRECISIONS = (
    Precision("fp32", "fp32", "fp32"),
    Precision("bf16", "bf16", "bf16"),
    Precision("fp16", "fp16", "fp16"),
    Precision("fp8", "bf16", "fp8_e4m3"),
)
KERNELS = ("torch_paged", "cpu_native")  # beside the plain one; interpreted Triton is judged by the suite `kernels`
TURNS = 2  # times that each shape meets another probe, a precision
RIGHT = ("PASS", "NEAR_TIE")


@dataclass(frozen=True)
class CleanCase:
    """``alarm`` is the message of a failure; None where the case passed. A refused case is not one."""

    name: str
    alarm: str | None


def clean_kernel_cases(
    honest: KernelRequest, seed: int, note: Callable[[str], None] = lambda _: None
) -> Iterator[CleanCase]:
    """The plain kernel and the built-in ones on generated batches, other ones for every seed."""
    requests: list[KernelRequest] = [honest, *(parse_request(k) for k in KERNELS if k != honest.name)]
    probes = probes_of("content")
    for p, precision in enumerate(PRECISIONS):
        for i, name in enumerate(SHAPES):
            for turn in range(TURNS):
                trial = Trial(find_shape(name, 16), probes[(i + p + 3 * turn) % len(probes)], precision, seed + 1)
                note(f"clean: {precision.asked} {name} {trial.probe}")
                for request in requests:
                    with process_state_kept():
                        outcome = judge_kernel(trial, request)
                    if outcome.status == "SKIPPED":
                        continue
                    yield CleanCase(
                        f"{request.name} {precision.asked} {name} {trial.probe}",
                        None if outcome.status == "PASS" else outcome.message,
                    )
                trial.drop()


def clean_model_cases(
    honest: KernelRequest, references: References, note: Callable[[str], None] = lambda _: None
) -> Iterator[CleanCase]:
    """The model check and every scenario, where texts part at near ties as they do in bf16; nothing may be blamed."""
    import torch

    for kv_dtype in (None, torch.float8_e4m3fn):
        for request in (honest, parse_request("torch_paged")):
            note(f"clean model: {request.name}")
            with process_state_kept():
                found = localize(
                    references.get(kv_dtype),
                    request,
                    block_size=BLOCK_SIZE,
                    token_budget=TOKEN_BUDGET,
                    stop_tokens=(),
                )
            name = f"{request.name} bf16 {'over fp8' if kv_dtype else ''}".strip()
            right = found.outcome.status in RIGHT
            yield CleanCase(f"model {name}", None if right else found.outcome.message)
            for result in found.results:
                yield CleanCase(f"model {name}, {result.scenario.name}", None if result.passed else "wrong")
