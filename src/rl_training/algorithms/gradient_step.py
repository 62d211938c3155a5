"""`GradientStep`: the only place where gradients are applied, eager or compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.acceleration import Acceleration, accelerate, graphed
from rl_training.algorithms.module_mode import (
    changing_buffers,
    mode_dependent,
    refuse_changing_buffers,
    refuse_random_modules,
    refuse_random_numbers,
    set_mode,
)
from rl_training.algorithms.optimizers import Optimizer, runs_compiled
from rl_training.communicator import ALONE, Communicator, add_in_order, share

LossFn = Callable[[Mapping[str, Any]], dict[str, Tensor]]
_CHECKED_CALLS = 3
"""Calls of a run with several shards in which random numbers that a network draws are noticed."""


class GradientStep:
    """Minimises ``loss(batch)["loss"]`` over a module's parameters, one optimizer step per call.

    ``loss`` must use the parameters only through ``module``. The parameters become views of one
    flat tensor, so that clipping and the optimizer are one operation each for any number of layers;
    move the module to its device before. For a second loss over the same module, with a separate
    optimizer state, pass the first `GradientStep` as ``beside``.

    A call takes a batch of each shard that this process executes (one, unless a ``communicator``
    has several). It computes the flat gradients of their losses, each times the shard's share in
    the whole batch, adds those of all shards in their order (`Communicator.gather`), clips the sum
    to ``max_grad_norm`` and applies the optimizer. Metrics, the loss's tensors of one number, are
    added in the same way. Under ``cudagraph``, gradients are one graph and the rest is another if
    there is communication between them. The learning rate is ``learning_rate`` times
    ``rate_scale``, also where a schedule sets it. Weight decay does not apply to ``no_decay``.
    ``module`` is in train mode during the call and in eval mode after it; other modules that the
    loss uses keep their mode. The call returns the metrics, detached and still on the device; of
    tensors with more than one number, it returns a tuple of one per local shard.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFn,
        *,
        learning_rate: float,
        rate_scale: float = 1.0,
        max_grad_norm: float | None = None,
        optimizer: Optimizer = Optimizer(),  # noqa: B008 - frozen
        acceleration: Acceleration = "eager",
        beside: GradientStep | None = None,
        communicator: Communicator = ALONE,
        no_decay: Iterable[nn.Parameter] = (),
    ) -> None:
        if acceleration == "cudagraph":
            refuse_random_modules(module, "'acceleration' must be eager or compile", "cudagraph")
        if communicator.shards > 1:
            refuse_random_modules(module, "'shards' must be 1", "a run of several shards")
            refuse_changing_buffers(module)
        self.flat: Tensor = flatten(trainable(module)) if beside is None else beside.flat
        self.optimizer = optimizer
        self.moments = optimizer.init_state(self.flat)
        """The optimizer's state: its step count and its averages over gradients."""
        device = self.flat.device
        self.rate_scale = rate_scale
        """Factor of a scheduled learning rate."""
        learning_rate *= rate_scale
        self._learning_rate = learning_rate
        self._rate_tensor: Tensor | None = None
        if runs_compiled(device, acceleration):
            # A tensor, so that the rate of compiled code can change between calls.
            self._rate_tensor = torch.tensor(learning_rate, device=device)
        self._apply = optimizer.update_function(
            device, acceleration, decayed=_decay_mask(module, no_decay)
        )
        self._communicator = communicator
        self._max_norm = max_grad_norm
        self._names: tuple[str, ...] = ()
        self._calls = 0
        if communicator.alone:
            self._gradient = gradient_function(module, loss, max_grad_norm, acceleration)
        else:
            self._gradient = gradient_function(module, loss, None, acceleration, communicator)
        in_parts = acceleration if not communicator.is_local else "eager"
        self._run_gradients = graphed(self._gradients, in_parts, device, copies=False)
        self._run_step = graphed(self._add_and_step, in_parts, device, copies=False)
        self._switched = mode_dependent(module)
        self._places = _places_of(module)
        self._parts = [
            (parent._modules, key, part)
            for parent in module.modules()
            for key, part in parent._modules.items()
            if part is not None
        ]

    @property
    def learning_rate(self) -> float:
        """The optimizer's step size."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = value
        if self._rate_tensor is not None:
            self._rate_tensor.fill_(value)

    def __call__(self, *batches: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the gradient of every shard's batch, add them, clip the sum, and step."""
        self.check_placement()
        if self._communicator.alone:
            (batch,) = batches
            gradient, metrics = self._training_gradient(batch)
            self._apply_gradient(gradient)
            return {k: v if v.ndim == 0 else (v,) for k, v in metrics.items()}
        rows, others = self._checked_gradients(batches)
        metrics = self._run_step(self._communicator.gather(rows))
        return {**metrics, **others}

    def _training_gradient(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        if not self._switched:
            return self._gradient(batch)
        set_mode(self._switched, training=True)
        try:
            return self._gradient(batch)
        finally:
            set_mode(self._switched, training=False)

    def _gradients(
        self, *batches: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
        """Return, for each local shard, a row of its gradient and metrics; and other tensors."""
        rows, others = [], []
        for batch in batches:
            gradient, tensors = self._training_gradient(batch)
            numbers = {name: value for name, value in tensors.items() if value.ndim == 0}
            self._names = tuple(numbers)
            metrics = torch.stack(list(numbers.values())) * share(batch, self._communicator)
            rows.append(torch.cat((gradient, metrics.to(gradient.dtype))))
            others.append({k: value for k, value in tensors.items() if value.ndim})
        return torch.stack(rows), {k: tuple(one[k] for one in others) for k in others[0]}

    def _checked_gradients(self, batches: Sequence[Mapping[str, Any]]) -> Any:
        """Refuse a network that draws random numbers: they would depend on the placement."""
        self._calls += 1
        if self._communicator.shards == 1 or not 1 < self._calls <= _CHECKED_CALLS:
            return self._run_gradients(*batches)  # the first call may compile, which draws too
        with refuse_random_numbers(self.flat.device):
            return self._run_gradients(*batches)

    def _add_and_step(self, rows: Tensor) -> dict[str, Tensor]:
        """Add the rows of all shards, clip the gradient and step; return the metrics."""
        total = add_in_order(rows)
        gradient, metrics = total[: len(self.flat)], total[len(self.flat) :]
        if self._max_norm is not None:
            gradient = gradient * clip_scale(gradient, self._max_norm)
        self._apply_gradient(gradient)
        return dict(zip(self._names, metrics.unbind(), strict=True))

    def _apply_gradient(self, gradient: Tensor) -> None:
        rate = self._learning_rate if self._rate_tensor is None else self._rate_tensor
        self._apply(self.flat, gradient, self.moments, rate)

    def check_placement(self) -> None:
        """Raise an error if a parameter is no longer a view of the flat tensor.

        Takes about a tenth of a microsecond per parameter. A captured CUDA graph runs no Python, so
        learners call this before they replay one.
        """
        for owner, key, part in self._parts:
            if owner.get(key) is not part:
                raise RuntimeError(
                    f"submodule {key!r} was replaced after its GradientStep was built, so that"
                    " steps would not reach it: build a new GradientStep, or change values with"
                    " load_state_dict or copy_"
                )
        for place in self._places:
            parameter = place.owner[place.key]
            if parameter is None or parameter.data_ptr() != place.pointer:
                raise RuntimeError(
                    f"parameter {place.name!r} was replaced or moved after its GradientStep was"
                    " built, so that steps would not reach it: move or convert the module (.to(),"
                    " .double(), .data) before, or build a new GradientStep; to change values"
                    " use load_state_dict or copy_"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and rate, independent of device and acceleration mode."""
        state = {**self.moments, "learning_rate": self.learning_rate}
        name = self.optimizer.name  # a state without a name is Adam's, as in the first checkpoints
        return state if name == "adam" else {**state, "optimizer": name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state and rate, in place."""
        saved, name = state.get("optimizer", "adam"), self.optimizer.name
        if saved != name:
            raise ValueError(
                f"the saved optimizer state is that of {saved!r} and cannot be loaded into"
                f" {name!r}: set optimizer to {saved!r}, or start a new run from the saved weights"
            )
        for key, tensor in self.moments.items():
            if state[key].shape != tensor.shape:
                raise ValueError(
                    f"the saved optimizer state '{key}' has shape {tuple(state[key].shape)};"
                    f" expected {tuple(tensor.shape)}"
                )
            tensor.copy_(state[key])
        self.learning_rate = float(state["learning_rate"])


def clip_scale(gradient: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales a gradient to a norm of at most ``max_norm``."""
    norm = torch.linalg.vector_norm(gradient)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # type: ignore[no-any-return]


# -- parameters as views of one tensor -------------------------------------------------------------


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients; a user's encoder may have frozen ones."""
    return [p for p in module.parameters() if p.requires_grad]


def flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Copy parameters into one flat tensor and make them views of it."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


class _Place(NamedTuple):
    """The module and name of a parameter, and its expected address."""

    name: str
    owner: dict[str, nn.Parameter | None]
    key: str
    pointer: int


def _places_of(module: nn.Module) -> list[_Place]:
    places: dict[nn.Parameter, _Place] = {}
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in places:
                name = f"{path}.{key}" if path else key
                pointer = parameter.data_ptr()
                places[parameter] = _Place(name, part._parameters, key, pointer)
    return list(places.values())


def _decay_mask(module: nn.Module, no_decay: Iterable[nn.Parameter]) -> Tensor | None:
    """Return 1 for numbers that weight decay applies to, else 0; None if it applies to all."""
    spared = set(no_decay)
    if not spared:
        return None
    return torch.cat(
        [
            (torch.zeros_like if p in spared else torch.ones_like)(p.data).reshape(-1)
            for p in trainable(module)
        ]
    )


# -- targets ---------------------------------------------------------------------------------------

Network = TypeVar("Network", bound=nn.Module)


class Target(Generic[Network]):
    """A target network in eval mode: theta' <- theta' + tau (theta - theta')."""

    def __init__(self, module: Network) -> None:
        self.module = copy.deepcopy(module)
        self._flat = flatten(trainable(self.module))
        self.module.requires_grad_(False).eval()
        self._buffers = [
            (mine._buffers, theirs._buffers, key)
            for mine, theirs in zip(self.module.modules(), module.modules(), strict=True)
            for key, buffer in mine._buffers.items()
            # A normaliser's sums on the host are used only by its `update`, and a CUDA graph could
            # not copy them.
            if buffer is not None and buffer.device == self._flat.device
        ]

    def copy(self, module: Network) -> None:
        """Copy everything from a module, including frozen parameters, which `follow` skips."""
        self.module.load_state_dict(module.state_dict())

    @torch.no_grad()
    def follow(self, flat: Tensor, tau: float) -> None:
        """Move towards the flat parameters of a `GradientStep`; tau 1 copies them.

        Buffers (statistics of BatchNorm or of a normaliser) are copied from the module.
        """
        self._flat.lerp_(flat, tau)
        for mine, theirs, key in self._buffers:
            mine[key].copy_(theirs[key])  # type: ignore[union-attr, arg-type]


# -- gradients -------------------------------------------------------------------------------------

SharedLoss = Callable[[Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]
"""From a batch to what is differentiated, and the loss's tensors."""
GradientFn = Callable[[Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]


def gradient_function(
    module: nn.Module,
    loss: LossFn,
    max_norm: float | None,
    mode: Acceleration,
    communicator: Communicator = ALONE,
) -> GradientFn:
    """Return a function from a batch to the flat gradient, clipped, and the metrics.

    With several shards it is the gradient of the loss times the share of the batch's shard.
    """

    def of_share(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        metrics = loss(batch)
        if communicator.shards == 1:
            return metrics["loss"], metrics
        return metrics["loss"] * share(batch, communicator), metrics

    make = _eager if mode == "eager" else _compiled
    return make(module, of_share, max_norm)


def _eager(module: nn.Module, loss: SharedLoss, max_norm: float | None) -> GradientFn:
    parameters = trainable(module)
    # Reused by every call: allocating megabytes would take longer than the copy.
    flat = parameters[0].new_empty(sum(p.numel() for p in parameters))

    def gradient(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = loss(batch)
        parts = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        torch.cat([part.reshape(-1) for part in parts], out=flat)
        if max_norm is not None:
            flat.mul_(clip_scale(flat, max_norm))
        return flat, {k: v.detach() for k, v in metrics.items()}

    return gradient


class _LossModule(nn.Module):
    """Lets `functional_call` replace the parameters that a loss uses through ``module``."""

    def __init__(self, module: nn.Module, loss: SharedLoss) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss(batch)


def _compiled(module: nn.Module, loss: SharedLoss, max_norm: float | None) -> GradientFn:
    # One function from parameters to the gradient: forward, loss, backward and clipping become
    # one graph. Compiling only the loss keeps autograd's overhead and is not faster for small
    # networks.
    wrapped = _LossModule(module, loss)
    parameters = {
        f"module.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad
    }
    # torch.func does not allow changes of tensors from outside the function, so copies are
    # changed, returned and written back.
    buffers = {f"module.{name}": buffer for name, buffer in changing_buffers(module).items()}

    def whole(
        params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        def of(
            params: dict[str, Tensor],
        ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
            given = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
            value, metrics = torch.func.functional_call(wrapped, given, (batch,))
            return value, (metrics, {name: given[name] for name in buffers})

        parts, (_, (metrics, changed)) = torch.func.grad_and_value(of, has_aux=True)(params)
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        if max_norm is not None:
            flat = flat * clip_scale(flat, max_norm)
        return flat, metrics, changed

    compiled = accelerate(whole, "compile")

    # no_grad, so that no gradients are prepared for other modules in the loss (a critic in an
    # actor's loss); `grad_and_value` computes its own gradient regardless.
    @torch.no_grad()
    def gradient(batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        flat, metrics, changed = compiled(parameters, buffers, batch)
        for name, buffer in changed.items():
            buffers[name].copy_(buffer)
        return flat, metrics

    return gradient
