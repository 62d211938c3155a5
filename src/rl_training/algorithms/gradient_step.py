"""`GradientStep`: the only place a gradient is applied, eager or compiled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from rl_training.algorithms.acceleration import Acceleration, accelerate

LossFn = Callable[[Mapping[str, Any]], dict[str, Tensor]]


class GradientStep:
    """Minimises ``loss(batch)["loss"]`` over a module's parameters, one Adam step per call.

    ``loss`` must reach its parameters through ``module`` alone. The parameters are laid into one
    flat tensor (the module's become views of it), so that clipping and Adam are each one
    operation however many layers there are. A second loss over the same module, with moments of
    its own, is stepped ``beside`` the first. The call returns the loss's tensors, detached:
    nothing is transferred to the host here.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFn,
        *,
        learning_rate: float,
        max_grad_norm: float | None = None,
        adam_eps: float = 1e-8,
        acceleration: Acceleration = "eager",
        beside: GradientStep | None = None,
    ) -> None:
        self.flat: Tensor = flatten(trainable(module)) if beside is None else beside.flat
        device = self.flat.device
        self.moments = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self.flat),
            "exp_avg_sq": torch.zeros_like(self.flat),
        }
        self._eps = adam_eps
        self._rate: float | Tensor = learning_rate
        self._adam: Callable[..., None] = _adam_kernel
        if acceleration != "eager" and device.type == "cuda":
            # torch's fused kernel spreads one tensor over few of a GPU's processors. Compiled code
            # reads the step size from a tensor, so that it can change between calls.
            self._rate = torch.tensor(learning_rate, device=device)
            self._adam = accelerate(_adam_formula, acceleration)
        self._gradient = gradient_function(module, loss, max_grad_norm, acceleration)

    @property
    def learning_rate(self) -> float:
        """Adam's step size."""
        return float(self._rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(value)
        else:
            self._rate = value

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Backward, clip, step."""
        gradient, metrics = self._gradient(batch)
        self._adam(self.flat, gradient, **self.moments, rate=self._rate, eps=self._eps)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Adam's moments and the step size; nothing that depends on the device or the mode."""
        return {**self.moments, "learning_rate": self.learning_rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring them back, in place."""
        for name, tensor in self.moments.items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"'{name}' was saved as {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])
        self.learning_rate = float(state["learning_rate"])


_BETA1, _BETA2 = 0.9, 0.999


@torch.no_grad()
def _adam_kernel(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float | Tensor,
    eps: float,
) -> None:
    # As a function: for one tensor the optimizer object costs more than its arithmetic.
    adam(
        [flat],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=_BETA1,
        beta2=_BETA2,
        lr=rate,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )


@torch.no_grad()
def _adam_formula(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: Tensor,
    eps: float,
) -> None:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), to be compiled into one kernel."""
    step += 1
    exp_avg.lerp_(gradient, 1 - _BETA1)
    exp_avg_sq.lerp_(gradient.square(), 1 - _BETA2)
    # 1 - beta^step, without losing digits while that is small.
    correction1 = -torch.expm1(step * math.log(_BETA1))
    correction2 = -torch.expm1(step * math.log(_BETA2))
    flat.sub_(rate / correction1 * exp_avg / ((exp_avg_sq / correction2).sqrt() + eps))


def clip_scale(gradient: Tensor, max_norm: float) -> Tensor:
    """What a gradient must be multiplied by to have a norm of at most ``max_norm``."""
    norm = torch.linalg.vector_norm(gradient)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # type: ignore[no-any-return]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are learnt; a user's encoder may hold frozen ones."""
    return [p for p in module.parameters() if p.requires_grad]


def flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Lay parameters into one tensor, of which they become views."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


Network = TypeVar("Network", bound=nn.Module)


class Target(Generic[Network]):
    """A slow copy of a module: theta' <- theta' + tau (theta - theta')."""

    def __init__(self, module: Network) -> None:
        self.module = copy.deepcopy(module)
        self._flat = flatten(trainable(self.module))
        self.module.requires_grad_(False)

    def copy(self, module: Network) -> None:
        """Become equal to a module, also in what `follow` leaves alone (frozen, or a buffer)."""
        self.module.load_state_dict(module.state_dict())

    @torch.no_grad()
    def follow(self, flat: Tensor, tau: float) -> None:
        """Move towards the parameters that a `GradientStep` laid out; 1 copies them."""
        self._flat.lerp_(flat, tau)


GradientFn = Callable[[Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]


def gradient_function(
    module: nn.Module, loss: LossFn, max_norm: float | None, mode: Acceleration
) -> GradientFn:
    """A function from a batch to the flat, clipped gradient and the metrics."""
    make = _eager if mode == "eager" else _compiled
    return make(module, loss, max_norm)


def _eager(module: nn.Module, loss: LossFn, max_norm: float | None) -> GradientFn:
    parameters = trainable(module)
    # Written again by every call: megabytes of fresh memory would cost more than the copy.
    flat = parameters[0].new_empty(sum(p.numel() for p in parameters))

    def gradient(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        metrics = loss(batch)
        parts = torch.autograd.grad(
            metrics["loss"], parameters, allow_unused=True, materialize_grads=True
        )
        torch.cat([part.reshape(-1) for part in parts], out=flat)
        if max_norm is not None:
            flat.mul_(clip_scale(flat, max_norm))
        return flat, {k: v.detach() for k, v in metrics.items()}

    return gradient


class _LossModule(nn.Module):
    """Lets `functional_call` swap the parameters under a loss that uses ``module``."""

    def __init__(self, module: nn.Module, loss: LossFn) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        metrics = self._loss(batch)
        return metrics["loss"], metrics


def _compiled(module: nn.Module, loss: LossFn, max_norm: float | None) -> GradientFn:
    # One function from parameters to the gradient: forward, loss, backward and clipping become
    # one graph. Compiling the loss alone keeps autograd's own overhead and gains nothing on
    # small networks.
    wrapped = _LossModule(module, loss)
    parameters = {
        f"module.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad
    }

    def whole(
        params: dict[str, Tensor], batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def of(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return torch.func.functional_call(wrapped, params, (batch,))  # type: ignore[no-any-return]

        parts, (_, metrics) = torch.func.grad_and_value(of, has_aux=True)(params)
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        if max_norm is not None:
            flat = flat * clip_scale(flat, max_norm)
        return flat, metrics

    compiled = accelerate(whole, "compile")

    # Without no_grad other modules the loss reads (a critic under an actor's loss) would have
    # their gradients prepared too; `grad_and_value` makes its own all the same.
    @torch.no_grad()
    def gradient(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return compiled(parameters, batch)

    return gradient
