"""A run's files: locked before they are read, durable, repaired, never written elsewhere."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from conftest import MakeConfig
from rl_training.checkpointing import checkpoint_step, load_checkpoint
from rl_training.errors import CheckpointError, StorageError, UserError
from rl_training.experiment.manager import ExperimentManager
from rl_training.logging import JsonlSink
from rl_training.runs import RunLock, read_json
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from state_compare import assert_same_run, metric_rows

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


# -- the lock ----------------------------------------------------------------------------------


def test_the_lock_is_held_from_before_the_checkpoint_is_read(make_config: MakeConfig) -> None:
    """Between reading and training nobody else can extend the run, which would be lost."""
    run = ExperimentManager.setup(make_config()).train().run_dir
    waiting = ExperimentManager.resume(run, total_timesteps=1024)
    before = files_of(run)
    with pytest.raises(UserError, match="being trained by another process"):
        ExperimentManager.resume(run, total_timesteps=4096)
    assert files_of(run) == before, "a refused lock touches nothing"
    assert waiting.train().metrics["global_step"] == 1024
    assert resume_training(run, total_timesteps=1280).metrics["global_step"] == 1280


def test_a_new_run_is_locked_and_a_forgotten_one_is_not(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config())
    with pytest.raises(UserError, match="another process"):
        RunLock(trainer.run_dir)
    trainer.close()
    RunLock(trainer.run_dir).release()


def test_a_failed_resume_gives_the_lock_back(make_config: MakeConfig) -> None:
    run = ExperimentManager.setup(make_config()).train().run_dir
    with pytest.raises(UserError):
        ExperimentManager.resume(run, total_timesteps=1)
    RunLock(run).release()


# -- the metric log ----------------------------------------------------------------------------


class KillAfter(Callback):
    """Ends the run as suddenly as a kill, some rows after the last checkpoint."""

    def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
        if event.step >= 640:
            raise KeyboardInterrupt


def killed_run(make_config: MakeConfig) -> tuple[Path, Path]:
    config = make_config(total_timesteps=1024, checkpoint_interval=256, eval_episodes=0)
    whole = ExperimentManager.setup(config).train().run_dir
    trainer = ExperimentManager.setup(config, callbacks=[KillAfter()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return whole, trainer.run_dir


@pytest.mark.parametrize("damage", ["cut in a row", "cut at a row", "missing", "torn"])
def test_a_damaged_log_is_repaired_with_a_warning(damage: str, make_config: MakeConfig) -> None:
    whole, run = killed_run(make_config)
    log = run / "metrics.jsonl"
    state = load_checkpoint(run / "checkpoints" / "last.pt")
    offset = state["training"]["counters"]["log_offset"]
    content = log.read_bytes()
    if damage == "missing":
        log.unlink()
    elif damage == "cut at a row":
        log.write_bytes(content[: content[: offset - 1].rfind(b"\n") + 1])
    else:
        log.write_bytes(content[: offset - 10] + (b"\0" * 10 if damage == "torn" else b""))
    with pytest.warns(UserWarning, match="damaged or shorter"):
        resumed = ExperimentManager.resume(run).train()
    rows, expected = metric_rows(resumed.run_dir), metric_rows(whole)
    assert rows[0] == expected[0] == {"format": 1}
    steps = [row["step"] for row in rows[1:]]
    assert steps == sorted(set(steps))
    assert rows[-4:] == expected[-4:]
    if damage != "missing":
        assert len(rows) == len(expected) - 1, "one row was lost"


def test_an_intact_log_needs_no_warning_and_rows_beyond_the_checkpoint_are_kept_aside(
    make_config: MakeConfig, recwarn: pytest.WarningsRecorder
) -> None:
    whole, run = killed_run(make_config)
    ExperimentManager.resume(run).train()
    assert_same_run(whole, run)
    assert not [w for w in recwarn if "metrics" in str(w.message)]
    (aside,) = run.glob("metrics.after-*.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == [640]


def test_the_log_is_on_disk_before_the_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    ExperimentManager.setup(make_config(total_timesteps=256)).train()
    commits = [i for i, name in enumerate(order) if name.startswith(".step_")]
    assert commits
    assert all("metrics.jsonl" in order[:i][-2:] for i in commits)


def test_a_row_is_appended_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"a": 1.0})
    offset = sink.offset()
    sink.write(2, {"a": 2.0})
    sink.close()
    again = JsonlSink(path, resume_at=offset)
    again.write(3, {"a": 3.0})
    assert again.offset() == path.stat().st_size
    again.close()
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 1, 3]


# -- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "checkpoints/.last-link.tmp", ".metadata.json.tmp",
             "checkpoints", "tensorboard"]
)  # fmt: skip
def test_resume_writes_through_no_link(name: str, make_config: MakeConfig, tmp_path: Path) -> None:
    run = ExperimentManager.setup(make_config()).train().run_dir
    outside = tmp_path / "outside"
    link = run / name
    if link.is_dir():
        link.rename(outside)
    else:
        outside.write_bytes(link.read_bytes() if link.exists() else b"precious\n")
        link.unlink(missing_ok=True)
    link.symlink_to(outside)
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="symbolic link"):
        resume_training(run, total_timesteps=1024)
    assert files_of(tmp_path) == before


def test_a_link_to_a_run_folder_is_fine(make_config: MakeConfig, tmp_path: Path) -> None:
    run = ExperimentManager.setup(make_config()).train().run_dir
    link = tmp_path / "link"
    link.symlink_to(run)
    assert resume_training(link, total_timesteps=640).metrics["global_step"] == 640


# -- disks and outputs -------------------------------------------------------------------------


def run_cli(*args: str, cwd: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_training.cli", *args],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
        **kwargs,
    )


SHORT = ("train", "--env-id", "CartPole-v1", "--total-timesteps", "4096", "--eval-episodes", "0",
         "--num-envs", "2", "--algo-kwargs.num-steps", "32", "--checkpoint-interval", "0",
         "--no-progress")  # fmt: skip


def test_a_full_disk_is_one_line_and_names_the_last_checkpoint(tmp_path: Path) -> None:
    """Real errors of the kernel: no file may grow beyond a limit (EFBIG)."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    # Checkpoints stay below it; the metric log grows beyond it.
    flags = ["--no-tensorboard", "--algo-kwargs.hidden-sizes", "8", "--algo-kwargs.num-steps", "8",
             "--total-timesteps", "1000000", "--output-dir", "long"]  # fmt: skip
    done = run_cli(*SHORT, *flags, cwd=tmp_path, preexec_fn=limit)
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert last.startswith("failed: ")
    assert "File too large" in last
    assert "the last checkpoint is " in last
    (run,) = (tmp_path / "long").iterdir()
    load_checkpoint(run / "checkpoints" / "last.pt")


def test_a_checkpoint_that_cannot_be_written_is_a_failure_not_a_mistake(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = run_cli(*SHORT, cwd=tmp_path, preexec_fn=limit)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "File too large" in last
    assert "there is no checkpoint yet" in last


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_made_is_a_failure(
    number: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(self: Path, **_: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(StorageError, match=f"cannot create the run folder.*{os.strerror(number)}"):
        ExperimentManager.setup(make_config())


def test_a_broken_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    """Whoever read the output has gone: the run ends as if they had not."""
    read, write = os.pipe()
    os.close(read)
    flags = [word for word in SHORT if word != "--no-progress"]
    done = subprocess.run(
        [sys.executable, "-m", "rl_training.cli", *flags],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=write,
        stderr=write,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert done.returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert read_json(run / "summary.json")["status"] == "finished"


class ClosesBadly(CartPoleEnv):
    def close(self) -> None:
        raise ValueError("the window is jammed")


def test_an_exception_in_close_after_success_is_a_warning(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(eval_episodes=0), env_fn=ClosesBadly)
    with pytest.warns(UserWarning, match=r"closing it failed.*window is jammed"):
        result = trainer.train()
    assert read_json(result.run_dir / "summary.json")["status"] == "finished"


def test_an_exception_in_close_does_not_hide_the_first(make_config: MakeConfig) -> None:
    class Fails(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            raise LookupError("first")

    trainer = ExperimentManager.setup(make_config(), env_fn=ClosesBadly, callbacks=[Fails()])
    with pytest.raises(LookupError, match="first"):
        trainer.train()


# -- the clock ---------------------------------------------------------------------------------


def test_a_clock_set_back_does_not_make_new_checkpoints_look_old(make_config: MakeConfig) -> None:
    class BackInTime(Callback):
        """Gives every checkpoint an older time than the one before."""

        def on_checkpoint(self, trainer: Any, event: Any) -> None:
            moment = 2_000_000_000 - trainer.global_step
            for path in trainer.run_dir.glob("checkpoints/step_*.pt"):
                if checkpoint_step(path) == trainer.global_step:
                    os.utime(path, (moment, moment))

    config = make_config(total_timesteps=1024, checkpoint_interval=128, keep_checkpoints=2)
    run = ExperimentManager.setup(config, callbacks=[BackInTime()]).train().run_dir
    kept = sorted(checkpoint_step(path) for path in run.glob("checkpoints/step_*.pt"))
    assert kept == [896, 1024]
    os.utime(run / "checkpoints" / "step_000000000896.pt", (1, 1))
    (run / "checkpoints" / "step_000000001024.pt").unlink()
    (run / "checkpoints" / "last.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="step_000000000896"):
        load_checkpoint(run / "checkpoints" / "last.pt")


def test_an_older_checkpoint_that_is_resumed_prunes_the_ones_left_behind(
    make_config: MakeConfig,
) -> None:
    config = make_config(total_timesteps=1024, checkpoint_interval=128, keep_checkpoints=3)
    run = ExperimentManager.setup(config).train().run_dir
    oldest = min(run.glob("checkpoints/step_*.pt"), key=checkpoint_step)
    assert checkpoint_step(oldest) == 768

    class Stop(Callback):
        def on_iteration(self, trainer: Any, event: IterationEnd) -> None:
            trainer.request_stop("enough")

    resume_training(oldest, callbacks=[Stop()])
    kept = sorted(checkpoint_step(path) for path in run.glob("checkpoints/step_*.pt"))
    assert kept == [768, 896, 1024]
    assert load_checkpoint(run / "checkpoints" / "last.pt")["training"]["counters"][
        "global_step"
    ] in (896, 1024)


def test_an_episode_too_long_to_record_makes_the_run_approximate(make_config: MakeConfig) -> None:
    config = make_config(env_id="Pendulum-v1", max_recorded_steps=100, eval_episodes=0)
    with pytest.warns(UserWarning, match="max_recorded_steps"):
        run = ExperimentManager.setup(config).train().run_dir
    assert read_json(run / "metadata.json")["resume"] == "approximate"
    short = make_config(env_id="Pendulum-v1", eval_episodes=0)
    run = ExperimentManager.setup(short).train().run_dir
    assert read_json(run / "metadata.json")["resume"] == "exact"
