"""A planted change is named, and only that; what nothing given explains is unknown."""

import math
from dataclasses import replace

import pytest
import torch

from pabench.diagnose.explain import all_hypotheses, explain
from pabench.diagnose.observed import Observed
from pabench.diagnose.setting import Setting, attend
from pabench.faults import FAULTS
from pabench.reference.oracle import attention_oracle

LIMIT = 0.005  # about what bf16 may be off by


def setting(**changes):
    """5 query tokens at the end of 60, 2 heads on each of 2 KV heads, every feature on."""
    rng = torch.Generator().manual_seed(0)
    given = {
        "query": 1.5 * torch.randn(5, 4, 40, generator=rng).double(),
        "key": torch.randn(60, 2, 40, generator=rng).double(),
        "value": torch.randn(60, 2, 24, generator=rng).double(),
        "k_scale": torch.tensor([0.7, 1.3]).double(),
        "v_scale": torch.tensor([0.4, 0.9]).double(),
        "positions": torch.arange(55, 60),
        "kv_head": torch.tensor([0, 0, 1, 1]),
        "chunk_begin": 55,
        "scale": 0.21,
        "causal": True,
        "window": 37,
        "slopes": torch.tensor([0.5, 0.2, 0.1, 0.03]),
        "cap": 3.0,
        "sinks": torch.tensor([1.0, 2.0, 3.0, 0.5]),
        "block_size": 8,
        "has_scales": True,
        "dtype": torch.float32,
    }
    return Setting(**{**given, **changes})


def observed(s, out, limit=LIMIT):
    truth, size = attend(s)
    wrong = (out - truth).norm(dim=-1) > limit * size
    assert bool(wrong.any()), "the planted fault must show"
    return Observed(s, out, torch.full_like(size, limit), wrong)


def test_a_setting_gives_what_the_oracle_gives():
    s = setting()
    oracle = attention_oracle(
        s.query,
        s.key * s.k_scale[:, None],
        s.value * s.v_scale[:, None],
        query_positions=s.positions,
        scale=s.scale,
        window=s.window,
        alibi_slopes=s.slopes,
        soft_cap=s.cap,
        sinks=s.sinks,
    )
    out, size = attend(s)
    torch.testing.assert_close(out, oracle.out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(size, oracle.size, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("soft_cap", {"cap": None}),
        ("alibi", {"slopes": None}),
        ("sink", {"sinks": None}),
        ("sliding_window", {"window": None}),
        ("sliding_window", {"window": 38}),
        ("sliding_window", {"window": 36}),
        ("sliding_window", {"window": 30}),
        ("softmax_scale", {"scale": 40**-0.5}),
        ("softmax_scale", {"scale": 1.0}),
        ("kv_scale", {"k_scale": torch.ones(2).double()}),
        ("kv_scale", {"v_scale": torch.tensor([0.4, 0.4]).double()}),
        ("head_map", {"kv_head": torch.tensor([0, 1, 0, 1])}),
        ("head_map", {"kv_head": torch.tensor([0, 0, 1, 0])}),
        ("extra_tokens", {"causal": False}),
    ],
    ids=str,
)
def test_one_thing_changed_is_named(fault, wrong):
    s = setting()
    out, _ = attend(replace(s, **wrong))
    found = explain([observed(s, out)])
    assert found.fault == fault
    assert found.confidence >= 0.8


@pytest.mark.parametrize(
    ("fault", "mask"),
    [
        ("missing_tokens", lambda j, i: j != 41),
        ("missing_tokens", lambda j, i: j < i),
        ("missing_tokens", lambda j, i: (j < 40) | (j >= 48)),
        ("missing_tokens", lambda j, i: j % 7 != 3),
        ("chunk_dependence", lambda j, i: j >= 55),
    ],
    ids=["one", "newest", "block", "every 7th", "past"],
)
def test_hidden_tokens_are_found(fault, mask):
    s = setting(window=None)
    out, _ = attend(s.masked(lambda m: m & mask(s.j, s.i)))
    assert explain([observed(s, out)]).fault == fault


def test_a_factor_that_nothing_given_has_is_unknown_and_told():
    s = setting(cap=None, slopes=None, sinks=None)
    out, _ = attend(replace(s, scale=s.scale * 1.17))
    found = explain([observed(s, out)])
    assert (found.fault, found.matches) == ("unknown", ())
    assert found.factor == pytest.approx(1.17, rel=1e-2)
    whole = explain([observed(s, attend(s)[0] * 0.83)])
    assert (whole.fault, whole.factor) == ("unknown", pytest.approx(0.83, rel=1e-6))


def test_two_faults_at_once_are_not_called_one():
    s = setting()
    out, _ = attend(replace(s, cap=None, slopes=None))
    assert explain([observed(s, out)]).fault == "unknown"


def test_noise_is_unknown():
    s = setting()
    truth, size = attend(s)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    out = truth + 0.3 * size[..., None] * noise / math.sqrt(truth.shape[-1])
    assert explain([observed(s, out)]).fault == "unknown"


def test_hypotheses_that_cannot_be_told_apart_leave_it_open():
    """A window as long as the sequence: whether one token or the first block is lost, the first 8 of 8 are gone."""
    s = setting(window=None, causal=True, positions=torch.tensor([59]), query=setting().query[:1], block_size=59)
    out, _ = attend(s.masked(lambda m: m & (s.j < 59)))
    found = explain([observed(s, out)])
    assert found.fault in ("missing_tokens", "unknown")
    assert "missing_tokens" in found.candidates


def test_every_hypothesis_is_a_fault_of_the_contract_and_words_are_unique():
    assert {h.fault for h in all_hypotheses()} <= set(FAULTS) - {"unknown"}
    named = [h.what for h in all_hypotheses() if "another sequence" not in h.what]
    assert len(named) == len(set(named))


def test_nan_that_is_masked_moves_nothing():
    value = setting().value.clone()
    value[3] = math.nan  # behind the window
    clean, _ = attend(setting())
    torch.testing.assert_close(attend(setting(value=value))[0], clean)
    assert bool(attend(setting(value=value, window=None))[0][:, :2].isnan().all())
