"""A child process that compiles: ``python -m pabench.compilation.worker``, one JSON request a line, one JSON answer.

It runs without TRITON_INTERPRET, which Triton reads when it is imported; so the process of the command line, in which
kernels may be interpreted, cannot compile by itself.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import cache
from typing import Any

from pabench.compilation.batches import build, supported_features
from pabench.compilation.cases import DEFAULT_HEAD_DIMS
from pabench.compilation.writers import WRITERS, writer
from pabench_kernels.aot import (
    CompilerCrashedError,
    CompilerRefusedError,
    LauncherFailedError,
    aim_at,
    compile_launches,
    launches_triton,
    on_target,
    one_line,
)
from pabench_kernels.contract import Kernel
from pabench_kernels.registry import UnknownKernelError, get_kernel
from pabench_kernels.target import TARGETS, find_target


def main() -> None:
    """Answer until stdin ends. Only answers go to stdout: whatever kernels print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    aim_at(next(iter(TARGETS.values())))  # a file that autotunes asks for a driver when it is imported
    for line in sys.stdin:
        request = json.loads(line)
        answer = describe(request["kernel"]) if request["op"] == "describe" else compile_one(**request["case"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def describe(name: str) -> dict[str, Any]:
    """``phases`` of a kernel and whether it is ``triton``, or ``unknown`` with the sentence why there is none."""
    try:
        kernel = _kernel(name)
    except UnknownKernelError as error:
        return {"unknown": str(error)}
    phases, target = sorted(kernel.phases), next(iter(TARGETS.values()))
    batch = build(phases[0], "fp16", "fp16", DEFAULT_HEAD_DIMS[0])
    return {"phases": phases, "triton": launches_triton(kernel, batch, target)}


def compile_one(
    kernel: str, phase: str, target: str, dtype: str, kv_dtype: str, head_dim: int, variant: str
) -> dict[str, Any]:
    """What the kernel declares (``declared``) and what the compiler says: ``binaries`` or ``refusal``.

    ``failed``: the launcher could not be followed; ``crashed``: the compiler gave no answer.
    """
    found = _kernel(kernel)
    answer: dict[str, Any] = {"declared": [], "refusal": None, "binaries": [], "failed": None, "crashed": None}
    with on_target(find_target(target)):
        try:
            features = _features(kernel, phase, target) if variant == "features" else frozenset()
            batch = build(phase, dtype, kv_dtype, head_dim, features)
            answer["declared"] = found.unsupported(batch)
        except Exception as error:
            answer["failed"] = f"unsupported() raised {type(error).__name__}: {one_line(str(error))}"
            return answer
    try:
        lse = variant == "features" and found.has_lse
        binaries = compile_launches(found, batch, find_target(target), return_lse=lse)
        answer["binaries"] = [asdict(b) for b in binaries]
    except CompilerRefusedError as error:
        answer["refusal"] = str(error)
    except CompilerCrashedError as error:
        answer["crashed"] = str(error)
    except LauncherFailedError as error:
        if isinstance(error.__cause__, NotImplementedError):  # the contract's late "unsupported"
            answer["declared"].append(str(error.__cause__) or "NotImplementedError")
            answer["refusal"] = "nothing was launched"
        else:
            answer["failed"] = str(error)
    return answer


@cache
def _kernel(name: str) -> Kernel:
    return writer(name) if name in WRITERS else get_kernel(name)


@cache
def _features(kernel: str, phase: str, target: str) -> frozenset[str]:
    return supported_features(_kernel(kernel), phase)


if __name__ == "__main__":
    main()
