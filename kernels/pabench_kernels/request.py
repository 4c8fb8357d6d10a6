"""What the user asks for with -k: one kernel, or a pair by phase."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pabench_kernels.contract import PHASES, Kernel, Phase
from pabench_kernels.registry import UnknownKernelError, get_kernel

PAIRED = "torch_paged"


@dataclass(frozen=True)
class KernelRequest:
    """A kernel for each phase. Those in ``under_test`` were asked for; the rest is ``paired``, which is no fallback."""

    name: str  # as recorded: the kernel's name, or "prefill=A,decode=B"
    text: str  # as given on the command line, for repro commands
    kernels: dict[Phase, Kernel]
    under_test: frozenset[Phase]

    @property
    def paired(self) -> str | None:
        """The kernel that fills the phase nobody asked for, if any."""
        return next((self.kernels[p].name for p in PHASES if p not in self.under_test), None)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that its kernels are written in, one a phase; the request's text where Python has none."""
        codes = [getattr(self.kernels[p].fn, "__code__", None) for p in PHASES]
        return tuple(self.text if code is None else code.co_filename for code in codes)

    def source_digest(self) -> str:
        """Short digest of these files and of this package, which kernels share code in."""
        digest = hashlib.sha256()
        for file in sorted({*map(Path, self.files), *Path(__file__).parent.rglob("*.py")}):
            digest.update(file.read_bytes() if file.is_file() else str(file).encode())
        return digest.hexdigest()[:16]


def split_requests(values: Sequence[str]) -> list[str]:
    """Split comma-separated -k values into requests; ``prefill=A,decode=B`` stays one. Order kept, repeats dropped."""
    requests: list[str] = []
    for value in values:
        pair: list[str] = []
        for item in filter(None, (part.strip() for part in value.split(","))):
            if item.partition("=")[0] in PHASES and "=" in item:
                pair.append(item)
                if len(pair) == len(PHASES):
                    requests.append(",".join(pair))
                    pair = []
            else:
                requests.append(item)
        if pair:
            requests.append(pair[0])
    return list(dict.fromkeys(requests))


def parse_request(text: str) -> KernelRequest:
    """Load the kernels that a request names. Raises ``UnknownKernelError`` with a sentence for the user."""
    if text.partition("=")[0] in PHASES:
        kernels: dict[Phase, Kernel] = {}
        for item in text.split(","):
            phase_text, _, name = item.partition("=")
            phase = next((p for p in PHASES if p == phase_text.strip()), None)
            if phase is None or not name or phase in kernels:
                raise UnknownKernelError(f"kernel '{text}' must name each phase once, as prefill=A,decode=B")
            kernels[phase] = get_kernel(name.strip())
            if phase not in kernels[phase].phases:
                raise UnknownKernelError(
                    f"kernel '{kernels[phase].name}' has no {phase} phase; "
                    f"it has {', '.join(sorted(kernels[phase].phases))}"
                )
        name = ",".join(f"{p}={kernels[p].name}" for p in PHASES if p in kernels)
        return _request(name, text, kernels)
    return request_of(get_kernel(text), text)


def request_of(kernel: Kernel, text: str) -> KernelRequest:
    """The request of one kernel for all of its phases; ``text`` names it on a command line."""
    return _request(kernel.name, text, {p: kernel for p in PHASES if p in kernel.phases})


def _request(name: str, text: str, kernels: dict[Phase, Kernel]) -> KernelRequest:
    under_test = frozenset(kernels)
    for phase in PHASES:
        if phase not in kernels:
            kernels[phase] = get_kernel(PAIRED)
    return KernelRequest(name, text, kernels, under_test)
