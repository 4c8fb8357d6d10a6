"""Suite → what will be judged, all names resolved. Nothing of a stranger's runs in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pabench.cases import ModelCase, config_of, inputs_digest, precisions, repro_command
from pabench.checks.kernel.case import KernelCase
from pabench.checks.kernel.run import plan_kernel_cases
from pabench.errors import UsageError
from pabench.models.load import ModelSource, resolve_model
from pabench.prompts import Prompt, choose, read_prompts
from pabench.runner.options import RunOptions
from pabench.runner.requests import RequestInfo, describe_requests
from pabench.suite import Suite


@dataclass(frozen=True)
class Plan:
    """The cases of a run in the order they are planned, and what they are made of."""

    requests: tuple[RequestInfo, ...]
    prompts: tuple[Prompt, ...]
    sources: tuple[ModelSource, ...]
    kernel_cases: tuple[KernelCase, ...]
    model_cases: tuple[ModelCase, ...]
    config: dict[str, Any]
    config_hash: str

    @property
    def case_ids(self) -> list[str]:
        return [*(c.case_id for c in self.kernel_cases), *(c.case_id for c in self.model_cases)]


def make_plan(suite: Suite, options: RunOptions) -> Plan:
    """Resolve kernels, prompts and models. Raises ``PabenchError`` for what the user must mend."""
    requests = describe_requests(suite.kernels, options)
    prompts: Sequence[Prompt] = ()
    sources: Sequence[ModelSource] = ()
    if "model" in suite.checks:
        prompts = (
            read_prompts(options.prompts_file) if options.prompts_file else choose(suite.prompts.kinds, options.seed)
        )
        sources = [resolve_model(name, offline=options.offline) for name in suite.models]
    if len({s.name for s in sources}) < len(sources):
        raise UsageError(
            f"two models would be recorded under one name: {', '.join(s.name for s in sources)}; rename one"
        )
    kernel_cases: list[KernelCase] = []
    if "kernel" in suite.checks:
        named = [(r.name, r.text) for r in requests]
        kernel_cases = plan_kernel_cases(suite, named, options.seed, options.device)
    config, config_hash = config_of(
        suite,
        options.seed,
        prompts,
        device=options.device,
        on_fallback=options.on_fallback,
        model_fingerprints={s.name: s.fingerprint for s in sources},
        kernel_sources={r.name: r.source_digest for r in requests},
    )
    return Plan(
        requests=tuple(requests),
        prompts=tuple(prompts),
        sources=tuple(sources),
        kernel_cases=tuple(kernel_cases),
        model_cases=tuple(_model_cases(suite, options, requests, prompts, sources)),
        config=config,
        config_hash=config_hash,
    )


def _model_cases(
    suite: Suite,
    options: RunOptions,
    requests: Sequence[RequestInfo],
    prompts: Sequence[Prompt],
    sources: Sequence[ModelSource],
) -> list[ModelCase]:
    cases = []
    named = zip(suite.models, sources, strict=True)
    for (model, source), precision, request in product(named, precisions(suite), requests):
        repro = repro_command(
            suite,
            options.suite_text or suite.name,
            model,
            request.text,
            precision,
            seed=options.seed,
            prompts_file=options.prompts_file,
            device=options.device,
            on_fallback=options.on_fallback,
        )
        digest = inputs_digest(suite, prompts, source.fingerprint)
        cases.append(ModelCase(source.name, request.name, request.text, precision, suite.block_size, digest, repro))
    return cases
