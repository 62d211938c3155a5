"""Environments on a GPU: graphs compute what eager code does, and the host does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from conftest import MakeConfig, any_env
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.workflows import load_policy
from rl_training.types import Progress
from test_device_source import KNOBS, ON_DEVICE, config_for

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:resume of this run will be approximate"),
]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TOTAL = 10**6


@pytest.fixture
def trainers(make_config: MakeConfig) -> Iterator[Any]:
    made: list[Any] = []

    def make(algo: str, **settings: Any) -> Any:
        config = config_for(make_config, algo, device="cuda", **settings)
        made.append(ExperimentManager.setup(config, run_dir=None))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def iterate(trainer: Any, count: int) -> list[dict[str, float]]:
    rows = []
    for _ in range(count):
        done = trainer.iterate(Progress(trainer.global_step, TOTAL))
        trainer.global_step += done.steps
        rows.append(done.metrics)
    return rows


@pytest.mark.parametrize("algo", ON_DEVICE)
def test_graphs_compute_what_eager_code_does(algo: str, trainers: Any) -> None:
    """From equal weights, with equal random numbers, until rounding has grown."""
    settings = {"total_timesteps": TOTAL, "learning_rate": 1e-5}
    if algo in ("dqn", "sac", "td3"):
        settings["exploration_final_eps" if algo == "dqn" else "learning_starts"] = (
            1.0 if algo == "dqn" else 3000
        )
    modes = ("cudagraph", "eager")
    graphs, eager = (trainers(algo, acceleration=mode, **settings) for mode in modes)
    for one in (graphs, eager):
        iterate(one, 6)
    first, second = (one.source.state_dict() for one in (graphs, eager))
    assert first["steps"] == second["steps"]
    torch.testing.assert_close(first["actor"]["rng"], second["actor"]["rng"])
    if algo in ("sac", "td3", "dqn"):  # uniform actions: the same transitions
        torch.testing.assert_close(
            graphs.replay.newest_observations(5).obs, eager.replay.newest_observations(5).obs
        )
        assert graphs.learner.num_updates == eager.learner.num_updates
        assert graphs.replay.ring_state() == eager.replay.ring_state()
        assert int(graphs.replay._steps_there) == graphs.replay._steps
    weights = [one.learner.module.state_dict() for one in (graphs, eager)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("algo", ON_DEVICE)
def test_the_host_waits_at_most_twice_in_an_iteration(algo: str, trainers: Any) -> None:
    trainer = trainers(algo, acceleration="cudagraph", total_timesteps=TOTAL)
    # PPG's auxiliary phase reads its own metrics: once more in every second iteration.
    phases = 0.5 if algo == "ppg" else 0.0
    iterate(trainer, 10)
    counts = []
    for iterations in (2, 6):  # the profiler itself waits when it starts and stops
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            iterate(trainer, iterations)
        counts.append(sum(e.count for e in found.key_averages() if e.key in WAITS))
    assert (counts[1] - counts[0]) / 4 <= 2 + phases, counts


@pytest.mark.parametrize("algo", ON_DEVICE)
def test_it_is_chosen_and_its_policy_moves_to_the_cpu(algo: str, make_config: MakeConfig) -> None:
    config = config_for(make_config, algo, device="auto", eval_episodes=1)
    trainer = ExperimentManager.setup(config)
    assert trainer.device.type == "cuda"
    assert trainer.config.acceleration == "cudagraph"
    result = trainer.train()
    obs = torch.randn(6, 4 if any_env(algo) == "CartPole-v1" else 3).numpy()
    here, there = (load_policy(result.run_dir, device=place) for place in ("cpu", "cuda"))
    assert abs(here.act(obs) - there.act(obs)).max() < 1e-4


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_graphs_follow_a_copy_that_moves(algo: str, make_config: MakeConfig) -> None:
    """The pool of final observations grows: graphs that read the old one are made again."""
    settings = {**KNOBS[algo], "buffer_size": 4000, "replay_device": "accelerator"}
    settings |= {"env_kwargs": {"max_episode_steps": 5}, "total_timesteps": 4096, "n_step": 1}
    config = make_config(
        algo=algo, env_id=any_env(algo), device="cuda", acceleration="cudagraph", **settings
    )
    trainer: Any = ExperimentManager.setup(config, run_dir=None)
    assert isinstance(trainer.replay, ReplayBuffer)
    before = None
    for _ in range(4):
        iterate(trainer, 1)
        before = before or trainer.replay.place
    assert trainer.replay.place != before
    assert trainer.learner._places == [trainer.replay.place]
    generator = torch.Generator().manual_seed(1)
    recipe = trainer.replay.sample(64, generator)["recipe"]
    there = trainer.replay.gather({k: v.cuda() for k, v in recipe.items()})
    trainer.replay._gathers_inside, trainer.replay._copy = False, None
    here = trainer.replay.sample(64, generator.manual_seed(1))
    for name, tensor in there.items():
        assert torch.equal(tensor.cpu(), here[name])
    trainer.close()
