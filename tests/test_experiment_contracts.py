"""What every registered algorithm keeps to, whichever it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint, save_checkpoint, state_digest, to_storable
from rl_training.config import TrainConfig, algo_config_type
from rl_training.errors import ConfigError
from rl_training.experiment import ALGORITHMS, ExperimentManager, get_spec
from rl_training.experiment.manager import build_algorithm
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.trainer import Trainer
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress

CPU = torch.device("cpu")
VECTOR = ObsSpec({"": ArraySpec((3,), "float32")})
DICT = ObsSpec(
    {
        "a": ArraySpec((2,), "float32"),
        "b": ArraySpec((2, 2), "float32"),
        "action_mask": ArraySpec((4,), "bool"),
    }
)
DICT_WITHOUT_MASK = ObsSpec({"a": ArraySpec((2,), "float32"), "b": ArraySpec((2, 2), "float32")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(4,), start=(0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 5.0))
MATRIX = ActionSpec("box", (2, 3), "float64", low=(-5.0,) * 6, high=(0.0,) * 6)
MULTI_DISCRETE = ActionSpec("multi_discrete", (2,), "int64", nvec=(2, 3), start=(0, 0))
MULTI_BINARY = ActionSpec("multi_binary", (3,), "int8")

TEAM = ObsSpec({**DICT.leaves, "team_state": ArraySpec((7,), "float32")})
JOINT = ObsSpec({**TEAM.leaves, "team_alive": ArraySpec((3,), "bool")})

SPACES: dict[str, list[tuple[ObsSpec, ActionSpec]]] = {
    **{
        algo: [
            (VECTOR, DISCRETE),
            (VECTOR, BOX),
            (VECTOR, MULTI_DISCRETE),
            (VECTOR, MULTI_BINARY),
            (DICT, DISCRETE),
        ]
        for algo in ("ppo", "recurrent_ppo", "a2c", "ppg", "impala", "appo", "ippo")
    },
    "mappo": [(TEAM, DISCRETE)],
    "idqn": [(VECTOR, DISCRETE), (DICT, DISCRETE)],
    "vdn": [(JOINT, DISCRETE)],
    "qmix": [(JOINT, DISCRETE)],
    **{
        algo: [(VECTOR, DISCRETE), (DICT, DISCRETE)]
        for algo in ("dqn", "qrdqn", "c51", "iqn", "drqn", "pqn", "sac_discrete")
    },
    "sac": [(VECTOR, BOX), (DICT_WITHOUT_MASK, BOX), (VECTOR, MATRIX)],
    "td3": [(VECTOR, BOX), (DICT_WITHOUT_MASK, BOX), (VECTOR, MATRIX)],
    **{
        algo: [(VECTOR, BOX), (DICT_WITHOUT_MASK, BOX), (VECTOR, MATRIX)]
        for algo in ("td3_bc", "rebrac", "awac")
    },
    **{
        algo: [(VECTOR, DISCRETE), (VECTOR, BOX), (DICT_WITHOUT_MASK, BOX), (VECTOR, MATRIX)]
        for algo in ("bc", "iql", "cql")
    },
}
"""What each algorithm can be built for."""
CASES = [(algo, *specs) for algo, pairs in SPACES.items() for specs in pairs]


@pytest.fixture(params=ALGORITHMS)
def algo(request: pytest.FixtureRequest) -> str:
    """Each registered algorithm."""
    return str(request.param)


def observations(spec: ObsSpec, rows: int) -> Any:
    """A batch that fits a spec."""
    rng = np.random.default_rng(0)
    leaves = {
        key: np.ones((rows, *leaf.shape), bool)
        if leaf.dtype == "bool"
        else rng.normal(size=(rows, *leaf.shape)).astype(leaf.dtype)
        for key, leaf in spec.leaves.items()
    }
    return leaves if spec.is_dict else leaves[""]


def test_every_algorithm_says_what_it_can_be_built_for() -> None:
    assert set(SPACES) == set(ALGORITHMS)
    assert all(SPACES.values())


def test_the_spec_resolves_and_matches_its_entry(algo: str) -> None:
    spec = get_spec(algo)
    assert isinstance(spec, AlgorithmSpec)
    assert spec.name == algo
    assert spec.config is algo_config_type(algo)
    assert issubclass(spec.trainer, Trainer)


def test_the_config_type_is_a_frozen_dataclass_with_defaults(algo: str) -> None:
    kind = algo_config_type(algo)
    assert dataclasses.is_dataclass(kind)
    made = kind()
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, getattr(made, name))
    config: TrainConfig[Any] = TrainConfig(algo=algo)
    assert type(config.algo_kwargs) is kind
    assert config.algo_kwargs == made


@pytest.mark.parametrize(("algo", "obs_spec", "action_spec"), CASES)
def test_it_is_built_and_acts_from_specs_alone(
    algo: str, obs_spec: ObsSpec, action_spec: ActionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("an environment was made")

    for module in (gym, gym.envs.registration):
        monkeypatch.setattr(module, "make", broken)
        monkeypatch.setattr(module, "make_vec", broken)
    config: TrainConfig[Any] = TrainConfig(algo=algo, env_id="no/such-v0", num_envs=8)
    algorithm = build_algorithm(config, obs_spec, action_spec, CPU)
    assert isinstance(algorithm.module, torch.nn.Module)
    assert list(algorithm.module.parameters())

    spec = get_spec(algo)
    obs = observations(obs_spec, 8)
    for sampling in (None, torch.Generator().manual_seed(0)):
        actor = spec.eval_actor(algorithm, CPU, sampling)
        action, _ = actor.act(obs, Progress(0, 1))
        assert action.shape == (8, *action_spec.shape)
        assert action.dtype == action_spec.policy_dtype
    if not explores(algo, action_spec):
        with pytest.raises(ConfigError, match="from a dataset alone"):
            spec.actor(algorithm, config, CPU)
        return
    action, _ = spec.actor(algorithm, config, CPU).act(observations(obs_spec, 8), Progress(0, 1))
    assert action.shape == (8, *action_spec.shape)


def explores(algo: str, action_spec: ActionSpec) -> bool:
    """Whether an algorithm can step environments."""
    return ALGORITHMS[algo].online and (algo != "iql" or action_spec.kind == "box")


def test_its_weights_come_from_the_seed_alone(algo: str) -> None:
    obs_spec, action_spec = SPACES[algo][0]

    def digest(seed: int) -> str:
        torch.rand(seed + 1)
        config: TrainConfig[Any] = TrainConfig(algo=algo, seed=seed)
        algorithm = build_algorithm(config, obs_spec, action_spec, CPU)
        return state_digest(to_storable(algorithm.state_dict()))

    assert digest(1) == digest(1) != digest(2)


def test_it_trains_and_its_state_survives_a_checkpoint(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(algo=algo, total_timesteps=256, eval_episodes=0)
    trainer = ExperimentManager.setup(config)
    before = state_digest(to_storable(trainer.algorithm.module.state_dict()))
    assert trainer.train().metrics["global_step"] >= 256
    assert state_digest(to_storable(trainer.algorithm.module.state_dict())) != before
    obs_spec, action_spec = trainer.source.info.obs_spec, trainer.source.info.action_spec
    stored = to_storable(trainer.algorithm.state_dict())

    path = tmp_path / "state.pt"
    save_checkpoint(path, {"algorithm": stored})
    loaded = load_checkpoint(path)["algorithm"]
    assert state_digest(loaded) == state_digest(stored)

    other = build_algorithm(config.with_overrides(seed=99), obs_spec, action_spec, CPU)
    assert state_digest(to_storable(other.state_dict())) != state_digest(stored)
    other.load_state_dict(loaded)
    assert state_digest(to_storable(other.state_dict())) == state_digest(stored)

    obs = observations(obs_spec, 64)
    actions, again = (
        get_spec(algo).eval_actor(one, CPU, None).act(obs, Progress(1, 1))[0]
        for one in (trainer.algorithm, other)
    )
    assert np.array_equal(actions, again)
