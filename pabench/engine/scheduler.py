"""Who computes what in the next step: decodes first, then prompt chunks, under one token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Pending:
    """Tokens of one sequence that are known and not yet computed."""

    seq_id: int
    tokens: deque[int] = field(default_factory=deque)


class Scheduler:
    """Mixes decode, prefill and chunked prefill: at most ``token_budget`` tokens and ``max_seqs`` sequences a step."""

    def __init__(self, *, token_budget: int = 256, max_seqs: int = 64) -> None:
        if token_budget < 1 or max_seqs < 1:
            raise ValueError(f"token_budget and max_seqs must be at least 1, got {token_budget} and {max_seqs}")
        self.token_budget = token_budget
        self.max_seqs = max_seqs
        self._pending: dict[int, Pending] = {}

    def add(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Queue more tokens of a sequence."""
        self._pending.setdefault(seq_id, Pending(seq_id)).tokens.extend(tokens)

    def drop(self, seq_id: int) -> None:
        """Forget what is queued for a sequence, if anything."""
        self._pending.pop(seq_id, None)

    @property
    def idle(self) -> bool:
        return not self._pending

    def schedule(self) -> Mapping[int, tuple[int, ...]]:
        """Take the next step's tokens: sequence id → its tokens, single tokens (decodes) before longer chunks."""
        ready = sorted(self._pending.values(), key=lambda p: len(p.tokens) > 1)[: self.max_seqs]
        budget = self.token_budget
        step: dict[int, tuple[int, ...]] = {}
        for pending in ready:
            count = min(budget, len(pending.tokens))
            if count == 0:
                break
            step[pending.seq_id] = tuple(pending.tokens.popleft() for _ in range(count))
            budget -= count
            if not pending.tokens:
                del self._pending[pending.seq_id]
        # A sequence left out goes first among its kind next time: dicts keep insertion order, so requeue the served.
        for seq_id in step:
            if seq_id in self._pending:
                self._pending[seq_id] = self._pending.pop(seq_id)
        return step
