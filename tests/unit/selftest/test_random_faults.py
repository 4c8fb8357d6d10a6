"""Random planted faults × shapes × probes through the whole chain: never a crash, never a wrong PASS."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pabench.cases import Precision
from pabench.checks.kernel.case import Trial, judge_kernel, nan_in_new_tensors
from pabench.checks.kernel.faults import distinct_faults
from pabench.checks.kernel.record import kernel_record, outcome_fields
from pabench.checks.kernel.shapes import find_shape
from pabench.checks.replay import judge_call
from pabench.errors import CannotJudge
from pabench.faults import FAULTS
from pabench.selftest.catalogue import kernel_mutants, plain
from pabench.selftest.kernel_part import SHAPES, probes_of, request_of, with_fault

HONEST = request_of("plain", plain)
MUTANTS = {m.name: m for m in kernel_mutants()}
PRECISIONS = [
    Precision("fp32", "fp32", "fp32"),
    Precision("bf16", "bf16", "bf16"),
    Precision("fp16", "fp16", "fp16"),
    Precision("fp8", "bf16", "fp8_e4m3"),
]
BEYOND_DOUBT = 4.0  # × the tolerance


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(MUTANTS)),
    shape=st.sampled_from(sorted(set(SHAPES) - {"ids-past-65536"})),
    probe=st.sampled_from(probes_of("content")),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 5),
)
def test_a_planted_fault_never_crashes_the_chain_and_never_passes(name, shape, probe, precision, seed):
    trial = Trial(find_shape(shape, 16), probe, precision, seed)
    request = with_fault(MUTANTS[name], HONEST)
    outcome = judge_kernel(trial, request)
    record = kernel_record(_case(trial), **outcome_fields(outcome))
    assert all(entry.fault in FAULTS for entry in distinct_faults([record]))
    if outcome.status == "PASS" and name != "writes_its_query":
        with nan_in_new_tensors():
            out = request.kernels["decode"].fn(trial.inputs.batch)
        try:
            verdict = judge_call(trial.inputs.batch, out)
        except CannotJudge:
            return
        assert verdict.ratio < BEYOND_DOUBT


def _case(trial):
    from pabench.checks.kernel.case import KernelCase

    return KernelCase(trial, "plain", "plain")
