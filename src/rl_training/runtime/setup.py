"""Trainers from configs and from checkpoints, and the functions that train."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_training.checkpointing import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.datasets.reading import open_dataset
from rl_training.device_envs.given import GivenDevice, made_by
from rl_training.device_envs.table import DeviceEnvFn
from rl_training.envs import EnvFn
from rl_training.envs.given_vector import GivenVector, VectorFn
from rl_training.errors import ConfigError
from rl_training.runs import (
    RunLock,
    describe_run,
    make_named_run_dir,
    make_run_dir,
    refuse_links,
    storage_errors,
    write_json,
)
from rl_training.runtime.assembly import assemble, inexact_reasons, load_weights
from rl_training.runtime.callbacks import Callbacks, as_callbacks
from rl_training.runtime.dataset_source import with_absolute_path
from rl_training.runtime.determinism import gpu_name
from rl_training.runtime.launch import connect, failing_together, join, share_folder
from rl_training.runtime.offline import with_environment
from rl_training.runtime.recording import check_recording
from rl_training.runtime.resuming import (
    Changes,
    Horizon,
    Replay,
    restored_trainer,
    run_folder_of,
)
from rl_training.runtime.stored import (
    IN_MEMORY,
    config_from_state,
    load_state,
    malformed_state,
)
from rl_training.runtime.trainer import Setup, Trainer, TrainResult
from rl_training.tracking.opening import check_trackers
from rl_training.trust import Trust, require_importable


class ExperimentManager:
    """Turns configs and checkpoints into trainers; call ``.train()`` on what it returns."""

    @staticmethod
    def setup(
        config: TrainConfig[Any],
        *,
        callbacks: Callbacks = (),
        env_fn: EnvFn | None = None,
        vector_fn: VectorFn | None = None,
        device_env_fn: DeviceEnvFn | None = None,
        run_dir: str | Path | None = "auto",
        initial: Mapping[str, Any] | None = None,
    ) -> Trainer:
        """Return a trainer at the start of a new run.

        ``env_fn`` makes single environments, ``vector_fn`` whole vectors, given their number,
        ``device_env_fn`` those of a device, given number and device.

        ``run_dir`` is the folder of the run: "auto" makes one with a new name under
        ``config.output_dir``, None keeps the run in memory and writes nothing. ``initial`` is the
        policy whose weights are loaded, in place of reading ``config.init_from``.
        """
        callbacks = as_callbacks(callbacks)
        env_fn = made_by(env_fn, vector_fn, device_env_fn)
        if isinstance(env_fn, GivenDevice):
            config = config.with_overrides(vectorization="device")
        config = with_absolute_path(config)
        if config.is_offline:
            config = with_environment(config, env_fn)
        ranks = join(config)
        with failing_together(ranks):
            _check_request(config, run_dir, env_fn, initial)
        setup = assemble(config, env_fn, ranks=ranks)
        try:
            with failing_together(ranks):
                load_weights(setup.learner, config, setup.source.info, initial)
                setup.spec.trainer.check(setup)
                if ranks.leads:
                    check_recording(config, setup.make_rendering_env, in_memory=run_dir is None)
                if run_dir is not None and ranks.leads:
                    auto = run_dir == "auto"
                    named = make_run_dir(config) if auto else make_named_run_dir(Path(run_dir))
                    setup.folder = named
                    setup.lock = RunLock(named)
                    _write_description(setup, named, env_fn)
            share_folder(setup)
            with failing_together(ranks):
                return setup.spec.trainer(setup, callbacks)
        except BaseException:
            setup.source.close()
            raise

    @staticmethod
    def resume(
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
    ) -> Trainer:
        """A trainer that continues from a checkpoint, in the same run folder.

        ``total_timesteps`` moves the end, ``total_updates`` that of a run from a dataset alone;
        schedules are then evaluated over the new total, or hold their final values with
        ``horizon="keep"``. ``device``, ``acceleration`` and ``engine``
        replace the run's own. ``replay="empty"`` continues without the saved replay. ``trust`` says
        which modules the checkpoint may name, where it was not written here by this user.
        """
        callbacks = as_callbacks(callbacks)
        env_fn = made_by(env_fn, vector_fn, device_env_fn)
        start = connect()
        lock: RunLock | None = None
        try:
            with failing_together(start):
                path = find_checkpoint(Path(checkpoint))
                run_dir = run_folder_of(path)
                # Before the checkpoint is read: another process may be writing the next one.
                lock = RunLock(run_dir) if start.leads else None
                refuse_links(run_dir)
                state = load_state(path, trust=trust)
            with malformed_state(path):
                changes = Changes(
                    total_timesteps, total_updates, horizon, device, acceleration, replay, engine
                )
                asked = {f"resume: {k}": v for k, v in dataclasses.asdict(changes).items()}
                checkpoint_file = str(path.resolve())
                ranks = join(config_from_state(state), checkpoint=checkpoint_file, **asked)
                return restored_trainer(state, path, lock, ranks, changes, callbacks, env_fn)
        except BaseException:
            if lock is not None:
                lock.release()
            raise


def _check_request(
    config: TrainConfig[Any],
    run_dir: str | Path | None,
    env_fn: EnvFn | None,
    initial: Mapping[str, Any] | None,
) -> None:
    """Raise `UserError` for what cannot be used, before environments are made."""
    if config.dataset and not config.is_offline and not (env_fn or config.is_given("env_id")):
        named = open_dataset(config.dataset).env_id
        raise ConfigError(
            "a run that steps environments needs env_id, also with a dataset"
            f" ({named or 'which names none'}). To learn from the dataset alone, set total_updates"
        )
    if config.init_from is not None and initial is None:
        if config.init_from == IN_MEMORY:
            raise ConfigError(
                "the run of this config started from a model in memory, whose weights are in no"
                " file: set init_from to a run or file, or leave it out"
            )
        find_checkpoint(config.init_from)
    check_trackers(config, in_memory=run_dir is None)
    if run_dir is not None:
        require_importable(config.to_dict())


def _write_description(setup: Setup, folder: Path, env_fn: EnvFn | None) -> None:
    """Write what describes a new run: its config and metadata."""
    reasons = inexact_reasons(setup)
    if reasons:
        text = ", ".join(reasons)
        warnings.warn(f"resume of this run will be approximate: {text}", stacklevel=3)
    gpu = gpu_name(setup.device)
    about = describe_run(
        setup.config,
        device=str(setup.device),
        torch_threads=setup.threads,
        resume="approximate" if reasons else "exact",
        env_fn=_name_of(env_fn),
        **({} if gpu is None else {"gpu": gpu}),
    )
    with storage_errors():
        (folder / "config.yaml").write_text(setup.config.to_yaml(), encoding="utf-8")
        write_json(folder / "metadata.json", about)


def _name_of(env_fn: Callable[..., Any] | None) -> str | None:
    """What made the environments, where that is not their id: told apart in reports by this."""
    if env_fn is None:
        return None
    if isinstance(env_fn, GivenVector):
        return _name_of(getattr(env_fn, "device_env_fn", env_fn.vector_fn))
    if isinstance(env_fn, functools.partial):
        given = [*map(repr, env_fn.args), *(f"{k}={v!r}" for k, v in env_fn.keywords.items())]
        return f"{_name_of(env_fn.func)}({', '.join(given)})"[:200]
    named: Any = env_fn if hasattr(env_fn, "__qualname__") else type(env_fn)
    is_lambda = named.__qualname__.endswith("<lambda>")
    line = f":{named.__code__.co_firstlineno}" if is_lambda else ""
    return f"{named.__module__}.{named.__qualname__}{line}"


def train_as(
    algo: str,
    config: TrainConfig[Any],
    /,
    *,
    callbacks: Callbacks = (),
    env_fn: EnvFn | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train ``algo`` from a config for it; ``overrides`` replace settings by name."""
    if overrides.pop("algo", algo) != algo:
        raise ConfigError(f"train_{algo} trains {algo}: use the function of the other algorithm")
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
        vector_fn: VectorFn | None = None,
        device_env_fn: DeviceEnvFn | None = None,
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
        vector_fn: VectorFn | None = None,
        device_env_fn: DeviceEnvFn | None = None,
        **overrides: Any,
    ) -> TrainResult:
        env_fn = made_by(env_fn, vector_fn, device_env_fn)
        return train_as(algo, config, callbacks=callbacks, env_fn=env_fn, **overrides)

    train.__name__ = train.__qualname__ = f"train_{algo}"
    train.__doc__ = f"Train {algo}; ``overrides`` replace fields of the config and of its settings."
    return train
