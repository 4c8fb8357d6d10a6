"""What ``pabench compile`` prints."""

from __future__ import annotations

import io

from rich.console import Console

from pabench.compilation.cases import CompileCase
from pabench.compilation.outcome import judge
from pabench.compilation.run import CompileReport
from pabench.report.compile_table import print_compiled

CASE = CompileCase("triton_decode", "decode", "sm_90", "bf16", "fp8_e4m3", 80, "features")
RESOURCES = {"registers": 255, "spill_bytes": 1040, "shared_bytes": 49152, "scalar_registers": None}
BINARY = {"function": "decode_kernel", "num_warps": 8, "num_stages": 2, "resources": RESOURCES}
SILENT = {"declared": [], "refusal": None, "binaries": [], "failed": None, "crashed": None}


def printed(*answers):
    outcomes = tuple(judge(CASE, {**SILENT, **answer}, 1.0) for answer in answers)
    file = io.StringIO()
    report = CompileReport(outcomes, ("torch_paged",), len(outcomes) + 1).as_json()
    print_compiled(report, Console(file=file, width=80))
    return " ".join(file.getvalue().split())


def test_a_binary_is_a_line_with_what_it_costs():
    text = printed({"binaries": [BINARY]})
    assert "sm_90 bf16 / fp8_e4m3 80 all decode 8 255 1,040 48.0 ok" in text
    assert "PASS (exit 0): compiler and kernel agree in 1 of 1 specialisations; any two of their values met" in text
    assert "Not Triton, so not compiled: torch_paged." in text


def test_a_disagreement_names_both_and_the_command():
    text = printed({"refusal": "f: no such type"}, {"declared": ["x"], "refusal": "y"})
    assert "FAIL triton_decode decode on sm_90, bf16 / fp8_e4m3, head_dim 80, features" in text
    assert "unsupported() declares no limit, and the compiler refuses: f: no such type" in text
    assert "pabench compile -k triton_decode --target sm_90 --dtype fp8_e4m3 --head-dim 80 --full" in text
    assert "decode — — — — ok" in text
    assert "FAIL (exit 1): compiler and kernel disagree in 1 of 2 specialisations" in text
