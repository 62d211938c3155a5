"""A rollout of tensors that never leave their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data import finite
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.types import Array


class DeviceRollout(RolloutBuffer):
    """A `RolloutBuffer` whose steps are tensors (`DeviceStep`) on its own device.

    All shapes are static: the final observations of every step are stored, and valued in one pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truncated = torch.zeros_like(self.valid)
        """Rows where an episode was truncated and did not terminate."""
        self.final_obs: Any = None
        """True next observations of every step; None where the environment returns none."""
        self.is_finite: bool | None = None
        """Whether all numbers of a complete rollout are finite, once that is known on the host."""

    def _make_slots(self) -> None:
        self._waiting, self._slots, self._copies_done = self._sent, [], None

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        super().reset()
        self.is_finite = None

    def add(self, obs: Any, action: Any, record: Mapping[str, Any], step: Any) -> None:
        """Append one step of every environment, a `DeviceStep`."""
        t = self.position
        if t >= self.num_steps:
            raise RuntimeError(
                f"the rollout is complete ({self.num_steps} steps): call reset() first"
            )
        self.recorded = frozenset(record)
        self.write(t, obs, action, record, step)
        self.position = t + 1

    def write(self, t: int, obs: Any, action: Tensor, record: Mapping[str, Any], step: Any) -> None:
        """Store a step in row ``t`` without changing anything on the host."""
        tree_map(lambda grid, leaf: grid[t].copy_(leaf), self.obs, obs)
        self.actions[t].copy_(action)
        self.rewards[t].copy_(step.reward)
        self.dones[t].copy_(step.terminated | step.truncated)
        torch.logical_and(step.truncated, ~step.terminated, out=self.truncated[t])
        for name in record:
            getattr(self, name)[t].copy_(record[name])
        if step.final_obs is not None:
            if self.final_obs is None:
                self.final_obs = tree_map(torch.zeros_like, self.obs)
            tree_map(lambda grid, leaf: grid[t].copy_(leaf), self.final_obs, step.final_obs)
        if t + 1 == self.num_steps:
            tree_map(lambda slot, leaf: slot.copy_(leaf), self.next_obs, step.obs)

    def fill_bootstrap(self, value: Callable[[Any], Tensor]) -> None:
        """Compute what truncated episodes bootstrap from.

        Without final observations it is the value of the last observation before the truncation.
        """
        values = self.values
        if self.final_obs is not None:
            flat: Any = tree_map(lambda leaf: leaf.flatten(0, 1), self.final_obs)
            values = value(flat).view_as(self.values)
        self.bootstrap.copy_(torch.where(self.truncated, values, 0.0))

    # -- checks --------------------------------------------------------------------------------

    def finite_flag(self) -> Tensor:
        """Return whether all numbers are finite, as a tensor on the device."""
        trees = (self.obs, self.next_obs, self.final_obs, self.actions, self.rewards)
        leaves = [leaf for tree in trees if tree is not None for leaf in tree_leaves(tree)]
        checks = [torch.isfinite(leaf).all() for leaf in leaves if leaf.is_floating_point()]
        return torch.stack(checks).all()

    def check_finite(self, first_step: int, episode_lengths: Array | None = None) -> None:
        """Raise `NonFiniteError` if a complete rollout contains a NaN or infinity."""
        del episode_lengths
        if self.is_finite is None:
            self.is_finite = bool(self.finite_flag())
        if self.is_finite:
            return
        before = np.zeros(self.num_envs, np.int64) if first_step == 0 else None
        ended, valid = self.dones.cpu().numpy() > 0, self.valid.cpu().numpy()
        fields = [
            *self._observed_fields(),
            finite.Field(finite.ACTION, "action", self.actions.cpu().numpy()),
            finite.Field(finite.REWARD, "reward", self.rewards.cpu().numpy()),
        ]
        if self.final_obs is not None:
            names = finite.named_leaves(self._keys())
            for name, leaf in zip(names, tree_leaves(self.final_obs), strict=True):
                fields.append(finite.Field(finite.FINAL, f"final {name}", leaf.cpu().numpy()))
        episodes = finite.Episodes(ended, valid, before, None)
        raise finite.non_finite_error(fields, episodes, first_row=0, first_step=first_step)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the steps stored so far, for a checkpoint within an iteration."""
        count = self.position
        state: dict[str, Any] = {
            "position": count,
            "recorded": {name: getattr(self, name)[:count] for name in sorted(self.recorded)},
            "steps": [tensor[:count] for tensor in self._stored()],
            "obs": tree_map(lambda leaf: leaf[:count], self.obs),
            "final_obs": None,
        }
        if self.final_obs is not None:
            state["final_obs"] = tree_map(lambda leaf: leaf[:count], self.final_obs)
        if count == self.num_steps:
            state["next_obs"] = self.next_obs
        return state

    def _stored(self) -> list[Tensor]:
        return [self.actions, self.rewards, self.dones, self.truncated]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps stored so far."""
        self.reset()
        count = int(state["position"])
        if not 0 <= count <= self.num_steps:
            raise ValueError(
                f"the saved rollout has {count} steps, but this one has room for {self.num_steps}"
            )

        def restore(grid: Tensor, saved: Tensor) -> None:
            if grid[:count].shape != saved.shape:
                raise ValueError(
                    f"the saved rollout contains a tensor of shape {tuple(saved.shape)}; expected"
                    f" {tuple(grid[:count].shape)}"
                )
            grid[:count].copy_(saved)

        for tensor, saved in zip(self._stored(), state["steps"], strict=True):
            restore(tensor, saved)
        tree_map(restore, self.obs, state["obs"])
        if state["final_obs"] is not None:
            if self.final_obs is None:
                self.final_obs = tree_map(torch.zeros_like, self.obs)
            tree_map(restore, self.final_obs, state["final_obs"])
        self.recorded = frozenset(state["recorded"]) & {"logprobs", "values"}
        for name in self.recorded:
            restore(getattr(self, name), state["recorded"][name])
        self.position = count
        if count == self.num_steps:
            tree_map(lambda slot, leaf: slot.copy_(leaf), self.next_obs, state["next_obs"])

    def truncate(self, obs: Any, actor_state: Mapping[str, Any]) -> Array:
        """Truncate every running episode after the last stored step; return their environments."""
        del actor_state
        t = self.position - 1
        running = self.dones[t] == 0
        self.dones[t].fill_(1.0)
        self.truncated[t] |= running
        if self.final_obs is not None:

            def put(grid: Tensor, leaf: Any) -> None:
                shown = torch.as_tensor(leaf).to(grid)
                mask = running.view(-1, *(1,) * (shown.ndim - 1))
                grid[t].copy_(torch.where(mask, shown, grid[t]))

            tree_map(put, self.final_obs, obs)
        rows: Array = np.flatnonzero(running.cpu().numpy())
        return rows
