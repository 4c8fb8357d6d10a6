"""The attention kernel of the Triton family: online softmax of query rows over tiles of paged keys.

The algorithm is FlashAttention's online softmax (Dao et al., 2022) over PagedAttention's block table (Kwon et al.,
2023). A tile is a run of (token, query head) rows of one sequence and KV head, query heads fastest, so that any ratio
of query to KV heads fills it and each cached element is read once for all of them. The launchers differ in how they
share the work out: row tiles of (sequence, KV head) pairs (``triton_decode``, ``triton_prefill``), the same with the
keys cut into parts (SPLIT: ``triton_split``), or tiles of a packed mixed batch (PACKED: ``triton_unified``).

The interpreter pays for operations (60–90 µs) and for calls of Triton functions (0.5 ms), hardly for elements:
reductions are spelled out where ``tl.max`` and ``tl.sum`` would be calls, and programs take many tiles (PAIRS).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine


@triton.jit
def to_number(raw, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Loaded elements as ``DTYPE``, exactly: every fp8 and int8 number is also a bf16, an fp16 and an fp32 number."""
    if FORMAT == "e4m3":
        half = ((raw & 0x80).to(tl.int16) << 8) | ((raw & 0x7F).to(tl.int16) << 7)  # fp16 has 8 more exponent bias
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((raw & 0x7F) == 0x7F, float("nan"), number).to(DTYPE)
    elif FORMAT == "e5m2":
        return (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif FORMAT == "bf16_bits":
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return raw.to(DTYPE)


@triton.jit
def soft_capped(logits, cap):
    """``cap × tanh(logits / cap)``; Taylor near 0, where (1 − e⁻²ˣ) / (1 + e⁻²ˣ) would cancel."""
    x = logits / cap
    y = x * x
    series = 62.0 / 2835 + y * (-1382.0 / 155925 + y * (21844.0 / 6081075))
    series = 1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * series)))
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    return cap * tl.where(y < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def attention_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [NB, BS, Hkv, D]
    v_ptr,  # [NB, BS, Hkv, Dv]
    table_ptr,  # [S, max blocks]
    seq_lens_ptr,  # [S]
    query_start_ptr,  # [S + 1]
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,  # [Hq]
    sinks_ptr,  # [Hq]
    out_ptr,  # [T, Hq, Dv]; SPLIT: fp32 [T, Hq, num_splits, Dv], not yet divided by the total
    lse_ptr,  # [T, Hq]; SPLIT: the maximum of the logits, [T, Hq, num_splits]
    total_ptr,  # SPLIT: Σ exp(logit − maximum), [T, Hq, num_splits]
    scale,
    soft_cap,
    window,
    num_pairs,  # (sequence, KV head) pairs
    num_kv_heads,
    row_tiles,  # tiles that a pair's rows are cut into; PACKED: unused
    num_splits,  # parts that a sequence's keys are cut into; 1 unless SPLIT
    search_from,  # PACKED: the highest power of two below the number of sequences
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_token,
    k_stride_head,
    v_stride_block,
    v_stride_token,
    v_stride_head,
    table_stride_seq,
    table_stride_block,
    k_scale_stride_block,
    k_scale_stride_token,
    k_scale_stride_head,
    v_scale_stride_block,
    v_scale_stride_token,
    v_scale_stride_head,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr,  # padded widths of the tiles
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PAIRS: tl.constexpr,  # tiles of a program; they lie one after another, and only tl.dot sees them apart
    ROWS: tl.constexpr,  # (token, query head) rows of a tile
    KEYS: tl.constexpr,  # keys per tile and iteration
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,  # dtype of what is multiplied; sums are fp32
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_K_TOKEN_SCALE: tl.constexpr,  # that scale is one per token and head
    HAS_V_SCALE: tl.constexpr,
    HAS_V_TOKEN_SCALE: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D).to(tl.int64)
    dv = tl.arange(0, DV).to(tl.int64)
    r = tl.arange(0, PAIRS * ROWS).to(tl.int64)
    c = tl.arange(0, PAIRS * KEYS).to(tl.int64)

    # Whose tile it is, once for its rows and once for its keys. `first` is its first row within the pair.
    if PACKED:
        # Sequence s owns the tiles from ⌊its first row in the packed batch / ROWS⌋ + s on: always enough of them.
        item = program * PAIRS + tl.arange(0, PAIRS).to(tl.int64)
        num_seqs = num_pairs // num_kv_heads
        seq = tl.full([PAIRS], 0, tl.int64)
        width = tl.full([], search_from, tl.int64)
        while width > 0:
            later = seq + width
            rows_before = tl.load(query_start_ptr + later, mask=later < num_seqs, other=0).to(tl.int64) * GROUP
            fits = (later < num_seqs) & (rows_before // ROWS + later <= item // num_kv_heads)
            seq = tl.where(fits, later, seq)
            width = width // 2
        row_seq = tl.reshape(tl.broadcast_to(seq[:, None], [PAIRS, ROWS]), [PAIRS * ROWS])
        key_seq = tl.reshape(tl.broadcast_to(seq[:, None], [PAIRS, KEYS]), [PAIRS * KEYS])
        row_kv_head = (program * PAIRS + r // ROWS) % num_kv_heads
        key_kv_head = (program * PAIRS + c // KEYS) % num_kv_heads
        row_live = row_seq >= 0  # tiles that no row needs end below, for want of rows
        key_live = key_seq >= 0
    else:
        row_item = program // row_tiles * PAIRS + r // ROWS
        key_item = program // row_tiles * PAIRS + c // KEYS
        row_pair = row_item // num_splits if SPLIT else row_item
        key_pair = key_item // num_splits if SPLIT else key_item
        row_seq = row_pair // num_kv_heads
        key_seq = key_pair // num_kv_heads
        row_kv_head = row_pair % num_kv_heads
        key_kv_head = key_pair % num_kv_heads
        row_live = row_pair < num_pairs
        key_live = key_pair < num_pairs

    row_len = tl.load(seq_lens_ptr + row_seq, mask=row_live, other=0).to(tl.int64)
    row_start = tl.load(query_start_ptr + row_seq, mask=row_live, other=0).to(tl.int64)
    row_queries = tl.load(query_start_ptr + row_seq + 1, mask=row_live, other=0).to(tl.int64) - row_start
    if PACKED:
        row_first = ((program * PAIRS + r // ROWS) // num_kv_heads - row_start * GROUP // ROWS - row_seq) * ROWS
    else:
        row_first = program % row_tiles * ROWS
    member = row_first + r % ROWS
    row_live &= member < row_queries * GROUP
    head = row_kv_head * GROUP + member % GROUP
    token = row_start + member // GROUP
    row_past = row_len - row_queries
    query_pos = row_past + member // GROUP
    row_hi = tl.minimum(row_len, query_pos + 1) if CAUSAL else row_len
    q_at = token * q_stride_token + head * q_stride_head
    q_mask = row_live[:, None] & (d < HEAD_DIM)[None, :]
    q = to_number(tl.load(q_ptr + (q_at[:, None] + d[None, :]), mask=q_mask, other=0), Q_FORMAT, COMPUTE)

    # A tile's keys go from the first that its first row sees to the last that any sees, or are a part of these.
    key_len = tl.load(seq_lens_ptr + key_seq, mask=key_live, other=0).to(tl.int64)
    start = tl.load(query_start_ptr + key_seq, mask=key_live, other=0).to(tl.int64)
    queries = tl.load(query_start_ptr + key_seq + 1, mask=key_live, other=0).to(tl.int64) - start
    if PACKED:
        key_first = ((program * PAIRS + c // KEYS) // num_kv_heads - start * GROUP // ROWS - key_seq) * ROWS
    else:
        key_first = program % row_tiles * ROWS
    past = key_len - queries
    key_hi = tl.minimum(key_len, past + (key_first + ROWS - 1) // GROUP + 1) if CAUSAL else key_len
    key_hi = tl.where(key_first < queries * GROUP, key_hi, 0)
    if HAS_WINDOW:
        key_lo = tl.maximum(past + key_first // GROUP - window + 1, 0)
        row_lo = tl.maximum(row_past + row_first // GROUP - window + 1, 0)
    else:
        key_lo = tl.full([PAIRS * KEYS], 0, tl.int64)
        row_lo = tl.full([PAIRS * ROWS], 0, tl.int64)
    if SPLIT:  # decode: all rows of a tile see the same keys, so that both sides cut alike; parts are 16 keys or more
        key_share = (key_hi - key_lo + (16 * num_splits - 1)) // (16 * num_splits) * 16
        row_share = (row_hi - row_lo + (16 * num_splits - 1)) // (16 * num_splits) * 16
        key_lo += key_item % num_splits * key_share
        row_lo += row_item % num_splits * row_share
        key_hi = tl.minimum(key_hi, key_lo + key_share)
        row_hi = tl.minimum(row_hi, row_lo + row_share)
    span = tl.reduce(key_hi - key_lo, 0, _elementwise_max)

    # Inside the loop a key is its distance from the tile's first: 32 bits, and no subtraction per (row, key).
    n = tl.arange(0, KEYS).to(tl.int64)
    row_end = (row_hi - row_lo).to(tl.int32)
    row_self = (query_pos - row_lo).to(tl.int32)
    pos = key_lo + c % KEYS
    lane = (c % KEYS)[
        :, None
    ]  # for the masks of K and V: Triton 3.6 takes the layouts of live and live[:, None] for one
    lanes = (key_hi - key_lo)[:, None]
    table_row = key_seq * table_stride_seq
    k_head = key_kv_head * k_stride_head
    v_head = key_kv_head * v_stride_head

    factor = tl.full([PAIRS * ROWS], 1.0, tl.float32) * scale
    if HAS_K_SCALE and not HAS_K_TOKEN_SCALE:
        factor *= tl.load(k_scale_ptr + row_kv_head * k_scale_stride_head, mask=row_live, other=0)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + head, mask=row_live, other=0)
    if HAS_SINKS:  # the sink is one more key, seen first, without a value
        m = tl.load(sinks_ptr + head, mask=row_live, other=0).to(tl.float32)
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full([PAIRS * ROWS], float("-inf"), tl.float32)
        total = tl.full([PAIRS * ROWS], 0.0, tl.float32)
    acc = tl.full([PAIRS * ROWS, DV], 0.0, tl.float32)

    for done in range(0, span, KEYS):
        key = pos + done
        live = key < key_hi
        wide_live = lane + done < lanes
        entry = table_ptr + (table_row + key // BLOCK_SIZE * table_stride_block)
        block = tl.load(entry, mask=live, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE

        k_at = block * k_stride_block + slot * k_stride_token + k_head
        k_mask = wide_live if HEAD_DIM == D else wide_live & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + (k_at[:, None] + d[None, :]), mask=k_mask, other=0)
        k = k.to(COMPUTE) if K_FORMAT == "plain" else to_number(k, K_FORMAT, COMPUTE)
        if HAS_K_TOKEN_SCALE:
            k_scale_at = block * k_scale_stride_block + slot * k_scale_stride_token + key_kv_head * k_scale_stride_head
            k_scale = tl.load(k_scale_ptr + k_scale_at, mask=live, other=0)
        if PAIRS == 1:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if HAS_K_TOKEN_SCALE:
                s *= k_scale[None, :]
        else:
            k3 = tl.permute(tl.reshape(k, [PAIRS, KEYS, D]), (0, 2, 1))
            s3 = tl.dot(tl.reshape(q, [PAIRS, ROWS, D]), k3, input_precision="ieee")
            if HAS_K_TOKEN_SCALE:
                s3 *= tl.reshape(k_scale, [PAIRS, 1, KEYS])
            s = tl.reshape(s3, [PAIRS * ROWS, KEYS])
        s *= factor[:, None]
        if HAS_SOFT_CAP:
            s = soft_capped(s, soft_cap)
        column = (n + done).to(tl.int32)
        if HAS_ALIBI:
            s += slope[:, None] * (column[None, :] - row_self[:, None]).to(tl.float32)
        seen = column[None, :] < row_end[:, None]
        if HAS_WINDOW:
            seen &= column[None, :] > (row_self - window)[:, None]
        s = tl.where(seen, s, float("-inf"))

        m_new = tl.maximum(m, tl.reduce(s, 1, _elementwise_max))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - m_safe[:, None])
        alpha = tl.exp(m - m_safe)
        total = total * alpha + tl.reduce(p, 1, _sum_combine)
        m = m_new

        v_at = block * v_stride_block + slot * v_stride_token + v_head
        v_mask = wide_live if HEAD_DIM_V == DV else wide_live & (dv < HEAD_DIM_V)[None, :]
        v = tl.load(v_ptr + (v_at[:, None] + dv[None, :]), mask=v_mask, other=0)
        if HAS_V_TOKEN_SCALE:  # scaled weights would leave fp16's range where scales are small
            v_scale_at = block * v_scale_stride_block + slot * v_scale_stride_token + key_kv_head * v_scale_stride_head
            v_scale = tl.load(v_scale_ptr + v_scale_at, mask=live, other=0)
            v = (to_number(v, V_FORMAT, tl.float32) * v_scale[:, None]).to(COMPUTE)
        else:
            v = v.to(COMPUTE) if V_FORMAT == "plain" else to_number(v, V_FORMAT, COMPUTE)
        if PAIRS == 1:
            acc = tl.dot(p.to(COMPUTE), v, acc * alpha[:, None], input_precision="ieee")
        else:
            p3 = tl.reshape(p.to(COMPUTE), [PAIRS, ROWS, KEYS])
            o3 = tl.dot(p3, tl.reshape(v, [PAIRS, KEYS, DV]), input_precision="ieee")
            acc = acc * alpha[:, None] + tl.reshape(o3, [PAIRS * ROWS, DV])

    if HAS_V_SCALE and not HAS_V_TOKEN_SCALE:
        acc *= tl.load(v_scale_ptr + row_kv_head * v_scale_stride_head, mask=row_live, other=0)[:, None]
    out_row = token * num_kv_heads * GROUP + head
    out_mask = row_live[:, None] & (dv < HEAD_DIM_V)[None, :]
    if SPLIT:
        out_row = out_row * num_splits + row_item % num_splits
        tl.store(out_ptr + (out_row[:, None] * HEAD_DIM_V + dv[None, :]), acc, mask=out_mask)
        tl.store(lse_ptr + out_row, m, mask=row_live)
        tl.store(total_ptr + out_row, total, mask=row_live)
    else:
        empty = (total == 0.0) | (row_len == 0)
        safe_total = tl.where(empty, 1.0, total)
        out = (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (out_row[:, None] * HEAD_DIM_V + dv[None, :]), out, mask=out_mask)
        if HAS_LSE:
            tl.store(lse_ptr + out_row, tl.where(empty, float("-inf"), m + tl.log(safe_total)), mask=row_live)
