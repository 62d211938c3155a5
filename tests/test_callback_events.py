"""Events of training, `log_info` and `trainer.log`: what callbacks see and what is logged."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import MakeConfig
from counting_env import Counts, SeededCounts
from rl_training.checkpointing import load_checkpoint
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import (
    Callback,
    EvaluationEnd,
    IterationEnd,
    RolloutEnd,
    StepEnd,
    UpdateEnd,
)
from rl_training.runtime.episode_info import EpisodeInfo
from rl_training.runtime.experience import Collected
from rl_training.runtime.ppo_trainer import train_ppo
from rl_training.runtime.trainer import Trainer
from rl_training.runtime.workflows import resume_training
from rl_training.types import Episode
from state_compare import metric_rows


class Recorder(Callback):
    def __init__(self) -> None:
        self.steps: list[StepEnd] = []
        self.order: list[tuple[str, int]] = []
        self.rollouts: list[RolloutEnd] = []
        self.updates: list[UpdateEnd] = []

    def on_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.steps.append(event)

    def on_rollout(self, trainer: Trainer, event: RolloutEnd) -> None:
        self.rollouts.append(event)
        self.order.append(("rollout", event.step))

    def on_update(self, trainer: Trainer, event: UpdateEnd) -> None:
        assert event.metrics is event.metrics, "read once"
        self.updates.append(event)
        self.order.append(("update", event.step))

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        self.order.append(("iteration", event.step))


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_on_step_gives_every_step(make_config: MakeConfig, vectorization: str) -> None:
    seen = Recorder()
    config = make_config(total_timesteps=128, eval_episodes=0, vectorization=vectorization)
    ExperimentManager.setup(config, env_fn=Counts, callbacks=[seen]).train()
    assert [event.step for event in seen.steps] == list(range(2, 129, 2))
    positions = [[info["step_in_episode"] for info in event.infos] for event in seen.steps]
    assert [first for first, _ in positions][:13] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7, 1]
    fifth = seen.steps[4]
    assert fifth.terminated.tolist() == [True, True]
    assert fifth.truncated.tolist() == [False, False]
    assert fifth.rewards.tolist() == [1.0, 1.0]
    assert fifth.valid.all()
    assert np.asarray(fifth.obs).ravel().tolist() == [4.0, 4.0]
    assert np.asarray(fifth.next_obs).ravel().tolist() == [5.0, 5.0], "the last of the episode"
    assert np.asarray(seen.steps[5].obs).ravel().tolist() == [0.0, 0.0]
    assert set(fifth.actions.tolist()) <= {0, 1}
    assert [info["is_success"] for info in seen.steps[4].infos] == [False, False]
    assert [info["is_success"] for info in seen.steps[11].infos] == [True, True]
    assert "of_reset" not in seen.steps[4].infos[0]
    assert "is_success" not in seen.steps[3].infos[0]


def test_actions_are_those_that_the_environments_received(make_config: MakeConfig) -> None:
    seen = Recorder()
    config = make_config(env_id="Pendulum-v1", total_timesteps=128, eval_episodes=0)
    train_ppo(config, callbacks=[seen])
    actions = np.concatenate([event.actions for event in seen.steps])
    assert np.abs(actions).max() > 1.0, "the policy's own are in [-1, 1], the torque in [-2, 2]"
    assert np.abs(actions).max() <= 2.0


def test_watching_changes_nothing(make_config: MakeConfig) -> None:
    plain = train_ppo(make_config())
    watched = train_ppo(make_config(), callbacks=[Recorder()])
    assert metric_rows(plain.run_dir) == metric_rows(watched.run_dir)


class CountSteps(Callback):
    """Counts in its state; interrupts within a rollout, once."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.steps: list[int] = []
        self.rollouts: list[int] = []
        self.interrupt_at = interrupt_at

    def on_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.steps.append(event.step)
        if event.step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_rollout(self, trainer: Trainer, event: RolloutEnd) -> None:
        self.rollouts.append(event.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "rollouts": self.rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = [int(step) for step in state["steps"]]
        self.rollouts = [int(step) for step in state["rollouts"]]


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_resumed_run_sees_each_step_and_rollout_once(make_config: MakeConfig, algo: str) -> None:
    config = make_config(algo=algo, eval_episodes=0)
    whole = CountSteps()
    ExperimentManager.setup(config, callbacks=[whole]).train()
    first = ExperimentManager.setup(config, callbacks=[CountSteps(interrupt_at=150)]).train()
    assert first.interrupted
    rest = CountSteps()
    resume_training(first.run_dir, callbacks=[rest])
    assert rest.steps == whole.steps == list(range(2, 513, 2))
    assert rest.rollouts == whole.rollouts
    assert rest.rollouts[-1] == 512


# -- rollouts and updates --------------------------------------------------------------------------


def test_on_policy_rollouts_are_followed_by_their_updates(make_config: MakeConfig) -> None:
    seen = Recorder()
    config = make_config(eval_episodes=0)
    result = ExperimentManager.setup(config, env_fn=Counts, callbacks=[seen]).train()
    ends = [128, 256, 384, 512]
    assert seen.order == [(kind, s) for s in ends for kind in ("rollout", "update", "iteration")]
    assert [event.steps for event in seen.rollouts] == [128] * 4
    # Of 64 steps in two environments: 5 and 7 in turn, so ten episodes each end within 60 steps.
    assert len(seen.rollouts[0].episodes) == 20
    settings = config.algo_kwargs
    assert [event.updates for event in seen.updates] == [
        settings.update_epochs * settings.num_minibatches
    ] * 4
    last = {k: v for k, v in result.metrics.items() if k.startswith("losses/")}
    assert dict(seen.updates[-1].metrics) == last


def test_off_policy_segments_are_followed_by_their_updates(make_config: MakeConfig) -> None:
    seen = Recorder()
    config = make_config(algo="dqn", eval_episodes=0, learning_starts=100, train_freq=8)
    result = ExperimentManager.setup(config, callbacks=[seen]).train()
    assert sum(event.steps for event in seen.rollouts) == 512
    # The warm-up, up to step 100, ends a segment of its own.
    assert [s for kind, s in seen.order if kind == "rollout"][-3:] == [496, 504, 512]
    assert sum(event.updates for event in seen.updates) == result_updates(result.run_dir)
    assert min(event.step for event in seen.updates) >= 100
    last = {k: v for k, v in result.metrics.items() if k.startswith("losses/")}
    assert seen.updates[-1].metrics == pytest.approx(last)


def result_updates(run_dir: Path) -> int:
    return int(load_checkpoint(run_dir / "checkpoints" / "last.pt")["algorithm"]["num_updates"])


def test_a_rollout_that_a_pause_divides_is_one_event(make_config: MakeConfig) -> None:
    seen = Recorder()
    trainer = ExperimentManager.setup(make_config(eval_episodes=0), callbacks=[seen])
    trainer.reporter.notify_start()
    first, second = (Episode(0, 1.0, 5), Episode(1, 1.0, 7))
    trainer.reporter.notify_rollout(20, Collected(10, 20, (first,)), complete=False)
    assert not seen.rollouts
    trainer.reporter.notify_rollout(128, Collected(54, 108, (second,)))
    trainer.reporter.notify_rollout(128, Collected(0, 0, ()))  # continued while it learnt
    assert seen.rollouts == [RolloutEnd(128, 128, (first, second))]
    trainer.close()


# -- False ends a run ------------------------------------------------------------------------------


def test_a_function_that_returns_false_ends_the_run(make_config: MakeConfig) -> None:
    def enough(trainer: Trainer, event: IterationEnd) -> Any:
        return np.bool_(event.step < 200)  # NumPy's False too

    result = train_ppo(make_config(), callbacks=enough)
    assert result.metrics["global_step"] == 256
    assert result.stop_reason == "on_iteration of enough returned False"
    assert not result.interrupted


def test_nothing_but_false_ends_the_run(make_config: MakeConfig) -> None:
    returned: Iterator[Any] = iter([None, 0, "", []])
    result = train_ppo(make_config(eval_episodes=0), callbacks=lambda *_: next(returned))
    assert result.metrics["global_step"] == 512
    assert not list(returned)


@pytest.mark.parametrize("event", ["on_step", "on_rollout", "on_update", "on_evaluation"])
def test_an_event_that_returns_false_ends_the_run_after_the_iteration(
    make_config: MakeConfig, event: str
) -> None:
    made = type("Ends", (Callback,), {event: lambda *_: False})
    result = train_ppo(make_config(eval_interval=128), callbacks=made())
    assert result.metrics["global_step"] == 128
    assert result.stop_reason == f"{event} of Ends returned False"


def test_only_callbacks_that_override_an_event_are_called_for_it(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(eval_episodes=0), callbacks=[Callback()])
    source: Any = trainer.source
    trainer.train()
    assert source._on_step is None


# -- log_info --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_log_info_averages_the_last_infos(make_config: MakeConfig, vectorization: str) -> None:
    seen: list[EvaluationEnd] = []

    class Watch(Callback):
        def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
            seen.append(event)

    config = make_config(
        log_info=["is_success"], vectorization=vectorization, eval_episodes=3, eval_interval=0
    )
    run = ExperimentManager.setup(config, env_fn=Counts, callbacks=[Watch()]).train()
    # 256 steps of each environment: 21 pairs of episodes of 5 + 7 steps, and 4 steps.
    assert run.metrics["rollout/is_success_mean"] == pytest.approx(0.5)
    # The first of each environment counts, of 5 steps: no success.
    assert run.metrics["eval/is_success_mean"] == 0.0
    assert seen[-1].metrics["eval/is_success_mean"] == 0.0
    assert seen[-1].result.lengths == (5, 5, 5)
    rows = metric_rows(run.run_dir)
    assert rows[1]["rollout/is_success_mean"] == pytest.approx(0.5)
    assert "eval/is_success_mean" in rows[-1]


def test_log_info_works_for_replay_learners(make_config: MakeConfig) -> None:
    config = make_config(algo="dqn", log_info=["is_success"], eval_episodes=0)
    run = ExperimentManager.setup(config, env_fn=Counts).train()
    assert 0.4 < run.metrics["rollout/is_success_mean"] < 0.6


def test_a_resume_keeps_the_window(make_config: MakeConfig) -> None:
    class Interrupt(Callback):
        def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
            if event.step == 128:
                os.kill(os.getpid(), signal.SIGTERM)

    config = make_config(log_info=["is_success"], eval_episodes=0)
    whole = ExperimentManager.setup(config, env_fn=SeededCounts).train()
    first = ExperimentManager.setup(config, env_fn=SeededCounts, callbacks=[Interrupt()]).train()
    assert first.interrupted
    resume_training(first.run_dir, env_fn=SeededCounts)
    assert metric_rows(first.run_dir) == metric_rows(whole.run_dir)


def test_without_log_info_the_state_is_as_before(make_config: MakeConfig) -> None:
    plain = ExperimentManager.setup(make_config(eval_episodes=0)).train()
    state = load_checkpoint(plain.checkpoint_path)["training"]["source"]
    assert set(state) == {"actor", "obs", "env", "recent", "reward_normalizer"}


def test_a_key_that_never_appears_gives_one_warning_that_names_the_others(
    make_config: MakeConfig,
) -> None:
    config = make_config(log_info=["is_sucess"], eval_interval=128)
    with pytest.warns(UserWarning, match="is_sucess") as caught:
        ExperimentManager.setup(config, env_fn=Counts).train()
    texts = [str(one.message) for one in caught if "is_sucess" in str(one.message)]
    assert len(texts) == 1
    assert "'is_success', 'step_in_episode'" in texts[0]


def test_a_value_that_is_no_number_gives_one_warning_and_is_left_out() -> None:
    info = EpisodeInfo(["outcome"])
    with pytest.warns(UserWarning, match=r"info\['outcome'\] .* is 'won', not a finite number"):
        info.add(0, {"outcome": "won"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info.add(0, {"outcome": "lost"})
        info.add(0, {"outcome": float("nan")})
        info.add(0, {"outcome": np.array([2.0])})
        info.add(0, {"outcome": True})
        assert info.means("rollout") == {"rollout/outcome_mean": 1.5}


def test_the_window_has_a_hundred_episodes() -> None:
    info = EpisodeInfo(["x"])
    for value in range(250):
        info.add(0, {"x": value})
    assert info.means("rollout") == {"rollout/x_mean": pytest.approx(np.mean(range(150, 250)))}
    again = EpisodeInfo(["x"])
    again.load_state_dict(info.state_dict())
    assert again.means("rollout") == info.means("rollout")


def test_an_evaluation_counts_the_same_episodes_as_its_returns() -> None:
    """The first of each environment: short episodes, which end more often, count no more."""
    info = EpisodeInfo(["x"], quota=[1, 2])
    for env, value in ((0, 1.0), (0, 100.0), (1, 2.0), (0, 100.0), (1, 3.0), (1, 100.0)):
        info.add(env, {"x": value})
    assert info.means("eval") == {"eval/x_mean": 2.0}


def test_a_source_that_cannot_be_watched_is_refused(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(eval_episodes=0), callbacks=[Recorder()])
    trainer.source.close()
    unwatched: Any = SimpleNamespace(info=trainer.source.info)
    trainer.source = unwatched
    with pytest.raises(ConfigError, match="on_step needs environments of this process"):
        trainer.reporter.notify_start()


# -- metrics of the user ---------------------------------------------------------------------------


def test_logged_values_reach_every_sink(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    rows: list[tuple[int, dict[str, float]]] = []
    run = SimpleNamespace(
        starting_step=0,
        log=lambda metrics, step: rows.append((step, dict(metrics))),
        finish=lambda: None,
    )
    fake: Any = ModuleType("wandb")
    fake.init = lambda **_: run
    fake.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(
        log_info=["is_success"], tensorboard=True, wandb=True, eval_interval=0, progress=False
    )
    result = ExperimentManager.setup(
        config,
        env_fn=Counts,
        callbacks=[as_logger],
    ).train()
    logged = [
        json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    names = ("mine/half_step", "rollout/is_success_mean", "eval/is_success_mean")
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    for name in names:
        expected = [(row["step"], row[name]) for row in logged if name in row]
        assert expected, name
        assert [(step, row[name]) for step, row in rows if name in row] == expected
        shown = events.Tensors(name)
        assert [one.step for one in shown] == [step for step, _ in expected]
    assert result.metrics["mine/half_step"] == 256.0


def as_logger(trainer: Trainer, event: IterationEnd) -> None:
    trainer.log("mine/half_step", event.step / 2)


def test_logged_values_are_on_the_console(make_config: MakeConfig) -> None:
    from rl_training.runtime.console_table import Status, table

    result = train_ppo(make_config(eval_episodes=0), callbacks=as_logger)
    status = Status("t", "f", 512, 512, 1.0, 1.0, result.metrics)
    text = "\n".join(line.plain for line in table(status, 100, 40))
    assert re.search(r"mine/half_step +256", text)


def test_the_callback_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[1] / "docs" / "extending.md"
    found = re.search(r'```python title="watch.py"\n(.*?)```', page.read_text(), re.DOTALL)
    assert found
    program, count = re.subn(r"50_000", "1024", found[1])
    assert count == 1
    monkeypatch.chdir(tmp_path)
    exec(program, {"__name__": "watch"})
    (log,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    falls = [row["mine/falls"] for row in map(json.loads, log.open()) if "mine/falls" in row]
    assert falls[-1] > 0
