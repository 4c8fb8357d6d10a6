"""``report``, ``compare``, ``list`` and ``schema`` from the command line."""

from __future__ import annotations

import json

import jsonschema
import pytest
from typer.testing import CliRunner

from pabench.cli.app import app
from pabench.faults import FAULTS

runner = CliRunner()


def test_report_prints_a_stored_run_and_exits_0_whatever_it_says(store, make_record):
    result = runner.invoke(app, ["report", str(store([make_record(status="FAIL")]))])
    assert result.exit_code == 0
    assert "FAIL (exit 1)" in result.stdout


def test_report_as_json_is_the_header_with_its_cases(store, make_record):
    path = store([make_record("a"), make_record("b")])
    data = json.loads(runner.invoke(app, ["report", str(path), "--json"]).stdout)
    assert [c["case_id"] for c in data["cases"]] == [make_record(c).case_id for c in "ab"]
    assert data["summary"]["exit_code"] == 0
    assert data["run"]["id"] == path.name


def test_the_json_of_a_report_can_be_compared_like_a_run(store, make_record, tmp_path):
    path = store([make_record()])
    saved = tmp_path / "saved.json"
    saved.write_text(runner.invoke(app, ["report", str(path), "--json"]).stdout)
    assert runner.invoke(app, ["compare", str(saved), str(path)]).exit_code == 0


@pytest.mark.parametrize("command", [["report", "nowhere"], ["compare", "nowhere", "nowhere"]], ids=str)
def test_a_missing_run_is_one_sentence_and_exit_3(command):
    result = runner.invoke(app, command)
    assert result.exit_code == 3
    assert result.stderr.startswith("error: no run folder, run.json or baseline named 'nowhere'")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("now", "code"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("ERROR", 4)])
def test_compare_exits_by_what_happened_to_a_case_that_passed(store, make_record, now, code):
    result = runner.invoke(app, ["compare", str(store([make_record()])), str(store([make_record(status=now)]))])
    assert result.exit_code == code


def test_compare_as_json_is_one_object_with_cases(store, make_record):
    args = ["compare", str(store([make_record()])), str(store([make_record(status="FAIL")])), "--json"]
    result = runner.invoke(app, args)
    data = json.loads(result.stdout)
    assert result.exit_code == data["exit_code"] == 1
    assert [(c["change"], c["regression"]) for c in data["cases"]] == [("worse", True)]


@pytest.mark.parametrize(
    ("what", "name"),
    [("kernels", "triton_decode"), ("faults", "head_map"), ("suites", "smoke"), ("models", "tiny-mqa")],
)
def test_list_names_things_in_words_and_in_json(what, name):
    assert name in runner.invoke(app, ["list", what]).stdout
    rows = json.loads(runner.invoke(app, ["list", what, "--json"]).stdout)[what]
    assert name in [row["name"] for row in rows]


def test_all_faults_of_the_contract_are_listed_once_with_a_line_each():
    contract = (
        "head_map head_dim_tail wrong_block block_alias layout_stride stale_read missing_tokens extra_tokens "
        "softmax_scale kv_scale alibi soft_cap sink sliding_window split_merge lse batch_dependence chunk_dependence "
        "plan_reuse unwritten_output nonfinite slot_write prefix_reuse stale_metadata page_leak dtype_ignored fallback "
        "kernel_limit precision near_tie input_mismatch degenerate_output task_collapse tp_shard unknown"
    )
    assert list(FAULTS) != []
    assert set(FAULTS) == set(contract.split())
    assert all(FAULTS.values())


def test_an_unknown_list_is_answered_with_what_there_is():
    result = runner.invoke(app, ["list", "kernel"])
    assert result.exit_code == 2
    assert "did you mean 'kernels'" in result.stderr


def test_schema_prints_schemas_that_hold_for_a_stored_run(store, make_record):
    schemas = json.loads(runner.invoke(app, ["schema"]).stdout)
    path = store([make_record(status="FAIL")])
    jsonschema.validate(json.loads((path / "run.json").read_text()), schemas["run"])
    for line in (path / "cases.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), schemas["case"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schemas["case"])


def test_schema_of_one_part():
    assert json.loads(runner.invoke(app, ["schema", "case"]).stdout)["title"] == "Record"
    assert runner.invoke(app, ["schema", "cases"]).exit_code == 2
