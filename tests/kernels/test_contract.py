"""Every kernel keeps the contract: right against the fp64 oracle on awkward shapes, blind to what is not its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pabench_kernels import triton_common
from pabench_kernels.contract import Kernel, PagedBatch
from pabench_kernels.cpu_native import cpu_native
from pabench_kernels.torch_paged import torch_paged
from pabench_kernels.trace import ExecutionTrace, tracing
from pabench_kernels.triton_decode import triton_decode
from pabench_kernels.triton_prefill import triton_prefill
from pabench_kernels.triton_split import triton_split
from pabench_kernels.triton_unified import triton_unified
from tests.kernels.cases import BF16, CASES, E4M3, E5M2, FP16, FP32, INT8, Case, Phase, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

KERNELS: dict[str, tuple[Kernel, Phase]] = {
    "torch_paged-decode": (torch_paged, "decode"),
    "torch_paged-prefill": (torch_paged, "prefill"),
    "cpu_native-decode": (cpu_native, "decode"),
    "cpu_native-prefill": (cpu_native, "prefill"),
    "triton_decode": (triton_decode, "decode"),
    "triton_prefill": (triton_prefill, "prefill"),
    "triton_split": (triton_split, "decode"),
    "triton_unified-decode": (triton_unified, "decode"),
    "triton_unified-prefill": (triton_unified, "prefill"),
}
LSE_CASES = [
    "plain",
    "gqa71",
    "only-empty",
    "window-7",
    "alibi",
    "soft-cap",
    "sinks",
    "e4m3",
    "everything",
    "bf16",
    "int8-per-token",
]


@pytest.fixture(params=KERNELS)
def setup(request: pytest.FixtureRequest) -> tuple[Kernel, Phase]:
    return KERNELS[request.param]


def tensors(batch: PagedBatch) -> dict[str, torch.Tensor]:
    found = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def bits(batch: PagedBatch) -> dict[str, torch.Tensor]:
    return {name: x.contiguous().reshape(-1).view(torch.uint8).clone() for name, x in tensors(batch).items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_is_as_near_the_oracle_as_dense_attention(setup: tuple[Kernel, Phase], case: Case) -> None:
    kernel, phase = setup
    batch = make_batch(case, phase)
    before = bits(batch)
    out = kernel(batch)
    assert wrong_rows(out, batch, oracle(batch)) == []
    for name, after in bits(batch).items():
        assert torch.equal(after, before[name]), f"{name} was written to"


@pytest.mark.parametrize("case", LSE_CASES)
def test_lse_is_the_log_of_the_whole_denominator(setup: tuple[Kernel, Phase], case: str) -> None:
    kernel, phase = setup
    batch = make_batch(CASES[case], phase)
    out, lse = kernel(batch, return_lse=True)
    truth = oracle(batch)
    assert lse.dtype == torch.float32
    assert wrong_rows(out, batch, truth) == []
    np.testing.assert_allclose(lse.double().numpy(), truth.lse, rtol=4e-6, atol=4e-6)


def test_a_sink_of_minus_infinity_is_no_sink(setup: tuple[Kernel, Phase]) -> None:
    kernel, phase = setup
    batch = make_batch(Case(sinks=True), phase)
    assert batch.sinks is not None
    without = kernel(changed(batch, sinks=None))
    torch.testing.assert_close(kernel(changed(batch, sinks=torch.full_like(batch.sinks, -torch.inf))), without)


@pytest.mark.parametrize("kv_dtype", [FP32, FP16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
def test_nan_in_an_own_token_is_not_swallowed(setup: tuple[Kernel, Phase], kv_dtype: torch.dtype, which: str) -> None:
    kernel, phase = setup
    quantized = kv_dtype in (E4M3, E5M2)
    batch = make_batch(Case(dtype=FP32 if quantized else kv_dtype, kv_dtype=kv_dtype, lens=(20, 18)), phase)
    block = int(batch.block_table[0, 0])
    getattr(batch, which)[block, 0, 1] = torch.full((64,), torch.nan).to(kv_dtype)
    out = kernel(batch)
    first = slice(0, int(batch.query_start_loc[1]))
    assert out[first, batch.group_size :].isnan().all(), "heads of KV head 1 see the NaN"
    assert out[first, : batch.group_size].isfinite().all(), "heads of KV head 0 do not"
    assert out[first.stop :].isfinite().all(), "nor does the other sequence"


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # 0 × inf in rows that only pad the tile
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=str)
def test_every_code_of_a_narrow_cache_is_read_exactly(setup: tuple[Kernel, Phase], kv_dtype: torch.dtype) -> None:
    """A sequence of one token returns its value: all 256 codes, NaN, infinities and subnormals among them."""
    kernel, phase = setup
    batch = make_batch(Case(kv_dtype=kv_dtype, head_dim_v=256, lens=(1,)), phase)
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    batch.value_cache[int(batch.block_table[0, 0]), 0] = codes
    expected = codes.float().expand(1, batch.num_q_heads, -1)
    torch.testing.assert_close(kernel(batch), expected, rtol=0, atol=0, equal_nan=True)


def test_offsets_beyond_two_to_the_31(setup: tuple[Kernel, Phase]) -> None:
    """Three blocks 2³⁰ + 64 bytes apart in one lazily committed allocation; the third lies beyond 2³¹."""
    kernel, phase = setup
    small = make_batch(Case(kv_dtype=INT8, scales="tensor", lens=(33,), kv_heads=1, head_dim=16), phase)
    stride = (1 << 30) + 64
    room = torch.empty(2 * stride + 2 * 16 * 16, dtype=INT8)
    far_keys = room.as_strided((3, 16, 1, 16), (stride, 16, 16, 1))
    far_values = room.as_strided((3, 16, 1, 16), (stride, 16, 16, 1), 16 * 16)
    order = torch.tensor([[2, 0, 1]])
    for far, near in ((far_keys, small.key_cache), (far_values, small.value_cache)):
        for column in range(3):
            far[int(order[0, column])] = near[int(small.block_table[0, column])]
    far_batch = changed(small, key_cache=far_keys, value_cache=far_values, block_table=order.int())
    assert torch.equal(kernel(far_batch), kernel(small))


@pytest.mark.parametrize("kernel", [torch_paged, cpu_native, triton_unified], ids=lambda k: k.name)
def test_mixed_batch_in_one_call(kernel: Kernel) -> None:
    batch = make_batch(Case(lens=(17, 40, 0, 1), window=9), "prefill")
    assert batch.phases == {"prefill", "decode"}
    assert kernel.unsupported(batch) == []
    assert wrong_rows(kernel(batch), batch, oracle(batch)) == []


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_torch_paged_is_dense_sdpa_bit_for_bit(dtype: torch.dtype) -> None:
    for phase in ("decode", "prefill"):
        batch = make_batch(Case(dtype=dtype, lens=(40,)), phase)  # type: ignore[arg-type]
        pages = batch.block_table[0, :3].long()
        key, value = (
            cache[pages].flatten(0, 1)[:40].transpose(0, 1).repeat_interleave(3, 0)[None]
            for cache in (batch.key_cache, batch.value_cache)
        )
        query = batch.query.transpose(0, 1)[None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=phase == "prefill", scale=batch.scale
        )
        assert torch.equal(torch_paged(batch), expected[0].transpose(0, 1))


def test_a_token_without_query_rows_changes_nothing(setup: tuple[Kernel, Phase]) -> None:
    """A padding row may also have no query token at all."""
    kernel, phase = setup
    batch = make_batch(Case(lens=(20, 18)), phase)
    starts = batch.query_start_loc
    padded = changed(
        batch,
        seq_lens=torch.cat([batch.seq_lens[:1], torch.zeros(1, dtype=torch.int32), batch.seq_lens[1:]]),
        query_start_loc=torch.cat([starts[:2], starts[1:]]),
        block_table=torch.cat(
            [batch.block_table[:1], torch.full_like(batch.block_table[:1], -1), batch.block_table[1:]]
        ),
    )
    torch.testing.assert_close(kernel(padded), kernel(batch))


def test_every_call_counts_one_launch(setup: tuple[Kernel, Phase]) -> None:
    kernel, phase = setup
    trace = ExecutionTrace()
    with tracing(trace, 4, phase):
        kernel(make_batch(Case(lens=(20, 18)), phase))
    assert trace.launched == {(kernel.name, 4, phase): 1}
    assert trace.entered == {(kernel.name, 4, phase): 1}


class TestUnsupported:
    def test_supported_batches_have_no_reasons(self, setup: tuple[Kernel, Phase]) -> None:
        kernel, phase = setup
        assert kernel.unsupported(make_batch(Case(lens=(20, 18)), phase)) == []

    def test_phase(self) -> None:
        assert triton_decode.unsupported(make_batch(Case(lens=(9,)), "prefill")) == [
            "triton_decode has no prefill phase"
        ]
        assert triton_prefill.unsupported(make_batch(Case(), "decode")) == ["triton_prefill has no decode phase"]

    @pytest.mark.parametrize("kernel", [triton_decode, triton_prefill], ids=lambda k: k.name)
    def test_no_gpu_and_no_interpreter(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_common, "interpreting", lambda: False)
        (phase,) = kernel.phases
        assert kernel.unsupported(make_batch(Case(lens=(9,)), phase)) == ["Triton needs a GPU or TRITON_INTERPRET=1"]

    @pytest.mark.parametrize(
        ("case", "changes", "reason"),
        [
            (Case(head_dim=513), {}, "head_dim must be at most 512, got 513"),
            (Case(head_dim_v=600), {}, "value head_dim must be at most 512, got 600"),
            (Case(dtype=FP16, kv_dtype=FP32), {}, "key_cache must be torch.float16, fp8_e4m3fn"),
            (Case(), {"query": torch.zeros(6, 6, 64, dtype=torch.float64)}, "query dtype must be fp32, fp16 or bf16"),
            (Case(), {"query": torch.zeros(6, 7, 64)}, "7 query heads are no multiple of 2 KV heads"),
            (Case(), {"query": torch.zeros(6, 64, 6).mT}, "query's last dimension must be contiguous, got stride 6"),
            (
                Case(),
                {"k_scale": torch.ones(3)},
                "k_scale must have shape [] or [2] or [13, 16, 2], got [3]",
            ),
        ],
        ids=["head-dim", "value-dim", "cache-dtype", "query-dtype", "heads", "query-stride", "scale-shape"],
    )
    def test_limits_are_declared(self, case: Case, changes: dict[str, object], reason: str) -> None:
        batch = changed(make_batch(case, "decode"), **changes)
        assert any(found.startswith(reason) for found in triton_decode.unsupported(batch))
