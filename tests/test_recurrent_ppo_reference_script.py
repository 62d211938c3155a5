"""The recurrent PPO script stands alone, runs, and takes the very steps the package takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from reference_runs import load_script, printed_twice
from rl_training.contrib.recurrent_ppo import RecurrentPPO, RecurrentPPOConfig
from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer
from rl_training.envs import VectorAdapter
from rl_training.envs.wrappers import HideVelocities
from rl_training.models.recurrent.lstm_actor_critic import LSTMActorCritic
from rl_training.runtime.collector import Collector
from rl_training.runtime.recurrent_actors import RecurrentPolicyActor
from rl_training.types import Progress, VectorStep
from test_reference_script import ALLOWED, imported_packages, linears

SCRIPT = Path(__file__).parent.parent / "examples" / "recurrent_ppo_cartpole_reference.py"
NUM_ENVS, NUM_STEPS, LENGTH, MINIBATCHES, EPOCHS, ITERATIONS = 4, 48, 12, 4, 3, 3
SEQUENCES = NUM_ENVS * NUM_STEPS // LENGTH
SAME_LOSSES = ("policy_loss", "value_loss", "entropy")


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def test_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library() -> None:
    packages = imported_packages(SCRIPT.read_text())
    assert {"torch", "gymnasium"} <= packages
    assert packages <= ALLOWED
    assert "rl_training" not in SCRIPT.read_text()


def test_runs_alone_and_reports_returns_and_an_evaluation(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "256", "--seed", "3"]
    flags += ["--num-envs", "2", "--num-steps", "64", "--sequence-length", "16"]
    flags += ["--update-epochs", "2", "--eval-episodes", "2"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["128", "256"]
    assert all("return" in line for line in lines[:-1])
    assert lines[-1].startswith("evaluation:")


@pytest.mark.parametrize(
    "wrong", [["--sequence-length", "48"], ["--num-minibatches", "3"], ["--num-minibatches", "64"]]
)
def test_refuses_what_does_not_divide(script: Any, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(wrong)


class TwoReasons(gym.Wrapper[Any, Any, Any, Any]):
    """Half of all falls are reported as cut short besides."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated or (terminated and obs[0] > 0), info


def short_cartpole() -> gym.Env[Any, Any]:
    """A time limit about as long as a first episode, and no multiple of a sequence's length."""
    return HideVelocities(TwoReasons(gym.make("CartPole-v1", max_episode_steps=17)))


def short_cartpoles() -> SyncVectorEnv[Any, Any]:
    return SyncVectorEnv([short_cartpole] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)


Pairs = dict[str, tuple[Tensor, Tensor]]


def paired_parameters(agent: Any, model: LSTMActorCritic) -> Pairs:
    found: dict[str, tuple[Tensor, Tensor]] = {}
    assert model.critic_lstm is not None
    for name in ("actor", "critic"):
        cell, lstm = getattr(agent, f"{name}_lstm"), getattr(model, f"{name}_lstm").layer
        for ours, theirs in ((cell.seen, "ih"), (cell.said, "hh")):
            for kind in ("weight", "bias"):
                pair = getattr(ours, kind), getattr(lstm, f"{kind}_{theirs}_l0")
                found[f"{name}.{kind}_{theirs}"] = pair
        layers = zip(linears(getattr(agent, name)), linears(getattr(model, name)), strict=True)
        for i, (a, b) in enumerate(layers):
            found[f"{name}.weight{i}"] = (a.weight, b.weight)
            found[f"{name}.bias{i}"] = (a.bias, b.bias)
    assert len(found) == len(list(agent.parameters())) == len(list(model.parameters()))
    return {key: (ours.detach(), theirs.detach()) for key, (ours, theirs) in found.items()}


class Recorder:
    """Passes steps on to a buffer in another precision, and keeps what the script needs to know."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.buffer = RecurrentRolloutBuffer(
            NUM_STEPS,
            NUM_ENVS,
            (2,),
            (),
            sequence_length=LENGTH,
            obs_dtype=dtype,
            action_dtype=torch.int64,
        )
        self.dtype = dtype
        self.steps: list[tuple[Any, Any, VectorStep]] = []

    def add(self, obs: Any, action: Any, record: Mapping[str, Any], step: VectorStep) -> None:
        to = "float64" if self.dtype == torch.float64 else "float32"
        self.steps.append((obs, action, step))
        cast = step._replace(
            obs=np.asarray(step.obs).astype(to), final_obs=np.asarray(step.final_obs).astype(to)
        )
        self.buffer.add(obs.astype(to), action, record, cast)

    def package_rollout(self) -> RecurrentRolloutBuffer:
        fields = ("logprobs", "rewards", "dones", "values", "bootstrap", "advantages", "returns")
        for name in fields:
            setattr(self.buffer, name, getattr(self.buffer, name).to(self.dtype))
        return self.buffer

    def script_rollout(self, script: Any, state: Tensor) -> Any:
        obs, actions, steps = zip(*self.steps, strict=True)

        def grid(rows: Any) -> Tensor:
            stacked = torch.as_tensor(np.stack(list(rows)))
            return stacked.to(self.dtype) if stacked.is_floating_point() else stacked

        return script.Rollout(
            obs=grid(obs),
            actions=grid(actions),
            rewards=grid(step.reward for step in steps),
            terminated=grid(step.terminated for step in steps),
            truncated=grid(step.truncated for step in steps),
            final_obs=grid(step.final_obs for step in steps),
            next_obs=grid([steps[-1].obs])[0],
            state=state,
        )


def endings(rollout: Any) -> tuple[Tensor, Tensor]:
    """Where episodes terminated and where they were cut short, within sequences alone."""
    within = torch.arange(NUM_STEPS) % LENGTH != LENGTH - 1
    cut_short = rollout.truncated & ~rollout.terminated
    return rollout.terminated & within[:, None], cut_short & within[:, None]


def close(theirs: Tensor, ours: Tensor, tolerance: float, what: str) -> None:
    worst = float((theirs - ours).abs().max())
    assert worst <= tolerance, f"{what}: {worst}"


def compare_rollouts(
    buffer: RecurrentRolloutBuffer, batch: dict[str, Tensor], script: Any, tolerance: float
) -> None:
    for name in ("obs", "actions", "values", "logprobs", "advantages", "returns"):
        grid: Tensor = getattr(buffer, name)
        close(script.cut(grid, LENGTH), batch[name], 100 * tolerance, name)
    close(torch.cat(buffer.states), batch["state"].flatten(1), tolerance, "states")


def compare_parameters(pairs: Pairs, start: dict[str, Tensor], tolerance: float) -> None:
    for name, (ours, theirs) in pairs.items():
        assert (ours - start[name]).abs().max() > 1e-3, name
        close(theirs, ours, tolerance, name)


@torch.no_grad()
def make_memory_matter(agent: Any) -> None:
    """From the first update on; a CartPole's numbers are small, and so are a policy's weights."""
    for cell in (agent.actor_lstm, agent.critic_lstm):
        cell.seen.weight *= 10
    agent.actor[-1].weight *= 100
    agent.critic[-1].weight *= 10


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
def test_script_and_package_take_the_same_steps(
    script: Any, dtype: torch.dtype, tolerance: float
) -> None:
    """Three rollouts by the package's own collector, and all that both learn from them."""
    knobs: dict[str, Any] = {"num_steps": NUM_STEPS, "sequence_length": LENGTH}
    knobs |= {"num_minibatches": MINIBATCHES, "update_epochs": EPOCHS}
    knobs |= {"learning_rate": 3e-3, "clip_coef": 0.05, "vf_coef": 0.05}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    args = script.parse_args([*flags, f"--num-envs={NUM_ENVS}"])
    shared = ("gamma", "gae_lambda", "ent_coef", "max_grad_norm")
    config = RecurrentPPOConfig(**knobs, **{name: getattr(args, name) for name in shared})
    env = VectorAdapter(short_cartpoles(), seed=11)
    torch.manual_seed(0)
    agent = script.Agent().to(dtype)
    make_memory_matter(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    model = LSTMActorCritic(env.obs_spec, env.action_spec).to(dtype)
    for ours, theirs in paired_parameters(agent, model).values():
        theirs.copy_(ours)
    start = {name: ours.clone() for name, (ours, _) in paired_parameters(agent, model).items()}
    ppo = RecurrentPPO(model, config, generator=torch.Generator().manual_seed(5))
    order = torch.Generator().manual_seed(5)

    policy: Any = model
    noise = torch.Generator().manual_seed(6)
    actor = RecurrentPolicyActor(policy, NUM_STEPS, noise, torch.device("cpu"))
    # An actor's memory keeps the precision that it starts with.
    actor.memory.state = np.zeros((NUM_ENVS, model.state_size), f"float{torch.finfo(dtype).bits}")
    collector = Collector(env, actor, Recorder(dtype))
    state = script.no_memory(NUM_ENVS, dtype)
    terminated = truncated = both = 0
    clipped = 0.0
    for iteration in range(ITERATIONS):
        recorder = collector.buffer = Recorder(dtype)
        progress = Progress(iteration, ITERATIONS)
        collector.collect(NUM_STEPS, progress)
        rollout = recorder.script_rollout(script, state)
        terminated += int(endings(rollout)[0].sum())
        truncated += int(endings(rollout)[1].sum())
        both += int((rollout.terminated & rollout.truncated).sum())
        buffer = recorder.package_rollout()

        batch = script.make_batch(agent, rollout, args)
        state = state_afterwards(script, agent, rollout)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / ITERATIONS)
        losses = []
        for _ in range(EPOCHS):
            sequences = torch.randperm(SEQUENCES, generator=order)
            for i in range(MINIBATCHES):
                chosen = sequences[i::MINIBATCHES]
                losses.append(script.ppo_update(agent, optimizer, batch, chosen, args))

        ppo.learn(buffer, progress)
        metrics = ppo.pop_metrics()
        clipped += metrics["losses/clip_fraction"]
        for name in SAME_LOSSES:
            mean = float(torch.stack([loss[name] for loss in losses]).mean())
            assert metrics[f"losses/{name}"] == pytest.approx(mean, abs=100 * tolerance), name
        compare_rollouts(buffer, batch, script, tolerance)
        assert buffer.next_state is not None
        close(buffer.next_state, state.flatten(1), tolerance, "the last state")
    env.close()

    assert terminated >= 5
    assert truncated >= 5
    assert both >= 3
    assert clipped
    compare_parameters(paired_parameters(agent, model), start, tolerance)


@torch.no_grad()
def state_afterwards(script: Any, agent: Any, rollout: Any) -> Tensor:
    """What is remembered after a rollout, by showing an agent all of it again."""
    ended = rollout.terminated | rollout.truncated
    state: Tensor = rollout.state
    for obs, over in zip(rollout.obs, ended, strict=True):
        state = script.forget(agent.step(obs, state)[2], over)
    return state


def test_script_collects_as_it_learns(script: Any) -> None:
    """What collecting remembers is what learning remembers, over rollouts and resets."""
    torch.manual_seed(0)
    agent = script.Agent()
    args = script.parse_args([f"--sequence-length={LENGTH}", f"--num-steps={NUM_STEPS}"])
    envs = short_cartpoles()
    obs, _ = envs.reset(seed=0)
    state = script.no_memory(NUM_ENVS)
    for _ in range(2):
        rollout, state = script.collect(envs, agent, obs, state, NUM_STEPS)
        obs = rollout.next_obs.numpy()
        torch.testing.assert_close(state, state_afterwards(script, agent, rollout))
        batch = script.make_batch(agent, rollout, args)
        torch.testing.assert_close(batch["state"][:NUM_ENVS], rollout.state)
        dones = rollout.terminated | rollout.truncated
        following = torch.cat((rollout.obs[1:], rollout.next_obs[None]))
        assert int(dones.sum()) >= 8
        assert (following[dones].abs() <= 0.05).all(), "a reset CartPole is within 0.05 of zero"
        fell = rollout.final_obs[rollout.terminated]
        assert (fell[:, 1].abs() > 0.2).all(), "a CartPole falls at 0.2095"
    envs.close()


class CountingAgent(torch.nn.Module):
    """Values what it sees by how many observations of the episode it remembers, this one too."""

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = state + 1
        return torch.zeros(len(obs), 2), after[:, 0, 0] * obs[:, 0], after


def test_script_bootstraps_from_the_memory_before_the_reset(script: Any) -> None:
    """By hand, gamma 0.5, lambda 0: returns are r + 0.5 * (what follows)."""
    args = script.parse_args(
        [
            *("--gamma=0.5", "--gae-lambda=0", "--num-envs=1", "--num-minibatches=1"),
            *("--num-steps=6", "--sequence-length=3"),
        ]
    )
    flags = torch.zeros(6, 1, dtype=torch.bool)
    terminated, truncated = flags.clone(), flags.clone()
    truncated[1] = True
    terminated[4] = truncated[4] = True
    rollout = script.Rollout(
        obs=torch.ones(6, 1, 2),
        actions=torch.zeros(6, 1, dtype=torch.int64),
        rewards=torch.ones(6, 1),
        terminated=terminated,
        truncated=truncated,
        final_obs=torch.full((6, 1, 2), 10.0),
        next_obs=torch.ones(1, 2),
        state=script.no_memory(1) + 2,
    )
    batch = script.make_batch(CountingAgent(), rollout, args)
    assert batch["state"][:, 0, 0].tolist() == [2, 1]
    assert batch["starts"].int().T.tolist() == [[0, 0, 1], [0, 0, 1]]
    assert batch["values"].T.tolist() == [[3, 4, 1], [2, 3, 1]]
    # Four observations were remembered at the time limit: the fifth is worth 5 * 10.
    assert batch["returns"].T.tolist() == [[3, 26, 2], [2.5, 1, 2]]
