"""Hundreds of kernel cases take a few dozen lines, and nothing that matters is left out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pabench.report.kernel_table import honest_bound
from pabench.report.table import print_run


@pytest.fixture
def make_case(make_record):
    def make(n, block=16, length=40, **changes):
        accuracy = {"rel_l2_max": 0.1, "noise_floor": 0.001, "ratio_to_floor": 100, "max_abs": 1.0}
        defaults = {
            "check": "kernel",
            "model": None,
            "batch_spec": f"shape-{n}:q1s{length}",
            "probe": "count",
            "block_size": block,
            "logits": None,
            "tokens": None,
            "accuracy": {**accuracy, "tolerance_ratio": 0.5},
        }
        return make_record(str(n), **{**defaults, **changes})

    return make


def printed(header, records, width=100):
    out = io.StringIO()
    print_run(header, records, Console(file=out, width=width))
    return out.getvalue()


def test_passed_cases_are_one_row_a_dtype_with_the_bound(make_case, make_header):
    records = [make_case(n) for n in range(300)] + [make_case(n + 300, kv_dtype="fp8_e4m3") for n in range(300)]
    text = printed(make_header(records), records)
    assert len(text.splitlines()) < 25
    assert "bf16 / fp8_e4m3   300     0" in text
    assert "600 kernel cases judged, 0 failed: at most 0.50 % of such cases fail" in text  # 1 − 0.05^(1/600)
    assert "PASS (exit 0): 600 of 600 judged cases" in " ".join(text.split())


def test_a_failure_takes_the_bound_away(make_case):
    assert "at most" not in honest_bound([make_case(0), make_case(1, status="FAIL")])
    assert "at most" not in honest_bound([make_case(0, status="SKIPPED")])


@pytest.mark.parametrize("width", [80, 120])
def test_failures_are_a_grid_and_three_examples(make_case, make_header, width):
    bad = [make_case(n, 64, 513, status="FAIL", message=f"wrong {n}") for n in range(40)]
    records = [*(make_case(n + 100) for n in range(100)), *bad]
    text = printed(make_header(records), records, width)
    assert "   64" in text
    assert "40/40" in text
    assert text.count("FAIL  triton_decode") == 3
    assert "37 more in the record" in text
    commands = [r.repro for r in records]
    assert all(len(line) <= width or any(c in line for c in commands) for line in text.splitlines())
    assert len(text.splitlines()) < 60


def test_the_grid_marks_what_failed_passed_and_was_only_skipped(make_case, make_header):
    records = [
        make_case(0, 16, 40),
        make_case(1, 32, 40, status="FAIL", message="wrong"),
        make_case(2, 64, 70000, status="SKIPPED", message="unsupported: long"),
        make_case(3, 16, 70000),
    ]
    lines = [line.split() for line in printed(make_header(records), records).splitlines()]
    assert ["16", "·", "·"] in lines
    assert ["32", "1/1"] in lines
    assert ["64", "–"] in lines


def test_skip_reasons_are_counted_and_the_kernel_is_named(make_case, make_header):
    skipped = [make_case(n + 9, status="SKIPPED", message="unsupported: no window") for n in range(7)]
    records = [make_case(0), *skipped]
    assert "SKIPPED  triton_decode: no window (7)" in printed(make_header(records), records)


def test_a_run_with_both_checks_shows_both(make_case, make_record, make_header):
    records = [make_case(0), make_record("m", status="FAIL")]
    text = printed(make_header(records), records)
    assert text.index("kernel check") < text.index("model check")
    assert "mean KLD is 9.1 × the noise floor" in text


def test_long_names_are_broken_and_not_cut_at_80_columns(make_case, make_header):
    pair = "prefill=triton_prefill,decode=triton_decode"
    records = [make_case(0, kernel=pair, kv_dtype="fp8_e4m3"), make_case(1, kernel="kernels.py:some_long_name")]
    text = printed(make_header(records), records, 80)
    for word in ("triton_prefill", "+ triton_decode", "bf16 / fp8_e4m3", "kernels.py:"):
        assert word in text
    assert "…" not in text
