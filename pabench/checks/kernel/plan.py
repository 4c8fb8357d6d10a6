"""Which probe meets which shape in which precision: few of all pairs, so that each shape and probe has its turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial
from pabench.checks.kernel.probes import PROBES
from pabench.checks.kernel.shapes import Shape

LONG = 16384  # from this length on a shape meets one probe per precision only
# what an invariance may depend on: phases, empty sequences, GQA, windows, every feature, quantised heads, long contexts
INVARIANCE_SHAPES = (
    *("plain-mixed", "plain-decode", "everything", "window-freed-blocks", "long-empty-short", "per-head-scales"),
    *("chunk-33-of-80", "gqa71-decode", "partition-edges", "sinks"),
)


def plan_trials(
    shapes: Sequence[Shape],
    probes: Sequence[str],
    precisions: Iterable[Precision],
    *,
    count: int,
    seed: int,
    device: str = "cpu",
    everything: bool = False,
) -> list[Trial]:
    """At most ``count`` (shape, probe) pairs per precision: captured calls, invariances, then every shape once, again
    with another probe, and so on. ``everything``: all pairs that there are, for shapes that somebody asked for.

    Each precision begins with other probes, so that over four dtypes a shape meets most of them.
    """
    by_kind: dict[str, list[str]] = {"content": [], "invariance": [], "captured": []}
    for name in probes:
        by_kind[PROBES[name].kind].append(name)
    ordinary = [s for s in shapes if s.capture is None]
    trials = []
    for p, precision in enumerate(precisions):
        pairs = [(s, name) for name in by_kind["captured"] for s in shapes if s.capture is not None]
        varied = [s for s in ordinary if everything or s.name in INVARIANCE_SHAPES]
        for n, name in enumerate(by_kind["invariance"]):
            pairs += [(s, name) for i, s in enumerate(varied) if everything or (i + n + p) % 2 == 0]
        content = by_kind["content"]
        pairs += [
            (shape, content[(i + 2 * p + turn) % len(content)])
            for turn in range(len(content))
            for i, shape in enumerate(ordinary)
            if everything or turn == 0 or max(length for _, length in shape.seqs) < LONG
        ]
        trials += [Trial(shape, probe, precision, seed, device) for shape, probe in pairs[:count]]
    return trials
