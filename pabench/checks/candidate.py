"""The candidate's side of a model case: one packed run, teacher-forced; a text that parts is forked to run free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pabench.checks.memory import plan_pool
from pabench.checks.shadow import ShadowObserver
from pabench.checks.tokens import Divergence, FreeRun, until_stop
from pabench.engine.attention_hook import Observer
from pabench.engine.engine import PagedEngine
from pabench.reference.logits import LogitStats, compare_rows
from pabench.reference.run import ReferenceRun
from pabench_kernels.dispatch import Dispatcher


class RefusedError(RuntimeError):
    """The kernel under test refused every call, so that going on would judge only its stand-in."""


@dataclass
class CandidateRun:
    """What the paged path gave, held against ``reference`` position by position; no logits are kept.

    Raises ``CannotJudge`` when made if its block pool does not fit into the device's memory.
    """

    reference: ReferenceRun
    dispatcher: Dispatcher
    block_size: int
    token_budget: int
    stop_tokens: frozenset[int]
    go_on_after_refusal: bool
    progress: Callable[[str], None]
    observers: tuple[Observer, ...] = ()  # beside shadow mode's
    stats: LogitStats = field(default_factory=LogitStats)
    decode_stats: LogitStats = field(default_factory=LogitStats)
    oracle_stats: LogitStats = field(default_factory=LogitStats)
    divergences: dict[int, Divergence] = field(default_factory=dict)
    _free_text: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path, prompts = self.reference.path, self.reference.prompts
        self.num_tokens = len(self.reference.tokens[0])
        kv_dtype = path.kv_dtype or path.loaded.model.dtype
        self.shadow = ShadowObserver(kv_dtype, path.scales)
        blocks_each = [-(-(len(p) + self.num_tokens) // self.block_size) for p in prompts]
        num_blocks = 2 * sum(blocks_each)  # each text may be forked once
        self.memory = plan_pool(
            path.loaded,
            num_blocks=num_blocks,
            block_size=self.block_size,
            kv_dtype=kv_dtype,
            token_budget=self.token_budget,
            kept_tokens=sum(len(p) + self.num_tokens for p in prompts),
            kept_dtype=self.shadow.kept_dtype,
        )
        self.engine = PagedEngine(
            path.loaded,
            self.dispatcher,
            block_size=self.block_size,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
            scales=path.scales,
            token_budget=self.token_budget,
            observers=(self.shadow, *self.observers),
            finite_pool=any(k.wants_finite_pool for k in self.dispatcher.request.kernels.values()),
        )

    def run(self) -> None:
        """Teacher-force every prompt, prefill and decode. Raises ``RefusedError``; what a kernel raises passes."""
        prompts, engine = self.reference.prompts, self.engine
        main: dict[int, int] = {}  # sequence -> prompt
        forks: dict[int, int] = {}
        last_fork_position: dict[int, int] = {}
        for p, prompt in enumerate(prompts):
            seq_id = engine.add(len(prompt) + self.num_tokens)
            main[seq_id] = p
            engine.scheduler.add(seq_id, prompt)

        def wanted(seq_id: int, position: int) -> bool:
            if seq_id in forks:
                return position == last_fork_position[seq_id]
            p = main[seq_id]
            return position in self.reference.kept[p] or position >= len(prompts[p])

        def run_on(seq_id: int, p: int, position: int, token: int) -> None:
            """Queue the candidate's own next token on its fork, unless the text ends here."""
            text = self._free_text[p]
            text.append(token)
            if token not in self.stop_tokens and len(text) < self.num_tokens:
                last_fork_position[seq_id] = position + 1
                engine.scheduler.add(seq_id, [token])

        for n, rows in enumerate(engine.run(wanted)):
            self.progress(f"paged, step {n + 1}")
            for seq_id, position, row in rows:
                if seq_id in forks:
                    run_on(seq_id, forks[seq_id], position, int(row.argmax()))
                    continue
                p = main[seq_id]
                index = position - len(prompts[p]) + 1
                self._compare(p, position, row, decode=index > 0)
                if index < 0:
                    continue
                token, own = self.reference.tokens[p][index], int(row.argmax())
                if own != token and p not in self.divergences:
                    self._diverge(p, index, position, token, own)
                    if index < self.num_tokens - 1:
                        child = engine.fork(seq_id)
                        forks[child] = p
                        run_on(child, p, position, own)
                    else:
                        self._free_text[p].append(own)
                if index < self.num_tokens - 1:
                    engine.scheduler.add(seq_id, [token])
            if self.dispatcher.refused_everything and not self.go_on_after_refusal:
                raise RefusedError

    def _compare(self, p: int, position: int, row: Tensor, *, decode: bool) -> None:
        target = self.reference.target(p, position)
        stats = compare_rows(self.reference.spool.get((p, position)), row, target)
        self.stats.add(stats)
        if decode:
            self.decode_stats.add(stats)
        if self.reference.oracle is not None:
            self.oracle_stats.add(compare_rows(self.reference.oracle.get((p, position)), row, target))

    def _diverge(self, p: int, index: int, position: int, token: int, own: int) -> None:
        logits = self.reference.spool.get((p, position)).double()
        self.divergences[p] = Divergence(p, index, token, own, float(logits[token] - logits[own]))
        self._free_text[p] = list(self.reference.tokens[p][:index])

    @torch.inference_mode()
    def free_runs(self) -> list[FreeRun]:
        """Both texts of each prompt; a text that parted is scored by the dense path, teacher-forced on it."""
        runs = []
        for p, tokens in enumerate(self.reference.tokens):
            reference = until_stop(tokens, self.stop_tokens)
            divergence = self.divergences.get(p)
            if divergence is None or divergence.index > len(reference):
                runs.append(FreeRun(reference, reference, None))
                continue
            text = self._free_text[p]
            later = self._later_margin(p, text, divergence.index)
            runs.append(FreeRun(reference, until_stop(text, self.stop_tokens), divergence, later))
        return runs

    def _later_margin(self, p: int, text: list[int], index: int) -> float:
        """Largest margin by which the dense path would have preferred another token after the divergence."""
        prompt = self.reference.prompts[p]
        begin = len(prompt) + index  # the first position after the diverging token was fed
        whole = [*prompt, *text]
        worst = 0.0
        positions = range(begin, len(whole) - 1)
        if not positions:
            return worst
        self.progress(f"dense path on the candidate's own text, prompt {p + 1}")
        for position, row in self.reference.path.whole(whole[:-1], positions):
            worst = max(worst, float(row.max()) - float(row[whole[position + 1]]))
        return worst
