"""`PolicyModule`: all of `predict` as one torch module, from observations to actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.communicator import Communicator
from rl_training.errors import ConfigError
from rl_training.export.signature import (
    EPISODE_START,
    NOISE,
    STATE,
    Noise,
    Port,
    Signature,
    action_parts,
    make_signature,
    part_name,
)
from rl_training.models.action_heads import (
    BernoulliHead,
    CategoricalHead,
    HybridHead,
    PolicyHead,
    ReplayHead,
    TanhHead,
)
from rl_training.registry import spec_of
from rl_training.runtime.actors import EpsilonGreedyActor, EvaluationActor
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.policy import TrainedPolicy
from rl_training.runtime.recurrent_actors import (
    RecurrentEpsilonGreedyActor,
    RecurrentEvaluationActor,
)
from rl_training.types import (
    ActionSpec,
    ArraySpec,
    GroupedObsSpec,
    ObsSpec,
    Progress,
)

_EPSILON_GREEDY = (EpsilonGreedyActor, RecurrentEpsilonGreedyActor)
_EVALUATION = (EvaluationActor, RecurrentEvaluationActor)


class PolicyModule(nn.Module):
    """Computes what `predict` computes; its inputs are those of ``signature``, in their order."""

    def __init__(
        self,
        model: Any,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        noises: tuple[Noise, ...] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.noises = noises
        """Of each array of an action; none: the most likely action is chosen."""
        has_memory = hasattr(model, "state_size")
        state_size = model.state_size if has_memory else None
        self.signature: Signature = make_signature(obs_spec, action_spec, state_size, noises)
        self._is_dict = obs_spec.is_dict
        self._leaves = nn.ModuleList(_Leaf(leaf) for leaf in obs_spec.leaves.values())
        self._ports: dict[str, Port] = {
            port.leaf: port for port in self.signature.inputs if port.leaf is not None
        }
        self._to_env = nn.ModuleList(_ToEnv(spec) for _, spec in action_parts(action_spec))
        self.eval()

    @property
    def head(self) -> PolicyHead | ReplayHead:
        """What turns the network's output into actions."""
        head: PolicyHead | ReplayHead = self.model.head
        return head

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the actions in the environment's format, and the next state of a memory."""
        params, mask, after, drawn = self._read(inputs)
        of_parts = zip(self._to_env, self._parts(params, mask), drawn, strict=True)
        actions = tuple(to_env(self._chosen(*part, own)) for to_env, part, own in of_parts)
        return actions if after is None else (*actions, after)

    def scores(self, *inputs: Tensor) -> list[Tensor | None]:
        """Return the scores that discrete choices are made from, of each part; None for a Box."""
        params, mask, _, drawn = self._read(inputs)
        parts = zip(self._parts(params, mask), drawn, strict=True)
        return [self._scores(*part, own) for part, own in parts]

    def _scores(
        self, head: Any, params: Tensor, mask: Tensor | None, drawn: Tensor | None
    ) -> Tensor | None:
        if not isinstance(head, CategoricalHead | BernoulliHead):
            return None
        if drawn is None:
            return head.scores(params, None, mask)
        if (epsilon := self.noises[0].epsilon) is None:
            return head.scores(params, head.noise_from(drawn), mask)
        random = (drawn[:, 0] < epsilon).unsqueeze(-1)
        return torch.where(random, _legal_numbers(drawn, mask), head.scores(params, None, mask))

    def _parts(self, params: Tensor, mask: Tensor | None) -> Sequence[tuple[Any, Tensor, Any]]:
        """Return head, parameters and mask of each array of the action."""
        head = self.head
        return (
            head.of_parts(params, mask) if isinstance(head, HybridHead) else [(head, params, mask)]
        )

    def _read(self, inputs: tuple[Tensor, ...]) -> Any:
        """Return parameters of the action distribution, mask, next state and random numbers.

        There are random numbers for each array of the action; None for each: it is the most likely.
        """
        given = {port.name: x for port, x in zip(self.signature.inputs, inputs, strict=True)}
        pairs = zip(self._ports.items(), self._leaves, strict=True)
        stored = {name: leaf(given[port.name]) for (name, port), leaf in pairs}
        obs: Any = stored if self._is_dict else stored[""]
        drawn: list[Any] = [given[noise.name] for noise in self.noises]
        drawn = drawn or [None] * len(self._to_env)
        if STATE not in given:
            params, mask = self.model.policy(obs)
            return params, mask, None, drawn
        state = torch.where(given[EPISODE_START].unsqueeze(-1), 0.0, given[STATE])
        params, mask, after = self.model.policy_step(obs, state)
        return params, mask, after, drawn

    def _chosen(
        self, head: Any, params: Tensor, mask: Tensor | None, drawn: Tensor | None
    ) -> Tensor:
        chosen: Tensor
        if drawn is None:
            chosen = head.mode(params, mask)
        elif (epsilon := self.noises[0].epsilon) is None:
            chosen = head.sample(params, head.noise_from(drawn), mask)
        else:
            anything = _legal_numbers(drawn, mask).argmax(-1)
            chosen = torch.where(drawn[:, 0] < epsilon, anything, head.mode(params, mask))
        return chosen


def _legal_numbers(drawn: Tensor, mask: Tensor | None) -> Tensor:
    """Return the numbers that select a random action, as `EpsilonGreedyActor` uses them."""
    numbers = drawn[:, 1:]
    return numbers if mask is None else torch.where(mask, numbers, -1.0)


class _Leaf(nn.Module):
    """`ArraySpec.arranged` and the cast to the dtype of storage, of batches."""

    values: Tensor
    components: Tensor

    def __init__(self, leaf: ArraySpec) -> None:
        super().__init__()
        self._leaf = leaf
        self._channels_last = bool(leaf.given) and leaf.given[-3:-1] == leaf.shape[1:]
        self._dtype: torch.dtype = getattr(torch, leaf.dtype)
        pairs = list(zip(leaf.nvec, leaf.start, strict=True))
        values = [low + i for count, low in pairs for i in range(count)]
        components = [number for number, (count, _) in enumerate(pairs) for _ in range(count)]
        self.register_buffer("values", torch.tensor(values, dtype=torch.int64))
        self.register_buffer("components", torch.tensor(components, dtype=torch.int64))

    def forward(self, given: Tensor) -> Tensor:
        leaf = self._leaf
        if leaf.nvec:
            flat = given.reshape(given.shape[0], len(leaf.nvec))
            return (flat.index_select(1, self.components) == self.values).to(self._dtype)
        if leaf.given:
            if self._channels_last:
                given = given.movedim(-1, -3)
            given = given.reshape(given.shape[0], *leaf.shape)
        return given.to(self._dtype)


class _ToEnv(nn.Module):
    """`ActionSpec.to_env`; actions of a Box are mapped in float64, as there."""

    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor
    offset: Tensor

    def __init__(self, spec: ActionSpec) -> None:
        super().__init__()
        self._is_box = spec.kind == "box"
        self._has_offset = any(spec.start)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        if self._is_box:
            for name, array in zip(
                ("low", "high", "center", "half_range"), spec.affine, strict=True
            ):
                self.register_buffer(name, torch.from_numpy(array.copy()))
        if self._has_offset:
            start = np.asarray(spec.start, np.int64).reshape(spec.shape)
            self.register_buffer("offset", torch.from_numpy(start))

    def forward(self, action: Tensor) -> Tensor:
        if self._is_box:
            scaled = self.center + self.half_range * action.double()
            return torch.minimum(torch.maximum(scaled, self.low), self.high).to(self._dtype)
        if self._has_offset:
            action = action + self.offset
        return action.to(self._dtype)


def copied_to_cpu(policy: TrainedPolicy) -> TrainedPolicy:
    """Return a policy with a copy of the weights on the CPU, and its own random generators."""
    config, spaces = policy.config, (policy.obs_spec, policy.action_spec)
    cpu = torch.device("cpu")
    algorithm = build_algorithm(config, *spaces, cpu, communicator=Communicator(config.shards))
    algorithm.load_weights({k: v.cpu() for k, v in policy.module.state_dict().items()})
    spec = spec_of(config)
    return spec.policy(spec, config, algorithm, *spaces, cpu)


def module_of(policy: TrainedPolicy, *, stochastic: bool) -> PolicyModule:
    """Return a policy as a module; with ``stochastic`` it samples, as ``predict`` then does.

    Raises `ConfigError` where that is not possible.
    """
    if isinstance(policy.obs_spec, GroupedObsSpec):
        raise ConfigError(
            f"a policy of one group of agents can be exported, and this one has the groups"
            f" {', '.join(policy.obs_spec.groups)}, each with networks of its own"
        )
    actor = policy.evaluation_actor(not stochastic, policy.config.seed)
    if not isinstance(actor, (*_EVALUATION, *_EPSILON_GREEDY)):
        raise ConfigError(
            f"{policy.config.algo} cannot be exported: its actions are chosen by"
            f" {type(actor).__name__}, and the export knows only the actors of rl_training"
        )
    model: Any = actor.model
    noises: tuple[Noise, ...] = ()
    if stochastic and isinstance(actor, _EPSILON_GREEDY):
        epsilon = actor.epsilon(Progress(1, 1))
        noises = (Noise("uniform", (1 + model.head.param_size,), epsilon),)
    elif stochastic:
        if isinstance(actor, _EVALUATION) and _is_deterministic(actor):
            raise ConfigError(
                f"this {policy.config.algo} policy does not sample: an observation always leads to"
                " the same action. Export it without stochastic"
            )
        if not isinstance(model.head, PolicyHead | ReplayHead):
            raise ConfigError(
                f"{policy.config.algo} cannot be exported with stochastic: how"
                f" {type(model.head).__name__} samples is not known to the export"
            )
        heads: Any = model.head.heads if isinstance(model.head, HybridHead) else [model.head]
        paths = [path for path, _ in action_parts(policy.action_spec)]
        noises = tuple(
            Noise(head.noise_source, head.noise_shape, name=part_name(NOISE, path))
            for head, path in zip(heads, paths, strict=True)
        )
    return PolicyModule(model, policy.acting_spec, policy.action_spec, noises)


def _is_deterministic(actor: EvaluationActor | RecurrentEvaluationActor) -> bool:
    """Whether an actor that may sample does not."""
    head = actor.model.head
    return actor.sampling is None or (isinstance(head, TanhHead) and not head.exploration_noise)
