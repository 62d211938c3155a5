"""PPO on real Atari games through the whole runtime: train, kill, resume, load, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atari_runs import QUICK_ATARI, assert_policy_works, atari_run
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.sources import LocalSource
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, differences, final_state
from test_resume import run_and_kill

pytest.importorskip("ale_py")


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_it_trains_saves_loads_and_evaluates(vectorization: str, make_config: MakeConfig) -> None:
    result = atari_run("ppo", make_config, vectorization=vectorization)
    assert result.metrics["global_step"] == 128
    assert np.isfinite(result.metrics["losses/loss"])
    model = load_checkpoint(result.checkpoint_path)["algorithm"]["model"]
    assert model["encoder.networks.image0.weights.0"].shape == (32, 8, 8, 4)
    assert_policy_works(result)


@pytest.mark.parametrize(
    "kill",
    [("step", "64"), pytest.param(("save", "3"), marks=pytest.mark.full)],
    ids=lambda kill: kill[0],
)
@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_killed_and_resumed_equals_never_stopped(
    vectorization: str, kill: tuple[str, str], make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        algo="ppo",
        **{**QUICK_ATARI["ppo"], "vectorization": vectorization, "checkpoint_interval": 32},
    )
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", *kill)
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def test_overlap_changes_nothing_but_the_order_of_work(make_config: MakeConfig) -> None:
    """Rounding aside: the policy sees four rows at a time instead of eight."""
    runs = [
        atari_run("ppo", make_config, vectorization="native", num_envs=8, num_steps=8, overlap=it)
        for it in (False, True)
    ]
    one, other = (final_state(run.run_dir)["algorithm"]["model"] for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5)
    assert runs[0].metrics["global_step"] == runs[1].metrics["global_step"]


def test_overlapped_runs_repeat_and_resume(make_config: MakeConfig, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK_ATARI["ppo"], "vectorization": "native", "overlap": True}
    config = make_config(algo="ppo", **settings, checkpoint_interval=32)
    whole = ExperimentManager.setup(config).train()
    assert_same_run(whole.run_dir, ExperimentManager.setup(config).train().run_dir)
    killed = run_and_kill(config, tmp_path / "killed", "step", "64")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def test_values_and_logprobs_of_the_rollout_are_those_of_the_acting_network(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = ExperimentManager.setup(make_config(algo="ppo", **QUICK_ATARI["ppo"]))
    seen: dict[str, Any] = {}
    real = LocalSource.collect

    def collect(self: LocalSource, rollout: Any, *args: Any) -> Any:
        result = real(self, rollout, *args)
        if not seen:
            model = trainer.algorithm.module
            batch = rollout.flat()
            with torch.no_grad():
                said = model.evaluate({"obs": batch["obs"], "actions": batch["actions"]})
            seen.update(said=said, values=batch["values"].clone())
            seen["logprobs"] = batch["old_logprobs"].clone()
        return result

    monkeypatch.setattr(LocalSource, "collect", collect)
    trainer.train()
    torch.testing.assert_close(seen["values"], seen["said"].value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["logprobs"], seen["said"].logprob, rtol=1e-4, atol=1e-5)


def test_weights_start_another_run(make_config: MakeConfig) -> None:
    first = atari_run("ppo", make_config)
    config = make_config(algo="ppo", **QUICK_ATARI["ppo"], init_from=first.run_dir, seed=99)
    second: Any = ExperimentManager.setup(config)
    was = final_state(first.run_dir)["algorithm"]["model"]
    assert differences(was, dict(second.algorithm.module.state_dict())) == []
    second.close()
