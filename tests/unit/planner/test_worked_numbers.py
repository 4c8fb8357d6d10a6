"""Every number of the example worked by hand; none of them comes out of the planner."""

from dataclasses import replace

import pytest

from pabench.errors import UsageError
from pabench.planner.budget import Device
from pabench.planner.plan import make_plan
from pabench.planner.pool import Paging
from pabench.planner.shape import LayerCache, ModelShape, check_ranks, kv_head_of_rank
from tests.unit.planner.worked import BIG, GIB, LLAMA, MIB, SMALL, plan, request


def test_bytes_of_a_token_and_of_a_block():
    assert plan().bytes_per_token == 131_072
    assert plan().block_bytes == 4 * MIB
    assert plan("fp8_e4m3").block_bytes == 2 * MIB


def test_the_budgets():
    assert [d.budget.bytes // MIB for d in plan().devices] == [18_022, 9_011]


@pytest.mark.parametrize(
    ("split", "blocks", "tokens"),
    [
        ((20, 12), 6_007, 192_224),
        ((16, 16), 4_505, 144_160),
        ((24, 8), 6_007, 192_224),
        ((21, 11), 6_553, 209_696),
        ((22, 10), 6_553, 209_696),
        ("best", 6_553, 209_696),
    ],
)
def test_blocks_of_a_split_are_the_smallest_quotient_of_its_devices(split, blocks, tokens):
    made = plan(layers=split)
    assert (made.num_blocks, made.max_tokens, made.guaranteed_tokens) == (blocks, tokens, tokens)


def test_the_best_split_is_one_of_the_two_that_tie_by_the_stated_tie_break():
    assert [d.num_layers for d in plan(layers="best").devices] == [21, 11]


def test_without_a_word_several_devices_get_the_best_split():
    assert plan().devices == plan(layers="best").devices


@pytest.mark.parametrize(("kv_dtype", "blocks", "tokens"), [("bf16", 2_252, 72_064), ("fp8_e4m3", 4_505, 144_160)])
def test_the_smallest_device_alone_holds_what_the_common_mistake_would_plan_for_both(kv_dtype, blocks, tokens):
    made = plan(kv_dtype, devices=(SMALL,))
    assert (made.num_blocks, made.max_tokens) == (blocks, tokens)


def test_the_cap_at_the_models_length():
    made = plan(cap="model")
    assert (made.num_blocks, made.max_tokens, made.guaranteed_tokens) == (256, 8_192, 8_192)


@pytest.mark.parametrize(("asked", "blocks", "usable", "tokens"), [(1_000, 33, 32, 1_024), (8_192, 257, 256, 8_192)])
def test_a_request_is_rounded_up_and_the_null_block_comes_on_top(asked, blocks, usable, tokens):
    made = plan(cap="requested", context=asked, reserved_blocks=1)
    assert (made.num_blocks, made.usable_blocks, made.max_tokens) == (blocks, usable, tokens)
    assert made.fits


def test_stranded_memory_is_what_the_tighter_device_keeps_the_other_from_using():
    big, small = plan(layers=(16, 16)).devices
    made = plan(layers=(16, 16))
    assert made.stranded_bytes(big) // MIB == 18_022 - 9_010  # 4,505 blocks of 2 MiB
    assert made.stranded_bytes(small) // MIB == 1


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_of_a_rank(ranks, heads):
    devices = tuple(Device(f"d{i}", "cuda", GIB, 0) for i in range(ranks))
    made = plan(tp=ranks, devices=devices)
    assert {d.kv_heads for d in made.devices} == {heads}
    assert made.num_blocks == (GIB * 9 // 10) // (4 * MIB * heads // 8)


@pytest.mark.parametrize(("ranks", "times"), [(8, 1), (16, 2), (32, 4)])
def test_each_head_is_held_equally_often(ranks, times):
    held = [head for rank in range(ranks) for head in kv_head_of_rank(rank, ranks, 8)]
    assert held == [head for head in range(8) for _ in range(times)]


def test_a_rank_holds_a_run_of_heads():
    assert [list(kv_head_of_rank(rank, 4, 8)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (3, "8 KV heads cannot be divided by 3; 32 query heads cannot be divided by 3"),
        (6, "8 KV heads cannot be divided by 6; 32 query heads cannot be divided by 6"),
        (12, "12 is no multiple of 8 KV heads, .*; 32 query heads cannot be divided by 12"),
        (64, "32 query heads cannot be divided by 64"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused_with_the_reason(ranks, reason):
    with pytest.raises(UsageError, match=f"--tp {ranks} is impossible: {reason}; use 1, 2, 4, 8, 16, 32"):
        check_ranks(LLAMA, ranks)


def test_all_ranks_take_the_blocks_of_the_smallest():
    made = plan(tp=2)
    assert [d.fits_blocks for d in made.devices] == [9_011, 4_505]  # 2 MiB a block and rank
    assert made.num_blocks == 4_505


def test_the_latent_of_mla_is_whole_on_every_rank():
    mla = ModelShape("mla", (LayerCache(1, 512 + 64, replicated=True),) * 4, num_q_heads=16)
    made = make_plan(request(model=mla, tp=2))
    assert made.bytes_per_token == 2 * 4 * 576
    assert {d.block_bytes for d in made.devices} == {32 * 2 * 4 * 576}


def test_keys_and_values_may_differ_in_size():
    uneven = ModelShape("uneven", (LayerCache(4, 192 + 128),) * 2)
    assert make_plan(request(model=uneven)).bytes_per_token == 2 * 2 * 4 * 320


@pytest.mark.parametrize(("scales", "more"), [("none", 0), ("block", 32 * 8 * 2 * 4), ("token", 32 * 32 * 8 * 2 * 4)])
def test_stored_scales_are_part_of_a_block(scales, more):
    """32 layers × 8 heads × (K and V) × 4 bytes, once a block or for each of its 32 tokens."""
    made = make_plan(replace(request(), paging=Paging(32, "fp8_e4m3", scales)))
    assert made.block_bytes == 2 * MIB + more


def test_layers_with_a_window_form_a_group_whose_blocks_stop_growing():
    """Window 512, steps of 1 token: 512 tokens touch 17 blocks of 32 at most."""
    layers = (LayerCache(1, 512, window=512), LayerCache(1, 512)) * 3
    paging = Paging(32, "bf16", free_behind_window=True, step_tokens=1)
    made = make_plan(request(model=ModelShape("windowed", layers), devices=(BIG,), paging=paging, context=100_000))
    full, windowed = made.devices[0].groups
    assert (full.window, full.num_layers, windowed.window, windowed.num_layers) == (None, 3, 512, 3)
    assert windowed.blocks(made.num_blocks, 1, 0) == 17
    block = 3 * 32 * 512 * 2
    assert made.num_blocks == (BIG.total_bytes * 9 // 10 - BIG.used_bytes - 17 * block) // block


def test_the_same_layers_keep_every_token_unless_their_blocks_are_freed():
    layers = (LayerCache(1, 512, window=512), LayerCache(1, 512)) * 3
    made = make_plan(request(model=ModelShape("windowed", layers), devices=(BIG,)))
    assert made.num_blocks == (BIG.total_bytes * 9 // 10 - BIG.used_bytes) // (6 * 32 * 512 * 2)
