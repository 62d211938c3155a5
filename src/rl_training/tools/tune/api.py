"""`tune`: search hyperparameters with Optuna; every trial is a folder of ordinary runs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_training.config import TrainConfig, config_from_file
from rl_training.envs.ids import find_spec
from rl_training.errors import ConfigError, UserError
from rl_training.tools.tune.final import PRESET, Comparison, SeedReturns, compare, returns_of
from rl_training.tools.tune.loop import run_trials
from rl_training.tools.tune.result import BEST, best_yaml, write_best, write_study
from rl_training.tools.tune.scores import Objective
from rl_training.tools.tune.settings import Pruner, StudySettings, final_seeds, tuning_seeds
from rl_training.tools.tune.space import declared, read_space
from rl_training.tools.tune.storage import require_optuna
from rl_training.tools.tune.study import TuningStudy
from rl_training.tools.tune.trial import CONFIG
from rl_training.tools.zoo.jobs import Job
from rl_training.tools.zoo.manifest import Entry
from rl_training.tools.zoo.processes import LocalRuns
from rl_training.tools.zoo.run import Runs
from rl_training.tools.zoo.view import LiveLines
from rl_training.untrusted_files import require_no_links

_RAY_RETRIES = 2


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a study has found so far."""

    folder: Path
    """Folder of the study, with a folder for each trial."""
    interrupted: bool
    """Whether a signal stopped it; the same call continues it."""
    trials: Mapping[str, int]
    """Number of trials by state: complete, pruned, fail, running."""
    best_trial: int | None = None
    """Number of the best trial; None: no trial is complete."""
    best_value: float | None = None
    """Its value: the interquartile mean of the objective over the tuning seeds."""
    best_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its settings."""
    best_config: Path | None = None
    """These settings as a preset: a file for ``rl-training train --config``."""
    tuned: SeedReturns | None = None
    """Returns of the best settings on the final seeds; None: not evaluated."""
    preset: SeedReturns | None = None
    """Returns of the untuned preset on the same seeds."""


def tune(
    preset: str | Path | TrainConfig[Any],
    *,
    trials: int = 50,
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    space: Mapping[str, Any] | str | Path | None = None,
    objective: Objective = "final",
    evaluations: int = 10,
    sampler: str = "tpe",
    sampler_seed: int = 1,
    pruner: Pruner = "median",
    final: int | Sequence[int] = 5,
    extend: Sequence[int] = (),
    study: str | None = None,
    output_dir: str | Path = "runs/tune",
    storage: str | Path | None = None,
    engine: Literal["local", "ray"] = "local",
    cpus_per_run: float = 1.0,
    trust_modules: Sequence[str] | None = None,
    progress: bool = True,
    command: str = "rl_training.tune(...)",
) -> TuneResult:
    """Search hyperparameters with Optuna; the same call continues an interrupted study.

    Every trial is trained once per seed, in run folders ``STUDY/trial-0007/seed101/...``; its value
    is the interquartile mean over the seeds. The best settings are then trained on seeds that were
    not tuned on, beside the untuned preset. Several processes may work on one study.

    Args:
        preset: a packaged preset, a YAML file, or a config, which holds all that is not tuned.
        trials: number of trials of the study, pruned and failed ones included.
        seeds: how many seeds, from 101 on, or the seeds themselves.
        jobs: trials that are run at the same time, each in a process.
        space: settings to tune, as a YAML file or a mapping; None: those that the algorithm
            declares.
        objective: "final", the last evaluation of a run, or "curve", the mean of all of them.
        evaluations: evaluations of a run, at which a trial may be pruned.
        sampler: one of Optuna's samplers: tpe, random, gp, cmaes, qmc, nsgaii, nsgaiii,
            brute_force or grid.
        sampler_seed: seed of the sampler.
        pruner: "median", "halving", "hyperband" or "none".
        final: how many seeds for the final evaluation, from 1 on, or the seeds themselves.
        extend: pruned trials to continue to their end, instead of running new ones.
        study: name of the study and of its folder; None: made from the preset's name.
        output_dir: folder of studies.
        storage: file of the study: SQLite (.db) or a journal (.log); None: study.db in its folder.
        engine: run on this machine, or as tasks of a Ray cluster.
        cpus_per_run: CPUs that a run requests of Ray.
        trust_modules: modules that runs may import when they are resumed; None: only Gymnasium and
            rl_training.
        progress: show progress on standard error.
        command: the command, for the files that are written.

    Raises:
        ConfigError: A setting cannot be used, or Optuna is not installed.
        UserError: The study was started with other settings.
    """
    if trials < 1 or jobs < 1:
        raise ConfigError("the number of trials and of jobs must be at least 1")
    config = preset if isinstance(preset, TrainConfig) else config_from_file(preset)
    settings = StudySettings(
        config=config,
        space=declared(config) if space is None else read_space(config, space),
        seeds=tuning_seeds(seeds),
        objective=objective,
        evaluations=evaluations,
        sampler=sampler,
        sampler_seed=sampler_seed,
        pruner=pruner,
    )
    evaluated_on = final_seeds(final, settings.seeds)
    require_optuna()
    if engine == "local" and config.env_id is not None:
        find_spec(config.env_id)  # raises before there is a study
    name = study_name(preset) if study is None else study
    folder = Path(output_dir) / name
    require_no_links(folder, Path(output_dir))
    stored_in = folder / "study.db" if storage is None else Path(storage)
    tuning = TuningStudy(settings, _checked_name(name), folder, stored_in, command)
    lines = LiveLines(shown=progress)
    with (
        contextlib.closing(lines),
        contextlib.closing(_runs(engine, jobs, cpus_per_run, trust_modules)) as runs,
    ):
        stopped = run_trials(
            tuning,
            runs,
            lines,
            target=trials,
            extend=extend,
            changed=lambda: write_study(tuning),
        )
        return _finish(tuning, evaluated_on, runs, lines, stopped=stopped)


def _finish(
    tuning: TuningStudy,
    seeds: tuple[int, ...],
    runs: Runs,
    lines: LiveLines,
    *,
    stopped: bool,
) -> TuneResult:
    """Write the result, with the final evaluation unless a stop was requested."""
    states = [one.state.name.lower() for one in tuning.trials()]
    result = TuneResult(tuning.folder, stopped, {state: states.count(state) for state in states})
    best = tuning.best()
    if best is None:
        write_study(tuning)
        return result
    settings = tuning.settings
    values = settings.space.settings_of(best.params)
    tuned_on = returns_of(_jobs_of(tuning, best.number))
    final: Comparison | None = None
    if seeds and not stopped:
        final = _compare(
            tuning, best.number, settings.config.with_overrides(**values), seeds, runs, lines
        )
    if tuned_on is not None:
        text = best_yaml(tuning, best.number, tuned_on, final)
        write_best(tuning.folder / BEST, text)
    write_study(tuning, final)
    return dataclasses.replace(
        result,
        best_trial=best.number,
        best_value=best.value,
        best_params=values,
        best_config=tuning.folder / BEST,
        tuned=None if final is None else final.tuned,
        preset=None if final is None else final.preset,
    )


def _compare(
    tuning: TuningStudy,
    number: int,
    config: TrainConfig[Any],
    seeds: tuple[int, ...],
    runs: Runs,
    lines: LiveLines,
) -> Comparison | None:
    settings = tuning.settings
    own = f"trial-{number:04d}"
    configs = {PRESET: settings.for_runs(settings.config), own: settings.for_runs(config)}
    if configs[own].to_dict() == configs[PRESET].to_dict():
        del configs[own]
    found = compare(tuning.folder, configs, seeds, runs, lines)
    return None if found is None else Comparison(found.get(own, found[PRESET]), found[PRESET])


def _jobs_of(tuning: TuningStudy, number: int) -> list[Job]:
    frozen = next(one for one in tuning.trials() if one.number == number)
    folder, settings = tuning.folder_of(frozen), tuning.settings
    total = settings.config.total
    entry = Entry(
        preset=folder.name, steps=total, seeds=settings.seeds, expected=None, source="tune"
    )
    return [
        Job(entry, folder / CONFIG, seed, total, folder / f"seed{seed}") for seed in settings.seeds
    ]


def study_name(preset: str | Path | TrainConfig[Any]) -> str:
    """Return the name of the study of a preset, a file or a config."""
    if isinstance(preset, TrainConfig):
        text = f"{preset.algo}-{preset.env_id or preset.dataset}"
    elif Path(preset).is_file():
        text = Path(preset).stem
    else:
        text = str(preset)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80] or "study"


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"the name of a study must consist of letters, digits, '.', '_' and '-'; got {name!r}"
        )
    return name


def _runs(engine: str, jobs: int, cpus_per_run: float, trust_modules: Sequence[str] | None) -> Runs:
    trust = None if trust_modules is None else tuple(trust_modules)
    if engine == "local":
        return LocalRuns(jobs, trust)
    if engine != "ray":
        raise ConfigError(f"the engine must be 'local' or 'ray'; got {engine!r}")
    from rl_training.tools.zoo.ray_runs import RayRuns

    return RayRuns(jobs, cpus_per_run, _RAY_RETRIES, trust)
