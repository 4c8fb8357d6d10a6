"""What the interpreter computes wrongly is found by trying, is never blamed on a kernel, and is never used by ours."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

triton = pytest.importorskip("triton")

from pabench.cases import Precision  # noqa: E402
from pabench.checks.kernel.inputs import build  # noqa: E402
from pabench.checks.kernel.shapes import find_shape  # noqa: E402
from pabench.cli.app import app  # noqa: E402
from pabench_kernels import get_kernel, interpreter  # noqa: E402
from pabench_kernels.dispatch import Dispatcher, InterpreterLimitError  # noqa: E402
from pabench_kernels.request import parse_request  # noqa: E402
from pabench_kernels.triton_common import interpreting  # noqa: E402

FOREIGN = Path(__file__).parents[2] / "faulty" / "triton_kernels.py"
PRECISIONS = [
    Precision("fp32", "fp32", "fp32"),
    Precision("bf16", "bf16", "bf16"),
    Precision("fp16", "fp16", "fp16"),
    Precision("fp8", "bf16", "fp8_e4m3"),
    Precision("bf16", "bf16", "fp8_e5m2"),
]
pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here, nothing is interpreted")


@pytest.fixture
def bf16_is_wrong():
    if not {"bf16 arithmetic", "bf16 dot"} <= interpreter.wrong_here():
        pytest.skip("this version's interpreter computes bf16 rightly")


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.asked}-{p.kv_dtype}")
@pytest.mark.parametrize(("name", "shape"), [("triton_decode", "plain-decode"), ("triton_prefill", "chunk-33-of-80")])
def test_our_kernels_ask_for_nothing_that_is_computed_wrongly(name, shape, precision):
    batch = build(find_shape(shape, 16), "iid", precision, 0).batch
    with interpreter.watched() as used:
        get_kernel(name)(batch)
    assert used == set()


@pytest.mark.parametrize(
    ("function", "used"),
    [("computes_in_the_query_dtype", {"bf16 arithmetic"}), ("rounds_by_storing", {"bf16 conversion"})],
)
def test_that_check_sees_bf16(function, used, bf16_is_wrong):
    batch = build(find_shape("plain-decode", 16), "iid", PRECISIONS[1], 0).batch
    with interpreter.watched() as seen:
        get_kernel(f"{FOREIGN}:{function}")(batch)
    assert seen == used


def test_watching_changes_no_result(bf16_is_wrong):
    batch = build(find_shape("plain-decode", 16), "iid", PRECISIONS[1], 0).batch
    kernel = get_kernel(f"{FOREIGN}:computes_in_the_query_dtype")
    plain = kernel(batch)
    with interpreter.watched():
        watched = kernel(batch)
    assert torch.equal(plain.view(torch.int16), watched.view(torch.int16))


def test_an_interpreter_that_is_right_refuses_nobody(monkeypatch):
    """The probes decide, not a list of versions: where they pass, nothing is wrong."""
    for attempt in ("_adds_rightly", "_multiplies_rightly"):
        monkeypatch.setattr(interpreter, attempt, lambda dtype: True)
    assert interpreter.wrong_here.__wrapped__() == frozenset()


def run(tmp_path, function, dtypes):
    options = ["--dtype", dtypes, "--batch-spec", "plain-decode", "--probe", "iid,count", "--json", "-q"]
    result = CliRunner().invoke(app, ["run", "kernels", "-k", f"{FOREIGN}:{function}", *options, "-o", str(tmp_path)])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("function", ["computes_in_the_query_dtype", "rounds_by_storing"])
def test_a_right_kernel_is_refused_in_bf16_and_judged_in_fp32(tmp_path, function, bf16_is_wrong):
    code, run_json = run(tmp_path, function, "fp32,bf16")
    assert {(c["dtype"], c["status"], c["reason"]) for c in run_json["cases"] if c["probe"] == "iid"} == {
        ("fp32", "PASS", None),
        ("bf16", "SKIPPED", "interpreter_bf16"),
    }
    assert code == 0
    refused = next(c for c in run_json["cases"] if c["dtype"] == "bf16")
    assert "Triton's interpreter computes bf16 wrongly here" in refused["message"]
    assert "judge fp32 or fp16, or run on a GPU" in refused["message"]


def test_a_kernel_that_is_only_refused_cannot_be_judged(tmp_path, bf16_is_wrong):
    assert run(tmp_path, "computes_in_the_query_dtype", "bf16")[0] == 3


def test_a_kernel_that_computes_in_fp32_is_judged_in_bf16_too(tmp_path):
    code, run_json = run(tmp_path, "computes_in_fp32", "fp32,bf16")
    assert (code, {c["status"] for c in run_json["cases"]}) == (0, {"PASS"})
    assert {c["execution"]["proof"] for c in run_json["cases"]} == {"proved"}


def test_what_a_kernel_raises_over_garbage_is_the_interpreters_fault(bf16_is_wrong, tmp_path):
    (tmp_path / "k.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('foreign', {str(FOREIGN)!r})\n"
        "foreign = importlib.util.module_from_spec(spec); spec.loader.exec_module(foreign)\n"
        "def f(batch):\n"
        "    foreign.computes_in_the_query_dtype(batch)\n"
        "    raise ValueError('not a number')\n"
    )
    dispatcher = Dispatcher(parse_request(f"{tmp_path}/k.py:f"))
    batch = build(find_shape("plain-decode", 16), "iid", PRECISIONS[1], 0).batch
    dispatcher(batch, 0)
    assert dispatcher.interpreter_limit == "interpreter_bf16"
    assert issubclass(InterpreterLimitError, NotImplementedError)
