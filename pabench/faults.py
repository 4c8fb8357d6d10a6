"""The fault names a diagnosis may use, each with what it means. The names are part of the record's contract."""

from __future__ import annotations

FAULTS: dict[str, str] = {
    "head_map": "query heads read the keys and values of the wrong KV head",
    "head_dim_tail": "the last channels of a head are missing or wrong where head_dim is no multiple of the tile",
    "wrong_block": "another block, or the wrong slots inside a block, are read",
    "block_alias": "large block ids overflow an offset and read memory elsewhere",
    "layout_stride": "right on a contiguous cache, wrong on a padded, interleaved or strided one",
    "stale_read": "slots past the sequence's length, or blocks it does not own, reach the output",
    "missing_tokens": "tokens that should be attended to are left out",
    "extra_tokens": "tokens that should be masked are attended to",
    "softmax_scale": "the softmax scale is hard-coded, dropped or applied twice",
    "kv_scale": "a k or v dequantisation scale is dropped, doubled or taken from another head",
    "alibi": "ALiBi slopes are ignored or applied to the wrong positions or heads",
    "soft_cap": "the logits soft cap is ignored, or applied in the wrong order",
    "sink": "attention sinks are ignored, or counted more than once",
    "sliding_window": "the window is ignored, or off by some tokens",
    "split_merge": "partial results of a split context are merged wrongly",
    "lse": "the log-sum-exp is missing, wrong or in another layout",
    "batch_dependence": "a sequence's output depends on what else is in the batch",
    "chunk_dependence": "the output depends on how the prompt was cut into chunks",
    "plan_reuse": "state of an earlier call (a plan, a workspace) leaks into a later one",
    "unwritten_output": "part of the output is never written",
    "nonfinite": "NaN or Inf appears where the oracle is finite",
    "slot_write": "new keys and values are written to the wrong slots, or to slots that must stay",
    "prefix_reuse": "a cached prefix is read wrongly, or shared with other tokens",
    "stale_metadata": "lengths or tables of an earlier step are used",
    "page_leak": "blocks are never freed, freed twice, or lost by a failed allocation",
    "dtype_ignored": "a requested dtype is silently replaced by another",
    "fallback": "another kernel than the requested one computed the result",
    "kernel_limit": "the kernel ran outside the domain it is made for",
    "precision": "the error is larger than honest arithmetic of this dtype makes",
    "near_tie": "two tokens within the noise floor changed places: no kernel fault",
    "input_mismatch": "the two sides were given different inputs: no kernel fault",
    "degenerate_output": "the text is empty, cut short or repeats itself",
    "task_collapse": "the task's score fell to zero or to that of a constant answer",
    "tp_shard": "a tensor-parallel shard differs from its slice of the whole",
    "unknown": "wrong, with no hypothesis that follows from given quantities",
}

NOT_KERNEL_FAULTS = frozenset({"near_tie", "input_mismatch"})
