"""Under which condition does something fail? Said in words that separate what fails from what passes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_VALUES = 3  # a condition that lists more of them says nothing
MAX_PARTS = 3
MODULI = (2, 4, 8, 16, 32, 64)
Facts = Mapping[str, str | int]


@dataclass(frozen=True)
class _Rule:
    text: str
    holds: Callable[[Facts], bool]


def condition(failed: Sequence[Facts], passed: Sequence[Facts]) -> str | None:
    """Up to three rules that hold for all of ``failed`` and, together, for as few of ``passed`` as can be.

    Facts have the same keys everywhere: text is compared, numbers are bounded too, and "length" also by its residue.
    None where nothing separates them, or nothing passed.
    """
    if not failed or not passed:
        return None
    left: list[Facts] = list(passed)
    parts: list[str] = []
    while left and len(parts) < MAX_PARTS:
        best = min(_rules(failed, left), key=lambda r: sum(r.holds(f) for f in left), default=None)
        if best is None or (kept := [f for f in left if best.holds(f)]) == left:
            break
        if parts and len(kept) > 0.7 * len(left):  # it hardly says more
            break
        left, parts = kept, [*parts, best.text]
    if not parts:
        return None
    exact = "" if left else ", and everything there is wrong"
    return f"only where {' and '.join(parts)}{exact}"


def _rules(failed: Sequence[Facts], passed: Sequence[Facts]) -> Iterator[_Rule]:
    """Every single rule that holds for all of ``failed``; the plainer first, which wins a tie."""
    for name in failed[0]:
        values = {f[name] for f in failed}
        if len(values) <= MAX_VALUES:
            shown = " or ".join(sorted(map(str, values)))
            yield _Rule(f"{name} is {shown}", lambda f, name=name, values=values: f[name] in values)  # type: ignore[misc]
        numbers = [v for v in values if isinstance(v, int)]
        others = [v for f in passed if isinstance(v := f[name], int)]
        if len(numbers) < len(values) or not others:
            continue
        low, high = min(numbers), max(numbers)
        if low > min(others):
            yield _Rule(f"{name} is {low} or more", lambda f, name=name, low=low: int(f[name]) >= low)  # type: ignore[misc]
        if high < max(others):
            yield _Rule(f"{name} is {high} or less", lambda f, name=name, high=high: int(f[name]) <= high)  # type: ignore[misc]
        if low > min(others) and high < max(others):
            yield _Rule(
                f"{name} is {low} to {high}",
                lambda f, name=name, low=low, high=high: low <= int(f[name]) <= high,  # type: ignore[misc]
            )
        if name == "length" and len(values) > MAX_VALUES:
            yield from _residues(name, numbers)


def _residues(name: str, numbers: Sequence[int]) -> Iterator[_Rule]:
    for m in MODULI:
        rests = {n % m for n in numbers}
        if len(rests) == 1:
            (r,) = rests
            yield _Rule(f"{name} mod {m} is {r}", lambda f, m=m, r=r: int(f[name]) % m == r)  # type: ignore[misc]
        elif 0 not in rests and len(rests) > MAX_VALUES:
            yield _Rule(f"{name} is no multiple of {m}", lambda f, m=m: int(f[name]) % m != 0)  # type: ignore[misc]
