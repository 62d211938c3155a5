"""Nothing that a file names is imported without the user's consent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import MakeConfig
from rl_training import PPO
from rl_training.checkpointing import find_checkpoint, load_checkpoint, save_checkpoint
from rl_training.cli import main
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy, resume_training
from rl_training.trust import foreign_names, is_own, own_checkpoints_file, require_trust

MODULE = """\
from pathlib import Path
Path(__file__).with_name("imported").touch()
import gymnasium as gym
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from rl_training.models.encoders import FlattenEncoder

class Plain(gym.Wrapper):
    pass

class Encoder(FlattenEncoder):
    pass

def factory(env):
    return env

gym.register("Named-v0", CartPoleEnv, max_episode_steps=50)
"""
EXPLOIT = [
    {"path": "unittest.mock:MagicMock", "kwargs": {"metadata": {}}},
    {"path": "timeit:timeit", "kwargs": {"setup": "open('executed', 'w')"}},
]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's beside the run; whether it was imported shows in a file."""
    name = f"user_module_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that names nothing."""
    from rl_training.config import TrainConfig

    folder = tmp_path_factory.mktemp("plain")
    config: TrainConfig[Any] = TrainConfig(
        total_timesteps=128, num_envs=2, eval_episodes=1, progress=False, tensorboard=False,
        output_dir=folder, algo_kwargs={"num_steps": 32},
    )  # fmt: skip
    return ExperimentManager.setup(config).train().run_dir


def altered(run: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run whose checkpoint says something else, with a correct digest.

    Written by another user: the digest is not among this user's own.
    """
    copy = folder / "downloaded"
    shutil.copytree(run, copy)
    state = load_checkpoint(copy / "checkpoints" / "last.pt")
    change(state)
    before = os.environ["XDG_STATE_HOME"]
    os.environ["XDG_STATE_HOME"] = str(folder / "of another user")
    try:
        save_checkpoint(copy / "checkpoints" / "last.pt", state)
    finally:
        os.environ["XDG_STATE_HOME"] = before
    return copy


def named(setting: str, module: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        if setting == "env_id":
            state["config"]["env_id"] = f"{module}:CartPole-v1"
        elif setting == "wrappers":
            state["config"]["wrappers"] = [{"path": f"{module}:Plain", "kwargs": {}}]
        else:
            state["config"]["algo_kwargs"]["encoder"] = f"{module}:Encoder"

    return change


USES: dict[str, Callable[..., Any]] = {
    "evaluate": lambda path, **kw: evaluate_checkpoint(path, 1, **kw),
    "load_policy": lambda path, **kw: load_policy(path, **kw),
    "load": lambda path, **kw: PPO.load(path, **kw).act([0.0] * 4),
    "resume": lambda path, **kw: resume_training(path, total_timesteps=192, **kw),
}


@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("setting", ["env_id", "wrappers", "encoder"])
def test_a_foreign_checkpoint_imports_nothing_it_names(
    setting: str, use: str, module: str, plain_run: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = altered(plain_run, tmp_path, named(setting, module))
    with pytest.raises(CheckpointError, match=f"{module}.*{setting}.*trust"):
        USES[use](run)
    with pytest.raises(CheckpointError, match=module):
        USES[use](run, trust=["some_other_package", module[:-1]])
    assert module not in sys.modules
    assert not (tmp_path / "imported").exists()
    monkeypatch.syspath_prepend(str(tmp_path))
    USES[use](run, trust=[module])
    # A policy needs its encoder, and no environment.
    assert (module in sys.modules) == (setting == "encoder" or use in ("evaluate", "resume"))


@pytest.mark.parametrize("command", ["eval", "resume", "record", "play"])
def test_the_command_line_refuses_the_exploit(
    command: str, plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run = altered(plain_run, tmp_path, lambda state: state["config"].update(wrappers=EXPLOIT))
    more = ["--total-timesteps", "256"] if command == "resume" else []
    assert main([command, "--checkpoint", str(run), *more]) == 2
    message = capsys.readouterr().err
    assert "unittest.mock:MagicMock" in message
    assert "timeit:timeit" in message
    assert "--trust-modules timeit unittest" in message
    # Allowed, it still does not run: neither is a wrapper.
    assert main([command, "--checkpoint", str(run), *more, "--trust-modules"]) == 2
    assert "subclass of gymnasium" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_trust_modules_takes_names_or_none(
    module: str, plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(altered(plain_run, tmp_path, named("env_id", module)))
    words = ["eval", "--num-episodes", "1", "--checkpoint", run, "--trust-modules"]
    assert main([*words, "other"]) == 2
    assert main([*words, module, "other"]) == 0
    assert main(words) == 0


def test_what_the_user_names_is_allowed_and_own_runs_need_no_flag(
    module: str, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        env_id=f"{module}:Named-v0",
        wrappers=[f"{module}:Plain"],
        encoder=f"{module}:Encoder",
        output_dir=tmp_path / "runs",
    )
    (tmp_path / "mine.yaml").write_text(config.to_yaml())
    assert main(["train", "--config", "mine.yaml"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["eval", "--checkpoint", str(run)]) == 0
    assert main(["resume", "--checkpoint", str(run), "--total-timesteps", "640"]) == 0
    assert is_own(_digest(run))
    # Moved on this machine it is the same run; altered, it is not.
    moved = run.rename(tmp_path / "elsewhere")
    assert main(["eval", "--checkpoint", str(moved)]) == 0
    changed = altered(moved, tmp_path, lambda state: state["config"].update(seed=99))
    capsys.readouterr()
    assert main(["eval", "--checkpoint", str(changed)]) == 2
    assert module in capsys.readouterr().err
    saved = PPO.load(moved).save(tmp_path / "policy.pt")
    assert main(["eval", "--checkpoint", str(saved)]) == 0


def _digest(run: Path) -> str:
    from rl_training.checkpointing import read_checkpoint

    return read_checkpoint(find_checkpoint(run)).digest


def test_runs_that_name_nothing_are_not_listed(plain_run: Path) -> None:
    assert not is_own(_digest(plain_run))
    evaluate_checkpoint(plain_run, 1)


def test_weights_of_a_foreign_checkpoint_import_nothing(
    module: str, plain_run: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    run = altered(plain_run, tmp_path, named("wrappers", module))
    ExperimentManager.setup(make_config(init_from=run, env_id="CartPole-v1")).close()
    assert not (tmp_path / "imported").exists()


def test_a_list_that_cannot_be_written_is_a_warning(
    module: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match="--trust-modules"):
        run = ExperimentManager.setup(make_config(wrappers=[f"{module}:Plain"])).train().run_dir
    with pytest.raises(CheckpointError, match=module):
        evaluate_checkpoint(run, 1)
    evaluate_checkpoint(run, 1, trust=True)


def test_the_list_is_private(module: str, make_config: MakeConfig, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    ExperimentManager.setup(make_config(wrappers=[f"{module}:Plain"])).train()
    path = own_checkpoints_file()
    assert path.stat().st_mode & 0o077 == 0
    assert all(len(line) == 64 for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"env_id": "CartPole-v1"}, []),
        ({"env_id": "ALE/Pong-v5"}, []),
        ({"env_id": "gymnasium.envs.mujoco:Hopper-v5"}, []),
        ({"env_id": "gymnasium_evil:Hopper-v5"}, ["gymnasium_evil"]),
        ({"env_id": "a:b:X-v0"}, ["a"]),
        ({"wrappers": ["rl_training.envs.wrappers:HideVelocities"]}, []),
        ({"wrappers": ["gymnasium.wrappers:TimeLimit"]}, []),
        ({"wrappers": ["gymnasium.wrappers:RecordVideo"]}, ["gymnasium.wrappers"]),
        ({"wrappers": [{"path": "os:system"}, 7]}, ["os"]),
        ({"algo_kwargs": {"encoder": "torch.nn:Identity"}}, ["torch.nn"]),
        ({"algo_kwargs": None, "wrappers": 3, "env_id": []}, []),
        ("nonsense", []),
    ],
)
def test_what_a_config_names(settings: Any, expected: list[str]) -> None:
    assert [one.module for one in foreign_names(settings)] == expected


def test_trust_must_be_a_list_of_names() -> None:
    with pytest.raises(ConfigError, match="trust"):
        require_trust({"env_id": "m:X-v0"}, "m", "file")


@pytest.mark.parametrize("path", ["timeit:timeit", "collections:OrderedDict", "MODULE:factory"])
def test_wrappers_and_encoders_must_be_what_they_are_for(
    path: str, module: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = path.replace("MODULE", module)
    with pytest.raises(ConfigError, match=r"subclass of gymnasium.*Wrapper"):
        ExperimentManager.setup(make_config(wrappers=[path]))
    with pytest.raises(ConfigError, match=r"subclass of torch.*Module"):
        ExperimentManager.setup(make_config(encoder=path))


AS_SCRIPT = "import sys; from rl_training.cli import main; sys.exit(main())"


@pytest.mark.parametrize("start", [["-m", "rl_training.cli"], ["-c", AS_SCRIPT]])
def test_a_file_in_the_current_folder_takes_no_modules_place(
    start: list[str], tmp_path: Path
) -> None:
    """Neither of what is installed nor of what is missing; it is there where it is named."""
    for name in ("tyro", "yaml", "rich", "wandb", "ale_py"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w'); raise SystemExit(77)\n")
    paths = [path for path in sys.path if path and Path(path) != Path.cwd()]
    safe = ["-P"] if start[0] == "-c" else []  # as a console script: its own folder comes first
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, *safe, *start, "zoo", "list"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ppo/cartpole" in done.stdout
    assert not (tmp_path / "imported").exists()


def test_modules_of_presets_beside_a_foreign_manifest_need_consent(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "their_benchmark"
    folder.mkdir()
    runs = [{"preset": "mine", "steps": 64, "seeds": [1], "expected": None, "source": "none"}]
    manifest = {"format": 1, "title": "theirs", "runs": runs}
    (folder / "benchmark.yaml").write_text(yaml.safe_dump(manifest))
    preset = {"env_id": f"{module}:Named-v0", "num_envs": 2, "algo_kwargs": {"num_steps": 32},
              "eval_episodes": 1}  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump(preset))
    assert main(["zoo", "run", str(folder)]) == 2
    assert module in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert main(["zoo", "run", str(folder), "--trust-modules", module]) == 0
    assert (tmp_path / "imported").exists()
