"""Which specialisations are planned."""

from __future__ import annotations

from itertools import product

from pabench.compilation.cases import (
    DEFAULT_HEAD_DIMS,
    DEFAULT_TARGETS,
    PRECISIONS,
    VARIANTS,
    chosen_precisions,
    plan_cases,
)

PHASES = {"a": ("decode", "prefill")}
ALL = (DEFAULT_TARGETS, chosen_precisions(None), DEFAULT_HEAD_DIMS)


def test_the_full_product_is_every_combination_once():
    cases = plan_cases(PHASES, *ALL, full=True)
    assert len(set(cases)) == len(cases) == 2 * 4 * 6 * 4 * 2


def test_the_default_is_far_smaller_and_every_pair_of_values_meets():
    cases = plan_cases(PHASES, *ALL)
    assert len(cases) < 40
    seen = {(c.target, c.head_dim) for c in cases}, {(c.kv_dtype, c.target) for c in cases}
    assert seen[0] == set(product(DEFAULT_TARGETS, DEFAULT_HEAD_DIMS))
    assert len(seen[1]) == len(PRECISIONS) * len(DEFAULT_TARGETS)


def test_on_one_target_every_precision_meets_every_head_dim():
    cases = plan_cases({"a": ("decode",)}, ("sm_90",), *ALL[1:])
    assert {(c.kv_dtype, c.head_dim) for c in cases} == set(product((kv for _, kv in ALL[1]), DEFAULT_HEAD_DIMS))
    assert {c.variant for c in cases} == set(VARIANTS)


def test_fp8_means_e4m3_under_bf16():
    assert chosen_precisions(["fp8", "fp8_e4m3", "int8"]) == (("bf16", "fp8_e4m3"), ("bf16", "int8"))


def test_a_case_names_the_command_that_compiles_it_again():
    (case, *_) = plan_cases({"my.py:f": ("decode",)}, ("gfx942",), (("bf16", "int8"),), (80,))
    assert case.repro == "pabench compile -k my.py:f --target gfx942 --dtype int8 --head-dim 80 --full"
