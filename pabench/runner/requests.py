"""What must be known of a kernel request before anything runs. Strangers' files are imported in a child first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pabench.errors import UsageError
from pabench.records import looks_absolute
from pabench.runner.events import Began, Emit, Escaped, Result
from pabench.runner.options import RunOptions
from pabench.runner.worker import Worker, surroundings, wait_for
from pabench_kernels.registry import UnknownKernelError
from pabench_kernels.request import parse_request, split_requests


@dataclass(frozen=True)
class RequestInfo:
    """A kernel request by its recorded name; ``files`` are where its kernels are written, one a phase."""

    name: str
    text: str
    files: tuple[str, ...]
    source_digest: str


@dataclass(frozen=True)
class Refused:
    """Why a request cannot be used, as a sentence."""

    sentence: str


def describe_requests(kernels: Sequence[str], options: RunOptions) -> list[RequestInfo]:
    """The requests, each once. Raises ``UsageError`` for an unknown kernel, a file that cannot be imported or does not
    survive it, and two kernels that would be recorded under one name."""
    texts = split_requests(list(kernels))
    if not texts:
        raise UsageError("no kernel was given; name one with -k, see `pabench list kernels`")
    found = list(describe(texts, lambda _: None)) if options.in_process else list(_described(texts, options))
    chosen: dict[str, RequestInfo] = {}
    for r in found:
        if isinstance(r, Refused):
            raise UsageError(r.sentence)
        if looks_absolute(r.name):
            raise UsageError(f"kernel '{r.name}' has a name that looks like an absolute path; rename it")
        if chosen.setdefault(r.name, r).files != r.files:
            raise UsageError(f"'{chosen[r.name].text}' and '{r.text}' would both be recorded as '{r.name}'; rename one")
    return list(chosen.values())


def describe(texts: Sequence[str], emit: Emit) -> Iterator[RequestInfo | Refused]:
    """Import what the requests name. Stops at the first that is refused."""
    for text in texts:
        emit(Began(text))
        try:
            request = parse_request(text)
        except UnknownKernelError as error:
            yield Refused(str(error))
            return
        yield RequestInfo(request.name, request.text, request.files, request.source_digest())


def _described(texts: Sequence[str], options: RunOptions) -> Iterator[RequestInfo | Refused]:
    worker = Worker(describe, texts, surroundings(), options.hang_timeout_s)
    try:
        while not worker.ended:
            wait_for([worker])
            for event in worker.read():
                match event:
                    case Result(value):
                        yield value
                    case Escaped(summary):
                        yield Refused(f"kernel '{worker.open_case}' cannot be imported: {summary}")
            if worker.dead or worker.overdue:
                death = worker.death()
                text = worker.open_case or texts[0]
                yield Refused(f"kernel '{text}' cannot be imported: {death.sentence}{death.where(_files(text))}")
                return
    finally:
        worker.close()


def _files(text: str) -> set[str]:
    """The files that a request names, as Python's reports name them."""
    kernels = [part.rpartition("=")[2] for part in text.split(",")]
    return {str(Path(k.rpartition(":")[0]).expanduser().resolve()) for k in kernels if ".py:" in k}
