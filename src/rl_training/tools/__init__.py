"""What surrounds training: benchmarks, reports, recordings, a look at the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.tools.report.command import write_report as write_report
    from rl_training.tools.zoo.manifest import load_benchmark as load_benchmark

_EXPORTS = {
    "load_benchmark": "rl_training.tools.zoo.manifest:load_benchmark",
    "write_report": "rl_training.tools.report.command:write_report",
}

__all__ = ["load_benchmark", "write_report"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
