"""The off-policy family: collect into a replay, then take the pending updates from it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import torch

from rl_training.algorithms.off_policy import OffPolicyConfig
from rl_training.communicator import per_shard_state, state_of_each
from rl_training.data.device_replay import DeviceReplay
from rl_training.data.mixed_replay import MixedReplay
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.launched import local_world_size
from rl_training.models.observing import update_normalizers
from rl_training.registry import ASYNC
from rl_training.runtime.async_source import block_steps
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.dataset_source import load_data
from rl_training.runtime.device_source import DeviceSource
from rl_training.runtime.experience import ReplayLearner
from rl_training.runtime.memory import check_device_memory, check_host_memory, make_claimed
from rl_training.runtime.replay_store import ReplayStore, chunk_names
from rl_training.runtime.reporting import mean_losses
from rl_training.runtime.sharded_source import first_env, shard_sources
from rl_training.runtime.trainer import Iteration, Setup, Trainer
from rl_training.types import ActionSpec, EnvInfo, ObsSpec, Progress

Replay = TypeVar("Replay", bound=ReplayBuffer)
_ITERATION = 1000
"""Steps or updates between reports, whichever are more."""
_STEPS_BETWEEN_DISPLAYS = 10


@dataclasses.dataclass
class _Part:
    """How far an iteration got."""

    step: int
    """Global step."""
    segment_start: int = 0
    """Global step at which the current segment, up to the next updates, began."""
    missing: int = 0
    """Vector steps that the segment still lacks."""
    vector_steps: int = 0
    """Vector steps of the iteration so far."""


class OffPolicyTrainer(Trainer):
    """Steps environments up to the next crossing of ``train_freq``, then runs its updates."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        self._replay_learner: ReplayLearner = setup.learner
        self.knobs: OffPolicyConfig = setup.config.algo_kwargs
        filled = min(1.0, setup.config.total_timesteps / self.knobs.buffer_size)
        self._sources = shard_sources(setup.source)
        parts = [setup.of_shard(index) for index in range(len(self._sources))]
        self.replays = [
            make_claimed(lambda part=part: self.make_replay(part), filled)  # type: ignore[misc]
            for part in parts
        ]
        """The replays of the shards that this process executes."""
        for replay, source in zip(self.replays, self._sources, strict=True):
            replay.first_env = first_env(source)
        # By its decimal digits, so that 0.1 is a tenth and ten crossings make exactly one.
        steps = self.knobs.gradient_steps
        self._per_crossing = Fraction(self.knobs.train_freq if steps == -1 else str(steps))
        self._pending = Fraction(0)
        self._part: _Part | None = None
        """Where the current iteration is; None between iterations."""
        self._uneven: list[int] = []
        """Steps of each shard's environments in the iteration so far, where they differ."""
        self._learns_from = self.knobs.learning_starts
        """The step that learning starts at; later where a resume began with an empty replay."""
        per_step = self._per_crossing / self.knobs.train_freq
        self.iteration_steps = max(1, int(_ITERATION / max(Fraction(1), per_step)))
        """Steps of one iteration; may be changed between iterations."""
        self._prior_data = setup.prior_data
        self._sampled: Any = self._experience
        """What batches are sampled from."""
        if setup.prior_data is not None:
            data = load_data(setup.prior_data, setup)
            self._sampled = MixedReplay(self.replay, data, setup.config.dataset_fraction)
        folder = setup.folder / "replay" if setup.folder else None
        self._stores = [ReplayStore(folder) for _ in self.replays]

    @property
    def replay(self) -> ReplayBuffer:
        """The replay of the first shard that this process executes: of an only shard, all."""
        first: ReplayBuffer = self.replays[0]
        return first

    @property
    def _experience(self) -> Any:
        """The replay as source and learner take it."""
        return self.replay if self.communicator.alone else self.replays

    @staticmethod
    def check(setup: Setup) -> None:
        """Refuse a replay that the machine cannot hold; say what it will take."""
        info = setup.source.info
        knobs: OffPolicyConfig = setup.config.algo_kwargs
        on_device = knobs.replay_device == "accelerator"
        if on_device and setup.device.type == "cpu":
            raise ConfigError(
                "'algo_kwargs.replay_device' is accelerator, but this run is on the CPU:"
                " set device too"
            )
        if setup.prior_data is not None:  # first: the rest must fit beside it
            load_data(setup.prior_data, setup)
        each = setup.spec.trainer.bytes_per_transition(setup)  # type: ignore[attr-defined]
        if info.on_device:
            _check_device_replay(setup)
            return
        communicator = setup.ranks.communicator
        per_rank = knobs.buffer_size // communicator.shards * len(communicator.local)
        here = per_rank * local_world_size()  # of all ranks of this machine
        quiet = not (setup.config.progress and setup.ranks.leads)
        check_host_memory(here, each, quiet=quiet)
        if on_device:
            specs = setup.spec.trainer.stored_specs(setup)  # type: ignore[attr-defined]
            copied = ReplayBuffer.copied_bytes_per_transition(*specs, frame_stack=info.frame_stack)
            sharing = -(-local_world_size() // max(1, torch.cuda.device_count()))
            beside = 0 if setup.prior_data is None else setup.prior_data.transitions
            check_device_memory(per_rank * sharing + beside, copied, setup.device)
        _warn_if_nothing_is_learnt(setup)

    @staticmethod
    def stored_specs(setup: Setup) -> tuple[ObsSpec, ActionSpec]:
        """Return the specs of a transition in the replay."""
        return setup.source.info.obs_spec, setup.source.info.action_spec

    @staticmethod
    def bytes_per_transition(setup: Setup) -> int:
        """Return the bytes of one transition in the replay that `make_replay` makes."""
        info = setup.source.info
        knobs: OffPolicyConfig = setup.config.algo_kwargs
        return ReplayBuffer.bytes_per_transition(
            *setup.spec.trainer.stored_specs(setup),  # type: ignore[attr-defined]
            prioritized=knobs.prioritization() is not None,
            frame_stack=info.frame_stack,
        )

    def make_replay(self, setup: Setup) -> Any:
        """Return storage for the ``buffer_size`` transitions of a shard."""
        info, knobs = setup.source.info, setup.config.algo_kwargs
        if info.on_device:
            specs = (info.obs_spec, info.action_spec)
            steps: dict[str, Any] = {"n_step": knobs.n_step, "gamma": knobs.gamma}
            return DeviceReplay(
                knobs.buffer_size, info.num_envs, *specs, device=setup.device, **steps
            )
        replay = self.make_replay_of(ReplayBuffer, setup, knobs.buffer_size, info)
        copied = knobs.replay_device == "accelerator" and info.frame_stack == 1
        if copied and setup.prior_data is None:  # parts of mixed batches are put together before
            replay.gather_within_update()
        return replay

    @staticmethod
    def make_replay_of(
        kind: Callable[..., Replay], setup: Setup, capacity: int, info: EnvInfo
    ) -> Replay:
        """Return a replay of some kind with this capacity, for the rows and shapes of ``info``."""
        knobs = setup.config.algo_kwargs
        on_device = knobs.replay_device == "accelerator"
        return kind(
            capacity,
            info.num_envs,
            info.obs_spec,
            info.action_spec,
            n_step=knobs.n_step,
            gamma=knobs.gamma,
            prioritization=knobs.prioritization(),
            frame_stack=info.frame_stack,
            device=setup.device if on_device else None,
        )

    def round_up(self, total: int) -> int:
        """A whole number of vector steps, or of blocks of them."""
        unit = self.source.info.num_envs
        if self.config.lag == ASYNC:
            unit *= block_steps(self.config)
        return -(-total // unit) * unit

    def iterate(self, progress: Progress) -> Iteration | None:
        """A thousand steps (fewer where one step has several updates) and their updates.

        Returns None where it paused on the way.
        """
        end = min(progress.step + self.iteration_steps, self.total)
        if self._part is None:
            self._part = _Part(progress.step)
        part = self._part
        while self._run_pending_updates(Progress(part.step, progress.total)):
            if part.step >= end:
                self._part = None
                return self._report_of(part, progress.step)
            if part.missing <= 0:
                boundary = self._next_boundary(part.step, end)
                part.missing = -(-(boundary - part.step) // self.source.info.num_envs)
                part.segment_start = part.step
            self._collect(part, progress.total)
            if part.missing > 0:
                return None
            self._pending += self._updates_between(part.segment_start, part.step)
        return None

    def _collect(self, part: _Part, total: int) -> None:
        """Collect the missing steps of a segment, in which the policy's schedules are fixed."""
        progress = Progress(part.segment_start, total)
        while part.missing > 0:  # in pieces, after each of which a display is up to date
            piece = min(part.missing, _STEPS_BETWEEN_DISPLAYS)
            taken = self.source.collect(self._experience, piece, progress, self.pauses)
            part.step += taken.steps
            part.missing -= taken.vector_steps
            part.vector_steps += taken.vector_steps
            if taken.of_shards:
                self._uneven = _added(self._uneven, taken.of_shards)
            self.reporter.notify_rollout(part.step, taken, complete=part.missing <= 0)
            if taken.vector_steps < piece:
                return

    def _run_pending_updates(self, progress: Progress) -> bool:
        """Whether all pending updates were run."""
        updates = int(self._pending)
        if not updates:
            return True
        with self.stopping.at("learn"):
            done = self._learn(self._sampled, progress, self.pauses, updates=updates)
        self._pending -= done
        self.reporter.notify_update(progress.step, done, self._mean_losses)
        if done < updates:
            return False
        self.source.publish(self.learner.module, self.policy_version())
        return True

    def _mean_losses(self) -> dict[str, float]:
        return mean_losses(self._replay_learner.metric_sums())

    def _report_of(self, part: _Part, first_step: int) -> Iteration:
        counts = self._uneven or [part.vector_steps] * len(self.replays)
        self._uneven = []
        for replay, source, count in zip(self.replays, self._sources, counts, strict=True):
            if isinstance(source, DeviceSource):  # with the sums of episodes, in one transfer
                replay.is_finite = source.read(replay.finite_flag(count))
            replay.check_finite(count, first_step, source.episode_lengths)
        if self.config.normalize_obs:
            self.update_normalizers(counts)
            self.source.publish(self.learner.module, self.policy_version() + 1)
        metrics = {**self.source_metrics(), **self.learner.pop_metrics()}
        return Iteration(part.step - first_step, metrics)

    def update_normalizers(self, counts: Sequence[int]) -> None:
        """Add the newest rows of every replay, that many of each, to the networks' statistics."""
        pairs = zip(self.replays, counts, strict=True)
        rows = [replay.newest_observations(count) for replay, count in pairs]
        update_normalizers(self.learner.module, *rows, communicator=self.communicator)

    def _next_boundary(self, step: int, end: int) -> int:
        every, warm_up = self.knobs.train_freq, self._learns_from
        following = (step // every + 1) * every
        return min(following, end, warm_up) if step < warm_up else min(following, end)

    def _updates_between(self, before: int, after: int) -> Fraction:
        """Updates for the crossings of ``train_freq`` between two steps; none for the warm-up."""
        every = self.knobs.train_freq
        crossings = max(0, after // every - max(before, self._learns_from) // every)
        updates: Fraction = crossings * self._per_crossing
        return updates

    def policy_version(self) -> int:
        """Return the number of updates and iterations so far, which both change the policy."""
        return self._replay_learner.num_updates + self.iteration

    def current_step(self) -> int:
        """Return the global step within the current iteration."""
        return self.global_step if self._part is None else self._part.step

    def partial_state(self) -> dict[str, Any] | None:
        """How far the iteration got, and the metric sums since the last report."""
        if self._part is None:
            return None
        sums = self._replay_learner.metric_sums()
        return {"part": dataclasses.asdict(self._part), "metrics": sums}

    def load_partial_state(self, state: Mapping[str, Any]) -> None:
        """Restore that."""
        self._part = _Part(**{name: int(value) for name, value in state["part"].items()})
        self._replay_learner.load_metric_sums(state["metrics"])

    def extra_state(self) -> dict[str, Any]:
        """Return the pending updates, a fraction, and the names of the replay's files."""
        owed = [self._pending.numerator, self._pending.denominator]
        pairs = zip(self._stores, self.replays, strict=True)
        states = [store.state_dict(replay) for store, replay in pairs]
        replay = per_shard_state(states, self.communicator)
        state = {"owed": owed, "learns_from": self._learns_from, "replay": replay}
        if self._prior_data is not None:
            state["dataset"] = self._prior_data.state_dict()
        return state

    def commit_shards(self) -> None:
        """Write the files of the local shards' replays that changed."""
        for store, replay in zip(self._stores, self.replays, strict=True):
            store.commit(replay)

    def refill_steps(self) -> int:
        """Return how many steps an empty replay collects before it is learnt from again."""
        return int(self.knobs.learning_starts)

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:
        """Restore them; the current policy fills an empty replay before learning continues."""
        if self._prior_data is not None:
            self._prior_data.load_state_dict(state["dataset"])
        self._pending = Fraction(*state["owed"])
        self._learns_from = int(state["learns_from"])
        if empty_replay:
            begins = self.global_step if self._part is None else self._part.step
            self._learns_from = begins + self.refill_steps()
            self._pending %= 1
            if self._part is not None:
                self._part.vector_steps = 0  # of the iteration's rows the replay holds none
        else:
            saved = state_of_each(state["replay"], self.communicator)
            for store, replay, one in zip(self._stores, self.replays, saved, strict=True):
                store.load(replay, one)

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Restore a checkpoint; False where the environments could not be restored exactly."""
        exact = super().load_state_dict(state, empty_replay=empty_replay)
        for replay, source in zip(self.replays, self._sources, strict=True):
            if source.obs is not None:
                replay.resume_at(source.obs, exact=exact)
        return exact

    def after_checkpoint(self, state: Mapping[str, Any], *, is_best: bool) -> None:
        """Delete replay files that neither the last checkpoint nor the best one names."""
        best = self.run_dir / "checkpoints" / "best.pt"
        self._stores[0].prune(chunk_names(state), is_best=is_best, best=best)


def _check_device_replay(setup: Setup) -> None:
    """Refuse a replay that the device of the environments cannot hold."""
    info, knobs = setup.source.info, setup.config.algo_kwargs
    if knobs.prioritization() is not None:
        raise ConfigError(
            "'algo_kwargs.prioritized' must be false with vectorization: device, whose replay is"
            " sampled on the device; or train on vector_fn=lambda count: DeviceVector(...), with"
            " the replay on the host"
        )
    each = DeviceReplay.bytes_per_transition(info.obs_spec, info.action_spec)
    if setup.device.type == "cpu":
        check_host_memory(knobs.buffer_size, each, quiet=not setup.config.progress)
    check_device_memory(knobs.buffer_size, each, setup.device, beside="")
    _warn_if_nothing_is_learnt(setup)


def _warn_if_nothing_is_learnt(setup: Setup) -> None:
    total, knobs = setup.config.total_timesteps, setup.config.algo_kwargs
    if knobs.learning_starts >= total or knobs.train_freq > total:
        warnings.warn(
            f"nothing will be learnt in {total:,} steps: learning_starts is"
            f" {knobs.learning_starts:,} and train_freq {knobs.train_freq:,}",
            stacklevel=4,
        )


def _added(sums: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the sums with the counts added; no sums are zeros."""
    return [a + b for a, b in zip(sums, counts, strict=True)] if sums else list(counts)
