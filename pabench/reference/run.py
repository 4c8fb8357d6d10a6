"""One reference run: the dense path's tokens and logits, and the noise floor measured beside them.

Shared by all kernels that are judged with the same model, dtype and KV dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pabench.engine.kv_cache import KVScales
from pabench.models.load import LoadedModel
from pabench.reference.dense import DensePath
from pabench.reference.logits import LogitStats, compare_rows, roundoff_kld
from pabench.reference.quantized import calibrate
from pabench.reference.spool import LogitSpool

MARGIN_HEADROOM = 2.0  # the A/A runs see a few hundred positions, not all
KEPT_PROMPT_POSITIONS = 16  # a prompt: its last eight positions, and eight spread over the rest

Progress = Callable[[str], None]


@dataclass(frozen=True)
class NoiseFloor:
    """What the dense path differs from itself by (A/A): the larger of two other valid orders."""

    mean_kld: float
    margin: float  # a top-2 margin inside this is a near tie: MARGIN_HEADROOM × the largest shift seen
    variants: dict[str, LogitStats]

    @property
    def max_abs(self) -> float:
        return max(float(stats.column("max_abs").max()) for stats in self.variants.values())


@dataclass(frozen=True)
class ReferenceRun:
    """Everything about the reference that judging a candidate needs. Close it to drop the spooled logits."""

    path: DensePath
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]  # num_tokens each; end-of-text is not a stop here
    kept: tuple[tuple[int, ...], ...]  # prompt positions whose logits are compared
    spool: LogitSpool
    floor: NoiseFloor
    nonfinite: int
    oracle: LogitSpool | None  # logits of the model in fp32 (fp64 where fp32 is judged), same tokens
    oracle_kld: float | None  # mean KLD of the reference from the oracle
    quantization_kld: float | None  # mean KLD from the unquantised dense path; None where nothing is quantised

    def close(self) -> None:
        self.spool.close()
        if self.oracle is not None:
            self.oracle.close()

    def target(self, seq: int, position: int) -> int:
        """The token that follows ``position`` in the teacher-forced text."""
        following = position + 1
        prompt = self.prompts[seq]
        return prompt[following] if following < len(prompt) else self.tokens[seq][following - len(prompt)]


def kept_positions(length: int) -> tuple[int, ...]:
    """Positions of a prompt whose logits are compared: all of a short one, a spread and the end of a long one."""
    if length <= KEPT_PROMPT_POSITIONS:
        return tuple(range(length))
    half = KEPT_PROMPT_POSITIONS // 2
    spread = {round(i * (length - half - 1) / half) for i in range(half)}
    return tuple(sorted(spread | set(range(length - half, length))))


def run_reference(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    kv_dtype: torch.dtype | None = None,
    oracle_model: LoadedModel | None = None,
    progress: Progress = lambda _: None,
) -> ReferenceRun:
    """Generate, spool, and measure the floor. ``kv_dtype`` None is the model's own dtype; another one is quantised."""
    scales: KVScales | None = None
    if kv_dtype is not None:
        progress("calibrating KV scales")
        scales = calibrate(loaded, prompts, kv_dtype)
    path = DensePath(loaded, "sdpa", kv_dtype, scales)
    spool = LogitSpool(loaded.geometry.vocab_size, loaded.model.dtype)
    try:
        return _run(loaded, prompts, num_tokens, path, spool, oracle_model, progress)
    except BaseException:
        spool.close()
        raise


def _run(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    path: DensePath,
    spool: LogitSpool,
    oracle_model: LoadedModel | None,
    progress: Progress,
) -> ReferenceRun:
    kept = tuple(kept_positions(len(p)) for p in prompts)
    tokens: list[tuple[int, ...]] = []
    nonfinite = 0
    for s, prompt in enumerate(prompts):
        progress(f"dense reference, prompt {s + 1} of {len(prompts)}")

        def keep_row(position: int, row: torch.Tensor, seq: int = s) -> None:
            nonlocal nonfinite
            nonfinite += not bool(row.isfinite().all())
            spool.put((seq, position), row)

        tokens.append(tuple(path.generate(prompt, num_tokens, keep_row, kept[s])))
    run = ReferenceRun(
        path=path,
        prompts=tuple(tuple(p) for p in prompts),
        tokens=tuple(tokens),
        kept=kept,
        spool=spool,
        floor=NoiseFloor(0.0, 0.0, {}),
        nonfinite=nonfinite,
        oracle=None,
        oracle_kld=None,
        quantization_kld=None,
    )
    if nonfinite:
        return run
    return _with_context(run, oracle_model, progress)


def _with_context(run: ReferenceRun, oracle_model: LoadedModel | None, progress: Progress) -> ReferenceRun:
    loaded, path = run.path.loaded, run.path
    variants = {
        "padded_batch": _against_itself(run, path, progress),
        "padded_batch_eager": _against_itself(run, replace(path, attention="eager"), progress),
    }
    unit = torch.finfo(loaded.model.dtype).eps / 2
    floor = NoiseFloor(
        mean_kld=max(
            roundoff_kld(variants["padded_batch"], loaded.model.dtype), *(v.mean_kld for v in variants.values())
        ),
        margin=MARGIN_HEADROOM
        * max(
            2 * unit * float(abs(variants["padded_batch"].column("top_logit")).max()),
            *(float(v.column("margin_shift").max()) for v in variants.values()),
        ),
        variants=variants,
    )
    oracle, oracle_kld = None, None
    if oracle_model is not None:
        progress(f"oracle: the model in {str(oracle_model.model.dtype).removeprefix('torch.')}")
        oracle, oracle_kld = _spool_whole(run, DensePath(oracle_model), torch.float32)
    quantization_kld = None
    if path.scales is not None:
        progress("cost of quantisation: dense without it")
        spool, quantization_kld = _spool_whole(run, DensePath(loaded), loaded.model.dtype)
        spool.close()
    return replace(run, floor=floor, oracle=oracle, oracle_kld=oracle_kld, quantization_kld=quantization_kld)


def _against_itself(run: ReferenceRun, path: DensePath, progress: Progress) -> LogitStats:
    """``path`` in one padded batch, on the reference's tokens, against the reference: another valid order of sums."""
    progress(f"noise floor: dense against itself, padded batch, {path.attention}")
    stats = LogitStats()
    batch = _batchable([len(p) for p in run.prompts])
    rows = path.forced_batch(*([field[i] for i in batch] for field in (run.prompts, run.tokens, run.kept)))
    for i, position, row in rows:
        seq = batch[i]
        stats.add(compare_rows(run.spool.get((seq, position)), row, run.target(seq, position)))
    return stats


def _batchable(lengths: Sequence[int]) -> list[int]:
    """Prompts to pad into one batch: not those so long that the batch would be mostly padding. At least two rows."""
    typical = sorted(lengths)[len(lengths) // 2]
    chosen = [i for i, n in enumerate(lengths) if n <= 2 * typical]
    return chosen if len(chosen) > 1 else [*chosen, *chosen]


def _spool_whole(run: ReferenceRun, path: DensePath, dtype: torch.dtype) -> tuple[LogitSpool, float]:
    """Logits of another dense path on the same tokens, and the mean KLD of the reference from it."""
    spool = LogitSpool(path.loaded.geometry.vocab_size, dtype)
    stats = LogitStats()
    try:
        for s, (prompt, tokens) in enumerate(zip(run.prompts, run.tokens, strict=True)):
            text = [*prompt, *tokens[:-1]]
            for position, row in path.whole(text, [*run.kept[s], *range(len(prompt), len(text))]):
                spool.put((s, position), row)
                stats.add(compare_rows(row, run.spool.get((s, position)), run.target(s, position)))
    except BaseException:
        spool.close()
        raise
    return spool, stats.mean_kld
