"""Every planted fault must turn `pabench run` red, with the check named that saw it; honest kernels must not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cli.app import app

FAULTY = Path(__file__).parent.parent / "faulty" / "kernels.py"


def run(tmp_path, kernel, *options, dtype="fp32", model="tiny-llama"):
    arguments = ["run", "smoke", "-m", model, "-k", kernel, "--dtype", dtype, "-o", str(tmp_path), "--json", "-q"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.stdout, result.stderr
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("function", "dtype", "check"),
    [
        ("zeros", "bf16", "attention"),
        ("zeros", "fp32", "attention"),
        ("nan_in_one_head", "bf16", "attention: NaN or Inf"),
        ("newest_token_hidden", "bf16", "attention"),
        ("keys_of_one_block_swapped", "bf16", "attention"),
        ("wrong_kv_head", "bf16", "attention"),
        ("scale_ten_percent_off", "fp32", "logits"),
        ("scale_ten_percent_off", "bf16", "attention"),
        ("scale_ten_percent_off", "fp8", "attention"),
        ("k_scale_ignored", "fp8", "attention"),
        ("stale_block_table", "bf16", "attention"),
    ],
)
def test_a_planted_fault_fails_and_names_the_check(tmp_path, function, dtype, check):
    code, run_json = run(tmp_path, f"{FAULTY}:{function}", dtype=dtype)
    (case,) = run_json["cases"]
    assert code == 1
    assert case["status"] in ("FAIL", "DEGENERATE")
    assert check in case["message"]
    assert case["timing"] is None


def test_wrong_kv_head_is_seen_with_one_kv_head_too(tmp_path):
    """With one KV head the mapping cannot be wrong, so the same kernel is right there."""
    code, run_json = run(tmp_path, f"{FAULTY}:wrong_kv_head", model="tiny-mqa")
    assert (code, run_json["cases"][0]["status"]) == (0, "PASS")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8"])
def test_an_honest_stranger_passes_and_is_claimed(tmp_path, dtype):
    code, run_json = run(tmp_path, f"{FAULTY}:honest", dtype=dtype)
    (case,) = run_json["cases"]
    assert code == 0, case["message"]
    assert case["status"] in ("PASS", "NEAR_TIE")
    assert case["execution"]["proof"] == "claimed"
    assert case["logits"]["n_tokens"] >= 100


def test_a_kernel_that_enters_another_fell_back(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:enters_another")
    (case,) = run_json["cases"]
    assert code == 1
    assert case["message"].startswith("dispatch: fell_back to torch_paged")
    assert case["diagnosis"]["fault"] == "fallback"


def test_a_first_bad_layer_is_named(tmp_path):
    _, run_json = run(tmp_path, f"{FAULTY}:zeros")
    assert run_json["cases"][0]["diagnosis"]["first_layer"] == 0


def test_nan_is_diagnosed_as_nonfinite(tmp_path):
    _, run_json = run(tmp_path, f"{FAULTY}:nan_in_one_head")
    assert run_json["cases"][0]["diagnosis"]["fault"] == "nonfinite"


def test_declared_limits_that_rule_everything_out_cannot_be_judged(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:declares_head_dim_128")
    (case,) = run_json["cases"]
    assert (code, case["status"]) == (3, "SKIPPED")
    assert "head_dim 32 (only 128)" in case["message"]


def test_a_late_refusal_counts_as_unsupported(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:refuses_late")
    assert (code, run_json["cases"][0]["status"]) == (3, "SKIPPED")
    assert "only head_dim 7" in run_json["cases"][0]["message"]


def test_a_limit_hit_halfway_is_a_fallback_and_fails(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:declares_short_only")
    (case,) = run_json["cases"]
    assert code == 1
    assert "fell_back to torch_paged" in case["message"]
    assert "above 40" in case["message"]


@pytest.mark.parametrize("policy", ["warn", "allow"])
def test_an_allowed_fallback_passes_and_says_who_computed(tmp_path, policy):
    code, run_json = run(tmp_path, f"{FAULTY}:declares_head_dim_128", "--on-fallback", policy)
    (case,) = run_json["cases"]
    assert code == 0
    assert case["reason"] == "fallback_allowed"
    assert "computed by torch_paged" in case["message"]
    assert set(case["execution"]["executed"]) == {"torch_paged"}
    assert case["execution"]["fallbacks"][0]["to"] == "torch_paged"


def test_an_allowed_fallback_names_the_kernel_in_the_last_line(tmp_path):
    kernel = f"{FAULTY}:declares_head_dim_128"
    arguments = ["run", "smoke", "-m", "tiny-llama", "-k", kernel, "--dtype", "fp32", "-o", str(tmp_path), "-q"]
    result = CliRunner().invoke(app, [*arguments, "--on-fallback", "warn"])
    last_sentence = " ".join(result.stdout.split("PASS (exit 0)")[-1].split())
    assert "torch_paged" in last_sentence


def test_a_crash_costs_its_case_only(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:raises,torch_paged")
    by_kernel = {c["kernel"]: c for c in run_json["cases"]}
    assert code == 4
    assert by_kernel["kernels.py:raises"]["status"] == "ERROR"
    assert "ZeroDivisionError: planted" in by_kernel["kernels.py:raises"]["message"]
    assert by_kernel["torch_paged"]["status"] == "PASS"


def test_an_output_of_the_wrong_shape_fails_with_both_shapes(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:wrong_shape")
    (case,) = run_json["cases"]
    assert code == 1
    assert "must return a tensor" in case["message"]


def test_exit_zero_reports_and_exits_0(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:zeros", "--exit-zero")
    assert (code, run_json["summary"]["exit_code"]) == (0, 1)


def test_a_kernel_that_calls_exit_has_crashed(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:exits,torch_paged")
    assert code == 4
    assert [c["status"] for c in run_json["cases"]] == ["ERROR", "PASS"]


def test_what_a_kernel_prints_does_not_reach_stdout(tmp_path):
    code, _ = run(tmp_path, f"{FAULTY}:prints")  # `run` parses all of stdout as one JSON object
    assert code == 0


@pytest.mark.parametrize(
    ("function", "name"), [("writes_into_its_query", "query"), ("writes_into_its_lengths", "seq_lens")]
)
def test_writing_into_an_input_fails_and_names_it(tmp_path, function, name):
    code, run_json = run(tmp_path, f"{FAULTY}:{function}")
    assert code == 1
    assert f"wrote into its input '{name}'" in run_json["cases"][0]["message"]


def test_a_launcher_called_behind_the_registry_is_a_fallback_too(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:calls_a_launcher_behind_the_registry")
    assert code == 1
    assert run_json["cases"][0]["execution"]["proof"] == "fell_back"
    assert "fell_back to torch_paged" in run_json["cases"][0]["message"]


def test_a_changed_default_dtype_costs_no_other_case(tmp_path):
    import torch

    _, run_json = run(tmp_path, f"{FAULTY}:changes_the_default_dtype,torch_paged")
    assert run_json["cases"][1]["status"] == "PASS"
    assert torch.get_default_dtype() == torch.float32


def test_limits_given_as_one_sentence_are_one_reason(tmp_path):
    code, run_json = run(tmp_path, f"{FAULTY}:declares_in_one_sentence")
    assert code == 3
    assert run_json["cases"][0]["execution"]["fallbacks"][0]["reasons"] == ["needs a GPU"]


def test_limits_given_as_none_are_none(tmp_path):
    assert run(tmp_path, f"{FAULTY}:declares_none")[0] == 0
