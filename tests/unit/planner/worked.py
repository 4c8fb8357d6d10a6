"""The example that was worked by hand: Llama-3-8B's shape on 24 GiB with 4 used and 12 GiB with 2 used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pabench.planner.budget import Device
from pabench.planner.config import shape_from_config
from pabench.planner.plan import Plan, PlanRequest, make_plan
from pabench.planner.pool import Paging

GIB, MIB = 1 << 30, 1 << 20
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA = shape_from_config("llama-3-8b", CONFIG)
BIG, SMALL = Device("big", "cuda", 24 * GIB, 4 * GIB), Device("small", "cuda", 12 * GIB, 2 * GIB)


def request(kv_dtype: str = "bf16", **changes: Any) -> PlanRequest:
    fixed = {"weights_loaded": True, "reserve": 0, "paging": Paging(32, kv_dtype)}
    return PlanRequest(**{"model": LLAMA, "devices": (BIG, SMALL), **fixed, **changes})


def plan(kv_dtype: str = "bf16", **changes: Any) -> Plan:
    return make_plan(request(kv_dtype, **changes))


def write_example(folder: Path) -> tuple[Path, Path]:
    """config.json and devices.json of the example."""
    config, devices = folder / "config.json", folder / "devices.json"
    config.write_text(json.dumps(CONFIG))
    fields = ("name", "kind", "total_bytes", "used_bytes")
    devices.write_text(json.dumps([{f: getattr(d, f) for f in fields} for d in (BIG, SMALL)]))
    return config, devices
