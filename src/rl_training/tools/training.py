"""``rl-training train``, ``resume`` and ``eval``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import Group, HelpText
from rl_training._internal.flags import UnknownWordError, parse_flags
from rl_training.config import (
    TrainConfig,
    algo_config_type,
    config_from_mapping,
    merge_settings,
)
from rl_training.errors import ConfigError
from rl_training.launched import rank
from rl_training.registry import ALGORITHMS, find_entry
from rl_training.terminal import say, show
from rl_training.tools.sources import (
    NOTHING_TO_TRAIN,
    explained,
    kept_setting,
    source_settings,
    take_source,
    value_of,
)
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.runtime.trainer import TrainResult

RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
"""A run folder or a checkpoint as an argument; ``--checkpoint RUN`` is accepted as well."""

TRAIN_GROUPS = (
    Group(
        "environment",
        (
            "env_id", "num_envs", "shards", "env_kwargs", "wrappers", "vectorization",
            "worker_timeout",
            "normalize_obs", "normalize_reward", "clip_obs", "clip_reward",
        ),
    ),
    Group("training", ("algo", "total_timesteps", "seed", "init_from")),
    Group(
        "recorded data",
        ("dataset", "total_updates", "dataset_transitions", "dataset_fraction"),
    ),
    Group(
        "evaluation and checkpoints",
        (
            "eval_interval", "eval_episodes", "eval_deterministic", "record_interval",
            "checkpoint_interval", "keep_checkpoints", "max_recorded_steps",
        ),
    ),
    Group(
        "logging and display",
        (
            "output_dir", "progress", "log_interval_steps", "log_interval", "log_info",
            "tensorboard", "wandb", "wandb_project",
            "mlflow", "mlflow_experiment", "trackers",
        ),
    ),
    Group(
        "performance",
        ("device", "acceleration", "deterministic", "precision", "torch_threads", "overlap"),
    ),
    Group("Ray", ("engine", "lag", "worker_cpus", "max_worker_failures")),
    Group("hyperparameters of {algo}", ("algo_kwargs",)),
    Group("Atari", ("preprocessing", "atari")),
)  # fmt: skip
"""The fields of `TrainConfig` in the order of the help text."""

_EXAMPLES = (
    "rl-training train ppo/cartpole  # a preset: see 'rl-training presets'",
    "rl-training train --algo sac --env-id Pendulum-v1 --seed 3  # defaults and flags",
    "rl-training train ppo/cartpole --learning-rate 5e-4  # any hyperparameter",
    "rl-training train --config my.yaml --num-envs 16  # a YAML file and flags",
    "rl-training train --algo iql --dataset pendulum/medium-v0  # from recorded data",
)
_SUMMARY = (
    "Train an agent. Flags override the preset or file. Whole numbers may be written as 1e6;"
    " --no-NAME turns a switch off; a hyperparameter may also be written as in YAML"
    " (--algo-kwargs.learning-rate). With --json the last line of the output is a JSON object."
    " 'rl-training train --algo sac --help' lists the hyperparameters of SAC."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Evaluate a trained policy over whole episodes."""

    checkpoint: RunPath
    """A run folder (its last checkpoint is used) or a checkpoint file."""
    num_episodes: int | None = None
    """Number of episodes; unset: 20, or 200 games with --against."""
    against: tuple[str, ...] | None = None
    """Of a game of two agents: play against this opponent, half of the games from each seat. It is
    another run or checkpoint; 'random'; or 'rule', which in tic-tac-toe and connect four takes wins
    and blocks losses. Several also play against each other, and the policy gets an Elo rating
    among them; unset: all agents act as trained."""
    deterministic: bool | None = None
    """Take the most likely action, or sample one (DQN, DRQN: random with probability
    exploration_final_eps; TD3: with exploration noise); unset: as the run's own evaluations
    (eval_deterministic); with --against: sample."""
    env_id: str | None = None
    """Gymnasium id of the environment to play, with the spaces of the policy; unset: that of the
    run. A run from a dataset alone may have none."""
    env_kwargs: dict[str, Any] | None = None
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}'); unset: those of the run, or
    none with --env-id."""
    seed: int | None = None
    """Seed of the episodes; unset: derived from the run's seed, and different from training."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeArgs:
    """Continue a run from its checkpoint, in the same folder.

    From an older checkpoint of the run (such as best.pt) it repeats the steps after that one: the
    later metrics and last.pt are replaced.
    """

    checkpoint: RunPath
    """A run folder (its last checkpoint is used) or a checkpoint file."""
    total_timesteps: int | None = None
    """New total number of environment steps, counted from the start of the run; unset: as
    planned."""
    total_updates: int | None = None
    """The same of a run from a dataset alone, in updates."""
    horizon: Literal["new", "keep"] = "new"
    """With a longer total: 'new' stretches schedules over the new total, so that a decaying
    learning rate rises again; 'keep' leaves them at their final values (0 for a linear decay)."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks from now on; unset: as before."""
    acceleration: Literal["eager", "compile", "cudagraph"] | None = None
    """How updates run from now on; unset: as before."""
    engine: Literal["local", "ray"] | None = None
    """What steps the environments from now on; unset: as before. It does not change the result."""
    replay: Literal["saved", "empty"] = "saved"
    """Off-policy: continue with the saved replay buffer, or with an empty one."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


# -- train -------------------------------------------------------------------------------------


def train(args: list[str]) -> int:
    """Run ``rl-training train``."""
    wants_json = "--json" in args
    config = train_config([word for word in args if word != "--json"])
    from rl_training.runtime.setup import ExperimentManager

    trainer = ExperimentManager.setup(config)
    return _finish(trainer.train(), trainer.config, wants_json)


def train_config(args: Sequence[str]) -> TrainConfig[Any]:
    """Return the config that the words after ``rl-training train`` describe."""
    source, words = take_source(args)
    settings = source_settings(source) if source is not None else {}
    algo = value_of(words, "--algo")
    if algo is not None:
        settings = merge_settings({"algo": "ppo", **settings}, {"algo": algo})
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    for total, other in (("timesteps", "updates"), ("updates", "timesteps")):  # a run has one end
        if f"--total-{total}" in given and f"--total-{other}" not in given:
            settings.pop(f"total_{other}", None)
    try:
        default = config_from_mapping(settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}" if source is not None else str(error)) from None
    try:
        config: TrainConfig[Any] = parse_flags(
            TrainConfig[algo_config_type(default.algo)],  # type: ignore[misc]
            words,
            "rl-training train",
            _help_of(default.algo),
            default=default,
            without_prefix=("algo_kwargs",),
        )
    except UnknownWordError as error:
        raise explained(error, source, default.algo) from None
    if source is None and not given & {"--algo", "--env-id"}:
        raise ConfigError(NOTHING_TO_TRAIN)
    if (
        source is None
        and "--env-id" not in given
        and not config.is_offline
        and "Discrete" not in find_entry(config.algo).actions
    ):
        raise ConfigError(
            f"name an environment with --env-id: the default, {config.env_id}, has Discrete"
            f" actions, which {config.algo} does not support"
        )
    return config


def _help_of(algo: str) -> HelpText:
    name = ALGORITHMS[algo].class_name_of(algo) if algo in ALGORITHMS else algo
    groups = [
        dataclasses.replace(group, heading=group.heading.format(algo=name))
        for group in TRAIN_GROUPS
    ]
    return HelpText("[PRESET | --config FILE] [flags]", _SUMMARY, _EXAMPLES, tuple(groups))


def _finish(result: TrainResult, config: TrainConfig[Any], wants_json: bool) -> int:
    if rank() != 0:
        return 0
    run, metrics = _shortest(result.run_dir), result.metrics
    unit = config.unit.removesuffix("s")
    lines = [f"{result.stop_reason} at {unit} {int(metrics['global_step']):,}"]
    if "eval/return_mean" in metrics and not result.interrupted:
        lines.append(
            f"evaluation: return {metrics['eval/return_mean']:.2f}"
            f" +/- {metrics['eval/return_std']:.2f} over {metrics['eval/episodes']:.0f} episodes"
        )
    quoted = shlex.quote(str(run))
    named = "" if config.env_id else " --env-id ENV"  # there was none to evaluate on
    lines += [
        f"run:      {run}",
        f"view:     {_runnable('tensorboard')} --logdir {quoted}",
        f"evaluate: {_runnable('rl-training')} eval {quoted}{named}",
    ]
    more = "" if result.interrupted else f" --{config.total_setting.replace('_', '-')} N"
    lines.append(f"resume:   {_runnable('rl-training')} resume {quoted}{more}")
    show("\n".join(lines) + "\n")
    if wants_json:
        _print_json(
            {
                "run_dir": str(result.run_dir),
                "checkpoint_path": str(result.checkpoint_path),
                "status": "interrupted" if result.interrupted else "finished",
                "stop_reason": result.stop_reason,
                "global_step": int(metrics["global_step"]),
                "metrics": metrics,
            }
        )
    return 0


def _runnable(program: str) -> str:
    """Return the name if the shell finds it, else its path in the environment we run in."""
    here = Path(sys.executable).parent / program
    if shutil.which(program) or not here.exists():
        return program
    return shlex.quote(str(_shortest(here)))


def _shortest(path: Path) -> Path:
    relative = Path(os.path.relpath(path))
    return relative if len(str(relative)) < len(str(path)) else path


# -- resume and eval ---------------------------------------------------------------------------


def resume(args: list[str]) -> int:
    """Run ``rl-training resume``."""
    text = HelpText(
        "RUN [flags]",
        examples=(
            "rl-training resume runs/RUN                          # finish an interrupted run",
            "rl-training resume runs/RUN --total-timesteps 2e5    # train longer than planned",
        ),
    )
    try:
        options: ResumeArgs = parse_flags(ResumeArgs, args, "rl-training resume", text)
    except UnknownWordError as error:
        raise kept_setting(error) from None
    from rl_training.runs import read_json
    from rl_training.runtime.setup import ExperimentManager

    trainer = ExperimentManager.resume(
        options.checkpoint,
        total_timesteps=options.total_timesteps,
        total_updates=options.total_updates,
        horizon=options.horizon,
        device=options.device,
        acceleration=options.acceleration,
        engine=options.engine,
        replay=options.replay,
        trust=trust_from_flag(options.trust_modules),
    )
    finished = read_json(trainer.run_dir / "summary.json").get("status") == "finished"
    if finished and trainer.global_step >= trainer.total:
        trainer.close()
        if rank() != 0:
            return 0
        say(
            f"{trainer.run_dir} has finished its {trainer.total:,} {trainer.config.unit};"
            f" --{trainer.config.total_setting.replace('_', '-')} N extends it"
        )
        if options.json:
            _print_json(
                {
                    "run_dir": str(trainer.run_dir),
                    "global_step": trainer.global_step,
                    "status": "finished",
                }
            )
        return 0
    before, after = (trainer.resumed or {}).get("progress_jump", (0.0, 0.0))
    schedule = getattr(trainer.config.algo_kwargs, "schedule", "constant")
    nothing_decays = trainer.config.is_offline and schedule == "constant"
    if before != after and rank() == 0 and not nothing_decays:
        say(
            f"schedules now run over {trainer.horizon:,} {trainer.config.unit}: their progress"
            f" jumps from {before:.1%} to {after:.1%}"
        )
    return _finish(trainer.train(), trainer.config, options.json)


def evaluate(args: list[str]) -> int:
    """Run ``rl-training eval``."""
    text = HelpText(
        "RUN [flags]",
        examples=(
            "rl-training eval runs/RUN --num-episodes 50",
            "rl-training eval runs/RUN/checkpoints/best.pt --no-deterministic",
            "rl-training eval runs/RUN --against runs/OTHER  # a game of two agents",
            "rl-training eval runs/RUN --against random rule  # its Elo rating among them",
        ),
    )
    options: EvalArgs = parse_flags(EvalArgs, args, "rl-training eval", text)
    if options.against is not None:
        from rl_training.tools.matches import evaluate_against

        return evaluate_against(options, options.against)
    from rl_training.runtime.workflows import evaluate_checkpoint

    result = evaluate_checkpoint(
        options.checkpoint,
        20 if options.num_episodes is None else options.num_episodes,
        deterministic=options.deterministic,
        seed=options.seed,
        device=options.device,
        env_id=options.env_id,
        env_kwargs=options.env_kwargs,
        trust=trust_from_flag(options.trust_modules),
    )
    metrics = result.metrics()
    show(
        f"return {metrics['eval/return_mean']:.2f} +/- {metrics['eval/return_std']:.2f}"
        f" (min {metrics['eval/return_min']:.2f}, max {metrics['eval/return_max']:.2f})"
        f" over {len(result.returns)} episodes of {metrics['eval/length_mean']:.1f} steps\n"
    )
    if options.json:
        _print_json(
            {
                "checkpoint": str(options.checkpoint),
                "metrics": metrics,
                "returns": list(result.returns),
                "lengths": list(result.lengths),
            }
        )
    return 0


def _print_json(value: Any) -> None:
    show(json.dumps(value) + "\n")
