"""Managed classes: an algorithm as one object that learns, predicts, evaluates, saves, loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from rl_training._internal.lazy import lazy_exports
from rl_training.checkpointing import (
    SUFFIX,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn, VectorAdapter, make_vector_env
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import EvalResult
from rl_training.registry import class_exports, get_spec
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.device import pick_device
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.setup import ExperimentManager, build_algorithm
from rl_training.runtime.stored import load_state
from rl_training.runtime.trainer import TrainResult
from rl_training.runtime.workflows import policy_from_state
from rl_training.trust import Trust


class ManagedAlgorithm:
    """What the classes of all algorithms share."""

    algo: ClassVar[str]

    def __init__(
        self,
        config: TrainConfig[Any] | None = None,
        *,
        env_fn: EnvFn | None = None,
        **overrides: Any,
    ) -> None:
        """Take a config; ``env_fn`` makes an unregistered environment, ``overrides`` knobs."""
        config = TrainConfig(algo=self.algo) if config is None else config
        if config.algo != self.algo:
            raise ConfigError(f"{type(self).__name__} was given a config with algo: {config.algo}")
        self.config = config.with_overrides(**overrides) if overrides else config
        self.env_fn = env_fn
        self.result: TrainResult | None = None
        self._loaded = False
        self._state: dict[str, Any] | None = None
        self._policy: TrainedPolicy | None = None

    def learn(
        self, total_timesteps: int | None = None, *, callbacks: Sequence[Callback] = ()
    ) -> TrainResult:
        """Train in a new run folder; called again, continue that run to a larger total."""
        if self.result is None:
            config = self.config
            if total_timesteps is not None:
                config = config.with_overrides(total_timesteps=total_timesteps)
            if self._loaded:
                raise CheckpointError(
                    "this policy was loaded from a file: resume its run with"
                    " rl_training.runtime.resume_training(path), or start a new run from its"
                    " weights with TrainConfig(init_from=path)"
                )
            trainer = ExperimentManager.setup(config, callbacks=callbacks, env_fn=self.env_fn)
        else:
            trainer = ExperimentManager.resume(
                self.result.checkpoint_path,
                total_timesteps=total_timesteps,
                callbacks=callbacks,
                env_fn=self.env_fn,
                trust=True,  # this process trained it
            )
            if trainer.global_step >= trainer.total and not self.result.interrupted:
                trainer.close()
                return self.result
        self.result = trainer.train()
        self._state = load_checkpoint(self.result.checkpoint_path)
        self._policy = policy_from_state(self._state)
        return self.result

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """The action for one observation, or actions for a batch; no environment is needed."""
        return self._current_policy().predict(obs, deterministic)

    def evaluate(
        self, num_episodes: int = 10, *, deterministic: bool | None = None, seed: int | None = None
    ) -> EvalResult:
        """Play whole episodes on fresh environments; unset, ``deterministic`` is as in training."""
        return self._current_policy().evaluate(
            num_episodes, deterministic=deterministic, seed=seed, env_fn=self.env_fn
        )

    def save(self, path: str | Path) -> Path:
        """Write the policy: it can be loaded, evaluated and started from, but not resumed."""
        target = Path(path)
        if target.suffix != SUFFIX:
            target = target.with_name(target.name + SUFFIX)
        self._current_policy()
        if self._state is None:
            raise CheckpointError("there is nothing to save yet")
        # A copy outside its run folder has no metric log or lineage to continue.
        portable = {key: value for key, value in self._state.items() if key != "training"}
        save_checkpoint(target, portable)
        return target

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        env_fn: EnvFn | None = None,
        device: str | None = None,
        trust: Trust = False,
    ) -> Self:
        """A trained object from a saved file, a checkpoint or a run folder.

        ``device`` is where it runs here; unset: as in training. ``trust`` says which modules the
        file may name (a list of module names, or True for any), where it was not written here by
        you.
        """
        found = find_checkpoint(Path(path))
        state = load_state(found, trust=trust)
        policy = policy_from_state(state, device)
        if policy.config.algo != cls.algo:
            raise CheckpointError(
                f"{found} holds a policy of algo {policy.config.algo!r}, not {cls.algo!r}"
            )
        loaded = cls(policy.config, env_fn=env_fn)
        loaded._loaded = True
        loaded._state = state
        loaded._policy = policy
        return loaded

    def _current_policy(self) -> TrainedPolicy:
        """The trained policy, or an untrained one (its spaces read off the environment once)."""
        if self._policy is None:
            vector = make_vector_env(
                self.config.with_overrides(vectorization="sync", overlap=False),
                1,
                env_fn=self.env_fn,
            )
            adapter = VectorAdapter(vector, self.config.seed)
            adapter.close()
            device = pick_device(self.config.device, adapter.obs_spec)
            algorithm = build_algorithm(self.config, adapter.obs_spec, adapter.action_spec, device)
            self._state = {
                "config": self.config.to_dict(),
                "custom_env": self.env_fn is not None,
                "obs_spec": adapter.obs_spec.to_plain(),
                "action_spec": adapter.action_spec.to_plain(),
                "algorithm": algorithm.state_dict(),
            }
            spec = get_spec(self.algo)
            self._policy = spec.policy(
                spec, self.config, algorithm, adapter.obs_spec, adapter.action_spec, device
            )
        return self._policy


__getattr__, _ = lazy_exports(__name__, class_exports())
"""The managed classes were defined here before `rl_training.surface`."""
