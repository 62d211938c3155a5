"""Managed classes: an algorithm as one object that learns, predicts, evaluates, saves, loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym

from rl_training._internal.lazy import lazy_exports
from rl_training.checkpointing import (
    SUFFIX,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn, VectorAdapter, make_vector_env
from rl_training.envs.given import GivenEnvironment
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import EvalResult
from rl_training.registry import class_exports, get_spec
from rl_training.runtime.callbacks import Callbacks
from rl_training.runtime.device import pick_device
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.setup import ExperimentManager, build_algorithm
from rl_training.runtime.stored import load_state
from rl_training.runtime.trainer import Trainer, TrainResult
from rl_training.runtime.workflows import policy_from_state
from rl_training.trust import Trust
from rl_training.types import EnvInfo


class ManagedAlgorithm:
    """What the classes of all algorithms share."""

    algo: ClassVar[str]

    def __init__(
        self,
        env: str | gym.Env[Any, Any] | TrainConfig[Any] | None = None,
        *,
        config: TrainConfig[Any] | None = None,
        env_fn: EnvFn | None = None,
        **overrides: Any,
    ) -> None:
        """Prepare a run; nothing is made or written before `learn`.

        Args:
            env: the id of a registered environment; an environment, which is then the only one
                (``num_envs`` 1; it is evaluated on copies made from its spec); or a config.
            config: a config, with or without ``env``; its ``algo`` may be left out.
            env_fn: a function that returns a new environment, which need not be registered.
            overrides: settings by name, those of the algorithm included.
        """
        if isinstance(env, TrainConfig):
            if config is not None:
                raise ConfigError("two configs were given")
            env, config = None, env
        if isinstance(env, gym.Env):
            if env_fn is not None:
                raise ConfigError("an environment and env_fn were given: one of them is enough")
            env, env_fn, overrides = None, *_for_one_environment(env, overrides)
        elif env is not None and not isinstance(env, str):
            raise ConfigError(
                f"{type(self).__name__} takes the id of an environment, an environment or a"
                f" TrainConfig, not a {type(env).__name__}; or env_fn=lambda: MyEnv()"
            )
        if env is not None:
            overrides = {"env_id": env, **overrides}
        elif config is None and env_fn is not None:
            overrides = {"env_id": _name_of_function(env_fn), **overrides}
        base = TrainConfig(algo=self.algo) if config is None else config.for_algo(self.algo)
        self.config = base.with_overrides(**overrides) if overrides else base
        self.env_fn = env_fn
        self.result: TrainResult | None = None
        self._loaded_from: Path | None = None
        self._trust: Trust = False
        self._state: dict[str, Any] | None = None
        self._policy: TrainedPolicy | None = None

    def learn(
        self,
        total_timesteps: int | None = None,
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
    ) -> TrainResult:
        """Train for ``total_timesteps`` steps, or for those of the config.

        Called again, or on an object that was loaded from a run folder, it continues that run for
        so many more steps, with schedules over the new total; without a number it finishes a run
        that was interrupted. With another ``env_fn``, or loaded from a file outside a run folder,
        a new run starts from the weights. Ctrl-C raises KeyboardInterrupt once the run is saved.
        """
        trainer = self._next_trainer(total_timesteps, callbacks, env_fn)
        if trainer is None:
            if self.result is None:
                raise CheckpointError(
                    f"the run of {self._loaded_from} is complete: give the number of further steps"
                )
            return self.result
        self.result = trainer.train()
        self._loaded_from = None
        self.config = trainer.config
        self._state = load_checkpoint(self.result.checkpoint_path)
        self._policy = policy_from_state(self._state)
        if self.result.interrupted and self.result.stop_reason == "SIGINT":
            # Ctrl-C ends the program, as elsewhere in Python, and not this call alone.
            raise KeyboardInterrupt(f"the run is saved in {self.result.run_dir}: learn() continues")
        return self.result

    def _next_trainer(
        self, steps: int | None, callbacks: Callbacks, env_fn: EnvFn | None
    ) -> Trainer | None:
        """Return the trainer of the next `learn`; None where nothing is left to do."""
        checkpoint = self.result.checkpoint_path if self.result else self._loaded_from
        config = self.config
        if checkpoint is not None:
            in_run = self._state is not None and "training" in self._state
            if in_run and env_fn is None:
                return self._continued(checkpoint, steps, callbacks)
            warnings.warn(f"a new run starts from the weights of {checkpoint}", stacklevel=3)
            config = config.with_overrides(init_from=checkpoint)
        if steps is not None:
            config = config.with_overrides(total_timesteps=steps)
        if env_fn is not None:
            self.env_fn = env_fn
        return ExperimentManager.setup(config, callbacks=callbacks, env_fn=self.env_fn)

    def _continued(
        self, checkpoint: Path, steps: int | None, callbacks: Callbacks
    ) -> Trainer | None:
        counters = (self._state or {})["training"]["counters"]
        done, total = int(counters["global_step"]), int(counters["total"])
        if steps is None and done >= total and not (self.result and self.result.interrupted):
            return None
        return ExperimentManager.resume(
            checkpoint,
            total_timesteps=None if steps is None else done + steps,
            callbacks=callbacks,
            env_fn=self.env_fn,
            trust=True if self.result else self._trust,  # this process trained it
        )

    @property
    def run_dir(self) -> Path | None:
        """The folder of the last run; None before `learn`."""
        return self.result.run_dir if self.result else None

    @property
    def env_info(self) -> EnvInfo:
        """Observations, actions and number of the environments."""
        policy = self._current_policy()
        return EnvInfo(policy.obs_spec, policy.action_spec, self.config.num_envs)

    @property
    def policy(self) -> TrainedPolicy:
        """The current policy; ``policy.module`` is the network."""
        return self._current_policy()

    def act(self, obs: Any, deterministic: bool = True) -> Any:
        """Return the action for one observation, or actions for a batch; needs no environment."""
        return self._current_policy().act(obs, deterministic)

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """Return the action (or actions, for a batch) and the next state; needs no environment.

        The state is that of a recurrent policy: pass what the last call returned, None at the
        start; where ``episode_start`` is true it is reset first. Other policies have None.
        """
        return self._current_policy().predict(obs, state, episode_start, deterministic)

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        deterministic: bool | None = None,
        seed: int | None = None,
        env_fn: EnvFn | None = None,
    ) -> EvalResult:
        """Play whole episodes on new environments; unset, ``deterministic`` is as in training."""
        return self._current_policy().evaluate(
            num_episodes, deterministic=deterministic, seed=seed, env_fn=env_fn or self.env_fn
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
        loaded._loaded_from = found
        loaded._trust = trust
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


def _for_one_environment(
    env: gym.Env[Any, Any], overrides: dict[str, Any]
) -> tuple[GivenEnvironment, dict[str, Any]]:
    """Return what makes environments of the one given, and the settings for it."""
    if overrides.get("num_envs", 1) != 1:
        raise ConfigError("one environment was given, and num_envs is more: use env_fn=lambda: ...")
    given = GivenEnvironment(env)
    settings: dict[str, Any] = {"env_id": given.name, "num_envs": 1}
    if not given.can_be_copied and overrides.get("eval_episodes", 1) != 0:
        warnings.warn(
            f"{given.name} has no spec to make a copy from: there is no evaluation. Give"
            " env_fn=lambda: ... instead to have one",
            stacklevel=4,
        )
        overrides = {**overrides, "eval_episodes": 0}
    return given, {**settings, **overrides}


def _name_of_function(env_fn: EnvFn) -> str:
    """Return what an environment without an id is called in logs and folder names."""
    name = str(getattr(env_fn, "__name__", type(env_fn).__name__))
    return name if name.isidentifier() else "Environment"


__getattr__, _ = lazy_exports(__name__, class_exports())
"""The managed classes were defined here before `rl_training.surface`."""
