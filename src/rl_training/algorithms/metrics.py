"""Metrics that are summed on the device and transferred to the host once per report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.moments import merged_rows, moments_of
from rl_training.communicator import ALONE, Communicator

_LOGGED_AS = {"entropy_loss": "entropy"}
"""Terms of a loss that are logged under another name: this one is the entropy itself."""


class MetricSums:
    """Sums of named numbers over updates.

    `add` changes a tensor in place and may be part of a CUDA graph, whose replays run no Python:
    the caller therefore counts updates itself, in ``updates``.
    """

    def __init__(self, device: torch.device) -> None:
        self.updates = 0
        """Updates added since the last `pop`."""
        self._device = device
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the metrics of one update: tensors of one number, the same names in every call."""
        numbers = torch.stack(list(metrics.values()))
        if self._sums is None:
            self._names, self._sums = tuple(metrics), torch.zeros_like(numbers)
        elif tuple(metrics) != self._names:
            raise ValueError(
                f"metrics {list(metrics)} cannot be added to sums of {list(self._names)}:"
                " every update must return the same names in the same order"
            )
        self._sums += numbers

    def pop(self, group: str, **others: float | Tensor) -> dict[str, float]:
        """Return the means since the last call, named ``group/name``, and start again from zero.

        ``others`` are returned unchanged after the means. All tensors are transferred from the
        device at once. Empty if there was no update.
        """
        if self._sums is None or not self.updates:
            return {}
        tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
        means = self._sums / self.updates
        numbers = torch.cat([means, *(value.to(means).reshape(1) for value in tensors.values())])
        found = dict(zip((*self._names, *tensors), numbers.tolist(), strict=True))
        self.reset()
        values = {name: found.pop(name, value) for name, value in others.items()}
        return {
            f"{group}/{_LOGGED_AS.get(name, name)}": float(value)
            for name, value in (found | values).items()
        }

    def reset(self) -> None:
        """Set the sums to zero; in place, since a CUDA graph may write to them."""
        self.updates = 0
        if self._sums is not None:
            self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last `pop`, for a checkpoint between two reports."""
        return {"names": list(self._names), "sums": self._sums, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums; in place if they exist, since a CUDA graph may write to them."""
        self.reset()
        self.updates = int(state["updates"])
        saved = state["sums"]
        if saved is None:
            return
        self._names = tuple(str(name) for name in state["names"])
        if self._sums is None:
            self._sums = saved.to(self._device, copy=True)
        else:
            self._sums.copy_(saved)


def explained_variance(
    shards: Sequence[Mapping[str, Any]], communicator: Communicator = ALONE
) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 as good as a constant.

    ``shards`` are the rollouts of the local shards as batches; the variances are those of all.
    """
    tables = []
    for batch in shards:
        returns, mask = batch["returns"], batch.get("mask")
        parts = (moments_of(returns, mask), moments_of(returns - batch["values"], mask))
        tables.append(torch.stack(parts))
    variance, rest = merged_rows(communicator.gather(torch.stack(tables))).variance()
    return torch.where(variance == 0, torch.zeros_like(variance), 1 - rest / variance)
