"""What one does with a checkpoint: evaluate it, resume it, predict with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.checkpointing import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import EvalResult, evaluate_actor, make_eval_env
from rl_training.experiment.manager import (
    ExperimentManager,
    Horizon,
    Replay,
    build_algorithm,
    config_from_state,
    load_state,
)
from rl_training.experiment.registry import get_spec
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.device import pick_device
from rl_training.runtime.trainer import TrainResult
from rl_training.seeding import stream_seed, torch_stream
from rl_training.types import ACTION_MASK, ActionSpec, Array, Obs, ObsSpec, Progress


class TrainedPolicy:
    """A policy that needs no environment: observations in, actions out."""

    def __init__(
        self,
        config: TrainConfig[Any],
        algorithm: Any,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        device: torch.device,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.obs_spec = obs_spec
        self.action_spec = action_spec
        self.device = device
        spec = get_spec(config.algo)
        self._greedy = spec.eval_actor(algorithm, device, None)
        sampling = torch_stream(config.seed, "prediction")
        self._sampling = spec.eval_actor(algorithm, device, sampling)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """The action for one observation, or actions for a batch of them."""
        batch, single = self._as_batch(obs)
        mask = batch.get(ACTION_MASK) if isinstance(batch, dict) else None
        if mask is not None and self.action_spec.without_choice(mask).any():
            raise ConfigError(f"'{ACTION_MASK}' allows no action at all")
        module = self.algorithm.module
        was_training = module.training
        module.eval()
        try:
            actor = self._greedy if deterministic else self._sampling
            policy_action, _ = actor.act(batch, Progress(1, 1))
        finally:
            module.train(was_training)
        action: Array = self.action_spec.to_env(policy_action)
        if not single:
            return action
        return action[0]

    def _as_batch(self, obs: Any) -> tuple[Obs, bool]:
        spec = self.obs_spec
        if spec.is_dict:
            if not isinstance(obs, dict) or set(obs) != set(spec.leaves):
                given = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
                raise ConfigError(
                    f"the observation must be a dict with {sorted(spec.leaves)}; got {given}"
                )
            parts = {
                key: _leaf_batch(obs[key], leaf.given_shape, key)
                for key, leaf in spec.leaves.items()
            }
            singles = {single for _, single in parts.values()}
            if len(singles) != 1:
                raise ConfigError("some entries of the observation are batched and some are not")
            return spec.cast({key: array for key, (array, _) in parts.items()}), singles.pop()
        array, single = _leaf_batch(obs, spec.leaves[""].given_shape, "observation")
        return spec.cast(array), single

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        deterministic: bool = True,
        seed: int | None = None,
        env_fn: EnvFn | None = None,
    ) -> EvalResult:
        """Play whole episodes; ``seed`` picks them (unset: the run's own, unlike training's)."""
        if num_episodes < 1:
            raise ConfigError(f"'num_episodes' must be at least 1; got {num_episodes}")
        env = make_eval_env(self.config, num_episodes, env_fn)
        try:
            episodes = stream_seed(self.config.seed if seed is None else seed, "evaluation")
            sampling = None if deterministic else torch_stream(episodes, "evaluation_actions")
            actor = get_spec(self.config.algo).eval_actor(self.algorithm, self.device, sampling)
            self.algorithm.module.eval()
            return evaluate_actor(actor, env, num_episodes=num_episodes, seed=episodes)
        finally:
            env.close()


def _leaf_batch(value: Any, shape: tuple[int, ...], name: str) -> tuple[Array, bool]:
    array = np.asarray(value)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"{name} holds a NaN or an infinity")
    if array.shape == shape:
        return array[None], True
    if array.shape[1:] == shape and array.ndim == len(shape) + 1:
        return array, False
    raise ConfigError(
        f"{name} has shape {array.shape}; expected {shape}, or (n, {', '.join(map(str, shape))})"
        " for a batch"
    )


def policy_from_state(state: dict[str, Any], device: str | None = None) -> TrainedPolicy:
    """A policy from a checkpoint's content."""
    config = config_from_state(state)
    obs_spec = ObsSpec.from_plain(state["obs_spec"])
    action_spec = ActionSpec.from_plain(state["action_spec"])
    place = pick_device(config.device if device is None else device, obs_spec)
    algorithm = build_algorithm(config, obs_spec, action_spec, place)
    try:
        algorithm.load_state_dict(state["algorithm"])
    except (RuntimeError, KeyError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint does not fit its own config: {detail}") from None
    return TrainedPolicy(config, algorithm, obs_spec, action_spec, place)


def load_policy(checkpoint: str | Path, device: str | None = None) -> TrainedPolicy:
    """A policy from a checkpoint or run folder; no environment is made."""
    return policy_from_state(load_state(find_checkpoint(Path(checkpoint))), device)


def evaluate_checkpoint(
    checkpoint: str | Path,
    num_episodes: int = 10,
    *,
    deterministic: bool = True,
    seed: int | None = None,
    device: str | None = None,
    env_fn: EnvFn | None = None,
) -> EvalResult:
    """Evaluate a checkpoint (or a run folder's last one) on fresh environments."""
    state = load_state(find_checkpoint(Path(checkpoint)))
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
    callbacks: Sequence[Callback] = (),
    env_fn: EnvFn | None = None,
) -> TrainResult:
    """Go on with a run where its checkpoint stands; see `ExperimentManager.resume`."""
    trainer = ExperimentManager.resume(
        checkpoint,
        total_timesteps=total_timesteps,
        horizon=horizon,
        device=device,
        acceleration=acceleration,
        replay=replay,
        callbacks=callbacks,
        env_fn=env_fn,
    )
    return trainer.train()
