"""Ways to compute the same texts that must not change the answer: alone, in another order, in chunks, from a shared
prefix, in blocks that were used before. Each is a short teacher-forced run of the paged engine in shadow mode.

Attention is judged call by call against the oracle, because a model's dense layers are not batch-invariant bit for bit
(CPU ``linear`` gives other low bits for one row than for several).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pabench.checks.shadow import ShadowObserver, ShadowReport, Watch
from pabench.engine.engine import PagedEngine
from pabench.reference.logits import LogitStats, compare_rows
from pabench.reference.run import ReferenceRun
from pabench_kernels.dispatch import Dispatcher

MAX_PROMPT = 40  # tokens of a prompt that are used; crosses blocks of 16
DECODE_STEPS = 5
CHUNKS = (5, 16, 7)  # sizes of the parts of a prompt, over and over


@dataclass(frozen=True)
class Scenario:
    """``fault`` is what a failure is called where the plain run of the same texts passes."""

    name: str
    fault: str
    what: str
    drive: Callable[[Driver], None]


class Driver:
    """An engine in shadow mode over the reference's first texts, fed token by token as a scenario wants."""

    def __init__(
        self,
        reference: ReferenceRun,
        dispatcher: Dispatcher,
        block_size: int,
        engine_type: type[PagedEngine] = PagedEngine,
        watch: Watch | None = None,
    ) -> None:
        self.reference = reference
        path = reference.path
        kv_dtype = path.kv_dtype or path.loaded.model.dtype
        self.texts = [
            (
                list(p[:MAX_PROMPT]),
                list(t[:DECODE_STEPS]) if len(p) <= MAX_PROMPT else list(p[MAX_PROMPT:][:DECODE_STEPS]),
            )
            for p, t in zip(reference.prompts, reference.tokens, strict=True)
        ]
        longest = max(len(p) + len(t) for p, t in self.texts)
        self.blocks_each = -(-longest // block_size)
        self.shadow = ShadowObserver(
            kv_dtype, path.scales, None if watch is None else lambda seen: watch(self.engine, self.shadow, seen)
        )
        self.engine = engine_type(
            path.loaded,
            dispatcher,
            block_size=block_size,
            num_blocks=self.blocks_each * 2 * len(self.texts),
            kv_dtype=kv_dtype,
            scales=path.scales,
            observers=(self.shadow,),
        )
        self.stats = LogitStats()

    def step(self, work: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """One forward pass; ``work``: (text, sequence, next tokens). The last token's logits are compared."""
        starts = [self.engine.blocks.num_tokens(seq) for _, seq, _ in work]
        rows = self.engine.step([(seq, ids, [len(ids) - 1]) for _, seq, ids in work])
        for (text, _, ids), start, row in zip(work, starts, rows, strict=True):
            key = (text, start + len(ids) - 1)
            if text >= 0 and self.reference.spool.has(key):
                self.stats.add(compare_rows(self.reference.spool.get(key), row, self.reference.target(*key)))

    def start(self) -> int:
        return self.engine.add()

    def free(self, seq: int) -> None:
        self.engine.free(seq)
        self.shadow.forget(seq)

    def decode_together(self, sequences: Sequence[tuple[int, int]]) -> None:
        for n in range(DECODE_STEPS):
            work = [(text, seq, self.texts[text][1][n : n + 1]) for text, seq in sequences]
            if work := [w for w in work if w[2]]:
                self.step(work)


def _alone(d: Driver) -> None:
    for text, (prompt, _) in enumerate(d.texts[:2]):
        seq = d.start()
        d.step([(text, seq, prompt)])
        d.decode_together([(text, seq)])
        d.free(seq)


def _permuted(d: Driver) -> None:
    sequences = [(text, d.start()) for text in reversed(range(len(d.texts)))]
    d.step([(text, seq, d.texts[text][0]) for text, seq in sequences])
    d.decode_together([*sequences[1:], sequences[0]])


def _chunked(d: Driver) -> None:
    text = max(range(len(d.texts)), key=lambda i: len(d.texts[i][0]))
    prompt, seq, begin, n = d.texts[text][0], d.start(), 0, 0
    while begin < len(prompt):
        size = CHUNKS[n % len(CHUNKS)]
        d.step([(text, seq, prompt[begin : begin + size])])
        begin, n = begin + size, n + 1
    d.decode_together([(text, seq)])


def _prefix_hit(d: Driver) -> None:
    """A text goes on from blocks that another sequence computed, the last of them shared half-filled."""
    text = max(range(len(d.texts)), key=lambda i: len(d.texts[i][0]))
    prompt, parent = d.texts[text][0], d.start()
    cut = max(1, len(prompt) * 2 // 3)
    d.step([(text, parent, prompt[:cut])])
    child = d.engine.fork(parent)
    d.shadow.fork(parent, child)
    d.step([(text, child, prompt[cut:] or prompt[-1:])])
    d.step([(-1, parent, prompt[:5])])  # another text, which must not write into what the child reads
    for n in range(2):
        d.step([(-1, parent, [prompt[n]]), (text, child, d.texts[text][1][n : n + 1] or prompt[:1])])


def _used_blocks(d: Driver) -> None:
    """Blocks are freed and taken again, in another order, by sequences of other lengths."""
    first = [(text, d.start()) for text in range(len(d.texts))]
    d.step([(text, seq, d.texts[text][0]) for text, seq in first])
    for _, seq in reversed(first):
        d.free(seq)
    hold = d.start()  # takes some of the free blocks, so that the others are handed out in another order
    d.step([(-1, hold, d.texts[0][0][:3])])
    again = [(text, d.start()) for text in range(len(d.texts))]
    d.step([(text, seq, d.texts[text][0]) for text, seq in again])
    d.decode_together(again)


def _smaller_later(d: Driver) -> None:
    """A small step after larger ones of the same engine."""
    sequences = [(text, d.start()) for text in range(len(d.texts))]
    d.step([(text, seq, d.texts[text][0]) for text, seq in sequences])
    d.decode_together(sequences)
    seq = d.start()
    d.step([(0, seq, d.texts[0][0][:2])])
    d.step([(0, seq, d.texts[0][0][2:4] or d.texts[0][0][:1])])


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("alone", "batch_dependence", "one sequence at a time", _alone),
        Scenario("permuted", "batch_dependence", "the batch in another order", _permuted),
        Scenario("chunked", "chunk_dependence", "the prompt in chunks", _chunked),
        Scenario("prefix_hit", "prefix_reuse", "from the shared blocks of a prefix", _prefix_hit),
        Scenario("used_blocks", "page_leak", "in blocks that were used and freed", _used_blocks),
        Scenario("smaller_later", "plan_reuse", "a small step after larger ones", _smaller_later),
    )
}


@dataclass(frozen=True)
class ScenarioResult:
    scenario: Scenario
    shadow: ShadowReport
    stats: LogitStats
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.shadow.passed and not self.stats.nonfinite


@torch.inference_mode()
def run_scenario(scenario: Scenario, driver: Driver) -> ScenarioResult:
    """Drive it and judge its attention calls. What a kernel raises passes through."""
    scenario.drive(driver)
    dtype = driver.reference.path.loaded.model.dtype
    return ScenarioResult(scenario, driver.shadow.report(dtype), driver.stats)
