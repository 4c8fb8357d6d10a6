"""`pabench localize`, `replay` and `selftest` as people call them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

FAULTY = Path(__file__).parent.parent / "faulty" / "kernels.py"


def pabench(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_a_fault_is_localized_and_its_file_replays(tmp_path):
    kernel = f"{FAULTY}:newest_token_hidden"
    file = tmp_path / "call.safetensors"
    run = pabench("localize", "-m", "tiny-llama", "-k", kernel, "--offline", "--repro", file, "--json", "-q")
    found = json.loads(run.stdout)
    assert run.exit_code == 1
    assert found["verdict"] == "kernel"
    assert found["causes"][0]["fault"] == "missing_tokens"
    assert found["place"]["phase"] == "decode"
    assert found["repro"]["bytes"] == file.stat().st_size < 16_000
    again = pabench("replay", file, "-k", kernel, "--json", "-q")
    assert (again.exit_code, json.loads(again.stdout)["fault"]) == (1, "missing_tokens")
    other = pabench("replay", file, "-k", "torch_paged", "-q")
    assert other.exit_code == 0
    assert "PASS (exit 0)" in other.stdout


def test_the_page_names_place_cause_and_command(tmp_path):
    run = pabench(
        *("localize", "-m", "tiny-llama", "-k", f"{FAULTY}:wrong_kv_head", "--offline", "-q"),
        *("--repro", tmp_path / "r.safetensors"),
    )
    assert run.exit_code == 1
    text = " ".join(run.stdout.split())
    for words in ("first wrong", "layer 0", "head_map", "pabench replay", "FAULT (exit 1)"):
        assert words in text


def test_state_left_over_is_said_and_leaves_no_file(tmp_path):
    file = tmp_path / "r.safetensors"
    kernel = f"{FAULTY}:keeps_its_first_plan"
    run = pabench("localize", "-m", "tiny-llama", "-k", kernel, "--offline", "-q", "--json", "--repro", file)
    found = json.loads(run.stdout)
    assert run.exit_code == 1
    assert found["causes"][0]["fault"] == "plan_reuse"
    assert found["repro"] is None
    assert not file.exists()


def test_an_honest_kernel_is_clean(tmp_path):
    run = pabench("localize", "-m", "tiny-llama", "-k", "torch_paged", "--offline", "-q", "-o", tmp_path)
    assert run.exit_code == 0
    assert "CLEAN (exit 0)" in run.stdout
    assert not (tmp_path / "repros").exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("localize", "-m", "tiny-llama"), 2, "no kernel was given"),
        (("localize", "-m", "tiny-llama", "-k", "torch_pagedd"), 2, "did you mean"),
        (("localize", "-m", "tiny-llama", "-k", "torch_paged", "--dtype", "fp32,bf16"), 2, "--dtype must name one"),
        (("localize", "-m", "tiny-lama", "-k", "torch_paged", "--offline"), 2, "tiny-lama"),
        (("localize", "-m", "tiny-llama", "-k", f"{FAULTY}:declares_head_dim_128", "--offline"), 3, "head_dim 32"),
        (("localize", "-m", "tiny-llama", "-m", "tiny-mqa", "-k", "torch_paged"), 2, "-m must name one"),
        (("localize", "-m", "tiny-llama", "-k", "torch_paged", "--repro", "."), 2, "is a folder"),
        (("localize", "-m", "tiny-llama", "-k", "torch_paged", "-o", str(FAULTY)), 2, "is no folder"),
        (("replay", "nowhere.safetensors"), 2, "cannot be read"),
        (("replay", str(FAULTY)), 2, "no safetensors file"),
    ],
)
def test_misuse_gets_a_sentence(args, code, words):
    run = pabench(*args, "-q")
    assert run.exit_code == code
    assert words in " ".join((run.stdout + run.stderr).split())


@pytest.mark.parametrize(
    ("function", "code", "status", "words"),
    [
        ("raises", 4, "ERROR", "the kernel raised ZeroDivisionError: planted in layer 0"),
        ("refuses_late", 3, "INCONCLUSIVE", "only head_dim 7"),
    ],
)
def test_a_crash_or_a_refusal_is_json_too(tmp_path, function, code, status, words):
    kernel = f"{FAULTY}:{function}"
    run = pabench("localize", "-m", "tiny-llama", "-k", kernel, "--offline", "--json", "-q", "-o", tmp_path)
    found = json.loads(run.stdout)
    assert (run.exit_code, found["status"]) == (code, status)
    assert words in found["message"]


def test_a_broken_contract_is_said_as_such(tmp_path):
    kernel = f"{FAULTY}:wrong_shape"
    run = pabench("localize", "-m", "tiny-llama", "-k", kernel, "--offline", "-q", "-o", tmp_path)
    assert run.exit_code == 1
    assert "breaks the contract" in run.stdout


@pytest.mark.slow
def test_the_selftest_gates():
    run = pabench("selftest", "--json", "-q")
    found = json.loads(run.stdout)
    assert run.exit_code == 0, found["selftest"]["shortcomings"]
    assert found["selftest"]["mutants"] >= 50
    assert found["selftest"]["clean"] >= 500
    assert found["selftest"]["false_alarms"]["count"] == 0
    assert len(found["cases"]) > 1000
