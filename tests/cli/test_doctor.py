"""`pabench doctor`: what can be judged here, what is missing, in words and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pabench.cli.app import app
from pabench.doctor import Examination, Finding, KernelFinding
from pabench.report.doctor import print_examination


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture(scope="module")
def here():
    result = doctor("--device", "cpu", "--json")
    return result.exit_code, json.loads(result.stdout)


def finding(found, name):
    return next(f for f in found["findings"] if f["name"] == name)


def test_this_machine_can_judge_something(here):
    code, found = here
    assert (code, found["exit_code"], found["can_judge"]) == (0, 0, True)
    torch_paged = next(k for k in found["kernels"] if k["name"] == "torch_paged")
    assert torch_paged == {
        "name": "torch_paged",
        "available": True,
        "results": {"fp32": "PASS", "bf16": "PASS"},
        "reason": None,
    }


def test_it_names_versions_memory_folders_models_and_the_mode(here):
    import torch

    _, found = here
    assert finding(found, "torch")["text"] == torch.__version__
    assert "GiB available of" in finding(found, "memory")["text"]
    assert finding(found, "results")["state"] == "ok"
    assert "no network needed" in finding(found, "random")["text"]
    assert {f["name"] for f in found["findings"]} >= {"smollm2-135m", "C++ compiler", "cores", "triton"}
    assert found["mode"] in ("interpreter", "none")
    assert found["cannot_show"]


def test_a_missing_compiler_and_an_unwritable_cache_are_said(monkeypatch, tmp_path):
    from pabench.doctor import _caches, _compiler

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PABENCH_CACHE", "/proc/nowhere")
    (compiler,) = _compiler()
    assert (compiler.state, "no-such-compiler" in compiler.text) == ("note", True)
    models = next(f for f in _caches() if f.name == "models")
    assert models.state == "bad"
    assert "set PABENCH_CACHE" in models.text


def test_a_device_that_is_not_here_is_one_sentence():
    result = doctor("--device", "gpu")
    assert (result.exit_code, "Traceback" in result.stderr) == (2, False)
    assert "unknown device 'gpu'" in result.stderr


def shown(kernels, width=80):
    findings = (
        Finding("machine", "memory", "note", "1.0 GiB available of 2.0 GiB (limit of the container): " + "x " * 40),
    )
    found = Examination("cpu", "interpreter", findings, kernels, ("races between programs " * 6,))
    console = Console(file=io.StringIO(), width=width)
    print_examination(found, console)
    return found, console.file.getvalue()


def test_nothing_to_judge_with_exits_3():
    found, text = shown((KernelFinding("triton_decode", False, {"fp32": "needs a GPU"}, "needs a GPU"),))
    assert found.exit_code == 3
    assert "No kernel can be judged here (exit 3)" in text


def test_it_fits_80_columns():
    kernels = (
        KernelFinding("torch_paged", True, {"fp32": "PASS", "bf16": "PASS"}, None),
        KernelFinding(
            "somebodys_kernel", False, {}, "kernel 'somebodys_kernel' cannot be imported: " + "no module " * 9
        ),
    )
    _, text = shown(kernels)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "somebodys_kernel" in text
    assert "pabench can judge torch_paged on the CPU, Triton interpreted (exit 0)" in " ".join(text.split())
