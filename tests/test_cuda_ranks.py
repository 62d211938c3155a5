"""Ranks of torchrun on a GPU: one over NCCL, two that share it over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TESTS = Path(__file__).parent


def trained(folder: Path, shards: int, acceleration: str, ranks: int | None) -> Path:
    """Train in a folder of its own, plainly or by torchrun."""
    folder.mkdir()
    launcher = []
    if ranks is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            str(TESTS / "cuda_ranks.py"),
            folder,
            str(shards),
            acceleration,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def largest_difference(one: Path, other: Path) -> dict[str, float]:
    """The largest difference of any weight, by algorithm."""
    found = {}
    for algo in ("ppo", "dqn", "sac"):
        ours, theirs = (torch.load(folder / f"{algo}.pt") for folder in (one, other))
        assert ours.keys() == theirs.keys()
        found[algo] = max(float((ours[k] - theirs[k]).abs().max()) for k in ours)
    return found


@pytest.mark.parametrize("acceleration", ["eager", "cudagraph"])
def test_one_rank_over_nccl_agrees_with_a_plain_run(acceleration: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 1, acceleration, None)
    ranked = trained(tmp_path / "ranked", 1, acceleration, 1)
    assert (ranked / "sent.txt").read_text() == "nccl"
    differences = largest_difference(plain, ranked)
    print(acceleration, differences)
    assert max(differences.values()) < 1e-4


@pytest.mark.parametrize("acceleration", ["eager", "cudagraph"])
def test_two_ranks_that_share_a_gpu_agree_with_one_process(
    acceleration: str, tmp_path: Path
) -> None:
    one = trained(tmp_path / "one", 2, acceleration, None)
    two = trained(tmp_path / "two", 2, acceleration, 2)
    assert (two / "sent.txt").read_text() == "gloo"
    differences = largest_difference(one, two)
    print(acceleration, differences)
    assert max(differences.values()) < (1e-9 if acceleration == "eager" else 1e-4)
