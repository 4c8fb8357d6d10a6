"""A second planner that counts instead of dividing, and random requests for both. It shares no arithmetic."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from pabench.planner.budget import Device
from pabench.planner.plan import PlanRequest
from pabench.planner.pool import Paging
from pabench.planner.shape import LayerCache, LayerWeights, ModelShape, Weights

FOREVER = 3000  # blocks; nothing drawn here fits so many, so more means that memory sets no limit
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


@dataclass
class Counted:
    split: tuple[int, ...]
    budgets: list[int]
    blocks: list[int | None]
    fit: int | None
    num_blocks: int
    usable: int
    max_tokens: int
    guaranteed: int
    stranded: list[int]
    concurrency: list[int]


def held_heads(layer: LayerCache, rank: int, ranks: int) -> int:
    """Heads that a rank holds, by asking of each head whether one of the rank's query groups reads it."""
    if layer.replicated:
        return layer.kv_heads
    return sum(
        any(pair * layer.kv_heads // max(ranks, layer.kv_heads) == head for pair in _pairs(layer, rank, ranks))
        for head in range(layer.kv_heads)
    )


def _pairs(layer, rank, ranks):
    """max(ranks, heads) equal shares of the query heads, dealt to the ranks in order."""
    shares = max(ranks, layer.kv_heads)
    return [share for share in range(shares) if share * ranks // shares == rank]


def layer_block_bytes(request: PlanRequest, layer: LayerCache, rank: int) -> int:
    heads, paging = held_heads(layer, rank, request.tp or 1), request.paging
    total = 0
    for token in range(paging.block_size):
        total += heads * layer.width * SIZES[paging.kv_dtype]
        if paging.scales == "token" or (paging.scales == "block" and token == 0):
            total += heads * 4 * (1 if layer.replicated else 2)
    return total


def window_limit(request: PlanRequest, window: int) -> int:
    """Blocks that w + c − 1 consecutive tokens touch, at the worst start."""
    b = request.paging.block_size
    touched = [{(start + i) // b for i in range(window + request.paging.step_tokens - 1)} for start in range(b)]
    return max(map(len, touched))


def pool_bytes(request, layers, rank, blocks, sequences):
    total = 0
    for layer in layers:
        if layer.kv_heads:
            own = blocks
            if layer.window is not None and request.paging.free_behind_window:
                own = min(blocks, sequences * window_limit(request, layer.window) + request.reserved_blocks)
            total += own * layer_block_bytes(request, layer, rank)
    return total


def budget_of(request: PlanRequest, device: int, first: int, count: int) -> int:
    d, model, ranks = request.devices[device], request.model, request.tp or 1
    left = d.total_bytes * round(request.utilization * 100) // 100 - d.used_bytes - request.reserve
    if not request.weights_loaded and count:
        parameters, width = 0, SIZES[model.dtype]
        for i in range(first, first + count):
            w, cache = model.weights.layers[i], model.layers[i]
            held = held_heads(cache, device if ranks > 1 else 0, ranks) if cache.kv_heads else 1
            parameters += w.sharded // ranks + (w.sharded % ranks > 0) + w.replicated
            parameters += w.key_value * held // (cache.kv_heads or 1)
        has_embedding, has_head = first == 0, first + count == len(model.layers)
        if has_embedding:
            parameters += model.weights.embedding // ranks + (model.weights.embedding % ranks > 0)
        if has_head:
            parameters += model.weights.final
            if not (model.weights.tied and has_embedding):
                parameters += model.weights.head // ranks + (model.weights.head % ranks > 0)
        left -= parameters * width
    return left if left > 0 else 0


def blocks_of(request: PlanRequest, device: int, first: int, count: int) -> int | None:
    layers = request.model.layers[first : first + count]
    if not any(layer.kv_heads for layer in layers):
        return None
    rank, budget, n = (device if request.tp else 0), budget_of(request, device, first, count), 0
    step = FOREVER  # counting up, in strides that halve: the need grows with n
    while step:
        while pool_bytes(request, layers, rank, n + step, request.sequences) <= budget:
            n += step
            if n >= FOREVER:
                return None
        step //= 2
    return n


def splits(request: PlanRequest):
    total, devices = len(request.model.layers), len(request.devices)
    if request.tp:
        return [(total,) * devices]
    if isinstance(request.layers, tuple):
        return [request.layers]
    return [s for s in itertools.product(range(total + 1), repeat=devices) if sum(s) == total]


def count_plan(request: PlanRequest) -> Counted:
    best = None
    for split in splits(request):
        starts = [0 if request.tp else sum(split[:i]) for i in range(len(split))]
        blocks = [blocks_of(request, i, starts[i], split[i]) for i in range(len(split))]
        fit = min((n for n in blocks if n is not None), default=None)
        key = (fit is None, fit or 0, sum(c > 0 for c in split), tuple(-c for c in split))
        if best is None or key > best[0]:
            best = (key, split, starts, blocks, fit)
    _, split, starts, blocks, fit = best
    b, model = request.paging.block_size, request.model

    length = {"none": None, "model": model.max_length, "requested": request.context}[request.cap]
    if length is None and fit is None:
        length = model.max_length
    cap = None
    if length is not None:
        cap = request.reserved_blocks
        for _ in range(request.sequences):
            cap += length // b + (length % b > 0)
    num = min(n for n in (fit, cap) if n is not None)
    usable = max(0, num - request.reserved_blocks)

    guaranteed = 0
    while request.sequences * -(-(guaranteed + 1) // b) <= usable:
        guaranteed += 1
    if request.cap == "model":
        guaranteed = min(guaranteed, model.max_length)

    stranded = []
    for i, n in enumerate(split):
        layers = model.layers[starts[i] : starts[i] + n]
        rank = i if request.tp else 0
        paged = any(layer.kv_heads for layer in layers)
        taken = 0 if fit is None else pool_bytes(request, layers, rank, fit, request.sequences)
        budget = budget_of(request, i, starts[i], n)
        stranded.append(budget - taken if fit is not None or not paged else 0)
    budgets = [budget_of(request, i, starts[i], n) for i, n in enumerate(split)]
    concurrency = [_concurrency(request, split, starts, budgets, n, cap) for n in request.lengths]
    return Counted(split, budgets, blocks, fit, num, usable, usable * b, guaranteed, stranded, concurrency)


def _concurrency(request, split, starts, budgets, length, cap):
    """Sequences are added one by one while every device can hold them."""
    each, reserved = -(-length // request.paging.block_size), request.reserved_blocks

    def holds(sequences):
        if cap is not None and sequences * each + reserved > cap:
            return False
        for i, n in enumerate(split):
            need = 0
            for layer in request.model.layers[starts[i] : starts[i] + n]:
                if layer.kv_heads:
                    own = each
                    if layer.window is not None and request.paging.free_behind_window:
                        own = min(each, window_limit(request, layer.window))
                    bytes_each = layer_block_bytes(request, layer, i if request.tp else 0)
                    need += (sequences * own + reserved) * bytes_each
            if need > budgets[i] and need:
                return False
        return True

    count = 0
    while holds(count + 1):
        count += 1
    return count


def draw(seed: int) -> PlanRequest:
    """A small random request; a few hundred blocks fit at most, so that counting is quick."""
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 4, 8])
    num_layers = rng.randint(1, 6)
    latent, window = rng.random() < 0.15, rng.choice([None, rng.randint(1, 40)])
    layers = []
    for _ in range(num_layers):
        kind = rng.random()
        own_window = window if rng.random() < 0.6 else None
        if kind < 0.1:
            layers.append(LayerCache(0, 0))
        elif latent:
            layers.append(LayerCache(1, rng.choice([9, 24]), own_window, replicated=True))
        else:
            layers.append(LayerCache(heads, rng.choice([8, 12, 24]), own_window))
    if not any(layer.kv_heads for layer in layers):
        layers[0] = LayerCache(heads, 8)
    weights = Weights(
        tuple(LayerWeights(rng.randint(0, 3000), 64 * rng.randint(0, 20), rng.randint(0, 50)) for _ in layers),
        rng.randint(0, 2000),
        rng.randint(0, 2000),
        rng.randint(0, 20),
        rng.random() < 0.5,
    )
    q_heads = heads * rng.choice([1, 2, 4])
    model = ModelShape("random", tuple(layers), q_heads, rng.randint(1, 400), rng.choice(["fp32", "bf16"]), weights)
    tp, split = None, None
    if rng.random() < 0.35:
        allowed = [r for r in (1, 2, 4, 8) if q_heads % r == 0 and (heads % r == 0 or r % heads == 0)]
        tp = rng.choice(allowed)
    num_devices = tp or rng.choice([1, 1, 2, 2, 3])
    if not tp and num_devices > 1:
        split = rng.choice(["best", None, "given"])
        if split == "given":
            edges = sorted(rng.randint(0, num_layers) for _ in range(num_devices - 1))
            split = tuple(b - a for a, b in itertools.pairwise([0, *edges, num_layers]))
    paging = Paging(
        block_size=rng.choice([1, 3, 4, 16]),
        kv_dtype=rng.choice(list(SIZES)),
        scales=rng.choice(["none", "none", "block", "token"]),
        free_behind_window=rng.random() < 0.5,
        step_tokens=rng.randint(1, 40),
    )
    scale = sum(layer.elements() for layer in layers) * paging.block_size * SIZES[paging.kv_dtype]
    devices = tuple(
        Device(
            f"d{i}", "cuda", total := rng.randint(0, 120) * scale + rng.randint(0, 40000), rng.randint(0, total // 3)
        )
        for i in range(num_devices)
    )
    return PlanRequest(
        model=model,
        devices=devices,
        paging=paging,
        tp=tp,
        layers=split,
        utilization=rng.randint(1, 100) / 100 if rng.random() < 0.5 else 0.9,
        weights_loaded=rng.random() < 0.5,
        reserve=rng.randint(0, 3000),
        context=rng.randint(1, 400),
        sequences=rng.choice([1, 1, 2, 3]),
        cap=rng.choice(["none", "none", "model", "requested"]),
        reserved_blocks=rng.choice([0, 0, 1, 2]),
        lengths=(rng.randint(1, 200),),
    )
