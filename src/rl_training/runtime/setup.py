"""Trainers from configs and from checkpoints: the only place where a run is put together."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rl_training.checkpointing import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn, make_adapter
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import make_eval_env
from rl_training.models.normalizer import RewardNormalizer
from rl_training.registry import check_spaces, get_spec
from rl_training.runs import (
    RunLock,
    describe_run,
    make_run_dir,
    read_json,
    refuse_links,
    storage_errors,
    versions,
    write_json,
)
from rl_training.runtime.actors import Actor
from rl_training.runtime.callbacks import Callback, Callbacks, as_callbacks
from rl_training.runtime.device import (
    check_acceleration,
    check_precision,
    pick_device,
    pick_threads,
    torch_threads,
)
from rl_training.runtime.sources import local_source
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.stored import (
    config_from_state,
    load_model_weights,
    load_state,
    malformed_state,
    require_plausible_run,
    require_plausible_sizes,
)
from rl_training.runtime.trainer import Setup, Trainer, TrainResult
from rl_training.seeding import stream_seed
from rl_training.trust import Trust
from rl_training.types import ActionSpec, EnvInfo, ObsSpec

Horizon = Literal["new", "keep"]
Replay = Literal["saved", "empty"]


class ExperimentManager:
    """Turns configs and checkpoints into trainers; call ``.train()`` on what it returns."""

    @staticmethod
    def setup(
        config: TrainConfig[Any],
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
    ) -> Trainer:
        """Return a trainer at the start of a new run."""
        callbacks = as_callbacks(callbacks)
        if config.init_from is not None:
            find_checkpoint(config.init_from)
        if config.wandb and importlib.util.find_spec("wandb") is None:
            raise ConfigError("wandb: true needs pip install 'rl_training[wandb]'")
        setup = assemble(config, env_fn)
        try:
            if config.init_from is not None:
                load_weights(setup.learner, config.init_from, setup.source.info)
            setup.spec.trainer.check(setup)
            setup.run_dir = make_run_dir(config)
            setup.lock = RunLock(setup.run_dir)
            exact = _is_exact(setup)
            if not exact:
                _warn_inexact(setup)
            about = describe_run(
                config,
                device=str(setup.device),
                torch_threads=setup.threads,
                resume="exact" if exact else "approximate",
                env_fn=_name_of(env_fn),
            )
            with storage_errors():
                (setup.run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
                write_json(setup.run_dir / "metadata.json", about)
            return setup.spec.trainer(setup, callbacks)
        except BaseException:
            setup.source.close()
            raise

    @staticmethod
    def resume(
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
    ) -> Trainer:
        """A trainer that continues from a checkpoint, in the same run folder.

        ``total_timesteps`` moves the end; schedules are then evaluated over the new total, or
        hold their final values with ``horizon="keep"``. ``device`` and ``acceleration`` replace
        the run's own. ``replay="empty"`` continues without the saved replay. ``trust`` says which
        modules the checkpoint may name, where it was not written here by this user.
        """
        callbacks = as_callbacks(callbacks)
        path = find_checkpoint(Path(checkpoint))
        run_dir = _run_folder_of(path)
        # Before the checkpoint is read: another process may be writing the next one.
        lock = RunLock(run_dir)
        try:
            refuse_links(run_dir)
            state = load_state(path, trust=trust)
            with malformed_state(path):
                return _restored(
                    state,
                    path,
                    lock,
                    _Changes(total_timesteps, horizon, device, acceleration, replay),
                    callbacks,
                    env_fn,
                )
        except BaseException:
            lock.release()
            raise


@dataclasses.dataclass(frozen=True)
class _Changes:
    """What a resume changes about a run."""

    total_timesteps: int | None
    horizon: Horizon
    device: str | None
    acceleration: str | None
    replay: Replay


def _run_folder_of(path: Path) -> Path:
    """The run folder that a checkpoint is in."""
    run_dir = path.parent.parent
    if path.parent.name != "checkpoints" or not (run_dir / "metadata.json").is_file():
        _require_training_state(load_model_weights(path), path)
        raise CheckpointError(
            f"{path} lies outside its run folder, where its metrics and lineage are: resume"
            " it there, or start a new run from its weights with init_from"
        )
    return run_dir


def _require_training_state(state: Mapping[str, Any], path: Path) -> None:
    if "training" not in state:
        raise CheckpointError(
            f"{path} holds a policy without its training state: it can be evaluated or used"
            " with init_from, not resumed"
        )


def _restored(
    state: Mapping[str, Any],
    path: Path,
    lock: RunLock,
    changes: _Changes,
    callbacks: Sequence[Callback],
    env_fn: EnvFn | None,
) -> Trainer:
    """The trainer of a checkpoint's state."""
    _require_training_state(state, path)
    if state["custom_env"] and env_fn is None:
        raise CheckpointError(
            f"{path} was trained on an environment given as env_fn; resume it from Python:"
            " resume_training(path, env_fn=...)"
        )
    config = config_from_state(state)
    require_plausible_sizes(config, state)
    require_plausible_run(config, state["training"])
    config = _moved(config, changes)
    moves = changes.device is not None and changes.device != state["config"]["device"]
    threads = None if moves else _saved_threads(state["training"]["counters"]["threads"])
    setup = assemble(config, env_fn, threads=threads)
    try:
        _check_saved_spaces(state, setup.source.info)
        setup.spec.trainer.check(setup)
        setup.run_dir, setup.lock = path.parent.parent, lock
        trainer = setup.spec.trainer(setup, callbacks)
        empty = changes.replay == "empty"
        exact = trainer.load_state_dict(state, empty_replay=empty)
        _warn_of_differences(setup.run_dir, exact)
        trainer.resumed = {
            "checkpoint": path.name,
            "step": trainer.global_step,
            "resume": ("exact" if exact and not empty and _is_exact(setup) else "approximate"),
            **_extend(trainer, changes.total_timesteps, changes.horizon),
        }
    except BaseException:
        setup.source.close()
        raise
    return trainer


def _moved(config: TrainConfig[Any], changes: _Changes) -> TrainConfig[Any]:
    """The config on another device or with another acceleration."""
    moved = {"device": changes.device, "acceleration": changes.acceleration}
    if changes.device == "cpu":
        if getattr(config.algo_kwargs, "replay_device", "cpu") != "cpu":
            warnings.warn("the replay moves to the CPU with the networks", stacklevel=4)
            moved["replay_device"] = "cpu"
        if config.precision != "float32":
            warnings.warn(f"{config.precision} becomes float32 on the CPU", stacklevel=4)
            moved["precision"] = "float32"
    return config.with_overrides(**{k: v for k, v in moved.items() if v is not None})


def _saved_threads(count: Any) -> int:
    if type(count) is not int or not 1 <= count <= 1024:
        raise CheckpointError(f"the checkpoint asks for {count!r} threads")
    return count


def _name_of(env_fn: EnvFn | None) -> str | None:
    """What made the environments, where that is not their id: told apart in reports by this."""
    if env_fn is None:
        return None
    if isinstance(env_fn, functools.partial):
        given = [*map(repr, env_fn.args), *(f"{k}={v!r}" for k, v in env_fn.keywords.items())]
        return f"{_name_of(env_fn.func)}({', '.join(given)})"[:200]
    named: Any = env_fn if hasattr(env_fn, "__qualname__") else type(env_fn)
    is_lambda = named.__qualname__.endswith("<lambda>")
    line = f":{named.__code__.co_firstlineno}" if is_lambda else ""
    return f"{named.__module__}.{named.__qualname__}{line}"


def assemble(config: TrainConfig[Any], env_fn: EnvFn | None, threads: int | None = None) -> Setup:
    """Make environments, learner, actor and source of a run."""
    spec = get_spec(config.algo)
    _seed_globals(config.seed)
    env = make_adapter(config, env_fn)
    try:
        device = pick_device(config.device, env.obs_spec)
        check_acceleration(config.acceleration, device)
        check_precision(config.precision, device, env.obs_spec)
        count = pick_threads(config, env.obs_spec, device) if threads is None else threads
        learner = build_algorithm(config, env.obs_spec, env.action_spec, device, count)
        normalizer = None
        if config.normalize_reward:
            gamma = config.algo_kwargs.gamma
            normalizer = RewardNormalizer(env.num_envs, gamma, config.clip_reward)
        source = local_source(env, _recording_actor(spec, learner, config, device), normalizer)
    except BaseException:
        env.close()
        raise
    return Setup(
        spec=spec,
        config=config,
        learner=learner,
        source=source,
        make_eval_env=lambda episodes: make_eval_env(config, episodes, env_fn),
        custom_env=env_fn is not None,
        device=device,
        threads=count,
        run_dir=Path(),
    )


def _recording_actor(
    spec: AlgorithmSpec, learner: Any, config: TrainConfig[Any], device: torch.device
) -> Actor:
    """Return the exploring actor, which records with each step what the spec requests."""
    actor: Any = spec.actor(learner, config, device)
    if spec.records:
        if not hasattr(actor, "record"):
            raise ConfigError(
                f"{spec.name} requests {', '.join(sorted(spec.records))} with each step, which its"
                f" actor {type(actor).__name__} cannot record"
            )
        actor.record(spec.records)
    return actor  # type: ignore[no-any-return]


def _seed_globals(seed: int) -> None:
    """Seed the global generators, which a user's environment or encoder may draw from."""
    random.seed(stream_seed(seed, "python"))
    np.random.seed(stream_seed(seed, "numpy") >> 32)  # noqa: NPY002 - that one is meant
    torch.manual_seed(stream_seed(seed, "torch"))


def build_algorithm(
    config: TrainConfig[Any],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    threads: int = 1,
) -> Any:
    """Return a learner with its seeded initial weights, in eval mode.

    Training, evaluation and prediction all build it here.
    """
    check_spaces(config.algo, obs_spec, action_spec)
    devices = [device] if device.type == "cuda" else []
    with torch_threads(threads), torch.random.fork_rng(devices=devices):
        torch.manual_seed(stream_seed(config.seed, "parameters"))
        learner = get_spec(config.algo).build(config, obs_spec, action_spec, device)
    learner.module.eval()
    return learner


def load_weights(learner: Any, checkpoint: Path, info: EnvInfo) -> None:
    """Load the policy's weights from another checkpoint."""
    path = find_checkpoint(checkpoint)
    state = load_model_weights(path)
    _check_saved_spaces(state, info)
    try:
        learner.load_weights(state["algorithm"]["model"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(f"init_from: the weights of {path} do not fit: {detail}") from None


def _check_saved_spaces(state: Mapping[str, Any], info: EnvInfo) -> None:
    for name, now in (("obs_spec", info.obs_spec), ("action_spec", info.action_spec)):
        if state[name] != now.to_plain():
            raise CheckpointError(
                f"the environment is not the one of the checkpoint: {name} was {state[name]},"
                f" now {now.to_plain()}"
            )


def _is_exact(setup: Setup) -> bool:
    eager_cpu = setup.device.type == "cpu" and setup.config.acceleration == "eager"
    return eager_cpu and setup.source.exactly_resumable


def _warn_inexact(setup: Setup) -> None:
    reasons = []
    if setup.device.type != "cpu":
        reasons.append(f"device {setup.device.type}")
    if setup.config.acceleration != "eager":
        reasons.append(f"acceleration {setup.config.acceleration}")
    if not setup.source.exactly_resumable:
        reasons.append("environments whose state is more than an episode's seed and actions")
    warnings.warn(f"resume of this run will be approximate: {', '.join(reasons)}", stacklevel=3)


def _warn_of_differences(run_dir: Path, exact: bool) -> None:
    metadata = read_json(run_dir / "metadata.json")
    before, now = metadata.get("versions", {}), versions()
    changed = [f"{k} {before[k]} -> {now[k]}" for k in before if k in now and before[k] != now[k]]
    if changed:
        warnings.warn(
            f"versions differ from the run's: {', '.join(changed)}; the resumed run may differ too",
            stacklevel=3,
        )
    if not exact:
        warnings.warn(
            "the environments could not be restored exactly (new episodes, or a source of"
            " randomness outside their seeds): this resume is approximate",
            stacklevel=3,
        )


def _extend(trainer: Trainer, total_timesteps: int | None, horizon: Horizon) -> dict[str, Any]:
    if total_timesteps is None:
        return {}
    new_total = trainer.round_up(total_timesteps)
    if new_total < trainer.global_step:
        raise ConfigError(
            f"'total_timesteps' must be at least the {trainer.global_step} steps already done;"
            f" got {total_timesteps}"
        )
    before = trainer.horizon
    schedule = getattr(trainer.config.algo_kwargs, "schedule", "constant")
    if horizon == "keep" and schedule != "constant":
        warnings.warn(
            f"horizon: keep holds schedules at their final values: with a {schedule} schedule the"
            " learning rate stays at 0 and nothing more is learnt past the old total",
            stacklevel=4,
        )
    trainer.total = new_total
    if horizon == "new":
        trainer.horizon = new_total
    step = trainer.global_step
    details = {
        "total_timesteps": new_total,
        "horizon": trainer.horizon,
        "progress_jump": [min(1.0, step / before), min(1.0, step / trainer.horizon)],
    }
    trainer.config = trainer.config.with_overrides(total_timesteps=total_timesteps)
    return details


def train_as(
    algo: str,
    config: TrainConfig[Any],
    *,
    callbacks: Callbacks = (),
    env_fn: EnvFn | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train ``algo`` from a config for it; ``overrides`` replace settings by name."""
    config = config.for_algo(algo)
    if overrides:
        config = config.with_overrides(**overrides)
    return ExperimentManager.setup(config, callbacks=callbacks, env_fn=env_fn).train()


class TrainFunction(Protocol):
    """``train_x(config, ...)``: train one algorithm."""

    def __call__(
        self,
        config: TrainConfig[Any],
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
        **overrides: Any,
    ) -> TrainResult:
        """Train; ``overrides`` replace fields of the config and of the algorithm's by name."""
        ...


def train_function(algo: str) -> TrainFunction:
    """Return ``train_x`` of an algorithm."""

    def train(
        config: TrainConfig[Any],
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
        **overrides: Any,
    ) -> TrainResult:
        return train_as(algo, config, callbacks=callbacks, env_fn=env_fn, **overrides)

    train.__name__ = train.__qualname__ = f"train_{algo}"
    train.__doc__ = f"Train {algo}; ``overrides`` replace fields of the config and of its settings."
    return train
