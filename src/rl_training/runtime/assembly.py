"""The parts of a run from its config: environments, learner, actor and source."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.checkpointing import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.envs import EnvFn, make_adapter
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import make_eval_env, spec_in_words
from rl_training.models.normalizer import RewardNormalizer
from rl_training.registry import check_spaces, get_spec
from rl_training.runtime.actors import Actor
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
    load_model_weights,
)
from rl_training.runtime.trainer import Setup
from rl_training.seeding import stream_seed
from rl_training.types import ActionSpec, EnvInfo, ObsSpec


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
        make_eval_env=lambda episodes: make_eval_env(
            config, episodes, env_fn, (env.obs_spec, env.action_spec)
        ),
        custom_env=env_fn is not None,
        device=device,
        threads=count,
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
    check_saved_spaces(state, info)
    try:
        learner.load_weights(state["algorithm"]["model"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(f"init_from: the weights of {path} do not fit: {detail}") from None


def check_saved_spaces(state: Mapping[str, Any], info: EnvInfo) -> None:
    """Refuse environments with other spaces than those of a checkpoint."""
    pairs: tuple[tuple[str, ObsSpec | ActionSpec, ObsSpec | ActionSpec], ...] = (
        ("observations", ObsSpec.from_plain(state["obs_spec"]), info.obs_spec),
        ("actions", ActionSpec.from_plain(state["action_spec"]), info.action_spec),
    )
    for name, saved, now in pairs:
        if saved.to_plain() != now.to_plain():
            raise CheckpointError(
                f"the environment is not the one of the checkpoint: its {name} are"
                f" {spec_in_words(now)}, those of the checkpoint are {spec_in_words(saved)}"
            )


def is_exact(setup: Setup) -> bool:
    """Return whether the run can be resumed bit for bit."""
    eager_cpu = setup.device.type == "cpu" and setup.config.acceleration == "eager"
    return eager_cpu and setup.source.exactly_resumable
