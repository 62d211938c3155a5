"""Callbacks: typed events, a stop that is honoured, state that survives."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import (
    Callback,
    CheckpointCallback,
    CheckpointSaved,
    EvaluationCallback,
    EvaluationEnd,
    IterationEnd,
    StopOnReturn,
    TrainingEnd,
)
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer
from rl_training.runtime.workflows import resume_training


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append("start")

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        self.events.append(event)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        self.events.append(event)

    def on_checkpoint(self, trainer: Trainer, event: CheckpointSaved) -> None:
        self.events.append(event)

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        self.events.append(event)

    def on_close(self) -> None:
        self.events.append("close")

    def steps(self, kind: type[Any]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]


def test_events_come_at_their_steps(make_config: MakeConfig) -> None:
    seen = Recorder()
    train_ppo(make_config(eval_interval=300, checkpoint_interval=200), callbacks=[seen])
    assert seen.events[0] == "start"
    assert seen.events[-1] == "close"
    assert seen.steps(IterationEnd) == [128, 256, 384, 512]
    # 300 is crossed at 384 and the end is always evaluated; 200 at 256, 400 at 512.
    assert seen.steps(EvaluationEnd) == [384, 512]
    checkpoints = seen.steps(CheckpointSaved)
    assert checkpoints[0] == 0
    assert {256, 512} <= set(checkpoints)
    end = next(event for event in seen.events if isinstance(event, TrainingEnd))
    assert (end.step, end.interrupted) == (512, False)


def test_intervals_are_crossings_not_multiples() -> None:
    event = IterationEnd(step=384, previous_step=256, metrics={})
    assert event.crossed(300)
    assert event.crossed(384)
    assert not event.crossed(256)
    assert not event.crossed(0)


def test_request_stop_ends_after_the_iteration(make_config: MakeConfig) -> None:
    class Stop(Callback):
        def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
            if event.step >= 200:
                trainer.request_stop("seen enough")

    result = train_ppo(make_config(), callbacks=[Stop()])
    assert result.metrics["global_step"] == 256
    assert result.stop_reason == "seen enough"
    assert not result.interrupted
    assert "eval/return_mean" in result.metrics
    assert load_checkpoint(result.checkpoint_path)


def test_stop_on_return(make_config: MakeConfig) -> None:
    never = train_ppo(make_config(eval_interval=128), callbacks=[StopOnReturn(1e9)])
    assert never.metrics["global_step"] == 512
    soon = train_ppo(make_config(eval_interval=128), callbacks=[StopOnReturn(1.0)])
    assert soon.metrics["global_step"] == 128
    assert "threshold" in soon.stop_reason


class Counter(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        self.count += 1
        if event.step == 256 and trainer.total == 512:
            os.kill(os.getpid(), signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])


def test_state_survives_a_resume_and_an_interrupt_saves(
    make_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    first = train_ppo(make_config(), callbacks=[Counter()])
    assert first.interrupted
    assert first.stop_reason == "SIGINT"
    assert first.metrics["global_step"] == 256
    assert "saving" in capfd.readouterr().err
    summary = json.loads((first.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    second = Counter()
    resume_training(first.run_dir, callbacks=[second])
    assert second.count == 4


def test_signal_handlers_are_put_back(make_config: MakeConfig) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train_ppo(make_config(eval_episodes=0))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_best_is_a_full_checkpoint_and_only_the_newest_are_kept(make_config: MakeConfig) -> None:
    result = train_ppo(
        make_config(eval_interval=128, checkpoint_interval=128, keep_checkpoints=3),
        total_timesteps=1024,
    )
    folder = result.run_dir / "checkpoints"
    numbered = sorted(p.name for p in folder.glob("step_*.pt"))
    assert numbered == [f"step_{s:012d}.pt" for s in (768, 896, 1024)]
    best = load_checkpoint(folder / "best.pt")
    returns = [
        json.loads(line)
        for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()
        if "eval/return_mean" in line
    ]
    top = max(row["eval/return_mean"] for row in returns)
    assert best["training"]["callbacks"]["CheckpointCallback"]["best"] == top
    first_top = next(row["step"] for row in returns if row["eval/return_mean"] == top)
    assert best["training"]["counters"]["global_step"] == first_top


def test_a_users_own_evaluation_and_checkpoint_replace_the_standard(
    make_config: MakeConfig,
) -> None:
    seen = Recorder()
    train_ppo(
        make_config(),
        callbacks=[seen, EvaluationCallback(256, 1), CheckpointCallback(0, 1)],
    )
    assert seen.steps(EvaluationEnd) == [256, 512]
    assert sorted(set(seen.steps(CheckpointSaved))) in ([0, 256, 512], [0, 512])


def test_a_failing_callback_fails_the_run_and_closes_it(make_config: MakeConfig) -> None:
    class Fails(Callback):
        def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
            raise RuntimeError("no more")

    trainer = ExperimentManager.setup(make_config(), callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert load_checkpoint(trainer.run_dir / "checkpoints" / "last.pt")


def test_every_part_is_closed_even_if_a_callback_fails_to(make_config: MakeConfig) -> None:
    class Fails(Callback):
        def on_close(self) -> None:
            raise RuntimeError("cannot close")

    seen = Recorder()
    trainer = ExperimentManager.setup(
        make_config(vectorization="async", eval_episodes=0), callbacks=[seen, Fails()]
    )
    source: Any = trainer.source
    vector = source.env.env
    with pytest.warns(UserWarning, match="cannot close"):
        trainer.train()
    assert seen.events[-1] == "close"
    assert not any(process.is_alive() for process in vector.processes)


def test_a_subclass_replaces_the_standard_callback_and_saves_last(make_config: MakeConfig) -> None:
    class Mine(CheckpointCallback):
        pass

    counter = Counter()
    trainer = ExperimentManager.setup(make_config(), callbacks=[Mine(0, 1), counter])
    assert sum(isinstance(c, CheckpointCallback) for c in trainer.callbacks) == 1
    assert isinstance(trainer.callbacks[-1], Mine)
    trainer.close()


class InterruptAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        if event.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_in_the_last_iteration_leaves_the_evaluation_to_a_resume(
    make_config: MakeConfig,
) -> None:
    result = train_ppo(make_config(eval_interval=0), callbacks=[InterruptAt(512)])
    assert result.interrupted
    assert "eval/return_mean" not in result.metrics
    result = resume_training(result.run_dir)
    assert not result.interrupted
    assert "eval/return_mean" in result.metrics
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["global_step"]) == ("finished", 512)


def test_an_interrupt_in_the_last_iteration_changes_nothing_without_evaluation(
    make_config: MakeConfig,
) -> None:
    result = train_ppo(make_config(eval_episodes=0), callbacks=[InterruptAt(512)])
    assert not result.interrupted


@pytest.mark.parametrize(("interval", "trained"), [(0, 512), (300, 384)])
def test_a_failing_evaluation_loses_no_training(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, interval: int, trained: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no evaluation today")

    trainer = ExperimentManager.setup(make_config(eval_interval=interval))
    monkeypatch.setattr("rl_training.runtime.evaluation.evaluate_actor", fail)
    with pytest.raises(RuntimeError, match="no evaluation today"):
        trainer.train()
    last = load_checkpoint(trainer.run_dir / "checkpoints" / "last.pt")
    assert last["training"]["counters"]["global_step"] == trained
    monkeypatch.undo()
    result = resume_training(trainer.run_dir)
    rows = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    evaluated = [row["step"] for row in map(json.loads, rows) if "eval/return_mean" in row]
    assert evaluated == sorted({trained, 512})
    assert result.metrics["global_step"] == 512
