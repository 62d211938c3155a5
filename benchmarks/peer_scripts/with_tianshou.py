"""Tianshou's side of `peers.py`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from common import Clock, Request, Trained, answer, env_functions
from tianshou.algorithm import DQN, PPO, SAC, TD3
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import (
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
)
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch import nn


def make_discrete(request: Request, spaces: dict[str, Any]) -> tuple[Any, Any]:
    """Return PPO or DQN, and its policy."""
    given = request.settings
    shape, count = spaces["observation_space"].shape, int(spaces["action_space"].n)
    hidden = list(given["hidden_sizes"])
    if request.algo == "dqn":
        net = Net(state_shape=shape, action_shape=count, hidden_sizes=hidden)
        policy: Any = DiscreteQLearningPolicy(
            model=net, eps_training=given["exploration_initial_eps"], **spaces
        )
        return policy, DQN(
            policy=policy,
            optim=AdamOptimizerFactory(lr=given["learning_rate"]),
            gamma=given["gamma"],
            target_update_freq=given["target_update_interval_steps"] // given["train_freq"],
            is_double=False,
            huber_loss_delta=1.0,
        )
    actor_net, critic_net = (
        Net(state_shape=shape, hidden_sizes=hidden, activation=nn.Tanh) for _ in range(2)
    )
    actor = DiscreteActor(preprocess_net=actor_net, action_shape=count, softmax_output=False)
    policy = DiscreteActorPolicy(actor=actor, deterministic_eval=True, **spaces)
    return policy, PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=critic_net),
        optim=AdamOptimizerFactory(lr=given["learning_rate"], eps=1e-5),
        eps_clip=given["clip_coef"],
        vf_coef=given["vf_coef"],
        ent_coef=given["ent_coef"],
        max_grad_norm=given["max_grad_norm"],
        gae_lambda=given["gae_lambda"],
        gamma=given["gamma"],
        max_batchsize=request.period,
    )


def make_continuous(request: Request, spaces: dict[str, Any]) -> tuple[Any, Any]:
    """Return SAC or TD3, and its policy."""
    given = request.settings
    shape, size = spaces["observation_space"].shape, spaces["action_space"].shape
    hidden = list(given["hidden_sizes"])
    net = Net(state_shape=shape, hidden_sizes=hidden)
    critics = [
        ContinuousCritic(
            preprocess_net=Net(
                state_shape=shape, action_shape=size, hidden_sizes=hidden, concat=True
            )
        )
        for _ in range(2)
    ]
    shared = {
        "policy_optim": AdamOptimizerFactory(lr=given["learning_rate"]),
        "critic": critics[0],
        "critic_optim": AdamOptimizerFactory(lr=given["learning_rate"]),
        "critic2": critics[1],
        "critic2_optim": AdamOptimizerFactory(lr=given["learning_rate"]),
        "tau": given["tau"],
        "gamma": given["gamma"],
    }
    if request.algo == "sac":
        actor: Any = ContinuousActorProbabilistic(
            preprocess_net=net, action_shape=size, unbounded=True, conditioned_sigma=True
        )
        policy: Any = SACPolicy(actor=actor, **spaces)
        alpha = AutoAlpha(-float(size[0]), 0.0, AdamOptimizerFactory(lr=given["learning_rate"]))
        return policy, SAC(policy=policy, alpha=alpha, **shared)
    actor = ContinuousActorDeterministic(preprocess_net=net, action_shape=size)
    noise = GaussianNoise(sigma=given["exploration_noise"])
    policy = ContinuousDeterministicPolicy(actor=actor, exploration_noise=noise, **spaces)
    return policy, TD3(
        policy=policy,
        policy_noise=given["target_policy_noise"],
        update_actor_freq=given["policy_delay"],
        noise_clip=given["target_noise_clip"],
        **shared,
    )


def train(request: Request, clock: Clock) -> Trained:
    logging.disable(logging.WARNING)
    np.random.seed(request.seed)  # noqa: NPY002 - what Tianshou draws from
    torch.manual_seed(request.seed)
    given = request.settings
    envs = DummyVectorEnv(env_functions(request, clock))
    envs.seed(request.seed)
    spaces = {
        "action_space": envs.action_space[0],
        "observation_space": envs.observation_space[0],
    }
    on_policy = request.algo == "ppo"
    make = make_discrete if request.algo in ("ppo", "dqn") else make_continuous
    policy, algorithm = make(request, spaces)
    size = request.period if on_policy else given["buffer_size"]
    collector = Collector(
        algorithm, envs, VectorReplayBuffer(size, request.num_envs), exploration_noise=True
    )
    collector.reset()
    shared: dict[str, Any] = {
        "max_epochs": 1,
        "training_collector": collector,
        "collection_step_num_env_steps": request.period,
        "test_collector": None,
        "verbose": False,
        "show_progress": False,
    }
    if on_policy:
        algorithm.run_training(
            OnPolicyTrainerParams(
                epoch_num_steps=request.steps,
                batch_size=request.minibatch,
                update_step_num_repetitions=given["update_epochs"],
                **shared,
            )
        )
    else:
        collector.collect(n_step=given["learning_starts"], random=True)
        if request.algo == "dqn":
            first, last = given["exploration_initial_eps"], given["exploration_final_eps"]
            decay = given["exploration_fraction"] * request.steps

            def set_epsilon(epoch: int, step: int) -> None:  # noqa: ARG001 - Tianshou gives both
                policy.set_eps_training(first + min(1.0, step / decay) * (last - first))

            shared["training_fn"] = set_epsilon
        algorithm.run_training(
            OffPolicyTrainerParams(
                epoch_num_steps=request.steps - given["learning_starts"],
                batch_size=given["batch_size"],
                update_step_num_gradient_steps_per_sample=given["gradient_steps"]
                / given["train_freq"],
                **shared,
            )
        )
    policy.eval()

    def act(obs: Any) -> Any:
        return policy.compute_action(np.asarray(obs, np.float32))

    return lambda: act


if __name__ == "__main__":
    answer(train, ("tianshou", "torch"))
