"""``rl-training check-env``: whether an environment can be trained on."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.config import WrapperConfig
from rl_training.envs.check_env import check_env
from rl_training.terminal import show_result

_TEXT = HelpText(
    "ENV [flags]",
    examples=(
        "rl-training check-env CartPole-v1",
        "rl-training check-env my_package:MyEnv-v0 --env-kwargs '{size: 8}'",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckEnvArgs:
    """Play an environment with random actions and report what is wrong with it."""

    env_id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """Id of the environment; 'my_package:MyEnv-v0' imports my_package first."""
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of gymnasium.make, as YAML: '{gravity: -5.0}'."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers around the environment, innermost first, as YAML:
    '["gymnasium.wrappers:TimeAwareObservation"]'."""
    seed: int = 1
    """Seed of the first episode and of the random actions."""
    steps: int = 1000
    """Number of steps to play."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command; return 0 if the environment can be trained on, else 1."""
    options: CheckEnvArgs = parse_flags(CheckEnvArgs, args, "rl-training check-env", _TEXT)
    report = check_env(
        options.env_id,
        env_kwargs=options.env_kwargs,
        wrappers=[dataclasses.asdict(one) for one in options.wrappers],
        seed=options.seed,
        steps=options.steps,
    )
    show_result(f"{report}\n")
    if options.json:
        show_result(json.dumps(report.to_dict()) + "\n")
    return 0 if report.ok else 1
