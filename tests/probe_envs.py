"""Environments small enough to reason about, registered as ``probe/NAME-v0``."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Probe(gym.Env[Any, Any]):
    """Base: a one-number observation, two actions, or one number whose sign is the action."""

    observation_space: gym.Space[Any] = spaces.Box(-2.0, 2.0, (1,), np.float32)
    action_space: gym.Space[Any] = spaces.Discrete(2)

    def __init__(self, continuous: bool = False) -> None:
        if continuous:
            self.action_space = spaces.Box(-3.0, 3.0, (1,), np.float32)

    def choice(self, action: Any) -> int:
        return int(action[0] > 0) if isinstance(self.action_space, spaces.Box) else int(action)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.zeros(1, np.float32)


class ConstantReward(Probe):
    """One step, always reward 1: the value must become 1."""

    def step(self, action: Any) -> Step:
        return self.observe(), 1.0, True, False, {}


class ObservationReward(Probe):
    """One step; the observation is -1 or 1 and is the reward: the value must follow it."""

    def observe(self) -> Any:
        self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.sign], np.float32)

    def step(self, action: Any) -> Step:
        reward = self.sign
        return np.zeros(1, np.float32), reward, True, False, {}


class MatchObservation(Probe):
    """One step; reward 1 for the action that the observation's sign tells, else -1."""

    def observe(self) -> Any:
        self.sign = int(self.np_random.integers(2))
        return np.array([2.0 * self.sign - 1.0], np.float32)

    def step(self, action: Any) -> Step:
        reward = 1.0 if self.choice(action) == self.sign else -1.0
        return np.zeros(1, np.float32), reward, True, False, {}


class Camera(MatchObservation):
    """`MatchObservation` with an image, which is black or white."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def observe(self) -> Any:
        super().observe()
        return np.full((36, 36, 1), 255 * self.sign, np.uint8)

    def step(self, action: Any) -> Step:
        _, reward, *_ = super().step(action)
        return np.zeros((36, 36, 1), np.uint8), reward, True, False, {}


class DelayedReward(Probe):
    """Two steps; the reward comes at the second: the first value must be discounted."""

    def observe(self) -> Any:
        return np.array([float(self.t)], np.float32)

    def step(self, action: Any) -> Step:
        self.t += 1
        done = self.t == 2
        return self.observe(), float(done), done, False, {}


class MaskedActions(Probe):
    """Four actions of which the mask allows two; only one of those pays, an illegal one raises."""

    observation_space = spaces.Dict(
        {
            "sign": spaces.Box(-1.0, 1.0, (1,), np.float32),
            "action_mask": spaces.Box(0, 1, (4,), np.int8),
        }
    )
    action_space = spaces.Discrete(4)

    def observe(self) -> Any:
        self.sign = int(self.np_random.integers(2))
        self.mask = np.array([1, 1, 0, 0] if self.sign else [0, 0, 1, 1], np.int8)
        return {"sign": np.array([2.0 * self.sign - 1.0], np.float32), "action_mask": self.mask}

    def step(self, action: Any) -> Step:
        if not self.mask[int(action)]:
            raise ValueError(f"illegal action {action} under {self.mask}")
        reward = 1.0 if int(action) in (0, 3) else 0.0
        return self.observe(), reward, True, False, {}


class Rooms(Probe):
    """Six steps, in each of which some doors are locked: a locked one ends the episode with -1.

    ``nvec``: doors of each component; more than one is MultiDiscrete. The locked doors that were
    tried are in ``TRIED``.
    """

    LENGTH = 6
    TRIED: ClassVar[list[Any]] = []

    def __init__(self, nvec: tuple[int, ...] = (5,), image: bool = False) -> None:
        self.nvec = nvec
        self.action_space = spaces.Discrete(nvec[0])
        if len(nvec) > 1:
            self.action_space = spaces.MultiDiscrete(list(nvec))
        entries: dict[str, gym.Space[Any]] = {"place": spaces.Box(-1.0, 1.0, (1,), np.float32)}
        if image:
            entries["camera"] = spaces.Box(0, 255, (1, 36, 36), np.uint8)
        entries["action_mask"] = spaces.MultiBinary(sum(nvec))
        self.observation_space = spaces.Dict(entries)

    def observe(self) -> Any:
        self.masks = [self.np_random.random(doors) < 0.3 for doors in self.nvec]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = True
        obs = {"place": self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)}
        if "camera" in self.observation_space.spaces:  # type: ignore[attr-defined]
            obs["camera"] = self.np_random.integers(0, 256, (1, 36, 36), np.uint8)
        return {**obs, "action_mask": np.concatenate(self.masks).astype(np.int8)}

    def step(self, action: Any) -> Step:
        self.t += 1
        doors = zip(self.masks, np.atleast_1d(action), strict=True)
        if not all(mask[door] for mask, door in doors):
            self.TRIED.append(action)
            return self.observe(), -1.0, True, False, {}
        return self.observe(), 0.0, self.t == self.LENGTH, False, {}


class Aim(Probe):
    """One step: a side that follows the observation, a force of an odd scale, and two switches.

    The action is a Dict with a Tuple inside. Of three sides the mask, if there is one, forbids
    the middle one; the switches must be on and off.
    """

    action_space = spaces.Dict(
        {
            "side": spaces.Discrete(3, start=1),
            "force": spaces.Box(-20.0, 60.0, (1,), np.float64),
            "more": spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(1))),
        }
    )

    def __init__(self, masks: bool = False) -> None:
        self.masks = masks
        self.mask = np.array([1, 1, 1, 1, 1, 0, 1], np.int8)  # keys are sorted: sides are last
        if masks:
            self.observation_space = spaces.Dict(
                {"sign": Probe.observation_space, "action_mask": spaces.MultiBinary(7)}
            )

    def observe(self) -> Any:
        self.sign = int(self.np_random.integers(2))
        seen = np.array([2.0 * self.sign - 1.0], np.float32)
        return {"sign": seen, "action_mask": self.mask} if self.masks else seen

    def step(self, action: Any) -> Step:
        assert self.action_space.contains(action), action
        assert not self.masks or action["side"] != 2
        reward = 1.0 if action["side"] == 1 + 2 * self.sign else 0.0
        reward -= ((float(action["force"][0]) - 20.0) / 20.0 - 0.5 * self.sign) ** 2
        (first, second), (on,) = action["more"]
        reward -= float(first != 1) + float(second != 0) + float(on != 1)
        return self.observe(), float(reward), True, False, {}


class ReachTarget(Probe):
    """One step with a Box action of an odd scale; the reward is minus the squared error."""

    action_space = spaces.Box(-20.0, 60.0, (1,), np.float32)

    def observe(self) -> Any:
        self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.sign], np.float32)

    def step(self, action: Any) -> Step:
        target = 20.0 + 20.0 * self.sign
        reward = -float(((float(action[0]) - target) / 20.0) ** 2)
        return np.zeros(1, np.float32), reward, True, False, {}


class Recall(Probe):
    """A passive corridor: the first observation is -1 or 1, the next are 0, and the last action,
    after ``delay`` others, must repeat its sign."""

    def __init__(self, continuous: bool = False, delay: int = 4) -> None:
        super().__init__(continuous)
        self.delay = delay

    def observe(self) -> Any:
        if self.t:
            return np.zeros(1, np.float32)
        self.sign = int(self.np_random.integers(2))
        return np.array([2.0 * self.sign - 1.0], np.float32)

    def step(self, action: Any) -> Step:
        self.t += 1
        done = self.t > self.delay
        right = self.choice(action) == self.sign
        return self.observe(), (1.0 if right else -1.0) * done, done, False, {}


class Broken(Probe):
    """Raises, hangs or emits a NaN at step ``at``."""

    def __init__(self, how: str = "raise", at: int = 10) -> None:
        super().__init__()
        self.how = how
        self.at = at
        self.count = 0

    def step(self, action: Any) -> Step:
        self.count += 1
        if self.count == self.at:
            if self.how == "raise":
                raise RuntimeError("the pole fell on my foot")
            if self.how == "hang":
                import time

                time.sleep(3600)
            if self.how == "nan":
                return np.array([np.nan], np.float32), 0.0, False, False, {}
            if self.how == "nan_reward":
                return self.observe(), float("nan"), False, False, {}
        self.t += 1
        return self.observe(), 0.0, self.t == 5, False, {}


class Faulty(Probe):
    """Does something wrong in step ``at`` of its life; 0: in its first reset.

    ``form``: ``vector``, ``dict`` or ``board`` (of integers). Episodes end after ``length`` steps.
    """

    def __init__(
        self,
        fault: str = "",
        at: int = 3,
        form: str = "vector",
        length: int = 10**9,
        continuous: bool = False,
    ) -> None:
        super().__init__(continuous)
        self.fault, self.at, self.form, self.length = fault, at, form, length
        self.count = 0
        box = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.observation_space = {
            "vector": box,
            "dict": spaces.Dict({"speed": box, "place": spaces.Box(-1.0, 1.0, (1,), np.float32)}),
            "board": spaces.Box(0, 9, (3,), np.int8),
        }[form]
        if fault == "constructor":
            raise KeyError("no licence left for the simulator")
        if fault == "constructor exits":
            sys.exit(0)
        assert fault != "constructor asserts"

    def observe(self) -> Any:
        if self.form == "dict":
            return {"speed": np.ones(3, np.float32), "place": np.zeros(1, np.float32)}
        return np.ones(3, self.observation_space.dtype)

    def spoilt(self, value: float) -> Any:
        obs = self.observe()
        leaf = obs["speed"] if self.form == "dict" else obs
        leaf[1] = value
        return obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed)
        if self.at == 0 and self.count == 0:
            return self.wrong((obs, info), obs)
        return obs, info

    def step(self, action: Any) -> Step:
        self.t += 1
        self.count += 1
        obs, ended = self.observe(), self.t == self.length
        result: Step = (obs, 1.0, ended, False, {})
        return self.wrong(result, obs) if self.count == self.at else result

    def wrong(self, result: Any, obs: Any) -> Any:
        """What is returned instead of ``result``, if anything is."""
        fault = self.fault
        if fault == "raises":
            raise RuntimeError("the pole fell on my foot")
        if fault == "exits":
            sys.exit(0)
        if fault == "asserts":
            assert self.t < 0
        instead = {
            "four values": result[:4],
            "nothing": None,
            "observation alone": obs,
            "reward none": (obs, None, False, False, {}),
            "reward text": (obs, "1.0", False, False, {}),
            "reward vector": (obs, np.ones(2), False, False, {}),
            "done text": (obs, 1.0, "no", False, {}),
            "done none": (obs, 1.0, False, None, {}),
            "info none": (obs, 1.0, False, False, None),
            "shape": (np.ones(1, np.float32), *result[1:]),
            "shape of none": (None, *result[1:]),
            "text": (np.array(["a", "b", "c"]), *result[1:]),
            "fraction": (np.array([1.0, 0.5, 2.0]), *result[1:]),
            "missing key": ({"speed": np.ones(3, np.float32)}, *result[1:]),
            "key's shape": (
                {**obs, "speed": np.ones(1)} if isinstance(obs, dict) else 0,
                *result[1:],
            ),
            "nan": (self.spoilt(np.nan) if self.form != "board" else obs, *result[1:]),
            "inf": (self.spoilt(np.inf) if self.form != "board" else obs, *result[1:]),
            "nan reward": (obs, np.nan, False, False, {}),
            "nan final": (
                self.spoilt(np.nan) if self.form != "board" else obs,
                1.0,
                False,
                True,
                {},
            ),
            "odd but right": ([1, 1, 1], np.array([1.0]), np.array([False]), np.int64(0), {}),
        }
        return instead.get(fault, result)


for _name in (
    "ConstantReward",
    "ObservationReward",
    "MatchObservation",
    "Camera",
    "DelayedReward",
    "MaskedActions",
    "Rooms",
    "Aim",
    "ReachTarget",
    "Recall",
    "Broken",
    "Faulty",
):
    gym.register(f"probe/{_name}-v0", f"probe_envs:{_name}")
