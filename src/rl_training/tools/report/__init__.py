"""``rl-training report``: curves, scores and settings of run folders, as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.tools.report.command import WrittenReport as WrittenReport
    from rl_training.tools.report.command import write_report as write_report

__all__ = ["WrittenReport", "write_report"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "WrittenReport": "rl_training.tools.report.command:WrittenReport",
        "write_report": "rl_training.tools.report.command:write_report",
    },
)
