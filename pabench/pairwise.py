"""Few rows instead of a full product: any two values of two factors meet at least once.

The greedy covering array of AETG (Cohen et al., 1997).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def covering_rows(factors: Sequence[Sequence[Any]], seed: int = 0, candidates: int = 20) -> list[tuple[Any, ...]]:
    """Rows in which every pair of values of two factors occurs; the same for the same arguments."""
    rng = random.Random(seed)
    places = list(combinations(range(len(factors)), 2))
    open_pairs = {(i, j, a, b) for i, j in places for a in range(len(factors[i])) for b in range(len(factors[j]))}
    rows = []
    while open_pairs:
        i, j, a, b = min(open_pairs)
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(candidates):
            row = [rng.randrange(len(f)) for f in factors]
            row[i], row[j] = a, b
            gain = sum((m, n, row[m], row[n]) in open_pairs for m, n in places)
            best = max(best, (gain, row), key=lambda x: x[0])
        row = best[1]
        open_pairs -= {(m, n, row[m], row[n]) for m, n in places}
        rows.append(tuple(f[k] for f, k in zip(factors, row, strict=True)))
    return rows
