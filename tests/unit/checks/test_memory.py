"""A run's own pool: refused with the planner's numbers where it does not fit, measured item by item where it does."""

import json

import pytest
import torch
from typer.testing import CliRunner

from pabench.checks import memory
from pabench.cli.app import app
from pabench.engine.kv_cache import PagedKVCache
from pabench.errors import CannotJudge
from pabench.models.load import load_model, resolve_model
from pabench.planner.budget import Device
from pabench.records import MemoryItem

MIB = 1 << 20
RUN = ["run", "smoke", "-m", "tiny-llama", "-k", "torch_paged", "--dtype", "fp32", "-q", "--json", "-o"]


@pytest.fixture(scope="module")
def tiny():
    return load_model(resolve_model("tiny-llama"), dtype=torch.float32)


def device_of(monkeypatch, **changes):
    device = Device(**{"name": "cpu", "kind": "cpu", "total_bytes": 8 * MIB, "used_bytes": 0, **changes})
    monkeypatch.setattr(memory, "of_torch_device", lambda _: device)


def pool_plan(tiny, num_blocks=10, kv_dtype=torch.float32):
    return memory.plan_pool(
        tiny,
        num_blocks=num_blocks,
        block_size=16,
        kv_dtype=kv_dtype,
        token_budget=64,
        kept_tokens=100,
        kept_dtype=torch.float32,
    )


def test_a_pool_that_fits_is_planned(tiny, monkeypatch):
    """4 layers × 2 heads × (32 + 32) × 4 bytes = 2,048 bytes a token; 32 KiB a block of 16."""
    device_of(monkeypatch)
    planned = pool_plan(tiny)
    reserved = 100 * 2_048 + 64 * (4 * 128 + 2 * 384) * 4 + 64 * 258 * 4
    assert planned.plan.fit_blocks == (8 * MIB - reserved) // 32_768
    assert planned.kept == 100 * 2_048


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(tiny, monkeypatch):
    device_of(monkeypatch, used_bytes=6 * MIB)
    with pytest.raises(CannotJudge, match="1,600 tokens need 100 blocks of 32 KiB in all, but 45 fit"):
        pool_plan(tiny, num_blocks=100)


def test_an_accelerator_keeps_its_safety_reserve(tiny, monkeypatch):
    device_of(monkeypatch, name="cuda:0", kind="cuda", total_bytes=512 * MIB)
    with pytest.raises(CannotJudge, match=r"does not fit into cuda:0: .* but 0 fit"):
        pool_plan(tiny, num_blocks=1)


def test_unknown_memory_refuses_nothing_and_is_recorded_as_unknown(tiny, monkeypatch):
    device_of(monkeypatch, total_bytes=None, used_bytes=None, why="no driver")
    planned = pool_plan(tiny)
    told = memory.measure(planned, tiny, [], 0)
    assert (told.total_bytes, told.fit_blocks, told.unknown) == (None, None, "no driver")


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_what_was_planned_is_what_is_there(tiny, kv_dtype):
    planned = pool_plan(tiny, kv_dtype=kv_dtype)
    pool = PagedKVCache(tiny.geometry, num_blocks=10, block_size=16, dtype=kv_dtype)
    items = memory.measure(planned, tiny, [*pool.keys, *pool.values], 77).items
    size = 10 * 16 * 512 * kv_dtype.itemsize
    assert items["kv_pool"] == MemoryItem(planned=size, measured=size)
    assert items["kept_kv"].measured == 77
    assert items["weights"].planned == pytest.approx(items["weights"].measured, rel=0.01)
    assert items["activations"].measured is None, "no allocator of the CPU tells its peak"


def test_a_pool_of_another_size_shows(tiny):
    planned = pool_plan(tiny)
    pool = PagedKVCache(tiny.geometry, num_blocks=11, block_size=16, dtype=torch.float32)
    item = memory.measure(planned, tiny, [*pool.keys, *pool.values], 0).items["kv_pool"]
    assert item.measured == item.planned * 11 // 10


def test_a_run_whose_pool_does_not_fit_cannot_be_judged(tmp_path, monkeypatch):
    device_of(monkeypatch, total_bytes=1 * MIB)
    result = CliRunner().invoke(app, [*RUN, str(tmp_path), "--in-process"])
    (case,) = json.loads(result.stdout)["cases"]
    assert (result.exit_code, case["status"], case["reason"]) == (3, "INCONCLUSIVE", "cannot_judge")
    assert "the block pool does not fit into cpu" in case["message"]
    assert "blocks of 16 KiB in all, but" in case["message"]


def test_a_run_records_planned_and_measured_bytes(tmp_path):
    result = CliRunner().invoke(app, [*RUN, str(tmp_path)])
    (case,) = json.loads(result.stdout)["cases"]
    told = case["memory"]
    assert told["fit_blocks"] >= told["needed_blocks"] > 0
    assert told["items"]["kv_pool"]["planned"] == told["items"]["kv_pool"]["measured"]
    kept = told["items"]["kept_kv"]
    assert 0.9 * kept["planned"] <= kept["measured"] <= kept["planned"]
