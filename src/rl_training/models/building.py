"""Networks from the settings of a run."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from torch import nn

from rl_training.models.action_heads import ReplayHead
from rl_training.models.custom import CustomActorCritic, CustomQNetwork
from rl_training.models.encoders import EncoderConfig
from rl_training.models.iqn_network import IQNNetwork
from rl_training.models.mlp_actor_critic import FeedForwardActorCritic, MLPActorCritic
from rl_training.models.mlp_continuous import ActorCritics, MLPActor, MLPCritics, MLPValue
from rl_training.models.mlp_q_network import FeedForwardQNetwork, MLPQNetwork
from rl_training.models.recurrent.continuous import RecurrentActor, RecurrentCritics
from rl_training.models.user_class import UserClass
from rl_training.models.value_distributions import ValueDistribution
from rl_training.plugins import named_class
from rl_training.types import ActionSpec, ObsSpec


class NetworkSettings(Protocol):
    """The settings of a run (`TrainConfig`) that its networks depend on."""

    @property
    def algo_kwargs(self) -> Any:
        """Settings of the algorithm."""
        ...

    @property
    def normalize_obs(self) -> bool:
        """Whether vectors are standardised."""
        ...

    @property
    def clip_obs(self) -> float:
        """Limit of standardised vectors."""
        ...

    @property
    def precision(self) -> str:
        """Precision of networks for images."""
        ...


def hidden_layers(
    given: tuple[int, ...] | None, obs_spec: ObsSpec, usual: tuple[int, ...]
) -> tuple[int, ...]:
    """Return widths of hidden layers: those given, else the usual ones, or none after images."""
    if given is not None:
        return given
    return () if obs_spec.has_images else usual


def encoder_config(config: NetworkSettings, *, orthogonal: bool) -> EncoderConfig:
    """Return how a run's networks encode observations."""
    settings = config.algo_kwargs
    return EncoderConfig(
        custom=user_class(settings.encoder, settings.encoder_kwargs, "algo_kwargs.encoder"),
        feature_size=settings.feature_size,
        orthogonal=orthogonal,
        bfloat16=config.precision == "bfloat16",
    )


def user_class(path: str | None, kwargs: dict[str, Any], setting: str) -> UserClass | None:
    """Return the class that a setting names, imported; None where it is unset."""
    if path is None:
        return None
    return UserClass(named_class(path, nn.Module, setting), kwargs, setting)


def build_actor_critic(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec
) -> FeedForwardActorCritic:
    """Return a policy and a value function without memory."""
    settings = config.algo_kwargs
    network = user_class(settings.network, settings.network_kwargs, "algo_kwargs.network")
    shared: dict[str, Any] = {
        "log_std_init": settings.log_std_init,
        "normalize_obs": config.normalize_obs,
        "clip_obs": config.clip_obs,
    }
    if network is not None:
        return CustomActorCritic(obs_spec, action_spec, network, **shared)
    return MLPActorCritic(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(settings.hidden_sizes, obs_spec, (64, 64)),
        critic_hidden_sizes=settings.critic_hidden_sizes,
        activation=settings.activation,
        encoder=encoder_config(config, orthogonal=True),
        **shared,
    )


def build_q_network(
    config: NetworkSettings,
    obs_spec: ObsSpec,
    action_spec: ActionSpec,
    distribution: ValueDistribution | None = None,
) -> FeedForwardQNetwork:
    """Return a network of action values, or of distributions of returns."""
    settings = config.algo_kwargs
    network = user_class(settings.network, settings.network_kwargs, "algo_kwargs.network")
    if network is not None:
        shared: dict[str, Any] = {
            "distribution": distribution,
            "normalize_obs": config.normalize_obs,
            "clip_obs": config.clip_obs,
        }
        return CustomQNetwork(obs_spec, action_spec, network, **shared)
    sizes = q_network_settings(config, obs_spec)
    return MLPQNetwork(obs_spec, action_spec, distribution=distribution, **sizes)


def build_iqn_network(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec
) -> IQNNetwork:
    """Return IQN's network."""
    settings = config.algo_kwargs
    return IQNNetwork(
        obs_spec,
        action_spec,
        num_policy_quantiles=settings.num_policy_quantiles,
        embedding_size=settings.embedding_size,
        **q_network_settings(config, obs_spec),
    )


def q_network_settings(config: NetworkSettings, obs_spec: ObsSpec) -> dict[str, Any]:
    """Return the keywords of DQN's network, where it is not the user's own."""
    settings = config.algo_kwargs
    return {
        "hidden_sizes": hidden_layers(settings.hidden_sizes, obs_spec, (120, 84)),
        "activation": settings.activation,
        "dueling": settings.dueling,
        "noisy": settings.noisy,
        "encoder": encoder_config(config, orthogonal=False),
        "normalize_obs": config.normalize_obs,
        "clip_obs": config.clip_obs,
    }


def build_normalized_q_network(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec
) -> FeedForwardQNetwork:
    """Return PQN's network: DQN's with layer normalisation."""
    settings = config.algo_kwargs
    network = user_class(settings.network, settings.network_kwargs, "algo_kwargs.network")
    shared: dict[str, Any] = {"normalize_obs": config.normalize_obs, "clip_obs": config.clip_obs}
    if network is not None:
        return CustomQNetwork(obs_spec, action_spec, network, **shared)
    encoder = encoder_config(config, orthogonal=False)
    return MLPQNetwork(
        obs_spec,
        action_spec,
        hidden_sizes=hidden_layers(settings.hidden_sizes, obs_spec, (120, 84)),
        activation=settings.activation,
        dueling=settings.dueling,
        layer_norm=settings.layer_norm,
        encoder=dataclasses.replace(encoder, layer_norm=settings.layer_norm),
        **shared,
    )


def build_plain_q_network(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec
) -> MLPQNetwork:
    """Return DQN's network without its options, with the sizes of a learner from a dataset."""
    return MLPQNetwork(obs_spec, action_spec, **_replay_network(config, obs_spec))


def build_actor(config: NetworkSettings, obs_spec: ObsSpec, head: ReplayHead) -> MLPActor:
    """Return a policy with this head, for learners from a replay or a dataset."""
    return MLPActor(obs_spec, head, **_replay_network(config, obs_spec))


def build_critics(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec
) -> MLPCritics:
    """Return an ensemble of critics."""
    settings = config.algo_kwargs
    discrete = action_spec.kind == "discrete"
    return MLPCritics(
        obs_spec,
        action_spec.size,
        num_critics=settings.num_critics,
        layer_norm=settings.critic_layer_norm,
        num_actions=action_spec.nvec[0] if discrete else 0,
        **_critic_network(config, obs_spec),
    )


def build_value(config: NetworkSettings, obs_spec: ObsSpec) -> MLPValue:
    """Return a value function."""
    return MLPValue(obs_spec, **_critic_network(config, obs_spec))


def build_actor_critics(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec, head: ReplayHead
) -> ActorCritics:
    """Return a policy with this head and an ensemble of critics."""
    actor = build_actor(config, obs_spec, head)
    return ActorCritics(actor, build_critics(config, obs_spec, action_spec))


def memory_settings(settings: Any) -> dict[str, Any]:
    """Return the keywords of recurrent networks that describe their memory."""
    return {name: getattr(settings, name) for name in ("memory", "lstm_size", "memory_span")}


def build_recurrent_actor_critics(
    config: NetworkSettings, obs_spec: ObsSpec, action_spec: ActionSpec, head: ReplayHead
) -> ActorCritics:
    """Return a policy with this head and an ensemble of critics, with a memory each."""
    settings = config.algo_kwargs
    memory = memory_settings(settings)
    actor: Any = RecurrentActor(obs_spec, head, **memory, **_replay_network(config, obs_spec))
    critics: Any = RecurrentCritics(
        obs_spec,
        action_spec.size,
        num_critics=settings.num_critics,
        layer_norm=settings.critic_layer_norm,
        **memory,
        **_critic_network(config, obs_spec),
    )
    return ActorCritics(actor, critics)


def _replay_network(config: NetworkSettings, obs_spec: ObsSpec) -> dict[str, Any]:
    settings = config.algo_kwargs
    return {
        "hidden_sizes": hidden_layers(settings.hidden_sizes, obs_spec, (256, 256)),
        "activation": settings.activation,
        "encoder": encoder_config(config, orthogonal=False),
        "normalize_obs": config.normalize_obs,
        "clip_obs": config.clip_obs,
    }


def _critic_network(config: NetworkSettings, obs_spec: ObsSpec) -> dict[str, Any]:
    shared, sizes = _replay_network(config, obs_spec), config.algo_kwargs.critic_hidden_sizes
    return shared if sizes is None else {**shared, "hidden_sizes": sizes}
