"""The interfaces between experience, learning and the loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayed_source import ReplayedSource, record
from rl_training.checkpointing import state_digest, to_storable
from rl_training.config import TrainConfig
from rl_training.registry import ALGORITHMS, get_spec
from rl_training.runtime.assembly import assemble
from rl_training.runtime.experience import Buffer, Collected
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.sources import LocalSource
from rl_training.runtime.trainer import Trainer
from rl_training.types import EnvInfo, Progress

PPO_KNOBS = {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
REPLAY_KNOBS = {"learning_starts": 20, "buffer_size": 500, "batch_size": 16}


def config_of(algo: str, folder: Path, **overrides: Any) -> TrainConfig[Any]:
    """A short run."""
    box = "Discrete" not in ALGORITHMS[algo].actions
    knobs: dict[str, Any] = PPO_KNOBS if algo == "ppo" else dict(REPLAY_KNOBS)
    settings = {
        "algo": algo,
        "env_id": "Pendulum-v1" if box else "CartPole-v1",
        "num_envs": 2,
        "total_timesteps": 192,
        "eval_episodes": 0,
        "progress": False,
        "tensorboard": False,
        "torch_threads": 1,
        "output_dir": folder,
        "algo_kwargs": knobs,
    }
    return TrainConfig(**{**settings, **overrides})


def digest(trainer: Trainer) -> str:
    """Of everything that was learnt."""
    return state_digest(to_storable(trainer.learner.state_dict()))


# -- a source without an environment ---------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_a_learner_computes_the_same_from_steps_that_are_played_back(
    algo: str, tmp_path: Path
) -> None:
    config = config_of(algo, tmp_path)
    original = ExperimentManager.setup(config)
    steps = record(original.source)
    original.train()
    assert len(steps) == 96

    setup = assemble(config, None)
    setup.source.close()
    source = ReplayedSource(setup.source.info, steps)
    folder = tmp_path / "replayed"
    folder.mkdir()
    setup = dataclasses.replace(setup, source=source, folder=folder)
    replayed = setup.spec.trainer(setup)
    replayed.train()
    assert replayed.global_step == original.global_step == 192
    assert digest(replayed) == digest(original)
    assert source.published == sorted(source.published)
    assert len(source.published) > 2


def test_a_changed_step_is_learnt_from(tmp_path: Path) -> None:
    config = config_of("ppo", tmp_path)
    original = ExperimentManager.setup(config)
    steps = record(original.source)
    original.train()
    changed = steps[3]._replace(step=steps[3].step._replace(reward=np.array([5.0, 1.0])))
    setup = assemble(config, None)
    setup.source.close()
    source = ReplayedSource(setup.source.info, [*steps[:3], changed, *steps[4:]])
    folder = tmp_path / "replayed"
    folder.mkdir()
    setup = dataclasses.replace(setup, source=source, folder=folder)
    replayed = setup.spec.trainer(setup)
    replayed.train()
    assert digest(replayed) != digest(original)


def test_what_a_learner_may_know_of_environments(tmp_path: Path) -> None:
    trainer = ExperimentManager.setup(config_of("ppo", tmp_path, vectorization="native"))
    info = trainer.source.info
    assert isinstance(info, EnvInfo)
    assert info.num_envs == 2
    assert info.has_invalid_rows
    assert info.obs_spec.leaves[""].shape == (4,)
    assert info.action_spec.nvec == (2,)
    trainer.close()


# -- what the actor records ------------------------------------------------------------------------


def _with_records(monkeypatch: pytest.MonkeyPatch, algo: str, *names: str) -> None:
    spec = dataclasses.replace(get_spec(algo), records=frozenset(names))
    monkeypatch.setattr("rl_training.runtime.assembly.spec_of", lambda _: spec)


class _Seen:
    """A buffer that keeps what was recorded."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def add(self, obs: Any, action: Any, record: Any, step: Any) -> None:
        self.records.append((obs, action, dict(record)))


def _collect(source: Any, steps: int) -> list[Any]:
    seen = _Seen()
    buffer: Buffer = seen
    taken: Collected = source.collect(buffer, steps, Progress(0, 100))
    assert taken.vector_steps == steps
    return seen.records


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_requested_log_probabilities_and_values_are_those_of_the_policy_that_acted(
    env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("ppo", tmp_path, env_id=env_id)
    plain = assemble(config, None)
    without = _collect(plain.source, 4)
    assert all(kept == {} for _, _, kept in without)
    plain.source.close()
    _with_records(monkeypatch, "ppo", "logprobs", "values")
    setup = assemble(config, None)
    for (obs, action, kept), (_, plain_action, _) in zip(
        _collect(setup.source, 4), without, strict=True
    ):
        np.testing.assert_array_equal(action, plain_action)  # recording changes no action
        model = setup.learner.model
        now = model.evaluate_actions(torch.from_numpy(obs), torch.as_tensor(action))
        torch.testing.assert_close(kept["logprobs"], now.logprob)
        torch.testing.assert_close(kept["values"], now.value)
    setup.source.close()


@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo"])
def test_recorded_and_recomputed_ones_agree(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = dict(PPO_KNOBS)
    if algo == "recurrent_ppo":
        knobs["sequence_length"] = 8
    config = config_of(algo, tmp_path, algo_kwargs=knobs, total_timesteps=96)
    recomputed = ExperimentManager.setup(config)
    recomputed.train()
    _with_records(monkeypatch, algo, "logprobs", "values")
    recorded = ExperimentManager.setup(config)
    recorded.train()
    buffer: Any = recorded
    assert buffer.buffer.recorded >= {"logprobs", "values"}
    pairs = zip(
        recomputed.learner.module.parameters(), recorded.learner.module.parameters(), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_was_recorded_is_neither_computed_again_nor_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_records(monkeypatch, "ppo", "logprobs")
    trainer: Any = ExperimentManager.setup(config_of("ppo", tmp_path))
    trainer.buffer.reset()
    trainer.source.collect(trainer.buffer, 16, Progress(0, 192))
    assert trainer.buffer.recorded == {"logprobs"}
    kept = trainer.buffer.logprobs.clone()
    with torch.no_grad():  # the learner moves on while the policy that acted is older
        for parameter in trainer.learner.module.parameters():
            parameter.add_(0.1)
    saved = copy.deepcopy(trainer.buffer.state_dict())
    trainer.learner.prepare(trainer.buffer, Progress(0, 192))
    assert torch.equal(trainer.buffer.logprobs, kept)
    assert trainer.buffer.values.abs().sum() > 0  # these were not recorded
    trainer.buffer.logprobs.zero_()
    trainer.buffer.load_state_dict(saved)
    assert torch.equal(trainer.buffer.logprobs, kept)
    trainer.close()


def test_what_an_actor_cannot_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_records(monkeypatch, "ppo", "entropy")
    with pytest.raises(ValueError, match="entropy"):
        assemble(config_of("ppo", tmp_path), None)
    _with_records(monkeypatch, "dqn", "values")
    with pytest.raises(ValueError, match="values"):
        assemble(config_of("dqn", tmp_path), None)


# -- state -----------------------------------------------------------------------------------------


def test_state_dict_writes_no_file_and_names_what_commit_writes(tmp_path: Path) -> None:
    trainer = ExperimentManager.setup(config_of("dqn", tmp_path))
    trainer.source.collect(trainer.replay, 40, Progress(0, 192))  # type: ignore[attr-defined]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    state = trainer.state_dict()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    names = state["training"]["extra"]["replay"]["chunks"]
    assert names
    trainer.commit_files()
    written = {path.stem for path in (trainer.run_dir / "replay").glob("*.replay")}
    assert set(names) <= written
    assert trainer.state_dict()["training"]["extra"]["replay"]["chunks"] == names
    trainer.close()


# -- the timing hook -------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_every_part_of_the_loop_is_measured(algo: str, tmp_path: Path) -> None:
    calls: dict[str, int] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[part] = calls.get(part, 0) + 1
            return function(*args, **kwargs)

        return run

    trainer = ExperimentManager.setup(config_of(algo, tmp_path))
    trainer.measure(timed)
    trainer.train()
    assert set(calls) == {"environment", "inference", "storing", "update", "logging"}
    assert calls["environment"] == calls["inference"] == calls["storing"] == 96


def test_the_local_source_restores_exactly(tmp_path: Path) -> None:
    first = assemble(config_of("ppo", tmp_path), None).source
    assert isinstance(first, LocalSource)
    _collect(first, 10)
    state = first.state_dict()
    expected = _collect(first, 30)
    second = assemble(config_of("ppo", tmp_path), None).source
    assert second.load_state_dict(state)
    for (obs, action, _), (other_obs, other_action, _) in zip(
        _collect(second, 30), expected, strict=True
    ):
        np.testing.assert_array_equal(obs, other_obs)
        np.testing.assert_array_equal(action, other_action)
    first.close()
    second.close()
