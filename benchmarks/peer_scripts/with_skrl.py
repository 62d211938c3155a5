"""skrl's side of `peers.py`."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from common import Clock, Request, Trained, answer, env_functions
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from skrl import logger
from skrl.agents.torch import dqn, ppo, sac, td3
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.resources.noises.torch import GaussianNoise
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn


def layers(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        parts += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*parts[:-1])


class Categorical(CategoricalMixin, Model):
    """A policy over discrete actions."""

    def __init__(self, hidden: list[int], **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = layers([self.num_observations, *hidden, self.num_actions], nn.Tanh)

    def compute(self, inputs: Any, role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


class Network(DeterministicMixin, Model):
    """A value, values of actions, or a deterministic policy."""

    def __init__(
        self, hidden: list[int], outputs: int, activation: Any, takes_actions: bool, **spaces: Any
    ) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.takes_actions = takes_actions
        inputs = self.num_observations + (self.num_actions if takes_actions else 0)
        self.net = layers([inputs, *hidden, outputs], activation)

    def compute(self, inputs: Any, role: str = "") -> Any:
        rows = inputs["observations"]
        if self.takes_actions:
            rows = torch.cat([rows, inputs["taken_actions"]], 1)
        return self.net(rows), {}


class Actor(Network):
    """TD3's policy."""

    def compute(self, inputs: Any, role: str = "") -> Any:
        return torch.tanh(self.net(inputs["observations"])), {}


class Squashed(Model):
    """SAC's policy: skrl has no squashed Gaussian of its own."""

    def __init__(self, hidden: list[int], **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        self.net = layers([self.num_observations, *hidden, 2 * self.num_actions], nn.ReLU)

    def compute(self, inputs: Any, role: str = "") -> Any:
        mean, log_std = self.net(inputs["observations"]).chunk(2, -1)
        return mean, log_std.clamp(-20, 2)

    def act(self, inputs: Any, *, role: str = "") -> Any:
        mean, log_std = self.compute(inputs, role)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = normal.rsample()
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
        log_prob = (normal.log_prob(u) - log_slope).sum(-1, keepdim=True)
        return torch.tanh(u), {"log_prob": log_prob, "mean_actions": torch.tanh(mean)}


def make_models(request: Request, spaces: dict[str, Any]) -> dict[str, Model]:
    hidden = list(request.settings["hidden_sizes"])
    action_space = spaces["action_space"]
    if request.algo == "ppo":
        value = Network(hidden, 1, nn.Tanh, False, **spaces)
        return {"policy": Categorical(hidden, **spaces), "value": value}
    if request.algo == "dqn":
        names = ("q_network", "target_q_network")
        return {n: Network(hidden, int(action_space.n), nn.ReLU, False, **spaces) for n in names}
    names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
    models: dict[str, Model] = {n: Network(hidden, 1, nn.ReLU, True, **spaces) for n in names}
    if request.algo == "sac":
        return {**models, "policy": Squashed(hidden, **spaces)}
    size = action_space.shape[0]
    actors = {n: Actor(hidden, size, nn.ReLU, False, **spaces) for n in ("policy", "target_policy")}
    return {**models, **actors}


def make_config(request: Request, device: Any) -> Any:
    given = request.settings
    if request.algo == "ppo":
        return ppo.PPO_CFG(
            rollouts=given["num_steps"],
            learning_epochs=given["update_epochs"],
            mini_batches=given["num_minibatches"],
            discount_factor=given["gamma"],
            gae_lambda=given["gae_lambda"],
            learning_rate=given["learning_rate"],
            grad_norm_clip=given["max_grad_norm"],
            ratio_clip=given["clip_coef"],
            value_clip=0.0,
            entropy_loss_scale=given["ent_coef"],
            value_loss_scale=given["vf_coef"],
            time_limit_bootstrap=True,
        )
    shared = {
        "gradient_steps": given["gradient_steps"],
        "batch_size": given["batch_size"],
        "discount_factor": given["gamma"],
        "learning_rate": given["learning_rate"],
        "random_timesteps": given["learning_starts"],
        "learning_starts": given["learning_starts"],
    }
    if request.algo == "dqn":
        first, last = given["exploration_initial_eps"], given["exploration_final_eps"]
        decay = given["exploration_fraction"] * request.steps

        def epsilon(step: int, steps: int) -> float:  # noqa: ARG001 - skrl gives both
            return first + min(1.0, step / decay) * (last - first)

        return dqn.DQN_CFG(
            **shared,
            polyak=1.0,
            update_interval=given["train_freq"],
            target_update_interval=given["target_update_interval_steps"] // given["train_freq"],
            exploration_scheduler=epsilon,
        )
    if request.algo == "sac":
        return sac.SAC_CFG(**shared, polyak=given["tau"], initial_entropy_value=1.0)
    noise = {"mean": 0.0, "device": device}
    return td3.TD3_CFG(
        **shared,
        polyak=given["tau"],
        policy_delay=given["policy_delay"],
        exploration_noise=GaussianNoise,
        exploration_noise_kwargs={**noise, "std": given["exploration_noise"]},
        smooth_regularization_noise=GaussianNoise,
        smooth_regularization_noise_kwargs={**noise, "std": given["target_policy_noise"]},
        smooth_regularization_clip=given["target_noise_clip"],
    )


AGENTS = {"ppo": ppo.PPO, "dqn": dqn.DQN, "sac": sac.SAC, "td3": td3.TD3}


def train(request: Request, clock: Clock) -> Trained:
    logger.setLevel(logging.ERROR)
    set_seed(request.seed)
    functions = env_functions(request, clock)
    if request.num_envs == 1:
        env = wrap_env(functions[0](), wrapper="gymnasium", verbose=False)
    else:
        vector = SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP)
        env = wrap_env(vector, wrapper="gymnasium", verbose=False)
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    models = make_models(request, spaces)
    size = request.settings.get("buffer_size", request.settings.get("num_steps"))
    # Batches of on-policy rollouts are permutations, those of a replay drawn with replacement.
    memory = RandomMemory(
        memory_size=size,
        num_envs=request.num_envs,
        device=env.device,
        replacement=request.algo != "ppo",
    )
    config = make_config(request, env.device)
    config.experiment.write_interval = 0
    config.experiment.checkpoint_interval = 0
    agent = AGENTS[request.algo](models=models, memory=memory, cfg=config, **spaces)
    steps = request.steps // request.num_envs
    settings = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=settings).train()

    def act(obs: Any) -> Any:
        rows = torch.as_tensor(np.asarray(obs, np.float32)[None])
        with torch.no_grad():
            if isinstance(env.action_space, gym.spaces.Discrete):
                model: Any = models["policy" if request.algo == "ppo" else "q_network"]
                return int(model.net(rows).argmax())
            actions, outputs = models["policy"].act({"observations": rows}, role="policy")
            return outputs.get("mean_actions", actions)[0].numpy()

    return lambda: act


if __name__ == "__main__":
    answer(train, ("skrl", "torch"))
