"""`--checks kernel`: every planted fault turns it red, no honest kernel does, and a case can be run again alone."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pabench.cases import Precision
from pabench.checks.kernel import case
from pabench.checks.kernel.diagnosis import Named
from pabench.checks.kernel.shapes import Shape
from pabench.cli.app import app
from pabench_kernels.request import parse_request

FAULTY = Path(__file__).parent.parent / "faulty" / "kernels.py"
PLAIN = "plain-decode,plain-prefill,plain-mixed"
MIXED, DECODE = "plain-mixed", "plain-decode"
# function → (shapes that show it, the names that are right for it)
BROKEN = {
    "zeros": (MIXED, {"degenerate_output"}),
    "nan_in_one_head": (MIXED, {"nonfinite"}),
    "newest_token_hidden": (DECODE, {"missing_tokens"}),
    "heads_modulo": (MIXED, {"head_map"}),
    "wrong_kv_head": (MIXED, {"head_map"}),
    "window_one_too_long": ("window-1,window-edges,window-freed-blocks", {"sliding_window"}),
    "window_one_too_short": ("window-edges,window-freed-blocks", {"sliding_window"}),
    "window_ignored": ("window-edges", {"sliding_window"}),
    "alibi_ignored": ("alibi", {"alibi"}),
    "alibi_inside_the_block": ("alibi", {"alibi"}),
    "cap_ignored": ("soft-cap", {"soft_cap"}),
    "cap_twice": ("soft-cap", {"soft_cap"}),
    "sinks_ignored": ("sinks", {"sink"}),
    "causal_ignored": (MIXED, {"extra_tokens"}),
    "scale_one_percent_off": (DECODE, set()),
    "scale_always_from_head_dim": ("plain-decode,scale-0.3", {"softmax_scale"}),
    "scales_shared_by_all_heads": ("per-head-scales", {"kv_scale"}),
    "scales_of_the_next_head": ("per-head-scales", {"kv_scale"}),
    "v_scale_ignored": (MIXED, {"kv_scale"}),
    "past_512_one_token_lost": ("partition-edges,past-4k", {"missing_tokens"}),
    "parts_averaged": ("partition-edges,tile-edges", {"split_merge"}),
    "last_block_twice_in_front": (MIXED, {"wrong_block"}),
    "offset_zero_only": (MIXED, {"wrong_block"}),
    "ids_wrap_at_65536": ("ids-past-65536,plain-decode", {"block_alias"}),
    "offsets_wrap_at_two_gib": ("offsets-past-2-gib,plain-decode", {"block_alias"}),
    "layout_from_shape": ("padded-cache,interleaved-cache", {"layout_stride"}),
    "reads_past_the_end": (MIXED, {"stale_read"}),
    "reads_a_slot_behind_the_end": (DECODE, {"stale_read"}),
    "leaves_last_dims_unwritten": ("mha5-d40", {"head_dim_tail", "unwritten_output"}),
    "tail_channels_left_out_of_scores": ("mha5-d40", {"head_dim_tail"}),
    "leaves_padding_rows_unwritten": (MIXED, {"unwritten_output"}),
    "writes_its_query": (MIXED, set()),
    "ignores_the_past": ("chunk-33-of-80,past-4k-chunk", {"chunk_dependence"}),
    "chunk_takes_itself_for_the_beginning": ("chunk-33-of-80", {"chunk_dependence"}),
    "newest_hidden_between_33_and_256": ("plain-decode,tile-edges,partition-edges", {"missing_tokens"}),
    "newest_hidden_one_behind_a_block": ("plain-decode,tile-edges,partition-edges", {"missing_tokens"}),
    "two_sequences_swapped": ("plain-decode", {"batch_dependence", "wrong_block"}),
    "keeps_its_first_plan": ("plain-decode,tile-edges", {"plan_reuse", "stale_metadata"}),
    "splits_change_the_answer": (DECODE, {"split_merge"}),
    "lse_always_zero": (MIXED, {"lse"}),
    "wrong_dtype": (MIXED, set()),
    "no_mixed_batches": ("plain-mixed", set()),
}
UNNAMED = {f for f, (_, names) in BROKEN.items() if not names} | {"zeros"}  # nothing that is given explains these
OPEN = {"unknown", "nonfinite"}  # say that something is wrong, not what


def run(tmp_path, *arguments):
    result = CliRunner().invoke(app, ["run", "kernels", *arguments, "-o", str(tmp_path), "--json", "-q"])
    assert result.stdout, result.stderr
    return result.exit_code, json.loads(result.stdout)


def statuses(run_json):
    """Those of what the kernel has: no kernel here offers a number of splits, and few take scales per token."""
    return {c["status"] for c in run_json["cases"] if not not_offered(c)}


def not_offered(case):
    return case["status"] == "SKIPPED" and any(w in case["message"] for w in ("number of splits", "per_token_scales"))


def troubles(run_json):
    return [c["message"] or c["case_id"] for c in run_json["cases"] if c["status"] != "PASS" and not not_offered(c)]


@pytest.mark.parametrize("dtype", ["bf16"])  # all four: see the slow tests
def test_torch_paged_passes_every_shape(tmp_path, dtype):
    code, run_json = run(tmp_path, "-k", "torch_paged", "--dtype", dtype)
    assert troubles(run_json) == []
    assert code == 0
    assert len(run_json["cases"]) == 345
    assert {c["execution"]["proof"] for c in run_json["cases"] if c["status"] == "PASS"} == {"proved"}
    assert {c["check"] for c in run_json["cases"]} == {"kernel"}


def test_the_triton_kernels_pass_hand_picked_shapes(tmp_path):
    """A third of the hand-picked shapes with all probes; the whole suite is a slow test."""
    specs = "plain-mixed,gqa71-decode,block-1,block-size-is-kv-heads,window-freed-blocks,everything,per-head-scales"
    pair = "prefill=triton_prefill,decode=triton_decode"
    code, run_json = run(tmp_path, "-k", pair, "--dtype", "fp32,fp8", "--batch-spec", specs)
    assert troubles(run_json) == []
    assert code == 0
    assert {c["execution"]["proof"] for c in run_json["cases"] if c["status"] == "PASS"} == {"proved"}


@pytest.mark.parametrize("function", BROKEN)
def test_a_planted_fault_fails_and_is_never_given_another_name(tmp_path, function, record_property):
    shapes, names = BROKEN[function]
    dtype = "fp8" if function == "v_scale_ignored" else "bf16"
    code, run_json = run(tmp_path, "-k", f"{FAULTY}:{function}", "--dtype", dtype, "--batch-spec", shapes)
    failed = [c for c in run_json["cases"] if c["status"] == "FAIL"]
    assert code == 1
    assert failed
    assert "ERROR" not in statuses(run_json)
    assert all(c["diagnosis"] is not None and c["timing"] is None for c in failed)
    assert {d["fault"] for d in run_json["diagnoses"]} <= names | OPEN
    first = run_json["diagnoses"][0]["fault"]
    record_property("named_right", first in names)
    assert (first in names) == (function not in UNNAMED)


def test_most_planted_faults_are_named():
    nameable = {f for f, (_, names) in BROKEN.items() if names}
    share = 1 - len(UNNAMED & nameable) / len(nameable)
    print(f"{len(BROKEN)} broken kernels; {share:.0%} of the {len(nameable)} that have a fault's name are named")
    assert len(BROKEN) >= 40
    assert share >= 0.9


@pytest.mark.parametrize("function", ["honest_whole", pytest.param("honest_limited", marks=pytest.mark.slow)])
def test_an_honest_stranger_is_never_blamed(tmp_path, function):
    code, run_json = run(tmp_path, "-k", f"{FAULTY}:{function}", "--dtype", "bf16")
    assert [c["message"] for c in run_json["cases"] if c["status"] not in ("PASS", "SKIPPED")] == []
    assert statuses(run_json) == ({"PASS"} if function == "honest_whole" else {"PASS", "SKIPPED"})
    assert code == 0
    assert run_json["diagnoses"] == []
    assert {c["execution"]["proof"] for c in run_json["cases"] if c["status"] == "PASS"} == {"claimed"}


def test_a_failing_case_says_where_and_comes_back_from_its_command(tmp_path):
    _, run_json = run(tmp_path / "a", "-k", f"{FAULTY}:heads_modulo", "--dtype", "fp8", "--batch-spec", "plain-mixed")
    first = next(c for c in run_json["cases"] if c["status"] == "FAIL" and c["probe"] == "iid")
    assert "minimum required tolerance" in first["message"]
    worst = first["accuracy"]["worst"]
    assert worst["slot"] == worst["physical_block"] * 16 + worst["token"] % 16
    assert worst["kv_head"] == worst["q_head"] // 3
    words = shlex.split(first["repro"])
    result = CliRunner().invoke(app, [*words[1:], "-o", str(tmp_path / "b"), "--json", "-q"])
    (again,) = json.loads(result.stdout)["cases"]
    assert {k: v for k, v in again.items() if k != "duration_s"} == {
        k: v for k, v in first.items() if k != "duration_s"
    }


def test_a_fingerprint_names_what_was_read(tmp_path):
    options = ["--dtype", "fp32", "--batch-spec", "plain-decode", "--probe", "fingerprint"]
    _, run_json = run(tmp_path, "-k", f"{FAULTY}:wrong_kv_head", *options)
    (case,) = run_json["cases"]
    assert "; read head 1 for 0" in case["message"] or "; read head 0 for 1" in case["message"]


@pytest.mark.parametrize(
    ("function", "fault"),
    [("nan_in_one_head", "nonfinite"), ("reads_past_the_end", "stale_read"), ("lse_always_zero", "lse")],
)
def test_a_known_fault_is_named_once_for_the_run(tmp_path, function, fault):
    _, run_json = run(tmp_path, "-k", f"{FAULTY}:{function}", "--dtype", "bf16", "--batch-spec", PLAIN)
    assert [d["fault"] for d in run_json["diagnoses"]] == [fault]
    assert run_json["diagnoses"][0]["n_cases"] == run_json["summary"]["failed"]


def test_a_kernel_that_enters_another_fell_back(tmp_path):
    code, run_json = run(tmp_path, "-k", f"{FAULTY}:enters_another", "--dtype", "fp32", "--batch-spec", "plain-decode")
    assert (code, statuses(run_json)) == (1, {"FAIL"})
    assert {d["fault"] for d in run_json["diagnoses"]} == {"fallback"}


def test_a_kernel_that_raises_costs_its_cases_only(tmp_path):
    kernels = f"{FAULTY}:raises,torch_paged"
    code, run_json = run(tmp_path, "-k", kernels, "--dtype", "fp32", "--batch-spec", "plain-decode")
    assert code == 4
    assert statuses(run_json) == {"ERROR", "PASS"}
    assert (run_json["summary"]["passed"], run_json["summary"]["errors"]) == (10, 11)  # no splits to judge


def test_nothing_supported_cannot_be_judged(tmp_path):
    options = ["--dtype", "fp32", "--batch-spec", "window-edges"]
    code, run_json = run(tmp_path, "-k", f"{FAULTY}:honest_limited", *options)
    assert (code, statuses(run_json)) == (3, {"SKIPPED"})
    assert "a sliding window is not supported" in run_json["cases"][0]["message"]


def test_a_decode_kernel_is_skipped_where_there_is_nothing_to_decode(tmp_path):
    options = ["--dtype", "fp32", "--batch-spec", "plain-decode,chunk-33-of-80"]
    code, run_json = run(tmp_path, "-k", "triton_decode", *options)
    by_shape = {c["batch_spec"].partition(":")[0]: c["status"] for c in run_json["cases"]}
    assert (code, by_shape) == (0, {"plain-decode": "PASS", "chunk-33-of-80": "SKIPPED"})


def test_both_checks_run_one_after_the_other(tmp_path):
    arguments = ["run", "smoke", "-m", "tiny-llama", "-k", "torch_paged", "--dtype", "fp32"]
    arguments += ["--checks", "kernel,model", "--batch-spec", "q1s40_2q17", "-o", str(tmp_path), "--json", "-q"]
    result = CliRunner().invoke(app, arguments)
    run_json = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [c["check"] for c in run_json["cases"]] == ["kernel"] * 11 + ["model"]


def test_another_seed_is_another_test(tmp_path):
    options = ["-k", "torch_paged", "--dtype", "bf16", "--batch-spec", "plain-decode", "--probe", "iid", "--seed"]
    errors = {run(tmp_path / seed, *options, seed)[1]["cases"][0]["accuracy"]["rel_l2_max"] for seed in ("0", "1", "1")}
    assert len(errors) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_whole_suite_gives_no_false_alarm(tmp_path, seed):
    code, run_json = run(tmp_path, "--seed", seed)
    assert troubles(run_json) == []
    assert code == 0
    assert len(run_json["cases"]) >= 2000


LONG = Shape("long", ((1, 65535), (1, 40)), group=2, kv_heads=2, head_dim=32, block_size=64, odd_scale=True)
FEATURES = {  # what a fault needs in order to show at this length
    "window": {"window": 60001},
    "alibi": {"alibi": True},
    "cap": {"cap": 2.5},
    "sinks": {"sinks": True},
    "scales": {"scales": "head"},
    "layout": {"layout": "padded"},
    "v_scale": {"scales": "tensor"},
    "ids_wrap": {"border": "2^16 ids", "block_size": 16},
    "offsets_wrap": {"border": "2^31 bytes"},
    "last_dims": {"head_dim": 40},
    "tail_channels": {"head_dim": 40},
    "padding_rows": {"seqs": ((1, 65535), (1, 0))},
    "causal": {"seqs": ((3, 65535),)},
    "past": {"seqs": ((3, 65535),)},
    "chunk": {"seqs": ((3, 65535),)},
    "mixed": {"seqs": ((3, 65535), (1, 40))},
    "behind_a_block": {"seqs": ((1, 65537),)},
    "between_33": {"seqs": ((1, 65535), (1, 200))},
}


@pytest.mark.slow
@pytest.mark.parametrize("function", BROKEN)
def test_a_planted_fault_fails_beside_65535_tokens_of_context_too(function, monkeypatch):
    """The search for its name is another matter, and takes longer."""
    monkeypatch.setattr(case, "diagnose", lambda *_: Named("unknown", 0.0))
    changes = {k: v for word, feature in FEATURES.items() if word in function for k, v in feature.items()}
    request = parse_request(f"{FAULTY}:{function}")
    outcomes = []
    for probe in ("count", "two_level", "iid", "poison", "reuse", "splits"):
        trial = case.Trial(replace(LONG, **changes), probe, Precision("fp32", "fp32", "fp32"), seed=0)
        outcomes.append(case.judge_kernel(trial, request).status)
        if outcomes[-1] == "FAIL":
            break
    assert outcomes[-1] == "FAIL"


@pytest.mark.slow
def test_an_honest_kernel_passes_with_65535_tokens_of_context():
    request = parse_request(f"{FAULTY}:honest_whole")
    for probe in ("count", "two_level", "needle", "reuse"):
        trial = case.Trial(LONG, probe, Precision("fp32", "fp32", "fp32"), seed=0)
        assert case.judge_kernel(trial, request).status == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("function", BROKEN)
def test_a_planted_fault_fails_among_all_shapes(tmp_path, function):
    code, run_json = run(tmp_path, "-k", f"{FAULTY}:{function}")
    assert code in (1, 4)
    assert "FAIL" in statuses(run_json)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "int8"])
def test_other_quantised_caches_give_no_false_alarm(tmp_path, kv_dtype):
    code, run_json = run(tmp_path, "--dtype", "bf16,fp16", "--kv-dtype", kv_dtype)
    assert troubles(run_json) == []
    assert code == 0
