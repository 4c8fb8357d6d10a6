"""Settings of the process that a kernel may change and must not hand on to the next case."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Put torch's default dtype and device, threads, matmul precision and the working directory back afterwards."""
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    precision, folder = torch.get_float32_matmul_precision(), os.getcwd()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.chdir(folder)
