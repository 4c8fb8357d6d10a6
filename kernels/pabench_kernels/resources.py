"""What a compiled kernel asks of its GPU: registers, spills and shared memory, read from the binary."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from pabench_kernels.target import Target


@dataclass(frozen=True)
class Resources:
    """Per thread (AMD: per lane) but for ``shared_bytes``, which is per block.

    ``spill_bytes`` is the local memory of a thread (its stack frame on NVIDIA, its scratch on AMD): Triton makes no
    local arrays, so that what lies there was spilled. ``scalar_registers`` are AMD's, shared by a wave.
    """

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    scalar_registers: int | None = None


def read_resources(compiled: Any, target: Target) -> Resources:
    """Of Triton's ``CompiledKernel``. None where the tool that reads a cubin is missing or gives another format."""
    shared = int(compiled.metadata.shared)
    if target.backend == "hip":
        return _from_amdgcn(compiled.asm["amdgcn"], shared)
    return _from_cubin(compiled.asm["cubin"], shared)


def _from_amdgcn(text: str, shared: int) -> Resources:
    """Code object metadata (LLVM, "User Guide for AMDGPU Backend"): vector registers count the accumulators in."""

    def number(key: str) -> int | None:
        found = re.search(rf"^\s*\.{key}:\s*(\d+)", text, re.MULTILINE)
        return None if found is None else int(found[1])

    return Resources(number("vgpr_count"), number("private_segment_fixed_size"), shared, number("sgpr_count"))


def _from_cubin(cubin: bytes, shared: int) -> Resources:
    """From ``cuobjdump --dump-resource-usage``, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", name], capture_output=True, text=True, check=False, timeout=60
        )
        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    except (OSError, subprocess.TimeoutExpired):
        usage = {}
    finally:
        os.unlink(name)
    if "REG" not in usage:
        return Resources(None, None, shared)
    return Resources(int(usage["REG"]), int(usage.get("STACK", 0)) + int(usage.get("LOCAL", 0)), shared)
