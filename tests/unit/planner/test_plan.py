"""Requests that contradict themselves, memory that is unknown or overdrawn, and what would make a plan fit."""

from dataclasses import replace

import pytest

from pabench.errors import CannotJudge, UsageError
from pabench.planner.budget import Device, activation_reserve, safety_reserve, weight_bytes
from pabench.planner.plan import make_plan
from pabench.planner.pool import Paging
from pabench.planner.remedies import missing_bytes, remedies
from pabench.planner.shape import LayerCache, LayerWeights, ModelShape, Weights
from pabench.planner.words import outcome, shortfall, size
from tests.unit.planner.worked import BIG, GIB, LLAMA, MIB, SMALL, plan, request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 2, "layers": (16, 16)}, "--tp and --layers are two ways"),
        ({"tp": 4}, "--tp 4 needs one device a rank, but 2 are listed"),
        ({"layers": (20, 11)}, "must be counts that add up to 32 layers, they give 31"),
        ({"layers": (33, -1)}, "must be counts that add up to 32 layers"),
        ({"layers": (32,)}, "--layers 32 names 1 devices, but 2 are listed"),
        ({"utilization": 0.0}, "--utilization must be above 0 and at most 1, got 0"),
        ({"utilization": 1.1}, "--utilization must be above 0"),
        ({"utilization": float("nan")}, "--utilization must be above 0"),
        ({"context": 0}, "--context must be at least 1, got 0"),
        ({"sequences": 0}, "--sequences must be at least 1"),
        ({"reserved_blocks": -1}, "--reserved-blocks must be at least 0"),
        ({"reserve": -1}, "--reserve must be at least 0"),
        ({"lengths": (0,)}, "--lengths must be at least 1"),
        ({"paging": Paging(0)}, "--block-size must be at least 1"),
        ({"cap": "requested"}, "--cap requested needs --context"),
        ({"devices": ()}, "no device is listed"),
        ({"tp": 2, "model": replace(LLAMA, num_q_heads=None)}, "give --num-q-heads"),
        ({"cap": "model", "model": replace(LLAMA, max_length=None)}, "does not say how many tokens it takes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(changes, words):
    with pytest.raises(UsageError, match=words):
        plan(**changes)


@pytest.mark.parametrize(("total", "used", "what"), [(None, 0, "total"), (GIB, None, "used")], ids=["total", "used"])
def test_nothing_is_planned_on_unknown_memory(total, used, what):
    device = Device("gpu", "cuda", total, used, "the driver is gone")
    with pytest.raises(CannotJudge, match=rf"the {what} memory of device 'gpu' is unknown \(the driver is gone\)"):
        plan(devices=(device,))


def test_a_model_without_a_cache_has_nothing_to_plan():
    with pytest.raises(CannotJudge, match="no layer of 'mamba' has a paged KV cache"):
        plan(model=ModelShape("mamba", (LayerCache(0, 0),) * 2))


def test_memory_that_is_overdrawn_leaves_nothing_and_not_less():
    made = plan(devices=(Device("full", "cuda", 24 * GIB, 30 * GIB),))
    assert (made.devices[0].budget.bytes, made.num_blocks, made.guaranteed_tokens) == (0, 0, 0)
    assert not made.fits
    assert missing_bytes(made) == {"full": 30 * GIB - 24 * GIB * 9 // 10 + 4 * MIB}


def test_reserved_blocks_beyond_what_fits_leave_no_usable_one():
    assert plan(devices=(SMALL,), reserved_blocks=5_000).usable_blocks == 0


def test_the_safety_reserve_is_two_percent_or_512_mib_and_a_cpu_needs_none():
    assert safety_reserve(Device("a", "cuda", 100 * GIB, 0)) == 2 * GIB
    assert safety_reserve(Device("b", "mps", 16 * GIB, 0)) == 512 * MIB
    assert safety_reserve(Device("c", "cpu", 100 * GIB, 0)) == 0


def test_the_activation_reserve_of_a_step():
    """2,048 tokens × (4 × 4,096 + 2 × 14,336) bf16 elements, and 256 rows of 128,256 fp32 logits."""
    assert activation_reserve(LLAMA, 2_048) == 2_048 * (4 * 4_096 + 2 * 14_336) * 2 + 256 * 128_256 * 4
    assert activation_reserve(LLAMA, 2_048, has_head=False) == 2_048 * (4 * 4_096 + 2 * 14_336) * 2


TINY = ModelShape(
    "tiny",
    (LayerCache(2, 8),) * 3,
    num_q_heads=4,
    dtype="fp32",
    weights=Weights((LayerWeights(100, 40, 7),) * 3, embedding=1_000, head=1_000, final=3, tied=True),
)


@pytest.mark.parametrize(
    ("first", "count", "ranks", "parameters"),
    [
        (0, 3, 1, 3 * 147 + 1_000 + 3),  # tied: the head reads the embedding that is there
        (0, 1, 1, 147 + 1_000),
        (2, 1, 1, 147 + 3 + 1_000),  # tied, but the embedding is on another device
        (1, 1, 1, 147),
        (0, 0, 1, 0),
        (0, 3, 4, 3 * (25 + 20 + 7) + 250 + 3),  # 2 heads on 4 ranks: one each
    ],
)
def test_weights_of_the_layers_or_the_shard_on_a_device(first, count, ranks, parameters):
    assert weight_bytes(TINY, first, count, ranks) == 4 * parameters


def test_the_budget_of_a_split_depends_on_the_split():
    made = plan(layers=(22, 10), weights_loaded=False, devices=(BIG, Device("small", "cuda", 12 * GIB, 0)))
    layer = 2 * (4096 * 128 * (32 + 8) * 2 + 3 * 4096 * 14336 + 6 * 4096)
    embedding = 2 * 128_256 * 4_096
    assert [d.budget.weights for d in made.devices] == [22 * layer + embedding, 10 * layer + embedding + 2 * 2 * 4096]


def test_unknown_weights_are_said_so():
    with pytest.raises(CannotJudge, match="the weights of 'bare' take is unknown; give --weights loaded"):
        plan(model=ModelShape("bare", LLAMA.layers), weights_loaded=False)


def test_a_device_too_small_for_a_layer_is_left_out_of_the_best_split():
    made = plan(devices=(Device("none", "cuda", 4 * GIB, 4 * GIB), BIG))
    assert [d.num_layers for d in made.devices] == [0, 32]
    assert made.num_blocks == 4_505


def test_more_devices_than_layers_leave_some_without():
    made = plan(model=replace(LLAMA, layers=LLAMA.layers[:2]), devices=(BIG, SMALL, replace(BIG, name="third")))
    assert sum(d.num_layers for d in made.devices) == 2


def test_a_shortfall_is_told_with_its_numbers():
    made = plan(context=300_000)
    assert shortfall(made) == (
        "300,000 tokens need 9,375 blocks of 4 MiB in all, but 6,553 fit, which guarantee 209,696 tokens; "
        "'big' lacks 6.43 GiB; 'small' lacks 3.79 GiB"
    )


def test_remedies_are_offered_only_where_they_are_enough():
    found = remedies(plan(layers=(16, 16), context=200_000))
    assert found[:3] == ["--layers 21,11", "--kv-dtype fp8", "--context 144160"]
    assert found[3].endswith("bytes more on small")
    assert remedies(plan(context=1_000_000))[:2] == ["--kv-dtype fp8 --context 419424", "--context 209696"]
    assert remedies(plan(context=200_000)) == []


def test_the_smallest_utilization_that_fits_is_offered():
    """160,000 tokens in one device of 24 GiB: 5,000 blocks of 4 MiB and 4 GiB used are 98.05 %."""
    assert remedies(plan(devices=(BIG,), context=160_000))[0] == "--utilization 0.99"


def test_each_remedy_makes_it_fit():
    asked = request(layers=(16, 16), context=150_000)
    assert not make_plan(asked).fits
    assert make_plan(replace(asked, layers=(21, 11))).fits
    assert make_plan(replace(asked, paging=Paging(32, "fp8_e4m3"))).fits
    assert make_plan(replace(asked, context=144_160)).fits


def test_a_capped_plan_cannot_be_asked_for_more_than_its_cap():
    made = plan(cap="model", context=10_000)
    assert not made.fits
    assert "'llama-3-8b' takes 8,192" in shortfall(made)
    assert remedies(made) == ["ask for at most the model's 8,192 tokens, or plan with --cap none"]


def test_concurrency_counts_whole_blocks_of_each_sequence():
    assert plan(devices=(SMALL,)).concurrency(33) == 2_252 // 2
    assert plan(devices=(SMALL,)).concurrency(32 * 2_253) == 0


def test_sequences_must_reach_the_context_at_the_same_time():
    made = plan(devices=(SMALL,), sequences=3, context=24_000)
    assert (made.guaranteed_tokens, made.fits) == (2_252 // 3 * 32, True)
    assert not plan(devices=(SMALL,), sequences=3, context=24_001).fits


def test_memory_that_sets_no_limit_leaves_the_models_length():
    """All layers windowed, blocks freed: no length is too long for the memory."""
    model = ModelShape("windows", (LayerCache(1, 64, window=16),) * 2, max_length=5_000)
    made = make_plan(request(model=model, devices=(BIG,), paging=Paging(16, free_behind_window=True, step_tokens=1)))
    assert made.fit_blocks is None
    assert made.num_blocks == 313
    assert made.pool_bytes(made.devices[0]) == 2 * 2 * (16 * 64 * 2)  # 16 tokens touch two blocks of 16


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (4 * MIB, "4 MiB"), (18_897_856_921, "17.6 GiB"), (-GIB, "-1 GiB")],
)
def test_bytes_are_told_in_binary_units(count, text):
    assert size(count) == text


def test_the_outcome_says_where_the_model_itself_ends():
    assert outcome(plan()).endswith("a sequence of 209,696 (the model takes 8,192) is guaranteed")
