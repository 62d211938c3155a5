"""``rl-training import-sb3``: a model of Stable-Baselines3 as a policy of this package."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.config import TrainConfig, WrapperConfig, config_from_mapping
from rl_training.errors import UserError
from rl_training.terminal import one_line, say, show

if TYPE_CHECKING:
    from rl_training.tools.importing.sb3_checks import ObsStatistics
    from rl_training.tools.importing.sb3_networks import Networks
    from rl_training.types import ActionSpec, ObsSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportArgs:
    """Convert a model of Stable-Baselines3 (PPO, A2C, DQN, SAC or TD3) to a policy to share.

    Weights are read without unpickling. The policy is written only if it chooses the actions of a
    reference, which examples/sb3_reference.py writes where Stable-Baselines3 is installed.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The .zip that model.save wrote."""
    env_id: str
    """Gymnasium id of the environment that the model was trained on; 'my_package:MyEnv-v0' imports
    my_package first."""
    out: Path
    """The folder to write, missing or empty."""
    reference: Path
    """Observations and the actions that the model chose (.npz): actions here must be equal, those
    of a Box within 1e-4 of half their range."""
    vecnormalize: Path | None = None
    """Statistics of the model's VecNormalize (.npz with mean, var, count, clip_obs, epsilon);
    unset: it had none for observations."""
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}')."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers of the environment, innermost first (YAML:
    '["gymnasium.wrappers:TimeAwareObservation"]')."""
    preprocessing: Literal["none", "atari"] = "none"
    """'atari' for models of AtariWrapper with four stacked frames."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    text = HelpText(
        "FILE --env-id ENV --out FOLDER --reference FILE [flags]",
        examples=(
            "rl-training import-sb3 model.zip --env-id CartPole-v1 --reference ref.npz --out new",
        ),
    )
    options: ImportArgs = parse_flags(ImportArgs, args, "rl-training import-sb3", text)
    from rl_training.shared_folder import require_free

    require_free(options.out)
    result = _convert(options)
    out = one_line(str(options.out))
    rows, different = result["rows"], result["different_actions"]
    if different == 1:
        say(
            "warning: all actions of the reference are equal, so that agreement shows little: make"
            " one of more observations"
        )
    show(
        f"{result['algo']}: all {rows:,} actions ({different:,} distinct) agree with the"
        " reference\n"
        f"wrote {out}\nevaluate: rl-training eval {out}\n"
    )
    if options.json:
        show(json.dumps(result) + "\n")
    return 0


def _convert(options: ImportArgs) -> dict[str, Any]:
    """Convert, compare and write; return what ``--json`` prints."""
    from rl_training.envs import VectorAdapter, make_vector_env
    from rl_training.runtime.workflows import policy_from_state
    from rl_training.sharing.card import Origin
    from rl_training.sharing.portable import share_policy
    from rl_training.tools.importing.sb3_checks import compare, read_statistics
    from rl_training.tools.importing.sb3_file import read_model
    from rl_training.tools.importing.sb3_networks import networks_of
    from rl_training.tools.importing.sb3_policy import algorithm_of

    model = read_model(options.file)
    algo = algorithm_of(model)
    base = config_from_mapping(
        {
            "algo": algo,
            "env_id": options.env_id,
            "env_kwargs": options.env_kwargs,
            "wrappers": options.wrappers,
            "preprocessing": options.preprocessing,
        }
    )
    env = VectorAdapter(make_vector_env(base.with_overrides(num_envs=1), 1), base.seed)
    env.close()
    obs_spec, action_spec = env.obs_spec, env.action_spec
    networks = networks_of(model, algo, obs_spec, action_spec)
    statistics = None
    if options.vecnormalize is not None:
        statistics = read_statistics(options.vecnormalize, _vector_shape(obs_spec))
    where = f"{options.file} does not fit {options.env_id}"
    state = _state(base, networks, statistics, (obs_spec, action_spec), where)
    agreement = compare(policy_from_state(state), options.reference)
    name = f"a model of Stable-Baselines3, {options.file.name}"
    share_policy(options.out, state, Origin(digest=model.sha256, imported=name))
    return {"folder": str(options.out), "algo": algo, **agreement._asdict()}


def _vector_shape(obs_spec: ObsSpec) -> tuple[int, ...]:
    leaf = obs_spec.leaves.get("")
    if leaf is None or leaf.is_image or leaf.nvec:
        raise UserError("--vecnormalize needs observations that are one array of numbers")
    return leaf.shape


def _state(
    base: TrainConfig[Any],
    networks: Networks,
    statistics: ObsStatistics | None,
    spaces: tuple[ObsSpec, ActionSpec],
    where: str,
) -> dict[str, Any]:
    """Return the state of a portable policy with these networks; ``where`` begins errors."""
    import torch

    from rl_training.runtime.assembly import build_algorithm

    settings: dict[str, Any] = {"algo_kwargs": networks.algo_kwargs}
    if statistics is not None:
        settings |= {"normalize_obs": True, "clip_obs": statistics.clip_obs}
    config = base.with_overrides(**settings)
    weights = dict(networks.weights)
    learner = build_algorithm(config, *spaces, torch.device("cpu"))
    for name, fresh in learner.module.state_dict().items():
        if ".norm.leaf0." in f".{name}" and statistics is not None:
            weights[name] = statistics.weights()[name.rpartition(".")[2]]
        elif name.startswith("temperature."):  # a new run has its own, also with init_from
            weights[name] = fresh
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != tuple(fresh.shape):
            raise UserError(
                f"{where}: is it the environment that the model was trained on? Its spaces need a"
                f" weight {name} of shape {tuple(fresh.shape)}, and that of the model is {found}"
            )
    obs_spec, action_spec = spaces
    return {
        "config": config.to_dict(),
        "custom_env": False,
        "obs_spec": obs_spec.to_plain(),
        "action_spec": action_spec.to_plain(),
        "algorithm": {"model": weights},
    }
