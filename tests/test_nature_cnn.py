"""NatureCNN and the encoders of images: the same function as plain layers, rebuilt from specs."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.cnn import NatureCNN
from rl_training.models.encoders import EncoderConfig, ImageEncoder, make_encoder
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.runtime.workflows import load_policy, resume_training
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Rows

FRAMES = ObsSpec({"": ArraySpec((4, 84, 84), "uint8")})
PUSH = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))


def images(rows: int, shape: tuple[int, ...] = (4, 84, 84), seed: int = 0) -> torch.Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)
    return torch.from_numpy(drawn)


def plain_twin(network: NatureCNN, shape: tuple[int, int, int]) -> nn.Sequential:
    """The same network of torch's own layers, written down once more."""
    twin = nn.Sequential(
        nn.Conv2d(shape[0], 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(network.linear.in_features, network.output_size),
        nn.ReLU(),
    )
    with torch.no_grad():
        for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
            layer: Any = twin[2 * i]
            layer.weight.copy_(weight.permute(0, 3, 1, 2))
            layer.bias.copy_(bias)
        places = network.linear.in_features // 64
        last: Any = twin[7]
        by_place = network.linear.weight.reshape(-1, places, 64)
        last.weight.copy_(by_place.transpose(1, 2).reshape(last.weight.shape))
        last.bias.copy_(network.linear.bias)
    return twin


@pytest.mark.parametrize("shape", [(4, 84, 84), (1, 36, 36), (12, 64, 96)])
def test_it_is_the_network_of_the_paper(shape: tuple[int, int, int]) -> None:
    network = NatureCNN(shape, feature_size=17)
    seen = images(3, shape)
    expected = plain_twin(network, shape)(seen.float() / 255)
    torch.testing.assert_close(network(seen), expected, rtol=1e-5, atol=1e-6)
    assert network(seen).shape == (3, 17)


def test_gradients_are_those_of_plain_layers() -> None:
    network = NatureCNN((4, 84, 84), feature_size=8)
    twin = plain_twin(network, (4, 84, 84))
    seen = images(2)
    network(seen).square().sum().backward()
    twin(seen.float() / 255).square().sum().backward()
    for i, weight in enumerate(network.weights):
        layer: Any = twin[2 * i]
        torch.testing.assert_close(
            weight.grad.permute(0, 3, 1, 2), layer.weight.grad, rtol=1e-4, atol=1e-6
        )


def test_floats_are_taken_as_they_are() -> None:
    network = NatureCNN((4, 84, 84))
    seen = images(2)
    torch.testing.assert_close(network(seen.float() / 255), network(seen), rtol=1e-4, atol=1e-5)


def test_orthogonal_weights_and_torchs_own() -> None:
    for weight in (*(net := NatureCNN((4, 84, 84), orthogonal=True)).weights, net.linear.weight):
        rows = weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-4)
    assert all(not bias.any() for bias in net.biases)
    torchs = NatureCNN((4, 84, 84))
    assert torchs.weights[0].abs().max() <= 1 / math.sqrt(4 * 8 * 8)


@pytest.mark.parametrize("shape", [(4, 35, 84), (3, 84, 20)])
def test_frames_too_small_are_refused_with_what_would_do(shape: tuple[int, int, int]) -> None:
    message = rf"images of {shape[1]} x {shape[2]} are too small.*36 x 36.*encoder"
    with pytest.raises(ConfigError, match=message):
        NatureCNN(shape)


def test_one_network_per_image_beside_flattened_vectors() -> None:
    spec = ObsSpec(
        {
            "left": ArraySpec((3, 40, 40), "uint8"),
            "speed": ArraySpec((2, 3), "float32"),
            "right.eye": ArraySpec((1, 36, 50), "uint8"),
        }
    )
    encoder, size = make_encoder(spec, EncoderConfig(feature_size=10))
    assert isinstance(encoder, ImageEncoder)
    assert size == 10 + 6 + 10
    obs = {
        "left": images(5, (3, 40, 40)),
        "speed": torch.randn(5, 2, 3),
        "right.eye": images(5, (1, 36, 50)),
    }
    features = encoder(obs)
    networks: Any = encoder.networks
    torch.testing.assert_close(features[:, :10], networks["image0"](obs["left"]))
    torch.testing.assert_close(features[:, 10:16], obs["speed"].flatten(1))
    torch.testing.assert_close(features[:, 16:], networks["image2"](obs["right.eye"]))


def test_models_on_images_have_heads_right_on_the_features() -> None:
    critic = MLPActorCritic(FRAMES, PUSH, hidden_sizes=())
    heads: Any = [*critic.actor.layers, *critic.critic.layers]
    assert [tuple(layer.weight.shape) for layer in heads] == [(3, 512), (1, 512)]
    obs, noise = images(6), critic.head.draw_noise((6,), torch.Generator().manual_seed(0))
    actions, logprobs, values = critic.act(obs, noise)
    said = critic.evaluate({"obs": obs, "actions": actions})
    torch.testing.assert_close(logprobs, said.logprob)
    torch.testing.assert_close(values, said.value)
    q_network = MLPQNetwork(FRAMES, PUSH, hidden_sizes=(), activation="relu", dueling=True)
    assert q_network.q_values(obs).shape == (6, 3)


def test_normalising_pixels_is_refused_and_vectors_beside_them_are_normalised() -> None:
    with pytest.raises(ConfigError, match=r"normalize_obs.*vectors"):
        MLPActorCritic(FRAMES, PUSH, normalize_obs=True)
    both = ObsSpec({"eye": ArraySpec((1, 40, 40), "uint8"), "speed": ArraySpec((2,), "float32")})
    model = MLPActorCritic(both, PUSH, normalize_obs=True, hidden_sizes=())
    obs = {"eye": images(8, (1, 40, 40)), "speed": torch.randn(8, 2) * 50}
    before = model.value(obs)
    model.update_normalizer(Rows(obs, torch.ones(8, dtype=torch.bool)))
    assert not torch.allclose(model.value(obs), before)


class Corridor(gym.Env[Any, Any]):
    """Shown a bright left or right half, channel last; the reward is for naming the side."""

    observation_space = gym.spaces.Dict(
        {
            "view": gym.spaces.Box(0, 255, (40, 44, 3), np.uint8),
            "step": gym.spaces.Box(0.0, 1.0, (1,), np.float32),
        }
    )
    action_space = gym.spaces.Discrete(2)

    def _show(self) -> dict[str, Any]:
        self.side = int(self.np_random.integers(2))
        view = np.zeros((40, 44, 3), np.uint8)
        view[:, 22 * self.side : 22 * (self.side + 1)] = 200
        return {"view": view, "step": np.ones(1, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.side)
        return self._show(), reward, True, False, {}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_any_image_environment_is_learnt_saved_and_resumed(
    algo: str, make_config: MakeConfig
) -> None:
    knobs: dict[str, Any] = {"feature_size": 32, "learning_rate": 1e-3}
    if algo == "ppo":
        knobs |= {"num_steps": 32, "num_minibatches": 4, "anneal_lr": False}
    else:
        knobs |= {"exploration_fraction": 0.2, "train_freq": 2, "gamma": 0.0}
    config = make_config(algo=algo, total_timesteps=768, eval_episodes=20, num_envs=4, **knobs)
    result = ExperimentManager.setup(config, env_fn=Corridor).train()
    assert result.metrics["eval/return_mean"] == 1.0

    policy = load_policy(result.run_dir)
    env = Corridor()
    for _ in range(10):
        obs, _ = env.reset()
        assert policy.act(obs) == env.side, "predict takes what the environment gives"
    spec = load_checkpoint(result.checkpoint_path)["obs_spec"]
    assert spec["view"] == [[3, 40, 44], "uint8", [40, 44, 3]]
    with pytest.raises(ConfigError, match=r"view has shape \(3, 40, 44\); expected \(40, 44, 3\)"):
        policy.act({"view": np.zeros((3, 40, 44), np.uint8), "step": np.ones(1)})
    longer = resume_training(result.run_dir, total_timesteps=896, env_fn=Corridor)
    assert longer.metrics["global_step"] == 896


def test_half_precision_needs_cuda_and_images(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="bfloat16 needs device: cuda, but the device is cpu"):
        ExperimentManager.setup(make_config(precision="bfloat16", device="cpu"), env_fn=Corridor)
