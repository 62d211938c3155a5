"""No illegal action is ever taken: by no algorithm that takes masks, whatever it acts for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import WITH_MEMORY, MakeConfig, plain, write_random_episodes
from export_cases import NoiseTeam
from probe_envs import Rooms
from rl_training.api import managed_class
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS, IMAGE
from rl_training.runtime.workflows import resume_training
from state_compare import metric_rows

DOORS: dict[str, dict[str, Any]] = {
    "Dict": {},
    "image": {"image": True},
    "MultiDiscrete": {"nvec": (3, 2, 4)},
}


class Case(NamedTuple):
    algo: str
    form: str


def _cases() -> list[Any]:
    cases: list[Any] = []
    for algo, entry in ALGORITHMS.items():
        forms = ["Dict"] if entry.masks else []
        forms += ["image"] if entry.masks and IMAGE in entry.observations else []
        forms += ["MultiDiscrete"] if entry.masks and "MultiDiscrete" in entry.actions else []
        quick = {"recurrent_ppo", "drqn"} if entry.is_recurrent else {"a2c", "mappo"}
        for form in forms:
            slow = form != "Dict" and algo not in quick
            marks = [pytest.mark.full] if slow else []
            cases.append(pytest.param(Case(algo, form), id=f"{algo}-{form}", marks=marks))
    for algo in (one for one in WITH_MEMORY if ALGORITHMS[plain(one)].masks):
        marks = [] if algo.startswith("ppg") else [pytest.mark.full]
        cases.append(pytest.param(Case(algo, "Dict"), id=f"{algo}-Dict", marks=marks))
    return cases


class RoomTeam(NoiseTeam):
    """Two agents, each in `Rooms` of its own."""

    def __init__(self, **kwargs: Any) -> None:
        self.agents = []
        self.envs: Any = {agent: Rooms(**kwargs) for agent in self.possible_agents}


@pytest.mark.parametrize("case", _cases())
def test_an_illegal_action_is_never_taken(
    case: Case, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, evaluation and `predict`, before and after a resume."""
    tried: list[Any] = []
    monkeypatch.setattr(Rooms, "TRIED", tried)
    entry, doors = ALGORITHMS[plain(case.algo)], DOORS[case.form]
    settings: dict[str, Any] = {"feature_size": 16} if case.form == "image" else {}
    env_fn: Any = None
    if entry.multi_agent:
        env_fn = lambda: RoomTeam(**doors)  # noqa: E731 - made anew for every environment
    else:
        settings |= {"env_id": "probe/Rooms-v0", "env_kwargs": doors}
    if entry.offline:
        data = write_random_episodes("probe/Rooms-v0", tmp_path / "data", kwargs=doors)
        settings |= {"dataset": str(data), "total_updates": 8}
    config = make_config(algo=case.algo, **{"total_timesteps": 128, **settings})
    run_dir = ExperimentManager.setup(config, env_fn=env_fn).train().run_dir
    more: dict[str, Any] = {"total_updates": 16} if entry.offline else {"total_timesteps": 256}
    resume_training(run_dir, env_fn=env_fn, **more)
    rows = metric_rows(run_dir)
    returns = [row[key] for row in rows for key in row if key.endswith("return_min")]
    returns += [row["rollout/return_mean"] for row in rows if "rollout/return_mean" in row]
    assert len(returns) >= (2 if entry.offline else 4)
    assert set(returns) == {0.0}
    if not entry.multi_agent:
        _predict(case, run_dir, Rooms(**doors))
    assert tried == []


def _predict(case: Case, run_dir: Path, env: Rooms) -> None:
    """Play with `predict`, greedy and sampling, with the memory of a recurrent policy."""
    model: Any = managed_class(plain(case.algo)).load(run_dir)
    for deterministic in (True, False):
        (obs, _), state = env.reset(seed=3), None
        for _ in range(4 * Rooms.LENGTH):
            action, state = model.predict(obs, state, deterministic=deterministic)
            obs, reward, ended, _, _ = env.step(action)
            assert reward == 0.0
            if ended:
                (obs, _), state = env.reset(), None


def test_every_algorithm_with_discrete_actions_takes_masks() -> None:
    taking = {name for name, entry in ALGORITHMS.items() if "Discrete" in entry.actions}
    assert taking == {name for name, entry in ALGORITHMS.items() if entry.masks}


def test_a_recorded_action_that_its_mask_forbids_is_refused(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rooms, "TRIED", [])
    doors = {"nvec": (50,)}
    data = write_random_episodes("probe/Rooms-v0", tmp_path / "data", kwargs=doors, masked=False)
    config = make_config(
        algo="bc",
        env_id="probe/Rooms-v0",
        env_kwargs=doors,
        dataset=str(data),
        total_updates=1,
    )
    message = r"episode 0: step \d: 'action_mask' does not allow action \d+"
    with pytest.raises(ConfigError, match=message):
        ExperimentManager.setup(config).train()
