"""Environments that break their interface, as the person who wrote one sees it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TimeLimit

from conftest import MakeConfig
from rl_training import cli
from rl_training import eval as eval_module
from rl_training.envs import PlainAdapter, VectorAdapter, make_env, make_vector_env
from rl_training.envs.given import GivenEnvironment
from rl_training.envs.time_limits import has_time_limit
from rl_training.errors import ConfigError, EnvironmentFailure, WorkerError
from rl_training.eval import evaluate_actor, make_eval_env, require_env_fn, require_same_spaces
from rl_training.experiment.manager import ExperimentManager
from rl_training.types import Array, Progress

SOURCE = """
import gymnasium as gym
import numpy as np


class Good(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return np.zeros(3, np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 9, False, {}


class WrongShape(Good):
    def observe(self):
        return np.zeros(4 if self.t == 2 else 3, np.float32)


class WrongDtype(Good):
    def observe(self):
        return np.array(["a", "b", "c"]) if self.t == 2 else np.zeros(3, np.float32)


class FourValues(Good):
    def step(self, action):
        return self.observe(), 1.0, False, {}


class ObservationAlone(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Good):
    def reset(self):
        return super().reset()


class NoReward(Good):
    def step(self, action):
        return self.observe(), None, False, False, {}


class TwoRewards(Good):
    def step(self, action):
        return self.observe(), np.ones(2), False, False, {}


class DoneText(Good):
    def step(self, action):
        return self.observe(), 1.0, "no", False, {}


class Divides(Good):
    def step(self, action):
        return self.helper(0)

    def helper(self, zero):
        return 1 / zero


class Asserts(Good):
    def __init__(self):
        assert 1 + 1 == 3


class Converts(Good):
    def __init__(self, size=None):
        self.size = int("many" if size is None else size)


class NoSpaces(gym.Env):
    pass


for made in [Good, *Good.__subclasses__(), NoSpaces]:
    for end, limit in (("", None), ("Limited", 50)):
        name = f"bad/{made.__name__}{end}-v0"
        gym.register(name, entry_point=made, max_episode_steps=limit)
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The user's module of environments."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "bad_envs.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield "bad_envs"
    sys.path.remove(str(folder))
    sys.modules.pop("bad_envs", None)
    for name in [name for name in gym.registry if name.startswith("bad/")]:
        del gym.registry[name]


STEP = r"environment [01] \(bad/{name}-v0\) failed in step {step} of its episode 0 \(seed \d+\): "
RESET = r"environment [01] \(bad/{name}-v0\) failed in reset of its episode 0 \(seed \d+\): "
SHAPE = r"the observation must be an array of shape \(3,\), dtype float32; got "
FIVE = r"step must return 5 values, \(observation, reward, terminated, truncated, info\); got "
WRONG = [
    ("WrongShape", 2, SHAPE + r"an array of shape \(4,\), dtype float32"),
    ("WrongShapeLimited", 2, SHAPE + r"an array of shape \(4,\), dtype float32"),
    ("WrongDtype", 2, SHAPE + r"an array of shape \(3,\), dtype <U1"),
    ("FourValues", 1, FIVE + r"4 values \(ndarray, float, bool, dict\) \(old Gym interface.*"),
    ("FourValuesLimited", 1, FIVE + r"another number of values \(.*got 4\)\)"),
    ("ObservationAlone", 0, r"reset must return \(observation, info\); got an array .*old Gym.*"),
    ("NoSeed", 0, r"reset must accept seed and options, as in def reset.*; got TypeError: .*"),
    ("NoReward", 1, r"the reward must be a number; got None \(NoneType\)"),
    ("TwoRewards", 1, r"the reward must be a number; got an array of shape \(2,\), dtype float64"),
    ("DoneText", 1, r"terminated must be True or False; got 'no' \(str\)"),
]


def play(env: Any, steps: int) -> None:
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(2, np.int64))


def first_line(name: str, step: int, message: str) -> str:
    """What the message must match."""
    where = STEP if step else RESET
    return where.format(name=name, step=step) + message


@pytest.mark.parametrize(("name", "step", "message"), WRONG)
def test_a_wrong_result_is_one_line_on_the_command_line(
    bad: str, name: str, step: int, message: str, tmp_path: Path, capsys: Any
) -> None:
    words = ["--env-id", f"{bad}:bad/{name}-v0", "--output-dir", str(tmp_path), "--num-envs", "2"]
    assert cli.main(["train", *words, "--no-tensorboard", "--total-timesteps", "64"]) == 1
    lines = capsys.readouterr().err.splitlines()
    failed = [line for line in lines if line.startswith("failed: ")]
    assert len(failed) == 1
    assert lines[-1] == failed[0], "nothing follows it, no traceback"
    assert re.match("failed: " + first_line(name, step, message), failed[0])


@pytest.mark.parametrize(("name", "step", "message"), [WRONG[0], WRONG[2], WRONG[4], WRONG[6]])
def test_a_worker_process_names_the_same(
    bad: str, name: str, step: int, message: str, make_config: MakeConfig
) -> None:
    config = make_config(env_id=f"{bad}:bad/{name}-v0", vectorization="async", num_envs=2)
    env = make_vector_env(config)
    try:
        with pytest.raises(WorkerError) as caught:
            play(env, 3)
        assert re.fullmatch(first_line(name, step, message), str(caught.value))
    finally:
        env.close()


def test_an_exception_shows_the_users_own_lines_alone(bad: str, make_config: MakeConfig) -> None:
    env = make_env(make_config(env_id=f"{bad}:bad/DividesLimited-v0"))
    env.reset()
    with pytest.raises(EnvironmentFailure) as caught:
        env.step(0)
    first, *trace = str(caught.value).splitlines()
    expected = first_line("DividesLimited", 1, "ZeroDivisionError: division by zero")
    assert re.fullmatch(expected, first)
    files = [line.strip() for line in trace if line.strip().startswith("File ")]
    assert len(files) == 2, "step and helper, and no line of a wrapper"
    assert all("bad_envs.py" in line for line in files)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Asserts", r"cannot make bad/Asserts-v0: AssertionError in .*bad_envs.py, line \d+: .*"),
        (
            "Converts",
            r"cannot make bad/Converts-v0: invalid literal for int.* \(in .*bad_envs.py, line .*\)",
        ),
        ("NoSpaces", "bad/NoSpaces-v0: observation_space must be a gymnasium space; .* has none.*"),
    ],
)
def test_what_fails_when_it_is_made_is_named_with_its_place(
    bad: str, name: str, message: str, vectorization: str, make_config: MakeConfig
) -> None:
    config = make_config(env_id=f"{bad}:bad/{name}-v0", vectorization=vectorization)
    with pytest.raises(ConfigError) as caught:
        make_vector_env(config)
    assert re.fullmatch(message, str(caught.value))


def test_wrong_env_kwargs_are_named_with_their_values(bad: str, make_config: MakeConfig) -> None:
    config = make_config(env_id=f"{bad}:bad/Converts-v0", env_kwargs={"size": "big"})
    with pytest.raises(ConfigError, match=r"Converts-v0 with env_kwargs {'size': 'big'}: invalid"):
        make_env(config)


class Small(gym.Env[Any, Any]):
    """Episodes of three steps; ``fault`` is what goes wrong in the second."""

    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, fault: str = "", size: int = 2) -> None:
        self.fault = fault
        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 2 and self.fault == "raises":
            raise RuntimeError("the simulator crashed")
        reward = None if self.t == 2 and self.fault == "no reward" else 1.0
        return self.observation_space.sample() * 0, reward, self.t == 3, False, {}


def test_a_function_that_makes_environments_names_their_class(make_config: MakeConfig) -> None:
    env = make_vector_env(make_config(), env_fn=lambda: Small("no reward"))
    with pytest.raises(EnvironmentFailure, match=r"^environment 0 \(Small\) failed in step 2 of"):
        play(env, 2)


def crashing() -> Small:
    raise KeyError("no licence")


@pytest.mark.parametrize(("make", "name"), [(crashing, "crashing"), (lambda: crashing(), "env_fn")])
def test_a_function_that_raises_is_named(
    make: Callable[[], Any], name: str, make_config: MakeConfig
) -> None:
    expected = rf"^environment 0 \({name}\) failed in its constructor: KeyError: 'no licence'"
    with pytest.raises(EnvironmentFailure, match=expected):
        make_vector_env(make_config(), env_fn=make)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_env_kwargs_are_refused_with_a_function(
    vectorization: str, make_config: MakeConfig
) -> None:
    config = make_config(env_kwargs={"fault": "x"}, vectorization=vectorization)
    message = r"'env_kwargs' have no effect on env_fn.*env_fn=lambda: Small\(fault='x'\)$"
    with pytest.raises(ConfigError, match=message):
        make_vector_env(config, env_fn=Small)
    limited = make_config(env_kwargs={"max_episode_steps": 5})
    with pytest.raises(
        ConfigError, match=r"wrappers: \[{path: 'gymnasium.wrappers:TimeLimit'.*}]$"
    ):
        make_vector_env(limited, env_fn=Small)
    with pytest.raises(ConfigError, match="have no effect on a given environment"):
        make_vector_env(limited, env_fn=GivenEnvironment(Small()))


def test_env_kwargs_of_the_trained_environment_do_not_matter_in_evaluation(
    make_config: MakeConfig,
) -> None:
    make_eval_env(make_config(env_kwargs={"gravity": 1.0}), 1, Small).close()


@pytest.mark.parametrize("wrong", [Small(), 3])
def test_what_cannot_be_called_is_no_env_fn(wrong: Any, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"'env_fn' must be a function or class that makes env"):
        make_vector_env(make_config(), env_fn=wrong)


def test_an_unknown_id_of_a_loaded_policy_may_be_that_of_a_function(
    make_config: MakeConfig,
) -> None:
    config = make_config(env_id="Small", init_from="policy.pt")
    message = (
        r"no environment 'Small'.*policy.pt was trained with env_fn.*load\(path, env_fn=MyEnv\)"
    )
    with pytest.raises(ConfigError, match=message):
        make_vector_env(config)
    with pytest.raises(ConfigError, match="no environment 'Small'") as caught:
        make_vector_env(make_config(env_id="Small"))
    assert "PPO.load" not in str(caught.value)


# -- evaluation ------------------------------------------------------------------------------------


class Idle:
    """An actor that always chooses the first action."""

    def act(self, obs: Any, progress: Progress) -> tuple[Array, None]:
        return np.zeros(len(obs), np.int64), None

    def reset(self, where: Array) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raises", "RuntimeError: the simulator crashed"), ("no reward", "the reward must be a num")],
)
def test_a_failure_in_evaluation_is_named_as_such(
    fault: str, message: str, make_config: MakeConfig
) -> None:
    env = make_eval_env(make_config(), 1, lambda: Small(fault))
    with pytest.raises(EnvironmentFailure) as caught:
        evaluate_actor(Idle(), env, num_episodes=1, seed=3)  # type: ignore[arg-type]
    start = r"evaluation: environment 0 \(Small\) failed in step 2 of its episode 0 \(seed \d+\): "
    assert re.match(start + message, str(caught.value))


def test_a_failure_of_a_worker_in_evaluation(bad: str, make_config: MakeConfig) -> None:
    config = make_config(env_id=f"{bad}:bad/NoReward-v0", vectorization="async")
    env = make_eval_env(config, 1)
    try:
        with pytest.raises(WorkerError) as caught:
            evaluate_actor(Idle(), env, num_episodes=1, seed=3)  # type: ignore[arg-type]
        assert re.match(r"evaluation: environment 0 \(bad/NoReward-v0\) failed", str(caught.value))
    finally:
        env.close()


class Endless(Small):
    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


def evaluated(env: PlainAdapter) -> tuple[int, str]:
    """Length of an episode with the first action alone, and the warning."""
    with pytest.warns(UserWarning, match="did not end within") as caught:
        result = evaluate_actor(Idle(), env, num_episodes=1, seed=3)  # type: ignore[arg-type]
    env.close()
    return result.lengths[0], str(caught[0].message)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_limit_of_an_evaluation_depends_on_a_known_time_limit(
    vectorization: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (eval_module.MAX_EPISODE_STEPS, eval_module.MAX_STEPS_WITHOUT_LIMIT) == (100_000, 10_000)
    monkeypatch.setattr(eval_module, "MAX_EPISODE_STEPS", 30)
    monkeypatch.setattr(eval_module, "MAX_STEPS_WITHOUT_LIMIT", 10)
    config = make_config(vectorization=vectorization)
    length, message = evaluated(make_eval_env(config, 1, Endless))
    assert length == 10
    assert message == (
        "evaluation: an episode of Endless did not end within 10 steps and is counted with its"
        " return so far. To limit episodes, set wrappers: [{path: 'gymnasium.wrappers:TimeLimit',"
        " kwargs: {max_episode_steps: 1000}}]"
    )
    assert evaluated(make_eval_env(config, 1, lambda: TimeLimit(Endless(), 50)))[0] == 30
    cliff = config.with_overrides(env_id="CliffWalking-v1")
    length, message = evaluated(make_eval_env(cliff, 1))
    assert length == 10
    assert message.endswith("To limit episodes, set env_kwargs: {max_episode_steps: 1000}")
    limited = cliff.with_overrides(env_kwargs={"max_episode_steps": 50})
    assert evaluated(make_eval_env(limited, 1))[0] == 30


def test_vectors_of_their_own_have_the_limit_of_their_spec(make_config: MakeConfig) -> None:
    native = make_vector_env(make_config(env_id="CartPole-v1", vectorization="native"))
    assert VectorAdapter(native, 0).has_time_limit
    native.metadata = {**native.metadata, "rl_training/has_time_limit": False}
    assert not VectorAdapter(native, 0).has_time_limit, "single environments have the wrapper"
    native.metadata = {**native.metadata, "rl_training/whole_games": True}
    assert VectorAdapter(native, 0).has_time_limit, "Atari games have a limit of frames"


def test_a_game_has_a_limit_of_its_own() -> None:
    env = Small()
    assert not has_time_limit(env)
    env.spec = EnvSpec("Game-v0", kwargs={"game": "pong"})
    assert has_time_limit(env)
    env.spec = EnvSpec("Game-v0", max_episode_steps=5)  # of an unwrapped environment
    assert not has_time_limit(env)


def test_an_episode_too_long_to_record_has_the_advice_of_its_kind(make_config: MakeConfig) -> None:
    config = make_config(max_recorded_steps=4)
    adapter = VectorAdapter(make_vector_env(config, 2, env_fn=Endless), 0)
    with pytest.warns(UserWarning, match="limit episodes with wrappers: .*TimeLimit"):
        play(adapter, 6)


def test_evaluation_on_other_spaces_is_refused(make_config: MakeConfig) -> None:
    trained = VectorAdapter(make_vector_env(make_config(), env_fn=Small), 0)
    own = (trained.obs_spec, trained.action_spec)
    message = (
        r"evaluation: Small does not match the policy: its observations are float32 of shape"
        r" \(3,\), but the policy was trained on float32 of shape \(2,\)"
    )
    with pytest.raises(ConfigError, match=message):
        make_eval_env(make_config(), 2, lambda: Small(size=3), own)
    make_eval_env(make_config(), 2, Small, own).close()

    class Wide(Small):
        action_space = spaces.Box(-1.0, 2.0, (1,))

    other = VectorAdapter(make_vector_env(make_config(), env_fn=Wide), 0)
    message = r"Wide .* actions are bounded Box of shape \(1,\), low \[-1.0\], high \[2.0\], .*"
    with pytest.raises(ConfigError, match=message + r"trained on Discrete\(2\)"):
        require_same_spaces(other, *own)


def test_a_policy_of_env_fn_needs_it_again() -> None:
    with pytest.raises(ConfigError, match=r"with env_fn.*evaluate\(10, env_fn=MyEnv\)"):
        require_env_fn(True, None, "evaluate(10, env_fn=MyEnv)")
    require_env_fn(True, Small, "")
    require_env_fn(False, None, "")


def test_a_run_that_fails_names_the_environment(make_config: MakeConfig) -> None:
    with pytest.raises(EnvironmentFailure, match=r"^environment 0 \(Small\) failed in step 2"):
        ExperimentManager.setup(make_config(), env_fn=lambda: Small("raises")).train()
