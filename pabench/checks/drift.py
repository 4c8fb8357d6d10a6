"""Where two runs of one model first part, module by module, when attention is not to blame.

Every leaf module's output at the newest token is kept while the dense path, another valid dense order (eager) and the
paged engine compute the same text step by step. What the two dense runs differ by is the floor of that module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pabench.checks.scenarios import DECODE_STEPS, Driver
from pabench.checks.tolerance import unit_roundoff
from pabench.reference.dense import DensePath

FLOORS = 5.0  # × the floor: honest kernels on the built-in models came to 2.3, and to 4.7 in an lm_head
ROUNDOFFS = 2.0  # × u: a floor may be zero by luck

Trail = dict[tuple[int, str], Tensor]  # (forward pass, module) -> its output's last row


@dataclass(frozen=True)
class Drift:
    """The first module, in the order of computation, that differs by more than dense runs differ from each other."""

    forward: int  # 0: prefill; n: decode step n
    module: str
    layer: int | None
    error: float  # relative L2 of the output
    floor: float


def first_drift(driver: Driver, text: int = 0) -> Drift | None:
    """Compute one text three times; None where no module differs by more than its floor."""
    path, (prompt, tokens) = driver.reference.path, driver.texts[text]
    model = path.loaded.model
    with _trail(model) as dense:
        _dense(path, prompt, tokens)
    with _trail(model) as other:
        _dense(replace(path, attention="eager"), prompt, tokens)
    with _trail(model) as paged:
        seq = driver.start()
        driver.step([(text, seq, prompt)])
        driver.decode_together([(text, seq)])
    least = ROUNDOFFS * unit_roundoff(model.dtype)
    for key, row in dense.items():
        if key not in paged or key not in other:
            continue
        error, floor = _relative(row, paged[key]), max(least, _relative(row, other[key]))
        if not error <= FLOORS * floor:
            forward, module = key
            layers = [int(part) for part in module.split(".") if part.isdigit()]
            return Drift(forward, module, layers[0] if layers else None, error, floor)
    return None


def _dense(path: DensePath, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    count = min(DECODE_STEPS, len(tokens)) + 1
    for _ in path.forced(prompt, lambda i: tokens[i], count, [len(prompt) - 1]):
        pass


def _relative(row: Tensor, other: Tensor) -> float:
    size = float(row.norm())
    off = float((row - other).norm())
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))


@contextmanager
def _trail(model: nn.Module) -> Iterator[Trail]:
    """Keep the last row of each leaf module's output in fp32, by forward pass, in the order of computation."""
    kept: Trail = {}
    forwards = [-1]

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                kept[forwards[0], name] = output.reshape(-1, output.shape[-1])[-1].float().clone()

        return keep

    def begin(module: nn.Module, inputs: object) -> None:
        forwards[0] += 1

    handles = [model.register_forward_pre_hook(begin)]
    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles += [m.register_forward_hook(hook(name)) for name, m in leaves]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
