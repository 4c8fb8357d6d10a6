"""The probes of the kernel check: names and what each sees that others are blind to. No torch; how they are made is in
``pabench.checks.kernel.probes``."""

from __future__ import annotations

PROBES: dict[str, str] = {
    "count": "q = 0 and a ±1 code in V: counts the slots that were read",
    "iid": "N(0, 1), with plausible numbers where nothing may be read",
    "two_level": "half the keys at a fixed score: a scale wrong by 1 % shows",
    "poison": "N(0, 1), with NaN where nothing may be read",
    "needle": "one key answers: the first, the last, or one at a block's edge",
    "fingerprint": "one key answers; its value names what was read",
}
