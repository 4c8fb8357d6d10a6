"""The terminal report fits its width, breaks no word and hides nothing."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from pabench.report.table import print_run
from pabench.report.words import breakable

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


@pytest.fixture
def records(make_record, groups):
    fallback = {"from": "triton_decode", "to": "torch_paged", "reasons": ["head_dim 72"], "phase": "decode"}
    fell_back = {**groups["execution"], "proof": "fell_back", "fallbacks": [{**fallback, "layer": 0, "calls": 720}]}
    return [
        make_record("a"),
        make_record("b", kv_dtype="fp8_e4m3", status="NEAR_TIE"),
        make_record("c", dtype="fp16", kv_dtype="fp16", status="FAIL"),
        make_record("d", kernel="prefill=triton_prefill,decode=triton_decode", status="INCONCLUSIVE", tokens=None),
        make_record("e", reason="fallback_allowed", execution=fell_back),
        make_record("f", model="gemma3-270m", status="SKIPPED", execution=None, logits=None, accuracy=None),
    ]


def printed(header, records, width=100, **console):
    out = io.StringIO()
    print_run(header, records, Console(file=out, width=width, **console))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_it_fits_the_width_and_breaks_no_word(records, make_header, width):
    text = printed(make_header(records), records, width)
    commands = [r.repro for r in records]
    for line in text.splitlines():
        assert len(line) <= width or any(c in line for c in commands), line
    assert "…" not in text.split("KLD × floor:")[0]
    for word in (
        "INCONCLUSIVE",
        "smollm2-135m",
        "gemma3-270m",
        "triton_decode",
        "+ torch_paged",
        "→ torch_paged",
        "fp8_e4m3",
    ):
        assert word in text


def test_it_shows_verdict_proof_ratios_and_tokens_in_one_row(records, make_header):
    row = next(line for line in printed(make_header(records), records, 140).splitlines() if "fell back" in line)
    assert re.search(r"PASS +fell back +0\.80× +0\.41 +4/5 same, parts at 14: near tie", row)


def test_every_failure_comes_with_its_message_and_its_command(records, make_header):
    text = printed(make_header(records), records)
    for r in records:
        assert r.message in text
        if r.status in ("FAIL", "INCONCLUSIVE"):
            assert f"\n  {r.repro}\n" in text


def test_a_failures_divergence_is_shown_before_a_near_tie(make_record, make_header, groups):
    first = {**groups["tokens"]["first"], "prompt": "the bad one", "margin_over_floor": 30.0}
    records = [make_record("a"), make_record("b", status="FAIL", tokens={**groups["tokens"], "first": first})]
    text = printed(make_header(records), records)
    assert "the bad one" in text
    assert "prompt 'story'" not in text
    assert "1 more in the record" in text


def test_the_record_the_next_step_and_last_the_verdict(make_record, make_header):
    records = [make_record()]
    lines = printed(make_header(records), records).rstrip().splitlines()
    assert "record  results/20260101T000000Z_abc1234_cpu" in lines
    assert any(line.startswith("next ") for line in lines)
    assert " ".join(lines[lines.index("") :]).count("PASS (exit 0)") == 1
    assert lines[-2].startswith("PASS (exit 0)")


def test_markup_in_names_is_printed_as_it_is(make_record, make_header):
    records = [make_record(kernel="my[red]kernel")]
    assert "my[red]kernel" in printed(make_header(records), records)


def test_no_color_is_honoured(records, make_header, monkeypatch):
    header = make_header(records)
    assert ANSI_COLOUR.search(printed(header, records, force_terminal=True, color_system="standard"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not ANSI_COLOUR.search(printed(header, records, force_terminal=True, color_system="standard"))


def test_names_break_behind_separators_only_unless_a_word_is_too_long():
    assert breakable("triton_decode", 20) == "triton_decode"
    assert breakable("prefill=triton_prefill,decode=x", 12) == "prefill=\ntriton_\nprefill,\ndecode=x"
    assert breakable("abcdefghij", 4) == "abcd\nefgh\nij"


def test_a_wrong_model_case_leads_to_localize(make_record, make_header):
    repro = "pabench run quick -m smollm2-135m -k triton_decode --dtype bf16 --block-size 16 --seed 0"
    records = [make_record(status="FAIL", message="attention: off", repro=repro)]
    text = printed(make_header(records), records, 200)
    assert "pabench localize -m smollm2-135m -k triton_decode --dtype bf16 --block-size 16 --seed 0" in text
