"""Stable-Baselines3's, sb3-contrib's and SBX's side of `peers.py`: they share one interface."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from common import Clock, Request, Trained, answer, env_functions
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv

CLASSES = {
    "ppo": "PPO",
    "dqn": "DQN",
    "qrdqn": "QRDQN",
    "sac": "SAC",
    "td3": "TD3",
    "recurrent_ppo": "RecurrentPPO",
}
PACKAGES = {"sb3": "stable_baselines3", "sb3_contrib": "sb3_contrib", "sbx": "sbx"}
RENAMED = {
    "num_steps": "n_steps",
    "update_epochs": "n_epochs",
    "clip_coef": "clip_range",
    "target_update_interval_steps": "target_update_interval",
}
NOT_PASSED = {"hidden_sizes", "num_minibatches", "exploration_noise", "lstm_size"}
NOT_PASSED |= {"sequence_length", "num_quantiles"}


def arguments(request: Request, env: DummyVecEnv) -> dict[str, Any]:
    """Return the settings by their names here."""
    given = request.settings
    passed = {RENAMED.get(k, k): v for k, v in given.items() if k not in NOT_PASSED}
    layers = list(given["hidden_sizes"])
    passed["policy_kwargs"] = {"net_arch": layers}
    if "num_quantiles" in given:
        passed["policy_kwargs"]["n_quantiles"] = given["num_quantiles"]
    if "num_minibatches" in given:
        passed["batch_size"] = request.minibatch
    if "exploration_noise" in given:
        size = env.action_space.shape
        passed["action_noise"] = NormalActionNoise(
            np.zeros(size), np.full(size, given["exploration_noise"])
        )
    if request.algo == "recurrent_ppo":
        passed["policy_kwargs"] = {
            "lstm_hidden_size": given["lstm_size"],
            "net_arch": {"pi": layers, "vf": layers},
        }
    if request.library == "sbx" and request.algo == "dqn":
        del passed["max_grad_norm"]  # SBX does not clip here
    return passed


def train(request: Request, clock: Clock) -> Trained:
    make = getattr(importlib.import_module(PACKAGES[request.library]), CLASSES[request.algo])
    functions = env_functions(request, clock)
    env = DummyVecEnv([lambda function=function: Monitor(function()) for function in functions])
    policy = "MlpLstmPolicy" if request.algo == "recurrent_ppo" else "MlpPolicy"
    model = make(policy, env, device="cpu", seed=request.seed, **arguments(request, env))
    model.learn(request.steps, log_interval=10**9)

    def begin() -> Any:
        state, start = None, np.ones(1, bool)

        def act(obs: Any) -> Any:
            nonlocal state, start
            action, state = model.predict(obs, state, start, deterministic=True)
            start = np.zeros(1, bool)
            return action

        return act

    return begin


if __name__ == "__main__":
    import sys

    library = sys.argv[1]
    extra = ("sbx-rl", "jax") if '"sbx"' in library else ("sb3_contrib", "torch")
    answer(train, ("stable_baselines3", *extra))
