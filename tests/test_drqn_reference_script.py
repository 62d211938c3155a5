"""The DRQN script stands alone, runs, keeps the same sequences and takes the package's steps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from reference_runs import load_script, printed_twice
from rl_training.algorithms.drqn import DRQN, DRQNConfig
from rl_training.data.recurrent_replay_buffer import RecurrentReplayBuffer
from rl_training.envs import VectorAdapter
from rl_training.envs.wrappers import HideVelocities
from rl_training.models.recurrent.lstm_q_network import LSTMQNetwork
from rl_training.runtime.collector import Collector
from rl_training.runtime.recurrent_actors import RecurrentEpsilonGreedyActor
from rl_training.types import Progress, VectorStep
from test_recurrent_ppo_reference_script import TwoReasons
from test_reference_script import ALLOWED, imported_packages, linears

SCRIPT = Path(__file__).parent.parent / "examples" / "drqn_cartpole_reference.py"
NUM_ENVS, LENGTH, BATCH, WIDTH, SIZE = 3, 5, 16, 24, 16
BURN_IN = 2
SWITCH = {False: "--no-double", True: "--double"}
GAMMA = 0.9375
"""The replay keeps discounts as 32-bit floats; this one is the same in 64 bits."""


def load() -> Any:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def script() -> Any:
    return load()


def test_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library() -> None:
    packages = imported_packages(SCRIPT.read_text())
    assert {"torch", "gymnasium"} <= packages
    assert packages <= ALLOWED
    assert "rl_training" not in SCRIPT.read_text()


def test_runs_alone_and_reports_returns_and_an_evaluation(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "400", "--seed", "3"]
    flags += ["--learning-starts", "200", "--batch-size", "8", "--lstm-size", "16"]
    flags += ["--report-interval", "150", "--eval-episodes", "2"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["152", "300", "400"]
    assert all("return" in line for line in lines[:-1])
    assert "loss" in lines[-2]
    assert lines[-1].startswith("evaluation:")


def test_refuses_a_replay_too_small_for_its_sequences(script: Any) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(["--buffer-size", "127"])


def short_cartpole() -> gym.Env[Any, Any]:
    """A time limit about as long as a first episode, and no multiple of a sequence's length."""
    return HideVelocities(TwoReasons(gym.make("CartPole-v1", max_episode_steps=13)))


def first_key(obs: Tensor) -> bytes:
    """Names a sequence: no two begin with the same observation."""
    return obs.float().numpy().tobytes()


class Twins:
    """The script's network and replay, and the package's, with a collector that fills both."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        capacity: int = 3000,
        states_by_script: bool = False,
        **knobs: Any,
    ) -> None:
        self.script = load()
        shared = {"gamma": GAMMA, "learning_rate": 3e-3, "batch_size": BATCH, **knobs}
        shared |= {"lstm_size": SIZE, "sequence_length": LENGTH, "burn_in": BURN_IN}
        double = shared.pop("double", False)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in shared.items()]
        flags += ["--hidden-sizes", str(WIDTH), SWITCH[double]]
        self.args = self.script.parse_args(flags)
        if (interval := shared.pop("target_update_interval", None)) is not None:
            shared["target_update_interval_steps"] = interval
        shared["batch_sequences"] = shared.pop("batch_size")
        config = DRQNConfig(**shared, hidden_sizes=(WIDTH,), double=double)

        torch.manual_seed(0)
        online, _ = self.script.make_networks(self.args)
        with torch.no_grad():  # so that memory and the corners of the loss matter at once
            linears(online.encoder)[0].weight *= 10
            online.values.weight *= 10
        online.to(dtype)
        self.networks = self.script.Networks(online, copy.deepcopy(online))
        with torch.no_grad():  # so that the two disagree about the best action
            self.networks.target.values.weight.copy_(online.values.weight.flip(0))
        self.optimizer = self.script.make_optimizer(self.networks, self.args)

        envs = SyncVectorEnv([short_cartpole] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        self.env = VectorAdapter(envs, seed=11)
        specs = self.env.obs_spec, self.env.action_spec
        self.model = LSTMQNetwork(
            *specs, hidden_sizes=(WIDTH,), activation="relu", lstm_size=SIZE
        ).to(dtype)
        for ours, theirs in paired(online, self.model).values():
            theirs.copy_(ours)
        self.drqn = DRQN(self.model, config, generator=torch.Generator().manual_seed(7))
        for ours, theirs in paired(self.networks.target, self.drqn.target.module).values():
            theirs.copy_(ours)

        self.replay = RecurrentReplayBuffer(
            capacity,
            NUM_ENVS,
            *specs,
            sequence_length=LENGTH,
            state_size=self.model.state_size,
            burn_in=BURN_IN,
            gamma=GAMMA,
        )
        self.script_replay = self.script.Replay(capacity, NUM_ENVS, LENGTH)
        self.states_by_script = states_by_script
        self._state = online.no_memory(NUM_ENVS)
        self.terminated = self.truncated = 0
        noise = torch.Generator().manual_seed(6)
        policy: Any = self.model
        actor = RecurrentEpsilonGreedyActor(policy, lambda _: 0.6, noise, torch.device("cpu"))
        self.collector = Collector(self.env, actor, self)

    def collect(self, steps: int) -> None:
        self.collector.collect(steps, Progress(0, 1))

    @torch.no_grad()
    def add(self, obs: Any, action: Any, record: Mapping[str, Any], step: VectorStep) -> None:
        """Tell both replays what happened: this is the collector's buffer."""
        self.replay.add(obs, action, record, step)
        states = torch.as_tensor(record["state"]).float().view(NUM_ENVS, 2, SIZE)
        ended = torch.as_tensor(step.terminated | step.truncated)
        if self.states_by_script:
            states = self._state
            _, after = self.networks.online(torch.as_tensor(obs), states)
            self._state = torch.where(ended[:, None, None], 0.0, after)
        final: Any = step.final_obs
        for env in range(NUM_ENVS):
            self.script_replay.add(
                env,
                state=states[env].clone(),
                obs=obs[env].copy(),
                action=int(action[env]),
                reward=float(step.reward[env]),
                next_obs=final[env].copy(),
                terminated=bool(step.terminated[env]),
                truncated=bool(step.truncated[env]),
            )
        self.terminated += int(step.terminated.sum())
        self.truncated += int((step.truncated & ~step.terminated).sum())

    def by_first_obs(self) -> dict[bytes, Any]:
        sequences = self.script_replay.sequences()
        found = {first_key(sequence.obs[0]): sequence for sequence in sequences}
        assert len(found) == len(sequences)
        return found


Pairs = dict[str, tuple[Tensor, Tensor]]


def paired(ours: Any, theirs: LSTMQNetwork, name: str = "online") -> Pairs:
    layers: list[tuple[str, Any, Any]] = [("values", ours.values, theirs.values)]
    for i, (a, b) in enumerate(zip(linears(ours.encoder), linears(theirs.trunk), strict=True)):
        layers.append((f"encoder{i}", a, b))
    pairs: Pairs = {}
    for place, a, b in layers:
        for kind in ("weight", "bias"):
            pairs[f"{name}.{place}.{kind}"] = getattr(a, kind).detach(), getattr(b, kind).detach()
    for side, layer in (("ih", ours.seen), ("hh", ours.said)):
        for kind in ("weight", "bias"):
            parameter = getattr(theirs.lstm.layer, f"{kind}_{side}_l0")
            pairs[f"{name}.lstm.{kind}_{side}"] = getattr(layer, kind).detach(), parameter.detach()
    assert len(pairs) == len(list(ours.parameters())) == len(list(theirs.parameters()))
    return pairs


def check_same(sample: dict[str, Any], column: int, sequence: Any, tolerance: float) -> None:
    """A column of what the package drew is a sequence of the script's, and padding."""
    count = len(sequence)
    unlearnt = 0 if sequence.begins_episode else min(BURN_IN, count)
    counted = [0.0] * unlearnt + [1.0] * (count - unlearnt) + [0.0] * (LENGTH - count)
    assert sample["mask"][:, column].tolist() == counted
    assert bool(sample["episode_starts"][0, column]) == sequence.begins_episode
    obs = torch.stack(sequence.obs)
    assert torch.equal(sample["obs"][: count + 1, column], obs)
    assert sample["actions"][:count, column].tolist() == sequence.actions
    assert sample["rewards"][:count, column].tolist() == sequence.rewards
    discounts = [GAMMA] * (count - 1) + [0.0 if sequence.terminated else GAMMA]
    assert sample["discounts"][:count, column].tolist() == discounts
    error = (sample["state"][column] - sequence.state.flatten()).abs().max()
    assert error <= tolerance


def test_script_and_package_keep_the_same_sequences() -> None:
    """At several moments, in the midst of sequences and after the oldest made room.

    States are what each side's network remembered, in its own arithmetic.
    """
    twins = Twins(capacity=NUM_ENVS * 60, states_by_script=True)
    draws = torch.Generator().manual_seed(3)
    remembering = shorter = 0
    for steps in (1, 3, 13, 31, 17, 24, 40, *[1] * 20):
        twins.collect(steps)
        kept = twins.by_first_obs()
        sample = twins.replay.sample(2000, draws)
        drawn = {first_key(sample["obs"][0, column]): column for column in range(2000)}
        assert drawn.keys() == {
            key for key, one in kept.items() if len(one) > one.unlearnt(BURN_IN)
        }
        for key, column in drawn.items():
            check_same(sample, column, kept[key], tolerance=1e-5)
        remembering += sum(bool(sequence.state.any()) for sequence in kept.values())
        shorter += sum(len(sequence) < LENGTH for sequence in kept.values())
    twins.env.close()
    assert remembering >= 50
    assert shorter >= 50
    assert twins.terminated >= 10
    assert twins.truncated >= 10


def test_both_draw_all_sequences_that_have_a_learnt_step_equally_often() -> None:
    twins = Twins(capacity=NUM_ENVS * 60)
    twins.collect(133)
    twins.env.close()
    kept = twins.by_first_obs()
    learnt = {key for key, one in kept.items() if len(one) > one.unlearnt(BURN_IN)}
    assert len(learnt) < len(kept)
    assert len({len(kept[key]) for key in learnt}) == LENGTH
    count = 20_000
    expected = count / len(learnt)
    theirs = twins.replay.sample(count, torch.Generator().manual_seed(3))["obs"][0]
    torch.manual_seed(3)
    ours = [sequence.obs[0] for sequence in twins.script_replay.sample(count, BURN_IN)]
    for drawn in (theirs, ours):
        times = Counter(first_key(obs) for obs in drawn)
        assert times.keys() == learnt
        assert max(abs(number - expected) for number in times.values()) <= 5 * expected**0.5


class InPrecision:
    """A replay whose floats come in another precision."""

    def __init__(self, replay: RecurrentReplayBuffer, dtype: torch.dtype) -> None:
        self.replay, self.dtype = replay, dtype

    def sample(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        sample = self.replay.sample(*args, **kwargs)
        return {
            name: leaf.to(self.dtype)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
            else leaf
            for name, leaf in sample.items()
        }


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
def test_script_and_package_take_the_same_steps(
    dtype: torch.dtype, tolerance: float, double: bool
) -> None:
    """Three phases of collecting and learning; the target is copied after the second."""
    interval, steps, updates = 150, 32, 3
    norm = 1.0 if double else 10.0  # one that clips, and one that does not
    twins = Twins(dtype, double=double, target_update_interval=interval, max_grad_norm=norm)
    networks, drqn = twins.networks, twins.drqn

    def pairs() -> Pairs:
        online = paired(networks.online, twins.model)
        return {**online, **paired(networks.target, drqn.target.module, "target")}

    start = {name: ours.clone() for name, (ours, _) in pairs().items()}
    draws = torch.Generator().manual_seed(7)
    replay: Any = InPrecision(twins.replay, dtype)
    for phase in range(1, 4):
        twins.collect(steps)
        kept = twins.by_first_obs()
        losses = []
        for _ in range(updates):
            sample = twins.replay.sample(BATCH, draws)
            chosen = [kept[first_key(obs)] for obs in sample["obs"][0]]
            assert len({len(sequence) for sequence in chosen}) > 1
            losses.append(script_losses(twins, chosen))
        before, after = ((number * steps * NUM_ENVS) // interval for number in (phase - 1, phase))
        assert (after > before) == (phase == 2)
        if after > before:
            twins.script.copy_target(networks)

        drqn.learn(replay, Progress(phase * steps * NUM_ENVS, 1000), updates=updates)
        metrics = drqn.pop_metrics()
        for name, values in zip(("loss", "q_mean"), zip(*losses, strict=True), strict=True):
            mean = sum(values) / updates
            assert metrics[f"losses/{name}"] == pytest.approx(mean, abs=10 * tolerance), name
    twins.env.close()

    assert twins.terminated >= 5
    assert twins.truncated >= 5
    for name, (ours, theirs) in pairs().items():
        assert (ours - start[name]).abs().max() > 1e-3, name
        worst = float((theirs - ours).abs().max())
        assert worst <= tolerance, f"{name}: {worst}"


def script_losses(twins: Twins, sequences: list[Any]) -> tuple[float, float]:
    losses = twins.script.drqn_update(twins.networks, twins.optimizer, sequences, twins.args)
    return float(losses["loss"]), float(losses["q_mean"])


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # Targets are 1 + 0.5 * 4, 1 after the fall, and 1 + 0.5 * 4 at the time limit: TD errors
        # of 3, 1 and 3, in two sequences of at most 16 steps.
        (False, (9 + 1 + 9) / (2 * 2 * 16)),
        # The network prefers the first action, worth 3: errors of 2.5, 1 and 2.5.
        (True, (6.25 + 1 + 6.25) / (2 * 2 * 16)),
    ],
)
def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(
    script: Any, double: bool, expected: float
) -> None:
    args = script.parse_args(["--gamma", "0.5", SWITCH[double]])
    networks = script.make_networks(args)
    for network, outputs in zip(networks, ((1.0, 0.0), (3.0, 4.0)), strict=True):
        with torch.no_grad():
            network.values.weight.zero_()
            network.values.bias.copy_(torch.tensor(outputs))
    replay = script.Replay(100, 2, 16)
    step = {"obs": torch.zeros(2), "next_obs": torch.zeros(2), "action": 1, "reward": 1.0}
    step["state"] = networks.online.no_memory(1)[0]
    replay.add(0, **step, terminated=False, truncated=False)
    replay.add(0, **step, terminated=True, truncated=True)
    replay.add(1, **step, terminated=False, truncated=True)
    optimizer = script.make_optimizer(networks, args)
    losses = script.drqn_update(networks, optimizer, replay.sequences(), args)
    assert float(losses["loss"]) == pytest.approx(expected)
    assert float(losses["q_mean"]) == 0.0


def test_script_collects_the_states_that_sequences_begin_in(script: Any) -> None:
    torch.manual_seed(0)
    network = script.make_networks(script.parse_args([])).online
    replay = script.Replay(10_000, 2, LENGTH)
    envs = [short_cartpole() for _ in range(2)]
    collector = script.Collector(envs, network, replay, seed=0)
    for _ in range(200):
        collector.step(0.5)
    for env in envs:
        env.close()
    going_on = anew = 0
    for sequences in replay.kept:
        assert sum(map(len, sequences)) == 200
        expected = network.no_memory(1)[0]
        for sequence in sequences:
            torch.testing.assert_close(sequence.state, expected)
            expected, last = after(network, sequence), sequence.obs[-1]
            following = next_after(sequences, sequence)
            if following is None:
                continue
            if torch.equal(following.obs[0], last):
                assert len(sequence) <= LENGTH
                going_on += 1
            else:
                expected = torch.zeros_like(expected)
                assert (following.obs[0].abs() <= 0.05).all(), "a reset CartPole"
                assert not sequence.terminated or last[1].abs() > 0.2, "a CartPole falls at 0.2095"
                anew += 1
    assert len(collector.returns) == 20
    assert going_on >= 20
    assert anew >= 20


@torch.no_grad()
def after(network: Any, sequence: Any) -> Tensor:
    state = sequence.state.unsqueeze(0)
    for obs in sequence.obs[:-1]:
        _, state = network(obs.unsqueeze(0), state)
    last: Tensor = state[0]
    return last


def next_after(sequences: Any, sequence: Any) -> Any:
    place = next(i for i, one in enumerate(sequences) if one is sequence)
    return sequences[place + 1] if place + 1 < len(sequences) else None


def test_script_explores_as_the_package_does(script: Any) -> None:
    args = script.parse_args(["--total-timesteps", "1000"])
    names = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")
    config = DRQNConfig(**{name: getattr(args, name) for name in names})
    for step in (0, 40, 100, 200, 999):
        expected = config.epsilon(Progress(step, 1000))
        assert script.epsilon(step, args) == pytest.approx(expected)
