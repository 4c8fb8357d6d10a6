"""``pabench plan``"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class WeightsAre(StrEnum):
    estimate = "estimate"
    loaded = "loaded"


class CapAt(StrEnum):
    none = "none"
    model = "model"
    requested = "requested"


class Scales(StrEnum):
    none = "none"
    block = "block"
    token = "token"


def plan(
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="A config.json, its folder, a built-in name or a cached hub id."),
    ] = None,
    devices: Annotated[str, typer.Option("--devices", help="A devices file, or auto.", metavar="FILE|auto")] = "auto",
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks, one device each.")] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers of each device, e.g. 20,12; or best.", metavar="N,M|best")
    ] = None,
    utilization: Annotated[float, typer.Option("--utilization", help="Share of each memory to use.")] = 0.9,
    weights: Annotated[
        WeightsAre, typer.Option("--weights", help="Whether used_bytes holds them already.")
    ] = WeightsAre.estimate,
    reserve: Annotated[
        str, typer.Option("--reserve", help="For activations and safety.", metavar="BYTES|auto")
    ] = "auto",
    context: Annotated[int | None, typer.Option("--context", help="Tokens that must be reachable.")] = None,
    sequences: Annotated[int, typer.Option("--sequences", help="Sequences that reach it at the same time.")] = 1,
    cap: Annotated[CapAt, typer.Option("--cap", help="The most that is worth holding.")] = CapAt.none,
    reserved_blocks: Annotated[int, typer.Option("--reserved-blocks", help="Null blocks, which hold no tokens.")] = 0,
    block_size: Annotated[int | None, typer.Option("--block-size", help="Tokens per block; 32 if not given.")] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", hidden=True)] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="fp32, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2 or int8.")
    ] = "bf16",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the weights; the config's if not given.")] = None,
    scales: Annotated[Scales, typer.Option("--scales", help="Scales stored per block or per token.")] = Scales.none,
    free_behind_window: Annotated[
        bool, typer.Option("--free-behind-window", help="Give back blocks behind a sliding window.")
    ] = False,
    step_tokens: Annotated[int, typer.Option("--step-tokens", help="Tokens of the largest step.")] = 2048,
    lengths: Annotated[
        str, typer.Option("--lengths", help="How many sequences of these lengths fit at once.", metavar="N,M")
    ] = "1024,4096,16384",
    num_layers: Annotated[int | None, typer.Option("--num-layers", help="In place of -m.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="In place of -m.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Of K, in place of -m.")] = None,
    head_dim_v: Annotated[int | None, typer.Option("--head-dim-v", help="Of V, where it is another.")] = None,
    latent_dim: Annotated[int | None, typer.Option("--latent-dim", help="MLA: kv_lora_rank + rope_dim.")] = None,
    num_q_heads: Annotated[int | None, typer.Option("--num-q-heads", help="Needed for --tp.")] = None,
    window: Annotated[int | None, typer.Option("--window", help="Sliding window of every layer.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Tokens the model can take.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
) -> None:
    """Say how many KV blocks fit into the memory of one or several devices, and how long a sequence that guarantees."""
    from pabench.errors import UsageError
    from pabench.planner.ask import numbers, request_of, split_option
    from pabench.planner.plan import make_plan

    if block_size is not None and page_size is not None:
        raise UsageError("--block-size and --page-size are one option; give it once")
    size = block_size if block_size is not None else page_size
    shape = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "latent_dim": latent_dim,
        "num_q_heads": num_q_heads,
        "window": window,
        "max_length": max_length,
    }
    made = make_plan(
        request_of(
            model,
            shape,
            devices=devices,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=32 if size is None else size,
            scales=scales.value,
            free_behind_window=free_behind_window,
            step_tokens=step_tokens,
            reserve=None if reserve == "auto" else numbers("--reserve", reserve)[0],
            lengths=numbers("--lengths", lengths) if lengths else (),
            layers=split_option(layers),
            tp=tp,
            utilization=utilization,
            weights_loaded=weights is WeightsAre.loaded,
            context=context,
            sequences=sequences,
            cap=cap.value,
            reserved_blocks=reserved_blocks,
        )
    )
    if json_:
        import json

        from pabench.planner.to_json import plan_to_json

        typer.echo(json.dumps(plan_to_json(made), indent=2, ensure_ascii=False))
    else:
        from pabench.report.console import ResultConsole
        from pabench.report.plan_table import print_plan

        print_plan(made, ResultConsole())
    if not made.fits:
        from pabench.planner.words import shortfall

        typer.echo(f"error: {shortfall(made)}", err=True)
        raise typer.Exit(3)
