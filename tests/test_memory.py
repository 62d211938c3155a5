"""The setting ``memory``: it decides whether networks are recurrent, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from conftest import MakeConfig
from rl_training import A2C, DQN, DRQN, PPO, RecurrentPPO
from rl_training.algorithms.a2c import A2CConfig
from rl_training.algorithms.dqn import DQNConfig, DQNSettings
from rl_training.algorithms.drqn import DRQNConfig
from rl_training.algorithms.ppo import OnPolicyConfig, PPOConfig, RolloutMemoryConfig
from rl_training.algorithms.q_learning import QLearningConfig
from rl_training.algorithms.sac import SACConfig, SACSettings
from rl_training.algorithms.sequence_replay import SequenceReplayConfig
from rl_training.algorithms.td3 import TD3Config, TD3Settings
from rl_training.config import algo_config_type
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS
from rl_training.types import Progress

START = Progress(0, 1)
QUIET: dict[str, Any] = {"seed": 5, "num_envs": 4, "progress": False, "lstm_size": 8}


def weights_after(model: Any, steps: int = 512) -> dict[str, torch.Tensor]:
    model.learn(steps, run_dir=None)
    weights: dict[str, torch.Tensor] = model.policy.module.state_dict()
    return weights


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_ppo_with_memory_is_recurrent_ppo_bit_for_bit(memory: str) -> None:
    settings = {**QUIET, "num_steps": 32, "sequence_length": 16, "memory": memory}
    ours = weights_after(PPO("CartPole-v1", **settings))
    theirs = weights_after(RecurrentPPO("CartPole-v1", **settings))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_dqn_with_memory_is_drqn_bit_for_bit(memory: str) -> None:
    settings: dict[str, Any] = {
        **QUIET, "memory": memory, "learning_starts": 64, "train_freq": 4, "n_step": 2,
        "batch_sequences": 4, "buffer_size": 400, "double": True,
    }  # fmt: skip
    ours = weights_after(DQN("CartPole-v1", batch_size=3, **settings))
    theirs = weights_after(DRQN("CartPole-v1", **settings))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "base", "memory"),
    [
        (PPOConfig, OnPolicyConfig, RolloutMemoryConfig),
        (A2CConfig, OnPolicyConfig, RolloutMemoryConfig),
        (DQNConfig, DQNSettings, SequenceReplayConfig),
        (DRQNConfig, QLearningConfig, SequenceReplayConfig),
        (SACConfig, SACSettings, SequenceReplayConfig),
        (TD3Config, TD3Settings, SequenceReplayConfig),
    ],
)
def test_settings_of_memory_change_no_other_default(kind: Any, base: Any, memory: Any) -> None:
    """A dataclass brings the defaults of its bases along: the order of the bases matters."""
    own = {*kind.__annotations__, *memory.__annotations__}
    for field in dataclasses.fields(base):
        if field.name not in own:
            assert kind.__dataclass_fields__[field.name].default == field.default, field.name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_registry_declares_what_a_config_accepts(name: str) -> None:
    declared, kind = ALGORITHMS[name].memory, algo_config_type(name)
    hints = get_type_hints(kind)
    refused = "memory" in kind.NOT_SUPPORTED or "memory" not in hints
    accepted = ("none",) if refused else get_args(hints["memory"])
    assert accepted == declared


def test_a2c_learns_from_whole_sequences(make_config: MakeConfig) -> None:
    """Its only batch has every step of the rollout once, and the states that acted."""
    config = make_config(algo="a2c", memory="gru", lstm_size=8, num_steps=12, sequence_length=4)
    trainer: Any = ExperimentManager.setup(config)
    rollout, learner = trainer.buffer, trainer.learner
    given: list[Any] = []
    rollout.reset()
    trainer.source.collect(rollout, 12, START)
    real = learner.update

    def update(*batches: Any) -> Any:
        given.append(batches[0])
        return real(*batches)

    learner.update = update
    learner.learn(rollout, START)
    ((batch,),) = (given,)
    assert batch["mask"].sum() == 12 * config.num_envs
    taken = batch["advantages"][batch["mask"] > 0]
    expected = rollout.advantages.flatten().sort().values
    assert torch.equal(taken.sort().values, expected)
    again = learner.model.evaluate(batch).value[batch["mask"] > 0]
    assert not torch.equal(again, batch["values"][batch["mask"] > 0])  # the weights moved
    trainer.close()


def test_policies_with_memory_take_and_return_a_state(tmp_path: Path) -> None:
    model = A2C("CartPole-v1", memory="gru", **QUIET)
    model.learn(256, run_dir=tmp_path / "run")
    obs = np.full(4, 0.1, np.float32)
    loaded = A2C.load(tmp_path / "run")
    action, state = loaded.predict(obs)
    assert action in (0, 1)
    assert state.shape == (16,)
    assert not (loaded.predict(obs, state)[1] == state).all()
    with pytest.raises(ConfigError, match="predict"):
        loaded.policy.act(obs)
    with pytest.raises(ConfigError, match="no memory"):
        A2C("CartPole-v1", progress=False).predict(obs, state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": "module:Class"}, "network' must be unset with memory: gru"),
        ({"acceleration": "compile"}, "acceleration' must be eager with memory: gru"),
        ({"vectorization": "device"}, "memory' must be none with vectorization: device"),
        ({"num_steps": 40}, "sequence_length' must be a divisor of num_steps = 40"),
        ({"memory": "elman"}, "memory"),
        ({"memory": "none", "lstm_size": 32}, "lstm_size' must be unset without memory"),
        ({"memory": "none", "algo": "dqn", "burn_in": 0}, "burn_in' must be unset without memory"),
        ({"algo": "appo", "num_steps": 64}, "memory' must be unset: V-trace"),
        (
            {"overlap": True, "preprocessing": "atari", "vectorization": "native"},
            "'overlap' does not work with ppo, whose policy is recurrent",
        ),
    ],
)
def test_what_does_not_fit_memory_is_refused(
    settings: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**{"memory": "gru", **settings})


def test_a_rollout_of_a2c_is_one_sequence_by_default() -> None:
    config = A2CConfig(memory="lstm")
    assert config.sequence_length == config.num_steps
