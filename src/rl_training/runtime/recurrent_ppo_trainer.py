"""RecurrentPPO on the shared runtime."""

from __future__ import annotations

from typing import Any

import torch

from rl_training.algorithms.ppo import PPO
from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.contrib.recurrent_ppo import RecurrentPPO, RecurrentPPOConfig
from rl_training.data.recurrent_rollout_buffer import RecurrentRolloutBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.models.building import encoder_config, hidden_layers, memory_settings
from rl_training.models.recurrent.lstm_actor_critic import LSTMActorCritic
from rl_training.runtime.actors import Actor
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.policy import RecurrentTrainedPolicy
from rl_training.runtime.recurrent_actors import RecurrentEvaluationActor, RecurrentPolicyActor
from rl_training.runtime.setup import train_function
from rl_training.runtime.spec import AlgorithmSpec, learner_arguments
from rl_training.runtime.trainer import Setup
from rl_training.seeding import shard_key, torch_stream
from rl_training.types import ActionSpec, ObsSpec


class RecurrentPPOTrainer(OnPolicyTrainer):
    """The on-policy loop over a rollout of sequences."""

    def make_buffer(self, setup: Setup) -> RolloutBuffer:
        """Storage for one rollout."""
        length = setup.config.algo_kwargs.sequence_length
        return self.make_buffer_of(RecurrentRolloutBuffer, setup, sequence_length=length)


def build_recurrent_ppo(
    config: TrainConfig[Any],
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    device: torch.device,
    communicator: Communicator = ALONE,
) -> RecurrentPPO:
    """RecurrentPPO and its model, at the start of the config's random streams."""
    model = recurrent_model(config, obs_spec, action_spec).to(device)
    arguments = learner_arguments(config, communicator, "minibatches")
    return RecurrentPPO(model, config.algo_kwargs, **arguments)


def recurrent_model(
    config: TrainConfig[Any], obs_spec: ObsSpec, action_spec: ActionSpec
) -> LSTMActorCritic:
    """Return policy and value function of a config."""
    knobs = config.algo_kwargs
    return LSTMActorCritic(
        obs_spec,
        action_spec,
        shared_lstm=knobs.shared_lstm,
        critic_hidden_sizes=knobs.critic_hidden_sizes,
        **recurrent_settings(config, obs_spec),
    )


def recurrent_settings(config: TrainConfig[Any], obs_spec: ObsSpec) -> dict[str, Any]:
    """Return the keywords that recurrent policies with a value function have in common."""
    knobs = config.algo_kwargs
    return {
        **memory_settings(knobs),
        "hidden_sizes": hidden_layers(knobs.hidden_sizes, obs_spec, (64,)),
        "activation": knobs.activation,
        "log_std_init": knobs.log_std_init,
        "encoder": encoder_config(config, orthogonal=True),
        "normalize_obs": config.normalize_obs,
        "clip_obs": config.clip_obs,
    }


def recurrent_actor(
    algorithm: PPO,
    config: TrainConfig[Any],
    device: torch.device,
    shard: int = 0,
) -> Actor:
    """Return the exploring actor of PPO on a recurrent model."""
    model: Any = algorithm.model
    generator = torch_stream(config.seed, "actions", *shard_key(shard))
    return RecurrentPolicyActor(model, config.algo_kwargs.num_steps, generator, device)


def recurrent_eval_actor(
    algorithm: PPO, device: torch.device, sampling: torch.Generator | None
) -> Actor:
    """Return the actor that evaluates PPO on a recurrent model."""
    model: Any = algorithm.model
    return RecurrentEvaluationActor(model, device, sampling)


SPEC = AlgorithmSpec(
    name="recurrent_ppo",
    config=RecurrentPPOConfig,
    build=build_recurrent_ppo,
    actor=recurrent_actor,
    eval_actor=recurrent_eval_actor,
    trainer=RecurrentPPOTrainer,
    policy=RecurrentTrainedPolicy,
)


train_recurrent_ppo = train_function("recurrent_ppo")
