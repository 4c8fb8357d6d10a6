"""Planners with a known mistake, each caught and named by what it says about the worked example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pabench.planner import plan as plan_module
from pabench.planner import pool
from pabench.planner.plan import Plan, PlanRequest, make_plan
from pabench.planner.to_json import plan_to_json
from tests.unit.planner.worked import request

WIDTHS = {"bf16": 2, "fp8_e4m3": 1}


def mistakes(asked: PlanRequest, told: dict) -> list[str]:
    """What is wrong with a plan's JSON, judged by its own numbers and the request alone."""
    found, devices, size = [], told["devices"], asked.paging.block_size
    planned = {group["blocks"] for d in devices for group in d["groups"]}
    if asked.tp and (len(planned) > 1 or planned != {told["num_blocks"]}):
        found.append("ranks with different block counts")
    if not asked.tp and asked.cap == "none":
        quotients = [d["budget_bytes"] // (told["block_bytes"] * d["layers"] // 32) for d in devices]
        if told["num_blocks"] < min(quotients):
            alone = min(d["budget_bytes"] for d in devices) // told["block_bytes"]
            mistake = "min over devices divided by all layers" if told["num_blocks"] == alone else "memory unused"
            found.append(mistake)
    elements = asked.model.elements()
    if told["bytes_per_token"] != WIDTHS[asked.paging.kv_dtype] * elements:
        charged = told["bytes_per_token"] == WIDTHS[asked.model.dtype] * elements
        found.append("activation dtype charged for the cache" if charged else "bytes per token")
    if asked.cap == "requested" and told["usable_blocks"] * size < asked.context:
        rounded = told["usable_blocks"] == asked.context // size
        found.append("context rounded down" if rounded else "less than was asked")
    return found


ASKED = {
    "ranks with different block counts": request(tp=2),
    "min over devices divided by all layers": request(layers=(21, 11)),
    "activation dtype charged for the cache": request("fp8_e4m3"),
    "context rounded down": request(cap="requested", context=1_000, reserved_blocks=1),
}


@pytest.mark.parametrize("asked", list(ASKED.values()), ids=list(ASKED))
def test_the_honest_planner_makes_none_of_the_mistakes(asked):
    assert mistakes(asked, plan_to_json(make_plan(asked))) == []


def each_rank_for_itself(monkeypatch):
    def told(made: Plan) -> dict:
        data = plan_to_json(made)
        for d in data["devices"]:
            d["groups"] = [{**group, "blocks": d["blocks"]} for group in d["groups"]]
        return data

    return told


def all_layers_on_the_smallest(monkeypatch):
    def place(asked, device, first, count):
        d = honest(asked, device, first, count)
        whole = pool.groups(asked.paging, asked.model.layers)
        return replace(d, fits_blocks=pool.blocks_that_fit(d.budget.bytes, whole))

    honest = plan_module._place
    monkeypatch.setattr(plan_module, "_place", place)
    return plan_to_json


def cache_in_the_models_dtype(monkeypatch):
    for module in (pool, plan_module):
        monkeypatch.setattr(module, "DTYPE_BYTES", {**module.DTYPE_BYTES, "fp8_e4m3": 2})
    return plan_to_json


def rounded_down(monkeypatch):
    monkeypatch.setattr(pool.Paging, "blocks_for", lambda self, tokens: tokens // self.block_size)
    return plan_to_json


TWINS = [each_rank_for_itself, all_layers_on_the_smallest, cache_in_the_models_dtype, rounded_down]


@pytest.mark.parametrize(("twin", "name"), list(zip(TWINS, ASKED, strict=True)), ids=list(ASKED))
def test_a_broken_twin_is_caught_and_named(twin, name, monkeypatch):
    told = twin(monkeypatch)
    assert mistakes(ASKED[name], told(make_plan(ASKED[name]))) == [name]
