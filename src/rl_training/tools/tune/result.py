"""The files that a study leaves: best.yaml, a preset, and study.json, for reports."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training._internal.yaml_io import dump_yaml
from rl_training.config import FORMAT as CONFIG_FORMAT
from rl_training.config import TrainConfig, config_from_mapping
from rl_training.errors import ConfigError
from rl_training.runs import write_durably
from rl_training.terminal import one_line
from rl_training.tools.tune.final import Comparison, SeedReturns
from rl_training.tools.tune.study import TuningStudy

BEST, STUDY = "best.yaml", "study.json"
FORMAT = 1
_LISTED = 10
"""Trials whose settings study.json lists."""
_NOT_KEPT = ("seed", "output_dir", "progress", "log_interval")


def best_yaml(study: TuningStudy, number: int, tuned: SeedReturns, final: Comparison | None) -> str:
    """Return the content of best.yaml: the settings of a trial as a preset."""
    frozen = next(one for one in study.trials() if one.number == number)
    settings = study.settings
    config = settings.config.with_overrides(**settings.space.settings_of(frozen.params))
    content: dict[str, Any] = {"format": CONFIG_FORMAT, **short_settings(config)}
    content["tuned"] = {
        "command": study.command,
        "trial": number,
        "objective": settings.objective,
        "seeds": list(settings.seeds),
        "return": f"{tuned.text()}; an overestimate: the settings were chosen on these seeds",
    }
    if final is not None:
        content["verified"] = {
            "steps": final.tuned.steps,
            "seeds": list(final.tuned.returns),
            "return": f"{final.tuned.text()}; the untuned preset: {final.preset.text()}",
            "command": "rl-training train --config best.yaml --seed S",
        }
    head = f"# Found by rl-training tune, study {one_line(study.name)}, trial {number}.\n"
    return head + dump_yaml(content)


def short_settings(config: TrainConfig[Any]) -> dict[str, Any]:
    """Return the settings of a config that differ from the defaults of its algorithm."""
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NOT_KEPT and (config.is_given(name) or name in ("algo", "env_id"))
    }
    default = config_from_mapping({"algo": config.algo}).to_dict()
    always = ("algo", "env_id", config.total_setting)
    short = {
        name: value
        for name, value in settings.items()
        if name in always or value != default.get(name)
    }
    if "algo_kwargs" in short:
        knobs = default["algo_kwargs"]
        short["algo_kwargs"] = {
            name: value
            for name, value in settings["algo_kwargs"].items()
            if value != knobs.get(name)
        }
    return short if _reads_back(short, config) else settings


def _reads_back(short: Mapping[str, Any], config: TrainConfig[Any]) -> bool:
    ignored = {name: config.to_dict().get(name) for name in _NOT_KEPT}
    try:
        found = config_from_mapping(short).to_dict()
    except ConfigError:
        return False
    return {**found, **ignored} == {**config.to_dict(), **ignored}


def importances(study: TuningStudy) -> dict[str, float]:
    """Return how much of the best trials each setting explains; empty with too few trials."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is called experimental
        try:
            found = optuna.importance.get_param_importances(
                study.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
        except (ValueError, RuntimeError, ZeroDivisionError):
            return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def write_study(study: TuningStudy, final: Comparison | None = None) -> None:
    """Write study.json: the trials, the best settings and what explains them."""
    trials = study.trials()
    done = [one for one in trials if one.state.name == "COMPLETE" and one.value is not None]
    best = sorted(done, key=lambda one: (-float(one.value or 0.0), one.number))
    settings = study.settings
    content = {
        "format": FORMAT,
        "study": study.name,
        "command": study.command,
        "algo": settings.config.algo,
        "env_id": settings.config.env_id or str(settings.config.dataset),
        "objective": settings.objective,
        "seeds": list(settings.seeds),
        "sampler": settings.sampler,
        "pruner": settings.pruner,
        "trials": [
            {"number": one.number, "state": one.state.name.lower(), "value": one.value}
            for one in trials
            if one.state.is_finished()
        ],
        "best": [
            {
                "number": one.number,
                "value": one.value,
                "folder": study.folder_of(one).name,
                "settings": {name: _text(value) for name, value in one.params.items()},
            }
            for one in best[:_LISTED]
        ],
        "importances": importances(study),
        "final": None if final is None else _plain_comparison(final),
    }
    text = json.dumps(content, indent=1) + "\n"
    write_durably(study.folder / STUDY, memoryview(text.encode("utf-8")))


def write_best(path: Path, text: str) -> None:
    """Write best.yaml."""
    write_durably(path, memoryview(text.encode("utf-8")))


def _plain_comparison(final: Comparison) -> dict[str, Any]:
    return {
        name: {
            "seeds": list(one.returns),
            "returns": list(one.returns.values()),
            **dataclasses.asdict(one.interval),
        }
        for name, one in (("tuned", final.tuned), ("preset", final.preset))
    }


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
