"""The parts of a run from its config: environments, learner, actor and source."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_training.checkpointing import find_checkpoint
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.device_envs.given import GivenDevice
from rl_training.device_envs.table import make_device_env
from rl_training.envs import Adapter, EnvFn, make_adapter
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import make_eval_env, spec_in_words
from rl_training.models.normalizer import RewardNormalizer
from rl_training.registry import ASYNC, TORCHRUN, check_spaces, find_entry, spec_of
from rl_training.runtime.actors import Actor
from rl_training.runtime.determinism import EXACT_ACCELERATIONS, prepare_determinism
from rl_training.runtime.device import (
    check_precision,
    pick_acceleration,
    pick_device,
    pick_threads,
    torch_threads,
    use_device,
)
from rl_training.runtime.device_actors import noise_steps
from rl_training.runtime.device_source import DeviceSource
from rl_training.runtime.episode_info import WINDOW
from rl_training.runtime.launch import failing_together
from rl_training.runtime.offline import offline_source, offline_spec, prior_data
from rl_training.runtime.process_group import ProcessGroup
from rl_training.runtime.ranks import Ranks
from rl_training.runtime.rendering import prefer_offscreen, rendering_envs
from rl_training.runtime.sharded_source import ShardedSource
from rl_training.runtime.sources import LocalSource, local_source
from rl_training.runtime.spec import AlgorithmSpec
from rl_training.runtime.stored import (
    load_model_weights,
)
from rl_training.runtime.trainer import Setup
from rl_training.seeding import stream_seed
from rl_training.types import ActionSpec, EnvInfo, ObsSpec


def assemble(
    config: TrainConfig[Any],
    env_fn: EnvFn | None,
    threads: int | None = None,
    ranks: Ranks | None = None,
) -> Setup:
    """Make environments, learner, actors and source of a run, for the shards of this process."""
    ranks = Ranks(Communicator(config.shards)) if ranks is None else ranks
    _seed_globals(config.seed)
    prepare_determinism(config)
    if config.record_interval:
        prefer_offscreen()
    if config.is_offline:
        return _assemble_offline(config, env_fn, threads, ranks)
    if config.vectorization == "device":
        return _assemble_on_device(config, env_fn, threads, ranks)
    if config.engine == "ray":
        return _assemble_remote(config, env_fn, threads, ranks)
    spec, communicator = spec_of(config), ranks.communicator
    envs: list[Adapter] = []
    try:
        with failing_together(ranks):
            for shard in communicator.local:  # one by one: made ones are closed on failure
                envs.append(make_adapter(config, env_fn, shard))  # noqa: PERF401
            obs_spec, action_spec = envs[0].obs_spec, envs[0].action_spec
            device = pick_device(config.device, obs_spec)
        if isinstance(communicator, ProcessGroup):
            communicator.use_device(device)
        with failing_together(ranks):
            use_device(config, device)
            check_precision(config.precision, device, obs_spec)
            count = pick_threads(config, obs_spec, device) if threads is None else threads
            learner = build_algorithm(config, obs_spec, action_spec, device, count, communicator)
            pairs = zip(communicator.local, envs, strict=True)
            sources = [shard_source(spec, learner, config, device, *pair) for pair in pairs]
            has_data = config.dataset is not None
            data = prior_data(config, env_fn, sources[0].info) if has_data else None
    except BaseException:
        for env in envs:
            env.close()
        raise
    spaces = (obs_spec, action_spec)
    return Setup(
        spec=spec,
        config=config,
        learner=learner,
        source=sources[0] if communicator.alone else ShardedSource(sources, communicator),
        make_eval_env=lambda episodes, first_index, shard: make_eval_env(
            config, episodes, env_fn, spaces, first_index, shard
        ),
        make_rendering_env=lambda: rendering_envs(config, 1, "rgb_array", spaces, env_fn)[0],
        custom_env=env_fn is not None,
        device=device,
        threads=count,
        ranks=ranks,
        prior_data=data,
    )


def _assemble_offline(
    config: TrainConfig[Any], env_fn: EnvFn | None, threads: int | None, ranks: Ranks
) -> Setup:
    """Return the parts of a run from a dataset alone; environments are made to evaluate."""
    if ranks.communicator is not ALONE and not ranks.communicator.alone:
        raise ConfigError(f"{config.algo} learns from a dataset in one process, without torchrun")
    source = offline_source(config, env_fn)
    spaces = (source.info.obs_spec, source.info.action_spec)
    device = pick_device(config.device, source.info.obs_spec)
    use_device(config, device)
    check_precision(config.precision, device, source.info.obs_spec)
    count = pick_threads(config, source.info.obs_spec, device) if threads is None else threads
    return Setup(
        spec=offline_spec(spec_of(config)),
        config=config,
        learner=build_algorithm(config, *spaces, device, count),
        source=source,
        make_eval_env=lambda episodes, first_index, shard: make_eval_env(
            config, episodes, env_fn, spaces, first_index, shard
        ),
        make_rendering_env=lambda: rendering_envs(config, 1, "rgb_array", spaces, env_fn)[0],
        custom_env=env_fn is not None,
        device=device,
        threads=count,
        ranks=ranks,
    )


def _assemble_on_device(
    config: TrainConfig[Any], env_fn: EnvFn | None, threads: int | None, ranks: Ranks
) -> Setup:
    """Return the parts of a run whose environments are on the device of the networks."""
    if ranks.several:
        raise ConfigError("vectorization: device works in one process, without torchrun")
    if env_fn is not None and not isinstance(env_fn, GivenDevice):
        raise ConfigError(
            "'env_fn' and 'vector_fn' return arrays on the host: with vectorization: device give an"
            " env_id or device_env_fn"
        )
    device = pick_device(config.device, None)
    if env_fn is None:
        env = make_device_env(config.env_id, config.num_envs, device, **config.env_kwargs)
    else:
        env = env_fn.make_on(device, config.num_envs)
    capturable = bool(getattr(env, "capturable", False))
    acceleration, why = pick_acceleration(config, device, capturable=capturable)
    if config.progress and not (config.is_given("acceleration") and config.device != "auto"):
        sys.stderr.write(f"device: {device}, acceleration: {acceleration} ({why})\n")
    config = config.with_overrides(acceleration=acceleration)
    use_device(config, device)
    spaces = (env.obs_spec, env.action_spec)
    check_precision(config.precision, device, env.obs_spec)
    count = pick_threads(config, env.obs_spec, device) if threads is None else threads
    learner = build_algorithm(config, *spaces, device, count)
    learner.draw_on_device()
    spec = spec_of(config)
    source = DeviceSource(
        env,
        spec.device_actor(learner, config),
        seed=config.seed,
        num_steps=getattr(config.algo_kwargs, "num_steps", None) or noise_steps(config.num_envs),
        acceleration=config.acceleration,
    )
    return Setup(
        spec=spec,
        config=config,
        learner=learner,
        source=source,
        make_eval_env=lambda episodes, first_index, shard: make_eval_env(
            config, episodes, env_fn, spaces, first_index, shard
        ),
        make_rendering_env=lambda: rendering_envs(config, 1, "rgb_array", spaces, env_fn)[0],
        custom_env=env_fn is not None,
        device=device,
        threads=count,
        ranks=ranks,
    )


def _assemble_remote(
    config: TrainConfig[Any], env_fn: EnvFn | None, threads: int | None, ranks: Ranks
) -> Setup:
    """Return the parts of a run whose environments are stepped by Ray actors."""
    from rl_training.runtime.async_source import AsyncSource
    from rl_training.runtime.ray_workers import RayWorkers
    from rl_training.runtime.remote_source import RemoteSource

    if ranks.several:
        raise ConfigError("engine: ray needs no torchrun: it starts the workers itself")
    make_adapter(config, env_fn).close()  # what is wrong with it is found before workers start
    kind = AsyncSource if config.lag == ASYNC else RemoteSource
    source = kind(RayWorkers(config, env_fn, threads), config, ranks.communicator)
    try:
        obs_spec, action_spec = source.info.obs_spec, source.info.action_spec
        device = pick_device(config.device, obs_spec)
        use_device(config, device)
        check_precision(config.precision, device, obs_spec)
        count = pick_threads(config, obs_spec, device) if threads is None else threads
        learner = build_algorithm(config, obs_spec, action_spec, device, count, ranks.communicator)
        source.publish(learner.module, 0)
        has_data = config.dataset is not None
        data = prior_data(config, env_fn, source.info) if has_data else None
    except BaseException:
        source.close()
        raise
    spaces = (obs_spec, action_spec)
    return Setup(
        spec=spec_of(config),
        config=config,
        learner=learner,
        source=source,
        make_eval_env=lambda episodes, first_index, shard: make_eval_env(
            config, episodes, env_fn, spaces, first_index, shard
        ),
        make_rendering_env=lambda: rendering_envs(config, 1, "rgb_array", spaces, env_fn)[0],
        custom_env=env_fn is not None,
        device=device,
        threads=count,
        ranks=ranks,
        prior_data=data,
    )


def shard_source(
    spec: AlgorithmSpec,
    learner: Any,
    config: TrainConfig[Any],
    device: torch.device,
    shard: int,
    env: Adapter,
) -> LocalSource:
    """Return the source of one shard."""
    normalizer = None
    if config.normalize_reward:
        gamma = config.algo_kwargs.gamma
        normalizer = RewardNormalizer(env.num_envs, gamma, config.clip_reward)
    actor = _recording_actor(spec, learner, config, device, shard)
    window = -(-WINDOW // config.shards)
    if spec.source is not None:
        return spec.source(learner, config, device, env, actor, normalizer, window)
    return local_source(env, actor, normalizer, window)


def _recording_actor(
    spec: AlgorithmSpec, learner: Any, config: TrainConfig[Any], device: torch.device, shard: int
) -> Actor:
    """Return the exploring actor, which records with each step what the spec requests."""
    has_shards = TORCHRUN in find_entry(config.algo).engines
    actor: Any = spec.actor(learner, config, device, *((shard,) if has_shards else ()))
    records = spec.records
    if config.lag and 1 in find_entry(config.algo).lags:  # newer weights learn than those that act
        records |= {"logprobs"}
    if records:
        if not hasattr(actor, "record"):
            raise ConfigError(
                f"{spec.name} requests {', '.join(sorted(records))} with each step, which its"
                f" actor {type(actor).__name__} cannot record"
            )
        actor.record(records)
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
    communicator: Communicator = ALONE,
) -> Any:
    """Return a learner with its seeded initial weights, in eval mode.

    Training, evaluation and prediction all build it here.
    """
    check_spaces(config.algo, obs_spec, action_spec)
    devices = [device] if device.type == "cuda" else []
    with torch_threads(threads), torch.random.fork_rng(devices=devices):
        torch.manual_seed(stream_seed(config.seed, "parameters"))
        has_shards = TORCHRUN in find_entry(config.algo).engines
        more = (communicator,) if has_shards else ()
        learner = spec_of(config).build(config, obs_spec, action_spec, device, *more)
    learner.module.eval()
    return learner


def load_weights(
    learner: Any,
    config: TrainConfig[Any],
    info: EnvInfo,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Load the policy's weights from the checkpoint that ``init_from`` names.

    ``state`` is what was read of it before, or the policy of a model that has no file.
    """
    path = config.init_from
    if path is None:
        return
    if state is None:
        path = find_checkpoint(path)
        state = load_model_weights(path)
    check_saved_spaces(state, info)
    try:
        learner.load_weights(state["algorithm"]["model"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        detail = _different_networks(state["config"], config) or " ".join(str(error).split())
        if (theirs := state["config"].get("algo")) != config.algo:
            detail = f"they are those of {theirs}, and this is {config.algo}. {detail}"
        raise CheckpointError(f"init_from: the weights of {path} do not fit: {detail}") from None
    if found := _different_functions(state["config"], config):
        warnings.warn(
            f"init_from: the weights of {path} fit, but not what is computed with them: {found}",
            stacklevel=4,
        )


_OF_NETWORKS = (
    *("hidden_sizes", "critic_hidden_sizes", "activation", "num_critics", "critic_layer_norm"),
    *("encoder", "network", "dueling", "layer_norm", "memory", "lstm_size"),
)
"""Settings of algorithms that decide which weights there are."""


def _different_networks(saved: Mapping[str, Any], config: TrainConfig[Any]) -> str:
    """Return the settings of networks that differ from those of a checkpoint, as text."""
    own = config.to_dict()
    pairs = {"normalize_obs": (saved.get("normalize_obs"), own["normalize_obs"])}
    theirs, ours = _knobs_of(saved), own["algo_kwargs"]
    pairs |= {name: (theirs.get(name), ours.get(name)) for name in _OF_NETWORKS}
    found = _listed(pairs)
    return f"{saved.get('algo')} and {config.algo}: {found}" if found else ""


def _different_functions(saved: Mapping[str, Any], config: TrainConfig[Any]) -> str:
    """Return what differs between networks with the same weights, as text."""
    theirs, ours = _knobs_of(saved), config.to_dict()["algo_kwargs"]
    pairs = {}
    if "activation" in theirs and "activation" in ours:
        pairs["activation"] = (theirs["activation"], ours["activation"])
    if config.normalize_obs and "clip_obs" in saved:
        pairs["clip_obs"] = (saved["clip_obs"], config.clip_obs)
    return _listed(pairs)


def _knobs_of(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    knobs = saved.get("algo_kwargs")
    return knobs if isinstance(knobs, Mapping) else {}


def _listed(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} {a!r} there, {b!r} here" for name, (a, b) in pairs.items() if a != b)


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
    return not inexact_reasons(setup)


def inexact_reasons(setup: Setup) -> list[str]:
    """Return why a resume of the run would be approximate; empty if it is exact."""
    config, device = setup.config, setup.device.type
    reasons = []
    if device == "cuda" and not config.deterministic:
        reasons.append("device cuda without deterministic")
    elif device == "cuda" and setup.source.info.obs_spec.has_images:
        reasons.append("images on device cuda")
    elif device == "cuda" and config.has_memory:
        reasons.append("a recurrent network on device cuda")
    elif device not in EXACT_ACCELERATIONS:
        reasons.append(f"device {device}")
    if config.acceleration not in EXACT_ACCELERATIONS.get(device, ("eager",)):
        reasons.append(f"acceleration {config.acceleration}")
    if config.lag == ASYNC:
        reasons.append(f"lag {ASYNC}")
    if not setup.source.exactly_resumable:
        reasons.append("environments whose state is more than an episode's seed and actions")
    return reasons
