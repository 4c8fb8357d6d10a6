"""The kernel check in your own pytest: pytest docs/examples/test_my_kernel.py"""

from my_kernel import my_kernel

from pabench.testing import assert_kernel


def test_my_kernel_gives_dense_attentions_answers():
    verdict = assert_kernel(my_kernel, dtypes=["fp32", "bf16"])
    assert verdict.passed > len(verdict.records) / 2  # what it declares unsupported does not grow unnoticed
