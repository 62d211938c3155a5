"""RecurrentPPO against sb3-contrib's: same work, same machine, one run, ratios.

    python benchmarks/recurrent_ppo.py [--rounds 3]

CartPole-v1, 8 environments, rollouts of 128 steps, 4 minibatches of 256 steps, 4 epochs, an LSTM of
64 and a layer of 64 for policy and value each. Sequences are as long as a rollout: gradients flow
through all of it on both sides. Everything on the CPU, after warm-up; every measurement is a
process of its own, rounds alternate between contenders, and the median counts. Neither side
evaluates; ours includes checkpoints and logging at their defaults.
"""

from __future__ import annotations

import time
from typing import Any

from harness import EAGER, compare_with_sb3, time_training

SHARED: dict[str, Any] = {"learning_rate": 2.5e-4, "ent_coef": 0.01, "vf_coef": 0.5}
WARMUP, STEPS = 4096, {"sb3": 12_288, "ours": 98_304}


def run_sb3(algo: str) -> dict[str, Any]:
    del algo
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    layers = {"pi": [64], "vf": [64]}
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env("CartPole-v1", 8, seed=1),
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": layers},
        **SHARED,
        device="cpu",
        seed=1,
    )
    model.learn(WARMUP)
    start = time.perf_counter()
    model.learn(STEPS["sb3"], reset_num_timesteps=False)
    return {"steps_per_second": STEPS["sb3"] / (time.perf_counter() - start)}


def run_ours(algo: str, acceleration: str) -> dict[str, Any]:
    settings = {
        "env_id": "CartPole-v1",
        "num_envs": 8,
        "device": "cpu",
        "acceleration": acceleration,
        "algo_kwargs": {**SHARED, "num_steps": 128, "sequence_length": 128},
        "eval_episodes": 0,
    }
    return time_training(algo, STEPS["ours"], WARMUP, settings, {})


if __name__ == "__main__":
    where = {"recurrent_ppo": "CartPole-v1 (the peer: sb3-contrib)"}
    compare_with_sb3(__file__, __doc__, where, run_sb3, run_ours, modes=[EAGER])
