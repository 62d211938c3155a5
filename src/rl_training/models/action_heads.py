"""Action distributions as pure functions of network outputs, with the noise as an input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.types import ActionSpec, Array, HybridActionSpec

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


NumpyChoice: TypeAlias = Callable[[Array, Array | None], Array]
"""Distribution parameters and noise (None: greedy) to actions."""

NoiseSource: TypeAlias = Literal["uniform", "normal"]
"""Random numbers that a head's noise is made from: uniform in [0, 1), or standard normal."""


class ActionHead(Protocol):
    """How a network's output becomes actions; ``mask`` marks the legal discrete choices."""

    param_size: int
    """Numbers the network gives per observation."""
    noise_shape: tuple[int, ...]
    """Shape of one action's noise."""
    noise_source: ClassVar[NoiseSource]
    """Random numbers that `noise_from` takes."""

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise for a block of ``shape`` actions, on the generator's device."""
        ...

    def noise_from(self, drawn: Tensor, /) -> Tensor:
        """The noise that these random numbers become; `draw_noise` draws them first."""
        ...

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        """The action that ``noise`` selects."""
        ...

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """The most likely action."""
        ...

    def numpy_choice(self) -> NumpyChoice | None:
        """`sample` (or, without noise, `mode`) in NumPy; None where it is not worth it."""
        ...


class CategoricalHead(nn.Module):
    """Discrete and MultiDiscrete: independent categoricals, sampled by the Gumbel-max trick."""

    noise_source: ClassVar[NoiseSource] = "uniform"

    def __init__(self, nvec: tuple[int, ...], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.nvec = list(nvec)
        self.shape = shape
        self.param_size = sum(nvec)
        self.noise_shape: tuple[int, ...] = (self.param_size,)

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand(
            (*shape, *self.noise_shape), generator=generator, device=generator.device
        )
        return self.noise_from(uniform)

    def noise_from(self, uniform: Tensor) -> Tensor:
        tiny = torch.finfo(uniform.dtype).tiny
        return -torch.log((-torch.log(uniform.clamp(min=tiny))).clamp(min=tiny))

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        return self.choose(self.scores(params, noise, mask))

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        return self.choose(self.scores(params, None, mask))

    def scores(self, params: Tensor, noise: Tensor | None, mask: Tensor | None) -> Tensor:
        legal = _legal(params, mask)
        return legal if noise is None else legal + noise

    def choose(self, scores: Tensor) -> Tensor:
        """Return the choice of the highest score, one per component."""
        if not self.shape:
            return scores.argmax(-1)
        parts = [part.argmax(-1) for part in torch.split(scores, self.nvec, -1)]
        return torch.stack(parts, -1).reshape(*scores.shape[:-1], *self.shape)

    def logprob_entropy(
        self, params: Tensor, actions: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = _legal(params, mask)
        if not self.shape:
            return _categorical(logits, actions)
        columns = actions.reshape(*logits.shape[:-1], -1).unbind(-1)
        parts = [
            _categorical(part, column)
            for part, column in zip(torch.split(logits, self.nvec, -1), columns, strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.stack(logprobs).sum(0), torch.stack(entropies).sum(0)

    def logprob(self, params: Tensor, actions: Tensor, mask: Tensor | None) -> Tensor:
        """Log-probabilities of actions, one per row."""
        return self.logprob_entropy(params, actions, mask)[0]

    def distribution(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return log-probabilities of all choices, component by component."""
        logits = _legal(params, mask)
        if not self.shape:
            return torch.log_softmax(logits, -1)
        parts = torch.split(logits, self.nvec, -1)
        return torch.cat([torch.log_softmax(part, -1) for part in parts], -1)

    def kl(self, before: Tensor, after: Tensor) -> Tensor:
        """Return sum_a p(a) (log p(a) - log q(a)) of each row, for p ``before`` and q ``after``."""
        return (before.exp() * (before - after)).sum(-1)

    def numpy_choice(self) -> NumpyChoice | None:
        if self.shape:
            return None
        return lambda params, noise: (params if noise is None else params + noise).argmax(-1)


def _legal(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits
    # Finite, so that p log p is 0 and not NaN for an illegal action.
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def _categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    logprob = log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return logprob, -(log_p.exp() * log_p).sum(-1)


class _NormalNoise(nn.Module):
    """What the heads for Box actions share: one normal number per component."""

    noise_source: ClassVar[NoiseSource] = "normal"

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.noise_shape = shape
        self.param_size = math.prod(shape)

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(
            (*shape, *self.noise_shape), generator=generator, device=generator.device
        )

    def noise_from(self, normal: Tensor) -> Tensor:
        return normal


class GaussianHead(_NormalNoise):
    """Box: a diagonal Gaussian with a learnt, state-independent deviation."""

    def __init__(self, shape: tuple[int, ...], log_std_init: float) -> None:
        super().__init__(shape)
        self.log_std = nn.Parameter(torch.full((self.param_size,), log_std_init))

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return self._shaped(params) + self._shaped(self.log_std.exp()) * noise

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return self._shaped(params)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def logprob_entropy(
        self, params: Tensor, actions: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        del mask
        z = (actions.reshape(params.shape) - params) * torch.exp(-self.log_std)
        log_std = self.log_std.sum()
        logprob = -0.5 * z.square().sum(-1) - log_std - self.param_size * _LOG_SQRT_2PI
        entropy = log_std + self.param_size * (0.5 + _LOG_SQRT_2PI)
        return logprob, entropy.expand(logprob.shape)

    def distribution(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return means and logarithms of deviations."""
        del mask
        return torch.cat((params, self.log_std.expand_as(params)), -1)

    def kl(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the divergence of each row, for p ``before`` and q ``after``.

        kl = sum( log s_q - log s_p + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1/2 )
        """
        (mean, log_std), (other, other_log_std) = before.chunk(2, -1), after.chunk(2, -1)
        change = log_std - other_log_std
        distance = (mean - other) * torch.exp(-other_log_std)
        return (0.5 * ((2 * change).exp() + distance.square() - 1) - change).sum(-1)

    def numpy_choice(self) -> NumpyChoice | None:
        deviation = np.exp(self.log_std.detach().numpy()).reshape(self.shape)

        def choose(params: Array, noise: Array | None) -> Array:
            mean = params.reshape(-1, *self.shape)
            return mean if noise is None else mean + deviation * noise

        return choose


class BernoulliHead(nn.Module):
    """MultiBinary: independent coins, sampled with logistic noise."""

    noise_source: ClassVar[NoiseSource] = "uniform"

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.param_size = math.prod(shape)
        self.noise_shape = shape

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand(
            (*shape, *self.noise_shape), generator=generator, device=generator.device
        )
        return self.noise_from(uniform)

    def noise_from(self, uniform: Tensor) -> Tensor:
        return torch.logit(uniform, eps=1e-7)

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        return self.choose(self.scores(params, noise, mask))

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        return self.choose(self.scores(params, None, mask))

    def scores(self, params: Tensor, noise: Tensor | None, mask: Tensor | None) -> Tensor:
        del mask
        logits = self._shaped(params)
        return logits if noise is None else logits + noise

    def choose(self, scores: Tensor) -> Tensor:
        """Return 1 where a score is positive, else 0."""
        return (scores > 0).long()

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def logprob_entropy(
        self, params: Tensor, actions: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        del mask
        flat = actions.reshape(params.shape).to(params.dtype)
        log_p, log_q = nn.functional.logsigmoid(params), nn.functional.logsigmoid(-params)
        logprob = (flat * log_p + (1 - flat) * log_q).sum(-1)
        entropy = -(log_p.exp() * log_p + log_q.exp() * log_q).sum(-1)
        return logprob, entropy

    def distribution(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits."""
        del mask
        return params

    def kl(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the divergence of each row, summed over both values of each component."""
        log_sigmoid = nn.functional.logsigmoid
        of_one = before.sigmoid() * (log_sigmoid(before) - log_sigmoid(after))
        of_zero = (-before).sigmoid() * (log_sigmoid(-before) - log_sigmoid(-after))
        return (of_one + of_zero).sum(-1)

    def numpy_choice(self) -> NumpyChoice | None:
        return None


class SquashedGaussianHead(_NormalNoise):
    """Box within bounds: tanh of a Gaussian whose mean and deviation depend on the state."""

    _LOG_STD = (-20.0, 2.0)

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.param_size = 2 * math.prod(shape)

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        mean, log_std = self._split(params)
        return torch.tanh(mean + log_std.exp() * noise)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return torch.tanh(self._split(params)[0])

    def sample_logprob(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities, one per row.

        With u = mean + std noise and a = tanh(u):

            log p(a) = sum( log N(u; mean, std) - log(1 - a^2) )
            log(1 - tanh(u)^2) = 2 ( log 2 - u - softplus(-2u) )

        the second so that it stays finite however large u is.
        """
        mean, log_std = self._split(params)
        u = mean + log_std.exp() * noise
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
        logprob = -0.5 * noise.square() - log_std - _LOG_SQRT_2PI - log_slope
        return torch.tanh(u), logprob.reshape(len(logprob), -1).sum(1)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        both = params.reshape(*params.shape[:-1], 2, *self.shape)
        mean, log_std = both.unbind(params.ndim - 1)
        return mean, log_std.clamp(*self._LOG_STD)

    def numpy_choice(self) -> NumpyChoice | None:
        def choose(params: Array, noise: Array | None) -> Array:
            both = params.reshape(-1, 2, *self.shape)
            u = both[:, 0]
            if noise is not None:
                u = u + np.exp(both[:, 1].clip(*self._LOG_STD)) * noise
            action: Array = np.tanh(u)
            return action

        return choose


class TanhHead(_NormalNoise):
    """Box within bounds: a deterministic action; exploring adds noise to it, within the bounds."""

    def __init__(self, shape: tuple[int, ...], exploration_noise: float) -> None:
        super().__init__(shape)
        self.exploration_noise = exploration_noise

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        return (self.mode(params, mask) + self.exploration_noise * noise).clamp(-1.0, 1.0)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return torch.tanh(params).reshape(*params.shape[:-1], *self.shape)

    def numpy_choice(self) -> NumpyChoice | None:
        def choose(params: Array, noise: Array | None) -> Array:
            action = np.tanh(params).reshape(-1, *self.shape)
            if noise is None:
                return action
            return (action + self.exploration_noise * noise).clip(-1.0, 1.0)

        return choose


class TanhGaussianHead(_NormalNoise):
    """Box within bounds: a Gaussian around tanh of the network's output, clipped to the bounds.

    Its deviation is learnt and does not depend on the state. Unlike those of a squashed Gaussian,
    log-probabilities of recorded actions are finite at the bounds, too.
    """

    _LOG_STD = (-5.0, 2.0)

    def __init__(self, shape: tuple[int, ...], log_std_init: float) -> None:
        super().__init__(shape)
        self.log_std = nn.Parameter(torch.full((self.param_size,), log_std_init))

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        deviation = self._log_std().exp().reshape(self.shape)
        return (self.mode(params, mask) + deviation * noise).clamp(-1.0, 1.0)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return torch.tanh(params).reshape(*params.shape[:-1], *self.shape)

    def logprob(self, params: Tensor, actions: Tensor, mask: Tensor | None) -> Tensor:
        """Log-probabilities of actions before the clipping, one per row."""
        del mask
        log_std = self._log_std()
        z = (actions.reshape(params.shape) - torch.tanh(params)) * torch.exp(-log_std)
        return -0.5 * z.square().sum(-1) - log_std.sum() - self.param_size * _LOG_SQRT_2PI

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(*self._LOG_STD)

    def numpy_choice(self) -> NumpyChoice | None:
        log_std = self.log_std.detach().numpy()  # a view: it changes with the parameter

        def choose(params: Array, noise: Array | None) -> Array:
            action: Array = np.tanh(params).reshape(-1, *self.shape)
            if noise is None:
                return action
            deviation: Array = np.exp(log_std.clip(*self._LOG_STD)).reshape(self.shape)
            return np.clip(action + deviation * noise, -1.0, 1.0)  # type: ignore[no-any-return]

        return choose


class HybridHead(nn.Module):
    """A Dict or Tuple of actions: the parts are independent, so that log-probabilities add up.

    Actions are rows of numbers (see `HybridActionSpec`); the mask is that of all discrete parts.
    """

    noise_source: ClassVar[NoiseSource] = "uniform"

    def __init__(self, spec: HybridActionSpec, log_std_init: float) -> None:
        super().__init__()
        parts = [part for _, part in spec.parts]
        heads = [_make_plain_head(part, log_std_init) for part in parts]
        self.heads = nn.ModuleList(heads)
        self.param_size = sum(head.param_size for head in heads)
        noises = [math.prod(head.noise_shape) for head in heads]
        self.noise_shape: tuple[int, ...] = (sum(noises),)
        self._sizes = {
            "params": [head.param_size for head in heads],
            "noise": noises,
            "mask": [sum(part.nvec) for part in parts],
            "action": [part.size for part in parts],
            "distribution": [
                (2 if isinstance(head, GaussianHead) else 1) * head.param_size for head in heads
            ],
        }

    def _parts(self) -> list[CategoricalHead | GaussianHead | BernoulliHead]:
        return cast("list[CategoricalHead | GaussianHead | BernoulliHead]", list(self.heads))

    def _split(self, name: str, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, self._sizes[name], -1)

    def of_parts(
        self, params: Tensor, mask: Tensor | None
    ) -> list[tuple[CategoricalHead | GaussianHead | BernoulliHead, Tensor, Tensor | None]]:
        """Return head, parameters and mask of each part; None: all its actions are legal."""
        masks: list[Tensor | None] = [None] * len(self.heads)
        if mask is not None:
            masks = [one if one.shape[-1] else None for one in self._split("mask", mask)]
        return list(zip(self._parts(), self._split("params", params), masks, strict=True))

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = [head.draw_noise(shape, generator) for head in self._parts()]
        return torch.cat([one.reshape(*shape, -1) for one in drawn], -1)

    def noise_from(self, drawn: Tensor) -> Tensor:
        raise NotImplementedError("the parts' noise is made from different random numbers")

    def sample(self, params: Tensor, noise: Tensor, mask: Tensor | None) -> Tensor:
        batch = params.shape[:-1]
        of_parts = zip(self.of_parts(params, mask), self._split("noise", noise), strict=True)
        return self._row(
            [
                head.sample(own, drawn.reshape(*batch, *head.noise_shape), legal)
                for (head, own, legal), drawn in of_parts
            ],
            params,
        )

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.of_parts(params, mask)
        return self._row([head.mode(own, legal) for head, own, legal in parts], params)

    @staticmethod
    def _row(actions: list[Tensor], params: Tensor) -> Tensor:
        batch = params.shape[:-1]
        return torch.cat([one.reshape(*batch, -1).to(params.dtype) for one in actions], -1)

    def logprob_entropy(
        self, params: Tensor, actions: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch = params.shape[:-1]
        found = []
        of_parts = zip(self.of_parts(params, mask), self._split("action", actions), strict=True)
        for (head, own, legal), columns in of_parts:
            given = columns.reshape(*batch, *head.shape)
            if not isinstance(head, GaussianHead):
                given = given.long()
            found.append(head.logprob_entropy(own, given, legal))
        logprobs, entropies = zip(*found, strict=True)
        return torch.stack(logprobs).sum(0), torch.stack(entropies).sum(0)

    def distribution(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the distributions of the parts."""
        parts = self.of_parts(params, mask)
        return torch.cat([head.distribution(own, legal) for head, own, legal in parts], -1)

    def kl(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the sum of the parts' divergences of each row."""
        of_parts = zip(
            self._parts(),
            self._split("distribution", before),
            self._split("distribution", after),
            strict=True,
        )
        return torch.stack([head.kl(*pair) for head, *pair in of_parts]).sum(0)

    def numpy_choice(self) -> NumpyChoice | None:
        choices = [head.numpy_choice() for head in self._parts()]
        known = [choose for choose in choices if choose is not None]
        if len(known) < len(choices):
            return None
        shapes = [head.noise_shape for head in self._parts()]
        of_params, of_noise = (np.cumsum(self._sizes[name])[:-1] for name in ("params", "noise"))

        def choose(params: Array, noise: Array | None) -> Array:
            rows = len(params)
            drawn: list[Array | None] = [None] * len(known)
            if noise is not None:
                parts = np.split(noise, of_noise, -1)
                drawn = [
                    one.reshape(rows, *shape) for one, shape in zip(parts, shapes, strict=True)
                ]
            of_parts = zip(known, np.split(params, of_params, -1), drawn, strict=True)
            found = [chosen(own, one).reshape(rows, -1) for chosen, own, one in of_parts]
            return np.concatenate(found, -1, dtype=np.float32)

        return choose


PolicyHead: TypeAlias = CategoricalHead | GaussianHead | BernoulliHead | HybridHead
"""The heads whose actions have log-probabilities and an entropy."""


ReplayHead: TypeAlias = SquashedGaussianHead | TanhHead | TanhGaussianHead | CategoricalHead
"""The heads of policies that learn from a replay or a dataset."""


def make_action_head(spec: ActionSpec, log_std_init: float) -> PolicyHead:
    """The head for an action spec."""
    if isinstance(spec, HybridActionSpec):
        return HybridHead(spec, log_std_init)
    return _make_plain_head(spec, log_std_init)


def _make_plain_head(
    spec: ActionSpec, log_std_init: float
) -> CategoricalHead | GaussianHead | BernoulliHead:
    if spec.kind in ("discrete", "multi_discrete"):
        return CategoricalHead(spec.nvec, spec.shape)
    if spec.kind == "box":
        return GaussianHead(spec.shape, log_std_init)
    return BernoulliHead(spec.shape)
