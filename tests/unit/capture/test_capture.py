"""Captured calls are read back as written; a file that is not what it says is refused before anything is allocated."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from pabench.capture.meta import CaptureMeta, built_in_captures, read_meta
from pabench.capture.tensors import read_capture, write_capture
from pabench.cases import Precision
from pabench.checks.kernel.inputs import build
from pabench.checks.kernel.shapes import captured_shape, find_shape
from pabench.cli.app import app
from pabench.errors import UsageError


def meta(**changes):
    given = {
        "version": 1,
        "model": "tiny",
        "layer": 2,
        "phase": "decode",
        "dtype": "bf16",
        "query_tokens": 1,
        "length": 9,
        "q_heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "head_dim_v": 4,
        "scale": 0.25,
        "causal": True,
        "window": 5,
        "sinks": True,
    }
    return CaptureMeta.model_validate({**given, **changes})


def tensors():
    shapes = {"query": (1, 6, 8), "key": (9, 2, 8), "value": (9, 2, 4)}
    found = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return {**found, "sinks": torch.randn(6)}


@pytest.fixture
def stored(tmp_path):
    path, data = tmp_path / "call.json", tensors()
    write_capture(path, meta(), data)
    return path, data


def test_what_is_written_is_read_back(stored):
    path, data = stored
    found, read = read_capture(path)
    assert found == meta()
    assert set(read) == set(data)
    assert all(torch.equal(read[name], data[name]) for name in data)


def test_a_capture_of_ones_own_is_a_shape_of_the_kernel_check(stored):
    path, data = stored
    shape = find_shape(str(path), 16)
    inputs = build(shape, "captured", Precision("fp32", "fp32", "fp32"), seed=0)
    assert (inputs.batch.scale, inputs.batch.sliding_window) == (0.25, 5)
    assert torch.equal(inputs.batch.sinks, data["sinks"])
    assert torch.equal(inputs.keys[0], data["key"].float())


def test_a_run_writes_calls_of_a_model_that_the_kernel_check_replays(tmp_path):
    folder = tmp_path / "calls"
    command = ["run", "smoke", "-m", "tiny-llama", "-k", "torch_paged", "--dtype", "fp32", "-q", "--json"]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "r"), "--capture", str(folder)])
    assert done.exit_code == 0
    written = sorted(folder.glob("*.json"))
    assert {read_meta(path).phase for path in written} == {"prefill", "decode"}
    spec = ",".join(map(str, written))
    command = [
        "run",
        "kernels",
        "-k",
        "torch_paged",
        "--dtype",
        "bf16,fp8",
        "--probe",
        "captured",
        "--batch-spec",
        spec,
    ]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "r"), "--json", "-q"])
    cases = json.loads(done.stdout)["cases"]
    assert (done.exit_code, len(cases)) == (0, 2 * len(written))
    assert all(str(tmp_path) not in case["case_id"] for case in cases)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"length": 2**24}, "more than"),
        ({"length": -1}, "length"),
        ({"query_tokens": 10}, "exceed"),
        ({"q_heads": 5}, "no multiple"),
        ({"extra": 1}, "extra"),
        ({"scale": "0.25"}, "scale"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_is_refused(stored, changes, words):
    path, _ = stored
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=words):
        read_capture(path)


def test_tensors_of_another_shape_dtype_or_size_are_refused(stored):
    path, data = stored
    file = path.with_suffix(".safetensors")
    wrong = {
        "says": {**data, "key": data["key"].view(2, 9, 8)},
        "says torch.bfloat16": {**data, "key": data["key"].half()},
        "must hold": {k: v for k, v in data.items() if k != "sinks"} | {"other": data["sinks"]},
        "bytes": {**data, "more": torch.zeros(100_000)},
    }
    for words, content in wrong.items():
        save_file(content, file)
        with pytest.raises(UsageError, match=words):
            read_capture(path)
    file.write_bytes(b"xx")
    with pytest.raises(UsageError, match="has 2 bytes"):
        read_capture(path)
    path.write_text("{" + " " * 70_000)
    with pytest.raises(UsageError, match="larger than"):
        read_meta(path)


def test_both_models_come_along_in_both_phases_and_are_small():
    metas = [read_meta(path) for path in built_in_captures().values()]
    assert {(m.model, m.phase) for m in metas} == {
        (model, phase) for model in ("smollm2-135m", "gemma3-270m") for phase in ("prefill", "decode")
    }
    files = [f for path in built_in_captures().values() for f in (path, path.with_suffix(".safetensors"))]
    assert sum(f.stat().st_size for f in files) < 1_500_000


def test_real_attention_has_a_sink_that_random_data_lacks():
    """In a middle layer of SmolLM2 the first token takes almost half of the weight; N(0, 1) gives it 1 in 119."""
    shape = captured_shape(built_in_captures()["smollm2-135m-bf16-layer15-decode"])

    def first(inputs):
        scores = torch.einsum("hd,lhd->hl", inputs.batch.query[-1], inputs.keys[0].repeat_interleave(shape.group, 1))
        return float((scores * inputs.batch.scale).softmax(-1)[:, 0].mean())

    precision = Precision("fp32", "fp32", "fp32")
    assert first(build(shape, "captured", precision, 0)) > 0.4
    assert first(build(replace(shape, capture=None), "iid", precision, 0)) < 0.1
    assert first(build(replace(shape, capture=None), "sink", precision, 0)) > 0.5
