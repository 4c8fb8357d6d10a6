"""``benchmarks/kernels_gpu.py``: its whole flow without a GPU, so that it works where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch


def run(repo, *args, before="pass"):
    """The script's ``main`` in a process of its own, after ``before``."""
    code = f"import sys; sys.path.insert(0, {str(repo / 'benchmarks')!r})\nimport kernels_gpu\n{before}\n"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code + "sys.exit(kernels_gpu.main())", *args],
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_dry_run_judges_and_times_everything(repo, tmp_path):
    done = run(repo, "--dry-run-cpu", "--json", str(tmp_path / "raw.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["wrong"] == []
    for kernel in ("triton_decode", "triton_prefill"):
        for dtypes in ("fp32/fp32", "fp16/fp16", "bf16/bf16", "bf16/fp8_e4m3", "bf16/int8"):
            assert raw["correctness"][f"{kernel} {dtypes}"]["PASS"] >= 1
    timed = {(s["workload"], s["kernel"]): s for s in raw["samples"]}
    for kernel in ("triton_decode", "triton_decode fp8", "sdpa contiguous", "flex contiguous"):
        assert min(timed["2 x 48", kernel]["us"]) > 0
    # K and V of 2 sequences × 48 tokens × 2 heads × 32 numbers of 2 bytes
    assert timed["2 x 48", "triton_decode"]["bytes"] == 2 * 2 * 48 * 2 * 32 * 2
    assert "dry run: figures mean nothing" in done.stdout


def test_a_wrong_kernel_gets_no_figure(repo, tmp_path):
    """The newest token is left out: 1 of 48."""
    broken = (
        "import pabench_kernels.triton_decode as t\nfrom dataclasses import replace\nright = t.triton_decode\n"
        "def wrong(batch, return_lse=False):\n"
        "    return right.fn(replace(batch, seq_lens=(batch.seq_lens - 1).clamp_min(0)), return_lse)\n"
        "t.triton_decode = replace(right, fn=wrong)"
    )
    done = run(repo, "--dry-run-cpu", "--json", str(tmp_path / "raw.json"), before=broken)
    assert done.returncode == 1, done.stdout + done.stderr
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert any("triton_decode on 2 x 48" in line and "not timed" in line for line in raw["wrong"])
    assert any(line.startswith("triton_decode fp32/fp32") for line in raw["wrong"])
    timed = {s["kernel"] for s in raw["samples"]}
    assert "sdpa contiguous" in timed
    assert not any(name.startswith("triton_decode") for name in timed)


def test_without_time_everything_is_dropped_and_named(repo):
    done = run(repo, "--dry-run-cpu", "--budget-s", "5.01")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "dropped: " in done.stdout
    assert "0 outputs judged" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(repo):
    done = run(repo)
    assert done.returncode == 3
    assert done.stdout.startswith("torch sees no GPU, so there is nothing to measure")
    assert len(done.stdout.splitlines()) == 1
