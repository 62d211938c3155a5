"""What a CUDA graph does, on the CPU: operations are recorded once and then replayed.

A replay runs no Python of the function, so that whatever depends on the host keeps the value that
it had when the operations were recorded, and every tensor keeps its address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "the host reads a tensor"
        result = func(*args, **given)
        known = {_memory(one) for one in pytree.tree_leaves((args, given)) if _is_tensor(one)}
        made = [one for one in pytree.tree_leaves(result) if _is_tensor(one)]
        fresh = [one if _memory(one) not in known else None for one in made]
        self.calls.append((func, args, given, fresh))  # type: ignore[arg-type]
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph:
    """Takes the place of `CudaGraph`: three ordinary calls, one that is recorded, then replays."""

    replays = 0
    """Replays of all graphs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls = 0
        self._recorder: _Recorder | None = None
        self._inputs: Any = ()
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        self._calls += 1
        if self._calls <= 3:
            return self._function(*inputs)
        if self._recorder is None:
            self._inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
            self._recorder = _Recorder()
            with self._recorder:
                self._outputs = self._function(*self._inputs)
            return self._outputs
        for mine, new in zip(*map(pytree.tree_leaves, (self._inputs, inputs)), strict=True):
            mine.copy_(new)
        with torch.no_grad():
            for func, args, kwargs, fresh in self._recorder.calls:
                made = filter(_is_tensor, pytree.tree_leaves(func(*args, **kwargs)))
                for place, value in zip(fresh, made, strict=True):
                    if place is not None:
                        place.copy_(value)
        RecordedGraph.replays += 1
        return self._outputs
