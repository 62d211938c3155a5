"""``rl-training``: the command line. Exit codes: 0 done, 2 a user error, 1 a failure."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training._internal.lazy import resolve
from rl_training.errors import (
    EnvironmentFailure,
    NonFiniteError,
    ParityError,
    RankFailure,
    StorageError,
    UserError,
    WorkerError,
    did_you_mean,
)
from rl_training.launched import rank, shows, world_size
from rl_training.plugins import search_also
from rl_training.terminal import say, show
from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.config import TrainConfig

_HELP = f"""\
rl-training {__version__}: train agents on Gymnasium environments.

  rl-training train PRESET              train from a packaged preset, e.g. ppo/cartpole
  rl-training train --env-id ENV        train with the defaults; --algo selects the algorithm
  rl-training train --config FILE       train from a YAML file; flags override it
  rl-training presets [WORD...]         list the presets
  rl-training eval RUN                  evaluate a trained policy
  rl-training resume RUN                continue a run where it stopped (on the CPU: exactly)
  rl-training tune PRESET               search hyperparameters with Optuna
  rl-training zoo list | run | report   benchmarks of many presets, with expected returns
  rl-training report RUNS...            write an HTML page of curves, scores and configs
  rl-training watch RUNS...             show runs on a web page while they train
  rl-training record RUN                record a video of whole episodes
  rl-training export RUN --out DIR      write the policy as a file: ONNX, torch or safetensors
  rl-training play ENV | RUN            show an environment on the screen
  rl-training dataset list | info | make | from-replay | delete
                                        datasets of recorded episodes, for offline learning
  rl-training share RUN --out FOLDER    write a policy as a folder to share, on Hugging Face or not
  rl-training fetch USER/REPO           download a shared policy from Hugging Face
  rl-training import-sb3 FILE           convert a model of Stable-Baselines3
  rl-training import-zoo FILE           convert hyperparameters of RL Baselines3 Zoo
  rl-training check-env ENV             check an environment of your own before training
  rl-training doctor                    show what is installed; with --config, where the time goes

RUN is a run folder, a checkpoint file or a shared folder. 'rl-training COMMAND --help' lists every
flag; with --json the last line of the output is a JSON object.
"""


def load_config(path: str | Path) -> TrainConfig[Any]:
    """Return the config of a YAML file, or of a packaged preset given by name."""
    from rl_training.config import config_from_file

    return config_from_file(path)


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
            if shows(error):
                where = f"rank {rank()}:\n" if world_size() > 1 else ""
                say(where + traceback.format_exc().rstrip())
            _print_error(args, f"{type(error).__name__}: {error}", 1)
        return 1
    return code


def _dispatch(args: list[str]) -> int:
    if args[:1] == ["help"] and len(args) > 1:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    if args[0] in ("--version", "version"):
        sys.stdout.write(f"{__version__}\n")
        return 0
    try:
        return int(_find(args[0])(args[1:]))
    except UserError as error:
        if shows(error):
            say(f"error: {error}")
        return _print_error(args, str(error), 2)
    except _FAILURES as error:
        if shows(error):
            say(f"failed: {error}")
        return _print_error(args, str(error), 1)
    except KeyboardInterrupt as error:
        if shows(error):
            say("stopped")
        return _print_error(args, "stopped", 1)


def _find(name: str) -> Callable[[list[str]], int]:
    """Return the function of a command."""
    command = _COMMANDS.get(name)
    if command is None:
        raise UserError(f"unknown command {name!r}.{did_you_mean(name, _COMMANDS)}")
    found: Callable[[list[str]], int] = resolve(command) if isinstance(command, str) else command
    return found


def _print_error(args: Sequence[str], message: str, code: int) -> int:
    """Print an error as JSON if ``--json`` is given; return the exit code."""
    if "--json" in args and rank() == 0:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            show(json.dumps({"error": message, "exit_code": code}) + "\n")
    return code


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


_FAILURES = (
    EnvironmentFailure,
    NonFiniteError,
    ParityError,
    RankFailure,
    StorageError,
    WorkerError,
)
"""Errors that are no bugs, and not in the request."""

_COMMANDS: dict[str, Callable[[list[str]], int] | str] = {
    "train": "rl_training.tools.training:train",
    "eval": "rl_training.tools.training:evaluate",
    "resume": "rl_training.tools.training:resume",
    "tune": "rl_training.tools.tune.command:main",
    "zoo": "rl_training.tools.zoo.command:main",
    "report": "rl_training.tools.report.command:main",
    "watch": "rl_training.tools.watch.command:main",
    "record": "rl_training.tools.record:main",
    "export": "rl_training.tools.export:main",
    "play": "rl_training.tools.play:main",
    "doctor": "rl_training.tools.doctor.command:main",
    "presets": "rl_training.tools.presets:main",
    "check-env": "rl_training.tools.check_env:main",
    "dataset": "rl_training.tools.dataset.command:main",
    "share": "rl_training.tools.share:share",
    "fetch": "rl_training.tools.share:fetch",
    "import-sb3": "rl_training.tools.importing.sb3:main",
    "import-zoo": "rl_training.tools.importing.rl_zoo:main",
}


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if rank() == 0:
        say(f"warning: {message}")


if __name__ == "__main__":
    # 'python -m' puts the current folder first: a file there must not take a module's place.
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    sys.exit(main())
