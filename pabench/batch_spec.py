"""Batch specs: "8q1s4k_2q2k" is 8 sequences of 1 query token over 4k tokens, then 2 of 2k query tokens. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

Seqs = tuple[tuple[int, int], ...]  # (query tokens, tokens in the cache with the query's included) of each sequence

_GROUP = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")


def parse_batch_spec(text: str) -> Seqs:
    """The sequences of a spec; a group without ``s`` has no past. Raises ``ValueError`` with a sentence."""
    seqs: list[tuple[int, int]] = []
    for group in text.split("_"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ValueError(f"batch spec must be like 8q1s4k_2q2k, got '{text}'")
        count, query, query_k, length, length_k = match.groups()
        q = int(query) * (1024 if query_k else 1)
        s = q if length is None else int(length) * (1024 if length_k else 1)
        if q < 1 or (s < q and (q, s) != (1, 0)):
            raise ValueError(f"a sequence must have 1 to all of its tokens as query, got '{group}' in '{text}'")
        seqs += [(q, s)] * int(count or 1)
    if not seqs:
        raise ValueError(f"batch spec '{text}' names no sequence")
    return tuple(seqs)


def format_batch_spec(seqs: Sequence[tuple[int, int]]) -> str:
    """The shortest spec of these sequences."""
    groups = []
    for (q, s), run in groupby(seqs):
        count = len(list(run))
        past = "" if q == s else f"s{_number(s)}"
        groups.append(f"{count if count > 1 else ''}q{_number(q)}{past}")
    return "_".join(groups)


def longest(batch_spec: str | None) -> int | None:
    """Most tokens of any sequence in a recorded spec ("name:8q1s4k" or "8q1s4k"); None where it is not one."""
    try:
        return max(s for _, s in parse_batch_spec((batch_spec or "").rpartition(":")[2]))
    except ValueError:
        return None


def _number(n: int) -> str:
    return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)
