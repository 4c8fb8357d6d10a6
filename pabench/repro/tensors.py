"""A repro file's call as a PagedBatch, and back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pabench.errors import ExecutionError, UsageError
from pabench.repro.format import MAX_FILE_BYTES, METADATA_KEY, OPTIONAL, ReproMeta, read_meta
from pabench_kernels.contract import PagedBatch


def write_repro(path: Path, meta: ReproMeta, batch: PagedBatch) -> int:
    """Write ``batch`` to ``path``, whole or not at all. Returns its size in bytes.

    Raises ``ExecutionError`` where it cannot be written, ``UsageError`` where the call is too large for a repro file.
    """
    used = used_ids(batch)
    tensors = {
        "query": batch.query,
        "key_blocks": _take(batch.key_cache, used),
        "value_blocks": _take(batch.value_cache, used),
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
    }
    tensors |= {name: x for name in OPTIONAL if (x := getattr(batch, name)) is not None}
    data = save(
        {name: x.detach().cpu().contiguous() for name, x in tensors.items()},
        {METADATA_KEY: meta.model_dump_json()},
    )
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the call has {len(data)} bytes; a repro file holds at most {MAX_FILE_BYTES}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ExecutionError(f"repro file '{path}' cannot be written: {error.strerror or error}") from error
    return len(data)


def read_repro(path: Path, device: str = "cpu") -> tuple[ReproMeta, PagedBatch]:
    """The call of a repro file; what its block table does not name is NaN. Raises ``UsageError``."""
    meta = read_meta(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"repro file '{path.name}' cannot be read: {error}") from error
    table, lens, starts = (tensors[n] for n in ("block_table", "seq_lens", "query_start_loc"))
    used = torch.unique(table[table >= 0]).long()  # type: ignore[no-untyped-call,unused-ignore]
    query_lens = starts.diff()
    sound = (
        len(used) == len(tensors["key_blocks"])
        and (not len(used) or int(used[-1]) < meta.num_blocks)
        and int(starts[0]) == 0
        and int(starts[-1]) == len(tensors["query"])
        and bool((query_lens >= 0).all())
        and bool((lens >= 0).all())
        and bool((lens <= (table.shape[1] * tensors["key_blocks"].shape[1])).all())
        and bool(((lens == 0) | (query_lens <= lens)).all())
    )
    if not sound:
        raise UsageError(f"repro file '{path.name}': its block table, lengths and query offsets contradict each other")
    _check_dtypes(path.name, tensors)
    _check_numbers(path.name, tensors)
    key, value = (_pool(tensors[n], used, meta.num_blocks, device) for n in ("key_blocks", "value_blocks"))
    batch = PagedBatch(
        query=tensors["query"].to(device),
        key_cache=key,
        value_cache=value,
        block_table=table.to(device),
        seq_lens=lens.to(device),
        query_start_loc=starts.to(device),
        max_query_len=int(query_lens.max()) if len(query_lens) else 0,
        max_seq_len=int(lens.max()) if len(lens) else 0,
        scale=meta.scale,
        causal=meta.causal,
        sliding_window=meta.sliding_window,
        logits_soft_cap=meta.logits_soft_cap,
        **{name: tensors[name].to(device) for name in OPTIONAL if name in tensors},
    )
    return meta, batch


def used_ids(batch: PagedBatch) -> Tensor:
    """Physical ids in the block table, int64, ascending, each once."""
    ids: Tensor = torch.unique(batch.block_table[batch.block_table >= 0])
    return ids.long()


def _check_dtypes(name: str, tensors: dict[str, Tensor]) -> None:
    whole = {"block_table", "seq_lens", "query_start_loc"}
    for tensor, x in tensors.items():
        integer = not x.is_floating_point()
        if (
            (tensor in whole and x.dtype != torch.int32)
            or (tensor == "query" and (integer or x.dtype.itemsize == 1))
            or (tensor in OPTIONAL and x.dtype != torch.float32)
        ):
            raise UsageError(f"repro file '{name}': {tensor} has dtype {x.dtype}")


def _check_numbers(name: str, tensors: dict[str, Tensor]) -> None:
    """Scales, slopes, sinks and the query must be finite: else there is no right answer to hold a kernel to."""
    for tensor in ("query", *OPTIONAL):
        if tensor in tensors and not bool(tensors[tensor].isfinite().all()):
            raise UsageError(f"repro file '{name}': {tensor} holds NaN or Inf, so no answer would be right")
    for tensor in ("k_scale", "v_scale"):
        if tensor in tensors and bool((tensors[tensor] < 0).any()):
            raise UsageError(f"repro file '{name}': {tensor} holds a negative factor")


def _take(cache: Tensor, ids: Tensor) -> Tensor:
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return raw[ids].view(cache.dtype)


def _pool(blocks: Tensor, used: Tensor, num_blocks: int, device: str) -> Tensor:
    pool = torch.empty((num_blocks, *blocks.shape[1:]), dtype=blocks.dtype, device=device)
    raw, new = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (pool, blocks))
    if blocks.dtype.itemsize == 1:
        raw.fill_(0x7F)
    else:
        raw.fill_(float("nan"))
    raw[used.to(device)] = new.to(device)
    return pool
