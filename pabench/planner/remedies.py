"""What would have to change for a plan to fit: each remedy is planned, and offered only if it is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from pabench.errors import PabenchError
from pabench.planner.plan import Plan, PlanRequest, make_plan
from pabench.planner.pool import bytes_needed
from pabench.planner.shape import DTYPE_BYTES


def missing_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that each device lacks for what was asked, by the device's name, where it lacks any."""
    request, lacking = plan.request, {}
    for d in plan.devices:
        b = d.budget
        room = b.usable - b.used - b.weights - b.activations - b.safety  # unlike the budget it may be negative
        needed = bytes_needed(d.groups, plan.needed_blocks, request.sequences, request.reserved_blocks)
        if d.groups and needed > room:
            lacking[d.device.name] = needed - room
    return lacking


def remedies(plan: Plan) -> list[str]:
    """One phrase each, mostly options to change; empty if the plan fits."""
    return [] if plan.fits else list(_remedies(plan))


def _remedies(plan: Plan) -> Iterator[str]:
    request, limit = plan.request, plan.request.model.max_length
    if request.cap == "model" and limit is not None and plan.asked_tokens > limit:
        yield f"ask for at most the model's {limit:,} tokens, or plan with --cap none"
        return
    if request.layers != "best" and request.tp is None and len(plan.devices) > 1:
        yield from _offer(None, replace(request, layers="best"), plan)
    if (utilization := _utilization(request)) is not None:
        yield f"--utilization {utilization:g}"
    if any(layer.window for layer in request.model.layers) and not request.paging.free_behind_window:
        freed = replace(request.paging, free_behind_window=True)
        yield from _offer("--free-behind-window", replace(request, paging=freed), plan)
    if DTYPE_BYTES[request.paging.kv_dtype] > 1:
        narrow = replace(request.paging, kv_dtype="fp8_e4m3")
        yield from _offer("--kv-dtype fp8", replace(request, paging=narrow), plan)
    if request.context is not None and plan.guaranteed_tokens:
        yield f"--context {plan.guaranteed_tokens}"
    if request.sequences > 1 and (fewer := plan.concurrency(plan.asked_tokens)):
        yield f"--sequences {fewer}"
    for name, count in missing_bytes(plan).items():
        yield f"{count:,} bytes more on {name}"


def _offer(text: str | None, changed: PlanRequest, plan: Plan) -> Iterator[str]:
    """The change (None: the split it leads to), with the context that it makes possible if it is not enough alone."""
    better = _try(changed)
    if better is None:
        return
    text = text or f"--layers {','.join(str(d.num_layers) for d in better.devices)}"
    if better.fits:
        yield text
    elif changed.context is not None and better.guaranteed_tokens > plan.guaranteed_tokens:
        yield f"{text} --context {better.guaranteed_tokens}"


def _try(request: PlanRequest) -> Plan | None:
    try:
        return make_plan(request)
    except PabenchError:
        return None


def _utilization(request: PlanRequest) -> float | None:
    """The smallest one, in hundredths, that fits; more memory never fits less, so bisect."""
    low, high = ceil(request.utilization * 100 + 1e-9), 100

    def enough(hundredths: int) -> bool:
        made = _try(replace(request, utilization=hundredths / 100))
        return made is not None and made.fits

    if low > high or not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low / 100
