"""Trainers from checkpoints."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_training._internal.coerce import coerce
from rl_training.checkpointing import SUFFIX, checkpoint_step
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn
from rl_training.errors import CheckpointError, ConfigError
from rl_training.runs import (
    RunLock,
    read_json,
    versions,
)
from rl_training.runtime.assembly import assemble, check_saved_spaces, is_exact
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.determinism import gpu_name
from rl_training.runtime.launch import failing_alone, failing_together, share_folder
from rl_training.runtime.ranks import Ranks
from rl_training.runtime.stored import (
    config_from_state,
    load_model_weights,
    malformed_state,
    require_plausible_run,
    require_plausible_sizes,
)
from rl_training.runtime.trainer import Setup, Trainer

Horizon = Literal["new", "keep"]
Replay = Literal["saved", "empty"]


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a resume changes about a run."""

    total_timesteps: int | None
    total_updates: int | None
    horizon: Horizon
    device: str | None
    acceleration: str | None
    replay: Replay
    engine: str | None = None


def run_folder_of(path: Path) -> Path:
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


def restored_trainer(
    state: Mapping[str, Any],
    path: Path,
    lock: RunLock | None,
    ranks: Ranks,
    changes: Changes,
    callbacks: Sequence[Callback],
    env_fn: EnvFn | None,
) -> Trainer:
    """The trainer of a checkpoint's state."""
    _require_training_state(state, path)
    if state["custom_env"] and env_fn is None:
        raise CheckpointError(
            f"{path} was trained with env_fn; resume it from Python:"
            " resume_training(path, env_fn=MyEnv), or PPO.load(path, env_fn=MyEnv).learn(n) with"
            " its class (vector_fn=... in place of env_fn, if that was given)"
        )
    config = config_from_state(state)
    if config.is_offline and changes.replay == "empty":
        raise ConfigError("this run has no replay to empty: it learns from a dataset")
    require_plausible_sizes(config, state)
    require_plausible_run(config, state["training"])
    config = _moved(config, changes)
    if state["custom_env"] and config.env_kwargs:  # earlier versions ignored them
        config = config.with_overrides(env_kwargs={})
    moves = changes.device is not None and changes.device != state["config"]["device"]
    threads = None if moves else _saved_threads(state["training"]["counters"]["threads"])
    setup = assemble(config, env_fn, threads=threads, ranks=ranks)
    try:
        with failing_together(ranks):
            check_saved_spaces(state, setup.source.info)
            setup.spec.trainer.check(setup)
        setup.folder, setup.lock = path.parent.parent, lock
        share_folder(setup)
        empty = changes.replay == "empty"
        with failing_alone(ranks), malformed_state(path):
            trainer = setup.spec.trainer(setup, callbacks)
            restored = exact = trainer.load_state_dict(state, empty_replay=empty)
        exact = exact and not empty and is_exact(setup) and _same_gpu(setup)
        if ranks.leads:
            _warn_of_differences(setup.folder, restored)
            _warn_of_later_checkpoints(path.parent, trainer.global_step)
        trainer.resumed = {
            "checkpoint": path.name,
            "step": trainer.global_step,
            "resume": "exact" if exact else "approximate",
            **extend(trainer, _new_total(config, changes), changes.horizon),
        }
    except BaseException:
        setup.source.close()
        raise
    return trainer


def _same_gpu(setup: Setup) -> bool:
    """Return whether a run continues on the kind of GPU that it began on, or on none as before."""
    now = gpu_name(setup.device)
    before = read_json(setup.folder / "metadata.json").get("gpu") if setup.folder else None
    if before is not None and now is not None and before != now:
        warnings.warn(
            f"the run began on {before} and continues on {now}: this resume is approximate",
            stacklevel=4,
        )
    return bool(before == now)


def _moved(config: TrainConfig[Any], changes: Changes) -> TrainConfig[Any]:
    """The config on another device, with another acceleration or engine."""
    moved = {
        "device": changes.device,
        "acceleration": changes.acceleration,
        "engine": changes.engine,
    }
    if changes.device == "cpu":
        if getattr(config.algo_kwargs, "replay_device", "cpu") != "cpu":
            warnings.warn("the replay moves to the CPU with the networks", stacklevel=4)
            moved["replay_device"] = "cpu"
        if config.precision != "float32":
            warnings.warn(f"{config.precision} becomes float32 on the CPU", stacklevel=4)
            moved["precision"] = "float32"
    return config.with_overrides(**{k: v for k, v in moved.items() if v is not None})


def _new_total(config: TrainConfig[Any], changes: Changes) -> int | None:
    """Return the new end of a run, counted as the run counts; None: as planned."""
    totals = {
        "total_timesteps": changes.total_timesteps,
        "total_updates": changes.total_updates,
    }
    new = totals.pop(config.total_setting)
    ((other, wrong),) = totals.items()
    if wrong is not None:
        raise ConfigError(
            f"this run counts {config.unit}: give {config.total_setting} instead of {other}"
        )
    return new


def _saved_threads(count: Any) -> int:
    if type(count) is not int or not 1 <= count <= 1024:
        raise CheckpointError(f"the checkpoint asks for {count!r} threads")
    return count


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


def _warn_of_later_checkpoints(folder: Path, step: int) -> None:
    latest = max(map(checkpoint_step, folder.glob(f"step_*{SUFFIX}")), default=0)
    if latest > step:
        warnings.warn(
            f"this run was already trained up to step {latest:,}: it continues from step {step:,}"
            " in the same folder, and later checkpoints are replaced. To keep them, copy the folder"
            " first, or start a new run with init_from",
            stacklevel=3,
        )


def extend(trainer: Trainer, total: int | None, horizon: Horizon) -> dict[str, Any]:
    """Move the end of a run to a new total; return what changed, for the run's lineage."""
    if total is None:
        return {}
    setting = trainer.config.total_setting
    total = int(coerce(total, int, setting))
    new_total = trainer.round_up(total)
    done = trainer.counted()
    if new_total < done:
        raise ConfigError(
            f"'{setting}' must be at least the {done} {trainer.config.unit} already done;"
            f" got {total}"
        )
    before = trainer.horizon
    schedule = getattr(trainer.config.algo_kwargs, "schedule", "constant")
    if horizon == "keep" and schedule != "constant":
        warnings.warn(
            f"horizon: keep holds schedules at their final values: with a {schedule} schedule the"
            " learning rate stays at 0 and nothing more is learnt past the old total",
            stacklevel=4,
        )
    trainer.move_end(new_total)
    if horizon == "new":
        trainer.horizon = new_total
    step = trainer.global_step
    details = {
        setting: new_total,
        "horizon": trainer.horizon,
        "progress_jump": [min(1.0, step / before), min(1.0, step / trainer.horizon)],
    }
    kept = {
        "num_envs": int(trainer.config.num_envs),
        "eval_interval": int(trainer.config.eval_interval),  # a tenth of the first total
    }
    trainer.config = trainer.config.with_overrides(**{setting: total, **kept})
    return details
