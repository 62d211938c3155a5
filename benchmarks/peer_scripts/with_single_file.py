"""The single files of `examples/` in `peers.py`: their functions, in the loop of their `main`.

The loops are repeated here because those of the examples evaluate, report and always train for the
same task. Sizes of observations and actions are constants of the examples, set here to those of
the task.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from common import Clock, Request, Trained, answer, env_functions, scaled
from gymnasium.vector import AutoresetMode, SyncVectorEnv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = {
    "ppo": "ppo_cartpole_reference",
    "recurrent_ppo": "recurrent_ppo_cartpole_reference",
    "dqn": "dqn_cartpole_reference",
    "sac": "sac_pendulum_reference",
    "td3": "td3_pendulum_reference",
}
FLAGS = {"target_update_interval_steps": "target_update_interval"}
FIXED: dict[str, dict[str, Any]] = {
    "ppo": {"hidden_sizes": [64, 64]},
    "recurrent_ppo": {"hidden_sizes": [64], "lstm_size": 64},
    "dqn": {},
    "sac": {"train_freq": 1, "gradient_steps": 1},
    "td3": {"train_freq": 1, "gradient_steps": 1},
}
"""What the examples have no flag for."""


def load(algo: str) -> Any:
    name = FILES[algo]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(module: Any, request: Request) -> Any:
    """Return the example's own arguments."""
    args = module.parse_args([])
    for key, value in request.settings.items():
        name = FLAGS.get(key, key)
        if hasattr(args, name):
            setattr(args, name, value)
        elif FIXED[request.algo].get(name) != value:
            raise ValueError(f"{FILES[request.algo]} has no setting {name} = {value}")
    args.anneal_lr, args.total_timesteps = False, request.steps
    return args


def train(request: Request, clock: Clock) -> Trained:
    torch.manual_seed(request.seed)
    module = load(request.algo)
    loop = {"ppo": on_policy, "recurrent_ppo": recurrent, "dqn": dqn}.get(request.algo, continuous)
    return loop(module, request, clock)


def on_policy(module: Any, request: Request, clock: Clock) -> Trained:
    args = parsed(module, request)
    agent = module.Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs = SyncVectorEnv(env_functions(request, clock), autoreset_mode=AutoresetMode.SAME_STEP)
    obs, _ = envs.reset(seed=request.seed)
    for _ in range(0, request.steps, request.period):
        rollout = module.collect(envs, agent, obs, args.num_steps)
        obs = rollout.next_obs.numpy()
        batch = module.make_batch(agent, rollout, args)
        for _ in range(args.update_epochs):
            for chosen in torch.randperm(request.period).chunk(args.num_minibatches):
                module.ppo_update(agent, optimizer, batch, chosen, args)

    def act(obs: Any) -> int:
        with torch.no_grad():
            return int(agent.actor(torch.as_tensor(obs).unsqueeze(0)).argmax())

    return lambda: act


def recurrent(module: Any, request: Request, clock: Clock) -> Trained:
    module.OBS_SIZE = 4  # the example leaves out the velocities, and the peers do not
    args = parsed(module, request)
    agent = module.Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs = SyncVectorEnv(env_functions(request, clock), autoreset_mode=AutoresetMode.SAME_STEP)
    obs, _ = envs.reset(seed=request.seed)
    state = module.no_memory(request.num_envs)
    sequences = request.period // args.sequence_length
    for _ in range(0, request.steps, request.period):
        rollout, state = module.collect(envs, agent, obs, state, args.num_steps)
        obs = rollout.next_obs.numpy()
        batch = module.make_batch(agent, rollout, args)
        for _ in range(args.update_epochs):
            for chosen in torch.randperm(sequences).chunk(args.num_minibatches):
                module.ppo_update(agent, optimizer, batch, chosen, args)

    def begin() -> Any:
        state = module.no_memory(1)

        def act(obs: Any) -> int:
            nonlocal state
            with torch.no_grad():
                logits, _, state = agent.step(torch.as_tensor(obs).unsqueeze(0), state)
            return int(logits.argmax())

        return act

    return begin


def dqn(module: Any, request: Request, clock: Clock) -> Trained:
    args = parsed(module, request)
    networks = module.make_networks(args.hidden_sizes)
    optimizer = module.make_optimizer(networks, args)
    replay = module.Replay(args.buffer_size)
    (make_env,) = env_functions(request, clock)
    collector = module.Collector(make_env(), replay, request.seed)
    for step in range(1, request.steps + 1):
        warming_up = step <= args.learning_starts
        random_share = 1.0 if warming_up else module.epsilon(step - 1, args)
        collector.step(module.explore(networks.online, collector.obs, random_share))
        if not warming_up and step % args.train_freq == 0:
            for _ in range(args.gradient_steps):
                batch = replay.rows(torch.randint(len(replay), (args.batch_size,)))
                module.dqn_update(networks, optimizer, batch, args)
        if step % args.target_update_interval == 0:
            module.copy_target(networks)
    return lambda: lambda obs: module.greedy_action(networks.online, obs)


class Float32(gym.ObservationWrapper[Any, Any, Any]):
    """Observations in the precision of the networks."""

    def observation(self, observation: Any) -> Any:
        return np.asarray(observation, np.float32)


def continuous(module: Any, request: Request, clock: Clock) -> Trained:
    (make_env,) = env_functions(request, clock)
    env = Float32(make_env())
    space = env.action_space
    assert isinstance(space, gym.spaces.Box)
    assert (space.high == -space.low).all()
    module.OBS_SIZE, module.ACTION_SIZE = env.observation_space.shape[0], space.shape[0]
    module.MAX_TORQUE = float(space.high[0])
    args = parsed(module, request)
    args.target_entropy = -float(module.ACTION_SIZE)
    agent = module.Agent(args)
    replay = module.Replay(args.buffer_size)
    collector = module.Collector(env, replay, request.seed)
    noise_shape = (args.batch_size, module.ACTION_SIZE)
    for step in itertools.takewhile(lambda step: step <= request.steps, itertools.count(1)):
        if step <= args.learning_starts:
            collector.step(2 * torch.rand(module.ACTION_SIZE) - 1)
            continue
        batch_of = lambda: replay.rows(torch.randint(len(replay), (args.batch_size,)))  # noqa: E731
        if request.algo == "sac":
            collector.step(agent.explore(collector.obs))
            module.sac_update(agent, batch_of(), torch.randn(2, *noise_shape), args)
        else:
            collector.step(agent.explore(collector.obs, args.exploration_noise))
            module.td3_update(agent, batch_of(), torch.randn(noise_shape), args)

    def act(obs: Any) -> Any:
        action = agent.greedy_action(np.asarray(obs, np.float32)).numpy()
        return scaled(space.low, space.high, action)

    return lambda: act


if __name__ == "__main__":
    answer(train, ("torch",))
