"""``rl-training dataset``: datasets from policies and replays of short runs, read by Minari."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

minari = pytest.importorskip("minari")

from conftest import MakeConfig  # noqa: E402
from rl_training import PPO, cli  # noqa: E402
from rl_training.checkpointing import read_checkpoint  # noqa: E402
from rl_training.datasets.reading import PROVENANCE, local_ids  # noqa: E402
from rl_training.envs.factory import make_env  # noqa: E402
from rl_training.experiment.manager import train_as  # noqa: E402
from rl_training.runtime.workflows import load_policy  # noqa: E402
from rl_training.seeding import stream_seed  # noqa: E402
from rl_training.tools.dataset.playing import random_action  # noqa: E402
from rl_training.types import ActionSpec  # noqa: E402
from test_dataset_files import (  # noqa: E402
    DISCRETE,
    VECTOR,
    assert_same,
    episodes,
    files_of,
    write,
)

SRC = Path(cli.__file__).parents[1]


class Numbered(gym.Env[Any, Any]):
    """Every array of an observation contains the episode's number and the step.

    Odd episodes terminate after 7 steps, even ones are truncated after 9.
    """

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (40, 36, 3), np.uint8),
            "nested": spaces.Tuple(
                (
                    spaces.Box(-np.inf, np.inf, (2,), np.float64),
                    spaces.Discrete(20, start=5),
                )
            ),
            "pair": spaces.MultiDiscrete([200, 20], start=[3, 0]),
        }
    )
    action_space = spaces.Discrete(3, start=2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(100))
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        image = np.zeros((40, 36, 3), np.uint8)
        image[1, 2] = (self.number, self.t, 7)
        return {
            "image": image,
            "nested": (np.array([self.number, self.t], np.float64), np.int64(self.t + 5)),
            "pair": np.array([self.number + 3, self.t]),
        }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (2, 3, 4)
        reward = 100.0 * int(action) + self.t
        self.t += 1
        over = self.t == (7 if self.number % 2 else 9)
        terminated = over and self.number % 2 == 1
        return self.observe(), reward, terminated, over and not terminated, {}


gym.register("dataset/Numbered-v0", f"{__name__}:Numbered")
NUMBERED = {
    "env_id": "dataset/Numbered-v0",
    "buffer_size": 60,
    "learning_starts": 90,
    "feature_size": 8,
    "hidden_sizes": [8],
    "batch_size": 4,
    "train_freq": 30,
    "total_timesteps": 100,
}


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def trained(config: Any) -> Path:
    quick = config.with_overrides(eval_episodes=0)
    return train_as(quick.algo, quick).run_dir


def run(*words: str | Path) -> int:
    return cli.main(["dataset", *map(str, words)])


def result(capsys: Any) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def loaded(name: str = "test/data-v0") -> list[Any]:
    return list(minari.load_dataset(name).iterate_episodes())


def provenance(name: str = "test/data-v0") -> dict[str, Any]:
    found: dict[str, Any] = minari.load_dataset(name).storage.metadata[PROVENANCE]
    return found


def refused(capsys: Any, *words: str | Path) -> str:
    """The message of a command that is refused, with nothing written."""
    before = local_ids()
    capsys.readouterr()
    assert run(*words) == 2
    message: str = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert local_ids() == before
    return message


# -- make ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_recorded_episodes_are_those_that_the_policy_plays(
    make_config: MakeConfig, capsys: Any, algo: str
) -> None:
    folder = trained(make_config(algo=algo, total_timesteps=256))
    flags = ("--steps", "250", "--seed", "5", "--out", "test/data-v0", "--json")
    assert run("make", "--checkpoint", folder, *flags) == 0
    printed = result(capsys)

    policy = load_policy(folder)
    env: Any = make_env(policy.config)
    env.reseed(stream_seed(5, "dataset"))
    left = 250
    returns = []
    found = loaded()
    for episode in found:
        obs, _ = env.reset()
        over = False
        for t in range(len(episode)):
            assert np.array_equal(episode.observations[t], obs)
            action = policy.act(obs)
            assert np.array_equal(episode.actions[t], action)
            obs, reward, terminated, truncated, _ = env.step(action)
            assert episode.rewards[t] == reward
            left -= 1
            over = terminated or truncated
            assert episode.terminations[t] == terminated
            assert episode.truncations[t] == (truncated or (left == 0 and not terminated))
            assert over == (t == len(episode) - 1) or left == 0
        assert np.array_equal(episode.observations[-1], obs)
        if over:
            returns.append(float(episode.rewards.sum()))
    assert left == 0
    assert found[-1].truncations[-1] or found[-1].terminations[-1]
    kept = printed["returns"]
    assert kept["episodes"] == len(returns) >= 1
    assert kept["mean"] == pytest.approx(np.mean(returns))
    assert kept["std"] == pytest.approx(np.std(returns))
    assert (printed["dataset"], printed["transitions"]) == ("test/data-v0", 250)
    dataset = minari.load_dataset("test/data-v0")
    assert dataset.observation_space == env.observation_space
    assert dataset.action_space == env.action_space
    recovered = dataset.recover_environment().spec
    assert recovered.id == policy.config.env_id
    assert recovered.max_episode_steps == {"ppo": 500, "sac": 200}[algo]
    env.close()


def test_the_state_of_a_recurrent_policy_is_carried(make_config: MakeConfig) -> None:
    settings = {"env_id": "probe/Recall-v0", "env_kwargs": {"continuous": True}}
    folder = trained(make_config(algo="recurrent_ppo", **settings, total_timesteps=128))
    assert run("make", folder, "--steps", "30", "--out", "test/data-v0") == 0
    policy = load_policy(folder)
    found = loaded()
    assert [len(episode) for episode in found] == [5] * 6
    for episode in found:
        state: Any = None
        for t in range(len(episode)):
            action, state = policy.predict(episode.observations[t], state)
            assert np.allclose(episode.actions[t], action, atol=1e-6)
        assert len(np.unique(episode.actions)) > 3  # they follow the state: observations are 0


def test_observations_are_stored_as_the_environment_returns_them(
    make_config: MakeConfig, capsys: Any
) -> None:
    folder = trained(make_config(algo="dqn", **NUMBERED))
    assert run("make", folder, "--steps", "20", "--out", "test/data-v0") == 0
    found = loaded()
    assert sum(map(len, found)) == 20
    for episode in found:
        check_numbered(episode, first=0)
    assert minari.load_dataset("test/data-v0").observation_space == Numbered.observation_space
    capsys.readouterr()
    assert run("info", "test/data-v0", "--json") == 0
    info = result(capsys)
    assert info["env"] == "dataset/Numbered-v0"
    assert not info["jpeg"]
    assert info["replay_bytes"] == 40 * 36 * 3 + 4 * (2 + 20 + 220) + 8 + 9


def test_the_runs_wrappers_are_used_and_named(make_config: MakeConfig) -> None:
    wrapper = {"path": "gymnasium.wrappers:RescaleObservation", "kwargs": {}}
    wrapper["kwargs"] = {"min_obs": -1.0, "max_obs": 1.0}
    folder = trained(make_config(algo="sac", wrappers=[wrapper], total_timesteps=128))
    assert run("make", folder, "--steps", "10", "--out", "test/data-v0") == 0
    dataset = minari.load_dataset("test/data-v0")
    assert (dataset.observation_space.high == 1.0).all()
    env = dataset.recover_environment()
    assert env.observation_space == dataset.observation_space
    assert [one.name for one in dataset.spec.env_spec.additional_wrappers] == ["RescaleObservation"]


def test_random_actions_are_legal_and_as_frequent_as_asked(make_config: MakeConfig) -> None:
    config = make_config(env_id="probe/MaskedActions-v0", total_timesteps=128)
    folder = trained(config)
    flags = ("--steps", "200", "--out")  # the environment raises for an illegal action
    assert run("make", folder, *flags, "test/greedy-v0") == 0
    assert run("make", folder, "--epsilon", "0.5", *flags, "test/half-v0") == 0
    assert run("make", folder, "--epsilon", "1", *flags, "test/random-v0") == 0
    policy = load_policy(folder)
    shares = {}
    for name in ("greedy", "half", "random"):
        found = loaded(f"test/{name}-v0")
        firsts = [{k: v[0] for k, v in one.observations.items()} for one in found]
        shares[name] = np.mean(
            [policy.act(obs) != one.actions[0] for obs, one in zip(firsts, found, strict=True)]
        )
    assert shares["greedy"] == 0  # of two legal actions, a random one differs half of the time
    assert 0.16 < shares["half"] < 0.34
    assert 0.4 < shares["random"] < 0.6


def test_random_actions_cover_every_kind_of_action() -> None:
    random = np.random.default_rng(0)
    box = ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 5.0))
    drawn = np.array([box.to_env(random_action(box, None, random)[None])[0] for _ in range(500)])
    assert drawn.min(0) == pytest.approx([-1.0, 0.0], abs=0.1)
    assert drawn.max(0) == pytest.approx([1.0, 5.0], abs=0.1)
    pair = ActionSpec("multi_discrete", (2,), "int64", nvec=(2, 3), start=(0, 0))
    mask = np.array([1, 1, 0, 1, 1], bool)
    found = {tuple(random_action(pair, mask, random).tolist()) for _ in range(100)}
    assert found == {(0, 1), (0, 2), (1, 1), (1, 2)}
    bits = ActionSpec("multi_binary", (2,), "int8")
    assert {tuple(random_action(bits, None, random).tolist()) for _ in range(100)} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }


def test_two_makes_are_byte_identical(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    made = []
    for root, flags in (("one", ()), ("two", ()), ("three", ("--seed", "8"))):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / root))
        words = ("--steps", "90", "--stochastic", "--out", "test/data-v0")
        moved = folder.rename(tmp_path / f"run_{root}")  # where the run is does not matter
        assert run("make", moved, *words, *flags) == 0
        folder = moved
        made.append(files_of(tmp_path / root))
    assert made[0] == made[1]
    data = "test/data-v0/data/main_data.hdf5"
    assert made[0][data] != made[2][data]
    assert str(tmp_path).encode() not in made[0]["test/data-v0/data/metadata.json"]


def test_sampled_actions_differ_from_deterministic_ones(make_config: MakeConfig) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    for name, flags in (("a", ("--stochastic",)), ("b", ()), ("c", ("--epsilon", "0"))):
        assert run("make", folder, "--steps", "30", *flags, "--out", f"test/{name}-v0") == 0
    sampled, plain, zero = (loaded(f"test/{name}-v0")[0] for name in "abc")
    assert np.array_equal(sampled.observations[0], plain.observations[0])  # the same episode
    assert not np.isclose(sampled.actions, plain.actions).any()
    assert np.array_equal(zero.actions, plain.actions)


def test_the_episodes_are_neither_those_of_training_nor_of_evaluation(
    make_config: MakeConfig,
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    assert run("make", folder, "--steps", "10", "--out", "test/data-v0") == 0
    first = loaded()[0].observations[0]
    config = load_policy(folder).config
    env: Any = make_env(config)
    for seed in (config.seed, stream_seed(config.seed, "evaluation")):
        env.reseed(seed)
        assert not np.array_equal(env.reset()[0], first)
    env.close()


def test_a_policy_file_is_enough(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = trained(make_config(total_timesteps=128))
    file = tmp_path / "policy.pt"
    PPO.load(folder).save(file)
    for name, source in (("a", folder), ("b", file)):
        assert run("make", source, "--steps", "20", "--out", f"test/{name}-v0") == 0
    assert np.array_equal(loaded("test/a-v0")[0].actions, loaded("test/b-v0")[0].actions)
    kept = provenance("test/b-v0")
    assert kept["checkpoint"] == read_checkpoint(file).digest
    assert kept["checkpoint_step"] is None


def test_provenance_names_checkpoint_config_and_versions(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    flags = ("--steps", "30", "--epsilon", "0.25", "--seed", "4", "--out", "test/data-v0")
    assert run("make", folder, *flags) == 0
    kept = provenance()
    assert kept["kind"] == "make"
    assert kept["checkpoint"] == read_checkpoint(folder / "checkpoints" / "last.pt").digest
    assert kept["checkpoint_step"] == 128
    assert (kept["algorithm"], kept["seed"], kept["steps"]) == ("sac", 4, 30)
    assert (kept["epsilon"], kept["stochastic"]) == (0.25, False)
    assert kept["config"]["env_id"] == "Pendulum-v1"
    assert kept["config"]["algo_kwargs"]["hidden_sizes"] == [32, 32]
    assert not {"output_dir", "init_from"} & set(kept["config"])
    assert {"rl_training", "gymnasium", "numpy"} <= set(kept["versions"])
    assert kept["returns"] == {"episodes": 0, "mean": None, "std": None}
    metadata = (tmp_path / "minari" / "test" / "data-v0" / "data" / "metadata.json").read_text()
    assert str(tmp_path) not in metadata


def test_a_run_without_an_environment_plays_the_one_that_is_named(
    make_config: MakeConfig, capsys: Any
) -> None:
    config = make_config(algo="bc", env_id="Pendulum-v1", total_timesteps=8)
    named = trained(config)
    alone = trained(config.with_overrides(env_id="", output_dir=config.output_dir / "alone"))
    words = ("make", alone, "--steps", "20", "--out", "test/data-v0")
    assert "--env-id ENV" in refused(capsys, *words)
    message = refused(capsys, *words, "--env-id", "MountainCarContinuous-v0")
    assert "does not match the policy: its observations" in message
    flags = ("--env-id", "Pendulum-v1", "--env-kwargs", "{g: 5.0}")
    assert run(*words, *flags) == 0
    assert run("make", named, *words[2:-1], "test/same-v0", "--env-kwargs", "{g: 5.0}") == 0
    for one, other in zip(loaded(), loaded("test/same-v0"), strict=True):
        assert_same(one.observations, other.observations)
    kept = provenance()
    assert (kept["env_id"], kept["env_kwargs"]) == ("Pendulum-v1", {"g": 5.0})
    assert kept["config"]["env_id"] == ""
    assert minari.load_dataset("test/data-v0").recover_environment().unwrapped.g == 5.0


# -- from-replay -----------------------------------------------------------------------------------


def check_numbered(episode: Any, first: int | None) -> None:
    """Check that all of an episode is consistent, and that it begins at step ``first``."""
    seen = episode.observations
    number, steps = seen["nested"][0].T
    t = np.arange(len(episode) + 1) + steps[0]
    assert first is None or steps[0] == first
    assert (number == number[0]).all()
    assert np.array_equal(steps, t)
    assert np.array_equal(seen["nested"][1], t + 5)
    assert np.array_equal(seen["pair"], np.stack((number + 3, t), 1))
    image = np.zeros((len(t), 40, 36, 3), np.uint8)
    image[:, 1, 2] = np.stack((number, t, np.full(len(t), 7)), 1)
    assert np.array_equal(seen["image"], image)
    assert np.array_equal(episode.rewards, 100.0 * episode.actions + t[:-1])
    assert set(episode.actions.tolist()) <= {2, 3, 4}
    last = 7 if number[0] % 2 else 9
    assert (t[:-1] < last).all()
    terminated = np.zeros(len(episode), bool)
    terminated[-1] = t[-1] == last and number[0] % 2 == 1
    truncated = np.zeros(len(episode), bool)
    truncated[-1] = not terminated[-1]
    assert np.array_equal(episode.terminations, terminated)
    assert np.array_equal(episode.truncations, truncated)
    for name, space in Numbered.observation_space.items():
        for row in (0, -1):
            value = seen[name]
            one = tuple(part[row] for part in value) if isinstance(value, tuple) else value[row]
            assert one in space


@pytest.mark.parametrize("shards", [1, 2])
def test_a_replay_becomes_the_episodes_that_it_holds(make_config: MakeConfig, shards: int) -> None:
    folder = trained(make_config(algo="dqn", **NUMBERED, shards=shards))
    assert run("from-replay", folder, "--out", "test/data-v0") == 0
    found = loaded()
    assert sum(map(len, found)) == 60
    for episode in found:
        check_numbered(episode, first=None)
    # Of each environment: 30 of 50 steps. Its first episode may lack its start, its last its end.
    ends = np.cumsum([len(episode) for episode in found])
    assert 30 in ends
    second = int(np.flatnonzero(ends == 30)[0]) + 1
    starts = [int(episode.observations["nested"][0][0, 1]) for episode in found]
    assert not any(starts[1:second])
    assert not any(starts[second + 1 :])
    assert any(starts)  # the ring wrapped
    whole = [
        one
        for one, start in zip(found, starts, strict=True)
        if start == 0 and one.observations["nested"][0][-1, 1] in (7, 9)
    ]
    kept = provenance()
    inner = [one for i, one in enumerate(found) if i not in (0, second)]
    assert kept["returns"]["episodes"] == len([one for one in whole if one in inner])
    assert (kept["kind"], kept["steps"], kept["algorithm"]) == ("from-replay", 60, "dqn")
    assert minari.load_dataset("test/data-v0").observation_space == Numbered.observation_space


def check_cartpole(episode: Any) -> None:
    """Check each transition against CartPole's equations."""
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for t in range(len(episode)):
        env.state = tuple(episode.observations[t].astype(np.float64))
        env.steps_beyond_terminated = None
        obs, _, terminated, _, _ = env.step(int(episode.actions[t]))
        assert np.allclose(obs, episode.observations[t + 1], atol=1e-5)
        assert terminated == episode.terminations[t]


@pytest.mark.parametrize(
    ("algo", "settings"),
    [("dqn", {"vectorization": "native"}), ("drqn", {}), ("dqn", {"prioritized": True})],
)
def test_every_kind_of_replay_can_be_written(
    make_config: MakeConfig, algo: str, settings: dict[str, Any], capsys: Any
) -> None:
    folder = trained(make_config(algo=algo, **settings, total_timesteps=200))
    assert run("from-replay", folder, "--out", "test/data-v0", "--json") == 0
    printed = result(capsys)
    found = loaded()
    # Nothing was overwritten, so every step is there; resets of a native vector are left out.
    assert sum(map(len, found)) == printed["transitions"]
    assert printed["transitions"] == 200 or settings.get("vectorization") == "native"
    assert printed["transitions"] > 150
    for episode in found:
        check_cartpole(episode)
        assert len(episode) > 1  # a reset is no episode
        assert np.abs(episode.observations[0]).max() <= 0.05
    assert sum(bool(one.truncations[-1]) for one in found) <= 2
    assert printed["returns"]["episodes"] >= len(found) - 2
    assert run("info", "test/data-v0") == 0


def test_stacked_images_of_a_replay_are_whole(make_config: MakeConfig) -> None:
    pytest.importorskip("ale_py")
    from atari_runs import QUICK_ATARI

    folder = trained(make_config(algo="dqn", **{**QUICK_ATARI["dqn"], "total_timesteps": 200}))
    assert run("from-replay", folder, "--out", "test/replay-v0") == 0
    assert run("make", folder, "--steps", "40", "--out", "test/make-v0") == 0
    for name in ("replay", "make"):
        dataset = minari.load_dataset(f"test/{name}-v0")
        for episode in dataset.iterate_episodes():
            seen = episode.observations
            assert seen.shape[1:] == dataset.observation_space.shape
            assert np.array_equal(seen[1:, :-1], seen[:-1, 1:])
            assert seen.any()


def test_actions_of_a_replay_are_those_of_the_environment(make_config: MakeConfig) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=150))
    for name in ("a", "b"):
        assert run("from-replay", folder, "--out", f"test/{name}-v0") == 0
    env: Any = gym.make("Pendulum-v1").unwrapped
    env.reset(seed=0)
    found = loaded("test/a-v0")
    actions = np.concatenate([one.actions for one in found])
    assert actions.dtype == np.float32
    assert 1.5 < np.abs(actions).max() <= 2.0
    for episode in found:
        for t in range(len(episode)):
            cos, sin, speed = episode.observations[t].astype(np.float64)
            env.state = np.array([np.arctan2(sin, cos), speed])
            obs, reward, *_ = env.step(episode.actions[t])
            assert np.allclose(obs, episode.observations[t + 1], atol=1e-4)
            assert reward == pytest.approx(episode.rewards[t], abs=1e-3)
    for one, other in zip(found, loaded("test/b-v0"), strict=True):
        assert_same(one.observations, other.observations)


def test_a_run_without_replay_files_is_refused(make_config: MakeConfig, capsys: Any) -> None:
    ppo = trained(make_config(total_timesteps=128))
    message = refused(capsys, "from-replay", ppo, "--out", "test/data-v0")
    assert "ppo keeps none" in message
    sac = trained(make_config(algo="sac", total_timesteps=128))
    files = sorted((sac / "replay").glob("*.replay"))
    damaged = files[0].read_bytes()
    files[0].write_bytes(damaged[:-200])
    message = refused(capsys, "from-replay", sac, "--out", "test/data-v0")
    assert files[0].name in message
    assert "resume" not in message
    shutil.rmtree(sac / "replay")
    message = refused(capsys, "from-replay", sac, "--out", "test/data-v0")
    assert "are not in" in message
    file = sac.parent / "policy.pt"
    PPO.load(ppo).save(file)
    message = refused(capsys, "from-replay", file, "--out", "test/data-v0")
    assert "a policy alone" in message
    alone = sac.parent / "alone" / "checkpoints"
    shutil.copytree(sac / "checkpoints", alone)
    message = refused(capsys, "from-replay", alone / "last.pt", "--out", "test/data-v0")
    assert "are not in" in message


# -- list and info ---------------------------------------------------------------------------------


def test_list_shows_what_the_metadata_state(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    assert run("list") == 0
    assert "no datasets under" in capsys.readouterr().out
    folder = trained(make_config(total_timesteps=128))
    assert run("make", folder, "--steps", "100", "--out", "test/data-v0") == 0
    broken = tmp_path / "minari" / "broken-v0" / "data"
    broken.mkdir(parents=True)
    (broken / "metadata.json").write_text("{")
    capsys.readouterr()
    assert run("list", "--json") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert re.search(r"test/data-v0 +CartPole-v1 +\d+ +100 +[\d.]+ KiB +[\d.]+", shown.out)
    assert "broken-v0" in shown.err
    broken_one, made = json.loads(lines[-1])["datasets"]
    assert broken_one["error"]
    assert (made["id"], made["env"], made["transitions"]) == ("test/data-v0", "CartPole-v1", 100)
    assert made["mean_return"] == provenance()["returns"]["mean"]
    size = sum(map(len, files_of(tmp_path / "minari" / "test" / "data-v0").values()))
    assert made["bytes"] == size


def test_info_is_computed_from_the_data(make_config: MakeConfig, capsys: Any) -> None:
    folder = trained(make_config(algo="dqn", total_timesteps=128))
    assert run("make", folder, "--steps", "100", "--out", "test/data-v0") == 0
    capsys.readouterr()
    assert run("info", "test/data-v0", "--json") == 0
    shown = capsys.readouterr().out
    info = json.loads(shown.splitlines()[-1])
    found = loaded()
    (part,) = provenance()["cut_episodes"]
    returns = [float(one.rewards.sum()) for i, one in enumerate(found) if i != part]
    lengths = [len(one) for one in found]
    assert info["whole"] == len(returns) == len(found) - 1
    for name, values in (("returns", returns), ("lengths", lengths)):
        figures = [info[name][key] for key in ("mean", "std", "min", "max")]
        expected = [np.mean(values), np.std(values), np.min(values), np.max(values)]
        assert figures == pytest.approx(expected)
    assert info["terminated"] == sum(bool(one.terminations[-1]) for one in found)
    assert info["truncated"] == sum(bool(one.truncations[-1]) for one in found)
    assert info["terminated"] + info["truncated"] == info["episodes"] == len(found)
    assert (info["transitions"], info["unfinished"], info["jpeg"]) == (100, 0, False)
    assert info["replay_bytes"] == 4 * 4 + 8 + 9
    assert info["provenance"] == provenance()
    assert "Discrete(2)" in shown
    assert info["provenance"]["checkpoint"] in shown


def test_all_commands_show_the_mean_return_of_whole_episodes(
    make_config: MakeConfig, capsys: Any
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=150))
    assert run("make", folder, "--steps", "500", "--out", "test/data-v0", "--json") == 0
    assert len(loaded()) == 3
    printed = result(capsys)["returns"]
    mean = float(np.mean([one.rewards.sum() for one in loaded()[:2]]))
    assert (printed["episodes"], printed["mean"]) == (2, pytest.approx(mean))
    assert run("list", "--json") == 0
    assert result(capsys)["datasets"][0]["mean_return"] == printed["mean"]
    assert run("info", "test/data-v0", "--json") == 0
    shown = capsys.readouterr().out
    info = json.loads(shown.splitlines()[-1])
    assert (info["returns"]["mean"], info["whole"]) == (pytest.approx(printed["mean"]), 2)
    assert re.search(rf"return of whole episodes +mean {mean:,.2f}", shown)
    words = ["--dataset", "test/data-v0", "--total-updates", "2", "--eval-episodes", "0"]
    folders = ["--output-dir", str(folder.parent)]
    assert cli.main(["train", "--algo", "bc", *words, *folders]) == 0
    assert f"mean return of whole episodes {mean:,.2f}" in capsys.readouterr().err


def test_a_dataset_without_a_whole_episode_has_no_mean_return(
    make_config: MakeConfig, capsys: Any
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=150))
    assert run("make", folder, "--steps", "50", "--out", "test/data-v0") == 0
    capsys.readouterr()
    assert run("info", "test/data-v0", "--json") == 0
    shown = capsys.readouterr().out
    info = json.loads(shown.splitlines()[-1])
    assert (info["returns"], info["whole"], info["episodes"]) == (None, 0, 1)
    assert "no episode is whole" in shown
    assert run("list", "--json") == 0
    assert result(capsys)["datasets"][0]["mean_return"] is None


def test_info_of_spaces_that_cannot_be_learnt_from(tmp_path: Path, capsys: Any) -> None:
    buffer = minari.data_collector.EpisodeBuffer(
        observations=["ab", "cd", "ef"],
        actions=np.zeros((2, 1), np.float32),
        rewards=[1.0, 2.0],
        terminations=[False, False],
        truncations=[False, False],
    )
    with pytest.warns(UserWarning, match="`author` is set to None"):
        minari.create_dataset_from_buffers(
            "test/text-v0",
            [buffer],
            observation_space=spaces.Text(2),
            action_space=spaces.Box(-1.0, 1.0, (1,)),
        )
    assert run("info", "test/text-v0", "--json") == 0
    info = result(capsys)
    assert info["replay_bytes"] is None
    assert "Text" in info["replay_error"]
    assert (info["unfinished"], info["provenance"], info["env"]) == (1, None, None)


# -- delete ----------------------------------------------------------------------------------------


class Answer(io.StringIO):
    """A terminal on which something was typed."""

    def isatty(self) -> bool:
        return True


def test_a_dataset_is_deleted_with_its_size(tmp_path: Path, capsys: Any) -> None:
    folder = write("test/data-v0", episodes(VECTOR, DISCRETE))
    write("test/other-v0", episodes(VECTOR, DISCRETE))
    size = sum(map(len, files_of(folder).values()))
    assert run("delete", "test/data-v0", "--yes", "--json") == 0
    shown, printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"deleted test/data-v0: 3 episodes, 12 transitions, [\d.]+ KiB in {folder}", shown
    )
    counts = {"episodes": 3, "transitions": 12, "bytes": size}
    assert json.loads(printed) == {"dataset": "test/data-v0", "folder": str(folder), **counts}
    assert local_ids() == ["test/other-v0"]
    assert {path.name for path in folder.parent.iterdir()} == {
        "namespace_metadata.json",
        "other-v0",
    }
    assert "no dataset 'test/data-v0'" in refused(capsys, "delete", "test/data-v0", "--yes")
    assert "Did you mean" in refused(capsys, "delete", "test/othr-v0", "--yes")
    assert list(minari.list_local_datasets()) == ["test/other-v0"]
    write("test/data-v0", episodes(VECTOR, DISCRETE))  # the name is free again


def test_it_asks_first(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("test/data-v0", episodes(VECTOR, DISCRETE))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "--yes deletes without asking" in refused(capsys, "delete", "test/data-v0")
    for answer in ("n\n", "\n", "", "yours\n"):
        monkeypatch.setattr(sys, "stdin", Answer(answer))
        assert run("delete", "test/data-v0", "--json") == 2
        shown = capsys.readouterr()
        assert re.match(
            r"delete test/data-v0: 3 episodes, 12 transitions, .*\? \[y/N\]\n", shown.err
        )
        assert json.loads(shown.out) == {"error": "nothing was deleted", "exit_code": 2}
        assert local_ids() == ["test/data-v0"]
    monkeypatch.setattr(sys, "stdin", Answer("Yes\n"))
    assert run("delete", "test/data-v0") == 0
    assert local_ids() == []


def test_only_a_dataset_under_the_root_is_deleted(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "minari"
    inside = write("test/data-v0", episodes(VECTOR, DISCRETE))
    outside = write(tmp_path / "own" / "data-v0", episodes(VECTOR, DISCRETE))
    monkeypatch.chdir(tmp_path / "own")
    for name in ("../own/data-v0", str(outside), str(inside), "./data-v0", "test", "", ".", "~"):
        assert "only datasets under" in refused(capsys, "delete", name, "--yes")
    assert "no dataset 'data-v0'" in refused(capsys, "delete", "data-v0", "--yes")
    (root / "empty-v0" / "data").mkdir(parents=True)
    assert "no dataset 'empty-v0'" in refused(capsys, "delete", "empty-v0", "--yes")
    (root / "link-v0").symlink_to(outside)
    (root / "space").symlink_to(outside.parent)
    (root / "half-v0").mkdir()
    (root / "half-v0" / "data").symlink_to(outside / "data")
    write("test/part-v0", episodes(VECTOR, DISCRETE))
    (root / "test" / "part-v0" / "data" / "more").symlink_to(outside)
    for name in ("link-v0", "space/data-v0", "half-v0", "test/part-v0"):
        assert "is a symbolic link" in refused(capsys, "delete", name, "--yes")
    (inside / "notes.txt").write_text("mine")
    shutil.copytree(outside, inside / "inner-v0")
    message = refused(capsys, "delete", "test/data-v0", "--yes")
    assert "contains more than a dataset (inner-v0, notes.txt)" in message
    for folder in (inside, outside):
        assert (folder / "data" / "main_data.hdf5").is_file()


def test_a_damaged_dataset_is_deleted_and_what_cannot_be_is_explained(
    damaged: Callable[[Any], None], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(lambda data: (data / "metadata.json").write_text("{"))

    def denied(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", denied)
        message = refused(capsys, "delete", "test/data-v0", "--yes")
    assert message.endswith("data-v0: Operation not permitted\n")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", denied)
        assert run("delete", "test/data-v0", "--yes") == 2
    assert "what is left of it is in" in capsys.readouterr().err
    assert local_ids() == []
    write("test/data-v0", episodes(VECTOR, DISCRETE))
    assert run("delete", "test/data-v0", "--yes") == 0


# -- bad input -------------------------------------------------------------------------------------


def test_bad_flags_are_refused_before_any_work(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    out = ("--out", "test/data-v0")
    gone = tmp_path / "gone"  # is not looked at
    for words, reason in {
        ("--steps", "0", *out): "--steps must be at least 1; got 0",
        ("--steps", "9", "--epsilon", "1.5", *out): "--epsilon must be between 0 and 1; got 1.5",
        ("--steps", "9", "--epsilon", "nan", *out): "--epsilon must be between 0 and 1",
        ("--steps", "9", "--epsilon", "0.1", "--stochastic", *out): "not both",
        ("--steps", "9", "--seed", "-1", *out): "--seed must be 0 or more",
        ("--steps", "9", "--out", "data"): "not the id of a dataset",
        out: "--steps is missing",
        ("--steps", "9"): "--out is missing",
        ("--steps", "9", "--epsilom", "0.5", *out): "Did you mean --epsilon?",
    }.items():
        assert reason in refused(capsys, "make", gone, *words)
    assert "no checkpoint or run folder" in refused(capsys, "make", gone, "--steps", "9", *out)
    assert "Did you mean 'from-replay'?" in refused(capsys, "from-reply")
    assert "no dataset 'test/none-v0'" in refused(capsys, "info", "test/none-v0")
    (tmp_path / "minari" / "test" / "data-v0").mkdir(parents=True)
    assert "exists already" in refused(capsys, "make", gone, "--steps", "9", *out)
    assert "exists already" in refused(capsys, "from-replay", gone, *out)


def test_help_is_printed(capsys: Any) -> None:
    assert run("--help") == run() == 0
    assert capsys.readouterr().out.count("rl-training dataset from-replay RUN") == 2
    for command in ("list", "info", "make", "from-replay", "delete"):
        with pytest.raises(SystemExit) as done:
            run(command, "--help")
        assert done.value.code == 0
        assert f"usage: rl-training dataset {command}" in capsys.readouterr().out


def test_actions_without_bounds_cannot_be_random(make_config: MakeConfig, capsys: Any) -> None:
    gym.register("dataset/Unbounded-v0", f"{__name__}:Unbounded")
    try:
        folder = trained(make_config(env_id="dataset/Unbounded-v0", total_timesteps=128))
        flags = ("--steps", "9", "--out", "test/data-v0")
        assert "finite bounds" in refused(capsys, "make", folder, *flags, "--epsilon", "0.1")
        assert run("make", folder, *flags, "--stochastic") == 0
    finally:
        del gym.registry["dataset/Unbounded-v0"]


class Unbounded(gym.Env[Any, Any]):
    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_foreign_code_needs_trust(
    make_config: MakeConfig, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"env_id": "probe_envs:probe/Recall-v0", "total_timesteps": 128}
    folder = trained(make_config(algo="dqn", **settings))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))  # nothing here is our own
    commands = (("make", folder, "--steps", "9"), ("from-replay", folder))
    for words in commands:
        message = refused(capsys, *words, "--out", "test/data-v0")
        assert "--trust-modules probe_envs" in message
    for words in commands:
        out = f"test/{words[0]}-v0"
        assert run(*words, "--trust-modules", "probe_envs", "--out", out) == 0


def test_an_environment_that_fails_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    settings = {"env_id": "probe/Faulty-v0", "env_kwargs": {"fault": "raises", "at": 200}}
    folder = trained(make_config(**settings, total_timesteps=128))
    assert run("make", folder, "--steps", "300", "--out", "test/data-v0") == 1
    assert "the pole fell on my foot" in capsys.readouterr().err
    assert list((tmp_path / "minari").iterdir()) == []


@pytest.fixture
def damaged() -> Callable[[Callable[[Path], None]], None]:
    """Makes a dataset, and applies a function to its folder ``data``."""
    data = write("test/data-v0", episodes(VECTOR, DISCRETE)) / "data"
    return lambda change: change(data)


def edited(data: Path, **changes: Any) -> None:
    metadata = json.loads((data / "metadata.json").read_text())
    metadata.update(changes)
    kept = {name: value for name, value in metadata.items() if value is not None}
    (data / "metadata.json").write_text(json.dumps(kept))


def without(data: Path, name: str) -> None:
    import h5py

    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file[name]


def spoilt(data: Path) -> None:
    """Overwrite the middle of the file."""
    file = data / "main_data.hdf5"
    content = bytearray(file.read_bytes())
    content[1000:9000] = bytes(8000)
    file.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: (data / "main_data.hdf5").write_bytes(b""),
        lambda data: (data / "main_data.hdf5").write_bytes(b"no HDF5" * 500),
        lambda data: (data / "main_data.hdf5").write_bytes(
            (data / "main_data.hdf5").read_bytes()[:3000]
        ),
        spoilt,
        lambda data: (data / "main_data.hdf5").unlink(),
        lambda data: without(data, "episode_0"),
        lambda data: without(data, "episode_0/rewards"),
        lambda data: without(data, "episode_0/observations"),
        lambda data: (data / "metadata.json").write_text("[]"),
        lambda data: (data / "metadata.json").write_text("{" * 10),
        lambda data: edited(data, observation_space=None),
        lambda data: edited(data, action_space=None),
        lambda data: edited(data, observation_space="{}"),
        lambda data: edited(data, observation_space=7),
        lambda data: edited(data, action_space='{"type": "Elsewhere"}'),
        lambda data: edited(data, data_format="sql"),
        lambda data: edited(data, total_episodes=99),
        lambda data: edited(data, total_steps="many"),
    ],
)
def test_a_damaged_dataset_is_explained(
    damaged: Callable[[Any], None], capsys: Any, change: Callable[[Path], Any]
) -> None:
    damaged(change)
    assert "test/data-v0" in refused(capsys, "info", "test/data-v0")
    assert run("list") == 0


def test_modules_that_a_dataset_names_are_not_imported(
    damaged: Callable[[Any], None],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"id": "hostile_module:Env-v0", "entry_point": "hostile_module:Env", "kwargs": {}}
    damaged(lambda data: edited(data, env_spec=json.dumps(spec)))
    capsys.readouterr()
    assert run("info", "test/data-v0", "--json") == 0
    assert result(capsys)["env"] == "Env-v0"
    assert run("list") == 0
    damaged(lambda data: edited(data, observation_space=None))
    assert "observation_space" in refused(capsys, "info", "test/data-v0")
    assert "hostile_module" not in sys.modules


def test_text_of_a_dataset_cannot_drive_the_terminal(
    damaged: Callable[[Any], None], capsys: Any
) -> None:
    hostile = {"kind": "\x1b[2J\nerror: all is lost", "returns": {"mean": "much"}}
    damaged(lambda data: edited(data, **{PROVENANCE: hostile, "env_spec": "{}"}))
    for words in (["info", "test/data-v0"], ["list"]):
        assert run(*words) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "\nerror:" not in shown


# -- real processes --------------------------------------------------------------------------------


def start(root: Path, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that records for hours; returns when it writes."""
    environment = {**os.environ, "MINARI_DATASETS_PATH": str(root), "PYTHONPATH": str(SRC)}
    words = ["make", str(folder), "--steps", "1e9", "--out", "test/data-v0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", "dataset", *words], env=environment
    )
    hidden = root / "test" / ".data-v0.tmp"
    deadline = time.monotonic() + 60
    file = hidden / "data" / "main_data.hdf5"
    while not (file.is_file() and file.stat().st_size > 100_000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, hidden


def test_a_killed_process_leaves_nothing_that_can_be_loaded(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    root = tmp_path / "minari"
    process, hidden = start(root, folder)
    flags = ("make", folder, "--steps", "9", "--out", "test/data-v0")
    assert "another process is writing" in refused(capsys, *flags)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert hidden.is_dir()
    assert local_ids() == []
    assert minari.list_local_datasets() == {}
    with pytest.raises(FileNotFoundError):
        minari.load_dataset("test/data-v0")
    assert run(*flags) == 0
    assert not hidden.exists()
    assert sum(map(len, loaded())) == 9


def test_an_interrupted_process_leaves_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = trained(make_config(algo="sac", total_timesteps=128))
    process, _ = start(tmp_path / "minari", folder)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 1
    assert list((tmp_path / "minari").iterdir()) == []
