"""`check_env` and ``rl-training check-env``, and environments with a method ``action_masks()``."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import rl_training
from conftest import ONLINE, MakeConfig, takes_discrete
from rl_training import check_env, cli
from rl_training.envs import VectorAdapter, make_env, make_vector_env
from rl_training.envs.env_report import EnvReport
from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS
from rl_training.runtime.workflows import load_policy, resume_training
from state_compare import assert_same_run
from test_resume import StopAt


class Walk(gym.Env[Any, Any]):
    """Episodes of 5 to 14 steps. Subclasses break one thing each."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(5, 15))
        return self.observe(), {}

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def reward(self) -> Any:
        return 1.0

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.observe(), self.reward(), self.left == 0, False, {}


class OtherShape(Walk):
    def observe(self) -> Any:
        return np.zeros(4 if self.left == 2 else 3, np.float32)


class Float64(Walk):
    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 3)


class OutsideBounds(Walk):
    def observe(self) -> Any:
        return np.array([0.0, 5.0, 0.0], np.float32)


class NotANumber(Walk):
    def observe(self) -> Any:
        return np.array([0.0, np.nan, 0.0], np.float32)


class FourValues(Walk):
    def step(self, action: Any) -> Any:
        return self.observe(), 1.0, False, {}


class ObservationAlone(Walk):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoSeed(Walk):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NoReward(Walk):
    def reward(self) -> Any:
        return None


class InfiniteReward(Walk):
    def reward(self) -> Any:
        return np.inf


class ArrayOfReward(Walk):
    def reward(self) -> Any:
        return np.ones(1)


class ZeroReward(Walk):
    def reward(self) -> Any:
        return 0.0


class NumbersForFlags(Walk):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, int(terminated), 0, info


class TextForFlags(Walk):
    def step(self, action: Any) -> Any:
        return self.observe(), 1.0, "no", False, {}


class Raises(Walk):
    def step(self, action: Any) -> Any:
        raise RuntimeError("the simulator crashed")


class Exits(Walk):
    def step(self, action: Any) -> Any:
        sys.exit(3)


class Sized(Walk):
    def __init__(self, size: int) -> None:
        self.size = size


class UnseededReset(Walk):
    def observe(self) -> Any:
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32)


class UnseededSteps(Walk):
    def reward(self) -> Any:
        return np.random.default_rng().uniform()


class Remembers(Walk):
    """The second instance differs from the first."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)

    def reward(self) -> Any:
        return float(self.number)


class Endless(Walk):
    def step(self, action: Any) -> Any:
        return self.observe(), 1.0, False, False, {}


class Clockwork(Walk):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        self.left = 20
        return obs, info


class Unbounded(Walk):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class NothingToDraw(Walk):
    metadata: dict[str, Any] = {}


class LargeValues(Walk):
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def observe(self) -> Any:
        return np.full(3, 5000.0, np.float32)


class Asserts(Walk):
    def __init__(self) -> None:
        raise AssertionError


class Spaceless(gym.Env[Any, Any]):
    pass


class TextField(Walk):
    """Observations of the form that MiniGrid returns."""

    observation_space = spaces.Dict(
        {
            "direction": spaces.Discrete(4),
            "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "mission": spaces.Text(50),
        }
    )

    def observe(self) -> Any:
        return {"direction": 1, "image": np.ones((7, 7, 3), np.uint8), "mission": "go"}


class SmallImage(Walk):
    observation_space = spaces.Box(0, 255, (7, 7, 3), np.uint8)

    def observe(self) -> Any:
        return np.ones((7, 7, 3), np.uint8)


class OutsideDiscrete(Walk):
    observation_space = spaces.Discrete(4)

    def observe(self) -> Any:
        return 4


class TextActions(Walk):
    action_space = spaces.Text(4)


DISCRETE = tuple(algo for algo in ONLINE if takes_discrete(algo))


def severities(report: EnvReport) -> dict[str, str]:
    return {finding.check: finding.severity for finding in report.findings}


def test_an_environment_without_fault_has_no_findings() -> None:
    report = check_env(Walk)
    assert report.ok
    assert report.findings == ()
    assert report.name == "Walk"
    assert report.algorithms == DISCRETE
    assert set(report.refused) == {"sac", "td3"}
    assert report.played.steps == 1000
    assert report.played.steps_per_second > 100
    assert all(5 <= length < 15 for length in report.played.lengths)
    assert report.played.returns == report.played.lengths
    assert str(report).splitlines()[-1] == f"Walk can be trained on: {', '.join(DISCRETE)}"


class NewActionSpace(Walk):
    """Makes a new action space in every reset, and is deterministic."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.action_space = spaces.Discrete(2)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(action), *rest


def test_an_environment_may_make_its_action_space_anew() -> None:
    assert not [f for f in check_env(NewActionSpace).findings if f.check == "determinism"]


@pytest.mark.parametrize(
    ("make", "severity", "check", "message"),
    [
        (OtherShape, "error", "step 7", "shape (3,), dtype float32; got an array of shape (4,)"),
        (NotANumber, "error", "reset", "finite; got NaN"),
        (FourValues, "error", "step 1", "return 5 values"),
        (ObservationAlone, "error", "reset", "return (observation, info); got an array"),
        (NoSeed, "error", "reset", "accept seed and options"),
        (NoReward, "error", "step 1", "the reward to be a number; got None"),
        (InfiniteReward, "error", "step 1", "finite; got inf"),
        (TextForFlags, "error", "step 1", "terminated to be True or False; got 'no'"),
        (Raises, "error", "step 1", "RuntimeError: the simulator crashed (in "),
        (Exits, "error", "step 1", "expected no exception; got sys.exit(3) (in "),
        (
            Asserts,
            "error",
            "constructor",
            "(Asserts) failed in its constructor: AssertionError in ",
        ),
        (Spaceless, "error", "spaces", "observation_space must be a gymnasium space"),
        (TextField, "error", "spaces", "filter_keys: ['direction', 'image']}}, 'gymnasium.wrapp"),
        (SmallImage, "error", "image size", "at least 36 x 36; got 7 x 7"),
        (OutsideDiscrete, "error", "reset", "the observation contains 4, but its space has"),
        (TextActions, "error", "spaces", "action space Text"),
        (
            Float64,
            "warning",
            "dtype",
            "array of float32; got an array of shape (3,), dtype float64",
        ),
        (OutsideBounds, "warning", "bounds", "5.0 at index (1,), with bounds -1.0 and 1.0"),
        (ArrayOfReward, "warning", "reward type", "a float; got an array of shape (1,)"),
        (NumbersForFlags, "warning", "terminated", "True or False; got 0"),
        (UnseededReset, "warning", "seeding", "equal observations"),
        (UnseededSteps, "warning", "determinism", "a difference at step 1"),
        (Remembers, "warning", "determinism", "of two environments"),
        (Endless, "warning", "end of episodes", "no end within 1,000 steps"),
        (Clockwork, "warning", "truncation", "after exactly 20 steps"),
        (Unbounded, "note", "action bounds", "SAC and TD3"),
        (NothingToDraw, "note", "render modes", "'rgb_array'"),
        (ZeroReward, "note", "reward", "0 in all 1,000 random steps"),
        (LargeValues, "note", "scale", "values up to 5000"),
    ],
)
def test_a_fault_is_found(make: Callable[[], Any], severity: str, check: str, message: str) -> None:
    report = check_env(make)
    assert severities(report).get(check) == severity, report
    finding = next(one for one in report.findings if one.check == check)
    assert message in str(finding)
    assert message.partition(";")[0] in " ".join(str(report).split())
    assert report.ok == (severity != "error")
    others = [one for one in report.findings if one.severity == "error" and one is not finding]
    assert not others


def test_advice_belongs_to_its_fault() -> None:
    advice = {make: check_env(make).errors[0].advice for make in (FourValues, NoReward, OtherShape)}
    assert advice[FourValues] == ""
    assert advice[NoReward] == "Return a finite float."
    assert advice[OtherShape].startswith("Return what observation_space describes")

    class NamesRewards(Walk):
        def step(self, action: Any) -> Any:
            raise RuntimeError("the reward is not known")

    assert check_env(NamesRewards).errors[0].advice == ""


def test_an_environment_that_never_ends_is_limited_by_the_advised_setting() -> None:
    advice = check_env(Endless).warnings[0].advice
    path, kwargs = "gymnasium.wrappers:TimeLimit", {"max_episode_steps": 1000}
    assert f"wrappers: [{{path: '{path}', kwargs: {{max_episode_steps: 1000}}}}]" in advice
    assert check_env(Endless, wrappers=[{"path": path, "kwargs": kwargs}]).findings == ()


def test_algorithms_of_one_reason_are_listed_in_the_plural() -> None:
    text = " ".join(str(check_env(Walk, steps=20)).split())
    assert "not for sac, td3 (take bounded Box actions, not Discrete ones)" in text
    refused = check_env(TwoDials, steps=20).refused["drqn"]
    assert refused.startswith(
        "drqn takes Discrete actions, not MultiDiscrete ones: its network has"
    )


def test_a_slow_environment_is_named_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("rl_training.envs.env_player._SLOW_AFTER", 0.0)
    assert check_env(Walk, steps=30).ok
    captured = capsys.readouterr()
    assert captured.err == "Walk is slow: 1 of 30 steps took 0 s; playing stops after 15 s\n"
    assert captured.out == ""


def test_playing_stops_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.envs.env_player._SLOW_AFTER", 60.0)
    monkeypatch.setattr("rl_training.envs.env_player.EnvPlayer.play.__defaults__", (0.0,))
    assert check_env(Walk, steps=30).played.steps == 1


def test_a_time_limit_is_an_end() -> None:
    report = check_env(lambda: TimeLimit(Endless(), 400))
    assert report.findings == ()
    long = check_env(lambda: TimeLimit(Endless(), 4000))
    assert long.findings == ()
    assert "none ended within 1,000 steps" in str(long)


def test_fixed_lengths_that_are_truncated_are_no_finding() -> None:
    assert check_env(lambda: TimeLimit(Endless(), 20)).findings == ()


def test_an_environment_is_checked_and_stays_open() -> None:
    closed = []

    class Closes(Walk):
        def close(self) -> None:
            closed.append(1)

    env = Closes()
    assert check_env(env).ok
    assert check_env(env).ok, "it can be checked again"
    assert not closed
    assert check_env(UnseededSteps()).warnings[0].expected.startswith("equal steps of the same env")
    report = check_env(gym.make("CartPole-v1"))
    assert report.name == "CartPole-v1"
    assert report.findings == ()


def test_a_function_that_returns_one_environment_twice() -> None:
    env = Walk()
    report = check_env(lambda: env)
    assert [one.check for one in report.errors] == ["second environment"]
    assert "new environment with every call" in str(report.errors[0])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_gymnasiums_own_environments_can_be_trained_on(env_id: str) -> None:
    report = check_env(env_id)
    assert report.ok
    assert not report.warnings


@pytest.fixture
def sized() -> Iterator[str]:
    """The id of an environment whose constructor requires an argument."""
    gym.register("checked/Sized-v0", entry_point=Sized)  # type: ignore[arg-type]
    yield "checked/Sized-v0"
    del gym.registry["checked/Sized-v0"]


def test_a_constructor_without_its_argument_is_a_finding(sized: str, capsys: Any) -> None:
    missing = r"Sized.__init__() missing 1 required positional argument: 'size'"
    finding = check_env(sized).errors[0]
    command = "(on the command line, --env-kwargs '{size: ...}')"
    wanted = f"cannot make {sized}: {missing}. Set env_kwargs: {{size: ...}} {command}"
    assert (finding.check, finding.expected) == ("constructor", wanted)
    assert check_env(sized, env_kwargs={"size": 3}, steps=20).ok
    assert cli.main(["check-env", sized]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{sized} cannot be trained on (1 error)"
    finding = check_env(Sized).errors[0]  # type: ignore[arg-type]
    assert finding.expected.endswith(missing)
    assert "check_env(lambda: Sized(size=...))" in finding.advice


def test_env_fn_may_be_a_keyword() -> None:
    assert check_env(env_fn=Walk, steps=20).name == "Walk"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "CartPole"}, "Did you mean 'CartPole-v1'"),
        ({"env": 3}, "check_env takes the id of an environment"),
        ({"env": "pettingzoo:mpe2/simple_spread_v3"}, "pettingzoo.test.api_test"),
        ({"env": Walk, "env_kwargs": {"a": 1}}, r"given by its id.*env_fn=lambda: Walk\(a=1\)"),
        ({"env": Walk(), "env_kwargs": {"a": 1}}, "no effect on a given environment"),
        ({"env_fn": Walk()}, r"got an environment \(Walk\).*env_fn=MyEnv"),
        ({}, "either an environment"),
        ({"env": Walk, "env_fn": Walk}, "either an environment"),
        ({"env": "checked/Sized-v0", "env_kwargs": {"a": 1}}, "unexpected keyword argument 'a'$"),
        ({"env": Walk, "steps": 0}, "'steps' must be at least 1"),
        ({"env": Walk, "wrappers": ["gymnasium.wrappers:Nothing"]}, "has no 'Nothing'"),
        ({"env": dict}, "must return a gymnasium.Env"),
    ],
)
@pytest.mark.usefixtures("sized")
def test_a_users_mistake_is_raised(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_env(**arguments)


def test_the_wrappers_that_are_advised_for_a_text_field_help() -> None:
    advised: list[Any] = [
        {
            "path": "gymnasium.wrappers:FilterObservation",
            "kwargs": {"filter_keys": ["direction", "image"]},
        },
        "gymnasium.wrappers:FlattenObservation",
    ]
    report = check_env(TextField, wrappers=advised)
    assert report.ok
    assert report.algorithms == DISCRETE


def test_check_env_is_public() -> None:
    assert rl_training.check_env is check_env
    assert "check_env" in rl_training.__all__


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that registers two of the environments above."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_envs.py").write_text(
        "import gymnasium as gym\n"
        "from test_check_env import FourValues, Walk\n"
        "gym.register('checked/Walk-v0', entry_point=Walk)\n"
        "gym.register('checked/Four-v0', entry_point=FourValues)\n"
    )
    yield "checked_envs"
    sys.modules.pop("checked_envs", None)
    for name in ("checked/Walk-v0", "checked/Four-v0"):
        gym.registry.pop(name, None)


def test_the_command_prints_the_report(user_module: str, capsys: Any) -> None:
    words = [f"{user_module}:checked/Walk-v0", "--steps", "50", "--seed", "3"]
    assert cli.main(["check-env", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "checked/Walk-v0"
    assert lines[-1].startswith("checked/Walk-v0 can be trained on: ppo, ")
    assert cli.main(["check-env", f"{user_module}:checked/Four-v0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "checked/Four-v0 cannot be trained on (1 error)"


def test_the_command_prints_json(user_module: str, capsys: Any) -> None:
    assert cli.main(["check-env", f"{user_module}:checked/Four-v0", "--json"]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] is False
    assert [(one["severity"], one["check"]) for one in result["findings"]] == [("error", "step 1")]
    assert result["name"] == "checked/Four-v0"
    kwargs = "{max_episode_steps: 3}"
    words = ["CartPole-v1", "--env-kwargs", kwargs, "--steps", "30", "--json"]
    assert cli.main(["check-env", *words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["played"]["lengths"] == [3] * 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CartPole"], "Did you mean 'CartPole-v1'"),
        (["CartPole-v1", "--steps", "0"], "'steps' must be at least 1"),
        (["no_such_module:X-v0"], "cannot import 'no_such_module'"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["check-env", *words]) == 2
    assert message in capsys.readouterr().err


# -- action_masks() --------------------------------------------------------------------------------


class Rooms(Walk):
    """From each of four rooms two doors are locked; using one raises."""

    action_space: spaces.Space[Any] = spaces.Discrete(4)
    observation_space: spaces.Space[Any] = spaces.Discrete(4)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.room = 0
        return super().reset(seed=seed)

    def observe(self) -> Any:
        return self.room

    def action_masks(self) -> Any:
        assert self.left, "not called where no action follows"
        return np.arange(4) % 2 != self.room % 2

    def step(self, action: Any) -> Any:
        assert self.action_masks()[action], "this door is locked"
        self.room = int(action)
        return super().step(action)

    def reward(self) -> Any:
        return float(self.room == 3)


class TwoDials(Rooms):
    """Two components, masked one after the other; observations are a Dict."""

    action_space = spaces.MultiDiscrete([2, 3])
    observation_space = spaces.Dict({"room": spaces.Discrete(4)})

    def observe(self) -> Any:
        return {"room": self.room}

    def action_masks(self) -> Any:
        return [[True, False], [False, True, True]]

    def step(self, action: Any) -> Any:
        assert action[0] == 0
        assert action[1] > 0
        return Walk.step(self, action)


class Switches(Rooms):
    action_space = spaces.MultiBinary(4)


def test_the_mask_is_part_of_the_observation(make_config: MakeConfig) -> None:
    env = make_env_of(Rooms, make_config)
    obs, _ = env.reset()
    assert obs["observation"] == 0
    assert obs["action_mask"].tolist() == [0, 1, 0, 1]
    obs = env.step(3)[0]
    assert obs["action_mask"].tolist() == [1, 0, 1, 0]
    dials, _ = make_env_of(TwoDials, make_config).reset()
    assert dials["room"] == 0
    assert dials["action_mask"].tolist() == [1, 0, 0, 1, 1]


def make_env_of(make: Callable[[], Any], make_config: MakeConfig) -> Any:
    vector: Any = make_vector_env(make_config(), 1, env_fn=make)
    return vector.envs[0]


@pytest.mark.parametrize(
    ("make", "algo"),
    [(Rooms, "ppo"), (Rooms, "dqn"), (Rooms, "drqn"), (TwoDials, "ppo")],
)
def test_training_takes_legal_actions_alone(
    make: Callable[[], Any], algo: str, make_config: MakeConfig
) -> None:
    trainer = ExperimentManager.setup(make_config(algo=algo), env_fn=make)
    result = trainer.train()
    assert result.metrics["global_step"] >= 512
    policy = load_policy(result.checkpoint_path)
    if make is Rooms:
        obs = {"observation": 1, "action_mask": [False, False, True, False]}
        assert policy.predict(obs)[0] == 2


def test_training_with_masks_resumes_exactly(make_config: MakeConfig) -> None:
    config = make_config()
    whole = ExperimentManager.setup(config, env_fn=Rooms).train()
    part = ExperimentManager.setup(config, env_fn=Rooms, callbacks=[StopAt(200)]).train()
    assert part.interrupted
    resume_training(part.run_dir, env_fn=Rooms)
    assert_same_run(whole.run_dir, part.run_dir)


class Restorable(Rooms):
    """Its state is its own, and does not follow from a seed."""

    def get_state(self) -> Any:
        return {"room": self.room, "left": self.left}

    def set_state(self, state: Any) -> Any:
        self.room, self.left = int(state["room"]), int(state["left"])
        return self.observe()


def test_a_state_of_its_own_is_restored_with_its_mask(make_config: MakeConfig) -> None:
    vectors = [make_vector_env(make_config(), env_fn=Restorable) for _ in range(2)]
    env, again = (VectorAdapter(vector, 3) for vector in vectors)
    env.reset()
    shown = env.step(np.array([1, 3])).obs
    state = env.state_dict()
    assert "own" in state["envs"][0]
    restored, exact = again.load_state_dict(state, shown)
    assert exact
    assert isinstance(restored, dict)
    assert restored["action_mask"].tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]


def test_masks_are_refused_where_they_would_be_ignored(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(algo="drqn")
    monkeypatch.setitem(ALGORITHMS, "drqn", ALGORITHMS["drqn"]._replace(masks=False))
    ignoring = r"set wrappers: \['rl_training.envs.wrappers:IgnoreActionMasks'\]"
    message = rf"Rooms: it has a method action_masks\(\), and drqn does not .*ppo.* do.*{ignoring}"
    with pytest.raises(ConfigError, match=message):
        make_vector_env(config, env_fn=Rooms)
    message = rf"Switches: action_masks\(\) works with Discrete and MultiDiscrete.*{ignoring}"
    with pytest.raises(ConfigError, match=message):
        make_vector_env(make_config(), env_fn=Switches)
    unmasked = config.with_overrides(wrappers=["rl_training.envs.wrappers:IgnoreActionMasks"])
    env = make_vector_env(unmasked, env_fn=Rooms)
    assert env.single_observation_space == spaces.Discrete(4)


def test_a_wrong_mask_is_named(make_config: MakeConfig) -> None:
    class TooShort(Rooms):
        def action_masks(self) -> Any:
            return np.ones(3, bool)

    class Nothing(Rooms):
        def action_masks(self) -> Any:
            return np.zeros(4, bool)

    env = make_env_of(TooShort, make_config)
    expected = r"environment 0 \(TooShort\) .*: action_masks\(\) must return 4 values.*got .*\(3,\)"
    with pytest.raises(EnvironmentFailure, match=expected):
        env.reset()
    found = check_env(TooShort).errors[0]
    assert found.expected.startswith("action_masks() to return 4 values")
    assert found.advice.startswith("Return the values of all actions")
    adapter = VectorAdapter(make_vector_env(make_config(), env_fn=Nothing), 0)
    with pytest.raises(EnvironmentFailure, match=r"environment 0 \(Nothing\) allows no action"):
        adapter.reset()
    assert "action mask that allows an action" in str(check_env(Nothing).errors[0])


@pytest.mark.parametrize("mask", [None, "all", ["a", "b", "c", "d"], [[1, 1], [1, [1]]]])
def test_what_is_no_mask_is_named(mask: Any) -> None:
    class Odd(Rooms):
        def action_masks(self) -> Any:
            return mask

    assert check_env(Odd).errors[0].expected.startswith("action_masks() to return 4 values")


def test_an_observation_with_a_mask_is_named_without_a_key(make_config: MakeConfig) -> None:
    class Long(Rooms):
        observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)

        def observe(self) -> Any:
            return np.zeros(4, np.float32)

    class Outside(Long):
        def observe(self) -> Any:
            return np.full(3, 5.0, np.float32)

    class Seventh(Rooms):
        def observe(self) -> Any:
            return 7

    expected = r"\): the observation must be an array of shape \(3,\)"
    with pytest.raises(EnvironmentFailure, match=expected):
        make_env_of(Long, make_config).reset()
    assert check_env(Long).errors[0].expected.startswith("the observation to be an array of")
    assert check_env(Seventh).errors[0].expected.startswith("the observation contains 7, but")
    assert (
        check_env(Outside).warnings[0].expected == "observation between low and high of its space"
    )


def test_check_env_follows_the_mask() -> None:
    for make in (Rooms, TwoDials):
        report = check_env(make)
        assert report.ok
        assert severities(report)["action masks"] == "note"
        assert ("drqn" in report.algorithms) == (make is Rooms)
    assert severities(check_env(Switches)) == {"action masks": "error"}


def test_a_mask_in_the_observation_is_left_alone(make_config: MakeConfig) -> None:
    config = make_config(env_id="probe/MaskedActions-v0")
    assert set(make_env(config).reset()[0]) == {"sign", "action_mask"}


def test_native_vectors_do_not_ignore_masks_silently(make_config: MakeConfig) -> None:
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    class Masked(CartPoleVectorEnv):
        def action_masks(self) -> Any:
            return np.ones((self.num_envs, 2), bool)

    entry: Any = Masked
    gym.register("checked/Native-v0", vector_entry_point=entry)
    try:
        config = make_config(env_id="checked/Native-v0", vectorization="native")
        with pytest.raises(ConfigError, match=r"action_masks\(\) of a native vector is not used"):
            make_vector_env(config)
    finally:
        del gym.registry["checked/Native-v0"]
