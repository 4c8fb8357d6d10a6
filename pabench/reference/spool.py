"""Logits kept on disk, so that memory does not grow with tokens × vocabulary (Gemma's is 262,144)."""

from __future__ import annotations

import os
import tempfile
from types import TracebackType

import torch
from torch import Tensor

from pabench.errors import ExecutionError

Key = tuple[int, int]  # sequence, position of the token whose logits these are


class LogitSpool:
    """Rows [vocab] of one dtype by (sequence, position), in an anonymous temporary file."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._row_bytes = vocab_size * dtype.itemsize
        self._rows: dict[Key, int] = {}
        self._file = tempfile.TemporaryFile(prefix="pabench-logits-")  # noqa: SIM115 (closed by close)

    def __enter__(self) -> LogitSpool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> list[Key]:
        return list(self._rows)

    def has(self, key: Key) -> bool:
        return key in self._rows

    def put(self, key: Key, logits: Tensor) -> None:
        """Store one row. Raises ``ExecutionError`` if the disk is full."""
        data = logits.detach().to(device="cpu", dtype=self.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        try:
            self._file.seek(len(self._rows) * self._row_bytes)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise ExecutionError(
                f"cannot keep reference logits in '{tempfile.gettempdir()}': {error.strerror}; "
                "free some space there or set TMPDIR"
            ) from error
        self._rows[key] = len(self._rows)

    def get(self, key: Key) -> Tensor:
        """The row stored under ``key``. Raises ``KeyError``."""
        data = os.pread(self._file.fileno(), self._row_bytes, self._rows[key] * self._row_bytes)
        return torch.frombuffer(bytearray(data), dtype=self.dtype)
