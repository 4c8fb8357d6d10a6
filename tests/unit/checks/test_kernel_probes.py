"""What each probe's answer is, computed by hand; and that the oracle and the judge agree with it."""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial, judge_kernel
from pabench.checks.kernel.inputs import build
from pabench.checks.kernel.judge import judge_lse, judge_output, locate
from pabench.checks.kernel.plan import plan_trials
from pabench.checks.kernel.probes import PROBES, balanced_code, fingerprints, read_fingerprint
from pabench.checks.kernel.shapes import Shape, covering_rows, find_shape, shapes
from pabench.checks.kernel.truth import find_truth
from pabench.errors import UsageError
from pabench.probes import PROBES as NAMES
from pabench_kernels.request import parse_request

FP32 = Precision("fp32", "fp32", "fp32")
FP8 = Precision("fp8", "bf16", "fp8_e4m3")
INT8 = Precision("bf16", "bf16", "int8")
SMALL = Shape("small", ((1, 20), (3, 7)), block_size=4)


def test_the_names_that_can_be_asked_for_are_the_probes_there_are():
    assert list(NAMES) == list(PROBES)


@pytest.mark.parametrize("precision", [FP32, FP8, INT8], ids=lambda p: p.kv_dtype)
def test_count_is_the_mean_of_the_visible_code_exactly(precision):
    """q = 0: each output channel is Σ code / n, whatever the keys hold, also in a quantised cache."""
    inputs = build(SMALL, "count", precision, seed=0)
    truth = find_truth(inputs)
    first = inputs.values[0].double()  # [20, Hkv, D], one query sees all 20
    torch.testing.assert_close(truth.out[0], first.mean(0).repeat_interleave(3, 0), rtol=1e-12, atol=1e-15)
    factor = torch.ones(2) if inputs.batch.v_scale is None else inputs.batch.v_scale.expand(2)
    stored = first / factor.double()[:, None]
    assert bool(((stored.abs() - 1).abs() < 1e-6).all())
    assert bool((stored[..., -1] > 0).all())


def test_count_with_sinks_adds_an_integer_to_the_denominator():
    inputs = build(replace(SMALL, sinks=True), "count", FP32, seed=0)
    truth = find_truth(inputs)
    # the longest sequence has 20 tokens: e^sink of head h is 2 + h mod 5 + 10
    torch.testing.assert_close(truth.weight[0], 20 + 12 + torch.arange(6).double() % 5, rtol=1e-6, atol=0)
    torch.testing.assert_close(truth.out[0, :, -1], 20 / truth.weight[0], rtol=1e-6, atol=0)


def test_every_run_of_the_code_sums_to_a_small_number_and_no_block_to_zero():
    code = balanced_code(4096, 1, 65, torch.Generator().manual_seed(0))[:, 0, :64]
    assert set(code.flatten().tolist()) == {-1.0, 1.0}
    assert float(code.cumsum(0).abs().max()) <= 19
    for block in (16, 32, 64, 128, 256):
        sums = code.unflatten(0, (-1, block)).sum(1)
        assert float((sums == 0).all(-1).double().mean()) == 0


def test_a_needle_answers_with_its_own_value():
    """The other 19 keys weigh e^−20 each at about score 0."""
    inputs = build(replace(SMALL, seqs=((1, 20),)), "needle", FP32, seed=0)
    truth = find_truth(inputs)
    torch.testing.assert_close(truth.out[0], inputs.values[0][0].double().repeat_interleave(3, 0), rtol=0, atol=1e-5)


def test_two_level_answers_with_the_ratio_of_the_levels():
    inputs = build(replace(SMALL, seqs=((1, 20),), group=1, kv_heads=1), "two_level", FP32, seed=0)
    truth = find_truth(inputs)
    key, value = inputs.keys[0][:, 0].double(), inputs.values[0][:, 0].double()
    high = key[:, 0] > 0
    score = float(inputs.batch.query[0, 0, 0].double() * key[:, 0].max()) * inputs.batch.scale
    assert 5 < score <= 8
    n = int(high.sum())
    expected = value[~high].sum(0) / (n * math.exp(score) + 20 - n)
    torch.testing.assert_close(truth.out[0, 0], expected, rtol=1e-9, atol=0)


def test_a_scale_one_percent_off_moves_two_level_by_more_than_bf16_tolerates():
    inputs = build(SMALL, "two_level", Precision("bf16", "bf16", "bf16"), seed=0)
    truth = find_truth(inputs)
    off = replace(inputs, batch=replace(inputs.batch, scale=inputs.batch.scale * 1.01))
    finding, _ = judge_output(inputs, truth, find_truth(off).out.bfloat16())
    assert finding is not None
    assert judge_output(inputs, truth, truth.out.bfloat16())[0] is None


def test_a_fingerprint_names_block_offset_head_and_sequence():
    """Token 83 in blocks of 16 is offset 3 of block 5."""
    values = fingerprints(Shape("f", ((1, 90),), head_dim=40), 0)
    assert read_fingerprint(values[83, 1]) == {"block": 5, "offset": 3, "head": 1, "seq": 0}
    assert read_fingerprint(values[83, 1] * 0.5 + values[2, 0] * 0.5) is None
    assert read_fingerprint(torch.full((40,), math.nan)) is None


def test_one_slot_more_or_less_is_seen_in_bf16_at_4k():
    shape = Shape("long", ((1, 4100),), group=1, kv_heads=1)
    inputs = build(shape, "count", Precision("bf16", "bf16", "bf16"), seed=0)
    truth = find_truth(inputs)
    whole = inputs.values[0][:, 0].double()
    assert judge_output(inputs, truth, whole.mean(0)[None, None].bfloat16())[0] is None
    for wrong in (whole[:-1], whole[1:], torch.cat([whole, whole[7:8]])):
        finding, _ = judge_output(inputs, truth, wrong.mean(0)[None, None].bfloat16())
        assert finding is not None
        assert finding.reason == "slot_count"


@pytest.mark.parametrize("length", [513, 4129, 8227])
def test_n_weights_of_one_nth_added_up_in_fp32_are_no_fault_but_a_lost_slot_is(length):
    inputs = build(Shape("long", ((1, length),), group=1, kv_heads=1), "count", FP32, seed=0)
    truth = find_truth(inputs)
    weighted = inputs.values[0][:, 0] * torch.tensor(1 / length)
    one_after_another = weighted.cumsum(0)[-1][None, None]
    assert judge_output(inputs, truth, one_after_another)[0] is None
    assert judge_output(inputs, truth, one_after_another - weighted[length // 2])[0] is not None


def test_what_nobody_owns_is_poisoned_and_ids_are_unique_and_out_of_order():
    inputs = build(SMALL, "poison", FP32, seed=0)
    table = inputs.batch.block_table
    own = [*table[0, :5].tolist(), *table[1, :2].tolist()]
    assert len(set(own)) == 7
    assert own != sorted(own)
    assert not {0, inputs.batch.key_cache.shape[0] - 1} & set(own)
    cache = inputs.batch.key_cache
    assert cache[table[0, 4], :].isfinite().all()  # 20 tokens fill 5 blocks
    assert cache[table[1, 1], 3].isnan().all()  # 7 tokens: slot 3 of the second block is behind the end
    assert cache[0].isnan().all()


def test_blocks_behind_the_window_are_gone_from_the_table():
    shape = Shape("w", ((1, 40), (1, 40)), block_size=4, window=5)
    table = build(shape, "iid", FP32, seed=0).batch.block_table
    # the query at 39 sees 35…39: blocks 8 and 9; 0…7 end at token 31
    assert table[1, :8].tolist() == [-1] * 8
    assert len(set(table[0, :8].tolist())) == 1
    assert bool((table[:, 8:10] > 0).all())


@pytest.mark.parametrize("layout", ["plain", "padded", "interleaved"])
def test_layouts_hold_the_same_numbers(layout):
    inputs = build(replace(SMALL, layout=layout), "iid", FP8, seed=3)
    batch = inputs.batch
    block, offset = int(batch.block_table[0, 3]), 2  # token 14
    stored = batch.key_cache.view(torch.uint8)[block, offset].view(batch.key_cache.dtype).float()
    torch.testing.assert_close(stored * batch.k_scale, inputs.keys[0][14])
    assert batch.key_cache.stride(-1) == 1


def test_a_write_to_the_inputs_is_found_and_undone():
    inputs = build(SMALL, "poison", FP32, seed=0)
    before = inputs.snapshot["query"].clone()
    inputs.batch.query.mul_(2)
    assert inputs.changed() == ["query"]
    assert torch.equal(inputs.batch.query, before)
    assert inputs.changed() == []


def test_nonfinite_is_decided_first_and_located():
    inputs = build(SMALL, "iid", FP32, seed=0)
    truth = find_truth(inputs)
    out = truth.out.float()
    out[2, 4, 5] = math.nan  # second sequence (3 queries, 7 tokens), its second query: token 5
    finding, accuracy = judge_output(inputs, truth, out)
    assert finding is not None
    assert finding.fault == "nonfinite"
    assert accuracy.nonfinite == 1
    w = accuracy.worst
    assert (w.seq, w.token, w.q_head, w.kv_head, w.block, w.dim) == (1, 5, 4, 1, 1, 5)
    assert w.physical_block == int(inputs.batch.block_table[1, 1])
    assert w.slot == w.physical_block * 4 + 1


def test_an_empty_sequence_must_give_exactly_zero_and_minus_infinity():
    inputs = build(Shape("e", ((1, 0), (1, 3)), sinks=True), "iid", FP32, seed=0)
    truth = find_truth(inputs)
    assert judge_output(inputs, truth, truth.out.float())[0] is None
    assert judge_lse(inputs, truth, truth.lse.float()) is None
    out, lse = truth.out.float(), truth.lse.float()
    out[0, 0, 0] = 1e-30
    lse[0, 0] = 0.0
    assert judge_output(inputs, truth, out)[0] is not None
    assert judge_lse(inputs, truth, lse) is not None
    assert locate(inputs, 0, 0, 0).slot is None


@pytest.mark.parametrize("wrong", ["base 2", "no sink", "other layout", "half"])
def test_a_wrong_lse_is_seen(wrong):
    inputs = build(replace(SMALL, sinks=True), "iid", FP32, seed=0)
    truth = find_truth(inputs)
    plain = find_truth(replace(inputs, batch=replace(inputs.batch, sinks=None)))
    lse = {
        "base 2": truth.lse / math.log(2),
        "no sink": plain.lse,
        "other layout": truth.lse.T,
        "half": truth.lse,
    }[wrong].float()
    finding = judge_lse(inputs, truth, lse.half() if wrong == "half" else lse)
    assert finding is not None
    assert finding.fault == "lse"


def test_any_two_values_of_two_factors_meet():
    factors = ((1, 2, 3), "abcd", (True, False), (None, "x", "y"))
    rows = covering_rows(factors)
    for i, j in combinations(range(4), 2):
        assert {(r[i], r[j]) for r in rows} == {(a, b) for a in factors[i] for b in factors[j]}
    assert len(rows) < 3 * 4 * 2 * 3 / 2


def test_the_table_covers_what_broke_kernels_before():
    table = shapes()
    assert len({s.name for s in table}) == len(table)
    lengths = {n for s in table for _, n in s.seqs}
    assert {0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513} <= lengths
    assert max(lengths) > 8192
    assert {1, 2, 3, 5, 7, 8, 16, 71} <= {s.group for s in table}
    assert {40, 64, 80, 96, 128, 256} <= {s.head_dim for s in table}
    assert {1, 3, 16, 17, 32, 64, 128, 256, 512} <= {s.block_size for s in table}
    assert any(s.block_size == s.kv_heads for s in table)


def test_query_lengths_meet_past_window_and_batch():
    table = [s for s in shapes() if s.name.startswith("q")]
    lengths = {*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 127, 128, 129}
    for has in (
        lambda s, q: s.seqs[0] == (q, q),
        lambda s, q: s.seqs[0][0] == q and s.seqs[0][1] > q,
        lambda s, q: s.seqs[0][0] == q and s.window is not None,
        lambda s, q: s.seqs[0][0] == q and s.window is None,
        lambda s, q: s.seqs[0][0] == q and len(s.seqs) == 1,
        lambda s, q: s.seqs[0][0] == q and len(s.seqs) > 1,
    ):
        assert {q for q in lengths if any(has(s, q) for s in table)} == lengths


def test_64k_contexts_reach_past_the_border_by_two_blocks():
    long = {n for s in shapes() for _, n in s.seqs if n >= 65535}
    assert {65535} < long
    assert max(n for n in long) > 65536 + 2 * 64


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "unit"), [("offsets-past-2-gib", "bytes"), ("offsets-past-2-gi", "elements")])
def test_blocks_lie_on_both_sides_of_each_offset_border(name, unit, dtype):
    inputs = build(find_shape(name, 16), "iid", Precision(dtype, dtype, dtype), seed=0)
    cache, table = inputs.batch.key_cache, inputs.batch.block_table
    used = torch.cat([row[: -(-n // 16)] for row, (_, n) in zip(table, inputs.shape.seqs, strict=True)])
    size = cache.itemsize if unit == "bytes" else 1
    offsets = used.long() * cache.stride(0) * size
    assert bool((offsets < 2**31).any())
    assert bool((offsets >= 2**31).any())
    assert torch.equal(cache[table[0, 4], 5], inputs.keys[0][69].to(cache.dtype))


def test_ids_lie_on_both_sides_of_65536():
    used = build(find_shape("ids-past-65536", 16), "iid", FP32, seed=0).batch.block_table[0, :40]
    assert int(used.min()) < 65536 < int(used.max())


def test_a_pool_that_cannot_be_allocated_is_skipped_and_says_so(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    trial = Trial(find_shape("offsets-past-2-gib", 16), "iid", FP32, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        outcome = judge_kernel(trial, parse_request("torch_paged"))
    assert (outcome.status, outcome.reason) == ("SKIPPED", "no_memory")
    assert "GiB of address space cannot be allocated" in outcome.message


def test_factors_per_token_are_where_the_tokens_are_and_nan_elsewhere():
    inputs = build(find_shape("per-token-scales", 16), "iid", FP8, seed=0)
    batch = inputs.batch
    assert batch.k_scale.shape == (*batch.key_cache.shape[:2], 3)
    block, offset = int(batch.block_table[0, 2]), 3  # token 35
    stored = batch.key_cache.view(torch.uint8)[block, offset].view(batch.key_cache.dtype).float()
    torch.testing.assert_close(stored * batch.k_scale[block, offset][:, None], inputs.keys[0][35])
    assert bool(batch.k_scale[0].isnan().all())


def test_factors_per_token_are_given_to_kernels_that_declare_them():
    stranger = Path(__file__).parents[2] / "faulty" / "kernels.py"
    for kernel, status in (("triton_decode", "PASS"), (f"{stranger}:honest_whole", "SKIPPED")):
        trial = Trial(find_shape("per-token-scales", 16), "iid", FP8, seed=0)
        assert judge_kernel(trial, parse_request(kernel)).status == status


def test_each_shape_and_each_probe_has_its_turn():
    precisions = [Precision(d, d, d) for d in ("fp32", "bf16")]
    trials = plan_trials(shapes(), tuple(NAMES), precisions, count=340, seed=0)
    assert {t.probe for t in trials} == set(NAMES)
    assert {t.shape.name for t in trials} == {s.name for s in shapes()}
    assert len(trials) == len({t.key for t in trials}) == 680


def test_shapes_are_found_by_name_by_record_and_by_spec():
    shape = find_shape("gqa71-decode", 16)
    assert find_shape(shape.batch_spec, 16) == shape
    assert find_shape("q1s9", 4) == find_shape("spec:q1s9", 4)
    with pytest.raises(UsageError, match="did you mean 'gqa71-decode'"):
        find_shape("gqa71-decod", 16)


def test_same_arguments_same_numbers_and_another_seed_others():
    a, b, c = (build(SMALL, "iid", FP32, seed=s).batch.query for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
