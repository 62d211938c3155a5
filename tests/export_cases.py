"""Policies of every kind that the registry declares, untrained but far from uniform."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.config import TrainConfig, algo_config_type
from rl_training.envs import EnvFn
from rl_training.eval import make_eval_env
from rl_training.experiment.registry import ALGORITHMS
from rl_training.models.observing import update_normalizers
from rl_training.registry import DICT, IMAGE, VECTOR, spec_of
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.policy import TrainedPolicy
from rl_training.types import ACTION_MASK, Rows

EPISODE = 9
ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(4, start=-2),
    "bounded Box": spaces.Box(
        np.array([[-2.0], [100.0]], np.float32), np.array([[3.0], [100.5]], np.float32)
    ),
    "unbounded Box": spaces.Box(
        np.array([-np.inf, 0.0, -1.0]), np.array([np.inf, np.inf, 2.0]), dtype=np.float64
    ),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2, 4], start=[1, -1, 0]),
    "MultiBinary": spaces.MultiBinary((2, 3)),
    "hybrid": spaces.Dict(
        {
            "side": spaces.Discrete(3, start=1),
            "force": spaces.Box(-20.0, 60.0, (2, 1), np.float64),
            "more": spaces.Tuple((spaces.MultiDiscrete([2, 4]), spaces.MultiBinary((1, 2)))),
        }
    ),
}
_NVEC = {"Discrete": [4], "MultiDiscrete": [3, 2, 4], "hybrid": [2, 4, 3]}
"""Choices of each discrete component, in the order of the mask: the keys of a Dict are sorted."""
_MASKABLE = tuple(_NVEC)
MASKED = "masked Dict"


class Case(NamedTuple):
    """One combination."""

    algo: str
    action: str
    observation: str

    def __str__(self) -> str:
        return f"{self.algo}-{self.action}-{self.observation}".replace(" ", "_")


def _declared() -> list[Case]:
    found = []
    for algo, entry in ALGORITHMS.items():
        for action in entry.actions:
            kinds = list(entry.observations)
            if entry.masks and DICT in kinds and action in _MASKABLE:
                kinds.append(MASKED)
            found += [Case(algo, action, kind) for kind in kinds]
    return found


CASES = _declared()


def observation_space(case: Case) -> spaces.Space[Any]:
    if case.observation == VECTOR:
        return spaces.Box(-50.0, 90.0, (3,), np.float64)
    image = spaces.Box(0, 255, (36, 40, 3), np.uint8)
    if case.observation == IMAGE:
        return image
    name = "state"  # also the name of another input
    entries: dict[str, spaces.Space[Any]] = {
        name: spaces.Box(-9.0, 5.0, (2, 2), np.float32),
        "kind": spaces.Discrete(3, start=-1),
        "inner": spaces.Tuple(
            (spaces.MultiDiscrete([2, 3], start=[5, 0]), spaces.Dict({"on": spaces.MultiBinary(3)}))
        ),
    }
    if IMAGE in ALGORITHMS[case.algo].observations:
        entries["camera"] = spaces.Box(0, 255, (2, 36, 40), np.uint8)
    if case.observation == MASKED:
        entries[ACTION_MASK] = spaces.MultiBinary(sum(_NVEC[case.action]))
    return spaces.Dict(entries)


class Noise(gym.Env[Any, Any]):
    """Shows random observations of any space; episodes are short."""

    def __init__(self, case: Case) -> None:
        self.observation_space = observation_space(case)
        self.action_space = ACTIONS[case.action]
        self.nvec = np.array(_NVEC.get(case.action, [4]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self) -> Any:
        obs = self.observation_space.sample()
        if isinstance(obs, dict) and ACTION_MASK in obs:
            first = np.cumsum(self.nvec) - self.nvec
            obs[ACTION_MASK][first + self.np_random.integers(self.nvec)] = 1
        return obs

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.observe(), 0.0, self.steps == EPISODE, False, {}


class NoiseTeam(ParallelEnv):  # type: ignore[misc]
    """Two agents, each in a `Noise` of its own."""

    metadata = {"name": "noise"}
    possible_agents = ["one", "two"]

    def __init__(self, case: Case) -> None:
        self.agents: list[str] = []
        self.envs = {agent: Noise(case) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.envs[agent].observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        each = {
            agent: env.reset(seed=None if seed is None else seed + number)
            for number, (agent, env) in enumerate(self.envs.items())
        }
        return {k: obs for k, (obs, _) in each.items()}, {k: info for k, (_, info) in each.items()}

    def step(self, actions: Any) -> Any:
        steps = {agent: env.step(actions[agent]) for agent, env in self.envs.items()}
        parts = tuple({agent: step[i] for agent, step in steps.items()} for i in range(5))
        if any(parts[2].values()):
            self.agents = []
        return parts


def env_of(case: Case) -> EnvFn:
    """What makes the environment of a case."""
    if ALGORITHMS[case.algo].multi_agent:
        return lambda: NoiseTeam(case)
    return lambda: Noise(case)


def make_config(case: Case, memory: str | None = None, **settings: Any) -> TrainConfig[Any]:
    entry = ALGORITHMS[case.algo]
    names = {field.name for field in dataclasses.fields(algo_config_type(case.algo))}
    knobs: dict[str, Any] = {"hidden_sizes": (16, 8), "lstm_size": 6, "dueling": memory is None}
    if memory is not None:
        knobs["memory"] = memory
    elif not entry.is_recurrent:
        del knobs["lstm_size"]
    if IMAGE in entry.observations:
        knobs["feature_size"] = 12
    data = {} if entry.online else {"dataset": "nowhere", "total_updates": 1}
    return TrainConfig(
        algo=case.algo,
        env_id="Noise",
        normalize_obs=case.observation != IMAGE,
        clip_obs=2.0,
        algo_kwargs=algo_config_type(case.algo)(
            **{name: value for name, value in knobs.items() if name in names}
        ),
        **{**data, **settings},
    )


def make_policy(case: Case, **settings: Any) -> TrainedPolicy:
    """A policy whose actions depend on the observation, with statistics that matter."""
    config = make_config(case, **settings)
    adapter = make_eval_env(config, 10, env_of(case))
    spec, action = adapter.obs_spec, adapter.action_spec
    learner = build_algorithm(config, spec, action, torch.device("cpu"))
    rows = tree_map(torch.as_tensor, adapter.reset())
    adapter.close()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            inputs = parameter[0].numel() if parameter.ndim > 1 else 1
            noise = torch.randn(parameter.shape, generator=random)
            parameter.add_(noise * min(0.3, inputs**-0.5))
        count = len(tree_leaves(rows)[0])
        update_normalizers(learner.module, Rows(rows, torch.ones(count, dtype=torch.bool)))
    chosen = spec_of(config)
    return chosen.policy(chosen, config, learner, spec, action, torch.device("cpu"))
