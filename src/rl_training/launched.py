"""Whether torchrun started this process, and as which rank. It loads no torch."""

from __future__ import annotations

import os


def is_launched() -> bool:
    """Return whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """Return the rank among the processes of this machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_launched() else 0


def local_world_size() -> int:
    """Return how many processes torchrun started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched() else 1


def machine() -> int:
    """Return the number of this machine among those of torchrun; 0 without torchrun."""
    return int(os.environ.get("GROUP_RANK", "0")) if is_launched() else 0


def world_size() -> int:
    """Return how many processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def shows(error: BaseException) -> bool:
    """Return whether this process prints an error: of one that all ranks have, only one does."""
    elsewhere = getattr(error, "shown_elsewhere", None)
    return rank() == 0 if elsewhere is None else not elsewhere
