"""PQN's loss and targets on numbers worked by hand, its layer normalisation and its settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import MakeConfig
from rl_training.algorithms.pqn import pqn_loss
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.cnn.nature import NatureCNN
from rl_training.models.mlp import MLP
from rl_training.types import Progress

STEPS, ENVS = 24, 3


def test_loss_by_hand() -> None:
    batch = {"q_values": torch.tensor([1.0, -2.0, 5.0]), "returns": torch.tensor([2.0, -4.0, 5.0])}
    found = pqn_loss(batch)
    assert float(found["loss"]) == pytest.approx((1 + 4 + 0) / 3 / 2)
    assert float(found["q_mean"]) == pytest.approx(4 / 3)
    assert float(found["td_error"]) == pytest.approx(1.0)
    masked = pqn_loss({**batch, "mask": torch.tensor([1.0, 0.0, 1.0])})
    assert float(masked["loss"]) == pytest.approx(1 / 2 / 2)
    assert float(masked["q_mean"]) == pytest.approx(3.0)


def collected(make_config: MakeConfig, **settings: Any) -> Any:
    """A trainer with a rollout that was collected and not learnt from; truncations included."""
    config = make_config(
        algo="pqn",
        **{
            "env_id": "CartPole-v1",
            "env_kwargs": {"max_episode_steps": 9},
            "num_envs": ENVS,
            "num_steps": STEPS,
            **settings,
        },
    )
    trainer: Any = ExperimentManager.setup(config, run_dir=None)
    trainer.source.collect(trainer.buffer, STEPS, Progress(0, 512))
    return trainer


def returns_by_hand(trainer: Any, q_lambda: float) -> Any:
    """The recursion of the paper as a loop over steps; float64."""
    buffer, model = trainer.buffer, trainer.learner.module

    def greedy(obs: Any) -> Any:
        with torch.no_grad():
            return model.q_values(obs).max(-1).values.double().numpy()

    after = np.zeros((STEPS, ENVS))
    after[:-1] = greedy(buffer.obs[1:].flatten(0, 1)).reshape(STEPS - 1, ENVS)
    after[-1] = greedy(buffer.next_obs)
    dones, rewards = buffer.dones.numpy() > 0, buffer.rewards.double().numpy()
    found = buffer.truncated_observations()
    assert found is not None
    index, final_obs = found
    finals = np.zeros((STEPS, ENVS))
    finals.reshape(-1)[index.numpy()] = greedy(final_obs)
    gamma = trainer.config.algo_kwargs.gamma
    returns = np.zeros((STEPS, ENVS))
    for t in reversed(range(STEPS)):
        for i in range(ENVS):
            following = after[t, i]
            if dones[t, i]:
                following = finals[t, i]
            elif t + 1 < STEPS:
                following = (1 - q_lambda) * following + q_lambda * returns[t + 1, i]
            returns[t, i] = rewards[t, i] + gamma * following
    return returns


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_targets_by_hand(make_config: MakeConfig, q_lambda: float) -> None:
    trainer = collected(make_config, q_lambda=q_lambda)
    with torch.no_grad():  # so that values matter beside rewards of 1
        trainer.learner.module.advantage.layers[-1].weight.mul_(20.0)
    expected = returns_by_hand(trainer, q_lambda)
    trainer.learner.prepare(trainer.buffer, Progress(0, 512))
    np.testing.assert_allclose(trainer.buffer.returns.numpy(), expected, rtol=0, atol=1e-4)
    assert np.abs(expected - 1).max() > 1


def test_targets_are_of_legal_actions(make_config: MakeConfig) -> None:
    trainer = collected(make_config, env_id="probe/MaskedActions-v0", env_kwargs={})
    mask = trainer.buffer.obs["action_mask"]
    assert not mask.all()
    with torch.no_grad():
        values, _ = trainer.learner.module.policy(trainer.buffer.flat()["obs"])
        trainer.learner.prepare(trainer.buffer, Progress(0, 512))
    legal = values.masked_fill(~mask.flatten(0, 1), -torch.inf).amax(-1)
    torch.testing.assert_close(trainer.buffer.values.flatten(), legal)
    assert (values.amax(-1) > legal).any()


def test_it_explores_less_and_less_and_acts_greedily_in_the_end(make_config: MakeConfig) -> None:
    trainer = collected(make_config, exploration_final_eps=0.0)
    source, buffer = trainer.source, trainer.buffer
    with torch.no_grad():
        greedy = trainer.learner.module.q_values(buffer.obs.flatten(0, 1)).argmax(-1)
    assert (greedy != buffer.actions.flatten()).any()
    buffer.reset()
    source.collect(buffer, STEPS, Progress(511, 512))
    with torch.no_grad():
        greedy = trainer.learner.module.q_values(buffer.obs.flatten(0, 1)).argmax(-1)
    assert torch.equal(greedy, buffer.actions.flatten())


def test_layer_normalisation_is_that_of_torch_and_of_numpy() -> None:
    torch.manual_seed(1)
    mlp = MLP((5, 8, 6, 3), "relu", layer_norm=True)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.add_(torch.randn_like(parameter))
    parts: list[nn.Module] = []
    for layer, norm in zip(mlp.layers, mlp.norms or (), strict=False):
        parts += [layer, norm, nn.ReLU()]
    x = torch.randn(7, 5)
    expected = nn.Sequential(*parts, mlp.layers[-1])(x)
    torch.testing.assert_close(mlp(x), expected)
    np.testing.assert_allclose(mlp.numpy_function()(x.numpy()), expected.detach(), atol=1e-5)


def test_layer_normalisation_of_images_is_that_of_torch() -> None:
    torch.manual_seed(1)
    cnn = NatureCNN((2, 40, 40), 16, layer_norm=True)
    assert cnn.norms is not None
    with torch.no_grad():
        for parameter in cnn.norms.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.randint(0, 256, (3, 2, 40, 40), dtype=torch.uint8)
    x = images / 255
    for i, stride in enumerate((4, 2, 1)):
        filters = cnn.weights[i].permute(0, 3, 1, 2)
        x = nn.functional.conv2d(x, filters, cnn.biases[i], stride)
        norm: Any = cnn.norms[i]
        weight, bias = (one.permute(2, 0, 1) for one in (norm.weight, norm.bias))
        x = nn.functional.layer_norm(x, x.shape[1:], weight, bias).relu()
    features = cnn.norms[-1](cnn.linear(x.permute(0, 2, 3, 1).flatten(1))).relu()
    torch.testing.assert_close(cnn(images), features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"q_lambda": 1.5}, "q_lambda"),
        ({"exploration_fraction": 0.0}, "exploration_fraction"),
        ({"num_minibatches": 7}, "a divisor of the rollout"),
        ({"lag": 1, "engine": "ray"}, "'lag' must be 0 for pqn"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_config: MakeConfig, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(algo="pqn", **settings)
