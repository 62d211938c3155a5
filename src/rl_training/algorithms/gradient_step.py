"""`GradientStep`: the only place a gradient is applied, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

Acceleration = Literal["eager", "compile"]
Function = TypeVar("Function", bound=Callable[..., Any])
LossFn = Callable[[Mapping[str, Any]], dict[str, Tensor]]


class GradientStep:
    """Minimises ``loss(batch)["loss"]`` over a module's parameters, one Adam step per call.

    ``loss`` must reach its parameters through ``module`` alone. The parameters are laid into one
    flat tensor (the module's become views of it), so that clipping and Adam are each one
    operation however many layers there are. The call returns the loss's tensors, detached:
    nothing is transferred to the host here.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFn,
        *,
        learning_rate: float,
        max_grad_norm: float,
        adam_eps: float = 1e-5,
        acceleration: Acceleration = "eager",
    ) -> None:
        self.flat = _flatten(module)
        self.optimizer = torch.optim.Adam([self.flat], lr=learning_rate, eps=adam_eps, fused=True)
        self._gradient = gradient_function(module, loss, max_grad_norm, acceleration)

    @property
    def learning_rate(self) -> float:
        """Adam's step size."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Backward, clip, step."""
        self.flat.grad, metrics = self._gradient(batch)
        self.optimizer.step()
        return metrics


def clip_norm(gradient: Tensor, max_norm: float) -> Tensor:
    """Scale a gradient down to at most ``max_norm``."""
    norm = torch.linalg.vector_norm(gradient)
    scale: Tensor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return gradient * scale


def _flatten(module: nn.Module) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


GradientFn = Callable[[Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]


def accelerate(function: Function, mode: Acceleration) -> Function:
    """Compile a function of tensors (never a module), or leave it as it is."""
    return function if mode == "eager" else cast("Function", torch.compile(function, dynamic=False))


def gradient_function(
    module: nn.Module, loss: LossFn, max_norm: float, mode: Acceleration
) -> GradientFn:
    """A function from a batch to the flat, clipped gradient and the metrics."""
    make = _eager if mode == "eager" else _compiled
    return make(module, loss, max_norm)


def _eager(module: nn.Module, loss: LossFn, max_norm: float) -> GradientFn:
    parameters = [p for p in module.parameters() if p.requires_grad]

    def gradient(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        metrics = loss(batch)
        parts = torch.autograd.grad(
            metrics["loss"], parameters, allow_unused=True, materialize_grads=True
        )
        flat = torch.cat([part.reshape(-1) for part in parts])
        return clip_norm(flat, max_norm), {k: v.detach() for k, v in metrics.items()}

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


def _compiled(module: nn.Module, loss: LossFn, max_norm: float) -> GradientFn:
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
        return clip_norm(flat, max_norm), metrics

    compiled = accelerate(whole, "compile")
    return lambda batch: compiled(parameters, batch)
