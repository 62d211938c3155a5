"""The start of a run under torchrun: the ranks find each other and check that they agree."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.communicator import ALONE, Communicator
from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.launched import is_launched, rank, world_size
from rl_training.registry import TORCHRUN, find_entry, others_with_engine
from rl_training.runs import read_json
from rl_training.runtime.process_group import ProcessGroup
from rl_training.runtime.ranks import ProcessRanks, Ranks
from rl_training.runtime.trainer import Setup

_OWN = {"output_dir", "init_from"}
"""Settings that may be other paths on another machine."""


def join(config: TrainConfig[Any], **request: Any) -> Ranks:
    """Return the processes that execute a run: this one, or the ranks that torchrun started.

    Raises `ConfigError` where ranks were started with different settings; ``request`` are those
    that are not part of the config.
    """
    start = connect()
    if not start.several:
        return Ranks(Communicator(config.shards))
    own = {**config.to_dict(), **request}
    of_rank_0 = start.share(own)
    with failing_together(start):
        _require_same(of_rank_0, own)
        _check_launch(config)
    return ProcessRanks(ProcessGroup(config.shards))


def connect() -> Ranks:
    """Return the ranks that torchrun started, connected, before their shards are known."""
    if not is_launched():
        return Ranks(ALONE)
    if rank():  # rank 0 shows them
        warnings.simplefilter("ignore")
    return ProcessRanks(ProcessGroup(world_size()))


def _check_launch(config: TrainConfig[Any]) -> None:
    """Raise `ConfigError` if torchrun cannot run this with the number of processes it started."""
    if TORCHRUN not in find_entry(config.algo).engines:
        raise ConfigError(f"{config.algo} cannot be run by torchrun{others_with_engine(TORCHRUN)}")
    shards, processes = config.shards, world_size()
    if shards % processes:
        fitting = [str(n) for n in range(1, min(shards, 64) + 1) if shards % n == 0]
        raise ConfigError(
            f"'shards' = {shards} cannot be divided equally among {processes} processes: start"
            f" torchrun with {' or '.join(fitting)} of them (--nproc-per-node), or a new run whose"
            f" shards and num_envs are multiples of {processes}"
        )


def _require_same(of_rank_0: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, expected in of_rank_0.items():
        if name not in _OWN and expected != own.get(name):
            raise ConfigError(
                f"ranks were started with different settings: '{name}' is {own.get(name)!r} here"
                f" and {expected!r} on rank 0; give every rank the same settings"
            )


@contextlib.contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Let every rank fail if one of them fails in this context."""
    error: BaseException | None = None
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - raised below
        error = failure
    ranks.raise_together(error)


@contextlib.contextmanager
def failing_alone(ranks: Ranks) -> Iterator[None]:
    """Let the other ranks end with the reason if this one fails in this context."""
    try:
        yield
    except BaseException as error:
        if getattr(error, "shown_elsewhere", None) is None:
            ranks.fail(error)
        raise


def share_folder(setup: Setup) -> None:
    """Give every rank the run folder of rank 0; raises `UserError` where one does not see it."""
    ranks = setup.ranks
    about = read_json(setup.folder / "metadata.json") if setup.folder and ranks.leads else None
    folder, expected = ranks.share((setup.folder and str(setup.folder.resolve()), about))
    with failing_together(ranks):
        if folder is None or ranks.leads:
            return
        if read_json(Path(folder) / "metadata.json") != expected:
            raise UserError(
                f"the run folder {folder} of rank 0 is not here: output_dir must be on a file"
                " system that all ranks share"
            )
        setup.folder = Path(folder)
