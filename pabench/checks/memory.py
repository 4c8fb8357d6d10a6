"""The memory of a model case: whether its block pool fits is planned first; what was planned is then measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pabench.errors import CannotJudge, PabenchError
from pabench.models.geometry import AttentionGeometry
from pabench.models.load import LoadedModel
from pabench.planner.budget import Device, activation_reserve, safety_reserve, weight_bytes
from pabench.planner.config import shape_from_config
from pabench.planner.plan import Plan, PlanRequest, make_plan
from pabench.planner.pool import Paging
from pabench.planner.providers import of_torch_device
from pabench.planner.shape import LayerCache, ModelShape
from pabench.planner.words import shortfall
from pabench.records import Memory, MemoryItem
from pabench.torch_dtypes import TORCH_DTYPES

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class PoolPlan:
    """What was planned for a case: ``kept`` are bytes of K and V beside the pool, which shadow mode needs.

    ``plan`` is None where the device's memory is unknown, and nothing was refused.
    """

    device: Device
    model: ModelShape
    paging: Paging
    num_blocks: int
    kept: int
    plan: Plan | None
    allocated_before: int | None  # by torch on a GPU


def plan_pool(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    kv_dtype: torch.dtype,
    token_budget: int,
    kept_tokens: int,
    kept_dtype: torch.dtype,
) -> PoolPlan:
    """Plan the pool of a loaded model on its device. Raises ``CannotJudge`` with the numbers if it does not fit.

    The budget after loading: free memory, minus the safety reserve, the activations of a step and the K and V that
    shadow mode keeps (``kept_tokens`` of ``kept_dtype``).
    """
    device = of_torch_device(loaded.model.device)
    model, paging = shape_of(loaded), Paging(block_size, _NAMES[kv_dtype], step_tokens=token_budget)
    kept = kept_tokens * model.elements() * kept_dtype.itemsize
    plan = None
    if device.total_bytes is not None and device.used_bytes is not None:
        request = PlanRequest(
            model,
            (device,),
            paging,
            utilization=1.0,
            weights_loaded=True,
            reserve=safety_reserve(device) + activation_reserve(model, token_budget) + kept,
            context=num_blocks * block_size,
            cap="requested",
        )
        plan = make_plan(request)
        if not plan.fits:
            raise CannotJudge(
                f"the block pool does not fit into {device.name}: {shortfall(plan)}; "
                "use fewer or shorter prompts, a smaller --max-new-tokens, or --dtype fp8"
            )
    return PoolPlan(device, model, paging, num_blocks, kept, plan, _start_counting(loaded.model.device))


def measure(planned: PoolPlan, loaded: LoadedModel, pool: Iterable[Tensor], kept: int) -> Memory:
    """Planned against measured bytes, item by item; null is what nobody can tell."""
    config_weights = None
    if planned.model.weights is not None:
        config_weights = weight_bytes(planned.model, 0, len(planned.model.layers))
    on_device = loaded.model.device
    peak = torch.cuda.max_memory_allocated(on_device) if planned.allocated_before is not None else None
    pool_bytes = _bytes(pool)
    activations = None
    if peak is not None and planned.allocated_before is not None:
        activations = max(0, peak - planned.allocated_before - pool_bytes - kept)
    fit = planned.plan.fit_blocks if planned.plan is not None else None
    return Memory(
        device=planned.device.name,
        total_bytes=planned.device.total_bytes,
        used_bytes=planned.device.used_bytes,
        unknown=planned.device.why,
        block_bytes=planned.paging.block_bytes(planned.model.layers),
        needed_blocks=planned.num_blocks,
        fit_blocks=fit,
        items={
            "weights": MemoryItem(planned=config_weights, measured=_bytes(loaded.model.parameters())),
            "buffers": MemoryItem(planned=None, measured=_bytes(loaded.model.buffers())),
            "kv_pool": MemoryItem(
                planned=planned.num_blocks * planned.paging.block_bytes(planned.model.layers), measured=pool_bytes
            ),
            "kept_kv": MemoryItem(planned=planned.kept, measured=kept),
            "activations": MemoryItem(
                planned=activation_reserve(planned.model, planned.paging.step_tokens), measured=activations
            ),
        },
    )


def shape_of(loaded: LoadedModel) -> ModelShape:
    """The planner's view of a loaded model: its cache from the geometry that the engine builds its pool by, its weights
    from its config, in the dtype it was loaded in."""
    config: Any = loaded.model.config.get_text_config()
    g: AttentionGeometry = loaded.geometry
    layers = tuple(LayerCache(g.num_kv_heads, g.head_dim + g.head_dim_v, window) for window in g.sliding_windows)
    plain = ModelShape(loaded.name, layers, g.num_q_heads, g.max_length, vocab_size=g.vocab_size)
    try:
        shape = shape_from_config(loaded.name, config.to_dict())
    except PabenchError:  # a config that the planner cannot read: then the weights are unknown, the cache is not
        shape = plain
    return replace(shape, layers=layers, max_length=g.max_length, dtype=_NAMES.get(loaded.model.dtype, "fp32"))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, one that several share counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _start_counting(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
