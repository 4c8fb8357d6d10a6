"""A record cannot say what no honest run can produce, and survives JSON unchanged."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest
from pydantic import ValidationError

from pabench.records import Diagnosis, Fallback, Record, RunHeader, dumps, jsonable, summarize


def test_an_honest_record_survives_json_unchanged(make_record):
    record = make_record()
    assert Record.model_validate_json(dumps(record)) == record


def test_groups_that_do_not_apply_are_written_as_null(make_record):
    data = jsonable(make_record())
    assert {k for k, v in data.items() if v is None} >= {"tasks", "timing", "bandwidth", "diagnosis"}


def test_a_fallback_is_written_with_the_contracts_field_names():
    fallback = Fallback(from_="a", to="b", reasons=["no"], phase="decode", layer=0, calls=3)
    assert set(jsonable(fallback)) == {"from", "to", "reasons", "phase", "layer", "calls"}
    assert Fallback.model_validate(jsonable(fallback)) == fallback


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")], ids=str
)
def test_nonfinite_numbers_are_strings_in_json_and_floats_in_memory(make_record, groups, value, text):
    logits = {**groups["logits"], "max_abs": value}
    record = make_record(status="FAIL", logits=logits)
    assert json.loads(dumps(record))["logits"]["max_abs"] == text
    back = Record.model_validate_json(dumps(record)).logits.max_abs
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_nonfinite_numbers_in_free_form_evidence_survive_too(make_record):
    diagnosis = {"fault": "nonfinite", "confidence": 1.0, "evidence": {"rows": [math.inf, 1.0]}}
    record = make_record(status="FAIL", diagnosis=diagnosis)
    assert json.loads(dumps(record))["diagnosis"]["evidence"]["rows"][0] == "Infinity"
    assert Record.model_validate_json(dumps(record)).diagnosis.evidence["rows"] == [math.inf, 1.0]


@pytest.mark.parametrize("status", ["FAIL", "DEGENERATE", "INCONCLUSIVE", "SKIPPED", "ERROR"])
def test_a_record_that_did_not_pass_carries_no_speed(make_record, status):
    timing = {"n": 10, "median": 1.0, "p05": 0.9, "p95": 1.1}
    with pytest.raises(ValidationError, match="no timing"):
        make_record(status=status, timing=timing)
    with pytest.raises(ValidationError, match="no timing and no bandwidth"):
        make_record(status=status, bandwidth={"bytes": 1, "gb_per_s": 1.0})
    assert make_record(timing=timing).timing.unit == "us"


@pytest.mark.parametrize("status", ["FAIL", "DEGENERATE", "INCONCLUSIVE", "SKIPPED", "ERROR"])
def test_a_record_that_did_not_pass_says_why(make_record, status):
    with pytest.raises(ValidationError, match="must come with a message"):
        make_record(status=status, message="  ")


@pytest.mark.parametrize("missing", ["execution", "logits"])
def test_a_model_pass_needs_proof_and_logits(make_record, missing):
    with pytest.raises(ValidationError, match="must carry execution and logits"):
        make_record(**{missing: None})


def test_a_pass_with_unknown_proof_is_refused(make_record, groups):
    with pytest.raises(ValidationError, match="proof 'unknown'"):
        make_record(execution={**groups["execution"], "proof": "unknown"})


def test_a_pass_after_a_fallback_needs_the_users_leave(make_record, groups):
    execution = {**groups["execution"], "proof": "fell_back"}
    with pytest.raises(ValidationError, match="fallback_allowed"):
        make_record(execution=execution)
    assert make_record(execution=execution, reason="fallback_allowed").passed


def test_a_pass_without_a_kernel_call_is_refused(make_record, groups):
    with pytest.raises(ValidationError, match="judged nothing"):
        make_record(execution={**groups["execution"], "executed": {"triton_decode": 0}})


@pytest.mark.parametrize(("n", "ok"), [(99, False), (100, True)])
def test_a_model_pass_judges_at_least_100_positions(make_record, groups, n, ok):
    logits = {**groups["logits"], "n_tokens": n}
    if ok:
        assert make_record(logits=logits).passed
    else:
        with pytest.raises(ValidationError, match="100 positions"):
            make_record(logits=logits)


def test_nan_never_passes_as_an_error_of_zero(make_record, groups):
    kld = {**groups["logits"]["kld"], "mean": math.nan}
    with pytest.raises(ValidationError, match="mean KLD of nan"):
        make_record(logits={**groups["logits"], "kld": kld})
    with pytest.raises(ValidationError, match="non-finite attention"):
        make_record(accuracy={**groups["accuracy"], "nonfinite": 1})


@pytest.mark.parametrize("field", ["case_id", "pair_key"])
@pytest.mark.parametrize("path", ["/home/x/k.py:f", "model kernel=/tmp/k.py", "k=~/k.py", "C:\\k.py", "file:///k"])
def test_case_names_hold_no_absolute_path(make_record, field, path):
    with pytest.raises(ValidationError, match="no absolute path"):
        make_record(**{field: path})


@pytest.mark.parametrize("name", ["org/model/bf16", "prefill=a,decode=./k.py:f", "kernel=../x/k.py:f b=16"])
def test_relative_names_are_fine(make_record, name):
    assert make_record(case_id=name).case_id == name


@pytest.mark.parametrize("changes", [{"colour": 1}, {"status": "OK"}, {"dtype": "fp8"}, {"kv_dtype": "auto"}], ids=str)
def test_unknown_fields_and_unresolved_names_are_refused(make_record, changes):
    with pytest.raises(ValidationError):
        make_record(**{"message": "x", **changes})


def test_an_unknown_fault_name_is_refused_with_a_hint():
    with pytest.raises(ValidationError, match="did you mean 'head_map'"):
        Diagnosis(fault="head_mapp", confidence=1.0)


def test_the_ratio_to_a_floor_of_zero_is_infinite_for_any_difference(make_record, groups):
    def ratio(mean: float, floor: float) -> float:
        logits = {**groups["logits"], "kld": {**groups["logits"]["kld"], "mean": mean}}
        return make_record(logits={**logits, "noise_floor": {"kld_mean": floor}}).logits.ratio_to_floor

    assert (ratio(0.0, 0.0), ratio(1e-9, 0.0), ratio(6.0, 2.0)) == (0.0, math.inf, 3.0)


@pytest.mark.parametrize(
    ("statuses", "verdict", "code"),
    [
        ([], "nothing_ran", 5),
        (["PASS"], "passed", 0),
        (["NEAR_TIE"], "passed", 0),
        (["PASS", "SKIPPED"], "passed", 0),
        (["SKIPPED"], "could_not_judge", 3),
        (["PASS", "INCONCLUSIVE"], "could_not_judge", 3),
        (["PASS", "INCONCLUSIVE", "FAIL"], "failed", 1),
        (["PASS", "DEGENERATE"], "failed", 1),
        (["FAIL", "ERROR", "INCONCLUSIVE"], "error", 4),
    ],
    ids=str,
)
def test_the_verdict_follows_the_precedence_4_1_3_5_0(make_record, statuses, verdict, code):
    summary = summarize([make_record(str(i), status=s) for i, s in enumerate(statuses)])
    assert (summary.verdict, summary.exit_code) == (verdict, code)
    assert summary.total == len(statuses)


def test_every_kernel_needs_a_judged_case_of_its_own(make_record):
    records = [make_record("a", kernel="x"), make_record("a", kernel="y", status="SKIPPED")]
    assert summarize(records).exit_code == 3
    assert summarize([*records, make_record("b", kernel="y")]).exit_code == 0


def test_a_requested_pair_without_any_record_cannot_be_judged(make_record):
    assert summarize([make_record(kernel="x")], requested=[("y", "model")]).exit_code == 3


def test_an_interrupted_run_exits_130(make_record):
    assert summarize([make_record()], interrupted=True).exit_code == 130


def test_the_json_schemas_accept_what_is_written_and_refuse_what_is_not(make_record, make_header, groups):
    schema = Record.model_json_schema(mode="serialization")
    record = jsonable(make_record(status="FAIL", logits={**groups["logits"], "max_abs": math.nan}))
    jsonschema.validate(record, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**record, "status": "OK"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({k: v for k, v in record.items() if k != "timing"}, schema)
    header = jsonable(make_header([make_record()]))
    jsonschema.validate(header, RunHeader.model_json_schema(mode="serialization"))
    assert list(header) == ["schema_version", "run", "environment", "summary", "diagnoses", "gate"]
