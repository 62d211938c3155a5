"""``rl-training``: train, eval, resume. Exit codes: 0 done, 2 a user error, 1 a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training._internal.lazy import resolve
from rl_training.errors import (
    ConfigError,
    EnvironmentFailure,
    NonFiniteError,
    StorageError,
    UserError,
    WorkerError,
    did_you_mean,
)
from rl_training.plugins import search_also
from rl_training.terminal import say, show
from rl_training.trust import trust_from_flag
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.trainer import TrainResult

_HELP = f"""\
rl-training {__version__}: train agents on Gymnasium environments.

  rl-training train PRESET              train from a packaged preset, e.g. ppo/cartpole
  rl-training train --config FILE       train from a YAML file; flags override it
  rl-training presets [WORD...]         list the presets
  rl-training eval PATH                 evaluate a trained policy
  rl-training resume PATH               continue a run exactly where it stopped
  rl-training zoo list | run | report   benchmarks of many presets, with expected returns
  rl-training report RUNS...            write an HTML page of curves, scores and configs
  rl-training record PATH               record a video of whole episodes
  rl-training play ENV | --checkpoint PATH  show an environment on the screen
  rl-training doctor                    show what is installed; measure the parts of a training step

PATH is a checkpoint or a run folder. 'rl-training COMMAND --help' lists every flag.
"""


def load_config(path: str | Path) -> TrainConfig[Any]:
    """Return the config of a YAML file, or of a packaged preset given by name."""
    from rl_training.config import config_from_file

    return config_from_file(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Evaluate a trained policy over whole episodes."""

    checkpoint: Path
    """A checkpoint file, or a run folder (uses its last checkpoint)."""
    num_episodes: int = 20
    """Number of episodes."""
    deterministic: bool | None = None
    """Take the most likely action; --no-deterministic: sample one. Unset: the run's own setting
    (eval_deterministic)."""
    seed: int | None = None
    """Seed of the episodes; unset: derived from the run's seed, and different from training."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Modules that may be imported if the checkpoint names them; without a value: all."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeArgs:
    """Continue a run from its checkpoint, in the same folder."""

    checkpoint: Path
    """A checkpoint file, or a run folder (uses its last checkpoint)."""
    total_timesteps: int | None = None
    """New total number of environment steps, counted from the start of the run."""
    horizon: Literal["new", "keep"] = "new"
    """With a new total: 'new' runs schedules over it, 'keep' keeps their final values."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks from now on; unset: as before."""
    acceleration: Literal["eager", "compile", "cudagraph"] | None = None
    """How updates run from now on; unset: as before."""
    replay: Literal["saved", "empty"] = "saved"
    """Off-policy: continue with the saved replay buffer, or with an empty one."""
    trust_modules: tuple[str, ...] | None = None
    """Modules that may be imported if the checkpoint names them; without a value: all."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    args = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(OSError):  # the current folder may be gone
        search_also(Path.cwd())  # so that 'my_package:MyEnv-v0' beside us is found
    warnings.showwarning = _show_warning
    try:
        code = _dispatch(args)
        if sys.stdout is not None:  # it was closed by whoever called
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - the last resort: a bug, or the user's environment
        if not _nobody_reads(error):
            say(traceback.format_exc().rstrip())
        return 1
    return code


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if args[0] == "--version":
        sys.stdout.write(f"{__version__}\n")
        return 0
    command = _COMMANDS.get(args[0])
    if command is None:
        say(f"error: unknown command {args[0]!r}.{did_you_mean(args[0], _COMMANDS)}")
        return 2
    try:
        run = resolve(command) if isinstance(command, str) else command
        rest = _with_checkpoint_flag(args[1:]) if args[0] in _TAKE_A_RUN else args[1:]
        return int(run(rest))
    except UserError as error:
        say(f"error: {error}")
        return 2
    except (EnvironmentFailure, NonFiniteError, StorageError, WorkerError) as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 1


def _with_checkpoint_flag(args: list[str]) -> list[str]:
    """Let a path that comes first be the checkpoint: ``eval RUN`` is ``eval --checkpoint RUN``."""
    return ["--checkpoint", *args] if args and not args[0].startswith("-") else args


def _nobody_reads(error: Exception) -> bool:
    """Whether it is our own output's pipe that broke, as in ``rl-training ... | head``."""
    if not isinstance(error, BrokenPipeError) or not hasattr(select, "poll"):
        return False
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False
    poller = select.poll()
    poller.register(output, select.POLLOUT)
    gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
    broken = any(event & gone for _, event in poller.poll(0))
    if broken:  # Python would write again at its end, and complain
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), output)
    return broken


def _train(args: list[str]) -> int:
    from rl_training._internal.flags import parse_flags
    from rl_training.config import (
        TrainConfig,
        algo_config_type,
        config_from_mapping,
        settings_from_file,
    )

    source, args = _take_source(args)
    as_json, args = _take_flag(args, "--json")
    settings = settings_from_file(source) if source is not None else {}
    algo = _peek(args, "--algo")
    if algo is not None:
        settings = {**settings, "algo": algo}
        if source is not None and algo != settings_from_file(source).get("algo", "ppo"):
            settings.pop("algo_kwargs", None)
    try:
        default = config_from_mapping(settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}" if source is not None else str(error)) from None
    typed: Any = TrainConfig[algo_config_type(default.algo)]  # type: ignore[misc]
    config: TrainConfig[Any] = parse_flags(
        typed,
        args,
        "rl-training train",
        default=default,
        description="Train an agent: [PRESET | --config FILE] [flags]. --json: print JSON last.",
    )
    from rl_training.runtime.setup import ExperimentManager

    trainer = ExperimentManager.setup(config)
    say(
        f"{config.algo} on {config.env_id}: {trainer.total:,} steps, {config.num_envs} environments"
        f" ({config.vectorization}), {trainer.device.type}, {trainer.threads} thread(s)"
        f" -> {trainer.run_dir}"
    )
    return _finish(trainer.train(), as_json)


def _resume(args: list[str]) -> int:
    from rl_training._internal.flags import parse_flags

    options: ResumeArgs = parse_flags(ResumeArgs, args, "rl-training resume")
    from rl_training.runs import read_json
    from rl_training.runtime.setup import ExperimentManager

    trainer = ExperimentManager.resume(
        options.checkpoint,
        total_timesteps=options.total_timesteps,
        horizon=options.horizon,
        device=options.device,
        acceleration=options.acceleration,
        replay=options.replay,
        trust=trust_from_flag(options.trust_modules),
    )
    finished = read_json(trainer.run_dir / "summary.json").get("status") == "finished"
    if finished and trainer.global_step >= trainer.total:
        trainer.close()
        say(
            f"{trainer.run_dir} has finished its {trainer.total:,} steps;"
            " --total-timesteps N extends it"
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
    say(f"resuming {trainer.run_dir} at step {trainer.global_step:,} of {trainer.total:,}")
    before, after = (trainer.resumed or {}).get("progress_jump", (0.0, 0.0))
    if before != after:
        say(
            f"schedules now run over {trainer.horizon:,} steps: their progress jumps from"
            f" {before:.1%} to {after:.1%}"
        )
    return _finish(trainer.train(), options.json)


def _eval(args: list[str]) -> int:
    from rl_training._internal.flags import parse_flags

    options: EvalArgs = parse_flags(EvalArgs, args, "rl-training eval")
    from rl_training.runtime.workflows import evaluate_checkpoint

    result = evaluate_checkpoint(
        options.checkpoint,
        options.num_episodes,
        deterministic=options.deterministic,
        seed=options.seed,
        device=options.device,
        trust=trust_from_flag(options.trust_modules),
    )
    metrics = result.metrics()
    show(
        f"return {metrics['eval/return_mean']:.2f} +/- {metrics['eval/return_std']:.2f}"
        f" (min {metrics['eval/return_min']:.2f}, max {metrics['eval/return_max']:.2f})"
        f" over {options.num_episodes} episodes of {metrics['eval/length_mean']:.1f} steps\n"
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


_COMMANDS: dict[str, Callable[[list[str]], int] | str] = {
    "train": _train,
    "eval": _eval,
    "resume": _resume,
    "zoo": "rl_training.tools.zoo.command:main",
    "report": "rl_training.tools.report.command:main",
    "record": "rl_training.tools.record:main",
    "play": "rl_training.tools.play:main",
    "doctor": "rl_training.tools.doctor.command:main",
    "presets": "rl_training.tools.presets:main",
}
_TAKE_A_RUN = ("eval", "resume", "record")
"""Commands whose first argument may be a run folder or a checkpoint."""


def _finish(result: TrainResult, as_json: bool) -> int:
    run, metrics = _shortest(result.run_dir), result.metrics
    lines = [f"{result.stop_reason} at step {int(metrics['global_step']):,}"]
    if "eval/return_mean" in metrics and not result.interrupted:
        lines.append(
            f"evaluation: return {metrics['eval/return_mean']:.1f}"
            f" +/- {metrics['eval/return_std']:.1f} over {metrics['eval/episodes']:.0f} episodes"
        )
    quoted = shlex.quote(str(run))
    lines += [
        f"run:      {run}",
        f"view:     {_runnable('tensorboard')} --logdir {quoted}",
        f"evaluate: {_runnable('rl-training')} eval {quoted}",
    ]
    more = "" if result.interrupted else " --total-timesteps N"
    lines.append(f"resume:   {_runnable('rl-training')} resume {quoted}{more}")
    show("\n".join(lines) + "\n")
    if as_json:
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
    """The name if the shell finds it, else its path in the environment we run in."""
    here = Path(sys.executable).parent / program
    if shutil.which(program) or not here.exists():
        return program
    return shlex.quote(str(_shortest(here)))


def _shortest(path: Path) -> Path:
    relative = Path(os.path.relpath(path))
    return relative if len(str(relative)) < len(str(path)) else path


def _take_source(args: list[str]) -> tuple[str | None, list[str]]:
    """The preset (first word) or --config FILE."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    value = _peek(args, "--config")
    if value is None:
        return None, args
    for i, word in enumerate(args):
        if word == "--config":
            return value, args[:i] + args[i + 2 :]
        if word.startswith("--config="):
            return value, args[:i] + args[i + 1 :]
    return None, args


def _peek(args: list[str], flag: str) -> str | None:
    for i, word in enumerate(args):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag:
            if i + 1 == len(args) or args[i + 1].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            return args[i + 1]
    return None


def _take_flag(args: list[str], flag: str) -> tuple[bool, list[str]]:
    return flag in args, [word for word in args if word != flag]


def _print_json(value: Any) -> None:
    show(json.dumps(value) + "\n")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")


if __name__ == "__main__":
    # 'python -m' puts the current folder first: a file there must not take a module's place.
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    sys.exit(main())
