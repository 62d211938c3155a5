"""A passive corridor: a cue at the start, then nothing, and a last action that must match it.

Without memory the best that can be done is to be right half of the time, which is a return of 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from conftest import MakeConfig
from rl_training.experiment.manager import ExperimentManager

DELAY, SEED = 50, 101
ROLLOUT: dict[str, Any] = {
    "num_steps": 104,
    "sequence_length": 104,
    "ent_coef": 0.01,
    "optimizer_eps": 1e-8,
}
EPOCHS: dict[str, Any] = {**ROLLOUT, "num_minibatches": 1, "learning_rate": 3e-3}
REPLAY: dict[str, Any] = {
    "learning_starts": 2000,
    "train_freq": 16,
    "batch_sequences": 32,
    "buffer_size": 50_000,
    "sequence_length": 52,
    "burn_in": 0,
    "learning_rate": 2e-3,
    "activation": "tanh",
}
CRITICS: dict[str, Any] = {**REPLAY, "hidden_sizes": [32], "tau": 0.02}
KNOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "ppo": (300_000, EPOCHS),
    "a2c": (400_000, {**ROLLOUT, "learning_rate": 2e-3, "norm_adv": True}),
    "ppg": (
        300_000,
        {**EPOCHS, "policy_phases": 8, "num_aux_minibatches": 4, "aux_epochs": 2},
    ),
    "dqn": (50_000, {**REPLAY, "target_update_interval_steps": 500}),
    # A reward once in 51 steps is small beside the entropy.
    "sac": (50_000, {**CRITICS, "ent_coef": 0.001}),
}
"""Steps and settings, chosen on seed 101."""
CASES = [
    *[("ppo", False, "lstm"), ("ppo", True, "gru"), ("a2c", False, "gru"), ("ppg", False, "lstm")],
    *[("dqn", False, "gru"), ("sac", True, "lstm")],
]
"""Algorithm, whether actions are a Box, and the memory."""
OF_MEMORY = ("sequence_length", "burn_in", "batch_sequences", "lstm_size")


def mean_return(
    make_config: MakeConfig, algo: str, continuous: bool, delay: int, steps: int, **knobs: Any
) -> float:
    """The mean return of the final policy of a run, over 40 episodes."""
    config = make_config(
        algo=algo,
        env_id="probe/Recall-v0",
        env_kwargs={"continuous": continuous, "delay": delay},
        num_envs=8,
        total_timesteps=steps,
        eval_episodes=40,
        eval_interval=0,
        **knobs,
    )
    result = ExperimentManager.setup(config).train()
    return float(result.metrics["eval/return_mean"])


@pytest.mark.learn
@pytest.mark.parametrize(("algo", "continuous", "memory"), CASES)
def test_a_cue_is_remembered_over_50_steps(
    algo: str, continuous: bool, memory: str, make_config: MakeConfig
) -> None:
    steps, knobs = KNOBS[algo]
    span = {"memory": memory, "memory_span": DELAY + 2, "lstm_size": 32}
    assert mean_return(make_config, algo, continuous, DELAY, steps, seed=SEED, **knobs, **span) == 1


@pytest.mark.learn
@pytest.mark.parametrize(("algo", "continuous"), [(a, b) for a, b, m in CASES if m == "lstm"])
def test_without_memory_it_is_chance(algo: str, continuous: bool, make_config: MakeConfig) -> None:
    steps, knobs = KNOBS[algo]
    knobs = {name: value for name, value in knobs.items() if name not in OF_MEMORY}
    found = mean_return(make_config, algo, continuous, DELAY, steps, seed=SEED, **knobs)
    assert abs(found) < 0.5


SHORT: dict[str, Any] = {
    "batch_sequences": 32, "sequence_length": 4, "burn_in": 0, "learning_starts": 500,
    "train_freq": 8, "buffer_size": 10_000, "learning_rate": 4e-3, "hidden_sizes": [32],
    "tau": 0.02, "ent_coef": 0.01, "gamma": 0.9, "lstm_size": 16,
    "activation": "tanh",
}  # fmt: skip


@pytest.mark.learn
def test_td3_remembers_a_cue_over_four_steps(make_config: MakeConfig) -> None:
    """A fast policy saturates its tanh before the critics know what the cue means."""
    slow = {
        **{name: value for name, value in SHORT.items() if name != "ent_coef"},
        "sequence_length": 6,
        "learning_starts": 1500,
        "train_freq": 4,
        "memory": "gru",
        "buffer_size": 50_000,
        "actor_learning_rate": 2e-4,
        "exploration_noise": 0.5,
    }
    assert mean_return(make_config, "td3", True, 4, 8000, seed=SEED, **slow) == 1.0


@pytest.mark.parametrize("memory", ["gru", pytest.param("none", marks=pytest.mark.full)])
def test_sac_remembers_a_cue_over_two_steps(memory: str, make_config: MakeConfig) -> None:
    knobs = {**SHORT, "memory": memory}
    if memory == "none":
        knobs = {name: value for name, value in SHORT.items() if name not in OF_MEMORY}
    found = mean_return(make_config, "sac", True, 2, 5000, **knobs)
    assert found == 1.0 if memory == "gru" else abs(found) < 0.7
