"""Launchers never wait for the device: run on tensors without data, where every look at a value raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pabench_kernels import triton_cache_write, triton_common, triton_split
from pabench_kernels.contract import Kernel, PagedBatch, Phase
from pabench_kernels.torch_paged import torch_paged
from pabench_kernels.triton_decode import triton_decode
from pabench_kernels.triton_prefill import triton_prefill
from pabench_kernels.triton_unified import triton_unified
from tests.kernels.cases import BF16, E4M3, Case, make_batch

LAUNCHERS: dict[str, tuple[Kernel, Phase]] = {
    "triton_decode": (triton_decode, "decode"),
    "triton_prefill": (triton_prefill, "prefill"),
    "triton_split": (triton_split.triton_split, "decode"),
    "triton_unified-decode": (triton_unified, "decode"),
    "triton_unified-prefill": (triton_unified, "prefill"),
}
EVERYTHING = Case(
    lens=(70, 0, 9), dtype=BF16, kv_dtype=E4M3, scales="token", alibi=True, cap=8.0, sinks=True, window=21
)


class Recorder:
    """Stands for a Triton function: keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return lambda **arguments: self.launches.append(arguments)


def without_data(batch: PagedBatch) -> PagedBatch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tensors = {name: x.to("meta") for name, x in values.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(batch, **tensors)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(triton_common, "attention_kernel", found)
    monkeypatch.setattr(triton_split, "attention_kernel", found)
    monkeypatch.setattr(triton_split, "merge_kernel", found)
    monkeypatch.setattr(triton_cache_write, "cache_write_kernel", found)
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_attention_launchers_read_no_value(launcher: str, recorder: Recorder) -> None:
    kernel, phase = LAUNCHERS[launcher]
    batch = without_data(make_batch(EVERYTHING, phase))
    out, lse = kernel.fn(batch, return_lse=True)
    assert out.shape == (batch.num_tokens, batch.num_q_heads, batch.head_dim_v)
    assert lse.shape == out.shape[:2]
    assert len(recorder.launches) == (2 if kernel.name == "triton_split" else 1)


def test_the_cache_write_reads_no_value(recorder: Recorder) -> None:
    batch = without_data(make_batch(EVERYTHING, "decode"))
    new = torch.empty(3, batch.num_kv_heads, batch.head_dim, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    triton_cache_write.triton_reshape_and_cache(
        new, new, batch.key_cache, batch.value_cache, slots, batch.k_scale, batch.v_scale
    )
    assert len(recorder.launches) == 1


def test_a_launcher_that_does_would_be_seen() -> None:
    """Negative control: torch_paged reads lengths on the host."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch_paged.fn(without_data(make_batch(EVERYTHING, "decode")))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launch_is_planned_from_shapes_and_host_copies_alone(launcher: str, recorder: Recorder) -> None:
    """So that a captured CUDA graph stays right when lengths and tables change under it."""
    kernel, phase = LAUNCHERS[launcher]
    batch = make_batch(EVERYTHING, phase)
    emptied = dataclasses.replace(
        batch, seq_lens=torch.zeros_like(batch.seq_lens), block_table=torch.full_like(batch.block_table, -1)
    )
    kernel.fn(batch)
    kernel.fn(emptied)
    half = len(recorder.launches) // 2
    for before, after in zip(recorder.launches[:half], recorder.launches[half:], strict=True):
        numbers = [{k: v for k, v in launch.items() if not isinstance(v, torch.Tensor)} for launch in (before, after)]
        assert numbers[0] == numbers[1]
