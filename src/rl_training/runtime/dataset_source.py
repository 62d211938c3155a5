"""A dataset as a source of experience: recorded episodes, loaded into a replay once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training._internal.tree import tree_leaves
from rl_training.algorithms.off_policy import ReplayConfig
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.datasets.reading import (
    Dataset,
    RecordedEpisode,
    datasets_root,
    find_dataset,
    open_dataset,
)
from rl_training.envs import spaces
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import spec_in_words
from rl_training.models.observing import update_normalizers
from rl_training.runtime.experience import Buffer, Collected, Timed
from rl_training.runtime.memory import (
    check_device_memory,
    check_host_memory,
    make_claimed,
    readable,
)
from rl_training.seeding import stream_seed
from rl_training.terminal import progress_bar, say
from rl_training.types import (
    ACTION_MASK,
    ActionSpec,
    Array,
    EnvInfo,
    Obs,
    ObsSpec,
    OutsideSpaceError,
    Progress,
    Rows,
    StopRequest,
    never,
)

if TYPE_CHECKING:
    from rl_training.runtime.run_parts import Setup

_LOADED_AT_ONCE = 10_000
"""Transitions between two refreshes of the progress bar."""
_NORMALIZED_AT_ONCE = 1 << 26
"""Bytes of observations that statistics are computed of at once."""


def specs_of(dataset: Dataset) -> tuple[ObsSpec, ActionSpec]:
    """Return the specs of a dataset's observations and actions."""
    action_spec = spaces.action_spec(dataset.action_space)
    return spaces.obs_spec(dataset.observation_space, action_spec), action_spec


def check_spaces_of(dataset: Dataset, info: EnvInfo, env: str) -> None:
    """Refuse a dataset whose spaces differ from those of the environment named ``env``."""
    obs_spec, action_spec = specs_of(dataset)
    pairs: tuple[tuple[str, ObsSpec | ActionSpec, ObsSpec | ActionSpec], ...] = (
        ("observations", obs_spec, info.obs_spec),
        ("actions", action_spec, info.action_spec),
    )
    for name, recorded, own in pairs:
        if _without_dtype(recorded) != _without_dtype(own):
            raise ConfigError(
                f"dataset {dataset.id} does not fit {env}: its {name} are"
                f" {spec_in_words(recorded)}, those of the environment {spec_in_words(own)}. Set"
                " env_id, env_kwargs, wrappers and preprocessing as they were when it was recorded"
            )


def _without_dtype(spec: ObsSpec | ActionSpec) -> Any:
    """Return what must be equal: an action's dtype is that of the environment, anyway."""
    plain = spec.to_plain()
    return {**plain, "dtype": ""} if isinstance(spec, ActionSpec) else plain


class DatasetSource:
    """Adds recorded episodes to a replay, in their order and each once."""

    obs = None
    episode_lengths = None
    exactly_resumable = True

    def __init__(self, dataset: Dataset, info: EnvInfo, config: TrainConfig[Any]) -> None:
        self.dataset = dataset
        self.info = info._replace(num_envs=1)
        self.config = config
        self.replay: ReplayBuffer | None = None
        """What `load` filled."""
        self._lengths = lengths = dataset.lengths()
        self.indices = selected_episodes(dataset, lengths, config)
        """The episodes that are learnt from."""
        self.transitions = int(lengths[self.indices].sum())
        self._digest = ""
        self._clipped = 0
        """Recorded actions with a component outside its bounds."""
        self._left: Iterator[RecordedEpisode] = dataset.episodes(self.indices)
        self._parts = set(dataset.cut_episodes)
        self._returns: list[float] = []
        """Returns of the whole episodes that were added."""

    @property
    def _words(self) -> dict[str, str]:
        """How errors about memory name the data, and what they advise."""
        return {"name": f"dataset {self.dataset.id}", "advice": "set dataset_transitions"}

    def check_memory(self, device: torch.device) -> None:
        """Refuse a dataset that the machine cannot hold."""
        knobs: ReplayConfig = self.config.algo_kwargs
        specs, stack = (self.info.obs_spec, self.info.action_spec), self.info.frame_stack
        prioritized = knobs.prioritization() is not None
        each = ReplayBuffer.bytes_per_transition(*specs, prioritized=prioritized, frame_stack=stack)
        # Every episode has one more observation; their storage grows by doubling.
        rows = self.transitions + 2 * len(self.indices)
        check_host_memory(rows, each, quiet=True, **self._words)
        if knobs.replay_device == "accelerator":
            if device.type == "cpu":
                raise ConfigError(
                    "'algo_kwargs.replay_device' is accelerator, but this run is on the CPU:"
                    " set device too"
                )
            copied = ReplayBuffer.copied_bytes_per_transition(*specs, frame_stack=stack)
            check_device_memory(rows, copied, device, **self._words)

    def load(self, device: torch.device, *, next_actions: bool = False) -> ReplayBuffer:
        """Return a replay that contains the dataset; a second call returns the same one."""
        if self.replay is None:
            self.check_memory(device)
            self._left, self._returns = self.dataset.episodes(self.indices), []
            self._clipped = 0
            self._digest = self.dataset.digest()
            if self.dataset.lossy_images:
                warnings.warn(
                    f"the images of dataset {self.dataset.id} were compressed as JPEG when it was"
                    " made: their pixels differ from those of the environment",
                    stacklevel=3,
                )
            replay = make_claimed(
                lambda: self._empty_replay(device, next_actions), 1.0, **self._words
            )
            self._fill(replay)
            self.replay = replay
            if self._clipped:
                warnings.warn(
                    f"{self._clipped:,} of {self.transitions:,} actions of dataset"
                    f" {self.dataset.id} are outside the bounds of their space and are clipped to"
                    " them: are they in the units of the environment?",
                    stacklevel=3,
                )
        return self.replay

    def _empty_replay(self, device: torch.device, next_actions: bool) -> ReplayBuffer:
        knobs: Any = self.config.algo_kwargs
        return ReplayBuffer(
            self.transitions,
            1,
            self.info.obs_spec,
            self.info.action_spec,
            n_step=knobs.n_step,
            gamma=knobs.gamma,
            prioritization=knobs.prioritization(),
            frame_stack=self.info.frame_stack,
            device=device if knobs.replay_device == "accelerator" else None,
            next_actions=next_actions,
        )

    def _fill(self, replay: ReplayBuffer) -> None:
        start = Progress(0, 1)
        shown = self.config.progress
        with progress_bar(f"loading {self.dataset.id}", self.transitions, shown) as advance:
            while taken := self.collect(replay, _LOADED_AT_ONCE, start).steps:
                advance(taken)
        if shown:
            whole = "no whole episode"
            if self._returns:
                whole = f"mean return of whole episodes {np.mean(self._returns):,.2f}"
            of_all = (
                ""
                if len(self.indices) == self.dataset.total_episodes
                else (f" of {self.dataset.total_episodes:,}")
            )
            size = readable(replay.nbytes)
            say(
                f"dataset: {self.dataset.id}, {len(self.indices):,}{of_all} episodes,"
                f" {self.transitions:,} transitions, {size}, {whole}"
            )

    def collect(
        self, buffer: Buffer, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add whole episodes of at least ``num_steps`` transitions together; none at the end."""
        del progress
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"a dataset fills a ReplayBuffer, not a {type(buffer).__name__}")
        taken = 0
        while taken < num_steps and not stop():
            episode = next(self._left, None)
            if episode is None:
                break
            self._add(buffer, episode)
            taken += len(episode)
        return Collected(taken, taken, ())

    def _add(self, replay: ReplayBuffer, episode: RecordedEpisode) -> None:
        if len(episode) != (expected := int(self._lengths[episode.index])):
            raise self._bad(episode.index, f"it has {len(episode)} steps, not {expected}")
        obs = self._stored(episode)
        actions = self._policy_actions(episode)
        if isinstance(obs, dict) and ACTION_MASK in obs:
            self._require_legal(episode.index, actions, obs[ACTION_MASK][:-1])
        terminated = bool(episode.terminations[-1])
        replay.add_episode(obs, actions, episode.rewards, terminated=terminated)
        if episode.index not in self._parts:
            self._returns.append(episode.ret)

    def _stored(self, episode: RecordedEpisode) -> Obs:
        spec = self.info.obs_spec
        try:
            for name, raw in spec.parts(episode.observations).items():
                named = f"observation[{name!r}]" if name else "observations"
                self._require_whole(episode.index, named, raw, spec.leaves[name].dtype)
            obs = spec.cast(episode.observations)
        except (OutsideSpaceError, KeyError, IndexError, ValueError) as error:
            raise self._bad(
                episode.index, f"observations do not fit their space ({error})"
            ) from None
        for leaf, stored in zip(tree_leaves(obs), spec.leaves.values(), strict=True):
            if leaf.shape[1:] != stored.shape:
                raise self._bad(episode.index, f"observations have the shape {leaf.shape[1:]}")
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise self._bad(episode.index, "observations contain a NaN or infinity")
        return obs

    def _policy_actions(self, episode: RecordedEpisode) -> Array:
        spec, index, shape = self.info.action_spec, episode.index, episode.actions.shape[1:]
        if shape != spec.shape:
            raise self._bad(index, f"actions have the shape {shape}, not {spec.shape}")
        actions = spec.from_env(episode.actions)
        self._require_whole(index, "actions", episode.actions, spec.dtype)
        if spec.kind == "box":
            if not np.isfinite(episode.actions).all():
                raise self._bad(index, "actions contain a NaN or infinity")
            low, high = (np.reshape(bound, spec.shape) for bound in (spec.low, spec.high))
            room = 1e-6 * np.maximum(1.0, np.abs(high))  # of rounding
            outside = (episode.actions < low - room) | (episode.actions > high + room)
            self._clipped += int(outside.reshape(len(actions), -1).any(-1).sum())
        elif spec.nvec:
            most = np.asarray(spec.nvec).reshape(spec.shape) - 1
            if ((actions < 0) | (actions > most)).any():
                raise self._bad(index, "actions are outside their space")
        return actions

    def _require_legal(self, index: int, actions: Array, masks: Array) -> None:
        """Refuse an action that the mask recorded with it forbids: no policy can imitate it."""
        nvec = np.asarray(self.info.action_spec.nvec)
        chosen = actions.reshape(len(actions), -1) + np.cumsum(nvec) - nvec
        illegal = np.flatnonzero(~np.take_along_axis(masks, chosen, 1).all(1))
        if illegal.size:
            step = int(illegal[0])
            raise self._bad(
                index, f"step {step}: '{ACTION_MASK}' does not allow action {actions[step]}"
            )

    def _require_whole(self, index: int, name: str, stored: Any, dtype: str) -> None:
        """Refuse numbers that the integers of a space cannot hold, such as images in [0, 1]."""
        array = np.asarray(stored)
        if np.dtype(dtype).kind not in "iub" or array.dtype == dtype or not array.size:
            return
        with np.errstate(invalid="ignore"):
            kept = array.astype(dtype).astype(array.dtype)
        if not np.array_equal(kept, array):
            raise self._bad(
                index,
                f"{name} are stored as {array.dtype}, from {array.min():g} to {array.max():g}, and"
                f" not all of them are numbers of their space, whose dtype is {dtype}",
            )

    def _bad(self, index: int, why: str) -> ConfigError:
        return ConfigError(f"dataset {self.dataset.path}: episode {index}: {why}")

    def set_normalizers(self, module: torch.nn.Module) -> None:
        """Set the statistics of normalisers that have none to those of the observations."""
        norms = [one for one in module.modules() if hasattr(one, "frozen_between_updates")]
        if self.replay is None or any(float(one.count) > 0 for one in norms):  # type: ignore[arg-type]
            return
        leaves = self.info.obs_spec.leaves.values()
        each = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        rows = max(1, _NORMALIZED_AT_ONCE // each)
        for first in range(0, len(self.replay), rows):
            cells = np.arange(first, min(first + rows, len(self.replay)))
            obs = self.replay.observations(cells)
            update_normalizers(module, Rows(obs, torch.ones(len(cells), dtype=torch.bool)))

    # -- the rest of what a source is ------------------------------------------------------------

    def end_rollout(self) -> None:
        """Do nothing: recorded rewards are not normalised."""

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Do nothing: no policy acts."""

    def metrics(self) -> dict[str, float]:
        """Return nothing: no episode is played."""
        return {}

    def measure(self, timed: Timed) -> None:
        """Do nothing: no part of it runs while the run learns."""

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the data: a resumed run must have the same."""
        return {
            "dataset": self.dataset.id,
            "digest": self._digest,
            "episodes": len(self.indices),
            "transitions": self.transitions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Compare the data with that of a checkpoint; raise `CheckpointError` if it differs."""
        own = self.state_dict()
        for name in ("digest", "episodes", "transitions"):
            if state[name] != own[name]:
                found = "content changed"
                if name != "digest":
                    found = f"{name} are {own[name]:,}, not {state[name]:,}"
                raise CheckpointError(
                    f"dataset {self.dataset.path} is not the one that this run was trained on: its"
                    f" {found}. Restore it, or start a new run from these weights with init_from"
                )
        return True

    def end_of(self, state: Mapping[str, Any]) -> None:
        """Return None: there is no rollout to end."""
        del state

    def close(self) -> None:
        """Do nothing: files are closed after they were read."""


def selected_episodes(dataset: Dataset, lengths: Array, config: TrainConfig[Any]) -> Array:
    """Return the episodes to learn from, in the order of the dataset.

    Those with the highest returns (``top_fraction``; whole ones before parts of episodes), and of
    these a random part of at most ``dataset_transitions``.
    """
    chosen = np.flatnonzero(lengths > 0)
    fraction = getattr(config.algo_kwargs, "top_fraction", 1.0)
    if fraction < 1:
        returns = np.array([float(np.sum(one.rewards)) for one in dataset.episodes(chosen)])
        count = max(1, math.ceil(fraction * len(chosen) - 1e-9))  # 0.07 x 100 is above 7
        # The return of a part says nothing of its episode: such parts come last.
        is_cut = np.isin(chosen, dataset.cut_episodes)
        best = np.lexsort((-returns, is_cut))[:count]
        chosen = np.sort(chosen[best])
    most = config.dataset_transitions
    if most is not None and int(lengths[chosen].sum()) > most:
        generator = np.random.default_rng(stream_seed(config.seed, "dataset"))
        order = generator.permutation(chosen[lengths[chosen] <= most])
        fits = np.cumsum(lengths[order]) <= most
        chosen = np.sort(order[fits])
        if not len(chosen):
            raise ConfigError(
                f"'dataset_transitions' is {most:,}, less than one whole episode of dataset"
                f" {dataset.id}: they have {int(lengths.min()):,} to {int(lengths.max()):,}"
            )
    return chosen


def with_absolute_path(config: TrainConfig[Any]) -> TrainConfig[Any]:
    """Return the config with a dataset that any folder's process finds: an id, or a whole path."""
    if config.dataset is None:
        return config
    folder = find_dataset(config.dataset).resolve()
    is_id = folder == datasets_root() / config.dataset
    return config if is_id else config.with_overrides(dataset=str(folder))


def open_configured(config: TrainConfig[Any]) -> Dataset:
    """Return the dataset that a config names."""
    if config.dataset is None:
        raise ConfigError(
            f"{config.algo} learns from recorded data: set dataset to a Minari id or to the folder"
            " of a dataset ('rl-training dataset list' lists those on this machine)"
        )
    return open_dataset(config.dataset)


def load_data(source: DatasetSource, setup: Setup) -> ReplayBuffer:
    """Return the replay of a dataset; normalisers without statistics get those of the data."""
    learner = setup.learner
    replay = source.load(setup.device, next_actions=learner.needs_next_actions)
    if setup.config.normalize_obs:
        source.set_normalizers(learner.module)
        learner.sync_targets()
    return replay
