"""Write ``src/rl_training/surface.py`` from the table of algorithms.

    python scripts/generate_surface.py

Run it after a change of `rl_training.registry.ALGORITHMS`; a test compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_training.registry import ALGORITHMS, Entry, train_exports

TARGET = Path(__file__).resolve().parents[1] / "src" / "rl_training" / "surface.py"
HEAD = '''"""The managed class and the ``train_*`` function of every algorithm.

Generated from `rl_training.registry` by ``python scripts/generate_surface.py``: do not edit.
"""

from __future__ import annotations
'''


def surface() -> str:
    """Return the text of the module."""
    bases = {"rl_training.api.algorithms": "ManagedAlgorithm"}
    bases["rl_training.api.recurrent"] = "RecurrentAlgorithm"
    functions = {path.partition(":")[0]: name for name, path in train_exports().items()}
    imported = sorted({**bases, **functions}.items())
    imports = "".join(f"from {module} import {name}\n" for module, name in imported)
    classes = {entry.class_name_of(name): (name, entry) for name, entry in ALGORITHMS.items()}
    exported = sorted([*classes, *functions.values()], key=_as_linted)
    listed = "".join(f'    "{name}",\n' for name in exported)
    bodies = "".join(_class(label, *classes[label]) for label in sorted(classes))
    return f"{HEAD}\n{imports}\n__all__ = [\n{listed}]\n{bodies}"


def _as_linted(name: str) -> tuple[bool, bool, str]:
    """Order names as the linter wants them: A2C, RecurrentPPO, train_a2c."""
    return not name.isupper(), name.islower(), name


def _class(label: str, name: str, entry: Entry) -> str:
    base = "RecurrentAlgorithm" if entry.is_recurrent else "ManagedAlgorithm"
    return f'''

class {label}({base}):
    """{entry.title}: ``{label}(TrainConfig(algo="{name}", ...)).learn()``."""

    algo = "{name}"
'''


def main() -> int:
    """Write the module."""
    TARGET.write_text(surface(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
