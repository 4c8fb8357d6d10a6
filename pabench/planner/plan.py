"""The plan: a pure function from a request to blocks, tokens, and every term in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pabench.errors import CannotJudge, UsageError
from pabench.planner.budget import Budget, Device, activation_reserve, exact, safety_reserve, weight_bytes
from pabench.planner.pool import Group, Paging, blocks_that_fit, bytes_needed, groups, sequences_that_fit
from pabench.planner.shape import DTYPE_BYTES, ModelShape, check_ranks
from pabench.planner.split import best_split

Cap = Literal["none", "model", "requested"]


@dataclass(frozen=True)
class PlanRequest:
    """What is asked. One device holds all layers; several share them by ``layers``, or are ``tp`` ranks."""

    model: ModelShape
    devices: tuple[Device, ...]
    paging: Paging = field(default_factory=Paging)
    tp: int | None = None
    layers: tuple[int, ...] | Literal["best"] | None = None  # None with several devices is "best"
    utilization: float = 0.9
    weights_loaded: bool = False  # used_bytes holds the weights already
    reserve: int | None = None  # bytes; None: activations and safety, estimated
    context: int | None = None  # tokens that each sequence must be able to reach
    sequences: int = 1
    cap: Cap = "none"
    reserved_blocks: int = 0  # null blocks, which hold no tokens
    lengths: tuple[int, ...] = ()  # how many sequences of such lengths fit at once is answered


@dataclass(frozen=True)
class DevicePlan:
    """One device's part. ``fits_blocks`` is what its own budget holds (None: any number)."""

    device: Device
    first_layer: int
    num_layers: int
    kv_heads: int
    budget: Budget
    groups: tuple[Group, ...]
    fits_blocks: int | None

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)


@dataclass(frozen=True)
class Plan:
    """``fit_blocks``: the smallest of the devices' blocks, on which all agree (None: memory sets no limit);
    ``cap_blocks``: the most that the context cap allows. Token counts are of whole blocks."""

    request: PlanRequest
    devices: tuple[DevicePlan, ...]
    fit_blocks: int | None
    cap_blocks: int | None

    @property
    def ranks(self) -> int:
        return self.request.tp or 1

    @property
    def num_blocks(self) -> int:
        return min(n for n in (self.fit_blocks, self.cap_blocks) if n is not None)

    @property
    def usable_blocks(self) -> int:
        return max(0, self.num_blocks - self.request.reserved_blocks)

    @property
    def max_tokens(self) -> int:
        """Tokens that the pool holds, of all sequences together."""
        return self.usable_blocks * self.request.paging.block_size

    @property
    def guaranteed_tokens(self) -> int:
        """The length that every one of the sequences can reach at the same time."""
        length = self.usable_blocks // self.request.sequences * self.request.paging.block_size
        limit = self.request.model.max_length
        return min(length, limit) if self.request.cap == "model" and limit is not None else length

    @property
    def asked_tokens(self) -> int:
        return self.request.context or 1

    @property
    def fits(self) -> bool:
        return self.guaranteed_tokens >= self.asked_tokens

    @property
    def needed_blocks(self) -> int:
        """Blocks that serve what was asked, reserved ones included."""
        each = self.request.paging.blocks_for(self.asked_tokens)
        return self.request.sequences * each + self.request.reserved_blocks

    @property
    def bytes_per_token(self) -> int:
        """In all layers, before any sharding and without scales: s · Σ e_l."""
        return DTYPE_BYTES[self.request.paging.kv_dtype] * self.request.model.elements()

    @cached_property
    def block_bytes(self) -> int:
        """In all layers, before any sharding."""
        return self.request.paging.block_bytes(self.request.model.layers)

    def pool_bytes(self, device: DevicePlan) -> int:
        """What the planned pools take on a device."""
        return bytes_needed(device.groups, self.num_blocks, self.request.sequences, self.request.reserved_blocks)

    def stranded_bytes(self, device: DevicePlan) -> int:
        """Budget that no block can use, since another device holds fewer blocks. A cap is a choice and strands none."""
        if self.fit_blocks is None or not device.groups:
            return 0 if device.groups else device.budget.bytes
        used = bytes_needed(device.groups, self.fit_blocks, self.request.sequences, self.request.reserved_blocks)
        return device.budget.bytes - used

    def concurrency(self, length: int) -> int:
        """How many sequences of ``length`` tokens fit at once; freed windows' pools are cut for them."""
        each, reserved = self.request.paging.blocks_for(length), self.request.reserved_blocks
        counts = [sequences_that_fit(d.budget.bytes, d.groups, each, reserved) for d in self.devices if d.groups]
        if self.cap_blocks is not None:
            counts.append(max(0, self.cap_blocks - reserved) // each)
        return min(counts)


def make_plan(request: PlanRequest) -> Plan:
    """Plan ``request``. Raises ``UsageError`` for a request that contradicts itself and ``CannotJudge`` where memory
    or weights are unknown; a plan that is too small is returned, and says so in ``fits``."""
    _check(request)
    counts = _counts(request)
    placed, first = [], 0
    for device, count in zip(request.devices, counts, strict=True):
        placed.append(_place(request, device, first, count))
        first += 0 if request.tp else count
    fits = [d.fits_blocks for d in placed if d.fits_blocks is not None]
    fit_blocks = min(fits) if fits else None
    return Plan(request, tuple(placed), fit_blocks, _cap_blocks(request, bounded=fit_blocks is not None))


def _check(request: PlanRequest) -> None:
    for name, value, least in (
        ("--block-size", request.paging.block_size, 1),
        ("--sequences", request.sequences, 1),
        ("--step-tokens", request.paging.step_tokens, 1),
        ("--reserved-blocks", request.reserved_blocks, 0),
        ("--reserve", request.reserve or 0, 0),
        ("--context", 1 if request.context is None else request.context, 1),
        ("--lengths", min(request.lengths, default=1), 1),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    if not 0 < request.utilization <= 1:
        raise UsageError(f"--utilization must be above 0 and at most 1, got {request.utilization:g}")
    if not request.devices:
        raise UsageError("no device is listed; a devices file needs at least one")
    if not any(layer.elements() for layer in request.model.layers):
        raise CannotJudge(f"no layer of '{request.model.name}' has a paged KV cache, so there is nothing to plan")
    if request.tp is not None:
        if request.layers is not None:
            raise UsageError("--tp and --layers are two ways to share a model; give one of them")
        check_ranks(request.model, request.tp)
        if request.tp != len(request.devices):
            raise UsageError(
                f"--tp {request.tp} needs one device a rank, but {len(request.devices)} "
                f"{'is' if len(request.devices) == 1 else 'are'} listed; list {request.tp} in the devices file"
            )


def _counts(request: PlanRequest) -> tuple[int, ...]:
    """Layers of each device."""
    total, devices = len(request.model.layers), request.devices
    if request.tp is not None:
        return (total,) * len(devices)
    if request.layers is None or request.layers == "best":
        if len(devices) == 1:
            return (total,)
        return best_split(total, len(devices), _Holds(request))
    split = request.layers
    text = ",".join(map(str, split))
    if len(split) != len(devices):
        raise UsageError(f"--layers {text} names {len(split)} devices, but {len(devices)} are listed")
    if sum(split) != total or min(split) < 0:
        raise UsageError(f"--layers {text} must be counts that add up to {total} layers, they give {sum(split)}")
    return split


class _Holds:
    """``split.Holds`` of a request; a placement is worked out once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.known: dict[tuple[int, int, int], DevicePlan] = {}

    def __call__(self, device: int, first: int, count: int, blocks: int) -> bool:
        key = (device, first, count)
        if key not in self.known:
            self.known[key] = _place(self.request, self.request.devices[device], first, count)
        fitting = self.known[key].fits_blocks
        return fitting is None or fitting >= blocks


def _place(request: PlanRequest, device: Device, first: int, count: int) -> DevicePlan:
    ranks = request.tp or 1
    own = request.model.layers[first : first + count]
    parts = groups(request.paging, own, ranks)
    budget = _budget(request, device, first, count, ranks)
    fitting = blocks_that_fit(budget.bytes, parts, request.sequences, request.reserved_blocks) if parts else None
    heads = max((layer.heads_of_rank(ranks) for layer in own), default=0)
    return DevicePlan(device, first, count, heads, budget, parts, fitting)


def _budget(request: PlanRequest, device: Device, first: int, count: int, ranks: int) -> Budget:
    total, used = device.known()
    model = request.model
    activations, safety = 0, request.reserve or 0
    if request.reserve is None:
        safety = safety_reserve(device)
        has_head = first + count == len(model.layers)
        activations = activation_reserve(model, request.paging.step_tokens, has_head=has_head) if count else 0
    weights = 0 if request.weights_loaded else weight_bytes(model, first, count, ranks)
    return Budget(total, int(total * exact(request.utilization)), used, weights, activations, safety)


def _cap_blocks(request: PlanRequest, *, bounded: bool) -> int | None:
    """Blocks for the capped length, rounded up, and the reserved ones on top. Memory that sets no limit (windows only,
    freed) leaves the model's length as the limit."""
    length = {"none": None, "model": request.model.max_length, "requested": request.context}[request.cap]
    if length is None:
        if request.cap == "requested":
            raise UsageError("--cap requested needs --context: the tokens that are requested")
        length = request.model.max_length
        if request.cap == "none" and bounded:
            return None
        if length is None:
            raise UsageError(
                f"'{request.model.name}' does not say how many tokens it takes; give --max-length, or --cap requested"
            )
    return request.sequences * request.paging.blocks_for(length) + request.reserved_blocks
