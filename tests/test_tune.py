"""``rl-training tune``: spaces, seeds, studies shared by processes, trials that are real runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optuna")

import optuna
from optuna.trial import TrialState

from rl_training import tune
from rl_training.cli import main
from rl_training.config import TrainConfig, config_from_file, config_from_mapping, preset_names
from rl_training.errors import ConfigError, EnvironmentFailure, StorageError, UserError
from rl_training.registry import ALGORITHMS, config_type
from rl_training.runs import read_json
from rl_training.search_space import Choice, Range, declared_space
from rl_training.tools.report.log import Series
from rl_training.tools.tune import api, loop, trial
from rl_training.tools.tune.api import study_name
from rl_training.tools.tune.cma_es import ReplayedCmaEs
from rl_training.tools.tune.loop import run_trials
from rl_training.tools.tune.result import short_settings, write_study
from rl_training.tools.tune.samplers import SAMPLERS
from rl_training.tools.tune.scores import interquartile_mean, interval, score
from rl_training.tools.tune.settings import StudySettings, final_seeds, tuning_seeds
from rl_training.tools.tune.space import declared, read_space
from rl_training.tools.tune.study import TuningStudy
from rl_training.tools.tune.trial import TrialRun
from rl_training.tools.zoo.jobs import Job, command, job_status
from rl_training.tools.zoo.processes import LocalRuns
from rl_training.tools.zoo.run import Ended
from rl_training.tools.zoo.view import LiveLines

ROOT = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "num_steps": [32, 64]}
SHORT: dict[str, Any] = {
    "total_timesteps": 1024,
    "num_envs": 4,
    "eval_episodes": 1,
    "algo_kwargs": {"num_steps": 32, "learning_rate": 1e-3},
}


def short_config(**settings: Any) -> TrainConfig[Any]:
    return config_from_mapping({"algo": "ppo", "env_id": "CartPole-v1", **SHORT, **settings})


def make_settings(**changes: Any) -> StudySettings:
    config = changes.pop("config", None) or short_config()
    given: dict[str, Any] = {
        "config": config,
        "space": read_space(config, changes.pop("space", SPACE)),
        "seeds": (101, 102),
        "objective": "final",
        "evaluations": 4,
        "sampler": "random",
        "sampler_seed": 1,
        "pruner": "none",
    }
    return StudySettings(**{**given, **changes})


def make_study(folder: Path, *, storage: Path | None = None, **changes: Any) -> TuningStudy:
    settings = make_settings(**changes)
    storage = storage or folder / "study.log"  # a database takes longer to create
    return TuningStudy(settings, "study", folder, storage, "rl-training tune <b>")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(trial, "_READ_SECONDS", 0.1)


# -- spaces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_declares_values_that_its_config_accepts(algo: str) -> None:
    config = config_from_file(next(name for name in preset_names() if name.startswith(f"{algo}/")))
    space = declared(config)
    assert "learning_rate" in space.values
    assert len(space.values) >= 2
    for name, values in space.values.items():
        tried = values.options if isinstance(values, Choice) else (values.low, values.high)
        accepted = 0
        for value in tried:
            with contextlib.suppress(ConfigError):
                config.with_overrides(**{name: value})
                accepted += 1
        assert accepted >= (2 if isinstance(values, Range) else 1), name


def test_a_subclass_declares_its_own_and_inherits_the_rest() -> None:
    class Base:
        SEARCH = {"a": Choice((1, 2)), "b": Range(0, 1)}

    class Derived(Base):
        SEARCH = {"b": None, "c": Choice((3,))}

    assert declared_space(Derived) == {"a": Choice((1, 2)), "c": Choice((3,))}
    sequences = declared_space(config_type("drqn"))
    assert "batch_sequences" in sequences
    assert "batch_size" not in sequences


def test_what_the_config_refuses_whatever_its_value_is_left_out() -> None:
    assert "train_freq" in declared_space(config_type("iql"))
    assert "train_freq" not in declared(config_from_file("iql/pendulum")).values
    assert "normalize_obs" not in declared(config_from_file("ppo/pong_atari")).values


def test_a_file_is_the_whole_space(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "learning_rate: {low: 1e-5, high: 1e-2, log: true}\nnum_steps: [32, 64]\n"
        "update_epochs: {low: 1, high: 20}\nhidden_sizes: [[64, 64], [8]]\nnum_envs: [4, 8]\n"
        "gamma: declared\ntarget_kl: [null, 0.1]\n"
    )
    config = config_from_file("ppo/cartpole")
    space = read_space(config, path)
    assert list(space.values) == [
        *("learning_rate", "num_steps", "update_epochs", "hidden_sizes", "num_envs", "gamma"),
        "target_kl",
    ]
    assert space.values["gamma"] == declared_space(config_type("ppo"))["gamma"]
    distributions = space.distributions()
    assert isinstance(distributions["update_epochs"], optuna.distributions.IntDistribution)
    params = {
        "learning_rate": 1e-3, "num_steps": 64, "update_epochs": 7, "hidden_sizes": "[8]",
        "num_envs": 4, "gamma": 0.9, "target_kl": None,
    }  # fmt: skip
    changed = config.with_overrides(**space.settings_of(params))
    assert changed.num_envs == 4
    assert changed.algo_kwargs.hidden_sizes == (8,)
    assert changed.algo_kwargs.update_epochs == 7
    (tmp_path / "again.yaml").write_text(space.to_yaml())
    again = read_space(config, tmp_path / "again.yaml")
    assert dict(again.values) == dict(space.values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning_rat: [1, 2]", "is no setting of ppo. Did you mean 'learning_rate'"),
        ("batch_size: [1, 2]", "is no setting of ppo"),
        ("seed: [1, 2]", "'seed' cannot be tuned"),
        ("total_timesteps: [1, 2]", "cannot be tuned"),
        ("gamma: 0.9", "must be a list of values"),
        ("gamma: {low: 0.1}", "needs 'high'"),
        ("gamma: {low: 0.1, high: 0.2, lgo: true}", "gamma.lgo'. Did you mean 'log'"),
        ("gamma: {low: 0.2, high: 0.1}", "must be below"),
        ("gamma: {low: .nan, high: 1}", "must be below"),
        ("gamma: {low: 0, high: 1, log: true}", "above 0 with log"),
        ("num_steps: {low: 1.5, high: 3}", "whole number"),
        ("num_steps: [many]", "whole number"),
        ("num_steps: []", "one value or more"),
        ("num_steps: [1, 1]", "all different"),
        ("activation: {low: 1, high: 2}", "takes no range"),
        ("activation: [tahn]", "must be one of"),
        ("lr_schedule: declared", "declares no range of 'lr_schedule'"),
        ("[]", "must contain a mapping"),
        ("{}", "lists no setting"),
    ],
)
def test_mistakes_in_a_space_are_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_space(config_from_file("ppo/cartpole"), path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_values_of_a_preset_are_clipped_to_the_space() -> None:
    config = short_config(algo_kwargs={"num_steps": 48, "learning_rate": 1e-6})
    assert make_settings().space.params_near(config) == {"learning_rate": 1e-4}
    assert make_settings().space.params_near(short_config()) == {
        "learning_rate": 1e-3,
        "num_steps": 32,
    }


def test_values_outside_the_space_are_refused() -> None:
    space = make_settings().space
    good = {"learning_rate": 1e-3, "num_steps": 64}
    assert space.settings_of(good) == good
    for bad in ({"learning_rate": 1.0}, {"num_steps": 48}, {"num_steps": None}):
        with pytest.raises(ConfigError, match="within the space"):
            space.settings_of({**good, **bad})


# -- settings and scores ---------------------------------------------------------------------------


def test_seeds() -> None:
    assert tuning_seeds(3) == (101, 102, 103)
    assert tuning_seeds([200, 300]) == (200, 300)
    assert final_seeds(5, (101, 102)) == (1, 2, 3, 4, 5)
    assert final_seeds(0, (101,)) == ()
    with pytest.raises(ConfigError, match=r"above 100.*got 7, 100"):
        tuning_seeds([7, 100, 101])
    with pytest.raises(ConfigError, match="in both: 102"):
        final_seeds([1, 102], tuning_seeds(3))
    with pytest.raises(ConfigError, match="from 0 to 100"):
        tuning_seeds(101)
    with pytest.raises(ConfigError, match="different"):
        tuning_seeds([101, 101])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "cmaes", "space": {"num_steps": [32, 64]}}, "a setting with a range"),
        ({"sampler": "randm"}, "Did you mean 'random'"),
        ({"sampler": "brute_force"}, "needs a space of lists"),
        ({"pruner": "medain"}, "Did you mean 'median'"),
        ({"objective": "best"}, "'final' or 'curve'"),
        ({"evaluations": 0}, "evaluations must be at least 1"),
        ({"config": short_config(eval_episodes=0)}, "eval_episodes must be above 0"),
    ],
)
def test_mistakes_in_the_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings(**changes)


def test_scores_are_those_worked_out_by_hand() -> None:
    steps = np.array([100.0, 200.0, 400.0])
    logged = Series(steps, steps, np.array([10.0, 20.0, 40.0]))
    assert score(logged, "final") == 40.0
    assert score(logged, "curve") == (100 * 10 + 100 * 20 + 200 * 40) / 400
    assert interquartile_mean([0.0, 10.0, 20.0, 100.0]) == 15.0
    assert interquartile_mean([0.0, 10.0, 50.0]) == 20.0
    found = interval([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert 1.0 <= found.low < 2.5 < found.high <= 4.0
    assert interval([5.0]) == interval([5.0, 5.0])


def test_the_interquartile_mean_is_rliables() -> None:
    metrics = pytest.importorskip("rliable.metrics")
    random = np.random.default_rng(0)
    for count in range(1, 12):
        values = random.normal(size=count)
        found = interquartile_mean(values.tolist())
        assert found == pytest.approx(metrics.aggregate_iqm(values[:, None]))


# -- studies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_the_preset_is_the_first_trial_and_a_study_is_continued(file: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, storage=tmp_path / file)
    first = study.next_trial(2)
    assert first is not None
    assert first.params == {"learning_rate": 1e-3, "num_steps": 32}
    study.finish(first, 5.0)
    again = make_study(tmp_path, storage=tmp_path / file)
    second = again.next_trial(2)
    assert second is not None
    assert second.number == 1
    again.finish(second, 7.0)
    assert again.next_trial(2) is None
    best = again.best()
    assert best is not None
    assert best.number == 1
    with pytest.raises(UserError, match="another folder"):
        make_study(tmp_path / "elsewhere", storage=tmp_path / file)


def test_the_settings_of_a_study_do_not_change(tmp_path: Path) -> None:
    make_study(tmp_path)
    for change, named in (
        ({"seeds": (101,)}, r"seeds \(\[101, 102\] instead of \[101\]\)"),
        ({"config": short_config(total_timesteps=2048)}, "total_timesteps"),
        ({"config": short_config(algo_kwargs={"num_steps": 32, "gamma": 0.5})}, "gamma"),
        ({"space": {"num_steps": [32]}}, "space.learning_rate"),
        ({"objective": "curve"}, "objective"),
        ({"sampler_seed": 2}, "sampler_seed"),
    ):
        with pytest.raises(UserError, match=f"other settings.*{named}"):
            make_study(tmp_path, **change)


def numbers_of(study: TuningStudy) -> list[dict[str, Any]]:
    return [dict(one.params) for one in study.trials()]


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", "qmc", "nsgaii", "brute_force"])
def test_a_continued_study_samples_what_an_uninterrupted_one_would(
    sampler: str, tmp_path: Path
) -> None:
    lists = {**SPACE, "learning_rate": [1e-4, 3e-4, 1e-3]}
    space = lists if sampler == "brute_force" else SPACE

    def go(folder: Path, *, reopened: bool) -> list[dict[str, Any]]:
        study = None
        for value in range(13 if sampler in ("tpe", "cmaes") else 5):
            if study is None or (reopened and value in (3, 11)):
                study = make_study(folder, sampler=sampler, space=space)
            claimed = study.next_trial(20)
            assert claimed is not None
            study.finish(claimed, float(value % 4))
        assert study is not None
        if sampler == "cmaes":  # also for a single setting with a range
            sampled = study.trials()[1:]
            assert all("cma:generation" in one.system_attrs for one in sampled)
        return numbers_of(study)

    whole = go(tmp_path / "a", reopened=False)
    assert whole == go(tmp_path / "b", reopened=True)
    assert len({str(params) for params in whole}) > 2


def test_cma_es_computes_the_state_that_optuna_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")

    def try_one(sampler: Any) -> None:
        study.sampler = sampler
        one = study.ask()
        x, n = one.suggest_float("x", 1e-4, 1.0, log=True), one.suggest_int("n", 1, 64)
        flag = one.suggest_categorical("flag", (False, True))
        study.tell(one, -((np.log10(x) + 2) ** 2) - (n - 20) ** 2 / 100 + flag)

    for seed in range(30):
        try_one(optuna.samplers.CmaEsSampler(seed=seed))
    theirs: Any = optuna.samplers.CmaEsSampler()._restore_optimizer(study.trials)
    monkeypatch.setattr("pickle.loads", None)  # the study holds pickles now
    monkeypatch.setattr("pickle.dumps", None)
    ours = ReplayedCmaEs(seed=30)
    try_one(ours)
    mine = ours._restore_optimizer(study.trials[:-1])
    assert mine.generation == theirs.generation == 4
    for name in ("mean", "_C", "_sigma", "_p_sigma", "_pc"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-12)
    for seed in range(31, 60):
        try_one(ReplayedCmaEs(seed=seed))
    assert ours._restore_optimizer(study.trials).generation == 9
    assert not any("cma:optimizer:0" in one.system_attrs for one in study.trials[30:])
    assert abs(ours._restore_optimizer(study.trials).mean[0] - 0.4) < 0.2  # n of 20, in [0, 1]


@pytest.mark.parametrize("sampler", ["brute_force", "grid"])
def test_all_combinations_are_tried_once(sampler: str, tmp_path: Path) -> None:
    space = {"num_steps": [32, 64], "update_epochs": {"low": 1, "high": 2}}
    study = make_study(tmp_path, sampler=sampler, space=space)
    while (claimed := study.next_trial(50)) is not None:
        study.finish(claimed, 0.0)
    tried = [(one.params["num_steps"], one.params["update_epochs"]) for one in study.trials()]
    assert sorted(tried) == [(32, 1), (32, 2), (64, 1), (64, 2)]


def test_a_sampler_without_its_package_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr(optuna.samplers, "GPSampler", fails)
    with pytest.raises(ConfigError, match="'gp' needs a package"):
        make_study(tmp_path, sampler="gp")
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_a_trial_of_a_killed_process_is_claimed_by_another(file: str, tmp_path: Path) -> None:
    storage = tmp_path / file
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            claimed = make_study(tmp_path, storage=storage).next_trial(10)
            os.write(write, b"none" if claimed is None else b"%d" % claimed.number)
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        assert os.read(read, 10) == b"0"
        study = make_study(tmp_path, storage=storage)
        mine = study.next_trial(2)
        assert mine is not None
        assert mine.number == 1, "the other one is running"
        assert study.next_trial(2) is None
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.close(read)
        os.close(write)
    left = study.next_trial(2)
    assert left is not None
    assert left.number == 0
    assert left.params == {"learning_rate": 1e-3, "num_steps": 32}
    assert study.next_trial(2) is None


def test_a_trial_that_lost_its_process_between_two_parameters_is_completed(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    trial = study.study.ask()
    trial.suggest_categorical("num_steps", [32, 64])
    claimed = study.next_trial(1)
    assert claimed is not None
    assert claimed.number == trial.number
    assert set(claimed.params) == set(SPACE)


def test_a_journal_line_that_was_written_in_part_is_removed(tmp_path: Path) -> None:
    storage = tmp_path / "study.log"
    study = make_study(tmp_path, storage=storage)
    first = study.next_trial(3)
    assert first is not None
    with storage.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    other = make_study(tmp_path, storage=storage)
    second = other.next_trial(3)
    assert second is not None
    other.finish(second, 1.0)
    states = [one.state for one in make_study(tmp_path, storage=storage).trials()]
    assert states == [TrialState.RUNNING, TrialState.COMPLETE]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("study.db", b"not a database at all", "is not a SQLite database"),
        ("study.txt", None, "must end in .db"),
        ("a?b.db", None, "must not contain"),
        ("study.db", b"SQLite format 3\0" + b"x" * 100, "cannot open the study"),
        ("study.log", b"what\n" * 3, "cannot (open|read) the study"),
        ("study.log", b'{"op_code": 99}\n{"x": 1}\n', "cannot (open|read) the study"),
    ],
)
def test_a_storage_that_is_none_is_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        make_study(tmp_path, storage=tmp_path / name)


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.db.lock").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*study\.db\.lock: Is a directory"):
        make_study(tmp_path / "study", storage=tmp_path / "study.db")


def test_a_study_of_others_is_neither_continued_nor_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    optuna.create_study(study_name="study", storage=f"sqlite:///{path}").ask()
    with pytest.raises(UserError, match=r"direction|not made by"):
        make_study(tmp_path, storage=path)
    sources = [*(ROOT / "src/rl_training/tools/tune").glob("*.py")]
    assert not [one for one in sources if "import pickle" in one.read_text()]


def test_choices_of_another_study_are_not_taken(tmp_path: Path) -> None:
    """A stored value outside the space is refused, whatever it names."""
    study = make_study(tmp_path, space={"activation": ["tanh", "relu"]})
    values = optuna.distributions.CategoricalDistribution(("os:system",))
    planted = optuna.trial.create_trial(
        params={"activation": "os:system"}, distributions={"activation": values}, value=1e9
    )
    study.study.add_trial(planted)
    best = study.best()
    assert best is not None
    with pytest.raises(ConfigError, match="within the space"):
        study.settings.trial_config(best.params)


# -- trials that are real runs ---------------------------------------------------------------------


class Finished:
    """A run that was executed when it was started."""

    def __init__(self, job: Job, end: Ended) -> None:
        self.job, self._end = job, end

    def poll(self) -> Ended | None:
        return self._end

    def stop(self, *, hard: bool) -> None:
        del hard


class RunsHere:
    """Real runs in this process, one after the other."""

    retries = 0

    def __init__(self, at_once: int = 1, fail: int = 0) -> None:
        self.at_once, self._fail = at_once, fail
        self.started: list[Job] = []

    def start(self, job: Job) -> Finished:
        self.started.append(job)
        if len(self.started) <= self._fail:
            return Finished(job, Ended(succeeded=False, reason="it failed"))
        words = command(job, job_status(job), None)[4:]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = main(words)
        return Finished(job, Ended(code == 0, "failed"))

    def close(self) -> None:
        pass


def quietly(study: TuningStudy, runs: Any, **options: Any) -> bool:
    options = {"changed": lambda: None, **options}
    return run_trials(study, runs, LiveLines(shown=False), **options)


def test_trials_are_run_folders_with_the_seeds_and_settings_of_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path, evaluations=2)
    assert not quietly(study, RunsHere(), target=2)
    assert len(study.trials()) == 2
    for frozen in study.trials():
        assert frozen.state == TrialState.COMPLETE
        finals = []
        for seed in (101, 102):
            (run,) = (study.folder / f"trial-{frozen.number:04d}" / f"seed{seed}").glob("ppo__*")
            config = config_from_file(run / "config.yaml")
            assert config.seed == seed
            assert config.algo_kwargs.learning_rate == frozen.params["learning_rate"]
            assert config.algo_kwargs.num_steps == frozen.params["num_steps"]
            finals.append(read_json(run / "summary.json")["metrics"]["eval/return_mean"])
        assert frozen.value == pytest.approx(np.mean(finals))
        # Two evaluations of each of two seeds; the value after each is over the seeds so far.
        assert sorted(frozen.intermediate_values) == [1, 2, 3, 4]
        assert frozen.intermediate_values[2] == pytest.approx(finals[0])
        assert frozen.intermediate_values[4] == pytest.approx(frozen.value)


def test_finished_seeds_are_not_trained_again(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    claimed = study.next_trial(1)
    assert claimed is not None
    trial = TrialRun(claimed, study.settings, study.settings.trial_config(claimed.params))
    first = RunsHere()
    while not trial.line().startswith("trial-0000 seed 102"):
        assert trial.advance(first) is None
    study.release(claimed)  # as if the process had died after the first seed
    assert not quietly(make_study(tmp_path), again := RunsHere(), target=1)
    assert [job.seed for job in first.started] == [101]
    assert [job.seed for job in again.started] == [102]
    assert not quietly(make_study(tmp_path), third := RunsHere(), target=1)
    assert third.started == []


def test_combinations_that_the_config_refuses_are_pruned_trials(tmp_path: Path) -> None:
    study = make_study(tmp_path, space={"num_minibatches": [3, 5, 7]})
    assert not quietly(study, runs := RunsHere(), target=3)
    assert runs.started == []
    assert {one.state for one in study.trials()} == {TrialState.PRUNED}
    assert "num_minibatches" in str(study.trials()[0].user_attrs["reason"])
    with pytest.raises(UserError, match="pruned trials: none"):
        study.extend(0)


def test_a_failed_trial_is_recorded_and_three_in_a_row_end_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path / "a", seeds=(101,))
    assert not quietly(study, RunsHere(fail=2), target=3)
    states = [one.state for one in study.trials()]
    assert states == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    with pytest.raises(EnvironmentFailure, match=r"3 trials in a row failed.*it failed"):
        quietly(make_study(tmp_path / "b", seeds=(101,)), RunsHere(fail=9), target=9)


class Always(optuna.pruners.BasePruner):
    """Prunes every trial."""

    def prune(self, study: Any, trial: Any) -> bool:
        return True


def test_a_pruned_run_saves_and_can_be_extended_exactly(tmp_path: Path) -> None:
    config = short_config(total_timesteps=20_480, num_envs=8)
    study = make_study(tmp_path, config=config, evaluations=10, seeds=(101,))
    study.study.pruner = Always()
    assert not quietly(study, LocalRuns(1), target=1)
    (trial,) = study.trials()
    assert trial.state == TrialState.PRUNED
    (run,) = (tmp_path / "trial-0000" / "seed101").glob("ppo__*")
    summary = read_json(run / "summary.json")
    assert summary["status"] == "interrupted", "it saved a checkpoint"
    assert summary["global_step"] < 20_480
    with pytest.raises(UserError, match="trial 3 of the study 'study' does not exist"):
        study.extend(3)
    assert not quietly(study, RunsHere(), target=1, extend=(0,))
    pruned, extended = study.trials()
    assert pruned.state == TrialState.PRUNED
    assert extended.state == TrialState.COMPLETE
    assert extended.params == pruned.params
    assert [path.name for path in run.parent.glob("ppo__*")] == [run.name], "the same run"
    (resumed,) = read_json(run / "metadata.json")["resumes"]
    assert resumed["resume"] == "exact"
    final = read_json(run / "summary.json")["metrics"]["eval/return_mean"]
    assert extended.value == final


# -- the result ------------------------------------------------------------------------------------


def test_the_command_finds_writes_and_evaluates_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "_runs", lambda *_: RunsHere())  # processes: see test_tune_processes
    (tmp_path / "base.yaml").write_text(short_config().to_yaml())
    (tmp_path / "space.yaml").write_text("learning_rate: [0.001, 0.01]\n")
    words = ["tune", "base.yaml", "--space", "space.yaml", "--trials", "2", "--jobs", "2"]
    words += ["--seeds", "1", "--final-seeds", "1", "--evaluations", "2"]
    words += ["--sampler", "brute_force", "--pruner", "none", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found["trials"] == {"complete": 2}
    assert "return on seeds that were not tuned on (1)" in printed
    best = config_from_file(found["best_config"])
    assert best.algo_kwargs.learning_rate == found["best_params"]["learning_rate"]
    text = Path(found["best_config"]).read_text()
    assert "rl-training tune base.yaml" in text
    assert best.total_timesteps == 1024
    study = read_json(tmp_path / "runs/tune/base/study.json")
    assert study["final"]["tuned"]["returns"] == list(found["tuned"]["returns"].values())
    assert list(found["tuned"]["returns"]) == ["1"]
    (preset_run,) = (tmp_path / "runs/tune/base/final/preset/seed1").glob("ppo__*")
    summary = read_json(preset_run / "summary.json")
    assert found["preset"]["mean"] == summary["metrics"]["eval/return_mean"]


def test_python_and_a_preset_without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else real(name)
    )
    with pytest.raises(ConfigError, match=r"extra 'tune'; in the clone: pip install '.\[tune\]'"):
        tune("ppo/cartpole")
    with pytest.raises(ConfigError, match="at least 1"):
        tune("ppo/cartpole", trials=0)


@pytest.mark.parametrize(
    "name", ["ppo/cartpole", "ppo/pong_atari", "iql/pendulum", "drqn/cartpole"]
)
def test_short_settings_mean_the_same_config(name: str) -> None:
    config = config_from_file(name)
    short = short_settings(config)
    again = config_from_mapping(short).to_dict()
    assert {**again, "seed": 0} == {**config.to_dict(), "seed": 0}
    assert len(short) < 15


def test_names_of_studies() -> None:
    assert study_name("ppo/cartpole") == "ppo-cartpole"
    assert study_name(short_config()) == "ppo-CartPole-v1"
    with pytest.raises(UserError, match="name of a study"):
        tune("ppo/cartpole", study="../x")


def test_a_report_shows_the_study_and_leaves_out_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("rliable")
    from rl_training.tools import write_report

    folder = tmp_path / "study"
    study = make_study(folder, seeds=(101,))
    quietly(study, RunsHere(), target=2)
    study = TuningStudy(study.settings, "study", folder, folder / "study.log", "--extend 1")
    write_study(study)
    written = write_report([tmp_path], tmp_path / "report")
    page = written.page.read_text()
    assert '<h2 id="tuning">Tuning</h2>' in page
    assert "rl-training tune &lt;b&gt;" in page
    best = study.best()
    assert best is not None
    assert {run.path.parents[1].name for run in written.report.runs} == {f"trial-{best.number:04d}"}
    assert "Value of every trial" in page
    assert "Best trials" in page
    (folder / "study.json").write_text('{"format": 1, "study": "x"}')
    damaged = write_report([tmp_path], tmp_path / "report").report.damaged
    assert [(one.path, "algo" in one.reason) for one in damaged] == [(folder, True)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "nothing to tune"),
        (("ppo/cartpol",), "Did you mean 'ppo/cartpole'"),
        (("ppo/cartpole", "--total-timesteps", "10"), "write those after --"),
        (("ppo/cartpole", "--trails", "3"), "Did you mean --trials"),
        (("ppo/cartpole", "--seeds", "5", "6"), "must be above 100"),
        (("ppo/cartpole", "--final-seeds", "1", "102"), "differ from the tuning seeds"),
        (("ppo/cartpole", "--storage", "sqlite:///x.db"), "is the path of a file"),
        (("ppo/cartpole", "--space", "nowhere.yaml"), "nowhere.yaml"),
        (("ppo/cartpole", "--", "--env-id", "CartPoll-v1"), "Did you mean 'CartPole-v1'"),
        (("ppo/cartpole", "--cpus-per-run", "2"), "needs --engine ray"),
        (("ppo/cartpole", "--", "--learning-rat", "2"), "Did you mean --learning-rate"),
    ],
)
def test_mistakes_on_the_command_line(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_the_help_names_all_samplers(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["tune", "--help"])
    printed = capsys.readouterr().out
    assert [name for name in SAMPLERS if name not in printed] == []
    assert [name for name in SAMPLERS if name not in str(api.tune.__doc__)] == []


def test_the_space_is_printed_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "ppo/cartpole", "--show-space"]) == 0
    path = tmp_path / "space.yaml"
    path.write_text(capsys.readouterr().out)
    config = config_from_file("ppo/cartpole")
    assert dict(read_space(config, path).values) == dict(declared(config).values)
