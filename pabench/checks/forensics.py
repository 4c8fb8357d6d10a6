"""A closer look at one attention call that is wrong, while it happens: was it given what it should have been, is it
wrong for this sequence alone too, is it wrong when repeated, and what does it read?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pabench.checks.explain_call import explain_call
from pabench.checks.shadow import SeenCall, ShadowObserver
from pabench.diagnose.explain import Explanation
from pabench.diagnose.given import WrongInput, wrong_contents, wrong_format, wrong_lengths, wrong_table
from pabench.diagnose.reads import Call, Misread, misreads
from pabench.diagnose.structured import stored_raw
from pabench.engine.engine import PagedEngine
from pabench.reference.oracle import attention_oracle
from pabench_kernels.contract import PagedBatch
from pabench_kernels.dispatch import Dispatcher, select_sequences
from pabench_kernels.request import KernelRequest

SHORTER_SLACK = 4.0  # × the tolerance, which was made for the whole length


@dataclass(frozen=True)
class Forensics:
    """What was found out about the first wrong call. ``alone`` and ``repeated``: whether it is right that way; None
    where that was not tried (a batch of one) or the kernel raised."""

    layer: int
    step: int
    phase: str
    seq_index: int
    seq_id: int
    batch_size: int
    start: int  # tokens before this call's
    length: int
    tokens: tuple[int, ...]  # positions of the query tokens that are wrong
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ratio: float
    inputs: tuple[WrongInput, ...]
    misreads: tuple[Misread, ...]
    alone: bool | None
    alone_shorter: bool | None  # right for one token less, asked right after it came out right alone
    repeated: bool | None
    explanation: Explanation | None
    outsiders: bool  # right once nothing but zeros lies in slots of no sequence of the batch
    table: tuple[int, ...] = ()
    block_size: int = 1

    @property
    def block(self) -> int | None:
        """First logical block that is read or was written wrongly, where that is known."""
        of_inputs = [b for i in self.inputs for b in i.blocks]
        of_reads = [b for m in self.misreads for b in m.blocks]
        return min(of_inputs or of_reads, default=None)

    @property
    def slot(self) -> int | None:
        """Physical slot of the first wrong token in that block, where that is known."""
        slots = [s for i in self.inputs for s in i.slots]
        if slots:
            return slots[0]
        for m in self.misreads:
            if m.blocks and m.offsets and m.blocks[0] < len(self.table):
                return self.table[m.blocks[0]] * self.block_size + m.offsets[0]
        return None


def examine(engine: PagedEngine, shadow: ShadowObserver, request: KernelRequest, seen: SeenCall) -> Forensics:
    """Look into ``seen`` now: its tensors are live. The kernel is called again, outside the case's own trace."""
    batch, seq = seen.batch, seen.seq_index
    table = engine.blocks.table(seen.work.seq_id)
    length = seen.work.start + len(seen.work.tokens)
    ratio = seen.ratio(seen.out)
    bad = ratio > 1
    heads = tuple(torch.nonzero(bad.any(0)).flatten().tolist())
    inputs = _inputs(engine, shadow, seen, table, length)

    def call(changed: PagedBatch) -> Tensor:
        return Dispatcher(request)(changed, seen.layer)

    repeated = _right(seen, call, batch, seq)  # first: what follows may be answered from what a kernel keeps
    only, _ = select_sequences(batch, torch.tensor([seq], device=batch.query.device))
    alone = _right(seen, call, only, 0) if batch.num_seqs > 1 else None
    return Forensics(
        layer=seen.layer,
        step=seen.step,
        phase=seen.phase,
        seq_index=seq,
        seq_id=seen.work.seq_id,
        batch_size=batch.num_seqs,
        start=seen.work.start,
        length=length,
        tokens=tuple(seen.work.start + t for t in torch.nonzero(bad.any(1)).flatten().tolist()),
        q_heads=heads,
        kv_heads=tuple(dict.fromkeys(h // batch.group_size for h in heads)),
        ratio=float(ratio.max()),
        inputs=tuple(inputs),
        misreads=() if inputs or repeated else tuple(_misreads(batch, call, seq)),
        alone=alone,
        alone_shorter=_right_when_shorter(seen, call, only) if alone and seen.phase == "decode" else None,
        repeated=repeated,
        explanation=None if inputs else explain_call(seen),
        outsiders=not inputs and _right_without_outsiders(seen, call),
        table=tuple(table),
        block_size=batch.block_size,
    )


def _inputs(
    engine: PagedEngine, shadow: ShadowObserver, seen: SeenCall, table: list[int], length: int
) -> list[WrongInput]:
    """Everything that was wrong before the kernel was entered; the cache's contents only if its format is right."""
    batch, seq, scales = seen.batch, seen.seq_index, shadow.scales
    k_scale, v_scale = (None, None) if scales is None else (scales.k[seen.layer], scales.v[seen.layer])
    found = [
        *wrong_lengths(batch, seq, length),
        *wrong_table(batch, seq, table),
        *wrong_format(batch, shadow.kv_dtype, k_scale, v_scale),
    ]
    if found:
        return found
    contents = wrong_contents(batch, seq, table, seen.key, seen.value)
    return [_owned_twice(engine, shadow, seen.work.seq_id, wrong) for wrong in contents]


def _owned_twice(engine: PagedEngine, shadow: ShadowObserver, seq_id: int, wrong: WrongInput) -> WrongInput:
    """A wrong slot is another fault where its block has a second owner, or came with a shared prefix."""
    block_of = engine.blocks.table(seq_id)
    bad = {block_of[b] for b in wrong.blocks}
    others = [s for s in engine.blocks.sequences() if s != seq_id and bad & set(engine.blocks.table(s))]
    family = {seq_id, *shadow.forked_from(seq_id)}
    shared = [s for s in others if family & {s, *shadow.forked_from(s)}]
    if seq_id in shadow.forked_at and min(wrong.tokens) < shadow.forked_at[seq_id]:
        message = f"{wrong.message}; these tokens came with the prefix that sequence {seq_id} was forked from"
        return replace(wrong, fault="prefix_reuse", message=message)
    if shared:
        message = f"{wrong.message}; the block is shared with sequence {shared[0]}, its fork"
        return replace(wrong, fault="prefix_reuse", message=message)
    if others:
        message = f"{wrong.message}; sequence {others[0]} has the same block"
        return replace(wrong, fault="page_leak", message=message)
    return wrong


def _misreads(batch: PagedBatch, call: Call, seq: int) -> list[Misread]:
    try:
        return misreads(batch, call, seq)
    except Exception:  # a kernel that cannot stand the structured contents has said nothing about them
        return []


def _right(seen: SeenCall, call: Call, batch: PagedBatch, row: int) -> bool | None:
    """Whether sequence ``row`` of ``batch``, which is the one seen, comes out right there."""
    starts = batch.query_start_loc.tolist()
    try:
        out = call(batch)[starts[row] : starts[row + 1]]
    except Exception:
        return None
    return bool((seen.ratio(out) <= 1).all())


def _right_when_shorter(seen: SeenCall, call: Call, only: PagedBatch) -> bool | None:
    """The same query over one key less: wrong only for a kernel that keeps something of the call before."""
    length = len(seen.key) - 1
    if length < 1:
        return None
    batch = replace(only, seq_lens=only.seq_lens - 1, max_seq_len=length)
    arguments: dict[str, Any] = {
        "query_positions": torch.tensor([length - 1], device=only.query.device),
        "scale": batch.scale,
        "causal": batch.causal,
        "window": batch.sliding_window,
        "alibi_slopes": batch.alibi_slopes,
        "soft_cap": batch.logits_soft_cap,
        "sinks": batch.sinks,
    }
    oracle = attention_oracle(batch.query, seen.key[:length], seen.value[:length], **arguments)
    try:
        off = (call(batch).double() - oracle.out).norm(dim=-1)
    except Exception:
        return None
    return bool((off <= oracle.size * seen.allowed * SHORTER_SLACK).all())


def _right_without_outsiders(seen: SeenCall, call: Call) -> bool:
    """Whether the call comes out right once every slot that no sequence of the batch owns holds zeros."""
    batch = seen.batch
    slot = torch.arange(batch.key_cache.shape[0] * batch.block_size, device=batch.query.device)
    owned = torch.zeros_like(slot, dtype=torch.bool)
    for table, length in zip(batch.block_table.long(), batch.seq_lens.tolist(), strict=True):
        position = torch.arange(length, device=slot.device)
        blocks = table[position // batch.block_size]
        owned[(blocks * batch.block_size + position % batch.block_size)[blocks >= 0]] = True
    nobody = ~owned.view(-1, batch.block_size)
    pools = [stored_raw(batch.key_cache), stored_raw(batch.value_cache)]
    before = [pool[nobody].clone() for pool in pools]
    try:
        for pool in pools:
            pool[nobody] = 0
        return _right(seen, call, batch, seen.seq_index) is True
    finally:
        for pool, old in zip(pools, before, strict=True):
            pool[nobody] = old
