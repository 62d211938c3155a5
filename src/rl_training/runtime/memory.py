"""Memory of a replay: the limit of this process, and allocation when a run starts."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from rl_training.errors import ConfigError
from rl_training.types import Array


class HoldsArrays(Protocol):
    """An object whose memory consists of arrays."""

    def arrays(self) -> Iterator[Array]:
        """Yield the arrays."""
        ...


Held = TypeVar("Held", bound=HoldsArrays)


class Limit(NamedTuple):
    """Memory that is available, and what limits it."""

    available: int
    """Bytes that this process can still allocate."""
    name: str
    """Name of the limit, for error messages."""


class _CgroupFiles(NamedTuple):
    """File names of a memory controller, and counters in its ``memory.stat``."""

    limit: str
    usage: str
    cache: tuple[str, ...]
    """Counters of file pages, which the kernel frees when memory is needed."""


_V1 = _CgroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path = Path("/")) -> Limit | None:
    """Return the smallest limit: of the machine, of a container, or of the process.

    None if it is unknown. ``/proc`` and ``/sys`` are read below ``root``.
    """
    limits = [*machine_limits(root), *cgroup_limits(root), *process_limits(root)]
    return min(limits, default=None)


def machine_limits(root: Path) -> Iterator[Limit]:
    """Yield the machine's limit: free memory, file pages that can be freed, and swap."""
    sizes = _kilobytes(root / "proc/meminfo")
    if "MemAvailable" in sizes:
        yield Limit(sizes["MemAvailable"] + sizes.get("SwapFree", 0), "memory of this machine")
    elif hasattr(os, "sysconf"):
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Limit(present, "memory of this machine")


def cgroup_limits(root: Path) -> Iterator[Limit]:
    """Yield the limits of this process's cgroup and of its parents, for cgroup v1 and v2."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _limits_along(base / "memory", path, _V1)
        elif number == "0" and not controllers:
            yield from _limits_along(base, path, _V2)


def _limits_along(base: Path, path: str, files: _CgroupFiles) -> Iterator[Limit]:
    """Yield limits from a cgroup up to the root; in a container only the root may be visible."""
    parts = PurePosixPath(path).parts[1:]
    for depth in range(0 if ".." in parts else len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        limit = _text(folder / files.limit)
        if not limit.isdigit():  # missing, or "max"
            continue
        usage = _text(folder / files.usage)
        counters = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
        cache = sum(int(counters.get(name, 0)) for name in files.cache)
        used = max(0, int(usage or 0) - cache)
        name = f"cgroup {files.limit} {readable(int(limit))} in {folder}"
        yield Limit(max(0, int(limit) - used), name)


def process_limits(root: Path) -> Iterator[Limit]:
    """Yield the limits set on this process (``ulimit``), minus its current use."""
    if sys.platform == "win32":
        return
    import resource

    used = _kilobytes(root / "proc/self/status")
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            available = max(0, limit - used.get(field, 0))
            yield Limit(available, f"{name} {readable(limit)}")


def check_host_memory(
    transitions: int,
    each: int,
    *,
    quiet: bool,
    name: str = "replay",
    advice: str = "lower buffer_size",
) -> None:
    """Raise an error if a replay exceeds the available memory; print its size unless ``quiet``."""
    needed = transitions * each
    text = f"{name}: {transitions:,} transitions x {each:,} bytes = {readable(needed)}"
    limit = available_memory()
    if limit is not None and needed > limit.available:
        raise ConfigError(
            f"{text}, but only {readable(limit.available)} are available to this process"
            f" (limit: {limit.name}): {advice}"
        )
    if not quiet:
        sys.stderr.write(text + "\n")


def check_device_memory(
    transitions: int,
    each: int,
    device: torch.device,
    *,
    name: str = "replay",
    advice: str = "lower buffer_size",
    beside: str = ", or keep it on the host with replay_device: cpu",
) -> None:
    """Raise an error if a replay exceeds the free memory of an accelerator.

    ``beside`` is further advice.
    """
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = transitions * each
    if needed > free:
        raise ConfigError(
            f"{name}: {transitions:,} transitions x {each:,} bytes ="
            f" {readable(needed)}, but the accelerator has {readable(free)} free:"
            f" {advice}{beside}"
        )


def make_claimed(
    make: Callable[[], Held],
    share: float,
    *,
    name: str = "replay",
    advice: str = "lower buffer_size",
) -> Held:
    """Create a replay and allocate the memory of the first ``share`` of its rows.

    The system allocates each page of an array when it is first written, which for the last rows of
    a large replay is hours later, and ends the process if there is no memory left then.
    """
    try:
        replay = make()
    except MemoryError as error:
        limit = available_memory()
        known = f" ({readable(limit.available)} left, limit: {limit.name})" if limit else ""
        raise ConfigError(
            f"{name}: its memory could not be allocated{known}: {advice}; {error}"
        ) from None
    for array in replay.arrays():
        _write_pages(array, share)
    return replay


def _write_pages(array: Array, share: float) -> None:
    """Write each page's own content to it, so that it is allocated."""
    data = array.reshape(-1).view(np.uint8)
    pages = data[: int(share * len(data)) : mmap.PAGESIZE]
    np.bitwise_or(pages, 0, out=pages)


def readable(size: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the sizes in a file of ``name: number kB`` lines, in bytes."""
    lines = [line.split() for line in _text(path).splitlines() if line.endswith(" kB")]
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in lines}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
