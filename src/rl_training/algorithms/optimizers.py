"""Optimizers: typed settings, and in-place updates of one flat tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from rl_training.algorithms.acceleration import Acceleration, accelerate

OptimizerName = Literal["adam", "adamw", "rmsprop", "radam"]

Update = Callable[[Tensor, Tensor, dict[str, Tensor], float | Tensor], None]
"""Updates parameters and optimizer state in place, given parameters, gradient, state and rate."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Which optimizer a `GradientStep` uses, and its settings.

    Names and arithmetic are those of `torch.optim`. RMSprop has no momentum and is not centred; it
    uses only the second of ``betas``, which torch calls ``alpha``.
    """

    name: OptimizerName = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay per update of the average gradient and of the average squared gradient."""
    eps: float = 1e-8
    """Added to the square root of the average squared gradient."""
    weight_decay: float = 0.0
    """adamw: parameters shrink by rate * weight_decay; others: an L2 term in the gradient."""

    def init_state(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the state before the first update: step 0, averages of zero."""
        averages = ("square_avg",) if self.name == "rmsprop" else ("exp_avg", "exp_avg_sq")
        step = torch.zeros((), device=flat.device)
        return {"step": step, **{name: torch.zeros_like(flat) for name in averages}}

    def update_function(
        self, device: torch.device, mode: Acceleration, *, decayed: Tensor | None = None
    ) -> Update:
        """Return the function that applies one gradient.

        ``decayed`` is 1 where weight decay applies and 0 elsewhere; None: it applies everywhere.
        On CUDA in the accelerated modes the function is compiled, and the rate must be a tensor.
        """
        compiled = runs_compiled(device, mode)
        rule = _RULES[self.name]
        if rule is _adam_formula and not compiled:
            rule = _adam_kernel
        (beta1, beta2), eps, decoupled = self.betas, self.eps, self.name == "adamw"
        decay: float | Tensor = self.weight_decay
        if self.weight_decay and decayed is not None:
            decay = self.weight_decay * decayed
        decays = self.weight_decay != 0

        @torch.no_grad()
        def update(
            flat: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: float | Tensor
        ) -> None:
            if decays and decoupled:
                flat.mul_(1 - rate * decay)
            elif decays:
                gradient = gradient + decay * flat
            rule(flat, gradient, **state, rate=rate, beta1=beta1, beta2=beta2, eps=eps)

        return accelerate(update, mode) if compiled else update


def runs_compiled(device: torch.device, mode: Acceleration) -> bool:
    """Return whether updates on a device are compiled, so that the rate must be a tensor.

    On CUDA, torch's fused kernel uses few of a GPU's processors for one tensor; compiled code uses
    all of them. On a CPU the fused kernel is fastest.
    """
    return mode != "eager" and device.type == "cuda"


def _adam_kernel(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    # The function, because for one tensor the optimizer object takes longer than the arithmetic.
    adam(
        [flat],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=rate,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )


def _adam_formula(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), written to be compiled into one kernel."""
    step += 1
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.lerp_(gradient.square(), 1 - beta2)
    correction1, correction2 = _one_minus_power(beta1, step), _one_minus_power(beta2, step)
    flat.sub_(rate / correction1 * exp_avg / ((exp_avg_sq / correction2).sqrt() + eps))


def _rmsprop_formula(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    square_avg: Tensor,
    *,
    rate: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """RMSprop (Tieleman and Hinton 2012): v <- b v + (1 - b) g^2, w <- w - rate g / (sqrt v + e).

    The average starts at zero without bias correction, as in torch.
    """
    del beta1
    step += 1
    square_avg.lerp_(gradient.square(), 1 - beta2)
    flat.sub_(rate * gradient / (square_avg.sqrt() + eps))


def _radam_formula(
    flat: Tensor,
    gradient: Tensor,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Adam with rectified variance (Liu et al. 2020, arXiv:1908.03265).

    Until the average squared gradient contains enough gradients (rho > 5), only the average
    gradient is used.
    """
    step += 1
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.lerp_(gradient.square(), 1 - beta2)
    # float64 where possible (not on MPS), because rho is a small difference of large numbers.
    exact = step if step.device.type == "mps" else step.double()
    correction2 = _one_minus_power(beta2, exact)
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * exact * (1 - correction2) / correction2
    squared = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    scale = (squared.clamp(min=0) * correction2).sqrt().to(flat.dtype)
    adaptive = scale / (exp_avg_sq.sqrt() + eps)
    average = exp_avg / _one_minus_power(beta1, step)
    flat.sub_(rate * average * torch.where(rho > 5, adaptive, 1.0))


def _one_minus_power(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step, accurate also for small results."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)


_RULES: dict[OptimizerName, Callable[..., None]] = {
    "adam": _adam_formula,
    "adamw": _adam_formula,
    "rmsprop": _rmsprop_formula,
    "radam": _radam_formula,
}
