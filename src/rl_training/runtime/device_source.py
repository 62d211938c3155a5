"""Experience from environments on a device: nothing is copied to the host but sums."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training._internal.tree import tree_map
from rl_training.algorithms.acceleration import Acceleration, graphed
from rl_training.data.device_replay import DeviceReplay
from rl_training.data.device_rollout import DeviceRollout
from rl_training.device_envs.protocol import DeviceEnv, DeviceStep
from rl_training.runtime.actors import NoiseBlock
from rl_training.runtime.device_actors import DeviceActor
from rl_training.runtime.episode_info import WINDOW
from rl_training.runtime.experience import Collected, Timed
from rl_training.seeding import stream_seed
from rl_training.types import ActionSpec, Array, EnvInfo, Progress, StopRequest, never


class DeviceSource:
    """Steps a `DeviceEnv` with a policy whose noise is drawn on the device.

    Returns and lengths of episodes are sums on the device; they are read once per rollout or
    report, together with whether all numbers are finite. With ``acceleration: cudagraph`` a whole
    rollout is one CUDA graph, if the environment is `capturable`; it then cannot be paused in
    between. A replay is filled step by step, where each step is a graph.
    """

    def __init__(
        self,
        env: DeviceEnv,
        actor: DeviceActor,
        *,
        seed: int,
        num_steps: int,
        acceleration: Acceleration = "eager",
    ) -> None:
        self.env = env
        self.info = EnvInfo(
            env.obs_spec, env.action_spec, env.num_envs, device=str(env.device), on_device=True
        )
        self.policy_version = 0
        self.recent: deque[tuple[int, float, float]] = deque()
        """Number, summed returns and summed lengths of the last episodes, rollout by rollout."""
        self._actor = actor
        self._seed = seed
        self._steps = 0
        """Steps of every environment so far."""
        self._current: Any = None
        generator = torch.Generator(env.device).manual_seed(stream_seed(seed, "actions"))
        self._noise = NoiseBlock(num_steps, generator, actor.draw_noise)
        self._to_env = _EnvActions(env.action_spec, env.device)
        numbers = torch.zeros((2, env.num_envs), dtype=torch.float32, device=env.device)
        self._returns, self._lengths = numbers.unbind(0)
        """Of each environment's current episode."""
        self._sums = torch.zeros(3, dtype=torch.float64, device=env.device)
        """Number, returns and lengths of the episodes that ended since they were last read."""
        self._step = env.step
        self._choose: DeviceActor | Callable[..., Any] = actor
        self._timed: Timed | None = None
        self._warned = False
        self._recorded: frozenset[str] = frozenset()
        self._rollout: DeviceRollout
        self._replay: DeviceReplay
        self.collects_whole = acceleration == "cudagraph" and getattr(env, "capturable", False)
        """Whether a rollout is one function, which cannot be paused in between."""
        self._whole = graphed(self._whole_rollout, acceleration, env.device, copies=False)
        mode: Acceleration = acceleration if self.collects_whole else "eager"
        self._one = graphed(self._one_step, mode, env.device, copies=False)

    @property
    def obs(self) -> Any:
        """The observations that the next actions are chosen for; None before the first step."""
        return self._current

    @property
    def episode_lengths(self) -> None:
        """None: they are on the device."""

    @property
    def exactly_resumable(self) -> bool:
        """Whether the environment offers its state."""
        return hasattr(self.env, "state_dict") and hasattr(self.env, "load_state_dict")

    @torch.no_grad()
    def collect(
        self, buffer: Any, num_steps: int, progress: Progress, stop: StopRequest = never
    ) -> Collected:
        """Add ``num_steps`` steps of every environment to the buffer, or fewer on ``stop``."""
        if self._current is None:
            self._current = tree_map(torch.clone, self.env.reset(self._seed_at(0)))
        self._actor.prepare(progress)
        if isinstance(buffer, DeviceReplay):
            taken = self._collect_into_replay(buffer, num_steps, stop)
            self._steps += taken
            return Collected(taken, taken * self.info.num_envs, (), self.policy_version)
        rollout: DeviceRollout = buffer
        if self.collects_whole and num_steps == rollout.num_steps:
            taken = 0 if stop() else self._collect_whole(rollout)
        else:
            taken = self._collect_steps(rollout, num_steps, stop)
        self._steps += taken
        if rollout.position == rollout.num_steps:
            rollout.is_finite = self.read(rollout.finite_flag())
        return Collected(taken, taken * self.info.num_envs, (), self.policy_version)

    def _seed_at(self, steps: int) -> int:
        """Return the seed of episodes that begin after so many steps."""
        if not steps:
            return stream_seed(self._seed, "environment")
        return stream_seed(self._seed, "resumed environment", steps)

    def _collect_steps(self, rollout: DeviceRollout, num_steps: int, stop: StopRequest) -> int:
        add = rollout.add if self._timed is None else self._timed("storing", rollout.add)
        for taken in range(num_steps):
            if stop():
                return taken
            action, record, step = self._taken(self._noise.take(self.info.num_envs))
            add(self._current, action, record, step)
            self._show(step)
        return num_steps

    def _collect_into_replay(self, replay: DeviceReplay, num_steps: int, stop: StopRequest) -> int:
        self._replay = replay
        taken = 0
        while taken < num_steps and not stop():
            self._one(self._noise.take(self.info.num_envs))
            replay.advance()
            taken += 1
        del self._replay  # so that it is freed with the trainer
        return taken

    def _one_step(self, noise: Tensor) -> None:
        """Step the environments in place, up to what the replay does on the host."""
        write = self._replay.write
        action, _, step = self._taken(noise)
        store = write if self._timed is None else self._timed("storing", write)
        store(self._current, action, step)
        self._show(step)

    def _collect_whole(self, rollout: DeviceRollout) -> int:
        noise = self._noise.take_block(self.info.num_envs)
        self._rollout = rollout
        self._whole(noise)
        rollout.recorded = self._recorded
        rollout.position = rollout.num_steps
        return rollout.num_steps

    def _whole_rollout(self, noise: Tensor) -> None:
        """Collect a rollout in place; the buffer's memory is the same in every call."""
        for t in range(self._rollout.num_steps):
            action, record, step = self._taken(noise[t])
            self._rollout.write(t, self._current, action, record, step)
            self._show(step)
            self._recorded = frozenset(record)

    def _taken(self, noise: Tensor) -> tuple[Tensor, dict[str, Any], DeviceStep]:
        """Choose actions, step the environments and add up; return what a buffer stores."""
        action, record = self._choose(self._current, noise)
        step = self._step(self._to_env(action))
        if step.final_obs is None:
            self._warn_of_missing_finals()
        self._add_up(step)
        return action, record, step

    def _show(self, step: DeviceStep) -> None:
        """Choose the next actions for the observations after a step."""
        tree_map(lambda mine, new: mine.copy_(new), self._current, step.obs)

    def _add_up(self, step: DeviceStep) -> None:
        ended = step.terminated | step.truncated
        self._returns += step.reward
        self._lengths += 1
        numbers = torch.stack((torch.ones_like(self._returns), self._returns, self._lengths))
        self._sums += torch.where(ended, numbers, 0.0).sum(1, dtype=torch.float64)
        self._returns.masked_fill_(ended, 0.0)
        self._lengths.masked_fill_(ended, 0.0)

    def read(self, flag: Tensor) -> bool:
        """Read the sums of episodes; return what a flag on the device is. One transfer."""
        first = flag.to(self._sums.dtype).unsqueeze(0)
        value, count, returns, lengths = torch.cat((first, self._sums)).tolist()
        self._sums.zero_()
        if count:
            self.recent.append((int(count), returns, lengths))
        known = sum(one[0] for one in self.recent)
        while self.recent and known - self.recent[0][0] >= WINDOW:
            known -= self.recent.popleft()[0]
        return bool(value)

    def _warn_of_missing_finals(self) -> None:
        if not self._warned:
            self._warned = True
            name = getattr(self.env, "name", type(self.env).__name__)
            warnings.warn(
                f"approximate truncation: {name} returns no final observations, so truncated"
                " episodes bootstrap from the value of the observation before the last step",
                stacklevel=2,
            )

    def end_rollout(self) -> None:
        """Raise an error: rewards are not normalised here."""
        raise NotImplementedError

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """Record the version; the learner's own weights act."""
        del module
        self.policy_version = version

    def metrics(self) -> dict[str, float]:
        """Return the means over the last hundred training episodes or somewhat more."""
        if not self.recent:
            return {}
        count, returns, lengths = (float(sum(one)) for one in zip(*self.recent, strict=True))
        return {
            "rollout/return_mean": returns / count,
            "rollout/length_mean": lengths / count,
        }

    def measure(self, timed: Timed) -> None:
        """Call the parts through ``timed`` from now on."""
        self._timed = timed
        self._choose = timed("inference", self._actor)
        self._step = timed("environment", self.env.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, noise and episode statistics."""
        begun = self._current is not None
        return {
            "actor": self._noise.state_dict(),
            "obs": self._current,
            "steps": self._steps,
            "env": self.env.state_dict() if begun and self.exactly_resumable else None,  # type: ignore[attr-defined]
            "sums": self._sums,
            "returns": self._returns,
            "lengths": self._lengths,
            "recent": [list(one) for one in self.recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; False where new episodes begin, because the environments have none."""
        self._noise.load_state_dict(state["actor"])
        self._steps = int(state["steps"])
        self._sums.copy_(state["sums"])
        self.recent.clear()
        self.recent.extend((int(n), float(r), float(length)) for n, r, length in state["recent"])
        if state["obs"] is None:
            return True
        if state["env"] is None or not self.exactly_resumable:
            self._current = tree_map(torch.clone, self.env.reset(self._seed_at(self._steps)))
            self._returns.zero_()
            self._lengths.zero_()
            return False
        self._current = tree_map(torch.clone, self.env.reset(0))
        self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
        tree_map(lambda mine, saved: mine.copy_(saved), self._current, state["obs"])
        self._returns.copy_(state["returns"])
        self._lengths.copy_(state["lengths"])
        return True

    def end_of(self, state: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
        """Return the last observations and the noise's state in a saved state."""
        return None if state["obs"] is None else (state["obs"], state["actor"])

    def close(self) -> None:
        """Close the environments."""
        if (close := getattr(self.env, "close", None)) is not None:
            close()


class _EnvActions:
    """`ActionSpec.to_env` for tensors."""

    def __init__(self, spec: ActionSpec, device: torch.device) -> None:
        def tensor(values: Array) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float32, device=device)

        self._bounds = [tensor(one) for one in spec.affine] if spec.kind == "box" else None
        self._start: Tensor | None = None
        if spec.kind != "box" and any(spec.start):
            start = np.asarray(spec.start, np.int64).reshape(spec.shape)
            self._start = torch.as_tensor(start, device=device)

    def __call__(self, action: Tensor) -> Tensor:
        """Return actions in the environment's format."""
        if self._bounds is not None:
            low, high, center, half = self._bounds
            return torch.clamp(center + half * action, low, high)
        return action if self._start is None else action + self._start
