"""The tensors of a captured attention call, in safetensors; nothing is allocated before the sizes are checked."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pabench.capture.meta import CaptureMeta, read_meta
from pabench.errors import UsageError
from pabench.torch_dtypes import TORCH_DTYPES

MAX_HEADER_BYTES = 1 << 16
_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_capture(path: Path, meta: CaptureMeta, tensors: dict[str, Tensor]) -> None:
    """Write ``path`` (NAME.json) and NAME.safetensors beside it; ``tensors`` as ``CaptureMeta`` describes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".safetensors")
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, file)
    file.chmod(0o644)  # safetensors leaves it to its owner alone
    path.write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_capture(path: Path) -> tuple[CaptureMeta, dict[str, Tensor]]:
    """Metadata and tensors of NAME.json. Raises ``UsageError`` where the two files disagree."""
    meta = read_meta(path)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (shape, TORCH_DTYPES[meta.dtype]) for name, shape in meta.shapes().items()
    }
    for name, there in (("sinks", meta.sinks), ("alibi_slopes", meta.alibi)):
        if there:
            wanted[name] = ((meta.q_heads,), torch.float32)
    file = path.with_suffix(".safetensors")
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted.values())
    try:
        found = file.stat().st_size
        if not size < found <= size + MAX_HEADER_BYTES:
            raise UsageError(f"capture '{file.name}' has {found} bytes; {path.name} describes {size} of data")
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            if names != set(wanted):
                raise UsageError(f"capture '{file.name}' holds {sorted(names)}; it must hold {sorted(wanted)}")
            for name, (shape, dtype) in wanted.items():
                part = opened.get_slice(name)
                if tuple(part.get_shape()) != shape or _NAMES.get(part.get_dtype()) != dtype:
                    raise UsageError(
                        f"capture '{file.name}': {name} is {part.get_dtype()} {part.get_shape()}, "
                        f"{path.name} says {dtype} {list(shape)}"
                    )
            return meta, {name: opened.get_tensor(name) for name in wanted}
    except OSError as error:
        raise UsageError(f"capture '{file}' cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"capture '{file.name}' is no safetensors file: {error}") from error
