"""``pabench compile``: what the compiler says against what a kernel declares, from the command line down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

Compile = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def compile_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """``compile_("-k", …)`` → exit code, the JSON, stderr. A cached binary would prove nothing: the cache is new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_INTERPRET", "1")  # what the command line's own process may have set

        def run(*args: str) -> tuple[int, dict[str, Any], str]:
            result = CliRunner().invoke(app, ["compile", "--json", *args])
            return result.exit_code, json.loads(result.stdout or "{}"), result.stderr

        yield run


@pytest.fixture(scope="module")
def strangers(compile_: Compile, repo_file: Callable[[str], str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(function, target, KV dtype) → case, of kernels that compile in milliseconds."""
    names = ["undeclared", "honest", "overcautious", "late", "syncs_and_chooses", "autotuned", "broken_launcher"]
    kernels = ",".join(repo_file(name) for name in names)
    args = ("--target", "sm_80,sm_90", "--dtype", "fp8_e4m3,fp16", "--head-dim", "64", "--full", "-j", "1")
    code, found, _ = compile_("-k", kernels, *args)
    assert code == 1
    return {(c["kernel"].rpartition(":")[2], c["target"], c["kv_dtype"]): c for c in found["cases"]}


@pytest.fixture(scope="module")
def repo_file() -> Callable[[str], str]:
    path = Path(__file__).resolve().parents[1] / "faulty" / "compiled.py"
    return lambda function: f"{path}:{function}"


@pytest.mark.parametrize(
    ("function", "target", "kv_dtype", "status", "words"),
    [
        ("undeclared", "sm_80", "fp8_e4m3", "FAIL", "declares no limit, and the compiler refuses: read_natively"),
        ("undeclared", "sm_80", "fp8_e4m3", "FAIL", "fp8e4nv"),
        ("undeclared", "sm_90", "fp8_e4m3", "PASS", ""),
        ("undeclared", "sm_80", "fp16", "PASS", ""),
        ("honest", "sm_80", "fp8_e4m3", "PASS", "refused by both; unsupported() says: sm_80 reads no e4m3; compiler:"),
        ("honest", "sm_90", "fp8_e4m3", "PASS", ""),
        ("overcautious", "sm_90", "fp8_e4m3", "FAIL", "says: bf16 is too coarse, and the compiler accepts it"),
        ("overcautious", "sm_90", "fp16", "PASS", ""),
        ("late", "sm_90", "fp16", "PASS", "unsupported() says: found out late"),
        ("syncs_and_chooses", "sm_90", "fp16", "PASS", ""),
        ("autotuned", "sm_90", "fp16", "PASS", ""),
        ("broken_launcher", "sm_90", "fp16", "INCONCLUSIVE", "cannot be followed without a GPU: KeyError"),
    ],
)
def test_compiler_and_kernel_must_agree(strangers, function, target, kv_dtype, status, words):
    case = strangers[function, target, kv_dtype]
    assert case["status"] == status, case["message"]
    assert words in case["message"]
    assert bool(words) or case["message"] == ""


def test_a_refused_configuration_of_a_tuned_kernel_is_passed_over(strangers):
    (binary,) = strangers["autotuned", "sm_90", "fp16"]["binaries"]
    assert (binary["function"], binary["num_warps"]) == ("tuned", 2)


def test_more_shared_memory_than_a_block_has_is_a_refusal(compile_, repo_file):
    kernels = f"{repo_file('too_much_shared')},{repo_file('knows_its_shared')}"
    code, found, _ = compile_("-k", kernels, "--target", "sm_89,sm_90", "--dtype", "fp16", "--head-dim", "64")
    cases = {(c["kernel"].rpartition(":")[2], c["target"]): c for c in found["cases"]}
    assert code == 1
    assert "a block on sm_89 has 101,376 at most" in cases["too_much_shared", "sm_89"]["message"]
    assert {k: c["status"] for k, c in cases.items()} == {
        ("too_much_shared", "sm_89"): "FAIL",
        ("too_much_shared", "sm_90"): "PASS",
        ("knows_its_shared", "sm_89"): "PASS",
        ("knows_its_shared", "sm_90"): "PASS",
    }
    assert 101_376 < cases["too_much_shared", "sm_90"]["binaries"][0]["shared_bytes"] <= 232_448


@pytest.mark.parametrize(("kernel", "targets"), [("triton_decode", "sm_90,gfx942"), ("triton_prefill", "sm_80")])
def test_our_kernels_compile(compile_, kernel, targets):
    """A few specialisations; more are in the slow tests below."""
    code, found, stderr = compile_("-k", kernel, "--target", targets, "--dtype", "fp8", "--head-dim", "64")
    assert code == 0, stderr
    for case in found["cases"]:
        (binary,) = case["binaries"]
        assert 32 <= binary["registers"] <= 512
        assert binary["spill_bytes"] < 1024
        assert 0 < binary["shared_bytes"] <= 64 << 10
        assert (binary["scalar_registers"] is not None) == (case["target"] == "gfx942")
    assert {(c["target"], c["variant"]) for c in found["cases"]} == {
        (target, variant) for target in targets.split(",") for variant in ("plain", "features")
    }


@pytest.mark.slow
def test_the_default_set_is_done_in_three_minutes_on_two_cores(compile_):
    started = time.monotonic()
    code, found, _ = compile_("-j", "2")
    assert code == 0
    assert time.monotonic() - started < 180
    assert len(found["cases"]) < found["combinations"] / 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_every_specialisation_of_our_kernels_compiles(compile_, target):
    code, found, _ = compile_("--target", target, "--full")
    assert code == 0, [c["message"] for c in found["cases"] if c["status"] != "PASS"]
    assert len(found["cases"]) == found["combinations"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--target", "sm_08"], 2, "unknown target 'sm_08'; did you mean 'sm_"),
        (["-k", "triton_decod"], 2, "did you mean 'triton_decode'"),
        (["-k", "nowhere.py:f"], 2, "kernel file 'nowhere.py' does not exist"),
        (["--dtype", "fp61"], 2, "unknown dtype 'fp61'; did you mean 'fp16'"),
        (["--head-dim", "0"], 2, "--head-dim must be a whole number from 1 to 1024, got '0'"),
        (["--target", ","], 2, "--target was given an empty value"),
        (["--jobs", "0"], 2, "--jobs must be at least 1, got 0"),
        (["-k", "torch_paged"], 3, "kernel 'torch_paged' has nothing to compile"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_compiled_is_one_sentence(compile_, args, code, words):
    found, _, stderr = compile_(*args)
    assert found == code
    assert words in stderr


def test_a_strangers_kernel_without_triton_is_one_sentence(compile_, repo):
    code, _, stderr = compile_("-k", f"{repo}/docs/examples/my_kernel.py:my_kernel")
    assert code == 3
    assert "it has and launches no @triton.jit function" in stderr


def test_a_crash_of_the_compiler_costs_one_case(compile_, repo_file):
    kernels = f"{repo_file('crashes')},{repo_file('honest')}"
    code, found, _ = compile_("-k", kernels, "--target", "sm_90", "--dtype", "fp16", "--head-dim", "64", "-j", "1")
    by_kernel = {c["kernel"].rpartition(":")[2]: c for c in found["cases"]}
    assert code == 4
    assert by_kernel["crashes"]["message"].startswith("the compiler crashed: killed by signal 11 (SIGSEGV)")
    assert by_kernel["honest"]["status"] == "PASS"


def test_an_interrupt_leaves_nothing_behind(repo_file, tmp_path):
    scratch, pid_file = tmp_path / "scratch", tmp_path / "pid"
    scratch.mkdir()
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch), "PID_FILE": str(pid_file)}
    command = [sys.executable, "-m", "pabench", "compile", "-k", repo_file("sleeps"), "--target", "sm_90", "-j", "1"]
    # a shell's background job ignores SIGINT, and children inherit that
    heed = "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", heed, *command], env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        worker = int(pid_file.read_text())
        assert list(scratch.iterdir()) != []
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert not Path(f"/proc/{worker}").exists()
    assert list(scratch.iterdir()) == []
