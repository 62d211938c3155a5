"""Probe environments that every algorithm in the registry must learn in seconds.

Each isolates one thing that can be wrong: the value of a constant, a value that depends on the
observation, discounting, a policy that depends on the observation, action masks, action scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import ONLINE, WITH_MEMORY, MakeConfig, plain, probe, takes_discrete
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime.trainer import Trainer

DISCRETE = [algo for algo in ONLINE if takes_discrete(algo)]
BOX_ACTIONS = [algo for algo in ONLINE if "bounded Box" in ALGORITHMS[algo].actions]
NORMALIZES_OBSERVATIONS = ["ppo", "a2c", "ppg", "recurrent_ppo"]
ACTOR_CRITIC = {
    "learning_starts": 256,
    "train_freq": 8,
    "gradient_steps": 2,
    "batch_size": 64,
    "buffer_size": 4096,
    "hidden_sizes": [32, 32],
    "tau": 0.05,
}
KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 32},
    "a2c": {"num_steps": 8, "lr_schedule": "linear", "log_std_init": -1.0},
    "impala": {
        "num_steps": 16,
        "num_minibatches": 2,
        "lr_schedule": "linear",
        "log_std_init": -1.0,
    },
    "appo": {"num_steps": 32},
    "ppg": {"num_steps": 32, "policy_phases": 4},
    "dqn": {
        "learning_starts": 256,
        "train_freq": 8,
        "gradient_steps": 2,
        "batch_size": 64,
        "buffer_size": 4096,
        "target_update_interval_steps": 128,
        "exploration_fraction": 0.3,
    },
    "recurrent_ppo": {"num_steps": 32, "sequence_length": 8, "lstm_size": 32},
    # Without entropy the soft values are the plain ones.
    "sac": {**ACTOR_CRITIC, "ent_coef": 0.0},
    "sac_discrete": {**ACTOR_CRITIC, "ent_coef": 0.0},
    "td3": ACTOR_CRITIC,
    "pqn": {"num_steps": 16, "num_minibatches": 2, "exploration_fraction": 0.3},
}
KNOBS["qrdqn"] = {**KNOBS["dqn"], "num_quantiles": 16}
KNOBS["c51"] = {**KNOBS["dqn"], "v_min": -2.0, "v_max": 2.0}
KNOBS["iqn"] = {**KNOBS["dqn"], "num_quantiles": 8, "num_target_quantiles": 8}
KNOBS["drqn"] = {
    **{name: value for name, value in KNOBS["dqn"].items() if name != "batch_size"},
    "batch_sequences": 32,
    "sequence_length": 4,
    "burn_in": 1,
}


_SEQUENCES = {"batch_sequences": 32, "sequence_length": 4, "burn_in": 1}
MEMORY: dict[str, dict[str, Any]] = {
    **{algo: {"lstm_size": 32, "sequence_length": 8} for algo in ("ppo", "a2c", "ppg")},
    **{algo: {"lstm_size": 32, **_SEQUENCES} for algo in ("dqn", "sac", "td3")},
}


def train(make_config: MakeConfig, algo: str, env: str, **overrides: Any) -> Trainer:
    config: TrainConfig[Any] = make_config(
        algo=algo,
        num_envs=8,
        eval_episodes=20,
        learning_rate=3e-3,
        gamma=0.9,
        **{
            "total_timesteps": 8192,
            **probe(algo, env),
            **KNOBS[plain(algo)],
            **(MEMORY[plain(algo)] if "+" in algo else {}),
            **overrides,
        },
    )
    trainer = ExperimentManager.setup(config)
    trainer.train()
    return trainer


def values(
    trainer: Trainer, observations: list[list[float]], *, one_episode: bool = False
) -> list[float]:
    """State values; of an action-value learner, those of the best action.

    To one that remembers, observations are first ones or, in ``one_episode``, come in turn.
    """
    with torch.no_grad():
        model: Any = trainer.algorithm.module
        obs = torch.tensor(observations)
        if hasattr(model, "state_size"):
            turns = obs.unsqueeze(1) if one_episode else obs.unsqueeze(0)
            state = model.initial_state(turns.shape[1])
            if hasattr(model, "q_values_sequence"):
                found = model.q_values_sequence(turns, state).amax(-1).flatten()
            else:
                actions = torch.zeros(turns.shape[:2], dtype=torch.int64)
                batch = {"obs": turns, "actions": actions, "state": state}
                found = model.evaluate(batch).value.flatten()
        elif hasattr(model, "value"):
            found = model.value(obs)
        elif hasattr(model, "q_values"):
            found = model.q_values(obs).amax(-1)
        else:
            found = model.critics(obs, model.actor.actions(obs)).amin(0)
        return [float(v) for v in found]


@pytest.mark.full  # the next one is harder; this one tells what is wrong where it fails
@pytest.mark.parametrize("algo", ONLINE)
def test_value_of_a_constant_reward(algo: str, make_config: MakeConfig) -> None:
    trainer = train(make_config, algo, "ConstantReward")
    assert values(trainer, [[0.0]]) == pytest.approx([1.0], abs=0.05)


@pytest.mark.parametrize("algo", ONLINE)
def test_value_that_depends_on_the_observation(algo: str, make_config: MakeConfig) -> None:
    trainer = train(make_config, algo, "ObservationReward")
    assert values(trainer, [[-1.0], [1.0]]) == pytest.approx([-1.0, 1.0], abs=0.1)


@pytest.mark.parametrize("algo", ONLINE)
def test_value_of_a_delayed_reward_is_discounted(algo: str, make_config: MakeConfig) -> None:
    trainer = train(make_config, algo, "DelayedReward")
    found = values(trainer, [[0.0], [1.0]], one_episode=True)
    assert found == pytest.approx([0.9, 1.0], abs=0.05)


@pytest.mark.parametrize("algo", [*ONLINE, *WITH_MEMORY])
def test_policy_that_depends_on_the_observation(algo: str, make_config: MakeConfig) -> None:
    trainer = train(make_config, algo, "MatchObservation")
    assert trainer.metrics["eval/return_min"] == 1.0


@pytest.mark.parametrize("algo", DISCRETE)
def test_masked_actions_are_honoured_and_learnt(algo: str, make_config: MakeConfig) -> None:
    # The environment raises on an illegal action, so collecting and evaluating are both checked.
    trainer = train(make_config, algo, "MaskedActions")
    assert trainer.metrics["eval/return_min"] == 1.0


@pytest.mark.parametrize("algo", BOX_ACTIONS)
def test_box_actions_of_an_odd_scale(algo: str, make_config: MakeConfig) -> None:
    settings: dict[str, Any] = {"env_kwargs": {}, "total_timesteps": 16384}
    if algo in ("ppo", "recurrent_ppo"):
        settings["ent_coef"] = 0.0
    if algo == "sac":  # learnt, so that it explores
        settings["ent_coef"] = None
    trainer = train(make_config, algo, "ReachTarget", **settings)
    assert trainer.metrics["eval/return_min"] > -0.05
    action = trainer.source.info.action_spec.to_env(np.array([[-5.0], [0.0], [5.0]]))
    assert action.tolist() == [[-20.0], [20.0], [60.0]]


@pytest.mark.parametrize("algo", NORMALIZES_OBSERVATIONS)
def test_normalised_observations_and_rewards_still_learn(
    algo: str, make_config: MakeConfig
) -> None:
    trainer = train(
        make_config, algo, "MatchObservation", normalize_obs=True, normalize_reward=True
    )
    assert trainer.metrics["eval/return_min"] == 1.0
