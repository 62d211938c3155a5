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
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.Adam([self.flat], lr=learning_rate, eps=adam_eps, fused=True)
        self._gradients = gradient_function(module, loss, acceleration)

    @property
    def learning_rate(self) -> float:
        """Adam's step size."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Backward, clip, step."""
        gradients, metrics = self._gradients(batch)
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        norm = torch.linalg.vector_norm(gradient)
        self.flat.grad = gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()
        return metrics


def _flatten(module: nn.Module) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


GradientFn = Callable[[Mapping[str, Any]], tuple[tuple[Tensor, ...], dict[str, Tensor]]]


def accelerate(function: Function, mode: Acceleration) -> Function:
    """Compile a function of tensors (never a module), or leave it as it is."""
    return function if mode == "eager" else cast("Function", torch.compile(function, dynamic=False))


def gradient_function(module: nn.Module, loss: LossFn, mode: Acceleration) -> GradientFn:
    """A function from a batch to gradients (in parameter order) and metrics."""
    return _eager(module, loss) if mode == "eager" else _compiled(module, loss)


def _eager(module: nn.Module, loss: LossFn) -> GradientFn:
    parameters = [p for p in module.parameters() if p.requires_grad]

    def gradients(batch: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        metrics = loss(batch)
        grads = torch.autograd.grad(metrics["loss"], parameters)
        return grads, {name: value.detach() for name, value in metrics.items()}

    return gradients


class _LossModule(nn.Module):
    """Lets `functional_call` swap the parameters under a loss that uses ``module``."""

    def __init__(self, module: nn.Module, loss: LossFn) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        metrics = self._loss(batch)
        return metrics["loss"], metrics


def _compiled(module: nn.Module, loss: LossFn) -> GradientFn:
    # One function from parameters to gradients: forward, loss and backward become one graph.
    # Compiling the loss alone keeps autograd's own overhead and gains nothing on small networks.
    wrapped = _LossModule(module, loss)
    parameters = {
        f"module.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad
    }

    def whole(
        params: dict[str, Tensor], batch: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def of(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return torch.func.functional_call(wrapped, params, (batch,))  # type: ignore[no-any-return]

        grads, (_, metrics) = torch.func.grad_and_value(of, has_aux=True)(params)
        return grads, metrics

    compiled = accelerate(whole, "compile")

    def gradients(batch: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        grads, metrics = compiled(parameters, batch)
        return tuple(grads.values()), {name: value.detach() for name, value in metrics.items()}

    return gradients
