"""The off-policy family: collect into a replay, learn from it as often as is owed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from rl_training.algorithms.off_policy import OffPolicyConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import ConfigError
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.replay_store import ReplayStore
from rl_training.runtime.trainer import Setup, Trainer, make_collector
from rl_training.types import Progress

_ITERATION = 1000
"""Steps or updates between reports, whichever are more."""


class OffPolicyTrainer(Trainer):
    """Steps environments up to the next crossing of ``train_freq``, then pays the updates owed."""

    def __init__(self, setup: Setup, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(setup, callbacks)
        self.knobs: OffPolicyConfig = setup.config.algo_kwargs
        self.replay = self.make_replay(setup)
        self.collector = make_collector(setup, self.replay)
        self.learner: Any = setup.algorithm
        # By its decimal digits, so that 0.1 is a tenth and ten crossings owe exactly one.
        steps = self.knobs.gradient_steps
        self._per_crossing = Fraction(self.knobs.train_freq if steps == -1 else str(steps))
        self._owed = Fraction(0)
        self._learns_from = self.knobs.learning_starts
        """The step that learning starts at; later where a resume began with an empty replay."""
        per_step = self._per_crossing / self.knobs.train_freq
        self._iteration = max(1, int(_ITERATION / max(Fraction(1), per_step)))
        self._store = ReplayStore(setup.run_dir / "replay")

    @staticmethod
    def check(setup: Setup) -> None:
        """Refuse a replay that the machine cannot hold; say what it will take."""
        obs, action = setup.env.obs_spec, setup.env.action_spec
        knobs: OffPolicyConfig = setup.config.algo_kwargs
        on_device = knobs.replay_device == "accelerator"
        if on_device and setup.device.type == "cpu":
            raise ConfigError(
                "'algo_kwargs.replay_device' is accelerator, but this run is on the CPU:"
                " set device too"
            )
        each = setup.spec.trainer.bytes_per_transition(setup)  # type: ignore[attr-defined]
        _check_memory(knobs.buffer_size, each, quiet=not setup.config.progress)
        if on_device:
            copied = ReplayBuffer.copied_bytes_per_transition(
                obs, action, frame_stack=setup.env.frame_stack
            )
            _check_device_memory(knobs.buffer_size, copied, setup.device)
        total = setup.config.total_timesteps
        if knobs.learning_starts >= total or knobs.train_freq > total:
            warnings.warn(
                f"nothing will be learnt in {total:,} steps: learning_starts is"
                f" {knobs.learning_starts:,} and train_freq {knobs.train_freq:,}",
                stacklevel=3,
            )

    @staticmethod
    def bytes_per_transition(setup: Setup) -> int:
        """What one transition takes in the replay that `make_replay` makes."""
        knobs: OffPolicyConfig = setup.config.algo_kwargs
        return ReplayBuffer.bytes_per_transition(
            setup.env.obs_spec,
            setup.env.action_spec,
            prioritized=knobs.prioritization() is not None,
            frame_stack=setup.env.frame_stack,
        )

    def make_replay(self, setup: Setup) -> ReplayBuffer:
        """Storage for ``buffer_size`` transitions."""
        obs, action, knobs = setup.env.obs_spec, setup.env.action_spec, self.knobs
        on_device = knobs.replay_device == "accelerator"
        return ReplayBuffer(
            knobs.buffer_size,
            setup.env.num_envs,
            obs,
            action,
            n_step=knobs.n_step,
            gamma=knobs.gamma,
            prioritization=knobs.prioritization(),
            frame_stack=setup.env.frame_stack,
            device=setup.device if on_device else None,
        )

    def round_up(self, total: int) -> int:
        """A whole number of vector steps."""
        return -(-total // self.config.num_envs) * self.config.num_envs

    def iterate(self, progress: Progress) -> tuple[int, dict[str, float]]:
        """A thousand steps (fewer where a step owes several updates), and the updates they owe."""
        step, end = progress.step, min(progress.step + self._iteration, self.total)
        vector_steps = 0
        while step < end:
            count = -(-(self._next_boundary(step, end) - step) // self.env.num_envs)
            before = step
            step += self.collector.collect(count, Progress(step, progress.total)).steps
            vector_steps += count
            self._owed += self._owes(before, step)
            updates = int(self._owed)
            if updates:
                self._owed -= updates
                self.learner.learn(self.replay, updates, Progress(step, progress.total))
        self.replay.check_finite(vector_steps, progress.step)
        metrics = self.collector.metrics()
        for name, mean in self.learner.pop_metrics().items():
            metrics[f"losses/{name}"] = mean
        return step - progress.step, metrics

    def _next_boundary(self, step: int, end: int) -> int:
        every, warm_up = self.knobs.train_freq, self._learns_from
        following = (step // every + 1) * every
        return min(following, end, warm_up) if step < warm_up else min(following, end)

    def _owes(self, before: int, after: int) -> Fraction:
        """Updates for the crossings of ``train_freq`` between two steps; none for the warm-up."""
        every = self.knobs.train_freq
        crossings = max(0, after // every - max(before, self._learns_from) // every)
        owes: Fraction = crossings * self._per_crossing
        return owes

    def extra_state(self) -> dict[str, Any]:
        """The replay (its rows in files of their own) and the fraction of an update still owed."""
        owed = [self._owed.numerator, self._owed.denominator]
        replay = self._store.save(self.replay)
        return {"owed": owed, "learns_from": self._learns_from, "replay": replay}

    def refill_steps(self) -> int:
        """Steps that an empty replay takes in before it is learnt from again."""
        return int(self.knobs.learning_starts)

    def load_extra_state(self, state: Mapping[str, Any], *, empty_replay: bool) -> None:
        """Bring them back; an empty replay is filled by the policy as it is before it learns on."""
        self._owed = Fraction(*state["owed"])
        self._learns_from = int(state["learns_from"])
        if empty_replay:
            self._learns_from = self.global_step + self.refill_steps()
        else:
            self._store.load(self.replay, state["replay"])

    def load_state_dict(self, state: Mapping[str, Any], *, empty_replay: bool = False) -> bool:
        """Stand where a checkpoint stood; the replay is told where the environments now stand."""
        exact = super().load_state_dict(state, empty_replay=empty_replay)
        if self.collector.obs is not None:
            self.replay.go_on_from(self.collector.obs, exact=exact)
        return exact

    def after_checkpoint(self, *, is_best: bool) -> None:
        """Delete replay files that neither the last checkpoint nor the best one names."""
        self._store.prune(is_best=is_best, best=self.run_dir / "checkpoints" / "best.pt")


def _check_memory(transitions: int, each: int, *, quiet: bool) -> None:
    needed = transitions * each
    text = f"replay: {transitions:,} transitions x {each:,} bytes = {_readable(needed)}"
    if hasattr(os, "sysconf"):
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > present:
            raise ConfigError(
                f"{text}, and this machine has {_readable(present)}: lower buffer_size"
            )
    if not quiet:
        sys.stderr.write(text + "\n")


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _check_device_memory(transitions: int, each: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = transitions * each
    if needed > free:
        raise ConfigError(
            f"replay: a copy of {transitions:,} transitions x {each:,} bytes ="
            f" {_readable(needed)}, and the accelerator has {_readable(free)} free:"
            " lower buffer_size, or keep it on the host with replay_device: cpu"
        )
