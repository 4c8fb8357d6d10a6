"""JAX's Pallas paged-attention kernel for GPUs, interpreted on the CPU. JAX lives in a worker process of its own.

Source of the call: ``jax/experimental/pallas/ops/gpu/paged_attention.py``, release 0.10.2. The kernel has no softmax
scale, so the queries are multiplied by it here, in fp32, and rounded to their dtype once; and every entry of the block
table must name a block, so unused ones become 0. The pool is handed over as [Hkv, NB, BS, D], every slot of it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pabench_kernels.adapters.limits import Limits
from pabench_kernels.contract import PagedBatch, kernel
from pabench_kernels.trace import count_launch

NAME = "jax_pallas"
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LIMITS = Limits(
    NAME,
    "JAX's Pallas kernel",
    soft_cap=True,
    bidirectional=True,  # one query token sees every key either way
    scales=("tensor", "head"),
    cache_dtypes=NARROW,
    device="cpu",
)
_WORKER = "pabench_kernels.adapters.jax_worker"
_WAIT_S = 5


class JaxWorkerError(RuntimeError):
    """The worker process is gone, or JAX raised; the text says what."""


class _Worker:
    """The process that holds JAX. It ends when its input is closed, so it cannot outlive this one."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt ends it through its input, not in the middle of an answer
        )
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any]) -> Any:
        """What the worker answers. Raises ``JaxWorkerError``; after an interrupt the worker is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin, protocol=5)
            self._process.stdin.flush()
            status, answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.close()
            raise JaxWorkerError(f"the JAX process ended with exit status {self._process.returncode}") from error
        except BaseException:  # half a conversation is none
            self.close()
            raise
        if status != "ok":
            raise JaxWorkerError(answer)
        return answer

    def close(self) -> None:
        """End the process: politely, then not."""
        atexit.unregister(self.close)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@cache
def _started() -> list[_Worker]:
    return []


def worker() -> _Worker:
    """The one worker of this process, started at the first call and again if it died."""
    workers = _started()
    if not workers or not workers[0].alive:
        workers[:] = [_Worker()]
    return workers[0]


def _plan(batch: PagedBatch) -> dict[str, Any]:
    """The request, but for its cost: the pool laid out anew and everything as bytes."""
    scales = {}
    if batch.k_scale is not None or batch.v_scale is not None or batch.key_cache.dtype in NARROW:
        for name, scale in (("k_scale", batch.k_scale), ("v_scale", batch.v_scale)):
            given = torch.tensor(1.0) if scale is None else scale.float()
            scales[name] = _packed(given.expand(batch.num_kv_heads))
    return {
        "query": _packed(batch.query.float() * batch.scale),
        "key_pages": _packed(batch.key_cache.permute(2, 0, 1, 3)),
        "value_pages": _packed(batch.value_cache.permute(2, 0, 1, 3)),
        "block_table": _packed(batch.block_table.clamp(min=0)),
        "seq_lens": _packed(batch.seq_lens),
        "soft_cap": batch.logits_soft_cap,
        **scales,
    }


@kernel(NAME, phases=("decode",), unsupported=LIMITS.reasons, plan=_plan, wants_finite_pool=True)
def jax_pallas(batch: PagedBatch, *, state: dict[str, Any]) -> Tensor:
    """Decode attention: [T, Hq, D] in the query's dtype. Raises ``JaxWorkerError``."""
    count_launch(NAME)
    raw = bytearray(worker().ask(state))
    return torch.frombuffer(raw, dtype=torch.float32).view(batch.query.shape).to(batch.query.dtype)


def _packed(x: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype's name, shape, bytes): numpy has no name for bf16 and fp8."""
    raw = x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)  # expanded ones have stride 0
    return str(x.dtype).removeprefix("torch."), tuple(x.shape), raw.numpy().tobytes()
