"""Rollout storage: steps of every environment, with advantages computed by GAE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map, tree_stack
from rl_training.algorithms.returns import gae, gae_of_turns
from rl_training.data.rollout_state import RolloutState, host_copy, row_slots
from rl_training.types import Array, Obs, VectorStep

TensorObs: TypeAlias = Tensor | dict[str, Tensor]
Shape: TypeAlias = tuple[int, ...]


class RolloutBuffer(RolloutState):
    """``num_steps`` x ``num_envs`` transitions, allocated once.

    ``dones[t]`` is 1 where the episode ended with the action at t; ``bootstrap[t]`` is the value
    of the true final observation where the episode was truncated there, else 0; ``valid[t]`` is
    False on a reset-only row. With ``masked``, minibatches contain ``valid`` as ``mask``. With
    ``turns`` agents act one after another: a row that is not ``valid`` may receive a reward or the
    end of its episode, and belongs to the transition of the row's last valid step (`gae_of_turns`).
    On an accelerator, rewards, ends and actions are collected on the host and copied to the device
    when the rollout is complete; observations were already copied there for the actor.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        obs_shape: Shape | Mapping[str, Shape],
        action_shape: Shape,
        *,
        obs_dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        masked: bool = False,
        turns: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.masked = masked
        self.turns = turns
        self.device = torch.device(device)

        def grid(shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((num_steps, num_envs, *shape), dtype=dtype, device=self.device)

        self.obs: TensorObs
        if isinstance(obs_shape, Mapping):
            dtypes = (
                obs_dtype if isinstance(obs_dtype, Mapping) else dict.fromkeys(obs_shape, obs_dtype)
            )
            self.obs = {k: grid(tuple(shape), dtypes[k]) for k, shape in obs_shape.items()}
        else:
            if isinstance(obs_dtype, Mapping):
                raise TypeError("obs_dtype and obs_shape must both be mappings, or neither")
            self.obs = grid(tuple(obs_shape), obs_dtype)
        self.actions = grid(tuple(action_shape), action_dtype)
        self.logprobs = grid()
        self.rewards = grid()
        self.dones = grid()
        self.values = grid()
        self.bootstrap = grid()
        self.valid = torch.ones_like(self.rewards, dtype=torch.bool)
        self.advantages = grid()
        self.returns = grid()
        self.learnt = self.valid
        """Rows that are learnt from: ``valid`` ones whose transition is complete."""
        self.waiting = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        """Rows that do not act after the last step, because it is another agent's turn."""
        self.next_obs: TensorObs = tree_map(lambda leaf: torch.zeros_like(leaf[0]), self.obs)
        self.position = 0
        self.recorded: frozenset[str] = frozenset()
        """Names of what the actor recorded with the steps: "values", "logprobs"."""
        self._learners: tuple[Tensor, Tensor] | None = None
        """Log-probabilities and values of weights that are newer than those that acted."""
        self._final: list[tuple[int, Array, Obs]] = []
        self._lengths_before: Array | None = None
        """Steps of each environment's episode before this rollout; None if unknown."""
        self._obs_slots: Any = tree_map(row_slots, self.obs)
        self._sent = [self.actions, self.rewards, self.dones, self.valid]
        self._make_slots()

    def _make_slots(self) -> None:
        """Allocate the memory on the host that steps are collected in."""
        self._waiting = [host_copy(tensor) for tensor in self._sent]
        self._slots = [tensor.numpy() for tensor in self._waiting]
        self._copies_done = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Recorded after the copies from pinned memory, which run asynchronously."""

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
        self.position = 0
        self.bootstrap.zero_()
        self._learners = None
        self._final.clear()

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment.

        ``record`` contains further tensors of this step, stored in the fields of the same names;
        its ``obs`` are the observations on the buffer's device, if the actor copied them there.
        """
        t = self.position
        if t >= self.num_steps:
            raise RuntimeError(
                f"the rollout is complete ({self.num_steps} steps): call reset() first"
            )
        self._store_obs(t, obs, record)
        actions, rewards, dones, valid = self._slots
        actions[t] = action
        rewards[t] = step.reward
        dones[t] = step.terminated | step.truncated
        valid[t] = step.valid
        self.recorded = frozenset(record) - {"obs"}
        for name in self.recorded:
            getattr(self, name)[t] = record[name]
        if step.truncated.any():
            # Where both are reported, the step counts as terminated: nothing is bootstrapped.
            rows = np.flatnonzero(step.truncated & ~step.terminated)
            if rows.size:
                self._final.append((t, rows, tree_map(lambda leaf: leaf[rows], step.final_obs)))
        self.position = t + 1
        if self.position == self.num_steps:
            self._send_steps()
            if step.waiting is not None:
                self.waiting.copy_(torch.from_numpy(step.waiting))
            tree_map(lambda slot, leaf: slot.copy_(torch.from_numpy(leaf)), self.next_obs, step.obs)

    def truncated_observations(self) -> tuple[Tensor, TensorObs] | None:
        """Return flat (time x environment) indices and final observations of truncated steps."""
        if not self._final:
            return None
        index = np.concatenate([t * self.num_envs + rows for t, rows, _ in self._final])
        stacked: Any = tree_stack(np.concatenate, [rows for _, _, rows in self._final])
        obs: Any = tree_map(lambda leaf: torch.from_numpy(leaf).to(self.device), stacked)
        return torch.from_numpy(index).to(self.device), obs

    def fill_bootstrap(self, value: Callable[[Any], Tensor]) -> None:
        """Compute what truncated episodes bootstrap from, given a model's ``value``."""
        truncated = self.truncated_observations()
        if truncated is not None:
            index, final_obs = truncated
            self.bootstrap.view(-1)[index] = value(final_obs)

    def next_inputs(self) -> Any:
        """Return the observations after the last step as input of a model's ``value``."""
        return self.next_obs

    def whole(self) -> dict[str, Any]:
        """Return the complete rollout as input of a model's ``evaluate``."""
        batch = self.flat()
        return {"obs": batch["obs"], "actions": batch["actions"]}

    def keep_evaluation(self, logprobs: Tensor, values: Tensor) -> None:
        """Store a model's evaluation of `whole`, except for what the actor recorded."""
        for name, numbers in (("logprobs", logprobs), ("values", values)):
            if name not in self.recorded:
                getattr(self, name).view(-1).copy_(numbers)

    def keep_targets(
        self, logprobs: Tensor, values: Tensor, advantages: Tensor, returns: Tensor
    ) -> None:
        """Store targets, and the evaluation they were computed with, all (T, N).

        `flat` returns that evaluation as ``old_logprobs`` and ``values``; what is known of the
        policy that acted stays as it is.
        """
        self._learners = (logprobs, values)
        self.advantages.copy_(advantages)
        self.returns.copy_(returns)

    def compute_returns_and_advantages(
        self, *, last_value: Tensor, gamma: float, gae_lambda: float
    ) -> None:
        """Fill ``advantages`` and ``returns`` by `gae`, or by `gae_of_turns`.

        ``last_value`` is the value of the observation after the last step.
        """
        if self.turns:
            advantages, returns, self.learnt = gae_of_turns(
                self.rewards,
                self.values,
                self.dones,
                self.bootstrap,
                last_value.reshape(-1).to(self.values),
                self.valid,
                self.waiting,
                gamma=gamma,
                gae_lambda=gae_lambda,
            )
            self.advantages.copy_(advantages)
            self.returns.copy_(returns)
            return
        gae(
            self.rewards,
            self.values,
            self.dones,
            self.bootstrap,
            last_value.reshape(-1).to(self.values),
            gamma=gamma,
            gae_lambda=gae_lambda,
            out=(self.advantages, self.returns),
        )

    def flat(self) -> dict[str, Any]:
        """Return the rollout as one batch of ``num_steps * num_envs`` rows."""
        old_logprobs, values = self._learners or (self.logprobs, self.values)
        batch: dict[str, Any] = {
            "obs": tree_map(lambda leaf: leaf.flatten(0, 1), self.obs),
            "actions": self.actions.flatten(0, 1),
            "old_logprobs": old_logprobs.flatten(),
            "values": values.flatten(),
            "advantages": self.advantages.flatten(),
            "returns": self.returns.flatten(),
        }
        if self.masked:
            batch["mask"] = self.learnt.flatten().to(self.rewards.dtype)
        return batch

    def batch(self) -> dict[str, Any]:
        """Return the complete rollout as one minibatch."""
        return self.flat()

    def iter_minibatches(
        self, num_minibatches: int, *, generator: torch.Generator | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield one epoch: every row once, in random order, in ``num_minibatches`` equal parts."""
        return shuffled(self.flat(), num_minibatches, generator)

    def draw_order(self, generator: torch.Generator) -> Tensor:
        """Return the random order of the rows that `iter_minibatches` would draw."""
        return _order(self.num_steps * self.num_envs, generator, self.device)

    def minibatches_in(self, order: Tensor, num_minibatches: int) -> Iterator[dict[str, Any]]:
        """Yield what `iter_minibatches` does, in an order that was drawn before."""
        return _in_order(self.flat(), order, num_minibatches)


def shuffled(
    batch: Mapping[str, Any], num_minibatches: int, generator: torch.Generator | None = None
) -> Iterator[dict[str, Any]]:
    """Yield every row of a batch once, in random order, in ``num_minibatches`` equal parts."""
    first = tree_leaves(next(iter(batch.values())))[0]
    order = _order(len(first), generator, first.device)
    yield from _in_order(batch, order, num_minibatches)


def _order(rows: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    place = torch.device("cpu") if generator is None else generator.device
    return torch.randperm(rows, generator=generator, device=place).to(device)


def _in_order(
    batch: Mapping[str, Any], order: Tensor, num_minibatches: int
) -> Iterator[dict[str, Any]]:
    rows = len(order)
    if num_minibatches < 1 or rows % num_minibatches:
        raise ValueError(f"{num_minibatches} minibatches do not divide {rows} rows")
    size = rows // num_minibatches
    # Shuffled once per epoch, so that minibatches are slices without a copy.
    epoch: dict[str, Any] = {
        key: tree_map(lambda leaf: leaf.index_select(0, order).split(size), value)
        for key, value in batch.items()
    }
    for i in range(num_minibatches):
        yield {key: tree_map(lambda leaf, i=i: leaf[i], value) for key, value in epoch.items()}
