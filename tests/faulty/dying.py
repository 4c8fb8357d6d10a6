"""Kernels that take their process along, or never give it back: FILE.py:FUNCTION.

Each is honest until its batch has a sequence of exactly 17 tokens, so that a test can have good cases beside bad ones.
"""

import ctypes
import importlib.util
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

_spec = importlib.util.spec_from_file_location("faulty_kernels", Path(__file__).parent / "kernels.py")
_faulty = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_faulty)
honest = _faulty.honest_whole


def _struck(batch):
    return 17 in batch.seq_lens.tolist()


def segfaults(batch):
    return ctypes.string_at(0) if _struck(batch) else honest(batch)


def exits_hard(batch):
    return os._exit(0) if _struck(batch) else honest(batch)


def aborts(batch):
    return os.abort() if _struck(batch) else honest(batch)


def is_killed(batch):
    return os.kill(os.getpid(), 9) if _struck(batch) else honest(batch)


def hangs(batch):
    while _struck(batch):
        time.sleep(0.01)
    return honest(batch)


def hangs_with_the_lock(batch):
    """No thread of Python runs any more: the C function waits without giving the interpreter's lock back."""
    Path("pid").write_text(str(os.getpid()))
    return ctypes.PyDLL(None).pause()


def closes_every_pipe(batch):
    if _struck(batch):
        os.closerange(3, 200)
        time.sleep(60)
    return honest(batch)


def raises(batch):
    return 1 // 0 if _struck(batch) else honest(batch)


class Odd(BaseException):
    pass


def raises_a_base_exception(batch):
    if _struck(batch):
        raise Odd("planted")
    return honest(batch)


def raises_system_exit(batch):
    if _struck(batch):
        raise SystemExit(0)
    return honest(batch)


def raises_keyboard_interrupt(batch):
    if _struck(batch):
        raise KeyboardInterrupt
    return honest(batch)


def writes_into_the_cache(batch):
    out = honest(batch)
    if _struck(batch):
        batch.value_cache.view(torch.uint8).zero_()
    return out


def wrong_shape(batch):
    return honest(batch)[:, :1] if _struck(batch) else honest(batch)


def wrong_dtype(batch):
    return honest(batch).double() if _struck(batch) else honest(batch)


def wrong_device(batch):
    return honest(batch).to("meta") if _struck(batch) else honest(batch)


_lens = {}


def reuses_the_first_plan(batch):
    """Plans the lengths once per number of sequences; right as long as all calls are alike."""
    lens = _lens.setdefault(batch.num_seqs, batch.seq_lens.clone())
    return honest(replace(batch, seq_lens=lens.clamp(max=batch.block_table.shape[1] * batch.block_size)))


def reuses_the_larger_plan(batch):
    """Plans anew only when a batch is longer than any before."""
    lens = _lens.get(batch.num_seqs)
    if lens is None or lens.max() < batch.max_seq_len:
        lens = _lens[batch.num_seqs] = batch.seq_lens.clone()
    return honest(replace(batch, seq_lens=lens.clamp(max=batch.block_table.shape[1] * batch.block_size)))
