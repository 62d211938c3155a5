"""Trained policies as files for deployment: ONNX, `torch.export` and safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_training._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from rl_training.export.loading import load_exported as load_exported
    from rl_training.export.writing import Exported as Exported
    from rl_training.export.writing import export_policy as export_policy

_EXPORTS = {
    "Exported": "rl_training.export.writing:Exported",
    "export_policy": "rl_training.export.writing:export_policy",
    "load_exported": "rl_training.export.loading:load_exported",
}

__all__ = [*_EXPORTS]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
