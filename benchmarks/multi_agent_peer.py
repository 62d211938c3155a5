"""skrl's IPPO and MAPPO, for `multi_agent.py`; runs in an environment of its own.

    python multi_agent_peer.py ALGO TASK STEPS SEED EPISODES

Prints one JSON object: steps of the environment per second of CPU time while training, and the
return of each agent over so many episodes with the most likely actions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import torch
from multi_agent_tasks import ROLLOUT, TASKS, played
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.multi_agents.torch.ippo import IPPO, IPPO_CFG
from skrl.multi_agents.torch.mappo import MAPPO, MAPPO_CFG
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Policy(CategoricalMixin, Model):
    def __init__(self, observation_space, state_space, action_space, device):
        Model.__init__(
            self,
            observation_space=observation_space,
            state_space=state_space,
            action_space=action_space,
            device=device,
        )
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = layers(self.num_observations, self.num_actions)

    def compute(self, inputs, role=""):
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, observation_space, state_space, action_space, device, key):
        Model.__init__(
            self,
            observation_space=observation_space,
            state_space=state_space,
            action_space=action_space,
            device=device,
        )
        DeterministicMixin.__init__(self)
        self.key = key
        size = self.num_states if key == "states" else self.num_observations
        self.net = layers(size, 1)

    def compute(self, inputs, role=""):
        return self.net(inputs[self.key]), {}


def main() -> None:
    algo, task, steps, seed, episodes = *sys.argv[1:3], *map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    set_seed(seed)
    env = wrap_env(TASKS[task](), wrapper="pettingzoo")
    key = "states" if algo == "mappo" else "observations"
    models, memories = {}, {}
    for agent in env.possible_agents:
        spaces = {
            "observation_space": env.observation_spaces[agent],
            "state_space": env.state_spaces[agent],
            "action_space": env.action_spaces[agent],
            "device": env.device,
        }
        models[agent] = {"policy": Policy(**spaces), "value": Value(**spaces, key=key)}
        memories[agent] = RandomMemory(memory_size=ROLLOUT, num_envs=1, device=env.device)
    kind, settings = (MAPPO, MAPPO_CFG()) if algo == "mappo" else (IPPO, IPPO_CFG())
    settings.rollouts = ROLLOUT
    settings.learning_epochs = 8
    settings.discount_factor = 0.9
    settings.mini_batches = 1
    settings.learning_rate = 1e-3
    settings.entropy_loss_scale = 0.01
    settings.value_loss_scale = 0.5
    settings.value_clip = 0.0
    settings.grad_norm_clip = 0.5
    settings.time_limit_bootstrap = True
    for field in dataclasses.fields(settings):  # it takes an empty dict for one of no agents
        if getattr(settings, field.name) == {}:
            setattr(settings, field.name, {agent: {} for agent in env.possible_agents})
    settings.experiment.write_interval = 0
    settings.experiment.checkpoint_interval = 0
    learner = kind(
        possible_agents=env.possible_agents,
        models=models,
        memories=memories,
        observation_spaces=env.observation_spaces,
        state_spaces=env.state_spaces,
        action_spaces=env.action_spaces,
        device=env.device,
        cfg=settings,
    )
    trainer = SequentialTrainer(
        env=env,
        agents=learner,
        cfg={"timesteps": steps, "headless": True, "disable_progressbar": True},
    )
    begin = time.process_time()
    trainer.train()
    rate = steps / (time.process_time() - begin)

    def act(seen):
        with torch.no_grad():
            return {
                agent: int(models[agent]["policy"].net(torch.as_tensor(obs)).argmax())
                for agent, obs in seen.items()
            }

    returns = played(task, act, episodes)
    print(json.dumps({"rate": rate, "returns": returns}))


if __name__ == "__main__":
    main()
