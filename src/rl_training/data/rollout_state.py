"""State of an incomplete rollout, its check for NaNs, and its memory on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map
from rl_training.data import finite
from rl_training.data.obs_store import own_array
from rl_training.types import Array, Obs, Rows


class RolloutState:
    """The part of `RolloutBuffer` that saves, restores and checks rows."""

    num_steps: int
    num_envs: int
    first_env: int = 0
    """Index in the run of the first of these environments, for errors."""
    agents: Sequence[str] = ()
    """Of several agents: those of each environment, a row for each."""
    masked: bool
    position: int
    recorded: frozenset[str]
    obs: Any
    next_obs: Any
    logprobs: Tensor
    values: Tensor
    valid: Tensor
    turns: bool
    waiting: Tensor
    device: torch.device
    _obs_slots: Any
    _sent: list[Tensor]
    _copies_done: Any
    _final: list[tuple[int, Array, Obs]]
    _lengths_before: Array | None
    _waiting: list[Tensor]
    _slots: list[Array]

    def reset(self) -> None:
        """Start a new rollout in the same memory."""
        raise NotImplementedError

    def _send_steps(self) -> None:
        """Copy a whole rollout's actions, rewards and ends to the device."""
        for there, here in zip(self._sent, self._waiting, strict=True):
            if there is not here:
                there.copy_(here, non_blocking=self._copies_done is not None)
        if self._copies_done is not None:
            self._copies_done.record(torch.cuda.current_stream(self.device))

    def _store_obs(self, t: int, obs: Obs, record: Mapping[str, Any]) -> None:
        if "obs" in record:
            tree_map(lambda grid, leaf: grid[t].copy_(leaf), self.obs, record["obs"])
        elif isinstance(obs, dict):
            for key, leaf in obs.items():
                self._obs_slots[key][t] = leaf
        else:
            self._obs_slots[t] = obs

    def rows(self) -> Rows:
        """Return the observations of a complete rollout as flat rows."""
        obs = tree_map(lambda leaf: leaf.flatten(0, 1), self.obs)
        return Rows(obs, self.valid.flatten())

    def state_dict(self) -> dict[str, Any]:
        """Return the steps stored so far, for a checkpoint within an iteration."""
        count = self.position
        state: dict[str, Any] = {
            "position": count,
            "recorded": {name: getattr(self, name)[:count] for name in sorted(self.recorded)},
            "obs": tree_map(lambda leaf: leaf[:count], self.obs),
            "steps": [tensor[:count] for tensor in self._waiting],
            "final": [[t, rows, obs] for t, rows, obs in self._final],
        }
        if count == self.num_steps:
            state["next_obs"] = self.next_obs
            if self.turns:
                state["waiting"] = self.waiting
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps stored so far."""
        self.reset()
        count = int(state["position"])
        if not 0 <= count <= self.num_steps:
            raise ValueError(
                f"the saved rollout has {count} steps, but this one has room for {self.num_steps}"
            )
        recorded = state.get("recorded")
        if recorded is None:  # saved by an earlier version, which recorded both or none
            names = ("logprobs", "values") if state["evaluated"] else ()
            recorded = {name: state[name] for name in names}
        self.recorded = frozenset(str(name) for name in recorded)

        def restore(grid: Tensor, saved: Tensor) -> None:
            if grid[:count].shape != saved.shape:
                raise ValueError(
                    f"the saved rollout contains a tensor of shape {tuple(saved.shape)}; expected"
                    f" {tuple(grid.shape)}"
                )
            grid[:count].copy_(saved)

        tree_map(restore, self.obs, state["obs"])
        for tensor, saved in zip(self._waiting, state["steps"], strict=True):
            restore(tensor, saved)
        self._final = [
            (int(t), own_array(rows), cast("Obs", tree_map(own_array, obs)))
            for t, rows, obs in state["final"]
        ]
        for name in self.recorded & {"logprobs", "values"}:
            restore(getattr(self, name), recorded[name])
        self.position = count
        if count == self.num_steps:
            self._send_steps()
            tree_map(lambda slot, leaf: slot.copy_(leaf), self.next_obs, state["next_obs"])
            if self.turns:
                self.waiting.copy_(state["waiting"])

    def truncate(self, obs: Obs, actor_state: Mapping[str, Any]) -> Array:
        """Truncate every running episode after the last stored step; return their environments.

        ``obs`` are the observations after that step and ``actor_state`` is the actor's state.
        """
        del actor_state
        t = self.position - 1
        _, _, dones, valid = self._slots
        rows: Array = np.flatnonzero((dones[t] == 0) & valid[t])
        if rows.size:
            dones[t][rows] = 1
            # Appended to the final observations of episodes that were truncated at this step.
            self._final.append((t, rows, tree_map(lambda leaf: leaf[rows], obs)))
        return rows

    def check_finite(self, first_step: int, episode_lengths: Array | None = None) -> None:
        """Raise `NonFiniteError` if a complete rollout contains a NaN or infinity.

        The error names its environment and step. ``episode_lengths`` are the steps so far of the
        current episodes; without them the step is a lower bound if the episode began before the
        rollout.
        """
        host = [*self._host_fields(), *self._final_fields()]
        if not (all(field.is_finite() for field in host) and self._observed_finite()):
            before = np.zeros(self.num_envs, np.int64) if first_step == 0 else self._lengths_before
            _, _, dones, valid = self._slots
            episodes = finite.Episodes(dones > 0, valid, before, episode_lengths, self.masked)
            fields = [*self._observed_fields(), *host]
            raise finite.non_finite_error(
                fields,
                episodes,
                first_row=0,
                first_step=first_step,
                first_env=self.first_env,
                agents=self.agents,
            )
        self._lengths_before = episode_lengths

    def _observed_finite(self) -> bool:
        """Return whether all observations are finite; synchronises with the device once."""
        leaves = [*tree_leaves(self.obs), *tree_leaves(self.next_obs)]
        checks = [torch.isfinite(leaf).all() for leaf in leaves if leaf.is_floating_point()]
        return not checks or bool(torch.stack(checks).all())

    def _observed_fields(self) -> list[finite.Field]:
        pairs = zip(tree_leaves(self.obs), tree_leaves(self.next_obs), strict=True)
        values = [torch.cat((leaf, after.unsqueeze(0))).cpu().numpy() for leaf, after in pairs]
        names = finite.named_leaves(self._keys())
        return [finite.Field(finite.OBSERVATION, *one) for one in zip(names, values, strict=True)]

    def _host_fields(self) -> list[finite.Field]:
        actions, rewards, _, _ = self._slots
        return [
            finite.Field(finite.ACTION, "action", actions),
            finite.Field(finite.REWARD, "reward", rewards),
        ]

    def _final_fields(self) -> list[finite.Field]:
        """Return true final observations, in the rows of the steps that ended their episodes."""
        if not self._final:
            return []
        fields = []
        each = zip(*(tree_leaves(obs) for _, _, obs in self._final), strict=True)
        for name, leaves in zip(finite.named_leaves(self._keys()), each, strict=True):
            if leaves[0].dtype.kind != "f":
                continue
            field = finite.Field(finite.FINAL, f"final {name}", np.concatenate(leaves))
            if not field.is_finite():
                shape = (self.num_steps, self.num_envs, *leaves[0].shape[1:])
                values = np.zeros(shape, leaves[0].dtype)
                for (t, rows, _), leaf in zip(self._final, leaves, strict=True):
                    values[t, rows] = leaf
                fields.append(field._replace(values=values))
        return fields

    def _keys(self) -> list[str]:
        return list(self.obs) if isinstance(self.obs, dict) else [""]


def host_copy(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the CPU, else a tensor like it in host memory."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class _DeviceSlots:
    """Rows of a tensor on an accelerator, written from arrays."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, t: int, value: Array) -> None:
        self._tensor[t].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def row_slots(tensor: Tensor) -> Array | _DeviceSlots:
    """Return an object to assign rows to: assigning through NumPy is several times faster."""
    return tensor.numpy() if tensor.device.type == "cpu" else _DeviceSlots(tensor)
