"""Managed classes: an algorithm as one object that learns, predicts, evaluates, saves, loads."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, Self

import gymnasium as gym

from rl_training._internal.coerce import coerce, require
from rl_training._internal.lazy import lazy_exports
from rl_training.api.habits import check_arguments, missing_attribute, refuse_unknown, with_masks
from rl_training.checkpointing import (
    SUFFIX,
    find_checkpoint,
    read_checkpoint,
    save_checkpoint,
    state_digest,
    to_storable,
)
from rl_training.config import TrainConfig
from rl_training.device_envs.given import made_by
from rl_training.device_envs.table import DeviceEnvFn
from rl_training.envs import EnvFn, make_vector_env, plain_adapter
from rl_training.envs.factory import check_env_fn
from rl_training.envs.given import GivenEnvironment
from rl_training.envs.given_vector import VectorFn
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.eval import EvalResult, require_env_fn
from rl_training.export.formats import FormatName
from rl_training.export.metadata import origin_of
from rl_training.export.observations import reason_without
from rl_training.export.parity import TOLERANCE
from rl_training.export.writing import Exported, export_policy
from rl_training.registry import class_exports, spec_of
from rl_training.runs import read_json
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.callbacks import Callbacks, as_callbacks
from rl_training.runtime.device import pick_device
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.resuming import extend
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.stored import IN_MEMORY, load_stored
from rl_training.runtime.trainer import Trainer, TrainResult
from rl_training.runtime.workflows import policy_from_state
from rl_training.shared_folder import require_free
from rl_training.sharing import portable
from rl_training.sharing.card import Played
from rl_training.trust import Trust
from rl_training.types import EnvInfo


class ManagedAlgorithm:
    """What the classes of all algorithms share."""

    algo: ClassVar[str]

    def __init__(
        self,
        env: str | gym.Env[Any, Any] | EnvFn | TrainConfig[Any] | None = None,
        *others: Any,
        config: TrainConfig[Any] | None = None,
        env_fn: EnvFn | None = None,
        vector_fn: VectorFn | None = None,
        device_env_fn: DeviceEnvFn | None = None,
        **overrides: Any,
    ) -> None:
        """Prepare a run; nothing is made or written before `learn`.

        Args:
            env: the id of a registered environment; an environment, which is then the only one
                (``num_envs`` 1; it is evaluated on copies made from its spec); or a config.
            config: a config, with or without ``env``; its ``algo`` may be left out.
            env_fn: a function that returns a new environment, which need not be registered.
            vector_fn: a function that takes a number and returns a new
                `gymnasium.vector.VectorEnv` of so many environments. With ``env_fn`` beside it,
                that one makes the environments of evaluation.
            device_env_fn: a function that takes a number and a device and returns a new
                `rl_training.device_envs.DeviceEnv`; ``env_fn`` beside it as above.
            others: nothing; a second argument without a name is refused.
            overrides: settings by name, those of the algorithm included. ``init_from`` may be a
                model that was trained or loaded: a copy of its weights is made now. The config
                records the model's checkpoint, or that it was in memory.
        """
        check_arguments(self._name, env, others, device_env_fn or vector_fn or env_fn)
        if overrides.get("algo", self.algo) != self.algo:
            raise ConfigError(f"{self._name} trains {self.algo}, not {overrides['algo']!r}")
        if isinstance(env, TrainConfig):
            if config is not None:
                raise ConfigError("two configs were given")
            env, config = None, env
        if isinstance(env, gym.Env):
            if config is not None and config.is_given("num_envs"):
                overrides = {"num_envs": config.num_envs, **overrides}
            env, env_fn, overrides = None, *_for_one_environment(env, overrides)
        elif env is not None and not isinstance(env, str):
            env, env_fn = None, env  # a class or another function that makes environments
        if env is not None:
            overrides = {"env_id": env, **overrides}
        elif config is None and (function := device_env_fn or vector_fn or env_fn):
            overrides = {"env_id": _name_of_function(function), **overrides}
        if env_fn is not None:
            check_env_fn(env_fn, {})
        env_fn = made_by(env_fn, vector_fn, device_env_fn)
        self._initial, overrides = _initial_policy(overrides)
        """The policy of the model that was given as ``init_from``, if one was."""
        base = TrainConfig(algo=self.algo) if config is None else config.for_algo(self.algo)
        self.config = base.with_overrides(**overrides) if overrides else base
        self.env_fn = env_fn
        self.result: TrainResult | None = None
        self._loaded_from: Path | None = None
        self._trust: Trust = False
        self._state: dict[str, Any] | None = None
        self._digest: str | None = None
        """That of the checkpoint that `_state` was read from."""
        self._policy: TrainedPolicy | None = None
        self._in_memory: Trainer | None = None
        """The trainer of a run that has no folder."""
        self._has_failed = False
        """Whether a run that has no folder ended with an error."""
        self._device: str | None = None
        """Device that was chosen in `load`."""

    def learn(
        self,
        total_timesteps: int | None = None,
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
        run_dir: str | Path | None = "auto",
        **unknown: Never,
    ) -> TrainResult:
        """Train for ``total_timesteps`` steps, or for those of the config.

        A run from a dataset alone makes as many updates instead.

        Called again, or on an object that was loaded from a run folder, it continues that run for
        so many more steps, with schedules over the new total; without a number it finishes a run
        that was interrupted. With another ``env_fn``, or loaded from a file outside a run folder,
        a new run starts from the weights. Ctrl-C raises KeyboardInterrupt once the run is saved.

        ``run_dir`` is the folder of a new run; "auto" makes one with a new name under the config's
        ``output_dir``. With None the run is kept in memory, and nothing is written: no checkpoints,
        no metrics.
        """
        refuse_unknown("learn", unknown)
        if total_timesteps is not None:
            setting = self.config.total_setting
            total_timesteps = coerce(total_timesteps, int, setting)
            require(total_timesteps >= 1, setting, "at least 1", total_timesteps)
        if run_dir is not None:
            coerce(run_dir, Path, "run_dir")
        trainer = self._next_trainer(total_timesteps, callbacks, env_fn, run_dir)
        if trainer is None:
            if self.result is None:
                raise CheckpointError(
                    f"the run of {self._loaded_from} is complete: give the number of further steps"
                )
            return self.result
        try:
            self.result = trainer.train()
        except BaseException:
            self._keep_what_was_saved(trainer)
            raise
        self._loaded_from = None
        self.config = trainer.config
        if self.result.folder is None:
            self._in_memory = trainer
            self._state = copy.deepcopy(trainer.policy_state())
        else:
            self._digest, self._state = read_checkpoint(self.result.checkpoint_path)
        self._policy = policy_from_state(self._state)
        if trainer.stop_signal == "SIGINT":
            # Ctrl-C ends the program, as elsewhere in Python, and not this call alone.
            where = self.result.folder or "memory"
            rest = ": learn() continues" if self.result.interrupted else ""
            raise KeyboardInterrupt(f"the run is saved in {where}{rest}")
        return self.result

    def _keep_what_was_saved(self, trainer: Trainer) -> None:
        """Make the object continue from the last checkpoint of a run that failed."""
        self.result = None
        if trainer.folder is None:
            self._in_memory, self._has_failed = None, True
            return
        last = trainer.folder / "checkpoints" / f"last{SUFFIX}"
        with contextlib.suppress(UserError, OSError):  # what made the run fail is raised
            self._digest, self._state = read_checkpoint(last)
            self._policy = policy_from_state(self._state)
            self._loaded_from, self._trust = last, True  # this process wrote it

    def _next_trainer(
        self,
        steps: int | None,
        callbacks: Callbacks,
        env_fn: EnvFn | None,
        run_dir: str | Path | None,
    ) -> Trainer | None:
        """Return the trainer of the next `learn`; None where nothing is left to do."""
        if self._has_failed:
            raise UserError(
                "the run of this object was kept in memory and ended with an error: make a new"
                " object to train again"
            )
        if self._in_memory is not None:
            if env_fn is not None or run_dir not in ("auto", None):
                raise ConfigError(
                    "this run is kept in memory: save(path) the policy and start a new run from it"
                    " with init_from=path"
                )
            return self._continued_in_memory(self._in_memory, steps, callbacks)
        checkpoint, config = self._checkpoint, self.config
        if checkpoint is not None:
            state = self._state or {}
            by_function = self.env_fn is not None
            other_env = env_fn is not None or (by_function and not state.get("custom_env"))
            if "training" in state and not other_env and _is_folder_of(checkpoint, run_dir):
                return self._continued(checkpoint, steps, callbacks)
            warnings.warn(f"a new run starts from the weights of {checkpoint}", stacklevel=3)
            config = config.with_overrides(init_from=checkpoint)
        if steps is not None:
            config = config.with_overrides(**{config.total_setting: steps})
        if env_fn is not None and self.env_fn is None:
            config = config.with_overrides(env_kwargs={})  # they are those of the id
        trainer = ExperimentManager.setup(
            config,
            callbacks=callbacks,
            env_fn=env_fn or self.env_fn,
            run_dir=run_dir,
            initial=self._initial if checkpoint is None else None,
        )
        self.env_fn = env_fn or self.env_fn
        if trainer.folder is None:
            weakref.finalize(self, trainer.close)
        return trainer

    @property
    def _checkpoint(self) -> Path | None:
        """The file that holds the current policy; None before `learn`, and for a run in memory."""
        if self.result is not None and self.result.folder is not None:
            return self.result.checkpoint_path
        return self._loaded_from

    def _as_initial(self) -> tuple[dict[str, Any], Path]:
        """Return the policy with a copy of its weights, and where the weights are from."""
        if self._state is None or (self._checkpoint is None and self._in_memory is None):
            raise ConfigError(f"init_from: {self!r} has learnt nothing: call its learn() first")
        about = {name: self._state[name] for name in ("config", "obs_spec", "action_spec")}
        weights = copy.deepcopy(self._state["algorithm"]["model"])
        return {**about, "algorithm": {"model": weights}}, self._checkpoint or IN_MEMORY

    def _continued_in_memory(
        self, trainer: Trainer, steps: int | None, callbacks: Callbacks
    ) -> Trainer | None:
        if steps is None and not (self.result and self.result.interrupted):
            return None
        trainer.prepare_more(as_callbacks(callbacks))
        if steps is not None:
            extend(trainer, trainer.counted() + steps, "new")
        return trainer

    def _continued(
        self, checkpoint: Path, steps: int | None, callbacks: Callbacks
    ) -> Trainer | None:
        state = self._state or {}
        require_env_fn(
            bool(state["custom_env"]), self.env_fn, f"{self._name}.load(path, env_fn=...)"
        )
        counters = state["training"]["counters"]
        done, total = int(counters["global_step"]), int(counters["total"])
        if self.config.is_offline:  # those of an unfinished iteration included
            done = int(state["algorithm"]["num_updates"])
        if steps is None and (self._has_ended(checkpoint) or done >= total):
            return None
        ends: dict[str, Any] = {}
        if steps is not None:
            ends[self.config.total_setting] = done + steps
        return ExperimentManager.resume(
            checkpoint,
            **ends,
            callbacks=callbacks,
            env_fn=self.env_fn,
            device=self._device,
            trust=True if self.result else self._trust,  # this process trained it
        )

    def _has_ended(self, checkpoint: Path) -> bool:
        """Whether the run came to its end, which a callback may have requested."""
        if self.result is not None:
            return not self.result.interrupted
        summary = read_json(checkpoint.parent.parent / "summary.json")
        return bool(summary.get("status") == "finished")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing_attribute(type(self).__name__, name))

    def __repr__(self) -> str:
        """Return algorithm, environment and how far it was trained."""
        name = f"{self._name} on {self.config.dataset or self.config.env_id}"
        if self._loaded_from is not None:
            return f"<{name}: loaded from {self._loaded_from}>"
        done = int(self.result.metrics["global_step"]) if self.result else 0
        where = f", in {self.run_dir}" if self.run_dir else ""
        return f"<{name}: {done:,} {self.config.unit} trained{where}>"

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run; None before `learn`, and for a run in memory."""
        if self.result is not None:
            return self.result.folder
        in_run = self._loaded_from is not None and "training" in (self._state or {})
        return self._loaded_from.parent.parent if in_run and self._loaded_from else None

    @property
    def env_info(self) -> EnvInfo:
        """Observations, actions and number of the environments."""
        policy = self._current_policy()
        return EnvInfo(policy.obs_spec, policy.action_spec, self.config.num_envs)

    @property
    def policy(self) -> TrainedPolicy:
        """The current policy; ``policy.module`` is the network."""
        return self._current_policy()

    def act(self, obs: Any, deterministic: bool = True, *, action_masks: Any = None) -> Any:
        """Return the action for one observation, or actions for a batch; needs no environment.

        ``action_masks`` are those of an environment with a method of this name.
        """
        policy = self._current_policy()
        return policy.act(with_masks(policy.obs_spec, obs, action_masks), deterministic)

    def predict(
        self,
        obs: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
        *,
        action_masks: Any = None,
    ) -> tuple[Any, Any]:
        """Return the action (or actions, for a batch) and the next state; needs no environment.

        The state is that of a recurrent policy: pass what the last call returned, None at the
        start; where ``episode_start`` is true it is reset first. Other policies have None.
        ``action_masks`` are those of an environment with a method of this name.
        """
        policy = self._current_policy()
        masked = with_masks(policy.obs_spec, obs, action_masks)
        return policy.predict(masked, state, episode_start, deterministic)

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        deterministic: bool | None = None,
        seed: int | None = None,
        env_fn: EnvFn | None = None,
        **unknown: Never,
    ) -> EvalResult:
        """Play whole episodes on new environments; unset, ``deterministic`` is as in training."""
        refuse_unknown("evaluate", unknown)
        if isinstance(num_episodes, gym.Env):
            raise ConfigError(
                "evaluate takes the number of episodes; give the environment as env_fn:"
                " evaluate(10, env_fn=lambda: ...)"
            )
        num_episodes = coerce(num_episodes, int, "num_episodes")
        custom_env = bool((self._state or {}).get("custom_env"))
        require_env_fn(custom_env, env_fn or self.env_fn, "model.evaluate(10, env_fn=MyEnv)")
        return self._current_policy().evaluate(
            num_episodes, deterministic=deterministic, seed=seed, env_fn=env_fn or self.env_fn
        )

    def save(self, path: str | Path) -> Path:
        """Write the policy: it can be loaded, evaluated and started from, but not resumed."""
        target: Path = coerce(path, Path, "path")
        if target.suffix != SUFFIX:
            target = target.with_name(target.name + SUFFIX)
        self._current_policy()
        if self._state is None:
            raise CheckpointError("there is nothing to save yet")
        # A copy outside its run folder has no metric log or lineage to continue.
        portable = {key: value for key, value in self._state.items() if key != "training"}
        save_checkpoint(target, portable)
        return target

    def export(
        self,
        folder: str | Path,
        format: FormatName = "onnx",  # noqa: A002 - its usual name
        *,
        stochastic: bool = False,
        tolerance: float = TOLERANCE,
        env_fn: EnvFn | None = None,
        **unknown: Never,
    ) -> Exported:
        """Write the policy to a new folder, as a file that runs without this package.

        The file contains all of `predict`. It is compared with it on observations of the run's
        environment, or of ``env_fn``, and kept only if it chooses the same actions; where there is
        no environment, on random observations.

        Args:
            folder: the folder to create; it may exist if it is empty.
            format: "onnx", "torch" (a program of torch.export), or "safetensors": the weights, for
                `rl_training.export.load_exported`.
            stochastic: sample actions, from random numbers that are an input of the file.
            tolerance: largest accepted difference of an action, relative to its range.
            env_fn: a function that makes the environment.
            unknown: nothing; other arguments are refused.
        """
        refuse_unknown("export", unknown)
        policy, state = self._current_policy(), self._state or {}
        make = env_fn or self.env_fn
        return export_policy(
            policy,
            folder,
            format,
            stochastic=stochastic,
            tolerance=tolerance,
            env_fn=make,
            needs_env=env_fn is not None,
            without_env=reason_without(state, make),
            origin=origin_of(state, self._digest),
        )

    def share(
        self,
        folder: str | Path,
        *,
        num_episodes: int = 20,
        seed: int | None = None,
        env_fn: EnvFn | None = None,
    ) -> Path:
        """Write the policy as a folder to share, with a model card; return the folder.

        It holds weights (safetensors), config and spaces, in the layout of Hugging Face, and is
        loaded and started from like a saved file. The folder must be missing or empty.
        ``num_episodes`` are played first, and their returns are in the card; 0: none.
        """
        target: Path = coerce(folder, Path, "folder")
        require_free(target)
        num_episodes = coerce(num_episodes, int, "num_episodes")
        require(num_episodes >= 0, "num_episodes", "zero or more", num_episodes)
        self._current_policy()
        if self._state is None:
            raise CheckpointError("there is nothing to share yet")
        played = None
        if num_episodes:
            result = self.evaluate(num_episodes, seed=seed, env_fn=env_fn)
            used = self.config.seed if seed is None else seed
            played = Played(result, self.config.eval_deterministic, used)
        digest = state_digest(to_storable(self._state))
        origin = portable.origin_of(self._checkpoint, self._state, digest)
        return portable.share_policy(target, self._state, origin, played)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        env_fn: EnvFn | None = None,
        vector_fn: VectorFn | None = None,
        device_env_fn: DeviceEnvFn | None = None,
        device: str | None = None,
        trust: Trust = False,
        **unknown: Never,
    ) -> Self:
        """Return a trained object from a saved file, a checkpoint, a run folder or a shared one.

        ``device``: device of the networks; unset: as in training. ``trust``: modules that may be
        imported if the file names them (a list of module names, or True for all); unset: only those
        of your own checkpoints.
        """
        refuse_unknown("load", unknown)
        found = find_checkpoint(coerce(path, Path, "path"))
        digest, state = load_stored(found, trust=trust)
        policy = policy_from_state(state, device)
        if policy.config.algo != cls.algo:
            raise CheckpointError(
                f"{found} holds a policy of algo {policy.config.algo!r}, not {cls.algo!r}"
            )
        loaded = cls(policy.config, env_fn=env_fn, vector_fn=vector_fn, device_env_fn=device_env_fn)
        loaded._loaded_from = found
        loaded._trust = trust
        loaded._device = device
        loaded._digest, loaded._state = digest, state
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
            adapter = plain_adapter(vector, self.config.seed)
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
            spec = spec_of(self.config)
            self._policy = spec.policy(
                spec, self.config, algorithm, adapter.obs_spec, adapter.action_spec, device
            )
        return self._policy


def _initial_policy(overrides: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the policy of a model that is given as ``init_from``, and settings without it."""
    model = overrides.get("init_from")
    if not isinstance(model, ManagedAlgorithm):
        return None, overrides
    policy, origin = model._as_initial()
    return policy, {**overrides, "init_from": origin}


def _is_folder_of(checkpoint: Path, run_dir: str | Path | None) -> bool:
    """Whether ``run_dir`` does not ask for another folder than that of the checkpoint."""
    if run_dir is None or run_dir == "auto":
        return run_dir == "auto"
    return Path(run_dir).resolve() == checkpoint.parent.parent.resolve()


def _for_one_environment(
    env: gym.Env[Any, Any], overrides: dict[str, Any]
) -> tuple[GivenEnvironment, dict[str, Any]]:
    """Return what makes environments of the one given, and the settings for it."""
    if overrides.get("num_envs", 1) != 1:
        raise ConfigError(
            f"'num_envs' is {overrides['num_envs']}, but one environment was given: pass"
            " env_fn=lambda: MyEnv(), or num_envs=1"
        )
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


def _name_of_function(env_fn: Any) -> str:
    """Return what an environment without an id is called in logs and folder names."""
    name = str(getattr(env_fn, "__name__", type(env_fn).__name__))
    return name if name.isidentifier() else "Environment"


__getattr__, _ = lazy_exports(__name__, class_exports())
"""The managed classes were defined here before `rl_training.surface`."""
