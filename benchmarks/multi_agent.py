"""IPPO and MAPPO beside skrl's on cooperative tasks.

    python benchmarks/multi_agent.py cooperative --peer-python PYTHON [--steps 50000] [--seeds 5]
    python benchmarks/multi_agent.py speed --peer-python PYTHON [--steps 5000] [--rounds 3]

``cooperative`` trains ours and skrl 2.1.1 on simple_spread and on simple_speaker_listener, whose
two agents have different roles: with one environment, a policy of each agent's own, the same
networks and settings, one thread, one process per run. Finished runs are kept in ``--out`` and are
not repeated. It prints the returns of the team and of each agent over the same 100 episodes with
the most likely actions, the difference of the means with its 95% interval (Welch), and the returns
of a random policy.

``speed`` trains ours and theirs in alternation, and prints the median ratio of steps per second of
CPU time: both have one thread, and other processes of the machine change it little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from multi_agent_tasks import ROLLOUT, TASKS, played

from rl_training.api.algorithms import ManagedAlgorithm
from rl_training.config import TrainConfig
from rl_training.experiment.manager import ExperimentManager
from rl_training.surface import IPPO, MAPPO

EPISODES = 100
ALGOS = ("ippo", "mappo")


def ours(algo: str, task: str, steps: int, seed: int) -> dict[str, Any]:
    """Train with the settings of the peer; ``steps`` are those of the environment."""
    kind: type[ManagedAlgorithm] = MAPPO if algo == "mappo" else IPPO
    game = TASKS[task]()
    config: TrainConfig[Any] = TrainConfig(
        algo=algo,
        env_id=f"pettingzoo:mpe2/{task}",
        total_timesteps=len(game.possible_agents) * steps,
        num_envs=1,
        seed=seed,
        eval_episodes=0,
        progress=False,
        tensorboard=False,
    ).with_overrides(
        policies="separate",
        num_steps=ROLLOUT,
        num_minibatches=1,
        update_epochs=8,
        gamma=0.9,
        learning_rate=1e-3,
        optimizer_eps=1e-8,
        anneal_lr=False,
        vf_coef=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = ExperimentManager.setup(config, run_dir=Path(folder) / "run")
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
        model = kind.load(Path(folder) / "run")
    returns = played(task, lambda seen: {k: int(v) for k, v in model.act(seen).items()}, EPISODES)
    return {"rate": steps / seconds, "returns": returns}


def theirs(python: str, algo: str, task: str, steps: int, seed: int) -> dict[str, Any]:
    script = str(Path(__file__).parent / "multi_agent_peer.py")
    return _last_line([python, script, algo, task, str(steps), str(seed), str(EPISODES)])


def _last_line(words: list[str]) -> dict[str, Any]:
    """Run a command in a process of its own and return the JSON object that it prints last."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_one(args: argparse.Namespace) -> int:
    """Train ours once, and print the result."""
    print(json.dumps(ours(args.algo, args.task, args.steps, args.seed)))
    return 0


def result_of(args: argparse.Namespace, side: str, algo: str, task: str, seed: int) -> Any:
    """Train one side in a process of its own."""
    if side == "skrl":
        return theirs(args.peer_python, algo, task, args.steps, seed)
    words = [sys.executable, __file__, "one", algo, task, str(args.steps), str(seed)]
    return _last_line(words)


def run_cooperative(args: argparse.Namespace) -> int:
    args.out.touch()
    runs = [json.loads(line) for line in args.out.read_text().splitlines()]
    finished = {(r["side"], r["algo"], r["task"], r["seed"], r["steps"]): r for r in runs}
    for seed in range(1, args.seeds + 1):
        for task in TASKS:
            for algo in ALGOS:
                for side in ("ours", "skrl"):
                    key = (side, algo, task, seed, args.steps)
                    if key in finished:
                        continue
                    one = result_of(args, side, algo, task, seed)
                    names = zip(("side", "algo", "task", "seed", "steps"), key, strict=True)
                    finished[key] = {**dict(names), **one}
                    with args.out.open("a") as out:
                        out.write(json.dumps(finished[key]) + "\n")
    for task in TASKS:
        print(f"{task}, {args.steps:,} steps of one environment, seeds 1 to {args.seeds}")
        print(f"  random: {described([random_returns(task)])}")
        for algo in ALGOS:
            sides = [
                [finished[side, algo, task, seed + 1, args.steps] for seed in range(args.seeds)]
                for side in ("ours", "skrl")
            ]
            for name, some in zip(("ours", "skrl"), sides, strict=True):
                print(f"  {algo} {name}: {described([run['returns'] for run in some])}")
            means = [[team_mean(run["returns"]) for run in some] for some in sides]
            low, high = welch_interval(*means)
            difference = np.mean(means[0]) - np.mean(means[1])
            print(
                f"  {algo} ours - skrl: {difference:+.2f}, 95% interval {low:+.2f} to {high:+.2f}"
            )
    return 0


def random_returns(task: str) -> list[dict[str, float]]:
    rng = np.random.default_rng(1)
    spaces = TASKS[task]()
    return played(task, lambda seen: {k: int(rng.integers(spaces.action_space(k).n)) for k in seen},
                  EPISODES)  # fmt: skip


def team_mean(returns: list[dict[str, float]]) -> float:
    """The mean return of the team over episodes."""
    return float(np.mean([sum(each.values()) for each in returns]))


def described(runs: list[list[dict[str, float]]]) -> str:
    """The mean over runs of the team's return, its deviation, and the return of each agent."""
    means = [team_mean(run) for run in runs]
    agents = {
        name: float(np.mean([[each[name] for each in run] for run in runs])) for name in runs[0][0]
    }
    deviation = f" (deviation of runs {np.std(means, ddof=1):.1f})" if len(runs) > 1 else ""
    each = ", ".join(f"{name} {value:.1f}" for name, value in agents.items())
    return f"team {np.mean(means):.1f}{deviation}; {each}"


def welch_interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The 95% interval of the difference of two means, of samples of unequal variance."""
    from scipy import stats

    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(found.low), float(found.high)


def run_speed(args: argparse.Namespace) -> int:
    for task in TASKS:
        for algo in ALGOS:
            pairs = [
                [result_of(args, side, algo, task, seed)["rate"] for side in ("ours", "skrl")]
                for seed in range(1, args.rounds + 1)
            ]
            one, other = np.median(pairs, 0)
            ratio = np.median([a / b for a, b in pairs])
            print(
                f"{task} {algo}: {one:,.0f} and {other:,.0f} steps/s, ratio {ratio:.2f}", flush=True
            )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(required=True)
    both = commands.add_parser("cooperative")
    both.add_argument("--peer-python", required=True)
    both.add_argument("--steps", type=int, default=50_000)
    both.add_argument("--seeds", type=int, default=5)
    both.add_argument("--out", type=Path, default=Path("multi_agent.jsonl"))
    both.set_defaults(run=run_cooperative)
    speed = commands.add_parser("speed")
    speed.add_argument("--peer-python", required=True)
    speed.add_argument("--steps", type=int, default=5_000)
    speed.add_argument("--rounds", type=int, default=3)
    speed.set_defaults(run=run_speed)
    one = commands.add_parser("one")
    one.add_argument("algo", choices=ALGOS)
    one.add_argument("task", choices=TASKS)
    one.add_argument("steps", type=int)
    one.add_argument("seed", type=int)
    one.set_defaults(run=run_one)
    args = parser.parse_args()
    torch.set_num_threads(1)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
