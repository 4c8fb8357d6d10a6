"""All planted faults by name, and the honest kernel that they are planted in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pabench.selftest import given, inside, returned
from pabench.selftest.engine_faults import ENGINE_FAULTS
from pabench.selftest.mutant import Mutant
from pabench.selftest.plain import attention
from pabench_kernels.contract import PagedBatch


@dataclass(frozen=True)
class Entry:
    name: str
    what: str
    where: str  # "kernel" or "engine"
    fault: str
    names: frozenset[str]
    mandatory: bool


def plain(batch: PagedBatch, return_lse: bool = False) -> Any:
    """The honest kernel: plain torch, the whole contract."""
    out, lse = attention(batch)
    return (out, lse) if return_lse else out


def kernel_mutants(own: bool = True) -> tuple[Mutant, ...]:
    """Those around any kernel; with ``own`` also those inside the plain one."""
    return (*given.MUTANTS, *returned.MUTANTS, *(inside.MUTANTS if own else ()))


def described(own: bool = True) -> Iterator[Entry]:
    for m in kernel_mutants(own):
        yield Entry(m.name, m.what, "kernel", m.fault, m.names, m.mandatory)
    for f in ENGINE_FAULTS:
        yield Entry(f.name, f.what, "engine", f.fault, f.names, f.mandatory)
