"""GPUs that kernels are compiled for: their names, what of them a kernel may have to know, and which one a batch is on.

Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pabench_kernels.contract import PagedBatch

KIB = 1 << 10


@dataclass(frozen=True)
class Target:
    """One GPU architecture. ``shared_bytes`` is the most shared memory (AMD: LDS) that one block may ask for."""

    name: str  # "sm_90", "gfx942": what `--target` takes and `target_of` gives
    backend: Literal["cuda", "hip"]
    arch: int | str  # as Triton's GPUTarget takes it
    warp_size: int
    shared_bytes: int
    processors: int  # multiprocessors or compute units of the first data-centre product; launchers size grids by it
    capability: tuple[int, int]


# Shared memory: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability" ("maximum amount of
# shared memory per thread block", reached by opt-in); LDS: AMD CDNA 3 and CDNA 4 instruction set guides.
TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 163 * KIB, 108, (8, 0)),
        Target("sm_89", "cuda", 89, 32, 99 * KIB, 142, (8, 9)),
        Target("sm_90", "cuda", 90, 32, 227 * KIB, 132, (9, 0)),
        Target("sm_100", "cuda", 100, 32, 227 * KIB, 148, (10, 0)),
        Target("sm_120", "cuda", 120, 32, 99 * KIB, 188, (12, 0)),
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB, 304, (9, 4)),
        Target("gfx950", "hip", "gfx950", 64, 160 * KIB, 256, (9, 5)),
    )
}


class UnknownTargetError(LookupError):
    """No target of that name. The text is for the user."""


def find_target(name: str) -> Target:
    """The target called ``name``. Raises ``UnknownTargetError`` with a hint."""
    if name not in TARGETS:
        close = get_close_matches(name, TARGETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(c) for c in close)}?" if close else f"known: {', '.join(TARGETS)}"
        raise UnknownTargetError(f"unknown target '{name}'; {hint}")
    return TARGETS[name]


def target_of(batch: PagedBatch) -> str | None:
    """Architecture that a launch on this batch is compiled for ("sm_90", "gfx942"); None on the CPU.

    This is how ``unsupported(batch)`` declares a limit of one GPU. It works on a GPU, and while kernels are compiled
    for GPUs that are not there.
    """
    if batch.query.device.type == "cpu":
        return None
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return str(target.arch) if target.backend == "hip" else f"sm_{target.arch}"
