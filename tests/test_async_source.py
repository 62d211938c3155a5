"""lag: async: workers collect all the time, and what arrives is learnt from in that order."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from conftest import MakeConfig
from direct_workers import DirectWorkers
from rl_training.errors import LostWorkerError
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS, ASYNC
from rl_training.runtime.async_source import REPLAY_BLOCK
from rl_training.runtime.callbacks import Callback, IterationEnd
from rl_training.runtime.workflows import resume_training
from state_compare import final_state, metric_rows

ASYNCHRONOUS = [name for name, entry in ALGORITHMS.items() if ASYNC in entry.lags]
pytestmark = pytest.mark.filterwarnings("ignore:resume of this run will be approximate")


class CountingEnv(gym.Env[Any, Any]):
    """Observes (instance, episode, step); the reward is the step. Ends after 7 or 9 steps."""

    instances = iter(range(10**9))

    def __init__(self, *, continuous: bool = False) -> None:
        self.observation_space = gym.spaces.Box(0, np.inf, (3,), np.float32)
        one: Any = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = one if continuous else gym.spaces.Discrete(2)
        self.instance, self.episode, self.count = next(self.instances), 0, 0

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        return np.array([self.instance, self.episode, self.count], np.float32), {}

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=given.get("seed"))
        self.episode, self.count = self.episode + 1, 0
        return self._seen()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        self.count += 1
        seen, info = self._seen()
        return (
            seen,
            float(self.count),
            self.count == 9,
            self.episode % 2 == 0 and self.count == 7,
            info,
        )


def config_of(algo: str, make_config: MakeConfig, **settings: Any) -> Any:
    return make_config(
        **{
            "algo": algo,
            "engine": "ray",
            "lag": ASYNC,
            "shards": 2,
            "num_envs": 4,
            "eval_episodes": 0,
            "total_timesteps": 1024,
            **settings,
        }
    )


@pytest.mark.parametrize("algo", ASYNCHRONOUS)
@pytest.mark.usefixtures("direct")
def test_it_trains_to_the_end_and_resumes(algo: str, make_config: MakeConfig) -> None:
    rewards = algo in ("impala", "appo")
    more: dict[str, Any] = {"normalize_reward": True} if rewards else {"buffer_size": 4096}
    config = config_of(algo, make_config, normalize_obs=True, **more)
    run = ExperimentManager.setup(config).train().run_dir
    assert json.loads((run / "metadata.json").read_text())["resume"] == "approximate"
    state = final_state(run)
    assert state["training"]["counters"]["global_step"] == 1024
    rows = [row for row in metric_rows(run) if "rollout/policy_lag" in row]
    assert all(row["rollout/policy_lag"] >= 0 for row in rows)
    assert any(row["rollout/policy_lag"] > 0 for row in rows)
    resume_training(run, total_timesteps=2048)
    after = final_state(run)
    assert after["training"]["counters"]["global_step"] == 2048
    name = next(key for key in after["algorithm"]["model"] if key.endswith(".count"))
    seen = [float(one["algorithm"]["model"][name]) for one in (state, after)]
    assert seen == [1024, 2048]  # of every shard, whatever arrived from each
    if rewards:
        source = after["training"]["source"]["shards"]["__shards__"]
        counts = [one["reward_normalizer"]["moments"][0] for one in source]
        assert counts == [2048, 2048]


@pytest.mark.parametrize("algo", ["dqn", "sac"])
@pytest.mark.usefixtures("direct")
def test_a_replay_has_consecutive_steps_and_a_fixed_number_of_updates(
    algo: str, make_config: MakeConfig
) -> None:
    """Updates follow what arrived: gradient_steps per train_freq, whoever was fast."""
    config = config_of(algo, make_config, learning_starts=256, buffer_size=4096, train_freq=4)
    trainer: Any = ExperimentManager.setup(
        config, env_fn=lambda: CountingEnv(continuous=algo == "sac")
    )
    trainer.train()
    assert trainer.learner.num_updates == (1024 - 256) // 4
    assert sum(replay._filled * replay.num_envs for replay in trainer.replays) == 1024
    for replay in trainer.replays:
        assert replay._filled % REPLAY_BLOCK == 0
        batch = replay.sample(512, torch.Generator().manual_seed(1))
        obs, following = (np.asarray(batch[name]) for name in ("obs", "next_obs"))
        assert (following[:, 0] == obs[:, 0]).all()
        assert (following[:, 2] == obs[:, 2] + 1).all()
        assert (following[:, 1] == obs[:, 1]).all()
        assert (np.asarray(batch["rewards"]) == following[:, 2]).all()
        ends = np.asarray(batch["discounts"]) == 0
        assert (ends == (following[:, 2] == 9)).all()


class Slow(DirectWorkers):
    """The worker of shard 1 takes long."""

    def start(self, shard: int) -> Any:
        worker = super().start(shard)
        if shard == 1:
            poll, ready = worker.poll, [0.0]

            def later() -> Any:
                if time.monotonic() < ready[0]:
                    return None
                ready[0] = time.monotonic() + 0.3
                return poll()

            worker.poll = later  # type: ignore[method-assign]
        return worker

    def wait(self, handles: Any, seconds: float) -> None:
        time.sleep(0.001)


def test_a_slow_worker_does_not_hold_up_the_others(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.runtime import ray_workers

    monkeypatch.setattr(ray_workers, "RayWorkers", Slow)
    config = config_of("impala", make_config, total_timesteps=128 * 12)
    trainer: Any = ExperimentManager.setup(config, env_fn=CountingEnv)
    shares: list[tuple[int, ...]] = []
    collect = trainer.source.collect

    def watched(*arguments: Any) -> Any:
        taken = collect(*arguments)
        shares.append(taken.of_shards)
        return taken

    trainer.source.collect = watched
    trainer.train()
    assert (64, 0) in shares  # two rollouts of the fast worker in one iteration
    assert sum(sum(one) for one in shares) == 12 * 64


@pytest.mark.usefixtures("direct")
def test_the_queue_is_bounded(make_config: MakeConfig) -> None:
    """Workers wait for a learner that is slow: two rollouts of each are under way or waiting."""
    config = config_of("impala", make_config, total_timesteps=128 * 5)
    trainer: Any = ExperimentManager.setup(config)
    learn, sizes = trainer._learn, list[int]()

    def slow(*arguments: Any) -> int:
        time.sleep(0.3)
        sizes.append(len(trainer.source._arrived))
        return int(learn(*arguments))

    trainer._learn = slow
    trainer.train()
    assert max(sizes) == 4
    lags = [row.get("rollout/policy_lag", 0) for row in metric_rows(trainer.run_dir)]
    assert max(lags) <= 2


def test_a_lost_worker_is_replaced_and_too_many_failures_end_the_run(
    make_config: MakeConfig, direct: type[DirectWorkers]
) -> None:
    config = config_of("impala", make_config)
    calls = iter(range(10**6))
    direct.broken = staticmethod(lambda: next(calls) in (3, 6))
    assert ExperimentManager.setup(config).train().metrics["global_step"] == 1024
    assert direct.started == 4
    direct.broken = staticmethod(lambda: next(calls) > 20)
    trainer = ExperimentManager.setup(config)
    with pytest.raises(LostWorkerError, match=r"failed 3 times in a row .*: lost"):
        trainer.train()
    assert (trainer.run_dir / "checkpoints" / "last.pt").exists()
    assert not [one for one in threading.enumerate() if one.name == "workers"]


class StopAt(Callback):
    def on_iteration(self, trainer: Any, event: IterationEnd) -> bool:
        del trainer
        return event.step < 512


@pytest.mark.usefixtures("direct")
def test_a_replay_continues_where_its_environments_do(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Blocks in the queue are not in the checkpoint: the replay and the states fit together."""
    del tmp_path
    config = config_of("dqn", make_config, buffer_size=4096, env_id="CartPole-v1")
    run = ExperimentManager.setup(config, callbacks=[StopAt()]).train().run_dir
    resume_training(run, total_timesteps=2048)
    state = final_state(run)
    assert state["training"]["counters"]["global_step"] == 2048
