"""Compile functions of tensors, or capture them as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_training.communicator import Communicator
from rl_training.errors import ConfigError

Acceleration = Literal["eager", "compile", "cudagraph"]
Function = TypeVar("Function", bound=Callable[..., Any])


def accelerate(function: Function, mode: Acceleration) -> Function:
    """Return a function of tensors (not a module), compiled unless the mode is eager."""
    return function if mode == "eager" else cast("Function", torch.compile(function, dynamic=False))


def graphed(
    function: Function, mode: Acceleration, device: torch.device, *, copies: bool = True
) -> Function:
    """Return a function of tensors as a CUDA graph in mode ``cudagraph``, else unchanged.

    Without ``copies``, the next call overwrites the tensors that a graph returned.
    """
    if mode != "cudagraph":
        return function
    return cast("Function", CudaGraph(function, device, copies=copies))


def graphed_update(
    function: Function, mode: Acceleration, device: torch.device, communicator: Communicator
) -> Function:
    """Return a whole update as a CUDA graph in mode ``cudagraph``.

    An update that communicates between processes stays as it is: its gradient steps are graphs.
    """
    return graphed(function, mode if communicator.is_local else "eager", device, copies=False)


class CudaGraph:
    """A function that is captured as a CUDA graph and then replayed.

    The first calls run normally on a side stream and have their usual effects, so that everything
    that is allocated lazily (workspaces, compiled code) exists before the capture. The function may
    change tensors in place; it must not synchronise with the device, draw random numbers or depend
    on numbers that are not tensors. Inputs must have the same shapes in every call; those on the
    host are sent in one transfer.
    """

    _WARM_UP = 3

    def __init__(self, function: Callable[..., Any], device: torch.device, *, copies: bool) -> None:
        self._function = function
        self._device = device
        self._copies = copies
        self._calls = 0
        self._inputs: _Inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the function: the first calls normally, then as a graph."""
        if self._calls == 0:
            self._inputs = _Inputs(inputs, self._device)
        self._inputs.load(inputs)
        self._calls += 1
        if self._calls <= self._WARM_UP:
            return self._warm_up()
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        if not self._copies:
            return self._outputs
        return pytree.tree_map_only(Tensor, torch.clone, self._outputs)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return a graph of the function; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        # An unused graph or stream that Python frees during a capture invalidates it.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                self._outputs = self._function(*self._inputs.on_device)
        finally:
            if was_enabled:
                gc.enable()
        return graph

    @property
    def inputs(self) -> Any:
        """The last call's inputs on the device; the next call overwrites them."""
        return self._inputs.on_device

    def _warm_up(self) -> Any:
        before = torch.cuda.get_rng_state(self._device)
        outputs = self._on_side_stream()
        # The first call may compile and is not checked.
        drew = not torch.equal(torch.cuda.get_rng_state(self._device), before)
        if drew and self._calls > 1:
            raise ConfigError(
                "'acceleration' must be eager or compile: a network draws random numbers (such as"
                " torch.rand or functional.dropout in an encoder), and cudagraph does not support"
                " that; or remove them from the network"
            )
        return outputs

    def _on_side_stream(self) -> Any:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            outputs = self._function(*self._inputs.on_device)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return outputs


class _Inputs:
    """Tensors with fixed addresses on the device, whose contents change.

    Inputs from the host are gathered in one pinned block and sent in one transfer.
    """

    _ALIGNMENT = 64

    def __init__(self, like: Any, device: torch.device) -> None:
        leaves, structure = pytree.tree_flatten(like)
        offsets, size = [], 0
        for leaf in leaves:
            offsets.append(size)
            if leaf.device != device:
                size += -(-leaf.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        self._here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def placed(block: Tensor, leaf: Tensor, offset: int) -> Tensor:
            return block[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)

        staged, on_device = [], []
        for leaf, offset in zip(leaves, offsets, strict=True):
            if leaf.device == device:
                on_device.append(torch.empty_like(leaf))
                staged.append(on_device[-1])
            else:
                staged.append(placed(self._here, leaf, offset))
                on_device.append(placed(self._there, leaf, offset))
        self._staged = pytree.tree_unflatten(staged, structure)
        self.on_device = pytree.tree_unflatten(on_device, structure)

    def load(self, values: Any) -> None:
        """Copy new values into the tensors."""
        if not len(self._here):  # nothing is on the host, and the host does not wait
            _copy_into(self._staged, values)
            return
        self._sent.synchronize()  # the transfer of the call before may not be complete
        _copy_into(self._staged, values)
        self._there.copy_(self._here, non_blocking=True)
        self._sent.record()


def _copy_into(places: Any, values: Any) -> None:
    if isinstance(places, Tensor):
        if places.shape != values.shape:
            raise ValueError(
                f"a graph captured with {tuple(places.shape)} got {tuple(values.shape)}"
            )
        places.copy_(values)
    elif isinstance(places, dict):
        if len(places) != len(values):
            raise ValueError(f"a graph of {sorted(places)} got inputs of {sorted(values)}")
        for key, place in places.items():
            _copy_into(place, values[key])
    else:
        for place, value in zip(places, values, strict=True):
            _copy_into(place, value)
