"""On-policy storage: one rollout of every environment, with advantages by GAE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_leaves, tree_map, tree_stack
from rl_training.data import finite
from rl_training.data.obs_store import own_array
from rl_training.types import Array, Obs, VectorStep

TensorObs: TypeAlias = Tensor | dict[str, Tensor]
Shape: TypeAlias = tuple[int, ...]


class RolloutBuffer:
    """``num_steps`` x ``num_envs`` transitions, allocated once.

    ``dones[t]`` says that the episode ended with the action at t; ``bootstrap[t]`` is the value
    of the true final observation where the episode was truncated there, else 0; ``valid[t]`` is
    False on a reset-only row. Minibatches carry ``valid`` as ``mask`` where ``masked`` is set.
    On an accelerator what environments say of a step waits on the host, and is sent over when
    the rollout is whole; observations are there already, where the actor saw them.
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
    ) -> None:
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.masked = masked
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
                raise TypeError("a mapping of obs_dtype goes with a mapping of obs_shape")
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
        self.next_obs: TensorObs = tree_map(lambda leaf: torch.zeros_like(leaf[0]), self.obs)
        self.position = 0
        self.evaluated = False
        """Whether values and log-probabilities came with the steps."""
        self._final: list[tuple[int, Array, Obs]] = []
        self._lengths_before: Array | None = None
        """Steps of the environments' episodes before this rollout, where they are known."""
        self._obs_slots: Any = tree_map(_slots, self.obs)
        self._sent = [self.actions, self.rewards, self.dones, self.valid]
        self._waiting = [_host_copy(tensor) for tensor in self._sent]
        self._slots = [tensor.numpy() for tensor in self._waiting]
        self._copies_done = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Comes after the copies from pinned memory, which may run long after they are queued."""

    def reset(self) -> None:
        """Forget the rollout; its memory is written again."""
        if self._copies_done is not None:
            self._copies_done.synchronize()
        self.position = 0
        self.bootstrap.zero_()
        self._final.clear()

    def add(self, obs: Obs, action: Array, record: Mapping[str, Any], step: VectorStep) -> None:
        """Append one step of every environment.

        ``record`` holds further tensors of this step for fields of the same names; ``obs`` among
        them are the observations again, where the buffer keeps them.
        """
        t = self.position
        if t >= self.num_steps:
            raise RuntimeError(f"the rollout already holds its {self.num_steps} steps: reset() it")
        self._store_obs(t, obs, record)
        actions, rewards, dones, valid = self._slots
        actions[t] = action
        rewards[t] = step.reward
        dones[t] = step.terminated | step.truncated
        valid[t] = step.valid
        self.evaluated = "values" in record
        for name, tensor in record.items():
            if name != "obs":
                getattr(self, name)[t] = tensor
        if step.truncated.any():
            # Termination wins where both are reported: there is nothing after it to bootstrap.
            rows = np.flatnonzero(step.truncated & ~step.terminated)
            if rows.size:
                self._final.append((t, rows, tree_map(lambda leaf: leaf[rows], step.final_obs)))
        self.position = t + 1
        if self.position == self.num_steps:
            self._send_steps()
            tree_map(lambda slot, leaf: slot.copy_(torch.from_numpy(leaf)), self.next_obs, step.obs)

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

    def truncated_observations(self) -> tuple[Tensor, TensorObs] | None:
        """Flat (time x environment) indices of truncated steps and their final observations."""
        if not self._final:
            return None
        index = np.concatenate([t * self.num_envs + rows for t, rows, _ in self._final])
        stacked: Any = tree_stack(np.concatenate, [rows for _, _, rows in self._final])
        obs: Any = tree_map(lambda leaf: torch.from_numpy(leaf).to(self.device), stacked)
        return torch.from_numpy(index).to(self.device), obs

    def standing(self) -> Any:
        """What the environments show after the last step, as a model values it."""
        return self.next_obs

    def whole(self) -> dict[str, Any]:
        """All of the rollout, as a model evaluates it."""
        batch = self.flat()
        return {"obs": batch["obs"], "actions": batch["actions"]}

    def keep_evaluation(self, logprobs: Tensor, values: Tensor) -> None:
        """Store what a model said of `whole`."""
        self.logprobs.view(-1).copy_(logprobs)
        self.values.view(-1).copy_(values)

    def compute_returns_and_advantages(
        self, *, last_value: Tensor, gamma: float, gae_lambda: float
    ) -> None:
        """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

        delta_t = r_t + gamma [(1 - done_t) V_{t+1} + bootstrap_t] - V_t
        A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1},  returns = A + V

        ``last_value`` is the value of the observation after the last step.
        """
        going_on = 1.0 - self.dones
        next_values = torch.cat((self.values[1:], last_value.reshape(1, -1).to(self.values)))
        delta = self.rewards + gamma * (going_on * next_values + self.bootstrap) - self.values
        decay = gamma * gae_lambda * going_on
        advantage = torch.zeros_like(delta[0])
        rows = zip(
            reversed(self.advantages.unbind()),
            reversed(delta.unbind()),
            reversed(decay.unbind()),
            strict=True,
        )
        for slot, delta_t, decay_t in rows:
            advantage = torch.addcmul(delta_t, decay_t, advantage, out=slot)
        torch.add(self.advantages, self.values, out=self.returns)

    def flat(self) -> dict[str, Any]:
        """The rollout as one batch of ``num_steps * num_envs`` rows."""
        batch: dict[str, Any] = {
            "obs": tree_map(lambda leaf: leaf.flatten(0, 1), self.obs),
            "actions": self.actions.flatten(0, 1),
            "old_logprobs": self.logprobs.flatten(),
            "values": self.values.flatten(),
            "advantages": self.advantages.flatten(),
            "returns": self.returns.flatten(),
        }
        if self.masked:
            batch["mask"] = self.valid.flatten().to(self.rewards.dtype)
        return batch

    def iter_minibatches(
        self, num_minibatches: int, *, generator: torch.Generator | None = None
    ) -> Iterator[dict[str, Any]]:
        """One epoch: every row once, in random order, in ``num_minibatches`` equal parts."""
        return shuffled(self.flat(), num_minibatches, generator)

    def state_dict(self) -> dict[str, Any]:
        """The steps stored so far, for a checkpoint within an iteration."""
        count = self.position
        state: dict[str, Any] = {
            "position": count,
            "evaluated": self.evaluated,
            "obs": tree_map(lambda leaf: leaf[:count], self.obs),
            "steps": [tensor[:count] for tensor in self._waiting],
            "final": [[t, rows, obs] for t, rows, obs in self._final],
        }
        if self.evaluated:
            state |= {"logprobs": self.logprobs[:count], "values": self.values[:count]}
        if count == self.num_steps:
            state["next_obs"] = self.next_obs
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the steps stored so far."""
        self.reset()
        count = int(state["position"])
        if not 0 <= count <= self.num_steps:
            raise ValueError(f"a rollout of {self.num_steps} steps cannot hold {count}")
        self.evaluated = bool(state["evaluated"])

        def restore(grid: Tensor, saved: Tensor) -> None:
            if grid[:count].shape != saved.shape:
                raise ValueError(f"{tuple(saved.shape)} was saved for {tuple(grid.shape)}")
            grid[:count].copy_(saved)

        tree_map(restore, self.obs, state["obs"])
        for tensor, saved in zip(self._waiting, state["steps"], strict=True):
            restore(tensor, saved)
        self._final = [
            (int(t), own_array(rows), cast("Obs", tree_map(own_array, obs)))
            for t, rows, obs in state["final"]
        ]
        if self.evaluated:
            restore(self.logprobs, state["logprobs"])
            restore(self.values, state["values"])
        self.position = count
        if count == self.num_steps:
            self._send_steps()
            tree_map(lambda slot, leaf: slot.copy_(leaf), self.next_obs, state["next_obs"])

    def truncate(self, obs: Obs, actor_state: Mapping[str, Any]) -> Array:
        """End every episode with the last step stored, truncated at ``obs``; return whose.

        ``actor_state`` is the actor's after that step.
        """
        del actor_state
        t = self.position - 1
        _, _, dones, valid = self._slots
        rows: Array = np.flatnonzero((dones[t] == 0) & valid[t])
        if rows.size:
            dones[t][rows] = 1
            # After the truncated steps of the same time that are there already.
            self._final.append((t, rows, tree_map(lambda leaf: leaf[rows], obs)))
        return rows

    def check_finite(self, first_step: int, episode_lengths: Array | None = None) -> None:
        """Raise `NonFiniteError` for a NaN or infinity in a whole rollout, naming its origin.

        ``episode_lengths`` are the steps so far of the environments' episodes; without them the
        error may name too early a step of an episode that began before the rollout.
        """
        host = [*self._host_fields(), *self._final_fields()]
        if not (all(field.is_finite() for field in host) and self._observed_finite()):
            before = np.zeros(self.num_envs, np.int64) if first_step == 0 else self._lengths_before
            _, _, dones, valid = self._slots
            episodes = finite.Episodes(dones > 0, valid, before, episode_lengths, self.masked)
            fields = [*self._observed_fields(), *host]
            raise finite.non_finite_error(fields, episodes, first_row=0, first_step=first_step)
        self._lengths_before = episode_lengths

    def _observed_finite(self) -> bool:
        """Whether all observations are finite; waits for the device once."""
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
        """True final observations, in the rows of the steps that they ended."""
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


def shuffled(
    batch: Mapping[str, Any], num_minibatches: int, generator: torch.Generator | None = None
) -> Iterator[dict[str, Any]]:
    """Every row of a batch once, in random order, in ``num_minibatches`` equal parts."""
    first = tree_leaves(next(iter(batch.values())))[0]
    rows = len(first)
    if num_minibatches < 1 or rows % num_minibatches:
        raise ValueError(f"{num_minibatches} minibatches do not divide {rows} rows")
    order = torch.randperm(rows, generator=generator).to(first.device)
    size = rows // num_minibatches
    # Shuffled once per epoch: minibatches are then slices, which cost nothing.
    epoch: dict[str, Any] = {
        key: tree_map(lambda leaf: leaf.index_select(0, order).split(size), value)
        for key, value in batch.items()
    }
    for i in range(num_minibatches):
        yield {key: tree_map(lambda leaf, i=i: leaf[i], value) for key, value in epoch.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    """The tensor itself on a CPU; else one like it in host memory that can be sent from."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class _DeviceSlots:
    """Rows of a tensor on an accelerator, written from arrays."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, t: int, value: Array) -> None:
        self._tensor[t].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _slots(tensor: Tensor) -> Array | _DeviceSlots:
    """Something to write rows to: a NumPy store is several times cheaper than a torch one."""
    return tensor.numpy() if tensor.device.type == "cpu" else _DeviceSlots(tensor)
