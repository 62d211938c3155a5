"""The command line: what it trains, what it prints, and how it refuses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from rl_training import cli
from rl_training._internal.coerce import hidden_fields
from rl_training._internal.flags import parse_flags
from rl_training.checkpointing import load_checkpoint
from rl_training.config import (
    AtariConfig,
    TrainConfig,
    algo_config_type,
    config_from_file,
    preset_names,
)
from rl_training.errors import ConfigError
from rl_training.experiment.registry import ALGORITHMS
from rl_training.tools.play import PlayArgs
from rl_training.tools.presets import packaged_presets
from rl_training.tools.training import TRAIN_GROUPS, EvalArgs, train_config
from rl_training.tools.zoo.manifest import benchmark_names
from rl_training.version import __version__

ROOT = Path(__file__).resolve().parents[1]
Captured = pytest.CaptureFixture[str]

SMALL = """\
format: 1
algo: ppo
env_id: probe/ConstantReward-v0
seed: 5
total_timesteps: 256
num_envs: 2
eval_episodes: 2
tensorboard: false
progress: false
algo_kwargs: {num_steps: 32, gamma: 0.9, update_epochs: 1}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line writes below the working directory and adds it to sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A config file of a run of four iterations."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    words = ["train", "--config", str(folder / "small.yaml"), "--output-dir", str(folder / "runs")]
    assert cli.main(words) == 0
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def call(*words: str | Path) -> int:
    """The exit code of the command, however it is reached."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)


def last_line(text: str) -> dict[str, Any]:
    """The JSON object on the last line."""
    value = json.loads(text.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def train(capsys: Captured, *words: str | Path) -> dict[str, Any]:
    """Train with ``--json`` and return what the last line holds."""
    code = call("train", *words, "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return last_line(captured.out)


def mistake(capsys: Captured, *words: str | Path) -> str:
    """The one line that a mistake is answered with."""
    code = call(*words)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert not captured.out
    assert "Traceback" not in captured.err
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the first, which holds the format."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[1:]]


def environment(**extra: str) -> dict[str, str]:
    """Environment variables of a process that runs this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **extra}


# -- the command itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(capsys: Captured, words: list[str]) -> None:
    assert call(*words) == 0
    text = capsys.readouterr().out
    assert all(f"rl-training {command}" in text for command in ("train", "eval", "resume"))


@pytest.mark.skipif(not hasattr(select, "poll"), reason="this system cannot ask a pipe")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["zoo", "list"]])
def test_nobody_reading_is_no_error(words: list[str], unbuffered: str) -> None:
    """As in ``rl-training zoo list | head -1``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
    process.stderr.close()


def test_another_pipe_that_breaks_is_an_error(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: list[str]) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setitem(cli._COMMANDS, "doctor", fail)
    assert call("doctor") == 1
    assert "a worker is gone" in capsys.readouterr().err


def test_a_closed_output_hides_no_mistake() -> None:
    command = f"{shlex.quote(sys.executable)} -m rl_training.cli nonsense >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'nonsense'.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--deterministic"], True),
        (["--no-deterministic"], False),
        (["--no_deterministic"], False),
        (["--deterministic", "False"], False),
        (["--deterministic", "None"], None),
    ],
)
def test_a_switch_may_be_on_off_or_unset(words: list[str], value: bool | None) -> None:
    for args in ([*words, "--num-episodes", "2"], ["--num-episodes", "2", *words]):
        parsed = parse_flags(EvalArgs, ["--checkpoint", "x", *args], "eval")
        assert (parsed.deterministic, parsed.num_episodes) == (value, 2)
    with pytest.raises(ConfigError, match="True"):
        parse_flags(EvalArgs, ["--checkpoint", "x", "--no-deterministic", "True"], "eval")
    assert parse_flags(PlayArgs, [*words, "Pendulum-v1"], "play").target == "Pendulum-v1"


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version_is_printed(capsys: Captured, word: str) -> None:
    assert call(word) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_help_of_a_command_by_its_name(capsys: Captured) -> None:
    assert call("help", "eval") == 0
    assert capsys.readouterr().out.startswith("usage: rl-training eval RUN [flags]")
    assert "unknown command 'evla'" in mistake(capsys, "help", "evla")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("eval", ["RUN", "--num-episodes", "--deterministic", "--seed", "--json"]),
        ("resume", ["RUN", "--total-timesteps", "--horizon", "--json"]),
    ],
)
def test_eval_and_resume_list_their_flags(capsys: Captured, command: str, flags: list[str]) -> None:
    assert call(command, "--help") == 0
    assert set(flags) <= set(help_blocks(capsys.readouterr().out))


def help_blocks(text: str) -> dict[str, str]:
    """The help of each flag, without its white space."""
    blocks: dict[str, str] = {}
    flag = ""
    for line in text.splitlines():
        start = re.match(r"  (--[\w.-]+|[A-Z]+)(?:,? \S+)*(?:  |$)", line)
        if start:
            flag = start.group(1)
            blocks[flag] = line[start.end() :]
        elif flag:
            blocks[flag] += line
    return {name: "".join(block.split()) for name, block in blocks.items()}


def field_docs(owner: type[Any]) -> dict[str, str]:
    """The docstrings under the fields of a dataclass."""
    docs: dict[str, str] = {}
    fields = {field.name for field in dataclasses.fields(owner)}
    for base in reversed(owner.__bases__):
        if dataclasses.is_dataclass(base):
            docs |= field_docs(base)
    body = ast.parse(inspect.getsource(owner)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.target.id in fields:  # and no ClassVar
            assert isinstance(below, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(below.value, ast.Constant)
            docs[field.target.id] = str(below.value.value)
    return docs


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_setting_is_a_flag_with_its_docstring(capsys: Captured, algo: str) -> None:
    assert call("train", "--algo", algo, "--help") == 0
    text = capsys.readouterr().out
    blocks = help_blocks(text)
    expected = {f"--{name}": doc for name, doc in field_docs(TrainConfig).items()}
    del expected["--algo_kwargs"], expected["--atari"]
    expected |= {f"--atari.{name}": doc for name, doc in field_docs(AtariConfig).items()}
    kind = algo_config_type(algo)
    expected |= {f"--{name}": doc for name, doc in field_docs(kind).items()}
    hidden = {f"--{name}" for name in hidden_fields(kind) | hidden_fields(TrainConfig)}
    expected = {flag: doc for flag, doc in expected.items() if flag not in hidden}
    assert len(expected) > 40
    assert not {flag.replace("_", "-") for flag in hidden} & blocks.keys()
    for flag, doc in expected.items():
        assert "".join(doc.split()) in blocks.get(flag.replace("_", "-"), "no such flag"), flag
    assert f"hyperparameters of {ALGORITHMS[algo].class_name_of(algo)}:" in text


@pytest.mark.parametrize("algo", [name for name, entry in ALGORITHMS.items() if entry.offline])
def test_the_help_of_what_learns_offline_names_updates(capsys: Captured, algo: str) -> None:
    assert call("train", "--algo", algo, "--help") == 0
    blocks = help_blocks(capsys.readouterr().out)
    for name in ("total-timesteps", "eval-interval", "checkpoint-interval", "log-interval-steps"):
        assert "updates" in blocks[f"--{name}"], name
    counted = [flag for flag, text in blocks.items() if "nvironmentsteps" in text]
    assert all("updates" in blocks[flag] for flag in counted)


def test_the_help_of_train_groups_every_setting() -> None:
    grouped = [name for group in TRAIN_GROUPS for name in group.fields]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(TrainConfig))


def test_the_help_of_train_opens_with_examples(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert call("train", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: rl-training train [PRESET | --config FILE] [flags]"
    examples = [line for line in lines[1:8] if line.startswith("  rl-training train ")]
    assert len(examples) == 5
    assert max(map(len, lines)) <= 100
    assert len(lines) < 245


def test_the_help_shows_the_values_of_the_preset(capsys: Captured) -> None:
    assert call("train", "ppo/cartpole", "--help") == 0
    blocks = help_blocks(capsys.readouterr().out)
    assert blocks["--gae-lambda"].endswith("(default:0.8)")
    assert blocks["--total-timesteps"].endswith("(default:100000)")


# -- train -----------------------------------------------------------------------------------------


def test_train_from_a_file(capsys: Captured, small: Path) -> None:
    result = train(capsys, "--config", small)
    run_dir = Path(result["run_dir"])
    assert result["status"] == "finished"
    assert result["stop_reason"] == "total_timesteps reached"
    assert result["global_step"] == result["metrics"]["global_step"] == 256
    assert result["metrics"]["eval/return_mean"] == 1.0
    assert Path(result["checkpoint_path"]) == run_dir / "checkpoints" / "last.pt"
    assert load_checkpoint(run_dir / "checkpoints" / "last.pt")["config"]["seed"] == 5
    assert config_from_file(run_dir / "config.yaml") == config_from_file(small)


def test_train_says_what_it_does_and_what_comes_next(capsys: Captured, small: Path) -> None:
    assert call("train", "--config", small, "--progress") == 0
    captured = capsys.readouterr()
    (run,) = Path("runs").iterdir()
    what = "PPO on probe/ConstantReward-v0, 2 environments, cpu, seed 5, 1 thread: 256 steps"
    assert captured.err.splitlines()[0] == f"{what} -> {run}"
    lines = captured.out.splitlines()
    assert lines[0] == "total_timesteps reached at step 256"
    assert lines[1] == "evaluation: return 1.00 +/- 0.00 over 2 episodes"
    # The program is named as the shell here finds it: by name, or by its path.
    assert any(re.fullmatch(rf"evaluate: \S*rl-training eval {run}", x) for x in lines)
    resume = rf"resume:   \S*rl-training resume {run} --total-timesteps N"
    assert any(re.fullmatch(resume, line) for line in lines)


def test_train_from_a_preset_with_overrides(capsys: Captured) -> None:
    result = train(
        capsys, "ppo/cartpole", "--total-timesteps", "100", "--num-envs", "2", "--seed", "3",
        "--no-tensorboard", "--no-progress", "--eval-episodes", "0",
        "--algo-kwargs.update-epochs", "1",
    )  # fmt: skip
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert used == config_from_file("ppo/cartpole").with_overrides(
        total_timesteps=100,
        num_envs=2,
        seed=3,
        tensorboard=False,
        progress=False,
        eval_episodes=0,
        update_epochs=1,
    )
    assert used.algo_kwargs.gae_lambda == 0.8, "the preset's own"
    assert result["global_step"] == 128, "whole iterations of 2 * 64 steps"


def test_train_without_a_source_takes_the_defaults_and_flags(capsys: Captured) -> None:
    result = train(
        capsys, "--env-id=probe/ConstantReward-v0", "--total-timesteps=16", "--num-envs=2",
        "--algo-kwargs.num-steps=8", "--eval-episodes=0", "--output-dir=elsewhere",
    )  # fmt: skip
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert used == TrainConfig(
        env_id="probe/ConstantReward-v0",
        total_timesteps=16,
        num_envs=2,
        eval_episodes=0,
        output_dir=Path("elsewhere"),
        algo_kwargs={"num_steps": 8},
    )
    assert Path(result["run_dir"]).parent == Path("elsewhere")


def test_flags_take_powers_of_ten(capsys: Captured, small: Path) -> None:
    result = train(
        capsys, "--config", small, "--total-timesteps", "1e3", "--algo-kwargs.learning-rate", "1e-3"
    )
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert used.total_timesteps == 1000
    assert used.algo_kwargs.learning_rate == 1e-3
    assert result["global_step"] == 1024, "whole iterations of 2 * 32 steps"


def test_flags_take_lists_and_none(capsys: Captured, small: Path) -> None:
    result = train(
        capsys, f"--config={small}", "--algo-kwargs.hidden-sizes", "8", "4",
        "--algo-kwargs.target-kl", "None", "--algo-kwargs.no-anneal-lr", "--normalize-obs",
    )  # fmt: skip
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert used.algo_kwargs.hidden_sizes == (8, 4)
    assert used.algo_kwargs.target_kl is None
    assert used.algo_kwargs.anneal_lr is False
    assert used.normalize_obs is True


def test_env_kwargs_and_wrappers_are_yaml(capsys: Captured, small: Path) -> None:
    wrappers = (
        "[{path: 'gymnasium.wrappers:TimeLimit', kwargs: {max_episode_steps: 5}},"
        " gymnasium.wrappers:RecordEpisodeStatistics]"
    )
    result = train(
        capsys, "--config", small, "--env-id", "CartPole-v1", "--wrappers", wrappers,
        "--env-kwargs", "{sutton_barto_reward: true}",
    )  # fmt: skip
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert used.env_kwargs == {"sutton_barto_reward": True}
    assert [w.path.partition(":")[2] for w in used.wrappers] == [
        "TimeLimit",
        "RecordEpisodeStatistics",
    ]
    # No pole falls within five steps, and with this reward nothing but falling counts.
    assert result["metrics"]["eval/length_mean"] == 5.0
    assert result["metrics"]["eval/return_mean"] == 0.0


def test_a_file_may_build_on_a_preset_and_flags_on_the_file(
    capsys: Captured, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: ppo/cartpole\nenv_id: probe/ConstantReward-v0\nseed: 5\nnum_envs: 2\n"
        "eval_episodes: 0\nalgo_kwargs: {num_steps: 16, update_epochs: 1}\n"
    )
    result = train(capsys, "--config", path, "--total-timesteps", "32", "--seed", "6")
    used = config_from_file(Path(result["run_dir"]) / "config.yaml")
    assert (used.seed, used.num_envs, used.total_timesteps) == (6, 2, 32)
    assert (used.algo_kwargs.num_steps, used.algo_kwargs.gamma) == (16, 0.98)


def test_hyperparameters_need_no_prefix(capsys: Captured, small: Path) -> None:
    result = train(
        capsys, "--config", small, "--learning-rate", "1e-3", "--no-anneal-lr", "--gamma=0.5",
        "--algo-kwargs.vf-coef", "0.25",
    )  # fmt: skip
    used = config_from_file(Path(result["run_dir"]) / "config.yaml").algo_kwargs
    assert (used.learning_rate, used.anneal_lr, used.gamma, used.vf_coef) == (
        1e-3,
        False,
        0.5,
        0.25,
    )


def test_what_is_computed_follows_the_flags() -> None:
    config = train_config(["--total-timesteps", "5e4", "--algo", "sac", "--env-id", "Pendulum-v1"])
    assert config == TrainConfig(algo="sac", env_id="Pendulum-v1", total_timesteps=50_000)
    assert config.eval_interval == 5_000


# -- eval ------------------------------------------------------------------------------------------


def test_eval_plays_the_episodes_asked_for(capsys: Captured, finished: Path) -> None:
    assert call("eval", finished, "--num-episodes", "3", "--json") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("return 1.00 +/- 0.00 (min 1.00, max 1.00) over 3 episodes")
    result = last_line(captured.out)
    assert result["returns"] == [1.0, 1.0, 1.0]
    assert result["lengths"] == [1, 1, 1]
    assert result["metrics"]["eval/episodes"] == 3
    assert result["checkpoint"] == str(finished)


def test_a_run_may_come_after_the_flags(capsys: Captured, finished: Path) -> None:
    assert call("eval", "--num-episodes", "2", finished) == 0
    assert "over 2 episodes" in capsys.readouterr().out
    assert mistake(capsys, "eval") == "error: RUN is missing (see rl-training eval --help)"


def test_eval_takes_a_checkpoint_file_and_flags(capsys: Captured, finished: Path) -> None:
    path = finished / "checkpoints" / "best.pt"
    words = ["--no-deterministic", "--seed", "3", "--device", "cpu", "--num-episodes", "2"]
    assert call("eval", "--checkpoint", path, *words) == 0
    assert "over 2 episodes" in capsys.readouterr().out


# -- resume ----------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_says_so(capsys: Captured, run_copy: Path) -> None:
    before = (run_copy / "metrics.jsonl").read_bytes()
    assert call("resume", run_copy, "--json") == 0
    captured = capsys.readouterr()
    assert f"{run_copy} has finished its 256 steps; --total-timesteps N extends" in captured.err
    assert last_line(captured.out) == {
        "run_dir": str(run_copy),
        "global_step": 256,
        "status": "finished",
    }
    assert (run_copy / "metrics.jsonl").read_bytes() == before


def test_resume_extends_a_run_in_its_folder(capsys: Captured, run_copy: Path) -> None:
    words = ["--total-timesteps", "5e2", "--json"]
    assert call("resume", "--checkpoint", run_copy, *words) == 0
    captured = capsys.readouterr()
    assert "schedules now run over 512 steps" in captured.err
    result = last_line(captured.out)
    assert (result["run_dir"], result["global_step"]) == (str(run_copy), 512)
    assert result["status"] == "finished"
    steps = [row["step"] for row in rows(run_copy) if "losses/loss" in row]
    assert steps == list(range(64, 513, 64))


def test_resume_with_the_old_horizon_keeps_the_schedules(capsys: Captured, run_copy: Path) -> None:
    words = ["--total-timesteps", "384", "--horizon", "keep", "--json"]
    assert call("resume", "--checkpoint", run_copy, *words) == 0
    captured = capsys.readouterr()
    assert "schedules now run" not in captured.err
    assert last_line(captured.out)["metrics"]["losses/learning_rate"] == 0.0


# -- mistakes --------------------------------------------------------------------------------------


def test_an_unknown_command_is_a_mistake(capsys: Captured) -> None:
    assert mistake(capsys, "trian") == "error: unknown command 'trian'. Did you mean 'train'?"


def test_an_unknown_preset_is_a_mistake(capsys: Captured) -> None:
    line = mistake(capsys, "train", "ppo/cartpol")
    assert line == "error: no preset or file 'ppo/cartpol'. Did you mean 'ppo/cartpole'?"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ppo", "'ppo' is an algorithm: rl-training train --algo ppo --env-id ENV"),
        ("PPO", "'PPO' is an algorithm: rl-training train --algo ppo --env-id ENV"),
        (
            "CartPole-v1",
            "'CartPole-v1' is an environment: rl-training train --env-id CartPole-v1",
        ),
        ("half", "no preset or file 'half'. Presets with this word: "),
        ("zzzz", "no preset or file 'zzzz': rl-training presets lists the presets"),
    ],
)
def test_a_word_that_is_no_preset_is_explained(capsys: Captured, word: str, message: str) -> None:
    line = mistake(capsys, "train", word)
    assert line.startswith(f"error: {message}")
    assert len(line) < 200


@pytest.mark.parametrize("words", [[], ["--seed", "3"]])
def test_nothing_to_train_is_a_mistake(capsys: Captured, words: list[str]) -> None:
    line = mistake(capsys, "train", *words)
    assert line.startswith("error: nothing to train: name a preset")
    assert "--algo ppo --env-id CartPole-v1" in line
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["--algo", "ppo"], ["--env_id=Acrobot-v1"]])
def test_an_algorithm_or_an_environment_is_enough(words: list[str]) -> None:
    assert train_config(words).algo == "ppo"


@pytest.mark.parametrize("text", ["", "# nothing\n", "format: 1\n"])
def test_a_file_without_settings_is_a_mistake(capsys: Captured, small: Path, text: str) -> None:
    small.write_text(text)
    assert f"{small} holds no settings" in mistake(capsys, "train", "--config", small)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--algo", "dqn", "ppo/cartpole"],
            "ppo/cartpole must come first: rl-training train ppo/cartpole [flags]",
        ),
        (["ppo/cartpole", "--config", "small.yaml"], "name a preset or --config FILE, not both"),
        (["ppo/cartpole", "dqn/cartpole"], "name one preset or file, not both ppo/cartpole and"),
        (["--config=small.yaml", "--config", "small.yaml"], "--config is given twice"),
        (["ppo/cartpole", "--seed", "1", "2"], "unexpected argument '2' (see rl-training train"),
    ],
)
def test_one_source_and_it_comes_first(
    capsys: Captured, small: Path, words: list[str], message: str
) -> None:
    assert small.name == "small.yaml"
    assert mistake(capsys, "train", *words).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["impala/cartpole", "--memory", "gru"],
            "--memory is a setting of ppo, a2c, recurrent_ppo, ppg, dqn, drqn, ",  # not of appo
        ),
        (["ppo/cartpole", "--buffer-size", "9"], "--buffer-size is a setting of dqn, qrdqn, c51, "),
        (["--algo=dqn", "--gae-lambda=1"], "--gae-lambda is a setting of ppo, a2c, recurrent_ppo"),
        (["--algo", "sac", "--no-norm-adv"], "--no-norm-adv is a setting of ppo"),
    ],
)
def test_a_flag_of_another_algorithm_is_explained(
    capsys: Captured, words: list[str], message: str
) -> None:
    line = mistake(capsys, "train", *words)
    assert line.startswith(f"error: {message}")
    assert ", not of " in line


def test_another_librarys_name_is_still_suggested(capsys: Captured) -> None:
    line = mistake(capsys, "train", "ppo/cartpole", "--batch-size", "9")
    assert line.endswith(", not of ppo. Did you mean --num-minibatches?")


def test_a_setting_with_a_similar_name_is_not_suggested(capsys: Captured) -> None:
    line = mistake(capsys, "train", "--algo", "td3", "--num-steps", "32")
    assert line.endswith(", not of td3")


def test_an_algorithm_that_cannot_train_the_default_environment_needs_one(
    capsys: Captured,
) -> None:
    line = mistake(capsys, "train", "--algo", "sac")
    assert line.startswith("error: name an environment with --env-id: the default, CartPole-v1,")


@pytest.mark.parametrize("flag", ["--learning-rate", "--num-envs"])
def test_a_resumed_run_keeps_its_settings(capsys: Captured, flag: str) -> None:
    line = mistake(capsys, "resume", "runs/RUN", flag, "1")
    assert line.startswith(f"error: resume cannot change {flag}: a run keeps its settings.")
    assert line.endswith(f"--init-from RUN {flag} ...")


def test_a_flag_that_is_no_setting_is_unknown_to_resume(capsys: Captured) -> None:
    line = mistake(capsys, "resume", "runs/RUN", "--no-such-flag", "1")
    assert line == "error: unknown flag --no-such-flag. See rl-training resume --help."


def test_a_missing_config_file_is_a_mistake(capsys: Captured) -> None:
    line = mistake(capsys, "train", "--config", "gone.yaml")
    assert line == "error: config file gone.yaml does not exist"


def test_a_flag_without_its_value_is_a_mistake(capsys: Captured) -> None:
    assert mistake(capsys, "train", "--config") == "error: --config needs a value"


def test_a_typo_in_a_config_key_is_a_mistake(capsys: Captured, small: Path) -> None:
    small.write_text(SMALL + "sede: 3\n")
    line = mistake(capsys, "train", "--config", small)
    assert line == f"error: {small}: unknown key 'sede'. Did you mean 'seed'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2", "duplicate key 'seed' (line 2)"),
        ("num_envs: 0", "'num_envs' must be at least 1; got 0"),
        ("format: 99", "has format 99"),
        ("algo: 3", "algo"),
        ("seed: [1", "not valid YAML"),
        ("env_id: 2001-13-45", "not valid YAML"),
        ("preset: ppo/cartpole\nalgo_kwargs: 3", "'algo_kwargs' must be a mapping"),
        ("wrappers: [{kwargs: {}}]", "path"),
    ],
)
def test_a_config_that_cannot_be_used_is_a_mistake(
    capsys: Captured, small: Path, text: str, message: str
) -> None:
    small.write_text(text)
    line = mistake(capsys, "train", "--config", small)
    assert str(small) in line
    assert message in line


def test_an_unknown_environment_is_a_mistake(capsys: Captured, small: Path) -> None:
    line = mistake(capsys, "train", "--config", small, "--env-id", "CartPol-v1")
    assert "no environment 'CartPol-v1'" in line
    assert line.endswith("Did you mean 'CartPole-v1'?")
    line = mistake(capsys, "train", "--config", small, "--env-id", "no_such_module:MyEnv-v0")
    assert "cannot import 'no_such_module'" in line
    assert not Path("runs").exists(), "a refused run leaves nothing"


def test_an_argument_the_environment_does_not_take_is_a_mistake(
    capsys: Captured, small: Path
) -> None:
    line = mistake(capsys, "train", "--config", small, "--env-kwargs", "{gravity: 5}")
    assert "cannot make probe/ConstantReward-v0 with env_kwargs" in line
    assert "gravity" in line


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ("[no_such_module:Wrapper]", "'wrappers': cannot import 'no_such_module'"),
        ("[gymnasium.wrappers:NoSuch]", "'wrappers': module 'gymnasium.wrappers' has no 'NoSuch'"),
        ("[gymnasium.wrappers:TimeLimit]", "max_episode_steps"),
        ("[{path: 'gymnasium.wrappers:ClipReward', kwargs: {no_such: 1}}]", "no_such"),
    ],
)
def test_a_wrapper_that_cannot_be_put_on_is_a_mistake(
    capsys: Captured, small: Path, wrappers: str, message: str
) -> None:
    line = mistake(capsys, "train", "--config", small, "--wrappers", wrappers)
    assert message in line
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_wrong_checkpoint_path_is_a_mistake(
    capsys: Captured, tmp_path: Path, command: str
) -> None:
    line = mistake(capsys, command, "--checkpoint", "nowhere")
    assert line == "error: no checkpoint or run folder at nowhere"
    line = mistake(capsys, command, "--checkpoint", tmp_path)
    assert line.endswith(f"{tmp_path} contains no checkpoint (checkpoints/last.pt)")


def test_a_wrong_init_from_is_a_mistake(capsys: Captured, small: Path) -> None:
    line = mistake(capsys, "train", "--config", small, "--init-from", "nowhere.pt")
    assert line == "error: no checkpoint or run folder at nowhere.pt"
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["eval", "resume"])
@pytest.mark.parametrize("how", ["cut short", "one bit", "not a checkpoint"])
def test_a_damaged_checkpoint_is_a_mistake(
    capsys: Captured, run_copy: Path, command: str, how: str
) -> None:
    path = run_copy / "checkpoints" / "last.pt"
    content = bytearray(path.read_bytes())
    if how == "cut short":
        content = content[: len(content) // 2]
    elif how == "one bit":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"hello")
    path.write_bytes(content)
    line = mistake(capsys, command, "--checkpoint", run_copy)
    assert str(path) in line
    assert "damaged" in line
    assert "the one before it: " in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-flag", "3"], "unknown flag --no-such-flag. See rl-training train --help."),
        (["--lr", "3"], "unknown flag --lr. Did you mean --learning-rate?"),
        (["--env", "Pendulum-v1"], "unknown flag --env. Did you mean --env-id?"),
        (["--n-envs=3"], "unknown flag --n-envs. Did you mean --num-envs?"),
        (["--clip-range", "3"], "unknown flag --clip-range. Did you mean --clip-coef?"),
        (["--num-envs", "0"], "'num_envs' must be at least 1; got 0"),
        (["--algo-kwargs.gamma", "1.5"], "must be between 0 and 1"),
        (["--total-timesteps", "1.5"], "error: --total-timesteps: '1.5' is not a whole number"),
        (["--device", "tpu"], "error: --device: 'tpu' is none of auto, cpu, cuda, mps (see "),
        (["--activation", "x"], "error: --activation: 'x' is none of tanh, relu, elu, gelu, silu"),
        (["--hidden-sizes", "64,32"], "write --hidden-sizes 64 32 instead of '64,32'"),
        (["--hidden-sizes=[64, 32]"], "write --hidden-sizes 64 32 instead of '[64, 32]'"),
        (["--hidden-sizes", "64", "x"], "takes whole numbers with spaces between them; got '64 x'"),
        (["--target-kl", "x"], "error: --target-kl: 'x' is not a number (see "),
        (["--learning-rate", "x"], "error: --learning-rate: 'x' is not a number (see "),
        (["--torch-threads", "x"], "error: --torch-threads: 'x' is not a whole number (see "),
        (["--seed"], "error: --seed needs a value"),
        (["--progress", "false"], "--progress takes no value: write --progress or --no-progress"),
        (["--progress=True"], "--progress takes no value: write --progress or --no-progress"),
        (["--progress=maybe"], "--progress takes no value: write --progress or --no-progress"),
        (["--progress", "yes"], "--progress takes no value: write --progress or --no-progress"),
        (["--env-kwargs", "a=1"], "got 'a=1' (str): write '{a: 1}' (see "),
        (["--env-kwargs", "[1]"], "--env-kwargs: the value must be a mapping"),
        (["--env-kwargs", "{a: 1"], "not valid YAML: expected ',' or '}', but got"),
        (["--wrappers", "TimeLimit"], "must be a list"),
    ],
)
def test_a_wrong_flag_is_a_mistake(
    capsys: Captured, small: Path, words: list[str], message: str
) -> None:
    assert message in mistake(capsys, "train", "--config", small, *words)
    assert not Path("runs").exists()


def test_an_error_is_json_where_it_is_asked_for(capsys: Captured, small: Path) -> None:
    for words, message, expected in (
        (["trian"], "Did you mean 'train'?", 2),
        (["eval", "nowhere"], "no checkpoint or run folder at nowhere", 2),
        (["train", "--config", small, "--seed", "x"], "is not a whole number", 2),
        (
            ["train", "--config", small, "--env-id", "probe/Broken-v0"],
            "the pole fell on my foot",
            1,
        ),
    ):
        code = call(*words, "--json")
        captured = capsys.readouterr()
        assert code == expected
        found = last_line(captured.out)
        assert message in found["error"]
        assert found["exit_code"] == expected
        assert message in captured.err


def test_an_output_dir_that_is_a_file_is_a_mistake(capsys: Captured, small: Path) -> None:
    line = mistake(capsys, "train", "--config", small, "--output-dir", small)
    assert "cannot create the run folder" in line


# -- failures --------------------------------------------------------------------------------------


def test_an_environment_that_raises_is_a_failure_with_its_traceback(
    capsys: Captured, small: Path
) -> None:
    assert call("train", "--config", small, "--env-id", "probe/Broken-v0") == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "the pole fell on my foot" in text


def test_a_run_that_diverges_is_a_failure_told_in_words(capsys: Captured, small: Path) -> None:
    words = ["--env-id", "probe/Broken-v0", "--env-kwargs", "{how: nan}"]
    assert call("train", "--config", small, *words) == 1
    text = capsys.readouterr().err
    assert "failed: " in text
    assert "Traceback" not in text


# -- real processes --------------------------------------------------------------------------------


def test_the_module_trains_as_a_process(tmp_path: Path) -> None:
    path = tmp_path / "cartpole.yaml"
    path.write_text(SMALL.replace("probe/ConstantReward-v0", "CartPole-v1"))
    done = subprocess.run(
        [sys.executable, "-m", "rl_training.cli", "train", "--config", str(path), "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert result["global_step"] == 256
    assert (tmp_path / result["run_dir"] / "checkpoints" / "last.pt").is_file()


def test_the_script_trains_on_an_environment_beside_the_caller(tmp_path: Path) -> None:
    (tmp_path / "mymodule.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('MyEnv-v0', CartPoleEnv, max_episode_steps=7)\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("probe/ConstantReward-v0", "mymodule:MyEnv-v0"))
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "train.py"), "--config", "mine.yaml",
            "--vectorization", "async", "--json",
        ],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)["metrics"]["eval/length_mean"] == 7.0


SLOW_ENV = """\
import os, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def step(self, action):
        time.sleep(float(os.environ.get("SLOW_STEP_SECONDS", "0")))
        return super().step(action)

gym.register("Slow-v0", Slow, max_episode_steps=20)
"""


def test_an_interrupted_run_is_saved_and_can_be_finished(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "slow_env_of_test_cli.py").write_text(SLOW_ENV)
    path = tmp_path / "slow.yaml"
    text = SMALL.replace("probe/ConstantReward-v0", "slow_env_of_test_cli:Slow-v0")
    path.write_text(text.replace("total_timesteps: 256", "total_timesteps: 6400"))
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", "train", "--config", "slow.yaml", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(SLOW_STEP_SECONDS="0.005"),
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if any(len(rows(run)) >= 2 for run in tmp_path.glob("runs/*")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "SIGINT: saving a checkpoint, then stopping" in err
    assert "Traceback" not in err
    result = last_line(out)
    assert (result["status"], result["stop_reason"]) == ("interrupted", "SIGINT")
    run_dir, done = tmp_path / result["run_dir"], result["global_step"]
    assert 128 <= done < 6400
    assert f"rl-training resume {result['run_dir']}\n" in out
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    saved = load_checkpoint(run_dir / "checkpoints" / "last.pt")
    assert saved["training"]["counters"]["global_step"] == done // 64 * 64  # whole rollouts

    assert call("resume", "--checkpoint", run_dir, "--json") == 0
    finished = last_line(capsys.readouterr().out)
    assert (finished["status"], finished["global_step"]) == ("finished", 6400)
    steps = [row["step"] for row in rows(run_dir) if "losses/loss" in row]
    assert steps == list(range(64, 6401, 64)), "no iteration is missing or repeated"


# -- presets ---------------------------------------------------------------------------------------


def test_presets_are_listed_with_what_they_reached(capsys: Captured) -> None:
    assert call("presets") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["preset", "environment", "steps", "return"]
    names = [row.split()[0] for row in rows[1:]]
    assert names == [*preset_names(), "zoo/atari/recurrent_ppo_breakout"]
    assert call("presets", "PENDULUM", "--json") == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])["presets"]
    assert listed
    assert all("pendulum" in one["name"] for one in listed)
    assert "no preset contains 'zzz'" in mistake(capsys, "presets", "zzz")


def test_train_and_zoo_accept_the_listed_names(capsys: Captured) -> None:
    names = [preset.name for preset in packaged_presets()]
    assert all(train_config([name]).env_id for name in names)
    in_zoo = [preset for name in benchmark_names() for preset in listed_in_zoo(capsys, name)]
    assert set(in_zoo) <= set(names)
    for name in ("ppo/cartpole", "zoo/atari/recurrent_ppo_breakout"):
        assert call("zoo", "run", name, "--seeds", "0") == 2  # found, then refused for its seeds
        assert "--seeds must be at least 1" in capsys.readouterr().err


def listed_in_zoo(capsys: Captured, benchmark: str) -> list[str]:
    assert call("zoo", "list", benchmark, "--json") == 0
    (found,) = last_line(capsys.readouterr().out)["benchmarks"]
    assert found["benchmark"] == benchmark
    return [preset["preset"] for preset in found["presets"]]


def test_the_zoo_runs_one_preset_by_its_name(capsys: Captured) -> None:
    words = ["ppo/cartpole", "--seeds", "1", "--scale", "0.005", "--json"]
    assert call("zoo", "run", *words) == 0
    found = last_line(capsys.readouterr().out)
    assert (found["runs"], found["finished"], found["failed"]) == (1, 1, [])
    (measured,) = (preset for preset in found["presets"] if preset["mean"] is not None)
    assert measured["preset"] == "ppo/cartpole"
    assert list(measured["returns"]) == ["1"]
    assert call("zoo", "report", "ppo/cartpole", "--scale", "0.005", "--json") == 0
    assert last_line(capsys.readouterr().out)["presets"] == found["presets"]
    line = mistake(capsys, "zoo", "run", "ppo/pong_atari")
    assert "no benchmark contains the preset 'ppo/pong_atari'" in line
    line = mistake(capsys, "zoo", "run", "classic", "--only", "ppo/cartpol")
    assert line.endswith("lists no ppo/cartpol. Did you mean 'ppo/cartpole'?")
