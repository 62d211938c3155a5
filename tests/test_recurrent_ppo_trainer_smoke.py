"""RecurrentPPO on the runtime: memory is learnt, survives a stop, and is handed to the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training.contrib
from conftest import MakeConfig
from rl_training.checkpointing import load_checkpoint
from rl_training.cli import main
from rl_training.config import TrainConfig
from rl_training.contrib import RecurrentPPO
from rl_training.envs import VectorAdapter
from rl_training.envs.wrappers import HideVelocities
from rl_training.errors import ConfigError
from rl_training.eval import evaluate_actor, make_eval_env
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.recurrent_ppo_trainer import train_recurrent_ppo
from rl_training.runtime.workflows import evaluate_checkpoint, load_policy, resume_training
from rl_training.types import Progress
from state_compare import assert_same_run
from test_resume import StopAt

HIDDEN = ["rl_training.envs.wrappers:HideVelocities"]
RECALL: dict[str, dict[str, Any]] = {
    "recurrent_ppo": {"num_steps": 40, "sequence_length": 10, "lstm_size": 32},
    "drqn": {
        "learning_starts": 256,
        "train_freq": 4,
        "batch_sequences": 16,
        "buffer_size": 4000,
        "sequence_length": 8,
        "burn_in": 0,
        "lstm_size": 32,
        "target_update_interval_steps": 100,
        "exploration_fraction": 0.4,
    },
}
BOTH = pytest.mark.parametrize("algo", RECALL)


@BOTH
def test_it_learns_to_recall_the_first_observation(algo: str, make_config: MakeConfig) -> None:
    """Without memory the best that can be done is to be right half of the time."""
    config = make_config(
        algo=algo,
        env_id="probe/Recall-v0",
        num_envs=8,
        total_timesteps=16_000,
        learning_rate=5e-3,
        gamma=0.9,
        eval_episodes=40,
        **RECALL[algo],
    )
    result = ExperimentManager.setup(config).train()
    assert result.metrics["eval/return_min"] == 1.0


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_without_memory_it_cannot_be_learnt(algo: str, make_config: MakeConfig) -> None:
    config = make_config(
        algo=algo, env_id="probe/Recall-v0", num_envs=8, total_timesteps=16_000, eval_episodes=40
    )
    result = ExperimentManager.setup(config).train()
    assert abs(result.metrics["eval/return_mean"]) < 0.7


@BOTH
@pytest.mark.parametrize("vectorization", ["sync", pytest.param("native", marks=pytest.mark.full)])
def test_it_resumes_exactly_in_the_middle_of_an_episode(
    algo: str, vectorization: str, make_config: MakeConfig
) -> None:
    wrappers = HIDDEN if vectorization == "sync" else []
    knobs = {"num_steps": 8, "sequence_length": 4} if algo == "recurrent_ppo" else {}
    config = make_config(
        algo=algo, total_timesteps=1024, wrappers=wrappers, vectorization=vectorization, **knobs
    )
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(300)]).train()
    assert part.interrupted
    memory = load_checkpoint(part.checkpoint_path)["training"]["source"]["actor"]["memory"]["state"]
    assert memory.abs().sum() > 0  # there is something to remember at the stop
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)


@BOTH
def test_what_is_remembered_is_forgotten_where_environments_cannot_be_brought_back(
    algo: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ExperimentManager.setup(make_config(algo=algo)).train()
    trainer: Any = ExperimentManager.resume(result.run_dir)
    assert trainer.source.actor.memory.state.any()
    trainer.close()
    real = VectorAdapter.load_state_dict
    monkeypatch.setattr(VectorAdapter, "load_state_dict", lambda *args: (real(*args)[0], False))
    with pytest.warns(UserWarning, match="this resume is approximate"):
        trainer = ExperimentManager.resume(result.run_dir)
    assert not trainer.source.actor.memory.state.any()
    trainer.close()


@BOTH
def test_the_actor_forgets_where_episodes_end_and_nowhere_else(
    algo: str, make_config: MakeConfig
) -> None:
    trainer: Any = ExperimentManager.setup(make_config(algo=algo, num_envs=4))
    states, cuts = [], []
    buffer = trainer.buffer if algo == "recurrent_ppo" else trainer.replay
    real = buffer.add

    def add(obs: Any, action: Any, record: Any, step: Any) -> None:
        states.append(np.array(record["state"]))
        cuts.append(step.cut)
        real(obs, action, record, step)

    buffer.add = add
    trainer.iterate(Progress(0, trainer.total))
    trainer.close()
    assert not states[0].any()
    seen = np.stack(cuts)
    assert seen.any()
    for t in range(1, len(states)):
        for env in range(4):
            assert states[t][env].any() != seen[t - 1, env]


@BOTH
def test_evaluation_starts_every_episode_without_memory(algo: str, make_config: MakeConfig) -> None:
    config = make_config(algo=algo)
    result = ExperimentManager.setup(config).train()
    policy = load_policy(result.run_dir)
    env = make_eval_env(config, 3, None)
    actor: Any = policy._spec.eval_actor(policy.algorithm, torch.device("cpu"), None)
    first = evaluate_actor(actor, env, num_episodes=6, seed=3)
    actor.memory.set(np.full((3, policy.algorithm.module.state_size), 5.0))
    assert evaluate_actor(actor, env, num_episodes=6, seed=3) == first
    env.close()
    assert evaluate_checkpoint(result.run_dir, 6, seed=3).returns == (
        evaluate_checkpoint(result.run_dir, 6, seed=3).returns
    )


def test_predict_takes_and_returns_what_is_remembered(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    model = RecurrentPPO(make_config(algo="recurrent_ppo", wrappers=HIDDEN))
    model.learn()
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 3, 2)).astype(np.float32)
    state: Any = None
    for t in range(5):
        actions, state = model.predict(rows[t], state)
        assert actions.shape == (3,)
        assert state.shape == (3, 4 * 16)
    # One observation at a time gives the same as a batch of them.
    single: Any = None
    for t in range(5):
        action, single = model.predict(rows[t, 1], single)
    np.testing.assert_allclose(single, state[1], atol=1e-6)
    assert action == actions[1]
    # Where an episode starts, nothing is remembered, whatever is handed in.
    _, fresh = model.predict(rows[0], state, episode_start=np.array([True, False, True]))
    _, start = model.predict(rows[0])
    np.testing.assert_allclose(fresh[[0, 2]], start[[0, 2]], atol=1e-6)
    assert not np.allclose(fresh[1], start[1])
    sampled = {int(model.predict(rows[0, 0], deterministic=False)[0]) for _ in range(50)}
    assert sampled == {0, 1}
    loaded = RecurrentPPO.load(model.save(tmp_path / "policy"))
    np.testing.assert_array_equal(loaded.predict(rows[0])[1], start)
    assert model.evaluate(4, seed=1).returns == loaded.evaluate(4, seed=1).returns


def test_predict_refuses_what_does_not_fit(make_config: MakeConfig) -> None:
    model = RecurrentPPO(make_config(algo="recurrent_ppo"))
    obs = np.zeros((2, 4), np.float32)
    with pytest.raises(ConfigError, match=r"state has shape \(3,\); expected \(2, 64\)"):
        model.predict(obs, np.zeros(3))
    for wrong in ("abc", [[1.0], [2.0, 3.0]]):
        with pytest.raises(ConfigError, match="state must be numbers"):
            model.predict(obs, wrong)
    with pytest.raises(ConfigError, match="state holds a NaN"):
        model.predict(obs, np.full((2, 64), np.nan))
    with pytest.raises(ConfigError, match=r"episode_start has shape \(3,\); expected \(2,\)"):
        model.predict(obs, None, np.zeros(3, bool))


def test_images_are_remembered_too(make_config: MakeConfig) -> None:
    class Flash(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, **kwargs: Any) -> Any:
            super().reset(seed=kwargs.get("seed"))
            self.t = 0
            self.bright = int(self.np_random.integers(2))
            return np.full((36, 36, 1), 255 * self.bright, np.uint8), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            right = 1.0 if action == self.bright else -1.0
            grey = np.full((36, 36, 1), 128, np.uint8)
            return grey, right * (self.t == 3), self.t == 3, False, {}

    config = make_config(
        algo="recurrent_ppo",
        num_envs=8,
        num_steps=24,
        sequence_length=12,
        total_timesteps=6144,
        learning_rate=3e-3,
        feature_size=16,
        eval_episodes=20,
        device="cpu",
    )
    result = ExperimentManager.setup(config, env_fn=Flash).train()
    assert result.metrics["eval/return_min"] == 1.0


def test_it_is_never_a_silent_variant_of_ppo(make_config: MakeConfig) -> None:
    assert rl_training.contrib.train_recurrent_ppo is train_recurrent_ppo
    assert rl_training.RecurrentPPO is RecurrentPPO
    with pytest.raises(ConfigError, match="algo: ppo"):
        train_recurrent_ppo(make_config(algo="ppo"))
    with pytest.raises(ConfigError, match="algo: ppo"):
        RecurrentPPO(make_config(algo="ppo"))
    assert not make_config(algo="ppo", lstm_size=64).has_memory


def test_the_command_line_trains_it_on_hidden_velocities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--total-timesteps", "512", "--output-dir", str(tmp_path), "--eval-episodes", "2"]
    assert main(["train", "recurrent_ppo/cartpole_no_velocity", *flags]) == 0
    (run,) = tmp_path.iterdir()
    assert main(["eval", "--checkpoint", str(run), "--num-episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env_id", "shown"),
    [("CartPole-v1", [0, 2]), ("Pendulum-v1", [0, 1]), ("LunarLander-v3", [0, 1, 4, 6, 7])],
)
def test_velocities_are_hidden(env_id: str, shown: list[int]) -> None:
    if env_id.startswith("Lunar"):
        pytest.importorskip("Box2D")
    env = HideVelocities(gym.make(env_id))
    plain = gym.make(env_id)
    obs, _ = env.reset(seed=3)
    whole, _ = plain.reset(seed=3)
    assert obs.tolist() == whole[shown].tolist()
    action = plain.action_space.sample()
    assert env.step(action)[0].tolist() == plain.step(action)[0][shown].tolist()
    assert env.observation_space.contains(obs)


def test_velocities_of_another_environment_are_named_by_the_user() -> None:
    with pytest.raises(ConfigError, match=r"HideVelocities does not know Recall.*keep"):
        HideVelocities(gym.make("probe/Recall-v0"))
    assert HideVelocities(gym.make("probe/Recall-v0"), keep=[0]).observation_space.shape == (1,)
    for keep in ([], [1], [-1], [0.5]):
        with pytest.raises(ConfigError, match="'keep' must name some of 0 to 0"):
            HideVelocities(gym.make("probe/Recall-v0"), keep=keep)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a vector observation"):
        HideVelocities(gym.make("probe/MaskedActions-v0"))


def test_both_are_listed() -> None:
    for algo in RECALL:
        config: TrainConfig[Any] = TrainConfig(algo=algo)
        assert config.algo_kwargs.lstm_size == 64
