"""A seed decides a run, and nothing that only watches it changes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import WITH_MEMORY, MakeConfig
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.seeding import stream_seed
from state_compare import assert_same_run, differences, final_state, metric_rows


def weights(config: TrainConfig[Any]) -> dict[str, torch.Tensor]:
    run_dir = ExperimentManager.setup(config).train().run_dir
    model: dict[str, torch.Tensor] = final_state(run_dir)["algorithm"]["model"]
    return model


@pytest.mark.parametrize("algo", [*ALGORITHMS, *WITH_MEMORY])
def test_same_seed_same_run_and_another_seed_another_run(
    algo: str, make_config: MakeConfig
) -> None:
    runs = []
    for noise, seed in ((1, 7), (2, 7), (2, 8)):
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002 - what a run must not depend on
        runs.append(ExperimentManager.setup(make_config(algo=algo, seed=seed)).train().run_dir)
    first, again, other = runs
    assert_same_run(first, again)
    models = [final_state(run)["algorithm"]["model"] for run in (first, other)]
    assert differences(*models)


def test_evaluation_checkpoints_and_logging_leave_training_alone(make_config: MakeConfig) -> None:
    bare = make_config(eval_episodes=0, checkpoint_interval=0, log_interval_steps=10_000)
    busy = make_config(
        eval_episodes=3, eval_interval=128, checkpoint_interval=128, tensorboard=True
    )
    sampling = make_config(eval_interval=128, eval_deterministic=False)
    assert differences(weights(bare), weights(busy)) == []
    assert differences(weights(bare), weights(sampling)) == []


def test_evaluation_depends_on_seed_and_step_alone(make_config: MakeConfig) -> None:
    often = ExperimentManager.setup(make_config(eval_interval=128)).train()
    once = ExperimentManager.setup(make_config(eval_interval=0)).train()
    last = [row for row in metric_rows(often.run_dir) if "eval/return_mean" in row][-1]
    assert [row for row in metric_rows(once.run_dir) if "eval/return_mean" in row] == [last]


def test_streams_are_keyed_by_name_not_by_order() -> None:
    seeds = {stream_seed(s, n, k) for s in range(5) for n in ("actions", "replay") for k in (0, 1)}
    assert len(seeds) == 20
    assert stream_seed(3, "actions") == stream_seed(3, "actions")
    assert all(0 <= seed < 2**63 for seed in seeds)
