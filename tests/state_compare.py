"""Bit-for-bit comparison of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rl_training.checkpointing import load_checkpoint
from rl_training.logging import WALL_CLOCK


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two checkpoint states differ in a single bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8) if a.numel() else a,
            b.contiguous().reshape(-1).view(torch.uint8) if b.numel() else b,
        )
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{where}: keys"]
        return [d for key in a for d in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f"{where}: length"]
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and repr(a) == repr(b) else [f"{where}: {a!r} != {b!r}"]


def final_state(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint, less what names the folder or depends on the clock's digits."""
    state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
    state["config"].pop("output_dir")
    state["training"]["counters"].pop("log_offset")
    return state


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metric log without wall-clock fields."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


def assert_same_run(a: Path, b: Path) -> None:
    """Parameters, optimizer, random generators, environments and metrics: all equal."""
    assert differences(final_state(a), final_state(b)) == []
    assert metric_rows(a) == metric_rows(b)
