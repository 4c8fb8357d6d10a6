"""The paged engine: prefill, insert, decode, free; generate and score. One model, one pool, one kernel request."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pabench.engine.attention_hook import HOOK_NAME, Attend, Observer, attention_implementation, paged_forward
from pabench.engine.block_manager import BlockManager, OutOfBlocksError
from pabench.engine.kv_cache import KVScales, PagedKVCache
from pabench.engine.scheduler import Scheduler
from pabench.engine.step import Work, build_step
from pabench.errors import CannotJudge
from pabench.models.load import LoadedModel


class PagedEngine:
    """Runs ``model`` over a paged KV cache through ``attend`` (a Dispatcher, or any function of batch and layer).

    ``kv_dtype`` may be the model's own dtype or fp8; fp8 needs ``scales``. Sequences are known by the integer that
    ``prefill`` returns. Raises ``CannotJudge`` for a sequence that the model's length or the pool cannot hold.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attend: Attend,
        *,
        block_size: int = 16,
        num_blocks: int = 256,
        kv_dtype: torch.dtype | None = None,
        scales: KVScales | None = None,
        token_budget: int = 256,
        observers: Sequence[Observer] = (),
        finite_pool: bool = False,
    ) -> None:
        self.loaded = loaded
        self.attend = attend
        self.observers = tuple(observers)
        self.blocks = BlockManager(num_blocks, block_size)
        self.pool = PagedKVCache(
            loaded.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_dtype or loaded.model.dtype,
            device=loaded.model.device,
            scales=scales,
            finite=finite_pool,
        )
        self.scheduler = Scheduler(token_budget=token_budget)
        self._ids = itertools.count()
        self._inserted: dict[int, int] = {}  # sequence -> its last token, whose K/V the next decode step writes
        self._cache_argument = cache_argument(loaded.model)

    def add(self, num_tokens_ahead: int = 0) -> int:
        """A new empty sequence, refused if ``num_tokens_ahead`` tokens can never fit."""
        limit = self.loaded.geometry.max_length
        if num_tokens_ahead > limit:
            raise CannotJudge(
                f"{num_tokens_ahead} tokens exceed the model's length of {limit}; "
                "use a shorter prompt or a smaller --max-new-tokens"
            )
        capacity = self.blocks.num_blocks * self.blocks.block_size
        if num_tokens_ahead > capacity:
            raise CannotJudge(
                f"{num_tokens_ahead} tokens exceed the block pool of {self.blocks.num_blocks} × "
                f"{self.blocks.block_size} tokens; use more blocks or a shorter prompt"
            )
        seq_id = next(self._ids)
        self.blocks.allocate(seq_id)
        return seq_id

    def step(self, tokens: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Tensor:
        """Compute the next tokens of some sequences in one packed forward pass.

        ``tokens``: (sequence, its next token ids, offsets among them whose logits are wanted). Returns logits
        [number of wanted offsets, vocab], in that order. Raises ``OutOfBlocksError`` before anything is written.
        """
        self._reserve(tokens)
        work = []
        for seq_id, ids, logits_at in tokens:
            start = self.blocks.num_tokens(seq_id)
            self.pool.copy_blocks(self.blocks.append(seq_id, len(ids)))
            work.append(Work(seq_id, tuple(ids), start, tuple(logits_at)))
        step = build_step(work, self.blocks, self.loaded.model.device)
        with attention_implementation(self.loaded.model, HOOK_NAME):
            return paged_forward(
                self.loaded.model,
                step,
                self.pool,
                self.attend,
                num_layers=self.loaded.geometry.num_layers,
                cache_argument=self._cache_argument,
                observers=self.observers,
            )

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same past, sharing its blocks until one of them writes."""
        child = next(self._ids)
        self.blocks.fork(seq_id, child)
        return child

    def run(self, wanted: Callable[[int, int], bool]) -> Iterator[list[tuple[int, int, Tensor]]]:
        """Compute all queued tokens, step by step; more may be queued between steps.

        ``wanted(sequence, position)`` says which logits are needed. Yields per step its (sequence, position of the
        token computed, logits [vocab]).
        """
        while not self.scheduler.idle:
            plan = self.scheduler.schedule()
            starts = {seq_id: self.blocks.num_tokens(seq_id) for seq_id in plan}
            work = [
                (seq_id, ids, [i for i in range(len(ids)) if wanted(seq_id, starts[seq_id] + i)])
                for seq_id, ids in plan.items()
            ]
            logits = self.step(work)
            where = [(seq_id, starts[seq_id] + i) for seq_id, _, offsets in work for i in offsets]
            yield [(seq_id, position, row) for (seq_id, position), row in zip(where, logits, strict=True)]

    def prefill(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Compute a prompt in chunks of the token budget. Returns (sequence, greedy next token)."""
        if not prompt:
            raise CannotJudge("an empty prompt cannot be computed; give at least one token")
        seq_id = self.add(len(prompt))
        next_token = -1
        try:
            for begin in range(0, len(prompt), self.scheduler.token_budget):
                chunk = prompt[begin : begin + self.scheduler.token_budget]
                next_token = int(self.step([(seq_id, chunk, [len(chunk) - 1])])[-1].argmax())
        except BaseException:
            self.free(seq_id)
            raise
        return seq_id, next_token

    def insert(self, seq_id: int, next_token: int) -> None:
        """Let a prefilled sequence take part in ``decode``, going on with ``next_token``."""
        self._inserted[seq_id] = next_token

    def decode(self) -> dict[int, int]:
        """One step for all inserted sequences. Returns sequence → greedy next token."""
        if not self._inserted:
            return {}
        logits = self.step([(seq_id, [token], [0]) for seq_id, token in self._inserted.items()])
        self._inserted = dict(zip(self._inserted, logits.argmax(-1).tolist(), strict=True))
        return dict(self._inserted)

    def free(self, seq_id: int) -> None:
        """Give the sequence's blocks back."""
        self._inserted.pop(seq_id, None)
        self.scheduler.drop(seq_id)
        self.blocks.free(seq_id)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_tokens: Iterable[int] = ()
    ) -> list[list[int]]:
        """Greedy continuations, the stop token not included.

        Prompts wait until the pool can hold them to their end, so that no sequence starves another half-way.
        """
        stops = frozenset(stop_tokens)
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = deque(enumerate(prompts))
        running: dict[int, int] = {}  # sequence -> index of its prompt
        last: dict[int, int] = {}  # sequence -> position of its last queued token

        def admit() -> None:
            reserved = sum(self.blocks.blocks_for(len(prompts[i]) + max_new_tokens) for i in running.values())
            while waiting:
                i, prompt = waiting[0]
                if not prompt:
                    raise CannotJudge(f"prompt {i} is empty; give at least one token")
                needed = self.blocks.blocks_for(len(prompt) + max_new_tokens)
                if running and reserved + needed > self.blocks.num_blocks:
                    return
                waiting.popleft()
                seq_id = self.add(len(prompt) + max_new_tokens)
                reserved += needed
                running[seq_id], last[seq_id] = i, len(prompt) - 1
                self.scheduler.add(seq_id, prompt)

        try:
            admit()
            for rows in self.run(lambda seq_id, position: position == last[seq_id]):
                for seq_id, _, logits in rows:
                    token, out = int(logits.argmax()), outputs[running[seq_id]]
                    if token not in stops and len(out) < max_new_tokens:
                        out.append(token)
                    if token in stops or len(out) >= max_new_tokens:
                        del running[seq_id]
                        self.free(seq_id)
                    else:
                        last[seq_id] += 1
                        self.scheduler.add(seq_id, [token])
                admit()
        finally:
            for seq_id in running:
                self.free(seq_id)
        return outputs

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Log-probability of each token given those before it: fp32 [len(tokens) − 1], in one prefill."""
        seq_id = self.add(len(tokens))
        parts: list[Tensor] = []
        self.scheduler.add(seq_id, tokens)
        try:
            for rows in self.run(lambda _, position: position < len(tokens) - 1):
                for _, position, logits in rows:
                    parts.append(logits.float().log_softmax(-1)[tokens[position + 1]])
        finally:
            self.free(seq_id)
        return torch.stack(parts) if parts else torch.empty(0)

    def _reserve(self, tokens: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        needed = sum(self.blocks.growth(seq_id, len(ids)) for seq_id, ids, _ in tokens)
        if needed > self.blocks.num_free:
            raise OutOfBlocksError(
                f"this step needs {needed} more blocks of {self.blocks.block_size} tokens, "
                f"{self.blocks.num_free} of {self.blocks.num_blocks} are free"
            )


def cache_argument(model: PreTrainedModel) -> str:
    """The forward's name for its cache: "cache" in transformers ≥ 5.24, "past_key_values" before."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
