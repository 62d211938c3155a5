"""The Atari scripts stand alone, run, see what the package sees and take the very steps it takes.

The package's NatureCNN computes in float32 whatever its weights are. To compare in float64 as well,
where agreement says most, `InDouble` makes its conversions go to float64 instead: the code that
runs is the package's own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reference_runs import load_script, printed_twice
from rl_training.algorithms.dqn import DQN, DQNConfig
from rl_training.algorithms.ppo import PPO, PPOConfig
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs import make_env
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.seeding import stream_seed
from rl_training.types import ActionSpec, Array, ArraySpec, ObsSpec, Progress, VectorStep
from test_reference_script import ALLOWED, imported_packages

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {algo: EXAMPLES / f"{algo}_breakout_atari_reference.py" for algo in ("ppo", "dqn")}
STACK = (4, 84, 84)
SCREENS = ObsSpec({"": ArraySpec(STACK, "uint8")})
JOYSTICK = ActionSpec("discrete", (), "int64", nvec=(4,))

scripts = pytest.mark.parametrize("algo", SCRIPTS)


def load(algo: str) -> Any:
    return load_script(SCRIPTS[algo])


# -- alone ---------------------------------------------------------------------------------------


@scripts
def test_imports_nothing_but_torch_gymnasium_ale_numpy_and_the_standard_library(algo: str) -> None:
    packages = imported_packages(SCRIPTS[algo].read_text())
    assert {"torch", "gymnasium", "ale_py"} <= packages
    assert packages <= ALLOWED | {"ale_py"}


@scripts
def test_never_names_the_package(algo: str) -> None:
    assert "rl_training" not in SCRIPTS[algo].read_text()


@pytest.mark.parametrize(
    ("algo", "knobs", "reported"),
    [
        ("ppo", "--num-envs 2 --num-steps 48 --update-epochs 1", ["192"]),  # no game ends at first
        ("dqn", "--learning-starts 150 --report-interval 80", ["80", "160", "192"]),
    ],
)
def test_runs_alone_and_reports_scores_and_an_evaluation(
    tmp_path: Path, algo: str, knobs: str, reported: list[str]
) -> None:
    """Games are cut short after 60 steps, so that some end."""
    flags = ["--total-timesteps", "192", "--seed", "3"]
    flags += ["--max-frames", "240", "--eval-games", "2", "--device", "cpu", *knobs.split()]
    lines = printed_twice(SCRIPTS[algo], flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == reported
    assert all("score" in line for line in lines[:-1])
    assert "loss" in lines[-2]
    assert lines[-1].startswith("evaluation:")
    assert lines[-1].endswith("over 2 games")


# -- what is seen --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noop_max", "max_frames"), [(0, 108_000), (30, 108_000), (30, 300)], ids=str
)
@scripts
def test_script_and_package_show_the_same_games(algo: str, noop_max: int, max_frames: int) -> None:
    """Bit for bit, over lost lives, games that are over, and games cut short."""
    atari = {"noop_max": noop_max, "sticky_actions": 0.0, "max_frames": max_frames}
    config: TrainConfig[Any] = TrainConfig(
        env_id="ALE/Breakout-v5",
        preprocessing="atari",
        vectorization="sync",
        num_envs=1,
        atari=atari,  # type: ignore[arg-type]
        seed=7,
    )
    theirs = make_env(config)
    ours = load(algo).make_env(noop_max, max_frames)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    seed = stream_seed(7, "environment", 0, 0) >> 32  # of the first game; the rest go on from it
    shown, _ = ours.reset(seed=seed)
    expected, _ = theirs.reset()
    np.testing.assert_array_equal(shown, expected)
    assert shown.shape == STACK
    assert not shown[:3].any()
    assert shown[3].any()

    actions = np.random.default_rng(0)
    seen = dict.fromkeys(("lost", "over", "cut", "points"), 0)
    for _ in range(450):
        action = int(actions.integers(4))
        shown, *ours_told, our_info = ours.step(action)
        expected, *their_told, their_info = theirs.step(action)
        np.testing.assert_array_equal(shown, expected)
        assert ours_told == their_told
        assert our_info.get("score") == their_info.get("game_score")
        reward, terminated, truncated = ours_told
        ended = terminated or truncated
        seen["points"] += reward > 0
        seen["lost"] += terminated
        seen["over"] += terminated and "score" in our_info
        seen["cut"] += truncated
        if ended:
            before = shown
            shown, _ = ours.reset()
            expected, _ = theirs.reset()
            np.testing.assert_array_equal(shown, expected)
            assert np.array_equal(shown, before) == ("score" not in our_info)
    ours.close()
    theirs.close()
    assert seen["points"]
    assert seen["lost"] > seen["over"]
    assert seen["cut" if max_frames == 300 else "over"]


@scripts
def test_script_counts_raw_points_and_tells_their_sign(algo: str) -> None:
    class Points(gym.Env[Any, Any]):
        def __init__(self) -> None:
            self.told = iter([(7.0, 5, False), (0.0, 4, False), (-3.0, 4, False), (4.0, 0, True)])

        def reset(self, **options: Any) -> Any:
            return np.zeros(1), {"lives": 5}

        def step(self, action: Any) -> Any:
            points, lives, over = next(self.told)
            return np.zeros(1), points, over, False, {"lives": lives}

    env = load(algo).LivesAsEpisodes(Points())
    env.reset()
    told = [env.step(0) for _ in range(4)]
    assert [reward for _, reward, *_ in told] == [1.0, 0.0, -1.0, 1.0]
    assert [terminated for _, _, terminated, *_ in told] == [False, True, False, True]
    assert [info.get("score") for *_, info in told] == [None, None, None, 8.0]


# -- games of random pictures, with every kind of end --------------------------------------------


class RandomScreens(gym.Env[Any, Any]):
    """Frames of random squares; lives are lost, games end and are cut short, all by chance."""

    observation_space = gym.spaces.Box(0, 255, STACK, np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.frames = np.zeros(STACK, np.uint8)
        self.goes_on, self.score = False, 0.0

    def _push(self) -> None:
        squares = self.rng.integers(256, size=(7, 7), dtype=np.uint8)
        frame = np.kron(squares, np.ones((1, 12, 12), np.uint8))
        self.frames = np.concatenate((self.frames[1:], frame))

    def reset(self, **options: Any) -> Any:
        if not self.goes_on:
            self.frames, self.score = np.zeros(STACK, np.uint8), 0.0
            self._push()
        self.goes_on = False
        return self.frames.copy(), {}

    def step(self, action: Any) -> Any:
        self._push()
        reward = float(self.rng.integers(-1, 2))
        self.score += reward
        lost, over, cut = self.rng.random(3) < (0.2, 0.1, 0.1)
        self.goes_on = bool(lost and not (over or cut))
        info = {"score": self.score} if over or cut else {}
        return self.frames.copy(), reward, bool(lost or over), bool(cut and not over), info


class Transition(NamedTuple):
    obs: Array
    action: int
    reward: float
    terminated: bool
    truncated: bool
    score: float | None
    final_obs: Array
    next_obs: Array
    """What is seen next; not ``final_obs`` where a new game began."""

    @property
    def cut_short(self) -> bool:
        return self.truncated and not self.terminated


def play(seed: int, actions: Array) -> list[Transition]:
    """What happens in `RandomScreens`, which no action changes."""
    env = RandomScreens(seed)
    obs, _ = env.reset()
    happened = []
    for action in actions.tolist():
        final_obs, reward, terminated, truncated, info = env.step(action)
        next_obs = env.reset()[0] if terminated or truncated else final_obs
        told = (reward, terminated, truncated, info.get("score"))
        happened.append(Transition(obs, action, *told, final_obs, next_obs))
        obs = next_obs
    return happened


class InDouble(TorchFunctionMode):
    """What is converted to float32 is converted to float64 instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if func is Tensor.float:
            func = Tensor.double
        return func(*args, **(kwargs or {}))


def package_precision(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return InDouble() if dtype == torch.float64 else contextlib.nullcontext()


Pairs = dict[str, tuple[Tensor, Tensor]]


def paired(name: str, ours: Any, theirs: Any) -> Pairs:
    return {
        f"{name}.weight": (ours.weight.detach(), theirs.weight.detach()),
        f"{name}.bias": (ours.bias.detach(), theirs.bias.detach()),
    }


def paired_encoders(ours: Any, theirs: Any) -> Pairs:
    """Views of the same order: the package's channels come last, those of torch's layers first."""
    convolutions, linear = [ours[0], ours[2], ours[4]], ours[7]
    nature = theirs.networks["image0"]
    pairs: Pairs = {}
    layers = zip(convolutions, nature.weights, nature.biases, strict=True)
    for i, (layer, weight, bias) in enumerate(layers):
        pairs[f"conv{i}.weight"] = (layer.weight.detach(), weight.detach().permute(0, 3, 1, 2))
        pairs[f"conv{i}.bias"] = (layer.bias.detach(), bias.detach())
    pairs |= paired("linear", linear, nature.linear)
    weights = pairs["linear.weight"]
    pairs["linear.weight"] = (
        weights[0].view(512, 64, 7, 7),
        weights[1].view(512, 7, 7, 64).permute(0, 3, 1, 2),
    )
    return pairs


def copy_parameters(pairs: Pairs) -> None:
    for ours, theirs in pairs.values():
        theirs.copy_(ours)


def check_agreement(pairs: Pairs, start: dict[str, Tensor], tolerance: float) -> None:
    for name, (ours, theirs) in pairs.items():
        assert (ours - start[name]).abs().max() > 2e-5, name
        assert (theirs - ours).abs().max() <= tolerance, name


# -- PPO -----------------------------------------------------------------------------------------

NUM_ENVS, NUM_STEPS, MINIBATCHES, ITERATIONS = 3, 8, 2, 3
ROWS = NUM_ENVS * NUM_STEPS
SIZES = f"--num-envs {NUM_ENVS} --num-steps {NUM_STEPS} --num-minibatches {MINIBATCHES}".split()


def random_games() -> SyncVectorEnv:
    return SyncVectorEnv(
        [functools.partial(RandomScreens, seed) for seed in range(NUM_ENVS)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


def test_ppo_script_records_what_happened() -> None:
    script = load("ppo")
    torch.manual_seed(0)
    agent = script.Agent()
    envs = random_games()
    rollout, scores = script.collect(envs, agent, torch.as_tensor(envs.reset()[0]), 24)
    envs.close()
    rows = [play(env, rollout.actions[:, env].numpy()) for env in range(NUM_ENVS)]
    steps = list(zip(*rows, strict=True))

    def column(name: str) -> Array:
        return np.array([[getattr(one, name) for one in step] for step in steps])

    names = {"obs": "obs", "rewards": "reward", "terminated": "terminated"}
    names["truncated"] = "truncated"
    for ours, theirs in names.items():
        np.testing.assert_array_equal(getattr(rollout, ours).numpy(), column(theirs))
    np.testing.assert_array_equal(rollout.next_obs.numpy(), column("next_obs")[-1])
    cut_short = [one.final_obs for step in steps for one in step if one.cut_short]
    assert len(cut_short) >= 3
    np.testing.assert_array_equal(rollout.final_obs.numpy(), cut_short)
    assert scores == [one.score for step in steps for one in step if one.score is not None]

    assert not any(column.requires_grad for column in rollout)
    with torch.no_grad():
        policy, values = agent(rollout.obs.flatten(0, 1))
    logprobs = policy.log_prob(rollout.actions.flatten())
    torch.testing.assert_close(rollout.values.flatten(), values)
    torch.testing.assert_close(rollout.logprobs.flatten(), logprobs)
    assert len(set(rollout.actions.flatten().tolist())) == 4


def as_package_rollout(rollout: Any, dtype: torch.dtype) -> RolloutBuffer:
    """The script's record, told to the package step by step."""
    buffer = RolloutBuffer(
        NUM_STEPS, NUM_ENVS, STACK, (), obs_dtype=torch.uint8, action_dtype=torch.int64
    )
    final_obs = iter(rollout.final_obs.numpy())
    for t in range(NUM_STEPS):
        obs = rollout.obs[t + 1] if t + 1 < NUM_STEPS else rollout.next_obs
        terminated, truncated = rollout.terminated[t].numpy(), rollout.truncated[t].numpy()
        finals = obs.numpy().copy()
        for env in np.flatnonzero(truncated & ~terminated):
            finals[env] = next(final_obs)
        step = VectorStep(
            obs=obs.numpy(),
            final_obs=finals,
            reward=rollout.rewards[t].numpy(),
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(NUM_ENVS, bool),
            episodes=(),
        )
        buffer.add(rollout.obs[t].numpy(), rollout.actions[t].numpy(), {}, step)
    assert next(final_obs, None) is None
    for name in ("logprobs", "rewards", "dones", "values", "bootstrap", "advantages", "returns"):
        setattr(buffer, name, getattr(buffer, name).to(dtype))
    return buffer


def paired_actor_critics(agent: Any, model: Any) -> Pairs:
    return {
        **paired_encoders(agent.encoder, model.encoder),
        **paired("actor", agent.actor, model.actor.layers[0]),
        **paired("critic", agent.critic, model.critic.layers[0]),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance", "epochs"),
    [(torch.float64, 1e-10, 2), (torch.float32, 1e-5, 1)],
    ids=str,
)
def test_ppo_script_and_package_take_the_same_steps(
    dtype: torch.dtype, tolerance: float, epochs: int
) -> None:
    """Three iterations (12 or 6 gradient steps) from the same start end at the same parameters.

    In float32 an update that a rounding error sends to the other side of a ReLU or of the clip is
    another update: the fewer there are, the surer is agreement.
    """
    script = load("ppo")
    args = script.parse_args([*SIZES, "--update-epochs", str(epochs), "--device", "cpu"])
    shared = ["learning_rate", "num_steps", "num_minibatches", "update_epochs", "gamma"]
    shared += ["gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm"]
    config = PPOConfig(**{name: getattr(args, name) for name in shared})
    torch.manual_seed(0)
    agent = script.Agent()
    with torch.no_grad():
        agent.actor.weight.mul_(100)  # so that ratios leave the clip's range
    agent.to(dtype)
    optimizer = script.make_optimizer(agent, args)
    model = MLPActorCritic(SCREENS, JOYSTICK, hidden_sizes=()).to(dtype)
    copy_parameters(paired_actor_critics(agent, model))
    start = {name: ours.clone() for name, (ours, _) in paired_actor_critics(agent, model).items()}
    ppo = PPO(model, config, generator=torch.Generator().manual_seed(5))
    order = torch.Generator().manual_seed(5)

    envs = random_games()
    obs = torch.as_tensor(envs.reset()[0])
    terminated = truncated = 0
    clipped = []
    for iteration in range(ITERATIONS):
        rollout, _ = script.collect(envs, agent, obs, NUM_STEPS)
        obs = rollout.next_obs
        terminated += int(rollout.terminated.sum())
        truncated += int((rollout.truncated & ~rollout.terminated).sum())
        buffer = as_package_rollout(rollout, dtype)

        batch = script.make_batch(agent, rollout, args)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / ITERATIONS)
        for _ in range(epochs):
            for indices in torch.randperm(ROWS, generator=order).chunk(MINIBATCHES):
                script.ppo_update(agent, optimizer, batch, indices, args)

        with package_precision(dtype):
            ppo.learn(buffer, Progress(iteration * ROWS, ITERATIONS * ROWS))
        clipped.append(ppo.pop_metrics()["losses/clip_fraction"])
        for name in ("logprobs", "advantages", "returns"):
            theirs = getattr(buffer, name).flatten()
            assert (theirs - batch[name]).abs().max() <= 10 * tolerance, name
        check_agreement(paired_actor_critics(agent, model), start, tolerance)
    envs.close()
    assert terminated >= 5
    assert truncated >= 3
    assert 0 < max(clipped) < 1


def test_ppo_script_starts_with_orthogonal_weights() -> None:
    torch.manual_seed(0)
    agent = load("ppo").Agent()
    wide = [(agent.encoder[i], math.sqrt(2)) for i in (0, 2, 4, 7)]
    for layer, gain in [*wide, (agent.actor, 0.01), (agent.critic, 1.0)]:
        rows = layer.weight.detach().flatten(1)
        expected = gain**2 * torch.eye(len(rows))
        torch.testing.assert_close(rows @ rows.T, expected, rtol=0, atol=1e-5 * gain**2)
        assert not layer.bias.any()


def test_ppo_script_refuses_minibatches_that_do_not_divide() -> None:
    with pytest.raises(SystemExit):
        load("ppo").parse_args(["--num-minibatches", "3"])


def test_ppo_script_goes_on_where_it_was_and_learns_from_every_row_at_a_falling_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load("ppo")
    seen: list[tuple[float, list[int]]] = []
    starts, ends = [], []
    collect = script.collect

    def noting_collect(envs: Any, agent: Any, obs: Tensor, num_steps: int) -> Any:
        rollout, scores = collect(envs, agent, obs, num_steps)
        starts.append(obs)
        ends.append(rollout.next_obs)
        return rollout, scores

    def update(agent: Any, optimizer: Any, batch: Any, indices: Tensor, args: Any) -> Any:
        seen.append((optimizer.param_groups[0]["lr"], indices.tolist()))
        return {}

    monkeypatch.setattr(script, "collect", noting_collect)
    monkeypatch.setattr(script, "ppo_update", update)
    monkeypatch.setattr(script, "make_env", lambda noop_max, max_frames: RandomScreens(0))
    knobs = ["--total-timesteps", str(2 * ROWS), "--update-epochs", "2", "--eval-games", "1"]
    script.main([*SIZES, *knobs, "--device", "cpu"])
    assert torch.equal(starts[1], ends[0])
    assert [rate for rate, _ in seen] == [2.5e-4] * 4 + [1.25e-4] * 4
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert len(first[1]) == ROWS // MINIBATCHES
        assert sorted(first[1] + second[1]) == list(range(ROWS))


# -- DQN -----------------------------------------------------------------------------------------

RECORDED, BATCH, TARGET_COPIES = 80, 8, 2


def record(steps: int, capacity: int, seed: int) -> tuple[Any, list[Transition]]:
    """What the script's own collector remembers, and what really happened."""
    script = load("dqn")
    actions = np.random.default_rng(seed).integers(4, size=steps)
    replay = script.Replay(capacity)
    collector = script.Collector(RandomScreens(seed), replay, seed=0)
    for action in actions.tolist():
        collector.step(action)
    happened = play(seed, actions)
    np.testing.assert_array_equal(collector.obs, happened[-1].next_obs)
    scores = [one.score for one in happened if one.score is not None]
    assert list(collector.scores) == scores
    return replay, happened


def transitions_of(replay: Any) -> Array:
    """Rows of a ring that was never full, in order of time."""
    assert replay.added <= replay.capacity
    return np.flatnonzero(replay.acted)


def test_dqn_script_remembers_what_happened() -> None:
    replay, happened = record(RECORDED, 200, seed=1)
    assert sum(one.terminated for one in happened) >= 10
    assert sum(one.cut_short for one in happened) >= 5
    batch = replay.rows(transitions_of(replay))
    assert batch["obs"].dtype == batch["next_obs"].dtype == torch.uint8
    assert batch["obs"].tolist() == [one.obs.tolist() for one in happened]
    assert batch["next_obs"].tolist() == [one.final_obs.tolist() for one in happened]
    for name, column in (("actions", "action"), ("rewards", "reward"), ("terminated",) * 2):
        assert batch[name].tolist() == [getattr(one, column) for one in happened]


@pytest.mark.parametrize("steps", range(166, 176))
def test_dqn_script_draws_all_that_is_whole_and_nothing_else_from_a_full_ring(steps: int) -> None:
    replay, happened = record(steps, 40, seed=2)
    when = {(one.obs.tobytes(), one.final_obs.tobytes()): t for t, one in enumerate(happened)}
    assert len(when) == len(happened)
    torch.manual_seed(0)
    drawn = set()
    for _ in range(20):
        batch = replay.sample(32)
        assert len(batch["obs"]) == 32
        for i in range(32):
            t = when[batch["obs"][i].numpy().tobytes(), batch["next_obs"][i].numpy().tobytes()]
            drawn.add(t)
            one = happened[t]
            assert batch["actions"][i] == one.action
            assert batch["rewards"][i] == one.reward
            assert batch["terminated"][i] == one.terminated
    oldest = min(drawn)
    assert drawn == set(range(oldest, steps)), "none is passed over"
    games = sum(one.score is not None for one in happened[oldest:])
    # A row for each transition and each end of a game, one for the newest frame, and up to three
    # (and a game's end) whose older frames are gone.
    assert 40 - 5 <= len(drawn) + games <= 40 - 1


def as_package_replay(happened: list[Transition], gamma: float) -> ReplayBuffer:
    replay = ReplayBuffer(len(happened), 1, SCREENS, JOYSTICK, gamma=gamma, frame_stack=4)
    for one in happened:
        step = VectorStep(
            obs=one.next_obs[None],
            final_obs=one.final_obs[None],
            reward=np.array([one.reward]),
            terminated=np.array([one.terminated]),
            truncated=np.array([one.truncated]),
            valid=np.ones(1, bool),
            episodes=(),
        )
        replay.add(one.obs[None], np.array([one.action]), {}, step)
    return replay


@pytest.mark.parametrize(
    ("dtype", "tolerance", "updates", "by_learn"),
    [
        (torch.float64, 1e-10, 6, False),
        (torch.float32, 1e-5, 3, False),
        (torch.float32, 1e-5, 3, True),  # from the package's own storage, draws and schedule
    ],
    ids=str,
)
def test_dqn_script_and_package_take_the_same_steps(
    dtype: torch.dtype, tolerance: float, updates: int, by_learn: bool
) -> None:
    """As with PPO; for the reason said there fewer updates in float32."""
    script = load("dqn")
    args = script.parse_args(["--max-grad-norm", "0.5", "--device", "cpu"])
    torch.manual_seed(0)
    networks = script.make_networks("cpu")
    online = networks.online
    with torch.no_grad():
        online.layers[9].weight.mul_(30)  # so that the loss has both of its forms
    script.copy_target(networks)
    for network in networks:
        network.to(dtype)
    optimizer = script.make_optimizer(networks, args)

    model = MLPQNetwork(SCREENS, JOYSTICK, hidden_sizes=(), activation="relu").to(dtype)

    def pairs(ours: Any, theirs: Any) -> Pairs:
        last = paired("last", ours.layers[9], theirs.advantage.layers[0])
        return {**paired_encoders(ours.layers, theirs.encoder), **last}

    copy_parameters(pairs(online, model))
    start = {name: ours.clone() for name, (ours, _) in pairs(online, model).items()}
    config = DQNConfig(
        learning_rate=args.learning_rate,
        batch_size=BATCH,
        gamma=args.gamma,
        max_grad_norm=args.max_grad_norm,
        target_update_interval_steps=TARGET_COPIES,
    )
    dqn = DQN(model, config, generator=torch.Generator().manual_seed(4))
    draws = torch.Generator().manual_seed(4)
    replay, happened = record(RECORDED, 200, seed=3)
    package_replay = as_package_replay(happened, args.gamma)

    errors: list[float] = []
    for number in range(1, updates + 1):
        drawn = torch.randint(RECORDED, (BATCH,), generator=draws).numpy()
        rows = replay.rows(transitions_of(replay)[drawn])
        batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in rows.items()}
        with torch.no_grad():
            chosen = online(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
        targets = script.dqn_targets(networks.target, batch, args.gamma)
        assert not targets.requires_grad
        errors += (targets - chosen).abs().tolist()
        script.dqn_update(networks, optimizer, batch, args)
        if number % TARGET_COPIES == 0:
            script.copy_target(networks)

        if by_learn:
            dqn.learn(package_replay, Progress(number, 1000))
        else:
            going_on = 1 - batch.pop("terminated")
            batch |= {"discounts": args.gamma * going_on, "weights": torch.ones_like(going_on)}
            with package_precision(dtype):
                dqn.update(batch)
            if number % TARGET_COPIES == 0:
                dqn.target.follow(dqn.step.flat, 1.0)
        check_agreement(pairs(online, model), start, tolerance)
        if number >= TARGET_COPIES:
            check_agreement(pairs(networks.target, dqn.target.module), start, tolerance)
    assert min(errors) < 1 < max(errors)


def test_dqn_script_learns_and_copies_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("dqn")
    events: list[str] = []
    shares: list[float] = []

    def update(*given: Any) -> dict[str, Tensor]:
        events.append("update")
        return {}

    def explore(network: Any, obs: Any, random_share: float) -> int:
        shares.append(random_share)
        events.append("step")
        return 0

    monkeypatch.setattr(script, "make_env", lambda noop_max, max_frames: RandomScreens(0))
    monkeypatch.setattr(script, "explore", explore)
    monkeypatch.setattr(script, "dqn_update", update)
    monkeypatch.setattr(script, "copy_target", lambda networks: events.append("copy"))
    monkeypatch.setattr(script, "evaluate", lambda network, args: [0.0])
    knobs = "--total-timesteps 40 --learning-starts 18 --target-update-interval 10"
    knobs += " --exploration-fraction 0.8 --buffer-size 100 --device cpu"
    script.main(knobs.split())
    expected = []
    for step in range(1, 41):
        expected += ["step"]
        expected += ["update"] if step > 18 and step % 4 == 0 else []
        expected += ["copy"] if step % 10 == 0 else []
    assert events == expected
    assert shares[:18] == [1.0] * 18
    assert shares[18:] == pytest.approx([max(0.01, 1 - 0.99 * i / 32) for i in range(18, 40)])


def test_dqn_script_explores_as_the_package_does() -> None:
    script = load("dqn")
    args = script.parse_args(["--total-timesteps", "1000"])
    config = DQNConfig(exploration_fraction=0.1, exploration_final_eps=0.01)
    for step in (0, 40, 99, 100, 999):
        assert script.epsilon(step, args) == pytest.approx(config.epsilon(Progress(step, 1000)))
    assert script.epsilon(50, args) == pytest.approx(0.505)  # halfway from 1 to 0.01


@pytest.mark.parametrize(("share", "greedy"), [(0.0, 20), (1.0, None)])
def test_dqn_script_takes_the_best_action_but_for_the_random_share(
    share: float, greedy: int | None
) -> None:
    script = load("dqn")
    torch.manual_seed(0)
    network = script.QNetwork()
    with torch.no_grad():
        network.layers[9].bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    actions = [script.explore(network, np.zeros(STACK, np.uint8), share) for _ in range(20)]
    if greedy is None:
        assert set(actions) == {0, 1, 2, 3}
    else:
        assert actions.count(2) == greedy
