"""Installed versions, hardware, and the device that a run would use."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGE = "rl_training"
_SHOWN = ("torch", "gymnasium", "numpy")


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices that ``device: auto`` selects."""

    vectors: str
    images: str
    reason: str
    """Name of the accelerator, or why there is none."""


@dataclasses.dataclass(frozen=True)
class Cpu:
    """CPU cores of the machine, cores that this process may use, and load average."""

    cores: int
    usable: int
    load: float | None


@dataclasses.dataclass(frozen=True)
class Extra:
    """An optional set of dependencies."""

    name: str
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"in the clone: pip install '.[{self.name}]'"


@dataclasses.dataclass(frozen=True)
class System:
    """The part of ``rl-training doctor`` that needs no measurement."""

    versions: dict[str, str]
    device: Device
    compiler: str | None
    cpu: Cpu
    memory_gib: float | None
    memory_free_gib: float | None
    extras: tuple[Extra, ...]
    """Empty if the package is not installed but run from source."""


def examine() -> System:
    """Return versions and hardware; imports torch."""
    total, free = _memory()
    return System(
        versions=_versions(),
        device=_device(),
        compiler=find_compiler(),
        cpu=_cpu(),
        memory_gib=total,
        memory_free_gib=free,
        extras=_extras(),
    )


def _versions() -> dict[str, str]:
    found = {"rl_training": __version__, "python": platform.python_version()}
    found |= {name: _installed(name) or "missing" for name in _SHOWN}
    import torch

    found["torch"] = torch.__version__
    return found


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_compiler() -> str | None:
    """Return the C++ compiler that ``acceleration: compile`` would use on a CPU, if any."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _device() -> Device:
    import torch

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    if cuda:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
        return Device("cpu", "cuda", name)
    if torch.backends.mps.is_available():
        return Device("cpu", "mps", "Apple's GPU (Metal)")
    return Device("cpu", "cpu", _why_no_cuda(tuple(str(warning.message) for warning in warned)))


def _why_no_cuda(warned: tuple[str, ...]) -> str:
    import torch

    has_card = Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))
    if torch.version.cuda is None:
        if has_card:
            return (
                "there is an NVIDIA driver, but this torch is built without CUDA: install another"
                " build (https://pytorch.org/get-started)"
            )
        return "no accelerator: this torch is built without CUDA, and no NVIDIA driver was found"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if not has_card:
        return f"torch is built for CUDA {torch.version.cuda}, but no NVIDIA driver was found"
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        warned = (*warned, str(error))
    reason = " ".join(" ".join(warned).split()) or "torch finds no GPU"
    return (
        f"there is an NVIDIA driver, but CUDA {torch.version.cuda} does not start: {reason[:300]}"
    )


def _cpu() -> Cpu:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        usable = min(usable, max(1, round(int(quota[0]) / int(quota[1]))))
    return Cpu(cores, usable, os.getloadavg()[0] if hasattr(os, "getloadavg") else None)


def _memory() -> tuple[float | None, float | None]:
    """Return total and free memory in GiB, within a container's limit."""
    kilobytes = {
        line.split(":")[0]: int(line.split()[1])
        for line in _read("/proc/meminfo").splitlines()
        if line.endswith("kB")
    }
    total, free = kilobytes.get("MemTotal"), kilobytes.get("MemAvailable")
    if total is None or free is None:
        if not hasattr(os, "sysconf"):
            return None, None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, None
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit() and int(limit) < total * 2**10:
        used = int(_read("/sys/fs/cgroup/memory.current") or 0)
        return int(limit) / 2**30, min(free * 2**10, int(limit) - used) / 2**30
    return total / 2**20, free / 2**20


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _extras() -> tuple[Extra, ...]:
    """Return the extras listed in the package's metadata."""
    from packaging.requirements import Requirement

    if _installed(_PACKAGE) is None:
        return ()
    names = metadata.metadata(_PACKAGE).get_all("Provides-Extra") or []
    needs = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    found = []
    for name in names:
        of_extra = [
            need
            for need in needs
            if need.marker is not None
            and need.marker.evaluate({"extra": name})
            and not need.marker.evaluate({"extra": ""})
            and need.name.replace("-", "_") != _PACKAGE  # an extra that combines others
        ]
        if of_extra:
            missing = tuple(
                f"{need.name}{need.specifier}" for need in of_extra if _is_missing(need)
            )
            found.append(Extra(name, missing))
    return tuple(found)


def _is_missing(need: Requirement) -> bool:
    version = _installed(need.name)
    return version is None or not need.specifier.contains(version, prereleases=True)


def _busy(cpu: Cpu) -> str:
    if cpu.load is None or cpu.load < cpu.usable * 0.75:
        return ""
    return ": other programs are running, so measurements are slower and noisy"


def _selected(device: Device) -> str:
    if device.images == device.vectors == "cpu":
        return "cpu (no usable GPU)"
    envs = " and environments on the device" if device.images == "cuda" else ""
    return f"{device.images} for images{envs}, {device.vectors} for vectors (faster there)"


def as_text(system: System) -> str:
    """Return the text for the terminal."""
    device, cpu = system.device, system.cpu
    versions = ", ".join(f"{name} {version}" for name, version in system.versions.items())
    lines = [
        f"installed  {versions}",
        f"device     auto: {_selected(device)}",
        f"           {device.reason}",
        f"compiler   {system.compiler or 'none'}"
        + ("" if system.compiler else " (acceleration: compile needs g++ or clang++ on a CPU)"),
        f"cpu        {cpu.cores} cores, {cpu.usable} usable"
        + ("" if cpu.load is None else f", load average {cpu.load:.1f}{_busy(cpu)}"),
    ]
    if system.memory_gib is not None:
        free = "" if system.memory_free_gib is None else f", {system.memory_free_gib:.1f} GiB free"
        lines.append(f"memory     {system.memory_gib:.1f} GiB{free}")
    if not system.extras:
        lines.append(f"extras     unknown: {_PACKAGE} runs from its source (pip install -e .)")
        return "\n".join(lines) + "\n"
    there = [extra.name for extra in system.extras if not extra.missing]
    lines.append(f"extras     installed: {', '.join(there) or 'none'}")
    width = max(len(extra.name) for extra in system.extras)
    lines += [
        f"           missing: {extra.name:{width}s}  {extra.command}  ({', '.join(extra.missing)})"
        for extra in system.extras
        if extra.missing
    ]
    return "\n".join(lines) + "\n"
