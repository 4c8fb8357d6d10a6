"""JAX's Pallas kernel agrees with the oracle, and its process comes and goes as it should."""

from __future__ import annotations

import pytest

from pabench_kernels.adapters import jax_adapter
from pabench_kernels.adapters.jax_adapter import JaxWorkerError, jax_pallas, worker
from tests.kernels.adapters.checks import disagreements, without_nan, wrong
from tests.kernels.cases import CASES, Case, changed, make_batch
from tests.kernels.oracle_for_tests import oracle, wrong_rows

SOME = ["plain", "gqa71", "soft-cap", "bf16-e4m3-per-head", "int8-per-head"]


@pytest.fixture(autouse=True)
def jax(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed("jax")))


@pytest.fixture(scope="module", autouse=True)
def _end():
    yield
    for started in jax_adapter._started():
        started.close()


def test_it_agrees_with_the_oracle():
    cases = [CASES[name] for name in SOME]
    assert all(jax_pallas.unsupported(make_batch(c, "decode")) == [] for c in cases)
    assert disagreements(jax_pallas, [(c, "decode") for c in cases]) == {}


def test_that_comparison_sees_a_wrong_scale():
    batch = without_nan(make_batch(CASES["plain"], "decode"))
    assert wrong_rows(jax_pallas(changed(batch, scale=batch.scale * 1.01)), batch, oracle(batch))


def test_nan_in_a_slot_without_a_token_reaches_the_output():
    """A finding about the kernel: what is masked gets the weight 0, and 0 × NaN is NaN."""
    assert wrong(jax_pallas, Case(lens=(17,)), "decode", nan=True)


@pytest.mark.parametrize("name", ["sinks", "alibi", "window-7"])
def test_limits_are_declared(name):
    (reason,) = jax_pallas.unsupported(make_batch(CASES[name], "decode"))
    assert reason.startswith("JAX's Pallas kernel has no ")


def test_prefill_is_declared():
    assert "jax_pallas has no prefill phase" in jax_pallas.unsupported(make_batch(CASES["plain"], "prefill"))


def test_what_jax_raises_is_told_and_the_process_lives_on():
    process = worker()
    with pytest.raises(JaxWorkerError, match="TypeError"):
        process.ask({"query": None})
    assert worker() is process


def test_a_dead_process_is_an_error_and_then_replaced():
    worker()._process.kill()
    worker()._process.wait()
    before = worker()
    before._process.kill()
    with pytest.raises(JaxWorkerError, match="ended with exit status"):
        before.ask({"query": None})
    assert worker() is not before
    assert worker().alive


def test_closing_ends_the_process():
    process = worker()
    process.close()
    assert not process.alive
