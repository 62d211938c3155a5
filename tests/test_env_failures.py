"""Environments that misbehave: what the error names, and how endless episodes are resumed."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rl_training
from conftest import MakeConfig
from probe_envs import Faulty
from rl_training import cli
from rl_training.config import AtariConfig, TrainConfig
from rl_training.data.finite import Episodes
from rl_training.envs import HalvedAdapter, VectorAdapter, make_env, make_vector_env
from rl_training.envs import episodes as episodes_module
from rl_training.errors import ConfigError, EnvironmentFailure, NonFiniteError, WorkerError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.trainer import Trainer
from rl_training.types import Array

FAULTY = "probe_envs:probe/Faulty-v0"
IDLE = np.zeros(2, np.int64)


def second_is(fault: str, **kwargs: Any) -> Callable[[], Faulty]:
    """Makes environments in turn, of which the second misbehaves."""
    numbers = itertools.count()
    return lambda: Faulty(fault if next(numbers) == 1 else "", **kwargs)


def step_to_failure(env: Any) -> None:
    env.reset()
    for _ in range(5):
        env.step(IDLE)


# -- what they raise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "summary", "cause"),
    [
        ("raises", "RuntimeError: the pole fell on my foot", RuntimeError),
        ("exits", r"sys.exit\(0\)", SystemExit),
        ("asserts", "AssertionError in .*probe_envs.py, line .* assert self.t < 0", AssertionError),
    ],
)
@pytest.mark.parametrize(("at", "doing"), [(0, "reset"), (3, "step 3")])
def test_what_an_environment_raises_is_named_with_its_index_and_traceback(
    fault: str, summary: str, cause: type, at: int, doing: str, make_config: MakeConfig
) -> None:
    env = make_vector_env(make_config(), env_fn=second_is(fault, at=at))
    with pytest.raises(EnvironmentFailure) as caught:
        step_to_failure(env)
    first, trace = str(caught.value).split("\n", 1)
    assert re.search(rf"^environment 1 .*{doing} of its episode 0 .*{summary}", first)
    assert trace.startswith("Traceback")
    assert "probe_envs.py" in trace
    assert "episodes.py" not in trace
    assert isinstance(caught.value.__cause__, cause)


def test_the_named_seed_repeats_the_episode(make_config: MakeConfig) -> None:
    config = make_config(env_id=FAULTY, env_kwargs={"fault": "raises", "length": 2, "at": 5})
    env = make_env(config, 3)
    seeds: list[int] = []
    inner: Any = env.unwrapped
    reset = inner.reset

    def noting(*, seed: int, options: Any) -> Any:
        seeds.append(seed)
        return reset(seed=seed, options=options)

    inner.reset = noting
    for _ in range(2):
        env.reset()
        env.step(0)
        env.step(0)
    env.reset()
    with pytest.raises(EnvironmentFailure) as caught:
        env.step(0)
    assert (
        f"environment 3 (probe/Faulty-v0) failed in step 1 of its episode 2 (seed {seeds[2]})"
        in str(caught.value)
    )


@pytest.mark.parametrize(
    ("fault", "summary"),
    [
        ("constructor", "KeyError: 'no licence left for the simulator'"),
        ("constructor exits", r"sys.exit\(0\)"),
        ("constructor asserts", "AssertionError in .* assert fault !="),
    ],
)
def test_a_constructor_that_fails_is_named(
    fault: str, summary: str, make_config: MakeConfig
) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"^environment 1 .*constructor.*{summary}"):
        make_vector_env(make_config(), env_fn=second_is(fault))


def test_an_assertion_without_a_message_names_its_place_where_it_is_a_config_error(
    make_config: MakeConfig,
) -> None:
    config = make_config(env_id=FAULTY, env_kwargs={"fault": "constructor asserts"})
    with pytest.raises(ConfigError, match=r"AssertionError in .*probe_envs.py, line .* assert"):
        make_vector_env(config)


def test_what_makes_no_environment_is_refused(make_config: MakeConfig) -> None:
    nothing: Any = dict
    with pytest.raises(ConfigError, match=r"env_fn.*gymnasium.Env; got {}"):
        make_vector_env(make_config(), env_fn=nothing)


def test_environments_made_before_one_that_fails_are_closed(make_config: MakeConfig) -> None:
    closed: list[str] = []

    class Closes(Faulty):
        def close(self) -> None:
            closed.append(self.fault)

    numbers = itertools.count()
    faults = ["first", "second", "constructor"]
    with pytest.raises(EnvironmentFailure):
        make_vector_env(make_config(num_envs=3), env_fn=lambda: Closes(faults[next(numbers)]))
    assert closed == ["first", "second"]


def test_environments_of_other_spaces_are_named(make_config: MakeConfig) -> None:
    numbers = itertools.count()
    forms = ["vector", "board"]
    with pytest.raises(ConfigError, match="observation_space of environment 1"):
        make_vector_env(make_config(), env_fn=lambda: Faulty(form=forms[next(numbers)]))


def test_a_user_who_stops_a_step_is_not_an_environment_that_fails(make_config: MakeConfig) -> None:
    env = make_env(make_config(env_id=FAULTY))

    def interrupted(action: Any) -> Any:
        raise KeyboardInterrupt

    env.unwrapped.step = interrupted  # type: ignore[method-assign]
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step(0)


def test_a_step_before_the_first_reset_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset") as caught:
        make_env(make_config()).step(0)
    assert isinstance(caught.value.__cause__, gym.error.ResetNeeded)


def test_an_environment_that_exits_fails_the_run(tmp_path: Path, capsys: Any) -> None:
    words = [*("--env-id", FAULTY, "--env-kwargs", "{fault: exits}", "--output-dir", str(tmp_path))]
    assert cli.main(["train", *words, "--total-timesteps", "64", "--no-tensorboard"]) == 1
    assert "environment 0 (probe/Faulty-v0) failed in step 3" in capsys.readouterr().err


def test_a_close_that_fails_closes_the_others_and_is_named(make_config: MakeConfig) -> None:
    closed: list[int] = []
    numbers = itertools.count()

    class Closes(Faulty):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)

        def close(self) -> None:
            closed.append(self.number)
            if self.number == 0:
                sys.exit(0)

    env = make_vector_env(make_config(), env_fn=Closes)
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 0 \(Closes\) failed in close: .*sys.exit"
    ):
        env.close()
    assert closed == [0, 1]


# -- what they return ------------------------------------------------------------------------------

WRONG_STEPS = [
    ("vector", "four values", r"5 values.*got 4 values \(ndarray, float, bool, bool\)"),
    ("vector", "nothing", "5 values.*got None"),
    ("vector", "reward none", "reward must be a number; got None"),
    ("vector", "reward text", "reward must be a number; got '1.0'"),
    ("vector", "reward vector", r"reward must be a number; got an array of shape \(2,\)"),
    ("vector", "done text", "terminated must be True or False; got 'no'"),
    ("vector", "done none", "truncated must be True or False; got None"),
    ("vector", "info none", "info must be a dict; got None"),
    ("vector", "shape", r"shape \(3,\), dtype float32; got an array of shape \(1,\)"),
    ("vector", "shape of none", r"shape \(3,\), dtype float32; got None"),
    ("board", "fraction", "dtype int8; .*float64, and 0.5 cannot be stored as int8"),
    ("dict", "shape", "must be a dict with the keys 'place', 'speed'; got an array"),
    ("dict", "missing key", "has no key 'place'; its keys: 'speed'"),
    (
        "dict",
        "key's shape",
        r"observation\['speed'\] must be .* \(3,\).*got an array of shape \(1,\)",
    ),
]


@pytest.mark.parametrize(("form", "fault", "message"), WRONG_STEPS)
def test_a_wrong_result_of_a_step_is_named_with_what_was_expected(
    form: str, fault: str, message: str, make_config: MakeConfig
) -> None:
    env = make_vector_env(make_config(), env_fn=second_is(fault, form=form))
    with pytest.raises(EnvironmentFailure) as caught:
        step_to_failure(env)
    assert re.match(
        rf"environment 1 \(Faulty\) failed in step 3 of its episode 0 .*: .*{message}",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("observation alone", r"\(observation, info\); got an array of shape \(3,\)"),
        ("shape", r"shape \(3,\), dtype float32; got an array of shape \(1,\)"),
        ("nothing", r"\(observation, info\); got None"),
    ],
)
def test_a_wrong_result_of_a_reset_is_named_with_what_was_expected(
    fault: str, message: str, make_config: MakeConfig
) -> None:
    env = make_vector_env(make_config(), env_fn=second_is(fault, at=0))
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 1 \(Faulty\) failed in reset .*{message}"
    ):
        env.reset()


def test_four_values_inside_a_time_limit_are_explained_too(make_config: MakeConfig) -> None:
    kwargs = {"fault": "four values", "max_episode_steps": 50}
    env = make_vector_env(make_config(env_id=FAULTY, env_kwargs=kwargs))
    with pytest.raises(EnvironmentFailure, match=r"environment 0 .*must return 5 values"):
        step_to_failure(env)


def test_unusual_types_that_mean_the_same_pass(make_config: MakeConfig) -> None:
    env = make_vector_env(make_config(), env_fn=second_is("odd but right"))
    env.reset()
    for _ in range(4):
        obs, reward, terminated, truncated, _ = env.step(IDLE)
        assert obs.tolist() == [[1.0, 1.0, 1.0]] * 2
        assert reward.tolist() == [1.0, 1.0]
        assert not (terminated | truncated).any()


def test_an_observation_of_text_is_named(make_config: MakeConfig) -> None:
    env = make_vector_env(make_config(), env_fn=second_is("text"))
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 1 \(Faulty\) .*dtype float32; got .*dtype <U"
    ):
        step_to_failure(env)


def test_an_info_that_fits_no_vector_is_named(make_config: MakeConfig) -> None:
    numbers = itertools.count(1)

    class Grows(Faulty):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"path": np.zeros(next(numbers))}

    env = make_vector_env(make_config(), env_fn=Grows)
    env.reset()
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 1 \(Grows\) failed in a step: ValueError"
    ):
        env.step(IDLE)


def test_a_step_that_fails_on_a_diverged_policys_action_says_so(make_config: MakeConfig) -> None:
    kwargs = {"continuous": True, "fault": "raises", "at": 1}
    env = make_env(make_config(env_id=FAULTY, env_kwargs=kwargs))
    env.reset()
    with pytest.raises(EnvironmentFailure, match=r"its action was .*nan.*training has diverged"):
        env.step(np.array([np.nan], np.float32))


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [("exits", r"sys.exit\(0\)"), ("key's shape", r"observation\['speed'\] must be .* \(3,\)")],
)
def test_workers_name_the_same(fault: str, message: str, make_config: MakeConfig) -> None:
    config = make_config(env_id=FAULTY, env_kwargs={"form": "dict"}, vectorization="async")
    env: Any = make_vector_env(config)
    try:
        env.reset()
        env.set_attr("fault", ["", fault])
        with pytest.raises(WorkerError) as caught:
            step_to_failure(env)
        text = str(caught.value)
        assert re.match(
            rf"environment 1 \(probe/Faulty-v0\) failed in step 3 of its episode 1 .*: .*{message}",
            text,
        )
        assert text.count("Traceback") == (fault == "exits")
    finally:
        env.close()


def test_a_constructor_that_exits_in_a_worker_is_named(make_config: MakeConfig) -> None:
    def make() -> Faulty:
        import multiprocessing

        return Faulty("constructor exits" if multiprocessing.parent_process() else "")

    with pytest.raises(WorkerError, match=r"^environment [01] .*constructor.*sys.exit\(0\)"):
        make_vector_env(make_config(vectorization="async"), env_fn=make)


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    sources = [Path(rl_training.__file__).parents[1], Path(__file__).parent]
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_exceptions_of_the_scripts_own_classes_do_not_hide_a_workers_message(
    tmp_path: Path,
) -> None:
    done = run_script(
        tmp_path,
        """
        import numpy as np
        from probe_envs import Faulty
        from rl_training import TrainConfig, make_vector_env
        from rl_training.errors import WorkerError

        class SimulatorCrash(Exception):
            pass

        class Mine(Faulty):
            def step(self, action):
                class Local(SimulatorCrash):
                    pass
                raise (SimulatorCrash if self.t else Local)("engine " + str(self.t))

            def get_state(self):
                raise SimulatorCrash("no state")

            def set_state(self, state):
                pass

        def tell(use):
            env = make_vector_env(TrainConfig(num_envs=2, vectorization="async"), env_fn=Mine)
            env.reset()
            try:
                use(env)
            except WorkerError as error:
                print(str(error).splitlines()[0])
            env.close()

        tell(lambda env: env.step(np.zeros(2, np.int64)))
        tell(lambda env: env.call("snapshot"))
        """,
    )
    assert done.returncode == 0, done.stderr
    step, snapshot = done.stdout.splitlines()
    assert re.match(r"environment [01] \(Mine\) failed in step 1 .*Local: engine 0", step)
    assert re.match(
        r"environment [01] \(Mine\) failed in get_state: SimulatorCrash: no state", snapshot
    )
    assert "PicklingError" not in done.stderr


def test_too_few_open_files_for_the_workers_is_a_config_error(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    done = run_script(
        tmp_path,
        """
        import multiprocessing, resource
        from rl_training import TrainConfig, make_vector_env
        from rl_training.errors import ConfigError

        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        try:
            make_vector_env(TrainConfig(num_envs=40, vectorization="async"))
        except ConfigError as error:
            print(error)
        print(multiprocessing.active_children())
        """,
    )
    message, children = done.stdout.splitlines()
    assert "'num_envs' is 40" in message
    assert "ulimit -n, now 30" in message
    assert children == "[]"


# -- impossible numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_envs": 65_537}, "'num_envs' must be at most 65,536"),
        ({"num_envs": 65_537, "vectorization": "native"}, "'num_envs' must be at most 65,536"),
        ({"num_envs": 4_097, "vectorization": "async"}, "'num_envs' must be at most 4,096"),
        ({"torch_threads": 1_025}, "'torch_threads' must be at most 1,024"),
        ({"max_recorded_steps": 0}, "'max_recorded_steps' must be at least 1"),
    ],
)
def test_a_config_beyond_reason_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)
    TrainConfig(num_envs=4_096, vectorization="async", torch_threads=1_024, max_recorded_steps=1)


@pytest.mark.parametrize(
    ("name", "most"), [("frame_skip", 1000), ("screen_size", 1024), ("frame_stack", 64)]
)
def test_atari_settings_beyond_reason_are_refused(name: str, most: int) -> None:
    def value(number: int) -> Any:
        settings: dict[str, Any] = {name: number}
        return getattr(AtariConfig(**settings), name)

    assert value(most) == most
    for number in (0, most + 1):
        with pytest.raises(ConfigError, match=rf"'atari.{name}' must be .*at most {most:,}"):
            value(number)


# -- NaNs ------------------------------------------------------------------------------------------

OFF_POLICY = ("dqn", "sac")


def train_to_nan(make_config: MakeConfig, algo: str, fault: str, **kwargs: Any) -> str:
    """Train until the second environment's NaN is found; what the error says."""
    bigger = {"buffer_size": 2000} if algo in OFF_POLICY else {}
    config = make_config(algo=algo, eval_episodes=0, **bigger)
    kwargs = {"continuous": algo == "sac", **kwargs}
    trainer = ExperimentManager.setup(config, env_fn=second_is(fault, **kwargs))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    return str(caught.value)


def place(algo: str, row: int) -> str:
    """Where a row is: rollouts of 64 steps of two environments are checked one by one."""
    rollout = 0 if algo in OFF_POLICY else row // 64
    steps = row - 64 * rollout
    plus = f" plus {steps} steps of every environment" if steps else ""
    return f"at global step {128 * rollout}{plus}"


@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo", "dqn", "sac"])
@pytest.mark.parametrize(
    ("fault", "at", "length", "what", "when", "row"),
    [
        ("nan", 70, 10**9, "observation", "after step 70", 70),
        ("inf", 73, 10, "observation", "after step 3", 73),
        ("nan reward", 70, 10**9, "reward", "in step 70", 69),
        ("nan reward", 33, 10, "reward", "in step 3", 32),
        ("nan final", 70, 10**9, "final observation", "in step 70", 69),
        ("nan final", 64, 10**9, "final observation", "in step 64", 63),
        ("nan", 0, 10**9, "observation", "at the start", 0),
    ],
)
def test_a_nan_is_traced_to_its_environment_and_step(
    algo: str,
    fault: str,
    at: int,
    length: int,
    what: str,
    when: str,
    row: int,
    make_config: MakeConfig,
) -> None:
    message = train_to_nan(make_config, algo, fault, at=at, length=length)
    assert message.startswith(f"environment 1 returned a non-finite {what} {when} of its episode: ")
    assert f", {place(algo, row)} (" in message


@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo"])
def test_a_nan_after_the_last_step_of_a_rollout_is_an_observation(
    algo: str, make_config: MakeConfig
) -> None:
    message = train_to_nan(make_config, algo, "nan", at=64)
    expected = "environment 1 returned a non-finite observation after step 64 of its episode: nan, "
    assert message.startswith(f"{expected}at global step 0 plus 64 steps of every environment")


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize(("fault", "what"), [("nan", ""), ("nan final", "final ")])
def test_a_nan_in_a_dict_names_the_key(
    algo: str, fault: str, what: str, make_config: MakeConfig
) -> None:
    message = train_to_nan(make_config, algo, fault, at=70, form="dict")
    assert message.startswith(f"environment 1 returned a non-finite {what}observation['speed'] ")
    assert "step 70 of its episode" in message


def test_an_observation_is_named_before_the_action_it_caused(make_config: MakeConfig) -> None:
    message = train_to_nan(make_config, "ppo", "nan", at=70, continuous=True)
    assert message.startswith("environment 1 returned a non-finite observation after step 70 ")


@pytest.mark.parametrize("algo", ["ppo", "recurrent_ppo", "sac"])
def test_an_action_without_a_nan_before_it_is_the_policys_fault(
    algo: str, make_config: MakeConfig
) -> None:
    bigger = {"buffer_size": 2000} if algo == "sac" else {}
    config = make_config(algo=algo, eval_episodes=0, **bigger)
    trainer = ExperimentManager.setup(config, env_fn=lambda: Faulty(continuous=True))
    model: Any = trainer.algorithm
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.fill_(torch.nan)
    warm_up = 32 if algo == "sac" else 0
    message = rf"non-finite action for environment 0 in step {warm_up + 1} .*training diverged"
    with pytest.raises(NonFiniteError, match=message):
        trainer.train()


def brute_force(ended: Array, valid: Array, before: int) -> list[int]:
    """Steps before each row and after the last, counted one by one."""
    counts, steps, over = [], before, False
    for row in range(len(ended)):
        if over and valid[row]:  # the reset happened underneath
            steps = 0
        counts.append(steps)
        steps += int(valid[row])
        over = bool(ended[row])
        if not valid[row]:
            steps, over = 0, False
    return [*counts, steps]


@pytest.mark.parametrize("has_reset_rows", [False, True])
def test_steps_of_episodes_are_counted_across_resets_and_rollouts(has_reset_rows: bool) -> None:
    rng = np.random.default_rng(3)
    exact = bounds = 0
    for _ in range(200):
        ended = rng.random(12) < 0.2
        valid = np.ones(12, bool)
        if has_reset_rows:
            for row in range(1, 12):
                valid[row] = not ended[row - 1]
                ended[row] &= valid[row]
        before = int(rng.integers(5))
        counts = brute_force(ended, valid, before)
        after = 0 if ended[-1] else counts[-1]
        arrays = ended[:, None], valid[:, None]
        known = Episodes(*arrays, np.array([before]), None, has_reset_rows)
        later = Episodes(*arrays, None, np.array([after]), has_reset_rows)
        for row in range(12):
            assert known.steps_before(row, 0) == (counts[row], True)
            steps, is_exact = later.steps_before(row, 0)
            assert steps == counts[row] if is_exact else steps <= counts[row]
            exact += is_exact
            bounds += not is_exact
            assert known.is_final(row, 0) == (not valid[row])
        if not ended[-1]:
            assert known.steps_before(12, 0) == (counts[12], True)
        assert known.is_final(12, 0) == (has_reset_rows and bool(ended[-1]))
    assert min(exact, bounds) > 100


# -- episodes without end --------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("steps", [0, 1, 4, 8, 11])
def test_packed_actions_replay_the_episode(
    env_id: str, steps: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_module, "_CHUNK", 4)
    env, again = (make_env(make_config(env_id=env_id)) for _ in range(2))
    env.action_space.seed(1)
    env.reset()
    taken = [env.action_space.sample() for _ in range(steps)]
    shown = [env.step(action)[0] for action in taken]
    state: Any = env.snapshot()  # type: ignore[attr-defined]
    assert state["actions"].tolist() == np.asarray(taken).tolist()
    assert state["actions"].dtype == np.asarray(taken).dtype
    restored: Any = again.restore(state)  # type: ignore[attr-defined]
    assert restored.exact
    if shown:
        assert restored.obs.tobytes() == shown[-1].tobytes()


def endless(limit: int, make_config: MakeConfig, **overrides: Any) -> VectorAdapter:
    """Environments whose episodes do not end, but for the first one's."""
    config = make_config(env_id="probe/Faulty-v0", max_recorded_steps=limit, **overrides)
    env = make_vector_env(config)
    env.set_attr("length", [7, 10**9])  # type: ignore[attr-defined]
    return VectorAdapter(env, config.seed)


def play(env: VectorAdapter, steps: int) -> Any:
    for _ in range(steps):
        step = env.step(IDLE)
    return step


def test_recording_an_endless_episode_stops_at_the_limit_and_is_warned_of_once(
    make_config: MakeConfig,
) -> None:
    env = endless(20, make_config)
    env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(env, 20)
    was_exact = env.exactly_resumable
    assert was_exact
    assert len(env.state_dict()["envs"][1]["actions"]) == 20
    with pytest.warns(UserWarning, match=r"environment 1 .*max_recorded_steps \(20\)") as caught:
        play(env, 100)
    assert len(caught) == 1
    assert env.has_unrecorded_episodes
    assert not env.exactly_resumable
    first, second = env.state_dict()["envs"]
    assert len(first["actions"]) == 120 % 7
    assert "actions" not in second
    assert second["unrecorded"] is True


def test_memory_and_snapshots_of_endless_episodes_stay_flat(make_config: MakeConfig) -> None:
    env = endless(100, make_config)
    env.reset()
    with pytest.warns(UserWarning, match="max_recorded_steps"):
        play(env, 200)
    size = len(str(env.state_dict()))
    gc.collect()
    tracemalloc.start()
    play(env, 3000)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 8000, "3000 recorded actions would take 24 kB and more"
    assert len(str(env.state_dict())) <= size + 100


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_unrecorded_episode_is_resumed_as_a_new_one_and_the_others_exactly(
    vectorization: str, make_config: MakeConfig
) -> None:
    env, again = (endless(20, make_config, vectorization=vectorization) for _ in range(2))
    try:
        env.reset()
        with pytest.warns(UserWarning, match="max_recorded_steps"):
            shown = play(env, 40).obs
        state = env.state_dict()
        with pytest.warns(UserWarning, match=r"environments \[1\] .*max_recorded_steps"):
            _, exact = again.load_state_dict(state, shown)
        assert not exact
        assert again.episode_lengths.tolist() == [40 % 7, 0]
        assert again.has_unrecorded_episodes
        assert not again.exactly_resumable
        saved = again.state_dict()["envs"]
        assert [one["episode"] for one in saved] == [40 // 7, 1]
        assert play(again, 2).episodes == ((0, 7.0, 7),)
    finally:
        env.close()
        again.close()


def test_a_long_episode_that_has_ended_makes_no_resume_inexact_but_is_remembered(
    make_config: MakeConfig,
) -> None:
    env, again = (endless(5, make_config) for _ in range(2))
    for one in (env, again):
        one.env.set_attr("length", 7)  # type: ignore[attr-defined]
    env.reset()
    with pytest.warns(UserWarning, match="max_recorded_steps"):
        shown = play(env, 10).obs
    _, exact = again.load_state_dict(env.state_dict(), shown)
    assert exact
    assert again.has_unrecorded_episodes
    assert not again.exactly_resumable


def test_a_run_with_unrecorded_episodes_is_resumed_approximately(make_config: MakeConfig) -> None:
    class Stop(Callback):
        def on_iteration(self, trainer: Trainer, event: Any) -> None:
            trainer.request_stop("enough")

    config = make_config(env_id="probe/Faulty-v0", max_recorded_steps=40, eval_episodes=0)
    trainer = ExperimentManager.setup(config, callbacks=[Stop()])
    with pytest.warns(UserWarning, match="max_recorded_steps"):
        result = trainer.train()
    with pytest.warns(UserWarning, match=r"environments \[0, 1\] .*max_recorded_steps"):
        again = ExperimentManager.resume(result.run_dir)
    assert again.resumed is not None
    assert again.resumed["resume"] == "approximate"
    assert again.train().metrics["global_step"] == 512


def test_long_episodes_of_an_evaluation_are_nothing_to_warn_of(make_config: MakeConfig) -> None:
    env = endless(5, make_config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reseed(3)
        play(env, 30)


def test_halves_report_for_both(make_config: MakeConfig) -> None:
    halves = (endless(5, make_config), endless(10**6, make_config))
    env = HalvedAdapter(halves)
    env.reset()
    with pytest.warns(UserWarning, match="max_recorded_steps"):
        play(halves[0], 9)
    play(halves[1], 3)
    assert env.has_unrecorded_episodes
    assert not env.exactly_resumable
    assert env.episode_lengths.tolist() == [2, 9, 3, 3]


# -- approximate resume ----------------------------------------------------------------------------


def test_new_episodes_of_an_approximate_resume_depend_on_the_step(
    make_config: MakeConfig,
) -> None:
    def adapter() -> VectorAdapter:
        makers = [functools.partial(gym.make, "CartPole-v1") for _ in range(2)]
        vector: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        return VectorAdapter(vector, seed=4)

    env = adapter()
    first: Any = env.reset()
    begun = [first.tobytes()]
    for _ in range(3):
        obs = env.step(IDLE).obs
        state = env.state_dict()
        restored, exact = adapter().load_state_dict(state, obs)
        same, _ = adapter().load_state_dict(state, obs)
        assert not exact
        assert restored.tobytes() == same.tobytes()  # type: ignore[union-attr]
        begun.append(restored.tobytes())  # type: ignore[union-attr]
    # A resumed run continues the count, so that its own resume begins other episodes again.
    again = adapter()
    again.load_state_dict(state, obs)
    again.step(IDLE)
    begun.append(adapter().load_state_dict(again.state_dict(), obs)[0].tobytes())  # type: ignore[union-attr]
    assert len(set(begun)) == 5


def test_states_without_a_count_of_steps_are_still_loaded(make_config: MakeConfig) -> None:
    config = make_config(env_id="CartPole-v1")
    env, again = (VectorAdapter(make_vector_env(config), config.seed) for _ in range(2))
    env.reset()
    step = play(env, 3)
    state = env.state_dict()
    del state["steps"], state["has_unrecorded_episodes"]
    restored, exact = again.load_state_dict(state, step.obs)
    assert exact
    assert restored.tobytes() == step.obs.tobytes()  # type: ignore[union-attr]
