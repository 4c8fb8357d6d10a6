"""Sentences about a plan, the same in every place that prints one."""

from __future__ import annotations

from pabench.planner.plan import Plan
from pabench.planner.remedies import missing_bytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1, in four digits at most: 17.6 GiB, 4 MiB."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {_UNITS[unit]}"


def outcome(plan: Plan) -> str:
    """What fits, in one sentence."""
    request = plan.request
    each = "a sequence" if request.sequences == 1 else f"each of {request.sequences} sequences"
    null = f", {request.reserved_blocks} of them reserved" if request.reserved_blocks else ""
    blocks = f"{plan.num_blocks:,} block{'' if plan.num_blocks == 1 else 's'} of {request.paging.block_size} tokens"
    limit = request.model.max_length
    beyond = f" (the model takes {limit:,})" if limit is not None and plan.guaranteed_tokens > limit else ""
    return f"{blocks}{null}: {plan.max_tokens:,} tokens; {each} of {plan.guaranteed_tokens:,}{beyond} is guaranteed"


def shortfall(plan: Plan) -> str:
    """Why a plan that does not fit does not, with the numbers."""
    request = plan.request
    what = f"{plan.asked_tokens:,} token{'' if plan.asked_tokens == 1 else 's'}"
    if request.sequences > 1:
        what = f"{request.sequences} sequences of {what}"
    limit = request.model.max_length
    if request.cap == "model" and limit is not None and plan.asked_tokens > limit:
        return f"{what} were asked for, but '{request.model.name}' takes {limit:,} and the plan is capped at that"
    lacking = "; ".join(f"'{name}' lacks {size(count)}" for name, count in missing_bytes(plan).items())
    return (
        f"{what} need {plan.needed_blocks:,} blocks of {size(plan.block_bytes)} in all, but {plan.num_blocks:,} fit, "
        f"which guarantee {plan.guaranteed_tokens:,} tokens; {lacking}"
    )
