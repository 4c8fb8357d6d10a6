"""Localization on a tiny model: the first wrong call, its place, its cause; what is right is blamed for nothing."""

from dataclasses import replace

import pytest
import torch

from pabench.checks.localize import localize
from pabench.checks.localize_report import report_of
from pabench.models.load import load_model, resolve_model
from pabench.prompts import choose
from pabench.reference.run import run_reference
from pabench.selftest.catalogue import kernel_mutants, plain
from pabench.selftest.engine_faults import ENGINE_FAULTS
from pabench.selftest.kernel_part import request_of, with_fault

MUTANTS = {m.name: m for m in kernel_mutants()}
FAULTS = {f.name: f for f in ENGINE_FAULTS}
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def references():
    loaded = load_model(resolve_model("tiny-llama", offline=True), dtype=torch.bfloat16, device="cpu")
    prompts = [list(loaded.tokenizer(p.text)["input_ids"])[:72] for p in choose(("question", "list", "code"), 0)]
    made = {}

    def get(kv_dtype=None):
        if kv_dtype not in made:
            made[kv_dtype] = run_reference(loaded, prompts, 24, kv_dtype=kv_dtype)
        return made[kv_dtype]

    yield get
    for reference in made.values():
        reference.close()


def located(reference, request, **more):
    return localize(reference, request, block_size=8, token_budget=48, stop_tokens=(), **more)


@pytest.mark.parametrize(
    "name",
    [
        *("heads_rolled", "newest_hidden", "past_ignored", "scale_twice", "tail_slot_times_zero", "rows_swapped"),
        *("first_plan_kept", "shortest_for_all", "nan_in_one_head", "silent_fallback", "every_17th_lost"),
    ],
)
def test_a_kernels_fault_is_named(references, name):
    found = located(references(), with_fault(MUTANTS[name], request_of("plain", plain)))
    assert found.causes[0].fault in MUTANTS[name].names


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_engine_is_named_and_the_kernel_is_not_blamed(references, name):
    fault = FAULTS[name]
    found = located(
        references(FP8 if fault.quantized else None), request_of("plain", plain), engine_type=fault.engine_type
    )
    assert found.causes[0].fault in fault.names
    if found.first is not None:
        assert found.first.inputs


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_an_honest_kernel_is_clean_in_every_scenario(references, kv_dtype):
    found = located(references(kv_dtype), request_of("plain", plain))
    assert not found.wrong
    assert len(found.results) == 6
    assert all(r.passed and r.shadow.rows for r in found.results)


def planted(layer, kv_head, block):
    """A kernel that is wrong in one layer, one KV head, from one block on; it tells layers by their pools."""
    pools = []

    def kernel(batch, return_lse=False):
        pointer = batch.key_cache.data_ptr()
        if pointer not in pools:
            pools.append(pointer)
        out = plain(batch)
        if pools.index(pointer) == layer:
            value = batch.value_cache.clone()
            for table in batch.block_table:
                value[table[block:][table[block:] >= 0].long(), :, kv_head] *= 0.5
            out = plain(replace(batch, value_cache=value))
        return out

    return kernel


@pytest.mark.parametrize(("layer", "kv_head", "block"), [(2, 1, 3), (0, 0, 1), (3, 1, 0)])
def test_layer_head_and_block_are_found_exactly(references, layer, kv_head, block):
    found = located(references(), request_of("planted", planted(layer, kv_head, block)))
    report = report_of(
        found, model="m", kernel="k", dtype="bf16", kv_dtype="bf16", block_size=8, prompts=["a", "b", "c"]
    )
    assert report.verdict == "kernel"
    assert (report.place.layer, report.place.kv_heads, report.place.block) == (layer, [kv_head], block)
    assert report.condition is not None
    assert f"layer is {layer}" in report.condition


def test_a_change_elsewhere_in_the_model_is_not_called_an_attention_fault(references):
    from pabench.engine import attention_hook

    reference = references()
    model = reference.path.loaded.model

    def perturbed(module, inputs, output):
        return output * 1.5 if attention_hook._forward.get() is not None else None

    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(perturbed)
    try:
        found = located(reference, request_of("plain", plain))
    finally:
        handle.remove()
    assert found.first is None
    assert found.causes[0].fault == "unknown"
    assert "layers.1.mlp.down_proj" in found.causes[0].clause


def test_a_small_repro_is_made_of_the_first_wrong_call(references):
    found = located(references(), with_fault(MUTANTS["newest_hidden"], request_of("plain", plain)), shrunk=True)
    assert found.small is not None
    assert found.small.fault == "missing_tokens"
    assert found.small.batch.num_seqs == 1


def test_one_kv_heads_last_lost_block_is_said_with_its_slot(references):
    found = located(references(), with_fault(MUTANTS["newest_hidden"], request_of("plain", plain)))
    first = found.first
    assert first.phase == "decode"
    assert first.block == (first.length - 1) // 8
    assert first.slot == first.table[first.block] * 8 + (first.length - 1) % 8
