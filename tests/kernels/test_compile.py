"""The sources that the interpreter runs also compile for GPUs, within their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["common", "more"])
def test_kernels_compile_for(arch: str, more: bool, repo: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "PYTHONPATH": str(repo / "kernels"),
        "TRITON_CACHE_DIR": str(tmp_path),  # a cached binary would prove nothing
        "TRITON_DEFAULT_FP_FUSION": "1",  # what it is anyway; unset, Triton warns
    }
    command = [sys.executable, str(repo / "tests/kernels/compile_for_gpus.py"), arch, *(["--more"] if more else [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {found["kernel"] for found in compiled} == {"attention_kernel", "merge_kernel", "cache_write_kernel"}
    for found in compiled:
        assert found["binary"] == ["hsaco" if arch == "gfx942" else "cubin"]
        assert found["shared"] <= SHARED_BYTES[arch], found
        assert found["shared"] > 0 or found["kernel"] == "cache_write_kernel", "a tl.dot goes through shared memory"
