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
    "sink": "the first token takes most of the weight, as in trained models",
    "captured": "queries, keys and values of SmolLM2 and Gemma 3 layers, replayed",
    "batching": "invariance: each sequence alone, in another order, and once more",
    "mutation": "invariance, bit for bit: other bytes where nothing may be read",
    "reuse": "invariance: after a larger and a smaller call, which a kernel may have planned for",
    "splits": "invariance: another number of splits, where the kernel has a parameter num_splits",
}
