"""Write an exported policy: to a temporary folder first, renamed once it agrees with `predict`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rl_training._internal.coerce import coerce
from rl_training.envs import EnvFn
from rl_training.errors import ConfigError, ParityError, UserError, did_you_mean
from rl_training.export import formats, loading
from rl_training.export.formats import FILES, FormatName
from rl_training.export.metadata import (
    PARITY_FILE,
    POLICY_FILE,
    Origin,
    policy_metadata,
    weights_of,
    write,
)
from rl_training.export.module import PolicyModule, copied_to_cpu, module_of
from rl_training.export.observations import observe
from rl_training.export.parity import TOLERANCE, Parity, Run, compare
from rl_training.export.signature import EPISODE_START, STATE
from rl_training.runs import new_folder
from rl_training.runtime.policy import TrainedPolicy
from rl_training.trust import remember_own
from rl_training.types import Array


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported policy."""

    folder: Path
    file: Path
    """The file to deploy, in ``folder``."""
    format: str
    parity: Parity
    """The comparison with `predict`."""


def export_policy(
    policy: TrainedPolicy,
    folder: str | Path,
    format: FormatName = "onnx",  # noqa: A002 - its usual name
    *,
    stochastic: bool = False,
    tolerance: float = TOLERANCE,
    env_fn: EnvFn | None = None,
    needs_env: bool = False,
    without_env: str | None = None,
    origin: Origin | None = None,
) -> Exported:
    """Write a policy to a new folder, and compare it there with ``policy.predict``.

    Raises `ParityError` where the file chooses other actions; then nothing is left of it.

    Args:
        policy: the trained policy.
        folder: the folder to create; it may exist if it is empty.
        format: "onnx", "torch" (a program of torch.export) or "safetensors" (weights alone).
        stochastic: sample actions, from random numbers that are an input of the file.
        tolerance: largest accepted difference of an action, relative to its range.
        env_fn: a function that makes the environment whose observations are compared.
        needs_env: raise where the environment cannot be made; else random observations are used.
        without_env: why there is no environment; random observations are used.
        origin: where the policy is from.
    """
    target = coerce(folder, Path, "folder")
    check_request(target, format, stochastic, tolerance)
    policy = copied_to_cpu(policy)
    module = module_of(policy, stochastic=stochastic)
    seen = observe(policy, module.model, env_fn, without=without_env, required=needs_env)
    about = policy_metadata(policy, module, format, origin or Origin())
    with new_folder(target) as temporary:
        _write_file(policy, module, format, temporary / FILES[format])
        write(temporary / POLICY_FILE, about)
        if format == "safetensors":
            remember_own(about["rebuilt_from"]["config"], about["digest"])
        run = _opened(module, format, temporary)
        try:
            parity = compare(policy, module, run, seen, tolerance=tolerance, name=FILES[format])
        except ParityError as error:
            raise ParityError(f"{error}. Nothing was written") from None
        report = {"format": format, **parity.described(), "versions": about["versions"]}
        write(temporary / PARITY_FILE, report)
    return Exported(target, target / FILES[format], format, parity)


def _write_file(policy: TrainedPolicy, module: PolicyModule, name: str, path: Path) -> None:
    if name == "onnx":
        formats.write_onnx(module, path)
    elif name == "torch":
        formats.write_torch(module, path)
    else:
        from safetensors.torch import save_file

        save_file(weights_of(policy), path)


def _opened(module: PolicyModule, format_: str, folder: Path) -> Run:
    path = folder / FILES[format_]
    if format_ == "onnx":
        return formats.open_onnx(module, path)
    if format_ == "torch":
        return formats.open_torch(module, path)
    loaded = loading.load_exported(folder, "cpu", trust=True)  # this process wrote it
    names = {port.leaf: port.name for port in module.signature.inputs if port.leaf is not None}

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        obs: Any = loaded.acting_spec.joined({leaf: inputs[name] for leaf, name in names.items()})
        action, after = loaded.predict(obs, inputs.get(STATE), inputs.get(EPISODE_START))
        return module.signature.returned(action, after)

    return run


def check_request(target: Path, name: str, stochastic: bool, tolerance: float) -> None:
    """Raise `UserError` for what can be refused before anything is loaded."""
    if name not in FILES:
        raise ConfigError(f"unknown format {name!r}.{did_you_mean(str(name), FILES)}")
    if not 0 < tolerance <= 1:
        raise ConfigError(f"'tolerance' must be above 0, and at most 1; got {tolerance}")
    if stochastic and name == "safetensors":
        raise ConfigError(
            "'stochastic' does not go with format safetensors: the policy that load_exported"
            " returns takes deterministic=False with every call"
        )
    formats.require_packages(name)
    if target.is_dir() and not target.is_symlink():
        used = any(target.iterdir())
    else:
        used = target.exists() or target.is_symlink()
    if used:
        raise UserError(f"{target} exists: name another folder, or delete it first")
