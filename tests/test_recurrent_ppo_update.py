"""RecurrentPPO's learning phase: PPO's own loss, with padding that counts for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeConfig
from rl_training.algorithms.ppo import ppo_loss
from rl_training.contrib.recurrent_ppo import RecurrentPPO, RecurrentPPOConfig, recurrent_ppo_loss
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.types import Progress, Remembered

START = Progress(0, 1000)
COEFFICIENTS: dict[str, Any] = {"clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5}


def minibatch(length: int = 5, rows: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    names = ("logprobs", "old_logprobs", "advantages", "new_values", "values", "returns", "entropy")
    return {name: torch.randn(length, rows, generator=generator) for name in names}


def test_it_is_ppo_s_loss_of_the_steps_that_count() -> None:
    padded = minibatch()
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 1]]).float()
    found = recurrent_ppo_loss({**padded, "mask": mask}, **COEFFICIENTS, clip_vloss=True)
    real = {name: value[mask > 0] for name, value in padded.items()}
    expected = ppo_loss(real, **COEFFICIENTS, clip_vloss=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_what_padding_holds_does_not_matter() -> None:
    mask = torch.ones(5, 3)
    mask[3:, 1] = 0
    losses = []
    for junk in (0.0, 1e6):
        batch = {name: value.clone() for name, value in minibatch().items()}
        for name in ("advantages", "new_values", "returns", "entropy"):
            batch[name][mask == 0] = junk
        losses.append(recurrent_ppo_loss({**batch, "mask": mask}, **COEFFICIENTS)["loss"])
    assert torch.equal(losses[0], losses[1])


def test_sequences_without_a_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences need a mask"):
        recurrent_ppo_loss(minibatch(), **COEFFICIENTS)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lstm_size": 0}, "'algo_kwargs.lstm_size' must be at least 1"),
        ({"sequence_length": 0}, "'algo_kwargs.sequence_length' must be at least 1"),
        ({"sequence_length": 48}, "sequence_length' must be a divisor of num_steps = 128"),
        ({"sequence_length": 256}, "sequence_length' must be a divisor of num_steps = 128"),
        ({"num_minibatches": 5}, r"num_minibatches' must be a divisor .* = 2 \* 128 / 32 = 8"),
        (
            {"num_steps": 2, "sequence_length": 1, "num_minibatches": 4},
            "num_minibatches' must be below 4",
        ),
        ({"acceleration": "compile"}, "'acceleration' must be eager for recurrent_ppo"),
    ],
)
def test_impossible_settings_name_their_field(
    knobs: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(algo="recurrent_ppo", **{"num_steps": 128, **knobs})


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_the_defaults_work_with_any_number_of_environments(num_envs: int) -> None:
    from rl_training.config import TrainConfig

    config: TrainConfig[Any] = TrainConfig(algo="recurrent_ppo", num_envs=num_envs)
    assert config.algo_kwargs == RecurrentPPOConfig()
    assert config.algo_kwargs.lstm_size == 64


def test_values_and_logprobs_of_a_rollout_are_those_of_acting(make_config: MakeConfig) -> None:
    # Truncations fall inside sequences; every number is checked against a walk in torch.
    config = make_config(
        algo="recurrent_ppo", num_envs=3, num_steps=48, sequence_length=16, num_minibatches=3
    )
    config = config.with_overrides(env_kwargs={"max_episode_steps": 13})
    trainer: Any = ExperimentManager.setup(config)
    rollout, learner = trainer.buffer, trainer.learner
    assert isinstance(learner, RecurrentPPO)
    rollout.reset()
    trainer.source.collect(rollout, 48, START)
    learner.prepare(rollout, START)
    model: Any = learner.model
    ends, noticed = 0, 0
    state = model.initial_state(3)
    with torch.no_grad():
        for t in range(48):
            encoded = {"obs": rollout.obs[t : t + 1], "actions": rollout.actions[t : t + 1]}
            said = model.evaluate({**encoded, "state": state})
            torch.testing.assert_close(rollout.values[t], said.value[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rollout.logprobs[t], said.logprob[0], atol=1e-5, rtol=1e-5)
            _, after, _ = model.act(rollout.obs[t], state)
            state = torch.where(rollout.dones[t].bool().unsqueeze(1), 0.0, after)
            ends += int(rollout.dones[t].sum())
            noticed += int((rollout.bootstrap[t] != 0).sum())
        last = model.value(Remembered(rollout.next_obs, state))
    assert ends >= 9
    assert 1 <= noticed <= ends
    # A_T = r + gamma V(next) - V where nothing ended with the last step.
    going_on = rollout.dones[-1] == 0
    advantage = rollout.rewards[-1] + 0.99 * last - rollout.values[-1]
    torch.testing.assert_close(rollout.advantages[-1][going_on], advantage[going_on])
    trainer.close()


def test_one_environments_history_moves_no_other(make_config: MakeConfig) -> None:
    config = make_config(algo="recurrent_ppo", num_envs=4, num_steps=64)
    trainer: Any = ExperimentManager.setup(config)
    rollout, learner = trainer.buffer, trainer.learner
    rollout.reset()
    trainer.source.collect(rollout, 64, START)
    learner.prepare(rollout, START)
    before = rollout.values.clone(), rollout.logprobs.clone(), rollout.advantages.clone()
    rollout.obs[:, 2] += 1.0
    rollout.states[0][2] += 1.0
    learner.prepare(rollout, START)
    after = rollout.values, rollout.logprobs, rollout.advantages
    rest = [0, 1, 3]
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[:, rest], now[:, rest])
        assert not torch.equal(was[:, 2], now[:, 2])
    trainer.close()


def test_gradients_flow_back_through_time(make_config: MakeConfig) -> None:
    """Only the first observation differs; the loss of the last step alone must reach it."""
    config = make_config(algo="recurrent_ppo")
    trainer: Any = ExperimentManager.setup(config)
    model = trainer.learner.model
    obs = torch.randn(6, 1, 4, requires_grad=True)
    batch = {"obs": obs, "actions": torch.zeros(6, 1, dtype=torch.int64)}
    value = model.evaluate({**batch, "state": model.initial_state(1)}).value
    (gradient,) = torch.autograd.grad(value[-1].sum(), obs)
    assert (gradient[0].abs() > 0).all()
    assert np.isfinite(gradient.numpy()).all()
    trainer.close()
