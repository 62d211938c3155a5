"""The off-policy scripts stand alone, run, and take the very steps the package takes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference_runs import load_script, printed_twice
from rl_training.algorithms.dqn import DQN, DQNConfig
from rl_training.algorithms.sac import SAC, SACConfig, SACModel
from rl_training.algorithms.sac_discrete import SACDiscrete, SACDiscreteConfig
from rl_training.algorithms.td3 import TD3, TD3Config
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.models.action_heads import CategoricalHead, SquashedGaussianHead, TanhHead
from rl_training.models.mlp_continuous import ActorCritics, EnsembleMLP, MLPActor, MLPCritics
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep
from test_reference_script import ALLOWED, imported_packages, linears

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "dqn": EXAMPLES / "dqn_cartpole_reference.py",
    "sac": EXAMPLES / "sac_pendulum_reference.py",
    "sac_discrete": EXAMPLES / "sac_discrete_cartpole_reference.py",
    "td3": EXAMPLES / "td3_pendulum_reference.py",
}
POLE = ObsSpec({"": ArraySpec((4,), "float32")})
PUSH = ActionSpec("discrete", (), "int64", nvec=(2,))
DISCRETE = ("dqn", "sac_discrete")
PENDULUM = ObsSpec({"": ArraySpec((3,), "float32")})
TORQUE = ActionSpec("box", (1,), "float32", low=(-2.0,), high=(2.0,))
RECORDED, BATCH, WIDTHS = 400, 64, (32, 32)

algorithms = pytest.mark.parametrize("algo", SCRIPTS)


def load(algo: str) -> Any:
    return load_script(SCRIPTS[algo])


@algorithms
def test_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library(algo: str) -> None:
    packages = imported_packages(SCRIPTS[algo].read_text())
    assert {"torch", "gymnasium"} <= packages
    assert packages <= ALLOWED


@algorithms
def test_never_names_the_package(algo: str) -> None:
    assert "rl_training" not in SCRIPTS[algo].read_text()


@pytest.mark.parametrize(
    ("algo", "more", "reported"),
    [
        ("dqn", ["--train-freq", "50", "--gradient-steps", "10"], ["150", "300", "400"]),
        ("sac_discrete", [], ["150", "300", "400"]),
        ("sac", [], ["300", "400"]),  # a Pendulum's first episode ends at 200
        ("td3", [], ["300", "400"]),
    ],
)
def test_runs_alone_and_reports_returns_and_an_evaluation(
    tmp_path: Path, algo: str, more: list[str], reported: list[str]
) -> None:
    flags = ["--total-timesteps", "400", "--seed", "3"]
    flags += ["--learning-starts", "200", "--batch-size", "16", "--hidden-sizes", "16", "16"]
    flags += ["--report-interval", "150", "--eval-episodes", "2", *more]
    lines = printed_twice(SCRIPTS[algo], flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == reported
    assert all("return" in line for line in lines[:-1])
    assert "loss" in lines[-2]
    assert lines[-1].startswith("evaluation:")


Pairs = dict[str, tuple[Tensor, Tensor]]


def paired_networks(name: str, ours: nn.Sequential, theirs: nn.Module) -> Pairs:
    pairs: Pairs = {}
    for i, (a, b) in enumerate(zip(linears(ours), linears(theirs), strict=True)):
        pairs[f"{name}.weight{i}"] = (a.weight.detach(), b.weight.detach())
        pairs[f"{name}.bias{i}"] = (a.bias.detach(), b.bias.detach())
    return pairs


def paired_critics(name: str, ours: list[nn.Sequential], theirs: EnsembleMLP) -> Pairs:
    """The package holds a layer of all critics in one tensor, inputs first."""
    pairs: Pairs = {}
    for member, network in enumerate(ours):
        layers = zip(linears(network), theirs.weights, theirs.biases, strict=True)
        for i, (layer, weight, bias) in enumerate(layers):
            place = f"{name}{member + 1}"
            pairs[f"{place}.weight{i}"] = (layer.weight.detach(), weight.detach()[member].T)
            pairs[f"{place}.bias{i}"] = (layer.bias.detach(), bias.detach()[member, 0])
    return pairs


@dataclasses.dataclass
class Twins:
    """A script's agent and the package's algorithm, with the same parameters."""

    algorithm: Any
    update_script: Callable[[dict[str, Tensor], Tensor, int], Any]
    """Takes a batch, noise, and the number of the update, from 1."""
    update_package: Callable[[dict[str, Tensor], int], Any]
    pairs: Callable[[], Pairs]
    replay: Any
    """What the script recorded."""
    gamma: float


def enlarge_outputs(network: nn.Sequential, factor: float) -> None:
    """So that clamps and the corners of losses matter from the first update on."""
    with torch.no_grad():
        linears(network)[-1].weight.mul_(factor)


def enlarge_critics(agent: Any) -> None:
    """So that each of the two is the lesser one somewhere."""
    for critic, target in ((agent.critic_1, agent.target_1), (agent.critic_2, agent.target_2)):
        enlarge_outputs(critic, 10.0)
        target.load_state_dict(critic.state_dict())


class Overspeed(gym.Wrapper[Any, Any, Any, Any]):
    """A Pendulum, which never terminates, made to do so where it turns fast."""

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, bool(abs(obs[2]) > 2.5), truncated, info


def short_cartpole() -> Any:
    return gym.make("CartPole-v1", max_episode_steps=12)


def short_pendulum() -> Any:
    return Overspeed(gym.make("Pendulum-v1", max_episode_steps=12))


def record(script: Any, env: Any, choose: Callable[[Any], Any]) -> Any:
    """Transitions by the script's own collector, some terminated and some cut short."""
    replay = script.Replay(RECORDED)
    collector = script.Collector(env, replay, seed=11)
    for _ in range(RECORDED):
        collector.step(choose(collector.obs))
    env.close()
    terminated, truncated = endings(replay)
    assert int(terminated.sum()) >= 5
    assert int(truncated.sum()) >= 5
    return replay


def endings(replay: Any) -> tuple[Tensor, Tensor]:
    """Where episodes terminated, and where they were cut short: told by the row that follows."""
    terminated = replay.columns["terminated"].bool()
    truncated = torch.zeros_like(terminated)
    successors, following = replay.columns["next_obs"][:-1], replay.columns["obs"][1:]
    truncated[:-1] = (successors != following).any(1) & ~terminated[:-1]
    return terminated, truncated


def settings(script: Any, *more: str) -> tuple[Any, dict[str, Any]]:
    """The script's arguments, and the package's knobs that both have."""
    widths = [str(width) for width in WIDTHS]
    same = ("--learning-rate", "3e-3", "--batch-size", str(BATCH), "--hidden-sizes", *widths)
    args = script.parse_args([*same, *more])
    shared = {"learning_rate": args.learning_rate, "batch_size": BATCH, "gamma": args.gamma}
    return args, {**shared, "hidden_sizes": WIDTHS}


def copy_parameters(pairs: Pairs) -> None:
    for ours, theirs in pairs.values():
        theirs.copy_(ours)


TARGET_COPIES = 2
"""Updates between DQN's target copies."""


def dqn_twins(dtype: torch.dtype, seed: int) -> Twins:
    script = load("dqn")
    args, knobs = settings(script, "--max-grad-norm", "0.5")
    online, _ = script.make_networks(args.hidden_sizes)
    enlarge_outputs(online, 10.0)
    replay = record(script, short_cartpole(), lambda obs: script.explore(online, obs, 0.7))
    online.to(dtype)
    networks = script.Networks(online, copy.deepcopy(online))
    optimizer = script.make_optimizer(networks, args)

    model = MLPQNetwork(POLE, PUSH, hidden_sizes=WIDTHS, activation="relu").to(dtype)
    copy_parameters(paired_networks("online", online, model.advantage))
    config = DQNConfig(
        **knobs, max_grad_norm=args.max_grad_norm, target_update_interval_steps=TARGET_COPIES
    )
    dqn = DQN(model, config, generator=torch.Generator().manual_seed(seed))

    def update_script(batch: dict[str, Tensor], noise: Tensor, number: int) -> None:
        del noise
        script.dqn_update(networks, optimizer, batch, args)
        if number % TARGET_COPIES == 0:
            script.copy_target(networks)

    def update_package(batch: dict[str, Tensor], number: int) -> None:
        dqn.update(batch)
        if number % TARGET_COPIES == 0:
            dqn.target.follow(dqn.step.flat, 1.0)

    def pairs() -> Pairs:
        return {
            **paired_networks("online", online, model.advantage),
            **paired_networks("target", networks.target, dqn.target.module.advantage),
        }

    return Twins(dqn, update_script, update_package, pairs, replay, args.gamma)


def package_networks(head: SquashedGaussianHead | TanhHead | CategoricalHead) -> ActorCritics:
    shape: dict[str, Any] = {"hidden_sizes": WIDTHS, "activation": "relu"}
    obs_spec, num_actions = PENDULUM, 0
    if isinstance(head, CategoricalHead):
        obs_spec, num_actions = POLE, 2
    critics = MLPCritics(obs_spec, 1, num_critics=2, num_actions=num_actions, **shape)
    return ActorCritics(MLPActor(obs_spec, head, **shape), critics)


def sac_discrete_twins(dtype: torch.dtype, seed: int) -> Twins:
    script = load("sac_discrete")
    args, knobs = settings(script, "--tau", "0.5", "--ent-coef-init", "0.7")
    agent = script.Agent(args)
    enlarge_outputs(agent.actor, 10.0)
    enlarge_critics(agent)
    replay = record(script, short_cartpole(), agent.explore)
    agent.to(dtype)

    scale = args.target_entropy_scale
    config = SACDiscreteConfig(
        **knobs, tau=args.tau, ent_coef_init=args.ent_coef_init, target_entropy_scale=scale
    )
    model = SACModel(package_networks(CategoricalHead((2,), ())), config).to(dtype)
    copy_parameters(trained_by_sac(agent, model))
    sac = SACDiscrete(model, config, generator=torch.Generator().manual_seed(seed))
    return Twins(
        sac,
        lambda batch, _, __: script.sac_update(agent, batch, args),
        lambda batch, _: sac.update(batch, delayed=True),
        lambda: all_of_sac(agent, sac),
        replay,
        args.gamma,
    )


def trained_by_sac(agent: Any, model: SACModel) -> Pairs:
    critics = [agent.critic_1, agent.critic_2]
    log_ent_coef = (agent.log_ent_coef.detach(), model.temperature.log_ent_coef.detach())
    return {
        **paired_networks("actor", agent.actor, model.actor.net),
        **paired_critics("critic", critics, model.critics.net),
        "log_ent_coef": log_ent_coef,
    }


def all_of_sac(agent: Any, sac: SAC) -> Pairs:
    targets = paired_critics("target", [agent.target_1, agent.target_2], sac.target.module.net)
    return {**trained_by_sac(agent, sac.model), **targets}


def sac_twins(dtype: torch.dtype, seed: int) -> Twins:
    script = load("sac")
    args, knobs = settings(script, "--tau", "0.5", "--ent-coef-init", "0.7")
    agent = script.Agent(args)
    enlarge_outputs(agent.actor, 10.0)
    linears(agent.actor)[-1].bias.data[1] += 1.5  # deviations on both sides of their clamp
    enlarge_critics(agent)
    replay = record(script, short_pendulum(), agent.explore)
    agent.to(dtype)

    config = SACConfig(**knobs, tau=args.tau, ent_coef_init=args.ent_coef_init)
    model = SACModel(package_networks(SquashedGaussianHead((1,))), config).to(dtype)
    copy_parameters(trained_by_sac(agent, model))
    sac = SAC(model, config, generator=torch.Generator().manual_seed(seed))
    assert sac.target_entropy == args.target_entropy
    return Twins(
        sac,
        lambda batch, noise, _: script.sac_update(agent, batch, noise, args),
        lambda batch, _: sac.update(batch, delayed=True),
        lambda: all_of_sac(agent, sac),
        replay,
        args.gamma,
    )


def td3_twins(dtype: torch.dtype, seed: int) -> Twins:
    script = load("td3")
    args, knobs = settings(script, "--tau", "0.5", "--target-policy-noise", "0.5")
    agent = script.Agent(args)
    enlarge_outputs(agent.actor, 10.0)
    agent.target_actor.load_state_dict(agent.actor.state_dict())
    enlarge_critics(agent)
    replay = record(script, short_pendulum(), lambda obs: agent.explore(obs, 0.5))
    agent.to(dtype)

    config = TD3Config(
        **knobs,
        tau=args.tau,
        policy_delay=args.policy_delay,
        target_policy_noise=args.target_policy_noise,
        target_noise_clip=args.target_noise_clip,
    )
    model = package_networks(TanhHead((1,), args.exploration_noise)).to(dtype)

    def trained() -> Pairs:
        return {
            **paired_networks("actor", agent.actor, model.actor.net),
            **paired_critics("critic", [agent.critic_1, agent.critic_2], model.critics.net),
        }

    copy_parameters(trained())
    td3 = TD3(model, config, generator=torch.Generator().manual_seed(seed))

    def pairs() -> Pairs:
        targets = [agent.target_1, agent.target_2]
        return {
            **trained(),
            **paired_networks("target_actor", agent.target_actor, td3.target_actor.module.net),
            **paired_critics("target", targets, td3.target_critics.module.net),
        }

    return Twins(
        td3,
        lambda batch, noise, _: script.td3_update(agent, batch, noise, args),
        lambda batch, number: td3.update(batch, delayed=number % config.policy_delay == 0),
        pairs,
        replay,
        args.gamma,
    )


TWINS = {
    "dqn": dqn_twins,
    "sac": sac_twins,
    "sac_discrete": sac_discrete_twins,
    "td3": td3_twins,
}


def make_twins(algo: str, dtype: torch.dtype, seed: int) -> Twins:
    torch.manual_seed(0)
    return TWINS[algo](dtype, seed)


def draw(twins: Twins, generator: torch.Generator, dtype: torch.dtype) -> Any:
    """A batch for the script and the noise of one update, as `ReplayLearner.learn` draws them."""
    rows = twins.replay.rows(torch.randint(RECORDED, (BATCH,), generator=generator))
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in rows.items()}
    shape = twins.algorithm.noise_shape
    if shape is None:
        return batch, torch.empty(0)
    return batch, torch.randn(shape, generator=generator, dtype=dtype)


def check_agreement(pairs: Pairs, start: dict[str, Tensor], tolerance: float) -> None:
    for name, (ours, theirs) in pairs.items():
        assert (ours - start[name]).abs().max() > 1e-3, name
        assert (theirs - ours).abs().max() <= tolerance, name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
@algorithms
def test_script_and_package_take_the_same_steps(
    algo: str, dtype: torch.dtype, tolerance: float
) -> None:
    twins = make_twins(algo, dtype, seed=4)
    start = {name: ours.clone() for name, (ours, _) in twins.pairs().items()}
    draws = torch.Generator().manual_seed(4)
    for number in range(1, 13):
        batch, noise = draw(twins, draws, dtype)
        twins.update_script(batch, noise, number)
        going_on = 1 - batch.pop("terminated")
        batch |= {"discounts": twins.gamma * going_on, "weights": torch.ones_like(going_on)}
        twins.update_package({**batch, "noise": noise}, number)
        if number in (3, 12):
            check_agreement(twins.pairs(), start, tolerance)


def as_package_replay(twins: Twins, obs_spec: ObsSpec, action_spec: ActionSpec) -> ReplayBuffer:
    """The script's record, told to the package step by step."""
    replay = ReplayBuffer(RECORDED, 1, obs_spec, action_spec, gamma=twins.gamma)
    record = {name: column.unsqueeze(1).numpy() for name, column in twins.replay.columns.items()}
    terminated, truncated = (flags.unsqueeze(1).numpy() for flags in endings(twins.replay))
    for t in range(RECORDED):
        final_obs = record["next_obs"][t]
        step = VectorStep(
            obs=record["obs"][t + 1] if t + 1 < RECORDED else final_obs,
            final_obs=final_obs,
            reward=record["rewards"][t],
            terminated=terminated[t],
            truncated=truncated[t],
            valid=np.ones(1, bool),
            episodes=(),
        )
        replay.add(record["obs"][t], record["actions"][t], {}, step)
    return replay


@algorithms
def test_script_and_package_learn_the_same_from_the_package_replay(algo: str) -> None:
    """The package's own storage, draws and schedules, in the precision it trains in."""
    twins = make_twins(algo, torch.float32, seed=7)
    specs = (POLE, PUSH) if algo in DISCRETE else (PENDULUM, TORQUE)
    replay = as_package_replay(twins, *specs)
    start = {name: ours.clone() for name, (ours, _) in twins.pairs().items()}
    draws = torch.Generator().manual_seed(7)
    for number in range(1, 13):
        batch, noise = draw(twins, draws, torch.float32)
        twins.update_script(batch, noise, number)
        twins.algorithm.learn(replay, Progress(number, 1000))
        if number in (3, 12):
            check_agreement(twins.pairs(), start, tolerance=1e-5)


class TwoEndings(gym.Env[Any, Any]):
    """Observations count the steps of an episode, all of two; the first terminates, others do not.

    The one that terminates is cut short as well: termination wins.
    """

    def __init__(self, obs_size: int) -> None:
        self.obs_size, self.episode, self.steps = obs_size, 0, 0
        self.actions: list[Any] = []

    def _obs(self) -> Any:
        return np.full(self.obs_size, self.steps, np.float32)

    def reset(self, **options: Any) -> Any:
        self.episode, self.steps = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        self.steps += 1
        over = self.steps == 2
        return self._obs(), 1.0, over and self.episode == 1, over, {}


def make_constant(network: nn.Sequential, *outputs: float) -> None:
    last = linears(network)[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor(outputs))


def targets_by_script(algo: str, batch: dict[str, Tensor]) -> Tensor:
    """Gamma is 0.5, the next state's actions or critics are worth 4 and another number."""
    script = load(algo)
    args, _ = settings(script, "--gamma", "0.5")
    targets: Tensor
    if algo == "dqn":
        networks = script.make_networks(args.hidden_sizes)
        make_constant(networks.target, 3.0, 4.0)
        targets = script.dqn_targets(networks.target, batch, args.gamma)
        return targets
    agent = script.Agent(args)
    if algo == "sac_discrete":
        make_constant(agent.target_1, 6.0, 3.0)
        make_constant(agent.target_2, 4.0, 8.0)
        make_constant(agent.actor, math.log(2.0), math.log(2.0))
        agent.log_ent_coef.data.fill_(math.log(0.5))
        targets = script.sac_targets(agent, batch, args.gamma)
        return targets
    make_constant(agent.target_1, 6.0)
    make_constant(agent.target_2, 4.0)
    noise = torch.zeros(len(batch["obs"]), 1)
    if algo == "td3":
        targets = script.td3_targets(agent, batch, noise, args)
        return targets
    make_constant(agent.actor, 0.0, 0.0)
    agent.log_ent_coef.data.fill_(math.log(0.5))
    targets = script.sac_targets(agent, batch, noise, args.gamma)
    return targets


@pytest.mark.parametrize(
    ("algo", "bootstrapped"),
    [
        ("dqn", 3.0),  # 1 + 0.5 * 4
        ("td3", 3.0),
        ("sac_discrete", 2.923287),  # 1 + 0.5 * ((4 + 3) / 2 + 0.5 log 2)
        # 1 + 0.5 * (4 + 0.5 * 0.918939), as log p is -log(2 pi) / 2 at the centre of a standard
        # normal, where tanh has slope 1.
        ("sac", 3.229735),
    ],
)
def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(
    algo: str, bootstrapped: float
) -> None:
    script = load(algo)
    env = TwoEndings(4 if algo in DISCRETE else 3)
    replay = script.Replay(10)
    collector = script.Collector(env, replay, seed=0)
    for _ in range(5):
        collector.step(1 if algo in DISCRETE else torch.tensor([0.75]))
    assert list(collector.returns) == [2.0, 2.0]

    batch = replay.rows(torch.arange(5))
    assert batch["obs"][:, 0].tolist() == [0, 1, 0, 1, 0]
    assert batch["next_obs"][:, 0].tolist() == [1, 2, 1, 2, 1], "2: what a reset would hide"
    assert batch["terminated"].tolist() == [0, 1, 0, 0, 0]
    in_env, stored = (1, 1) if algo in DISCRETE else (1.5, 0.75)
    assert env.actions == [in_env] * 5
    assert batch["actions"].flatten().tolist() == [stored] * 5

    expected = [bootstrapped, 1.0, bootstrapped, bootstrapped, bootstrapped]
    assert targets_by_script(algo, batch).tolist() == pytest.approx(expected, abs=1e-5)


@algorithms
def test_script_replay_forgets_the_oldest(algo: str) -> None:
    replay = load(algo).Replay(3)
    for reward in range(5):
        replay.add(rewards=float(reward))
    assert len(replay) == 3
    assert sorted(replay.rows(torch.arange(3))["rewards"].tolist()) == [2, 3, 4]


def test_script_explores_as_the_package_does() -> None:
    script = load("dqn")
    args = script.parse_args(["--total-timesteps", "1000"])
    config = DQNConfig(
        exploration_fraction=args.exploration_fraction,
        exploration_initial_eps=args.exploration_initial_eps,
        exploration_final_eps=args.exploration_final_eps,
    )
    for step in (0, 40, 80, 160, 999):
        expected = config.epsilon(Progress(step, 1000))
        assert script.epsilon(step, args) == pytest.approx(expected)
    assert script.epsilon(80, args) == pytest.approx(0.52)  # halfway from 1 to 0.04
