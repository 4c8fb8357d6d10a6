"""The process that runs JAX for ``jax_adapter``: pickled requests on stdin, pickled answers on stdout."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

PAGES_AT_A_TIME = 8  # of a sequence: the kernel's own default


def main() -> None:
    """Answer until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer: tuple[str, Any] = ("ok", _attend(**request))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def _attend(
    *,
    query: Any,
    key_pages: Any,
    value_pages: Any,
    block_table: Any,
    seq_lens: Any,
    soft_cap: float | None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> bytes:
    import numpy
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    keys, table = _array(key_pages), _array(block_table)
    pages = min(PAGES_AT_A_TIME, table.shape[1])
    table = numpy.pad(table, ((0, 0), (0, -table.shape[1] % pages)))  # it wants whole groups of pages
    scales = [
        None if s is None else numpy.broadcast_to(_array(s)[:, None, None], keys.shape[:3]) for s in (k_scale, v_scale)
    ]
    out = paged_attention(
        _array(query),
        keys,
        _array(value_pages),
        table,
        _array(seq_lens),
        *scales,
        pages_per_compute_block=pages,
        k_splits=1,
        interpret=True,
        attn_logits_soft_cap=soft_cap,
    )
    return numpy.asarray(out).tobytes()


def _array(packed: tuple[str, tuple[int, ...], bytes]) -> Any:
    import jax.numpy
    import numpy

    name, shape, raw = packed
    return numpy.frombuffer(raw, dtype=jax.numpy.dtype(name)).reshape(shape)


if __name__ == "__main__":
    main()
