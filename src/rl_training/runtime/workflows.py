"""Load a policy from a checkpoint, evaluate it, or resume training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_training.checkpointing import find_checkpoint
from rl_training.communicator import Communicator, local_state
from rl_training.device_envs.table import DeviceEnvFn
from rl_training.envs import EnvFn
from rl_training.envs.given_vector import VectorFn
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import EvalResult
from rl_training.registry import find_entry, spec_of
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.callbacks import Callbacks
from rl_training.runtime.device import pick_device
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.resuming import Horizon, Replay
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.stored import (
    config_from_state,
    load_state,
    malformed_state,
    require_plausible_sizes,
    with_environment,
)
from rl_training.runtime.trainer import TrainResult
from rl_training.trust import Trust
from rl_training.types import ActionSpec, ObsSpec


def policy_from_state(state: dict[str, Any], device: str | None = None) -> TrainedPolicy:
    """Return the policy of a checkpoint's state."""
    if state["algorithm"].keys() == {"model"}:  # of a shared folder
        return policy_from_weights(state, device)

    def load(algorithm: Any, communicator: Communicator) -> None:
        algorithm.load_state_dict(local_state(state["algorithm"], communicator))

    return _built(state, device, load)


def policy_from_weights(state: dict[str, Any], device: str | None = None) -> TrainedPolicy:
    """Return the policy of a state that has the weights alone, without optimizers."""

    def load(algorithm: Any, communicator: Communicator) -> None:
        del communicator
        algorithm.load_weights(state["algorithm"]["model"])
        algorithm.module.load_state_dict(state["algorithm"]["model"])  # SAC's temperature, too

    return _built(state, device, load)


def _built(
    state: dict[str, Any], device: str | None, load: Callable[[Any, Communicator], None]
) -> TrainedPolicy:
    config = config_from_state(state)
    with malformed_state("the policy"):
        obs_spec = ObsSpec.from_plain(state["obs_spec"])
        action_spec = ActionSpec.from_plain(state["action_spec"])
        require_plausible_sizes(config, state)
        place = pick_device(config.device if device is None else device, obs_spec)
        communicator = Communicator(config.shards)
        algorithm = build_algorithm(config, obs_spec, action_spec, place, communicator=communicator)
        try:
            load(algorithm, communicator)
        except (RuntimeError, KeyError, ValueError) as error:
            detail = " ".join(str(error).split())
            raise CheckpointError(f"the checkpoint does not fit its own config: {detail}") from None
        spec = spec_of(config)
        return spec.policy(spec, config, algorithm, obs_spec, action_spec, place)


def load_policy(
    checkpoint: str | Path, device: str | None = None, *, trust: Trust = False
) -> TrainedPolicy:
    """Return the policy of a checkpoint or run folder, without creating an environment."""
    return policy_from_state(load_state(find_checkpoint(Path(checkpoint)), trust=trust), device)


def evaluate_checkpoint(
    checkpoint: str | Path,
    num_episodes: int = 10,
    *,
    deterministic: bool | None = None,
    seed: int | None = None,
    device: str | None = None,
    env_fn: EnvFn | None = None,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: Trust = False,
) -> EvalResult:
    """Evaluate a checkpoint, or the last one of a run folder, on new environments.

    ``env_id`` names another environment with the policy's spaces than that of the run, with
    ``env_kwargs`` for gymnasium.make; needed for a run that had none.
    ``trust`` lists the modules that its config may name (True: any); needed for checkpoints of
    other people.
    """
    if env_fn is not None and env_id is not None:
        raise ConfigError("env_fn and env_id were given: give one of them")
    state = load_state(find_checkpoint(Path(checkpoint)), trust=trust)
    state = with_environment(state, env_id, env_kwargs)
    if state["custom_env"] and env_fn is None:
        algo = state["config"]["algo"]
        name = find_entry(algo).class_name_of(algo)
        raise CheckpointError(
            f"{checkpoint} was trained with env_fn: evaluate it in Python with"
            f" {name}.load({str(checkpoint)!r}, env_fn=MyEnv).evaluate(20), or on a registered"
            " environment with --env-id"
        )
    policy = policy_from_state(state, device)
    return policy.evaluate(num_episodes, deterministic=deterministic, seed=seed, env_fn=env_fn)


def resume_training(
    checkpoint: str | Path,
    *,
    total_timesteps: int | None = None,
    total_updates: int | None = None,
    horizon: Horizon = "new",
    device: str | None = None,
    acceleration: str | None = None,
    engine: str | None = None,
    replay: Replay = "saved",
    callbacks: Callbacks = (),
    env_fn: EnvFn | None = None,
    vector_fn: VectorFn | None = None,
    device_env_fn: DeviceEnvFn | None = None,
    trust: Trust = False,
) -> TrainResult:
    """Continue a run from its checkpoint; see `ExperimentManager.resume`."""
    trainer = ExperimentManager.resume(
        checkpoint,
        total_timesteps=total_timesteps,
        total_updates=total_updates,
        horizon=horizon,
        device=device,
        acceleration=acceleration,
        engine=engine,
        replay=replay,
        callbacks=callbacks,
        env_fn=env_fn,
        vector_fn=vector_fn,
        device_env_fn=device_env_fn,
        trust=trust,
    )
    return trainer.train()
