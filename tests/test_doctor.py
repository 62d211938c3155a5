"""The doctor: what it says is there, where it finds the time, what it recommends."""

from __future__ import annotations

import dataclasses
import json
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from atari_runs import QUICK_ATARI
from conftest import QUICK_KNOBS, MakeConfig
from rl_training import cli
from rl_training.config import TrainConfig
from rl_training.errors import UserError
from rl_training.experiment.registry import ALGORITHMS
from rl_training.tools.doctor import advice as doctor_advice
from rl_training.tools.doctor import command
from rl_training.tools.doctor import system as doctor_system
from rl_training.tools.doctor.advice import Advice, Result, advise
from rl_training.tools.doctor.probe import Request, measure, shortened
from rl_training.tools.doctor.trials import Trial, baseline, combined, trials

SLOW_ENV = """
import time
import gymnasium as gym, numpy as np

class Slow(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.01)
        print("an environment that talks")
        return np.zeros(2, np.float32), 0.0, False, False, {}

gym.register("slow/Slow-v0", Slow, max_episode_steps=50)
"""


def test_it_says_what_is_there(capsys: Any) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == metadata.version("numpy")
    assert found["cpu"]["cores"] >= found["cpu"]["usable"] >= 1
    assert found["memory_gib"] > found["memory_free_gib"] > 0
    assert found["device"]["images"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found["versions"]["python"] in output.splitlines()[0]


def test_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = metadata.requires("rl_training") or []
    with_own = {text.split("extra ==")[1].strip(" '\"") for text in requires if "extra ==" in text}
    extras = {extra.name: extra for extra in doctor_system.examine().extras}
    assert set(extras) == with_own - {"all"}  # 'all' is made of the others
    assert {"atari", "mujoco", "box2d", "wandb"} <= set(extras)
    assert extras["dev"].missing == ()

    versions = {"ale-py": "0.0.1", "opencv-python-headless": None}
    monkeypatch.setattr(doctor_system, "_installed", lambda name: versions.get(name, "99.0"))
    system = doctor_system.examine()
    atari = next(extra for extra in system.extras if extra.name == "atari")
    assert [need.split(">")[0] for need in atari.missing] == ["ale-py", "opencv-python-headless"]
    assert "in the clone: pip install '.[atari]'" in doctor_system.as_text(system)
    assert "missing: mujoco" not in doctor_system.as_text(system)


def test_it_runs_from_the_source_too(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    for asked in ("version", "metadata", "requires"):
        monkeypatch.setattr(metadata, asked, absent)
    assert cli.main(["doctor"]) == 0
    assert "extras     unknown: rl_training runs from its source" in capsys.readouterr().out


def test_every_extra_of_the_project_file_is_known() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    declared = set(tomllib.loads(text)["project"]["optional-dependencies"])
    installed = set(metadata.metadata("rl_training").get_all("Provides-Extra") or [])
    if declared != installed:
        pytest.skip("the package was installed before its extras changed")
    assert {extra.name for extra in doctor_system.examine().extras} == declared - {"all"}


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert "built without CUDA" in doctor_system.examine().device.reason
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in doctor_system.examine().device.reason
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def too_old(*_: Any, **__: Any) -> Any:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch, "zeros", too_old)
    assert "driver on your system is too old" in doctor_system.examine().device.reason


def measured(config: TrainConfig[Any], folder: Path) -> Any:
    return measure(Request(config.to_dict(), str(folder), seconds=0.3, windows=2, profile=True))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_can_be_measured(
    make_config: MakeConfig, tmp_path: Path, algo: str, capfd: Any
) -> None:
    knobs = {**QUICK_KNOBS[algo], "learning_starts": 10**6} if algo in ("dqn", "sac") else {}
    reply = measured(make_config(algo=algo, total_timesteps=64, **knobs), tmp_path)
    assert len(reply.rates) == 2
    assert min(reply.rates) > 0
    shares = reply.shares
    parts = {"update", "logging"}
    if not ALGORITHMS[algo].offline:
        parts |= {"environment", "inference", "storing"}
    assert {part for part, share in shares.items() if share > 0} == parts
    assert 0.8 < sum(shares.values()) <= 1.0
    assert shares["update"] > 0.2  # a replay's warm-up is shortened, or nothing would be learnt
    assert reply.transfer == 0.0
    assert reply.checkpoint_seconds > 0
    published = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line]
    assert published[-1]["rates"] == reply.rates
    rough = published[0]  # after the first update: the answer if the time is up soon after it
    assert (len(rough["rates"]), rough["shares"]) == (1, {})
    assert rough["rates"][0] > 0


def test_a_large_replay_buffer_is_not_allocated(make_config: MakeConfig) -> None:
    large, small = (make_config(algo="dqn", buffer_size=size) for size in (10**6, 4000))
    assert shortened(large, "folder").algo_kwargs.buffer_size == 50_000
    assert shortened(small, "folder").algo_kwargs.buffer_size == 4000


def test_auxiliary_phases_come_often_while_measuring(make_config: MakeConfig) -> None:
    assert shortened(make_config(algo="ppg"), "folder").algo_kwargs.policy_phases == 2


def test_a_rough_answer_is_an_answer() -> None:
    advice = Advice("cpu", Result(baseline(), (120.0,)), {}, 0.0, 0.0, ())
    text = command._as_text(advice, "sac/ant", 50_000)
    assert "roughly 120 steps/s" in text
    assert "raise --seconds" in text


def test_the_slow_part_is_found(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW_ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    slow_env = make_config(env_id="slow_env:slow/Slow-v0", num_steps=16)
    assert measured(slow_env, tmp_path).shares["environment"] > 0.8
    slow_update = make_config(update_epochs=40)
    assert measured(slow_update, tmp_path).shares["update"] > 0.8


def test_both_halves_of_overlapping_games_are_measured(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    pytest.importorskip("ale_py")
    native = {**QUICK_ATARI["ppo"], "vectorization": "native", "overlap": True, "num_steps": 8}
    shares = measured(make_config(**native), tmp_path).shares
    assert shares["environment"] > 0.01
    assert 0.8 < sum(shares.values()) <= 1.0


def test_what_is_measured_explores_as_little_as_in_the_end(make_config: MakeConfig) -> None:
    config = shortened(make_config(algo="dqn", learning_starts=50_000), "folder")
    assert config.algo_kwargs.exploration_initial_eps == config.algo_kwargs.exploration_final_eps
    assert config.algo_kwargs.learning_starts == 500
    assert config.output_dir == Path("folder")
    assert not config.wandb


def names(config: TrainConfig[Any], runs_on: str = "cpu", **system: Any) -> set[str]:
    no_gpu = doctor_system.Device("cpu", "cpu", "")
    changes = {"compiler": "g++", "device": no_gpu, **system}
    found = dataclasses.replace(doctor_system.examine(), **changes)
    return {trial.name for trial in trials(config, runs_on, found, {})}


def test_only_what_is_possible_is_tried(make_config: MakeConfig) -> None:
    more = {"num_envs: 4", "num_envs: 8"}
    spread = {"vectorization: async", *more}
    assert names(make_config()) == {*spread, "vectorization: native", "acceleration: compile"}
    assert names(make_config(), compiler=None) == {*spread, "vectorization: native"}
    assert names(make_config(env_id="Acrobot-v1")) == {*spread, "acceleration: compile"}
    assert names(make_config(algo="recurrent_ppo")) == {*spread, "vectorization: native"}
    wrapped = make_config(wrappers=["rl_training.envs.wrappers:HideVelocities"], num_envs=1)
    assert names(wrapped) == {"num_envs: 2", "num_envs: 4", "acceleration: compile"}
    compiled = make_config(vectorization="async", acceleration="compile")
    assert names(compiled) == {
        *more,
        "vectorization: sync",
        "vectorization: native",
        "acceleration: eager",
    }


def test_a_gpu_is_tried_where_there_is_one(make_config: MakeConfig) -> None:
    gpu = doctor_system.Device("cpu", "cuda", "a GPU")
    on_cpu = names(make_config(), "cpu", device=gpu)
    assert {"device: cuda", "device: cuda, acceleration: cudagraph"} <= on_cpu
    on_gpu = names(make_config(), "cuda", device=gpu)
    assert "acceleration: cudagraph" in on_gpu
    assert "device: cuda" not in on_gpu


def test_what_is_about_the_largest_part_is_tried_first(make_config: MakeConfig) -> None:
    gpu = doctor_system.Device("cpu", "cuda", "a GPU")
    system = dataclasses.replace(doctor_system.examine(), compiler="g++", device=gpu)

    def order(**shares: float) -> list[str]:
        return [trial.name for trial in trials(make_config(), "cpu", system, shares)]

    learning = order(environment=0.1, inference=0.05, update=0.8)
    assert set(learning[:3]) == {
        "device: cuda",
        "device: cuda, acceleration: cudagraph",
        "acceleration: compile",
    }
    stepping = order(environment=0.8, inference=0.05, update=0.1)
    assert stepping[:2] == ["vectorization: async", "vectorization: native"]
    assert sorted(learning) == sorted(stepping)


def test_games_can_overlap(make_config: MakeConfig) -> None:
    pytest.importorskip("ale_py")
    native = {**QUICK_ATARI["ppo"], "vectorization": "native"}
    assert "vectorization: native, overlap: True" in names(make_config(**native))
    overlapped = make_config(**native, overlap=True)
    assert "vectorization: sync, overlap: False" in names(overlapped)
    assert Trial({"vectorization": "sync", "overlap": False}).flags == (
        "--vectorization sync --no-overlap"
    )


def test_more_environments_are_another_problem(make_config: MakeConfig) -> None:
    system = doctor_system.examine()
    for config, words in (
        (make_config(), "256 transitions instead of 128"),
        (make_config(algo="dqn"), "updates per step stay the same"),
    ):
        changed = {t.name: t.changes for t in trials(config, "cpu", system, {})}
        assert words in changed["num_envs: 4"]
        assert changed["vectorization: async"] == ""


def test_gains_below_noise_are_no_gains() -> None:
    base = Result(baseline(), (90.0, 100.0, 108.0))
    advice = Advice("cpu", base, {}, 0.0, 0.0, ())

    def at(*rates: float) -> Result:
        return Result(Trial({"num_envs": 2}), rates)

    assert advice.noise(at(120.0)) == pytest.approx(0.1)
    assert advice.is_faster(at(120.0, 121.0, 119.0))
    assert not advice.is_faster(at(109.0, 109.0, 109.0))
    assert not advice.is_faster(at(90.0, 120.0, 150.0))  # it varies too much itself
    assert not advice.is_faster(at())
    assert advice.is_slower(at(80.0))
    steady = Advice("cpu", Result(baseline(), (100.0, 100.0)), {}, 0.0, 0.0, ())
    assert not steady.is_faster(at(104.0))
    assert steady.is_faster(at(106.0))


def test_winners_are_tried_together() -> None:
    native, worker = Trial({"vectorization": "native"}), Trial({"vectorization": "async"})
    compiled = Trial({"acceleration": "compile"})
    rates = {native.name: 3.0, worker.name: 2.0, compiled.name: 1.5}
    assert combined([native], rates) is None
    assert combined([native, worker], rates) is None
    together = combined([native, worker, compiled], rates)
    assert together is not None
    assert together.overrides == {"acceleration": "compile", "vectorization": "native"}


def test_it_recommends_what_is_faster_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Four environments that sleep: in processes of their own they sleep at the same time."""
    (tmp_path / "slow_env.py").write_text(SLOW_ENV)
    config = tmp_path / "slow.yaml"
    config.write_text(
        "env_id: slow_env:slow/Slow-v0\nnum_envs: 4\ntorch_threads: 1\n"
        "algo_kwargs: {num_steps: 8, update_epochs: 1, num_minibatches: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    start = time.monotonic()
    assert cli.main(["doctor", "--config", "slow.yaml", "--seconds", "20", "--json"]) == 0
    assert time.monotonic() - start < 35
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])["measured"]
    assert found["shares"]["environment"] > 0.5
    workers = next(a for a in found["alternatives"] if a["flags"] == "--vectorization async")
    assert workers["faster"], printed.out
    assert workers["ratio"] > 1.5
    assert "rl-training train slow.yaml --vectorization async" in printed.out
    assert "vectorization: async" in printed.err  # progress
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert after == before


def test_a_child_that_fails_says_why(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.stderr.write('some lines\\nValueError: broken'); sys.exit(1)"
    run = doctor_advice._run
    monkeypatch.setattr(
        doctor_advice, "_run", lambda command, limit: run([command[0], "-c", code], limit)
    )
    with pytest.raises(UserError, match="ValueError: broken"):
        advise(make_config(), doctor_system.examine(), 10.0, lambda _: None)
    code = "import time; time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(UserError, match="raise --seconds"):
        advise(make_config(), doctor_system.examine(), 1.0, lambda _: None)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config", "ppo/cartpol"), "Did you mean 'ppo/cartpole'"),
        (("--seconds", "1"), "--seconds must be at least 5"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str, capsys: Any) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
