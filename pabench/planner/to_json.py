"""A plan as JSON data: the contract's fields, every term beside them, and the formulas they stand in."""

from __future__ import annotations

from typing import Any

from pabench.planner.plan import DevicePlan, Plan
from pabench.planner.remedies import missing_bytes, remedies
from pabench.planner.shape import DTYPE_BYTES
from pabench.planner.split import TIE_BREAK

FORMULAS = {
    "bytes_per_token": "kv_element_bytes × elements_per_token",
    "block_bytes": "block_size × bytes_per_token + scale_bytes_per_block",
    "budget_bytes": "max(0, ⌊total_bytes × utilization⌋ − used_bytes − weight_bytes − activation_bytes − safety_bytes)",
    "blocks": "⌊budget_bytes / block bytes of the layers on the device⌋",
    "fit_blocks": "min of blocks over the devices",
    "num_blocks": "min(fit_blocks, cap_blocks)",
    "cap_blocks": "sequences × ⌈capped length / block_size⌉ + reserved_blocks",
    "usable_blocks": "num_blocks − reserved_blocks",
    "max_tokens": "usable_blocks × block_size",
    "guaranteed_tokens": "⌊usable_blocks / sequences⌋ × block_size",
    "stranded_bytes": "budget_bytes − fit_blocks × block bytes of the layers on the device",
}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Numbers are bytes, blocks or tokens; null is "no limit" for blocks and "not given" for what was asked."""
    request, model = plan.request, plan.request.model
    return {
        "model": model.name,
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "max_tokens": plan.max_tokens,
        "guaranteed_tokens": plan.guaranteed_tokens,
        "bytes_per_token": plan.bytes_per_token,
        "block_bytes": plan.block_bytes,
        "fits": plan.fits,
        "asked_tokens": request.context,
        "devices": [_device(plan, d) for d in plan.devices],
        "concurrency": [{"tokens": n, "sequences": plan.concurrency(n)} for n in request.lengths],
        "needed_blocks": plan.needed_blocks,
        "missing_bytes": {} if plan.fits else missing_bytes(plan),
        "remedies": remedies(plan),
        "terms": {
            "num_layers": len(model.layers),
            "elements_per_token": model.elements(),
            "kv_dtype": request.paging.kv_dtype,
            "kv_element_bytes": DTYPE_BYTES[request.paging.kv_dtype],
            "block_size": request.paging.block_size,
            "scale_storage": request.paging.scales,
            "scale_bytes_per_block": request.paging.scale_bytes(model.layers),
            "utilization": request.utilization,
            "weights": "loaded" if request.weights_loaded else "estimate",
            "weight_dtype": model.dtype,
            "reserve": "auto" if request.reserve is None else request.reserve,
            "step_tokens": request.paging.step_tokens,
            "tensor_parallel_ranks": plan.ranks,
            "split": split_kind(plan),
            "tie_break": TIE_BREAK if split_kind(plan) == "best" else None,
            "free_behind_window": request.paging.free_behind_window,
            "context": request.context,
            "sequences": request.sequences,
            "cap": request.cap,
            "cap_blocks": plan.cap_blocks,
            "fit_blocks": plan.fit_blocks,
            "reserved_blocks": request.reserved_blocks,
            "model_max_length": model.max_length,
            "formulas": FORMULAS,
        },
    }


def split_kind(plan: Plan) -> str:
    """How the devices share the model: one, ranks, given or best."""
    request = plan.request
    if request.tp is not None:
        return "ranks"
    if isinstance(request.layers, tuple):
        return "given"
    return "best" if len(plan.devices) > 1 else "one"


def _device(plan: Plan, d: DevicePlan) -> dict[str, Any]:
    request, b = plan.request, d.budget
    return {
        "name": d.device.name,
        "kind": d.device.kind,
        "layers": d.num_layers,
        "kv_heads": d.kv_heads,
        "budget_bytes": b.bytes,
        "blocks": d.fits_blocks,
        "stranded_bytes": plan.stranded_bytes(d),
        "block_bytes": d.block_bytes,
        "pool_bytes": plan.pool_bytes(d),
        "groups": [
            {
                "window": g.window,
                "layers": g.num_layers,
                "block_bytes": g.block_bytes,
                "blocks": g.blocks(plan.num_blocks, request.sequences, request.reserved_blocks),
            }
            for g in d.groups
        ],
        "terms": {
            "total_bytes": b.total,
            "usable_bytes": b.usable,
            "used_bytes": b.used,
            "weight_bytes": b.weights,
            "activation_bytes": b.activations,
            "safety_bytes": b.safety,
        },
    }
