"""What is TD3's own on the runtime; what it shares with SAC is in test_sac_trainer_smoke."""

from __future__ import annotations

import pytest

from conftest import MakeConfig
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.td3_trainer import train_td3
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run
from test_resume import StopAt


def test_it_logs_what_it_learns(make_config: MakeConfig) -> None:
    result = train_td3(make_config(algo="td3"))
    names = {"critic_loss", "q_mean", "actor_loss"}
    assert {f"losses/{name}" for name in names} <= set(result.metrics)
    assert result.metrics["losses/actor_loss"] != 0.0


def test_stopped_in_the_middle_of_a_delay_it_goes_on_alike(make_config: MakeConfig) -> None:
    config = make_config(algo="td3", total_timesteps=3000, train_freq=9, policy_delay=5)
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(1000)]).train()
    assert part.interrupted
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


def test_a_config_for_another_algorithm_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="algo: sac"):
        train_td3(make_config(algo="sac"))
