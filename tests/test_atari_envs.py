"""The Atari pipeline: two backends that show the same, whole games, exact restores."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from conformance_envs import Recorder, ScriptedActor
from rl_training.config import (
    AtariConfig,
    TrainConfig,
    config_from_file,
    config_from_mapping,
)
from rl_training.envs import VectorAdapter, make_adapter, make_env, make_vector_env
from rl_training.errors import ConfigError
from rl_training.eval import make_eval_env
from rl_training.runtime.collector import Collector
from rl_training.types import Progress

ale_py = pytest.importorskip("ale_py")

PLAIN: dict[str, Any] = {"noop_max": 0, "sticky_actions": 0.0}
"""Nothing random, so that backends with generators of their own can be compared."""


def atari_config(vectorization: str = "sync", **overrides: Any) -> TrainConfig[Any]:
    game = overrides.pop("game", "Breakout")
    num_envs = overrides.pop("num_envs", 3)
    settings: dict[str, Any] = {
        "env_id": f"ALE/{game}-v5",
        "preprocessing": "atari",
        "vectorization": vectorization,
        "num_envs": num_envs,
        "atari": overrides,
    }
    return TrainConfig(**settings)


def adapter(vectorization: str = "sync", **overrides: Any) -> Any:
    config = atari_config(vectorization, **overrides)
    return VectorAdapter(make_vector_env(config), config.seed)


def same(first: Any, second: Any) -> bool:
    arrays = zip(first[:6], second[:6], strict=True)
    return first.episodes == second.episodes and all(np.array_equal(a, b) for a, b in arrays)


def random_actions(env: Any, steps: int, seed: int = 0) -> Any:
    choices = env.action_spec.nvec[0]
    return np.random.default_rng(seed).integers(0, choices, (steps, env.num_envs))


PIPELINES: dict[str, dict[str, Any]] = {
    "standard": {},
    "raw": {"terminal_on_life_loss": False, "clip_rewards": False, "fire_on_reset": False},
    "short": {"max_frames": 400, "frame_skip": 3, "frame_stack": 2, "screen_size": 60},
}


@pytest.mark.parametrize(
    ("game", "pipeline"),
    [
        *(("Breakout", pipeline) for pipeline in PIPELINES),
        ("SpaceInvaders", "standard"),
        ("Pong", "standard"),
        *(
            pytest.param(game, pipeline, marks=pytest.mark.full)
            for game in ("SpaceInvaders", "Pong")
            for pipeline in ("raw", "short")
        ),
    ],
)
def test_both_backends_show_the_same_frame_by_frame(game: str, pipeline: str) -> None:
    settings = PIPELINES[pipeline]
    envs = [adapter(kind, game=game, **{**PLAIN, **settings}) for kind in ("sync", "native")]
    assert np.array_equal(*(env.reset() for env in envs))
    ends = 0
    for action in random_actions(envs[0], 700):
        steps = [env.step(action) for env in envs]
        assert same(*steps)
        ends += int((steps[0].terminated | steps[0].truncated).sum())
    assert ends > 0 or (game == "Pong" and "max_frames" not in settings)
    for env in envs:
        env.close()


def test_one_frame_per_step_is_the_same_too() -> None:
    envs = [adapter(kind, **PLAIN, frame_skip=1, num_envs=1) for kind in ("sync", "native")]
    assert np.array_equal(*(env.reset() for env in envs))
    for action in random_actions(envs[0], 200):
        assert same(*(env.step(action) for env in envs))


def test_frames_are_those_of_gymnasiums_wrappers() -> None:
    ours = make_env(atari_config(**PLAIN, fire_on_reset=False, terminal_on_life_loss=False))
    theirs: Any = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    theirs = gym.wrappers.AtariPreprocessing(theirs, noop_max=0)
    theirs = gym.wrappers.FrameStackObservation(theirs, 4, padding_type="zero")
    assert np.array_equal(ours.reset()[0], theirs.reset()[0])
    for action in np.random.default_rng(3).integers(0, 4, 300):
        mine, other = ours.step(int(action)), theirs.step(int(action))
        assert np.array_equal(mine[0], other[0])
        assert mine[1] == np.sign(other[1])
        assert mine[2:4] == other[2:4]
        if mine[2]:
            assert np.array_equal(ours.reset()[0], theirs.reset()[0])


@pytest.mark.parametrize("kind", ["sync", "native", "async"])
def test_observations_are_bytes_channel_first_and_stable(kind: str) -> None:
    env = adapter(kind, num_envs=2)
    first = env.reset()
    assert isinstance(first, np.ndarray)
    kept = first.copy()
    assert (first.shape, first.dtype) == ((2, 4, 84, 84), np.uint8)
    assert not first[:, :3].any(), "before a game's first frame is black"
    assert first[:, 3].any()
    step = env.step(np.zeros(2, np.int64))
    assert np.array_equal(first, kept), "what was handed out does not change"
    assert np.array_equal(step.obs[:, :3], first[:, 1:])
    assert env.frame_stack == 4
    env.close()


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_a_lost_life_ends_the_episode_and_not_the_game(kind: str) -> None:
    env = adapter(kind, sticky_actions=0.0, num_envs=1)
    obs = env.reset()
    lives = 0
    for action in random_actions(env, 1000):
        step = env.step(action)
        if step.terminated[0] and not step.episodes:
            lives += 1
            assert np.array_equal(step.obs, step.final_obs), "the game goes on where it stood"
            assert np.array_equal(step.obs[:, :3], obs[:, 1:])
        obs = step.obs
        if step.episodes:
            assert lives == 4, "Breakout has five lives; the last ends the game"
            assert not step.obs[:, :3].any()
            assert step.final_obs[:, :3].any()
            break
    else:
        pytest.fail("no game ended")


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_an_actor_hears_of_a_lost_life_as_of_any_ending(kind: str) -> None:
    env = adapter(kind, sticky_actions=0.0, num_envs=2)
    actions = random_actions(env, 200)
    recorder, actor = Recorder(), ScriptedActor(lambda _, call: actions[call])
    Collector(env, actor, recorder).collect(200, Progress(0, 200))
    steps = [step for _, _, step in recorder.rows]
    assert any(step.cut.any() and not step.episodes for step in steps)
    assert np.array_equal(actor.ended, [step.cut for step in steps if step.cut.any()])
    env.close()


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_scores_are_raw_and_of_whole_games_while_rewards_are_clipped(kind: str) -> None:
    env = adapter(kind, game="SpaceInvaders", sticky_actions=0.0, num_envs=2)
    env.reset()
    rewards, scores = set(), []
    for action in random_actions(env, 900):
        step = env.step(action)
        rewards |= set(step.reward.tolist())
        scores += [episode.ret for episode in step.episodes]
    assert rewards == {0.0, 1.0}
    assert scores
    assert all(score % 5 == 0 and score > 5 for score in scores), "points of the game"


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_a_game_that_is_cut_short_is_truncated_with_its_true_last_frame(kind: str) -> None:
    env = adapter(kind, **PLAIN, max_frames=200, num_envs=2, fire_on_reset=False)
    obs = env.reset()
    for number, action in enumerate(np.zeros((50, 2), np.int64)):
        step = env.step(action)
        assert step.truncated.all() == (number == 49)
        assert not step.terminated.any()
        if number < 49:
            obs = step.obs
    assert np.array_equal(step.final_obs[:, :3], obs[:, 1:])
    assert not step.obs[:, :3].any()
    assert [episode.length for episode in step.episodes] == [50, 50]


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_no_ops_and_seeds_make_games_differ_and_repeat(kind: str) -> None:
    def starts(seed: int) -> np.ndarray[Any, Any]:
        config = atari_config(kind, num_envs=6).with_overrides(seed=seed)
        env: Any = VectorAdapter(make_vector_env(config), seed)
        first = env.reset()
        steps = [env.step(action).obs for action in random_actions(env, 20)]
        return np.stack([first, *steps])

    assert np.array_equal(starts(1), starts(1))
    assert not np.array_equal(starts(1), starts(2))
    one = starts(1)
    assert len({one[:, i].tobytes() for i in range(6)}) > 1


def test_sticky_actions_follow_the_id_unless_they_are_set() -> None:
    def frames(env_id: str, sticky: float | None) -> bytes:
        config = config_from_mapping(
            {
                "env_id": env_id,
                "preprocessing": "atari",
                "vectorization": "native",
                "num_envs": 1,
                "atari": {"noop_max": 0, "sticky_actions": sticky},
            }
        )
        env: Any = VectorAdapter(make_vector_env(config), 1)
        env.reset()
        actions = random_actions(env, 60)
        return b"".join(env.step(action).obs.tobytes() for action in actions)

    never = frames("ALE/Breakout-v5", 0.0)
    assert frames("BreakoutNoFrameskip-v4", None) == never
    assert frames("ALE/Breakout-v5", None) == frames("ALE/Breakout-v5", 0.25) != never


@pytest.mark.parametrize("seed_interval", [60, 10_000])
@pytest.mark.parametrize("kind", ["sync", "async", "native"])
def test_games_come_back_bit_for_bit(kind: str, seed_interval: int) -> None:
    settings: dict[str, Any] = {
        "sticky_actions": 0.25,
        "seed_interval": seed_interval,
        "max_frames": 600,
    }
    env = adapter(kind, **settings)
    assert env.exactly_resumable
    obs = env.reset()
    actions = random_actions(env, 900)
    for action in actions[:500]:
        obs = env.step(action).obs
    state = env.state_dict()
    onward = [env.step(action) for action in actions[500:]]
    assert sum(len(step.episodes) for step in onward) > 1
    env.close()

    again = adapter(kind, **settings)
    restored, exact = again.load_state_dict(state, obs)
    assert exact
    assert np.array_equal(restored, obs)
    for action, expected in zip(actions[500:], onward, strict=True):
        assert same(again.step(action), expected)
    again.close()


def test_a_native_vector_that_is_never_seeded_again_says_it_cannot_come_back() -> None:
    env = adapter("native", seed_interval=0)
    assert not env.exactly_resumable
    obs = env.reset()
    for action in random_actions(env, 30):
        obs = env.step(action).obs
    state = env.state_dict()
    _, exact = adapter("native", seed_interval=0).load_state_dict(state, obs)
    assert not exact


def test_a_wrong_action_in_the_history_is_noticed() -> None:
    env = adapter("native", **PLAIN)
    obs = env.reset()
    for action in random_actions(env, 40):
        obs = env.step(action).obs
    state = env.state_dict()
    state["envs"]["history"][20] = (state["envs"]["history"][20] + 2) % 4
    _, exact = adapter("native", **PLAIN).load_state_dict(state, obs)
    assert not exact


def test_evaluation_plays_whole_games_for_raw_scores() -> None:
    for kind in ("sync", "native"):
        env: Any = make_eval_env(atari_config(kind, game="SpaceInvaders", sticky_actions=0.0), 2)
        env.reseed(5)
        ends, rewards = 0, set()
        for action in random_actions(env, 800):
            step = env.step(action)
            ends += int((step.terminated | step.truncated).sum())
            rewards |= set(step.reward.tolist())
            assert len(step.episodes) == int((step.terminated | step.truncated).sum())
        assert ends > 0
        assert max(rewards) >= 5


@pytest.mark.parametrize("kind", ["sync", "native"])
def test_an_evaluation_depends_on_its_seed_and_not_on_the_one_before(kind: str) -> None:
    env: Any = make_eval_env(atari_config(kind), 2)

    def play() -> list[bytes]:
        env.reseed(5)
        return [env.step(action).obs.tobytes() for action in random_actions(env, 200)]

    first = play()
    for action in random_actions(env, 77, seed=9):
        env.step(action)
    assert play() == first


def test_halves_step_like_one_vector() -> None:
    config = atari_config("native", sticky_actions=0.0, num_envs=4)
    whole: Any = make_adapter(config)
    halves: Any = make_adapter(config.with_overrides(overlap=True))
    first_seen = whole.reset()
    assert np.array_equal(first_seen, halves.reset())
    assert [half.num_envs for half in halves.halves] == [2, 2]
    obs: Any = None
    for action in random_actions(whole, 400):
        first, second = whole.step(action), halves.step(action)
        assert same(first, second)
        obs = second.obs
    again: Any = make_adapter(config.with_overrides(overlap=True))
    restored, exact = again.load_state_dict(halves.state_dict(), obs)
    assert exact
    assert np.array_equal(restored, obs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_id": "CartPole-v1"}, "CartPole-v1 is not an Atari game"),
        ({"env_kwargs": {"frameskip": 2}}, "env_kwargs.frameskip"),
        ({"env_kwargs": {"max_episode_steps": 9}}, "env_kwargs.max_episode_steps"),
        ({"env_kwargs": {"continuous": True}}, "does not go with preprocessing: atari"),
        (
            {"env_kwargs": {"full_action_space": "yes"}, "vectorization": "native"},
            "cannot make ALE/Breakout-v5",
        ),
        ({"preprocessing": "none", "vectorization": "native"}, "with preprocessing: atari"),
        ({"env_kwargs": {"mode": 4}, "vectorization": "native"}, "unknown to ale-py's native"),
        ({"env_id": "ALE/Brekout-v5"}, "Did you mean 'ALE/Breakout-v5'"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    config = config_from_mapping(
        {"env_id": "ALE/Breakout-v5", "preprocessing": "atari", **settings}
    )
    with pytest.raises(ConfigError, match=message):
        make_vector_env(config, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"atari": {"noop_max": 3}}, "do nothing without preprocessing"),
        ({"preprocessing": "atari", "atari": {"noop": 3}}, "Did you mean 'noop_max'"),
        ({"preprocessing": "atari", "atari": {"sticky_actions": 2.0}}, "atari.sticky_actions"),
        ({"preprocessing": "atari", "atari": {"frame_skip": 0}}, "atari.frame_skip"),
        ({"preprocessing": "atari", "atari": {"max_frames": 2}}, "atari.max_frames"),
        ({"overlap": True}, "overlap"),
        (
            {
                "preprocessing": "atari",
                "overlap": True,
                "num_envs": 3,
                "vectorization": "native",
            },
            "num_envs",
        ),
    ],
)
def test_a_mistake_in_the_config_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_mapping({"env_id": "ALE/Breakout-v5", **settings})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl_training\[atari\]'"):
        make_vector_env(atari_config(), 1)


def test_env_fn_does_not_go_with_the_pipeline() -> None:
    def cartpole() -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1")

    with pytest.raises(ConfigError, match="env_fn"):
        make_vector_env(atari_config(), env_fn=cartpole)
    halves = atari_config("native", num_envs=2).with_overrides(overlap=True)
    with pytest.raises(ConfigError, match="env_fn"):
        make_adapter(halves, env_fn=cartpole)


def wrapped(path: str, **kwargs: Any) -> Any:
    config = atari_config(num_envs=2, sticky_actions=0.0)
    config = config.with_overrides(wrappers=[{"path": path, "kwargs": kwargs}])
    return VectorAdapter(make_vector_env(config), config.seed)


def test_an_episode_that_a_wrapper_cuts_short_is_counted() -> None:
    env = wrapped("gymnasium.wrappers:TimeLimit", max_episode_steps=30)
    env.reset()
    lengths = []
    for action in np.zeros((60, 2), np.int64):
        step = env.step(action)
        lengths += [episode.length for episode in step.episodes if step.truncated.any()]
    assert lengths, "an evaluation would wait for ever"


def test_under_a_users_wrapper_frames_are_not_trusted_nor_resume_promised() -> None:
    env = wrapped("gymnasium.wrappers:ClipReward", min_reward=-1, max_reward=1)
    assert env.frame_stack == 1
    assert not env.exactly_resumable
    plain = adapter(num_envs=1)
    assert plain.frame_stack == 4
    assert plain.exactly_resumable


def test_workers_do_not_greet(capfd: pytest.CaptureFixture[str]) -> None:
    env = adapter("async", num_envs=2)
    env.reset()
    env.close()
    assert capfd.readouterr().err == ""


def test_a_preset_can_do_without_the_pipeline() -> None:
    config = config_from_file("ppo/pong_atari")
    bare = config.with_overrides(preprocessing="none", vectorization="sync")
    assert bare.atari == AtariConfig()


def test_settings_of_the_pipeline_are_laid_over_a_presets_one_by_one(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: ppo/pong_atari\natari:\n  frame_skip: 3\n")
    config = config_from_file(path)
    assert (config.atari.frame_skip, config.atari.sticky_actions) == (3, 0.0)
    assert config.with_overrides(atari={"noop_max": 1}).atari.frame_skip == 3


def test_without_the_pipeline_a_game_is_as_gymnasium_makes_it() -> None:
    config: TrainConfig[Any] = TrainConfig(env_id="ALE/Breakout-v5", num_envs=1)
    env: Any = VectorAdapter(make_vector_env(config), 1)
    assert env.obs_spec.leaves[""].given == (210, 160, 3)
    assert env.obs_spec.leaves[""].shape == (3, 210, 160)
    raw, _ = gym.make("ALE/Breakout-v5").reset(seed=3)
    assert np.array_equal(env.obs_spec.cast(raw), np.moveaxis(raw, -1, 0))
    assert env.frame_stack == 1


def test_other_actions_of_a_game() -> None:
    config = atari_config("native", num_envs=1).with_overrides(
        env_kwargs={"full_action_space": True}
    )
    for kind in ("native", "sync"):
        env = VectorAdapter(make_vector_env(config.with_overrides(vectorization=kind)), 1)
        assert env.action_spec.nvec == (18,)
        env.reset()
        env.step(np.array([17]))
