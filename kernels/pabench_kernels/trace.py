"""What really ran: entries and launches counted where they happen, per layer and phase.

Triton's own launch hooks do nothing under the interpreter, so each launcher counts for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Where = tuple[str, int, str]  # kernel name, layer, phase ("prefill", "decode" or "mixed")


@dataclass
class ExecutionTrace:
    """Counts of one judged case; ``selected`` is what dispatch chose, ``entered`` and ``launched`` what happened."""

    selected: Counter[Where] = field(default_factory=Counter)
    entered: Counter[Where] = field(default_factory=Counter)
    launched: Counter[Where] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Scope:
    trace: ExecutionTrace
    layer: int
    phase: str


# One dispatch at a time, and global on purpose: a context variable would not see a kernel that works in another thread.
_scope: _Scope | None = None
_watcher: Callable[[int, str], None] | None = None


@contextmanager
def watched(watcher: Callable[[int, str], None]) -> Iterator[None]:
    """Call ``watcher(layer, phase)`` before each kernel call inside the block."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


@contextmanager
def tracing(trace: ExecutionTrace, layer: int, phase: str) -> Iterator[None]:
    """Count entries and launches inside the block into ``trace``, under this layer and phase."""
    global _scope
    if _watcher is not None:
        _watcher(layer, phase)
    before, _scope = _scope, _Scope(trace, layer, phase)
    try:
        yield
    finally:
        _scope = before


def note_entry(name: str) -> None:
    """A registered kernel was entered, by dispatch or by another kernel."""
    if (scope := _scope) is not None:
        scope.trace.entered[name, scope.layer, scope.phase] += 1


def count_launch(name: str) -> None:
    """The launcher of kernel ``name`` launches now."""
    if (scope := _scope) is not None:
        scope.trace.launched[name, scope.layer, scope.phase] += 1
