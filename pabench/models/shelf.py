"""Models of one source by dtype: the one in use and its oracle; others are dropped."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from pabench.models.load import LoadedModel, ModelSource, load_model
from pabench.planner.providers import cpu

if TYPE_CHECKING:
    import torch


class ModelShelf:
    """Loads each dtype of ``source`` once, as long as it is kept."""

    def __init__(self, source: ModelSource, device: str) -> None:
        self.source = source
        self.device = device
        self._loaded: dict[torch.dtype, LoadedModel] = {}

    def get(self, dtype: torch.dtype) -> LoadedModel:
        if dtype not in self._loaded:
            self._loaded[dtype] = load_model(self.source, dtype=dtype, device=self.device)
        return self._loaded[dtype]

    def keep(self, dtypes: set[torch.dtype]) -> None:
        """Drop all others."""
        self._loaded = {d: m for d, m in self._loaded.items() if d in dtypes}
        gc.collect()

    def oracle(self, dtype: torch.dtype) -> LoadedModel | None:
        """The model in fp32, or fp64 where fp32 is judged; None where it does not fit in half the free memory."""
        import torch

        wanted = torch.float64 if dtype == torch.float32 else torch.float32
        self.keep({dtype, wanted})
        if wanted not in self._loaded:
            parameters = sum(p.numel() for p in self.get(dtype).model.parameters())
            if self.device == "cpu" and parameters * wanted.itemsize > _free_memory() / 2:
                return None
        return self.get(wanted)


def _free_memory() -> float:
    """Bytes; infinite where the system does not say, for then nothing is refused."""
    here = cpu()
    known = here.total_bytes is not None and here.used_bytes is not None
    return (here.total_bytes or 0) - (here.used_bytes or 0) if known else float("inf")
