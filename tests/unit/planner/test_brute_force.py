"""A thousand random plans equal a count, and what is drawn covers the cases that matter."""

from collections import Counter

import pytest

from pabench.planner.plan import make_plan
from tests.unit.planner.brute import count_plan, draw


@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_random_plans_equal_a_brute_force(start):
    for seed in range(start, start + 100):
        request = draw(seed)
        plan, counted = make_plan(request), count_plan(request)
        assert {
            "split": tuple(d.num_layers for d in plan.devices),
            "budgets": [d.budget.bytes for d in plan.devices],
            "blocks": [d.fits_blocks for d in plan.devices],
            "fit": plan.fit_blocks,
            "num_blocks": plan.num_blocks,
            "usable": plan.usable_blocks,
            "max_tokens": plan.max_tokens,
            "guaranteed": plan.guaranteed_tokens,
            "stranded": [plan.stranded_bytes(d) for d in plan.devices],
            "concurrency": [plan.concurrency(n) for n in request.lengths],
        } == vars(counted), f"seed {seed}: {request}"


def test_the_random_requests_cover_what_matters():
    seen = Counter()
    for seed in range(1000):
        request = draw(seed)
        plan = make_plan(request)
        layers = request.model.layers
        seen["ranks"] += plan.ranks > 1
        seen["repeated heads"] += any(plan.ranks > layer.kv_heads > 0 for layer in layers)
        seen["best split"] += len(plan.devices) > 1 and not isinstance(request.layers, tuple) and request.tp is None
        seen["latent"] += any(layer.replicated for layer in layers)
        seen["no cache"] += any(not layer.kv_heads for layer in layers)
        seen["freed windows"] += request.paging.free_behind_window and any(layer.window for layer in layers)
        seen["memory sets no limit"] += plan.fit_blocks is None
        seen["nothing fits"] += plan.usable_blocks == 0
        seen["capped"] += plan.fit_blocks is not None and plan.num_blocks < plan.fit_blocks
        seen["too small"] += not plan.fits
        seen["fits"] += plan.fits
    assert min(seen.values()) >= 20, seen
