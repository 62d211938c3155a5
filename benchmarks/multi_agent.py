"""IPPO and MAPPO beside skrl's on simple_spread.

    python benchmarks/multi_agent.py spread --peer-python PYTHON [--steps 25000] [--seeds 3]

``spread`` trains ours and skrl 2.1.1 with one environment, a policy of each agent's own, the same
networks and settings, in alternation, one thread each. It prints steps of the environment per
second and the return of the team over the same 100 episodes, and a random policy's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.surface import IPPO, MAPPO

EPISODES = 100
SPREAD = "pettingzoo:mpe2/simple_spread_v3"


def spread_returns(act: Callable[[str, Any], int]) -> list[float]:
    """The returns of the team over the episodes that all policies play."""
    from mpe2 import simple_spread_v3

    game = simple_spread_v3.parallel_env(N=3, max_cycles=25)
    returns = []
    for episode in range(EPISODES):
        seen, _ = game.reset(seed=10_000 + episode)
        total = 0.0
        while game.agents:
            actions = {agent: act(agent, obs) for agent, obs in seen.items()}
            seen, rewards, *_ = game.step(actions)
            total += sum(rewards.values())
        returns.append(total)
    return returns


def ours(algo: str, steps: int, seed: int) -> dict[str, Any]:
    """Train with the settings of the peer; ``steps`` are those of the environment."""
    kind: type[ManagedAlgorithm] = MAPPO if algo == "mappo" else IPPO
    config: TrainConfig[Any] = TrainConfig(
        algo=algo,
        env_id=SPREAD,
        total_timesteps=3 * steps,
        num_envs=1,
        seed=seed,
        eval_episodes=0,
        progress=False,
        tensorboard=False,
    ).with_overrides(
        policies="separate",
        num_steps=125,
        num_minibatches=1,
        update_epochs=4,
        learning_rate=1e-3,
        anneal_lr=False,
        norm_adv=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = ExperimentManager.setup(config, run_dir=Path(folder) / "run")
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
        model = kind.load(Path(folder) / "run")
    groups = [f"agent_{i}" for i in range(3)]
    blank = dict.fromkeys(groups, np.zeros(18, np.float32))
    returns = spread_returns(lambda agent, obs: int(model.act({**blank, agent: obs})[agent]))
    return {"rate": steps / seconds, "returns": returns}


def theirs(python: str, algo: str, steps: int, seed: int) -> dict[str, Any]:
    script = Path(__file__).parent / "multi_agent_peer.py"
    words = [python, str(script), algo, str(steps), str(seed), str(EPISODES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_spread(args: argparse.Namespace) -> int:
    rng = np.random.default_rng(1)
    scores = spread_returns(lambda *_: int(rng.integers(5)))
    print(f"random policy: return of the team {np.mean(scores):.1f}", flush=True)
    for algo in ("ippo", "mappo"):
        rates: list[float] = []
        for seed in range(1, args.seeds + 1):
            one = ours(algo, args.steps, seed)
            other = theirs(args.peer_python, algo, args.steps, seed)
            rates.append(one["rate"] / other["rate"])
            print(
                f"{algo} seed {seed}: {one['rate']:,.0f} and {other['rate']:,.0f} steps/s, ratio"
                f" {rates[-1]:.2f}; return of the team {np.mean(one['returns']):.1f} and"
                f" {np.mean(other['returns']):.1f} (per agent: a third)",
                flush=True,
            )
        print(f"{algo}: median ratio of speed {np.median(rates):.2f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    spread = commands.add_parser("spread")
    spread.add_argument("--peer-python", required=True)
    spread.add_argument("--steps", type=int, default=25_000)
    spread.add_argument("--seeds", type=int, default=3)
    spread.set_defaults(run=run_spread)
    args = parser.parse_args()
    torch.set_num_threads(1)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
