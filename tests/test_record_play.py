"""Videos of episodes, decoded again; environments on a screen that nobody sees."""

from __future__ import annotations

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

import numpy as np
import pytest

from atari_runs import QUICK_ATARI
from conftest import MakeConfig
from rl_training import cli
from rl_training.config import TrainConfig
from rl_training.experiment.manager import train_as
from rl_training.runtime import video
from rl_training.runtime.workflows import evaluate_checkpoint
from rl_training.tools import episodes
from rl_training.types import Array

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
Image = pytest.importorskip("PIL.Image")
RETURN = re.compile(r"episode (\d+): return (-?[\d.]+) in (\d+) steps?\b")


def trained(config: TrainConfig[Any]) -> Path:
    quick = config.with_overrides(total_timesteps=128, eval_episodes=0)
    return train_as(quick.algo, quick).run_dir


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def decoded(path: Path) -> Array:
    """All frames of a video or GIF, as (frames, height, width, 3)."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            frames = []
            for i in range(image.n_frames):
                image.seek(i)
                frames.append(np.asarray(image.convert("RGB")))
            return np.stack(frames)
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in reader])


def told(text: str) -> list[tuple[float, int]]:
    return [(float(ret), int(steps)) for _, ret, steps in RETURN.findall(text)]


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_recorded_episodes_are_those_of_evaluation(
    make_config: MakeConfig, tmp_path: Path, capsys: Any, suffix: str
) -> None:
    checkpoint = trained(make_config())
    output = tmp_path / f"video{suffix}"
    flags = ("--num-episodes", "2", "--seed", "5", "--output", output)
    assert run("record", "--checkpoint", checkpoint, *flags) == 0
    result = evaluate_checkpoint(checkpoint, 2, seed=5)
    assert told(capsys.readouterr().out) == list(zip(result.returns, result.lengths, strict=True))

    frames = decoded(output)
    assert frames.shape == (sum(result.lengths) + 2, 440, 600, 3)  # a frame for each reset too
    strips, pictures = frames[:, :40], frames[:, 40:]
    assert (strips > 200).any(axis=(1, 2, 3)).all()  # white text on black
    assert (strips.mean(axis=(1, 2, 3)) < 60).all()
    assert (strips[1] != strips[9]).any()
    assert (np.abs(pictures[1].astype(int) - pictures[8]) > 60).any()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("env_id", "moves"),
    [("pettingzoo:mpe2/simple_spread_v3", True), ("pettingzoo:classic/tictactoe_v3", False)],
)
def test_several_agents_are_recorded(
    env_id: str, moves: bool, make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("pettingzoo")
    checkpoint = trained(make_config(algo="ippo", env_id=env_id, num_steps=16))
    output = tmp_path / "game.mp4"
    flags = ("--num-episodes", "2", "--seed", "5", "--output", output)
    assert run("record", checkpoint, *flags) == 0
    result = evaluate_checkpoint(checkpoint, 2, seed=5)
    played = list(zip(result.returns, result.lengths, strict=True))
    assert told(capsys.readouterr().out) == [(round(r, 2), steps) for r, steps in played]
    frames = decoded(output)
    assert len(frames) == sum(result.lengths) + 2
    first, last = frames[0, 40:].astype(int), frames[result.lengths[0], 40:]
    assert (np.abs(first - last) > 60).any(), "agents moved, or there are pieces on the board"
    assert moves == (result.lengths == (25, 25))


def test_sampled_actions_are_those_of_evaluation(make_config: MakeConfig, capsys: Any) -> None:
    checkpoint = trained(make_config(algo="recurrent_ppo"))
    flags = ("--no-deterministic", "--seed", "3", "--fps", "10")
    assert run("record", "--checkpoint", checkpoint, *flags) == 0
    output = capsys.readouterr().out
    result = evaluate_checkpoint(checkpoint, 1, seed=3, deterministic=False)
    assert told(output) == [(result.returns[0], result.lengths[0])]
    assert evaluate_checkpoint(checkpoint, 1, seed=3).returns != result.returns
    path = checkpoint / "videos" / "step_000000000128-seed3.mp4"
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(path))
    assert frames == result.lengths[0] + 1
    assert seconds == pytest.approx(frames / 10, abs=0.2)


def test_unless_told_they_act_as_the_run_evaluated_itself(
    make_config: MakeConfig, capsys: Any
) -> None:
    checkpoint = trained(make_config(eval_deterministic=False))
    results = {}
    for words in ((), ("--deterministic",), ("--no-deterministic",), ("--deterministic", "None")):
        assert run("eval", "--checkpoint", checkpoint, "--num-episodes", "1", "--json", *words) == 0
        results[words] = json.loads(capsys.readouterr().out.splitlines()[-1])["returns"]
    assert results[()] == results["--no-deterministic",] == results["--deterministic", "None"]
    assert results["--deterministic",] != results[()]
    assert run("record", "--checkpoint", checkpoint) == 0
    assert [score for score, _ in told(capsys.readouterr().out)] == results[()]


def test_memory_is_carried_and_forgotten_between_episodes(make_config: MakeConfig) -> None:
    checkpoint = trained(make_config(algo="recurrent_ppo", env_id="Pendulum-v1"))
    policy, step = episodes.load_player(checkpoint, None)
    assert step == 128
    player = episodes.PolicyPlayer(policy, deterministic=True, seed=1)
    obs = np.array([0.5, -0.5, 1.0], np.float32)
    player.begin()
    first, second = player.act(obs), player.act(obs)
    assert first != second
    player.begin()
    assert player.act(obs) == first


def test_max_steps_leaves_an_episode(make_config: MakeConfig, tmp_path: Path, capsys: Any) -> None:
    checkpoint = trained(make_config(env_id="Acrobot-v1"))
    output = tmp_path / "deep" / "cut.gif"
    flags = ("--num-episodes", "2", "--max-steps", "5", "--output", output, "--json")
    assert run("record", checkpoint, *flags) == 0
    printed = capsys.readouterr().out
    assert printed.count("in 5 steps (stopped by --max-steps)") == 2
    assert len(decoded(output)) == 12
    assert json.loads(printed.splitlines()[-1]) == {
        "output": str(output),
        "frames": 12,
        "fps": 15.0,
        "episodes": [{"return": -5.0, "length": 5}] * 2,
    }


def test_one_step_is_no_plural() -> None:
    assert episodes.Moment(1, 1, 2.0, True, True).result() == "episode 1: return 2.00 in 1 step\n"
    assert episodes.Moment(1, 0, 2.0, True, True).result().endswith("in 0 steps\n")


@pytest.mark.skipif(sys.platform != "linux", reason="there is always a display")
def test_recording_without_a_display_prints_no_error(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    words = ("--max-steps", "2", "--output", tmp_path / "video.gif")
    done = subprocess.run(
        [sys.executable, "-m", "rl_training.cli", "record", trained(make_config()), *words],
        env={k: v for k, v in os.environ.items() if k not in hidden},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "XDG_RUNTIME_DIR" not in done.stderr


def test_the_video_driver_is_changed_only_without_a_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    with episodes.sdl_without_display():
        assert "SDL_VIDEODRIVER" not in os.environ
    monkeypatch.delenv("DISPLAY")
    with episodes.sdl_without_display():
        assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    assert "SDL_VIDEODRIVER" not in os.environ


def test_atari_plays_whole_games_for_raw_scores(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("ale_py")
    checkpoint = trained(make_config(**{**QUICK_ATARI["ppo"], "atari": {"sticky_actions": 0.0}}))
    output = tmp_path / "game.mp4"
    flags = ("--seed", "2", "--no-deterministic", "--output", output)
    assert run("record", "--checkpoint", checkpoint, *flags) == 0
    printed = capsys.readouterr().out
    result = evaluate_checkpoint(checkpoint, 1, seed=2, deterministic=False)
    assert told(printed) == [(result.returns[0], result.lengths[0])]
    assert "at 15 frames per second" in printed  # a console shows 60 frames a second; 4 make a step
    frames = decoded(output)
    assert frames.shape == (result.lengths[0] + 1, 448, 320, 3)  # 160 x 210 twice as large
    assert len(np.unique(frames[50].reshape(-1, 3) // 64, axis=0)) > 4  # in colour


def test_box2d(tmp_path: Path, make_config: MakeConfig) -> None:
    pytest.importorskip("Box2D")
    checkpoint = trained(make_config(env_id="LunarLander-v3", normalize_obs=True))
    output = tmp_path / "lander.gif"
    flags = ("--max-steps", "10", "--output", output)
    assert run("record", "--checkpoint", checkpoint, *flags) == 0
    assert decoded(output).shape == (11, 440, 600, 3)


def offscreen_mujoco() -> bool:
    code = "import gymnasium as g; e = g.make('InvertedPendulum-v5', render_mode='rgb_array');"
    code += "e.reset(); assert e.render().any()"
    env = {**os.environ, "MUJOCO_GL": "egl"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def test_mujoco_offscreen_and_what_to_set_where_it_fails(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    pytest.importorskip("mujoco")
    if not offscreen_mujoco():
        pytest.skip("no EGL here")
    checkpoint = trained(make_config(env_id="InvertedPendulum-v5"))

    def record(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "DISPLAY")}
        words = ["record", "--checkpoint", str(checkpoint), "--max-steps", "3", "--output", name]
        return subprocess.run(
            [sys.executable, "-m", "rl_training.cli", *words],
            env={**env, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    done = record("works.gif")
    assert done.returncode == 0, done.stderr
    frames = decoded(tmp_path / "works.gif")
    assert frames.shape == (4, 512, 480, 3)
    assert frames[0, 40:].std() > 10
    failed = record("fails.gif", MUJOCO_GL="glfw")
    assert failed.returncode == 2
    assert "MUJOCO_GL=egl" in failed.stderr
    assert "now it is glfw" in failed.stderr
    assert not list(tmp_path.glob("*fails*"))


SMALL_ENV = """
import gymnasium as gym, numpy as np

class Dots(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space = gym.spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None, grows=False):
        self.render_mode, self.grows, self.at = render_mode, grows, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.full(1, self.at, np.float32), 0.5, self.at == 6, False, {}

    def render(self):
        picture = np.zeros((5 + self.grows * self.at, 7, 3), np.uint8)
        picture[2, self.at] = 255
        return picture

gym.register("recorded/Dots-v0", Dots)
"""


@pytest.fixture
def dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig) -> Any:
    (tmp_path / "dots_env.py").write_text(SMALL_ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make_config(env_id="dots_env:recorded/Dots-v0")


def test_an_environment_of_the_user(dots: Any, tmp_path: Path, capsys: Any) -> None:
    checkpoint = trained(dots)
    output = tmp_path / "dots.gif"
    assert run("record", "--checkpoint", checkpoint, "--output", output) == 0
    printed = capsys.readouterr().out
    assert told(printed) == [(3.0, 6)]
    assert "7 frames, 1.8 s at 4 frames per second" in printed
    frames = decoded(output)
    strip = frames.shape[1] - 5 * 46  # enlarged 46 times: 322 wide
    assert frames.shape[2] == 322
    for i, frame in enumerate(frames):
        assert frame[strip + 2 * 46 + 23, i * 46 + 23].min() > 250
        assert frame[strip + 2 * 46 + 23, (i + 1) % 7 * 46 + 23].max() < 5


def test_nothing_is_left_of_a_recording_that_fails(dots: Any, tmp_path: Path, capsys: Any) -> None:
    checkpoint = trained(dots.with_overrides(env_kwargs={"grows": True}))
    output = tmp_path / "out" / "grows.mp4"
    assert run("record", "--checkpoint", checkpoint, "--output", output) == 2
    assert "changed size" in capsys.readouterr().err
    assert not list(output.parent.iterdir())
    (tmp_path / "file").touch()
    no_folder = tmp_path / "file" / "video.mp4"
    assert run("record", "--checkpoint", checkpoint, "--output", no_folder) == 2
    assert f"error: cannot write {no_folder}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "video.avi"), "must end in .mp4 or .gif"),
        (("--num-episodes", "0"), "--num-episodes must be at least 1"),
        (("--max-steps", "0"), "--max-steps must be at least 1"),
        (("--fps", "0"), "--fps must be above 0"),
        ((), "no checkpoint or run folder at nowhere"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str, capsys: Any) -> None:
    assert run("record", "--checkpoint", "nowhere", *words) == 2
    assert message in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(video, "_NEEDED", ("imageio_ffmpeg", "no_such_module"))
    assert run("record", "--checkpoint", "nowhere") == 2
    assert "pip install '.[video]'" in capsys.readouterr().err


def test_no_pictures_is_said(make_config: MakeConfig, capsys: Any) -> None:
    checkpoint = trained(make_config(env_id="probe/ConstantReward-v0"))
    assert run("record", "--checkpoint", checkpoint) == 2
    assert re.search("rgb_array|render_mode", capsys.readouterr().err)


def without_environment(make_config: MakeConfig) -> tuple[Path, Path]:
    """Runs with the same policy, the second without an environment."""
    config = make_config(algo="bc", env_id="Pendulum-v1", total_timesteps=8, eval_episodes=0)
    alone = config.with_overrides(env_id="", output_dir=config.output_dir / "alone")
    return train_as("bc", config).run_dir, train_as("bc", alone).run_dir


def test_a_run_without_an_environment_is_recorded_in_the_one_that_is_named(
    make_config: MakeConfig, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("minari")
    named, alone = without_environment(make_config)
    words = ("record", alone, "--output", tmp_path / "x.gif", "--max-steps", "5")
    assert run(*words) == 2
    assert "there is no environment to play" in (error := capsys.readouterr().err)
    assert "--env-id ENV" in error
    assert run(*words, "--env-id", "CartPole-v1") == 2
    assert "CartPole-v1 does not match the policy" in capsys.readouterr().err
    kwargs = ("--env-kwargs", "{g: 2.0}")
    assert run(*words, "--env-id", "Pendulum-v1", *kwargs) == 0
    returns = told(capsys.readouterr().out)
    assert run("record", named, *words[2:], *kwargs) == 0
    assert told(capsys.readouterr().out) == returns


# -- play ------------------------------------------------------------------------------------------


def play(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    return subprocess.run(
        [sys.executable, "-m", "rl_training.cli", "play", *map(str, words)],
        env={**env, "SDL_AUDIODRIVER": "dummy", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_policy_plays_on_a_screen(make_config: MakeConfig) -> None:
    checkpoint = trained(make_config())
    result = evaluate_checkpoint(checkpoint, 1, seed=4)
    episode = {"return": result.returns[0], "length": result.lengths[0]}
    for named in ([checkpoint], ["--checkpoint", checkpoint]):
        done = play(*named, "--seed", "4", "--json", SDL_VIDEODRIVER="dummy")
        assert done.returncode == 0, done.stderr
        assert told(done.stdout) == [(result.returns[0], result.lengths[0])]
        assert json.loads(done.stdout.splitlines()[-1]) == {"episodes": [episode]}


def test_the_policy_plays_an_environment_that_is_named(make_config: MakeConfig) -> None:
    pytest.importorskip("minari")
    named, alone = without_environment(make_config)
    result = evaluate_checkpoint(named, 1, seed=4)
    flags = ("--seed", "4", "--env-id", "Pendulum-v1")
    given: tuple[list[str | Path], ...]
    given = ([alone, *flags], ["Pendulum-v1", *flags[:2], "--checkpoint", alone])
    for words in given:
        done = play(*words, SDL_VIDEODRIVER="dummy")
        assert done.returncode == 0, done.stderr
        assert told(done.stdout) == [(round(result.returns[0], 2), result.lengths[0])]


def test_the_keyboard_plays_atari() -> None:
    pytest.importorskip("ale_py")
    words = ("ALE/Pong-v5", "--keyboard", "--max-steps", "5", "--num-episodes", "1")
    done = play(*words, SDL_VIDEODRIVER="dummy")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [(0.0, 5)]
    assert "space: 1" in done.stderr


def test_play_without_a_display_points_to_record() -> None:
    if sys.platform != "linux":
        pytest.skip("there is always a display")
    done = play("CartPole-v1")
    assert done.returncode == 2
    assert "rl-training record" in done.stderr


def test_play_looks_for_the_name_before_the_display(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(episodes, "has_display", lambda: False)
    run_dir = trained(make_config())
    for word, message in (
        ("nope", "no run folder or checkpoint 'nope', and no environment 'nope'"),
        ("CartPol-v1", "Did you mean 'CartPole-v1'?"),
        ("gone.pt", "no checkpoint or run folder at gone.pt"),
        (str(run_dir.parent), f"it contains one run folder: {run_dir}"),
        ("CartPole-v1", "there is no display"),
        (str(run_dir), "there is no display"),
    ):
        assert run("play", word) == 2
        assert message in capsys.readouterr().err
    assert run("play", "CartPol-v1", "--keyboard") == 2
    assert "Did you mean 'CartPole-v1'?" in capsys.readouterr().err


def test_play_asks_for_one_of_both(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert run("play") == 2
    assert run("play", "CartPole-v1", "--checkpoint", "x") == 2
    assert "no checkpoint or run folder at x" in capsys.readouterr().err
    assert run("play", "y", "--env-id", "CartPole-v1", "--checkpoint", "x") == 2
    assert "unexpected argument 'y'" in capsys.readouterr().err
    assert run("play", "y", "--env-id", "CartPole-v1") == 2
    assert "no checkpoint or run folder at y" in capsys.readouterr().err
    assert run("play", "--keyboard", "--checkpoint", "x") == 2
    assert run("play", "CartPole-v1", "--keyboard") == 2
    assert "has no key bindings" in capsys.readouterr().err


def test_a_real_window_and_ctrl_c(tmp_path: Path) -> None:
    """Under a virtual X server: the window is there and shows something; Ctrl-C ends it."""
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb")
    read, write = os.pipe()
    command = [
        "Xvfb",
        "-displayfd",
        str(write),
        "-screen",
        "0",
        "800x600x24",
        "-fbdir",
        str(tmp_path),
    ]
    server = subprocess.Popen(command, pass_fds=(write,), stderr=subprocess.DEVNULL)
    os.close(write)
    env = {k: v for k, v in os.environ.items() if k != "SDL_VIDEODRIVER"}
    player: subprocess.Popen[str] | None = None
    try:
        display = f":{os.read(read, 16).decode().strip()}"
        screen = tmp_path / "Xvfb_screen0"
        empty = lit(screen)
        player = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rl_training.cli",
                "play",
                "CartPole-v1",
                "--num-episodes",
                "999",
            ],
            env={**env, "DISPLAY": display, "SDL_AUDIODRIVER": "dummy"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # CartPole's window is 600 x 400 of white.
        wait_for(lambda: lit(screen) > empty + 500_000)
        player.send_signal(signal.SIGINT)
        _, errors = player.communicate(timeout=30)
        assert player.returncode == 0
        assert "stopped" in errors
        assert "Traceback" not in errors
    finally:
        if player is not None and player.poll() is None:
            player.kill()
        server.kill()
        server.wait()
        os.close(read)


def lit(screen: Path) -> int:
    return int(np.count_nonzero(np.frombuffer(screen.read_bytes(), np.uint8)))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_random_actions_keep_to_the_mask() -> None:
    import gymnasium as gym

    player = episodes.RandomPlayer(gym.spaces.Discrete(3), seed=1)
    mask = np.array([False, True, False])
    assert {int(player.act({"action_mask": mask})) for _ in range(20)} == {1}
