"""``rl-training tune``: search hyperparameters of a preset with Optuna."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import Group, HelpText
from rl_training._internal.flags import UnknownWordError, parse_flags
from rl_training.config import TrainConfig, algo_config_type
from rl_training.errors import ConfigError, UserError
from rl_training.terminal import one_line, say, show, show_result
from rl_training.tools.training import train_config
from rl_training.tools.zoo.view import number

if TYPE_CHECKING:
    from rl_training.tools.tune.api import TuneResult

_PROG = "rl-training tune"
_GROUPS = (
    Group("search", (
        "preset", "trials", "seeds", "space", "show_space", "sampler", "sampler_seed",
    )),
    Group("trials", ("objective", "evaluations", "pruner", "extend")),
    Group("final evaluation", ("final_seeds",)),
    Group("where and how", (
        "jobs", "engine", "cpus_per_run", "study", "output_dir", "storage", "trust_modules", "json",
    )),
)  # fmt: skip
_TEXT = HelpText(
    "PRESET [flags] [-- flags of rl-training train]",
    examples=(
        "rl-training tune ppo/cartpole --trials 50 --jobs 2",
        "rl-training tune ppo/cartpole -- --total-timesteps 2e4  # shorter runs",
        "rl-training tune my.yaml --space space.yaml  # your own preset and ranges",
        "rl-training tune sac/pendulum --show-space  # the default ranges, as such a file",
        "rl-training tune -- --algo dqn --env-id Acrobot-v1  # without a preset",
    ),
    groups=_GROUPS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneArgs:
    """Search hyperparameters of a preset with Optuna; if called again, continue the search.

    Every trial is trained once per seed, in run folders; bad ones are pruned early. The best
    settings are written as a preset (best.yaml) and trained on seeds that were not tuned on, beside
    the untuned preset. Flags of 'rl-training train' after -- change the preset for all trials.
    Several processes may work on one study: run the same command in each.
    """

    preset: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")] = None
    """A packaged preset, or a YAML file; unset: the flags after -- name the algorithm."""
    trials: int = 50
    """Number of trials of the study; pruned and failed ones count."""
    seeds: tuple[int, ...] = (3,)
    """How many tuning seeds, from 101 on; two numbers or more: the seeds themselves."""
    space: Path | None = None
    """YAML file of what to tune; unset: what the algorithm declares (--show-space)."""
    show_space: bool = False
    """Print the space as a YAML file, and end."""
    sampler: str = "tpe"
    """Sampler of Optuna: tpe, random, gp, cmaes, qmc, nsgaii, nsgaiii, brute_force or grid."""
    sampler_seed: int = 1
    """Seed of the sampler."""
    objective: Literal["final", "curve"] = "final"
    """What a trial is worth: the last evaluation of its runs, or the mean of all evaluations; the
    interquartile mean over the seeds."""
    evaluations: int = 10
    """Evaluations of a run, at which its trial may be pruned."""
    pruner: Literal["median", "halving", "hyperband", "none"] = "median"
    """Which trials to end early: those below the median of others at the same evaluation, those
    outside the best third of a rung (halving, hyperband), or none."""
    extend: tuple[int, ...] = ()
    """Continue these pruned trials to their end, as new trials, instead of running others."""
    final_seeds: tuple[int, ...] = (5,)
    """How many seeds of the final evaluation, from 1 on; two numbers or more: the seeds themselves;
    0: none."""
    jobs: int = 1
    """Trials that are run at the same time."""
    engine: Literal["local", "ray"] = "local"
    """Where runs are executed: on this machine, or as tasks of a Ray cluster (RAY_ADDRESS; unset:
    one is started here)."""
    cpus_per_run: float | None = None
    """(--engine ray) CPUs that a run requests, and its number of torch threads; unset: 1."""
    study: str | None = None
    """Name of the study, and of its folder; unset: from the name of the preset."""
    output_dir: Path = Path("runs/tune")
    """Folder of studies."""
    storage: Path | None = None
    """File of the study: SQLite (.db) or a journal (.log); unset: study.db in its folder."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules that runs may import when they are resumed; without a value: any; unset: any
    for runs that you started on this machine, otherwise only Gymnasium and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    words, train_words = _divided(args)
    try:
        options: TuneArgs = parse_flags(TuneArgs, words, _PROG, _TEXT)
    except UnknownWordError as error:
        raise _explained(error, words) from None
    config = _config(options.preset, train_words)
    if options.cpus_per_run is not None and options.engine != "ray":
        raise UserError("--cpus-per-run needs --engine ray")
    if options.show_space:
        return _show_space(options, config)
    from rl_training.tools.tune.api import study_name, tune

    name = options.study
    if name is None and options.preset is not None:
        name = study_name(options.preset)
    command = shlex.join(["rl-training", "tune", *(word for word in args if word != "--json")])
    result = tune(
        config,
        trials=options.trials,
        seeds=_count_or_list(options.seeds),
        jobs=options.jobs,
        space=options.space,
        objective=options.objective,
        evaluations=options.evaluations,
        sampler=options.sampler,
        sampler_seed=options.sampler_seed,
        pruner=options.pruner,
        final=_count_or_list(options.final_seeds),
        extend=options.extend,
        study=name,
        output_dir=options.output_dir,
        storage=options.storage,
        engine=options.engine,
        cpus_per_run=1.0 if options.cpus_per_run is None else options.cpus_per_run,
        trust_modules=options.trust_modules,
        command=command,
    )
    _show_result(result)
    if options.json:
        show(json.dumps(_as_json(result)) + "\n")
    return 0 if result.best_trial is not None or result.interrupted else 1


def _divided(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after ``--``."""
    words = list(args)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _config(preset: str | None, train_words: Sequence[str]) -> TrainConfig[Any]:
    words = list(train_words)
    if preset is not None:
        words.insert(0, preset)
    elif not words:
        raise ConfigError(
            "nothing to tune: name a preset (rl-training tune ppo/cartpole), or an algorithm and an"
            " environment (rl-training tune -- --algo ppo --env-id CartPole-v1)"
        )
    return train_config(words)


def _explained(error: UnknownWordError, words: Sequence[str]) -> ConfigError:
    """Return the error for an unknown word; flags of ``train`` belong after ``--``."""
    field = error.word.removeprefix("--").replace("-", "_")
    known = {one.name for one in dataclasses.fields(TrainConfig)}
    for algo in ("ppo", "dqn", "sac"):
        known |= {one.name for one in dataclasses.fields(algo_config_type(algo))}
    if not error.word.startswith("--") or field.removeprefix("no_") not in known:
        return error
    at = next(i for i, word in enumerate(words) if word.partition("=")[0] == error.word)
    example = shlex.join([*words[:at], "--", *words[at:]])
    return ConfigError(
        f"{error.word} is a flag of rl-training train: write those after -- (rl-training tune"
        f" {example})"
    )


def _count_or_list(given: tuple[int, ...]) -> int | tuple[int, ...]:
    return given[0] if len(given) == 1 else given


def _show_space(options: TuneArgs, config: TrainConfig[Any]) -> int:
    from rl_training.tools.tune.space import declared, read_space

    space = declared(config) if options.space is None else read_space(config, options.space)
    show_result(space.to_yaml())
    if options.json:
        show_result(json.dumps({"space": space.to_plain()}) + "\n")
    return 0


def _show_result(result: TuneResult) -> None:
    counts = ", ".join(f"{count} {_STATES[state]}" for state, count in result.trials.items())
    show(f"study: {one_line(str(result.folder))}: {counts or 'no trials'}\n")
    if result.interrupted:
        say("stopped; the same command continues the study")
    if result.best_trial is None:
        if not result.interrupted:
            say("no trial is complete: prune less (--pruner none), or see the log.txt of a trial")
        return
    settings = ", ".join(f"{name} {_brief(value)}" for name, value in result.best_params.items())
    show(f"best:  trial {result.best_trial}, {number(result.best_value)}: {settings}\n")
    if result.tuned is not None and result.preset is not None:
        seeds = ", ".join(map(str, result.tuned.returns))
        show(
            f"return on seeds that were not tuned on ({seeds}):\n"
            f"  best trial      {result.tuned.text()}\n"
            f"  untuned preset  {result.preset.text()}\n"
        )
    best = shlex.quote(str(result.best_config))
    show(
        f"train: rl-training train --config {best}\n"
        f"page:  rl-training report {shlex.quote(str(result.folder))}\n"
    )


_STATES = {
    "complete": "complete",
    "pruned": "pruned",
    "fail": "failed",
    "running": "not ended",
    "waiting": "waiting",
}


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _as_json(result: TuneResult) -> dict[str, Any]:
    def plain(found: Any) -> Any:
        if found is None:
            return None
        returns = {str(seed): value for seed, value in found.returns.items()}
        return {"returns": returns, **dataclasses.asdict(found.interval)}

    return {
        "folder": str(result.folder),
        "interrupted": result.interrupted,
        "trials": dict(result.trials),
        "best_trial": result.best_trial,
        "best_value": result.best_value,
        "best_params": dict(result.best_params),
        "best_config": None if result.best_config is None else str(result.best_config),
        "tuned": plain(result.tuned),
        "preset": plain(result.preset),
    }
