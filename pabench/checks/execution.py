"""What dispatch did, as the record's group "execution"."""

from __future__ import annotations

from collections import Counter

from pabench.records import Execution, Fallback
from pabench_kernels.contract import PHASES
from pabench_kernels.dispatch import Dispatcher


def execution_group(dispatcher: Dispatcher) -> Execution:
    request = dispatcher.request
    selected: dict[str, Counter[str]] = {}
    for (name, _, phase), n in dispatcher.trace.selected.items():
        for p in PHASES if phase == "mixed" else (phase,):
            selected.setdefault(p, Counter())[name] += n
    for key, n in dispatcher.fallbacks.items():
        for p in PHASES if key.phase == "mixed" else (key.phase,):
            selected.setdefault(p, Counter())[key.to] += n
    fallbacks = [
        Fallback(from_=k.from_, to=k.to, reasons=list(k.reasons), phase=k.phase, layer=k.layer, calls=n)
        for k, n in dispatcher.fallbacks.items()
    ] + [
        Fallback(from_=chosen, to=entered, reasons=[f"entered from inside {chosen}"], phase=phase, layer=layer, calls=n)
        for (chosen, entered, phase, layer), n in dispatcher.intruders().items()
    ]
    return Execution(
        requested={p: request.kernels[p].name for p in PHASES if p in request.under_test},
        selected={p: counts.most_common(1)[0][0] for p, counts in sorted(selected.items())},
        executed=dict(dispatcher.executed),
        paired=request.paired,
        fallbacks=sorted(fallbacks, key=lambda f: (f.layer or 0, f.phase)),
        proof=dispatcher.proof(),
    )
