"""`ProcessGroup`: the shards of a run on several processes, started by torchrun."""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from rl_training.communicator import Communicator
from rl_training.errors import ConfigError, RankFailure
from rl_training.launched import local_rank, local_world_size, machine
from rl_training.launched import rank as own_rank
from rl_training.terminal import say

_TIMEOUT = dt.timedelta(minutes=30)
"""After this time without an answer a rank counts as lost. One that ends is noticed at once."""
_SECONDS_FOR_REASON = 5.0
_SECONDS_UNTIL_HINT = 15.0
_HINT = "rank {} is waiting for the other ranks: every rank must run the same command or learn()"
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before."""
_joined: dict[str, Any] = {}
"""The store and the groups of this process, which are made once."""


class ProcessGroup(Communicator):
    """The shards of a run, an equal part of them on each rank, in order.

    Tensors on a GPU are sent by NCCL where every rank of a machine has its own GPU; otherwise, and
    on a CPU, by gloo, from host memory.
    """

    def __init__(self, shards: int) -> None:
        super().__init__(shards)
        _join()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        each = shards // self.world_size
        self.local = range(self.rank * each, (self.rank + 1) * each)
        self._store: Any = _joined["store"]
        _joined["made"] += 1
        self._failure_key = f"rl_training/failure/{_joined['made']}"
        """Where the reason of the first failure is stored: every rank makes as many groups."""
        self._on_device: Any = None
        self.is_local = self.world_size == 1
        self.led = False
        """Whether this is rank 0 in a part of the run that it leads: the others wait for it."""

    def use_device(self, device: torch.device) -> None:
        """Send tensors of this device from now on; every rank calls it."""
        own_gpu = device.type == "cuda" and local_world_size() <= torch.cuda.device_count()
        can = own_gpu and dist.is_nccl_available()
        if bool(self.gather_ranks(torch.tensor([int(can)])).all()):
            if "nccl" not in _joined:
                _joined["nccl"] = dist.new_group(backend="nccl", timeout=_TIMEOUT)
            self._on_device = _joined["nccl"]
            self.is_local = False  # even of one rank: what is tested with one GPU is what runs

    def gather(self, rows: Tensor) -> Tensor:
        """Return one row per shard of the run, given one per local shard."""
        by_nccl = rows.is_cuda and self._on_device is not None
        if self.world_size == 1 and not by_nccl:
            return rows
        sent = rows.contiguous() if by_nccl else rows.detach().cpu().contiguous()
        received = torch.empty((self.shards, *rows.shape[1:]), dtype=sent.dtype, device=sent.device)
        with self._failures_explained():
            group = self._on_device if by_nccl else None
            _all_gather(received, sent, group=group)
        return received.to(rows.device)

    def gather_ranks(self, row: Tensor) -> Tensor:
        """Return one row of numbers per rank."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        received = torch.empty((self.world_size, *row.shape), dtype=row.dtype)
        with self._failures_explained():
            _all_gather(received, row.unsqueeze(0))
        return received

    def gather_objects(self, values: Sequence[Any], *, everywhere: bool = True) -> list[Any]:
        """Return one plain value per shard of the run, given one per local shard.

        Unless ``everywhere``, only rank 0 gets them; other ranks get an empty list.
        """
        received: list[Any] = [None] * self.world_size
        with self._failures_explained():
            if everywhere:
                dist.all_gather_object(received, list(values))
            else:
                dist.gather_object(list(values), received if self.rank == 0 else None, dst=0)
        if self.rank and not everywhere:
            return []
        return [value for of_rank in received for value in of_rank]

    def broadcast(self, *numbers: int) -> tuple[int, int]:
        """Return two small numbers that rank 0 passes."""
        code, more = (*numbers, 0)[:2]
        tensor = torch.tensor([code, more])
        if self.world_size > 1:
            with self._failures_explained():
                dist.broadcast(tensor, 0)
        code, more = tensor.tolist()
        return code, more

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        with self._failures_explained():
            dist.broadcast_object_list(values, 0)
        return values[0]

    # -- failures ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Raise `RankFailure` instead of the error of a collective that another rank left."""
        if self.led:
            raise RuntimeError(
                "a callback, which only rank 0 has, called something that all ranks must call at"
                " the same time, and the other ranks would wait forever. Callbacks may call"
                " evaluate, state_dict, policy_state and commit_files of the trainer"
            )
        if not dist.is_initialized():
            raise RankFailure("this process left the run after a failure: start it again")
        try:
            yield
        except RuntimeError as error:
            raise self.failure_elsewhere(error) from None

    def failure_elsewhere(self, error: BaseException | None = None) -> RankFailure:
        """Return the error for the failure of another rank, with its reason if it gave one."""
        end = time.monotonic() + _SECONDS_FOR_REASON
        with contextlib.suppress(RuntimeError):  # the store may be gone, too
            while time.monotonic() < end:
                if self._store.check([self._failure_key]):
                    report = self._store.get(self._failure_key).decode()
                    place, _, text = report.partition(" ")
                    number, _, node = place.partition("@")
                    found = RankFailure(text)
                    # The first rank of another machine prints it there, too.
                    on_screen = int(node) == machine() or local_rank() > 0
                    found.shown_elsewhere = int(number) != self.rank and on_screen
                    return found
                time.sleep(0.05)
        text = textwrap.shorten(str(error or ""), 200, placeholder=" ...")
        detail = f" ({text})" if text and "onnection" not in text else ""
        lost = RankFailure(
            "another rank was lost without a message: it was killed, ran out of memory, or its"
            f" machine cannot be reached{detail}"
        )
        self.report_failure(lost)
        return lost

    def report_failure(self, error: BaseException, *, everywhere: bool = False) -> None:
        """Send the other ranks the reason why this one fails; the first report counts.

        The message names the rank, unless the same happens ``everywhere``.
        """
        if getattr(error, "shown_elsewhere", None) is not None:
            return
        text = str(error) or type(error).__name__
        if self.world_size > 1 and not everywhere:
            text = f"rank {self.rank}: {text}"
            if error.args and isinstance(error.args[0], str):
                error.args = (text, *error.args[1:])
        report, kept = f"{self.rank}@{machine()} {text}", b""
        with contextlib.suppress(RuntimeError):
            kept = self._store.compare_set(self._failure_key, "", report)
        error.shown_elsewhere = kept not in (b"", report.encode())  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Close the connections, so that ranks that wait for this one fail at once."""
        _leave()


def _join() -> None:
    """Connect this process with the others; does nothing the second time."""
    if _joined:
        if not dist.is_initialized():
            raise RankFailure("this process left the run after a failure: start it again")
        return
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialised in this process: let rl_training do it"
        )
    hint = threading.Timer(_SECONDS_UNTIL_HINT, say, [_HINT.format(own_rank())])
    hint.daemon = True
    hint.start()
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=_TIMEOUT))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
    finally:
        hint.cancel()
    _joined.update(store=store, made=0)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # other ranks may be gone
            dist.destroy_process_group()
