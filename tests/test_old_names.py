"""Settings that have a new name: the old one keeps its meaning on every way into a config."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from rl_training.algorithms.dqn import DQNConfig
from rl_training.algorithms.drqn import DRQNConfig
from rl_training.algorithms.sac import SACConfig
from rl_training.cli import main
from rl_training.config import TrainConfig, config_from_file, config_from_mapping
from rl_training.errors import ConfigError

STEPS = "target_update_interval_steps"


def test_constructing_with_an_old_name_warns_and_means_the_same() -> None:
    with pytest.warns(FutureWarning, match=STEPS):
        assert DQNConfig(target_update_interval=40).target_update_interval_steps == 40
    with pytest.warns(FutureWarning, match="target_update_interval_updates"):
        assert SACConfig(target_update_interval=3).target_update_interval_updates == 3
    with pytest.warns(FutureWarning, match="batch_sequences"):
        assert DRQNConfig(batch_size=7).samples_per_update == 7
    with pytest.warns(FutureWarning, match="log_interval_steps"):
        assert TrainConfig(log_interval=0).log_interval_steps == 1
    with pytest.warns(FutureWarning, match="log_interval_steps"):
        assert TrainConfig(log_interval=500).log_interval_steps == 500


@pytest.mark.parametrize("old", [40, 500])
def test_an_override_by_its_old_name_replaces_what_a_preset_sets(old: int) -> None:
    preset = config_from_file("dqn/cartpole")
    assert preset.algo_kwargs.target_update_interval_steps == 10
    with pytest.warns(FutureWarning, match=STEPS):
        config = preset.with_overrides(target_update_interval=old)
    assert config.algo_kwargs.target_update_interval_steps == old
    with pytest.warns(FutureWarning, match=STEPS):  # and again
        config = config.with_overrides(target_update_interval=7)
    assert config.algo_kwargs.target_update_interval_steps == 7
    with pytest.warns(FutureWarning, match="log_interval"):
        assert preset.with_overrides(log_interval=300).log_interval_steps == 300


def test_a_file_on_a_preset_may_use_the_old_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: dqn/cartpole\nalgo_kwargs:\n  target_update_interval: 60\n")
    with pytest.warns(FutureWarning, match=STEPS):
        assert config_from_file(path).algo_kwargs.target_update_interval_steps == 60


def test_the_flag_of_the_old_name_works_on_a_preset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[TrainConfig[Any]] = []

    def stop(config: TrainConfig[Any]) -> Any:
        seen.append(config)
        raise ConfigError("seen")

    monkeypatch.setattr("rl_training.runtime.setup.ExperimentManager.setup", stop)
    main(["train", "dqn/cartpole", "--algo-kwargs.target-update-interval", "60"])
    assert STEPS in capsys.readouterr().err
    assert seen[0].algo_kwargs.target_update_interval_steps == 60


@pytest.mark.parametrize("values", [{"a": 40, "b": 500}, {"a": 40, "b": 10}])
def test_both_names_with_different_values_are_refused(values: dict[str, int]) -> None:
    knobs = {"target_update_interval": values["a"], STEPS: values["b"]}
    with pytest.raises(ConfigError, match="both"):
        config_from_mapping({"algo": "dqn", "algo_kwargs": knobs})
    with pytest.raises(ConfigError, match="both"):
        config_from_mapping({"log_interval": 5000, "log_interval_steps": 7})


def test_old_names_are_not_written() -> None:
    for algo in ("dqn", "drqn", "sac"):
        plain = TrainConfig(algo=algo).to_dict()
        assert "log_interval" not in plain
        assert "target_update_interval" not in plain["algo_kwargs"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config_from_mapping(plain).to_dict() == plain
    assert "batch_size" not in TrainConfig(algo="drqn").to_dict()["algo_kwargs"]
