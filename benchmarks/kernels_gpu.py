"""Our kernels on a GPU: first whether they are right, then how near a decode step comes to copy bandwidth.

    python benchmarks/kernels_gpu.py [--json FILE] [--budget-s 240]     (exit 3 where there is no GPU)
    python benchmarks/kernels_gpu.py --dry-run-cpu                      the same flow, tiny, under the interpreter

Decode of batch 1, 16 and 128 × 1k, 8k and 64k tokens, heads of Llama-3-8B, bf16, block 16, against torch's SDPA and
FlexAttention on a contiguous cache and every registered kernel whose library is installed. Medians of interleaved calls
by CUDA events with a cold L2. A kernel whose output is off the fp64 oracle gets no figure and the exit code is 1. What
the budget leaves no time for is dropped, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "kernels"), str(Path(__file__).resolve().parents[1])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the kernel check asks for deterministic operators
DRY = "--dry-run-cpu" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
else:
    os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
from gpu_timing import Budget, OutOfTimeError, Timer, copy_gb_per_s  # noqa: E402
from gpu_workload import Geometry, Workload, contiguous, in_fp8, make_batch, worst_ratio  # noqa: E402

from pabench_kernels.contract import PagedBatch  # noqa: E402
from pabench_kernels.registry import UnknownKernelError, get_kernel, kernel_names  # noqa: E402

OURS = "triton_"
NO_CONTESTANT = {"torch_paged", "cpu_native", "flex_paged"}  # gather, run on the CPU, or hold all scores
PRECISIONS = (  # as asked for, query dtype, cache dtype
    *(("fp32",) * 3, ("fp16",) * 3, ("bf16",) * 3),
    *(("fp8", "bf16", "fp8_e4m3"), ("int8", "bf16", "int8")),
)
WORKLOADS = tuple(  # what tells most comes first: the budget cuts the end off
    Workload(*size)
    for size in (
        *((16, 8192), (1, 8192), (128, 1024), (1, 65536), (16, 65536), (128, 8192)),
        *((16, 1024), (1, 1024), (128, 65536)),
    )
)


@dataclass(frozen=True)
class Scale:
    """How large everything is: on a GPU, or in the dry run."""

    device: str = "cuda"
    workloads: tuple[Workload, ...] = WORKLOADS
    geometry: Geometry = field(default_factory=Geometry)
    cases: int = 40  # of each kernel × precision
    rounds: int = 40
    seconds: float = 2.0  # of timing per workload
    copy_bytes: int = 1 << 30


DRY_SCALE = Scale("cpu", (Workload(2, 48), Workload(1, 64)), Geometry(4, 2, 32), 2, 3, 1.0, 1 << 20)


@dataclass
class Found:
    """All that was measured so far; printed also where time runs out."""

    correctness: dict[str, dict[str, int]] = field(default_factory=dict)  # "kernel dtype/kv" → status → cases
    wrong: list[str] = field(default_factory=list)
    copy_gb_per_s: list[float] = field(default_factory=list)
    verified: int = 0  # outputs of contestants held against the oracle
    samples: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def check(found: Found, scale: Scale, budget: Budget, reserve_s: float) -> None:
    """The tool's own kernel check on this device, precisions in turn, until only ``reserve_s`` seconds are left."""
    try:
        from pabench.cases import Precision
        from pabench.checks.kernel.case import judge_kernel
        from pabench.checks.kernel.plan import plan_trials
        from pabench.checks.kernel.probes import PROBES
        from pabench.checks.kernel.shapes import shapes
        from pabench_kernels.request import parse_request
    except ImportError as error:  # the figures below need torch and triton only
        found.dropped.append(f"the kernel check: {error}")
        return
    requests = [parse_request(name) for name in kernel_names() if name.startswith(OURS)]
    precisions = [Precision(*names) for names in PRECISIONS]
    trials = plan_trials(shapes(), tuple(PROBES), precisions, count=scale.cases, seed=0, device=scale.device)
    in_turn = [t for i in range(scale.cases) for t in trials[i :: scale.cases]]
    for done, trial in enumerate(in_turn):
        if budget.left() < reserve_s:
            found.dropped.append(f"{len(in_turn) - done} of {len(in_turn)} correctness trials")
            return
        for request in requests:
            key = f"{request.name} {trial.precision.dtype}/{trial.precision.kv_dtype}"
            try:
                outcome = judge_kernel(trial, request)
                status, message = outcome.status, outcome.message
            except OutOfTimeError:
                raise
            except Exception as error:
                status, message = "ERROR", f"{type(error).__name__}: {error}"
            counts = found.correctness.setdefault(key, {})
            counts[status] = counts.get(status, 0) + 1
            if status in ("FAIL", "ERROR"):
                found.wrong.append(f"{key} {trial.shape.batch_spec} {trial.probe}: {message}")
                print(f"  {status} {found.wrong[-1]}", flush=True)
        trial.drop()


def contestants(batch: PagedBatch, fp8: PagedBatch, dry: bool, found: Found) -> dict[str, Callable[[], torch.Tensor]]:
    """name → call, by kernel and cache dtype; a planning step is done here and not timed."""
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name in kernel_names():
        if name in NO_CONTESTANT:
            continue
        try:
            kernel = get_kernel(name)
        except UnknownKernelError as error:
            _once(found.dropped, f"{name}: {error}")
            continue
        for suffix, paged in (("", batch), (" fp8", fp8)):
            if "decode" not in kernel.phases or kernel.unsupported(paged):
                continue
            plan = getattr(kernel, "plan", None)
            state = None if plan is None else plan(paged)
            keywords = {} if state is None else {"state": state}
            calls[name + suffix] = lambda k=kernel, b=paged, kw=keywords: k(b, **kw)
    key, value = contiguous(batch)
    query = batch.query[:, :, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls["sdpa contiguous"] = lambda: sdpa(query, key, value, scale=batch.scale, enable_gqa=True)[:, :, 0]
    flex = _flex(dry)
    calls["flex contiguous"] = lambda: flex(query, key, value, scale=batch.scale, enable_gqa=True)[:, :, 0]
    return calls


_compiled: list[Callable[..., Any]] = []


def _flex(dry: bool) -> Callable[..., Any]:
    """FlexAttention, compiled once; uncompiled in the dry run, where compiling would cost more than all the rest."""
    from torch.nn.attention.flex_attention import flex_attention

    if not _compiled:
        _compiled.append(flex_attention if dry else torch.compile(flex_attention))
    return _compiled[0]


def measure(found: Found, scale: Scale, timer: Timer, budget: Budget) -> None:
    """Decode bandwidth of every workload; each contestant is checked on the very batch that it is timed on."""
    warm_up_s: dict[str, float] = {}
    for n, workload in enumerate(scale.workloads):
        if budget.left() < 5 + 2 * scale.seconds:
            found.dropped.append(f"no time for {', '.join(w.name for w in scale.workloads[n:])}")
            return
        need = workload.need_bytes(scale.geometry)
        if scale.device == "cuda" and (free := torch.cuda.mem_get_info()[0]) < need:
            found.dropped.append(f"{workload.name}: needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
            continue
        try:
            batch = make_batch(workload, scale.geometry, torch.bfloat16, scale.device, seed=n)
            fp8 = in_fp8(batch)
            ready: dict[str, Callable[[], object]] = {}
            for name, call in contestants(batch, fp8, scale.device == "cpu", found).items():
                if warm_up_s.get(name, 0.0) > budget.left() - 10:
                    found.dropped.append(f"{workload.name}: no time to compile {name}")
                    continue
                started = time.monotonic()
                try:
                    ratio = worst_ratio(fp8 if name.endswith(" fp8") else batch, call())
                except (OutOfTimeError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    found.dropped.append(f"{workload.name}: {name} raised {type(error).__name__}: {_short(error)}")
                    continue
                warm_up_s[name] = time.monotonic() - started
                found.verified += 1
                if ratio > 1:
                    found.wrong.append(f"{name} on {workload.name}: {ratio:.3g} × what is tolerated; not timed")
                    print(f"  WRONG {found.wrong[-1]}", flush=True)
                else:
                    ready[name] = call
            took = timer.interleaved(ready, rounds=scale.rounds, seconds=scale.seconds)
        except torch.OutOfMemoryError:
            found.dropped.append(f"{workload.name}: out of memory")
            continue
        finally:
            batch = fp8 = ready = call = None  # type: ignore[assignment]
            if scale.device == "cuda":
                torch.cuda.empty_cache()
        for name, us in took.items():
            nbytes = workload.kv_bytes(scale.geometry, 1 if name.endswith(" fp8") else 2)
            found.samples.append({"workload": workload.name, "kernel": name, "bytes": nbytes, "us": us})


def show(found: Found, dry: bool) -> None:
    """Correctness, what was dropped, and last the table."""
    for key, counts in found.correctness.items():
        print(f"  {key:32} {', '.join(f'{n} {status}' for status, n in sorted(counts.items()))}")
    for line in found.dropped:
        print(f"  dropped: {line}")
    if not found.samples:
        return
    copy = statistics.median(found.copy_gb_per_s)
    print(f"copy bandwidth {copy:.0f} GB/s (read and write counted){'; dry run: figures mean nothing' if dry else ''}")
    print(f"{'batch x context':17}{'kernel':24}{'median us':>11}{'p05-p95':>19}{'GB/s':>7}{'of copy':>9}")
    for s in found.samples:
        us = sorted(s["us"])
        median = statistics.median(us)
        spread = f"{us[round(0.05 * (len(us) - 1))]:.1f}-{us[round(0.95 * (len(us) - 1))]:.1f}"
        rate = s["bytes"] / median / 1e3
        print(f"{s['workload']:17}{s['kernel']:24}{median:11.1f}{spread:>19}{rate:7.0f}{rate / copy:9.0%}")


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def _short(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw samples and everything else")
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds until it ends")
    parser.add_argument("--dry-run-cpu", action="store_true", help="the whole flow, tiny, without a GPU")
    options = parser.parse_args()
    budget = Budget(options.budget_s - 5)
    if not DRY and not torch.cuda.is_available():
        print("torch sees no GPU, so there is nothing to measure; --dry-run-cpu goes through the motions without one")
        return 3
    scale = DRY_SCALE if DRY else Scale()
    signal.signal(signal.SIGALRM, _out_of_time)  # a compile may take longer than what is left
    signal.setitimer(signal.ITIMER_REAL, max(budget.left(), 0.01))
    environment = {
        "device": "cpu" if DRY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "dry_run": DRY,
    }
    print(" · ".join(f"{k} {v}" for k, v in environment.items()), flush=True)
    found = Found()
    try:
        timer = Timer(scale.device)
        found.copy_gb_per_s = copy_gb_per_s(timer, scale.device, scale.copy_bytes)
        check(found, scale, budget, reserve_s=0.6 * budget.left())
        measure(found, scale, timer, budget)
    except OutOfTimeError:
        found.dropped.append("time ran out; what is missing below was not measured")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    show(found, DRY)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment, **vars(found)}, indent=1))
    judged = found.verified + sum(n for c in found.correctness.values() for s, n in c.items() if s != "SKIPPED")
    print(f"{judged} outputs judged, {len(found.wrong)} wrong")
    return 1 if found.wrong else 0 if judged else 3


if __name__ == "__main__":
    sys.exit(main())
