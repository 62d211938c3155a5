"""What one does with a checkpoint: evaluate it, resume it, predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_training.checkpointing import find_checkpoint
from rl_training.envs import EnvFn
from rl_training.errors import CheckpointError
from rl_training.eval import EvalResult
from rl_training.registry import get_spec
from rl_training.runtime.callbacks import Callbacks
from rl_training.runtime.device import pick_device
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.setup import (
    ExperimentManager,
    Horizon,
    Replay,
    build_algorithm,
)
from rl_training.runtime.stored import (
    config_from_state,
    load_state,
    malformed_state,
    require_plausible_sizes,
)
from rl_training.runtime.trainer import TrainResult
from rl_training.trust import Trust
from rl_training.types import ActionSpec, ObsSpec


def policy_from_state(state: dict[str, Any], device: str | None = None) -> TrainedPolicy:
    """A policy from a checkpoint's content."""
    config = config_from_state(state)
    with malformed_state("the policy"):
        obs_spec = ObsSpec.from_plain(state["obs_spec"])
        action_spec = ActionSpec.from_plain(state["action_spec"])
        require_plausible_sizes(config, state)
        place = pick_device(config.device if device is None else device, obs_spec)
        algorithm = build_algorithm(config, obs_spec, action_spec, place)
        try:
            algorithm.load_state_dict(state["algorithm"])
        except (RuntimeError, KeyError, ValueError) as error:
            detail = " ".join(str(error).split())
            raise CheckpointError(f"the checkpoint does not fit its own config: {detail}") from None
        spec = get_spec(config.algo)
        return spec.policy(spec, config, algorithm, obs_spec, action_spec, place)


def load_policy(
    checkpoint: str | Path, device: str | None = None, *, trust: Trust = False
) -> TrainedPolicy:
    """A policy from a checkpoint or run folder; no environment is made."""
    return policy_from_state(load_state(find_checkpoint(Path(checkpoint)), trust=trust), device)


def evaluate_checkpoint(
    checkpoint: str | Path,
    num_episodes: int = 10,
    *,
    deterministic: bool | None = None,
    seed: int | None = None,
    device: str | None = None,
    env_fn: EnvFn | None = None,
    trust: Trust = False,
) -> EvalResult:
    """Evaluate a checkpoint (or a run folder's last one) on fresh environments.

    ``trust`` says which modules it may name (True: any), where it was not written here by you.
    """
    state = load_state(find_checkpoint(Path(checkpoint)), trust=trust)
    if state["custom_env"] and env_fn is None:
        raise CheckpointError(
            f"{checkpoint} was trained on an environment given as env_fn; evaluate it from"
            " Python: evaluate_checkpoint(path, env_fn=...)"
        )
    policy = policy_from_state(state, device)
    return policy.evaluate(num_episodes, deterministic=deterministic, seed=seed, env_fn=env_fn)


def resume_training(
    checkpoint: str | Path,
    *,
    total_timesteps: int | None = None,
    horizon: Horizon = "new",
    device: str | None = None,
    acceleration: str | None = None,
    replay: Replay = "saved",
    callbacks: Callbacks = (),
    env_fn: EnvFn | None = None,
    trust: Trust = False,
) -> TrainResult:
    """Continue a run from its checkpoint; see `ExperimentManager.resume`."""
    trainer = ExperimentManager.resume(
        checkpoint,
        total_timesteps=total_timesteps,
        horizon=horizon,
        device=device,
        acceleration=acceleration,
        replay=replay,
        callbacks=callbacks,
        env_fn=env_fn,
        trust=trust,
    )
    return trainer.train()
