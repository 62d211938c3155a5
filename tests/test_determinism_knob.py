"""``deterministic``, and how device and acceleration are chosen, with CUDA as it would be."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_training import train_ppo
from rl_training.config import TrainConfig, config_from_mapping
from rl_training.errors import ConfigError
from rl_training.runtime import assembly, determinism, device
from rl_training.runtime.workflows import resume_training
from rl_training.seeding import restore_generator
from rl_training.types import ArraySpec, EnvInfo, ObsSpec
from state_compare import differences, final_state
from test_device_source import SMALL, StopAt, config_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def initialised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether CUDA is, and everything that a run would change is put back."""
    found = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: found[0])
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setitem(determinism._ours, "set", False)
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield found
    torch.use_deterministic_algorithms(mode=False)
    settings.fill_uninitialized_memory = fills
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
    os.environ.pop(WORKSPACE, None)


def config(**settings: Any) -> TrainConfig[Any]:
    return TrainConfig(**{"vectorization": "device", **settings})


def test_it_is_set_before_cuda_starts_and_taken_back(initialised: list[bool]) -> None:
    determinism.prepare_determinism(config())
    assert WORKSPACE not in os.environ
    run = config(deterministic=True)
    determinism.prepare_determinism(run)
    assert os.environ[WORKSPACE] == ":4096:8"
    initialised[0] = True  # as by what `pick_device` calls
    determinism.use_determinism(run, CUDA)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    determinism.use_determinism(config(), CPU)
    assert torch.are_deterministic_algorithms_enabled()
    determinism.use_determinism(config(), CUDA)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)  # by the user: it stays
    determinism.use_determinism(config(), CUDA)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("workspace", [None, ":0:0"])
def test_it_is_refused_where_cuda_started_without_it(
    workspace: str | None, initialised: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    initialised[0] = True
    if workspace is not None:
        monkeypatch.setenv(WORKSPACE, workspace)
    run = config(deterministic=True)
    determinism.prepare_determinism(run)
    determinism.use_determinism(run, CPU)
    with pytest.raises(ConfigError, match="needs CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8"):
        determinism.use_determinism(run, CUDA)


def test_on_the_cpu_it_changes_nothing(make_config: Any, initialised: list[bool]) -> None:
    from rl_training.experiment.manager import ExperimentManager

    runs = [
        ExperimentManager.setup(config_for(make_config, "ppo", deterministic=on)).train()
        for on in (False, True)
    ]
    states = [final_state(run.run_dir) for run in runs]
    assert [state["config"].pop("deterministic") for state in states] == [False, True]
    assert differences(states[0], states[1]) == []
    assert not torch.are_deterministic_algorithms_enabled()


VECTOR = ObsSpec({"": ArraySpec((3,), "float32")})
IMAGE = ObsSpec({"": ArraySpec((3, 8, 8), "uint8")})


def reasons(place: torch.device, obs_spec: ObsSpec = VECTOR, **settings: Any) -> list[str]:
    info = EnvInfo(obs_spec, None, 4)  # type: ignore[arg-type]
    source = SimpleNamespace(info=info, exactly_resumable=True)
    setup: Any = SimpleNamespace(config=TrainConfig(**settings), device=place, source=source)
    assert assembly.is_exact(setup) == (not assembly.inexact_reasons(setup))
    return assembly.inexact_reasons(setup)


def test_what_is_exact_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    on: dict[str, Any] = {"deterministic": True}
    assert reasons(CPU) == reasons(CPU, **on) == []
    assert reasons(CUDA, **on) == []
    assert reasons(CUDA) == ["device cuda without deterministic"]
    assert reasons(CUDA, IMAGE, **on) == ["images on device cuda"]
    assert reasons(CUDA, algo="recurrent_ppo", **on) == ["a recurrent network on device cuda"]
    assert reasons(CUDA, algo_kwargs={"memory": "gru"}, **on) == [
        "a recurrent network on device cuda"
    ]
    assert reasons(torch.device("mps"), **on) == ["device mps"]
    for mode in ("compile", "cudagraph"):
        assert reasons(CUDA, acceleration=mode, **on) == [f"acceleration {mode}"]
    assert reasons(CPU, acceleration="compile") == ["acceleration compile"]
    every = ("eager", "compile", "cudagraph")
    monkeypatch.setitem(determinism.EXACT_ACCELERATIONS, "cuda", every)
    assert reasons(CUDA, acceleration="cudagraph", **on) == []


def chosen(place: torch.device, capturable: bool = True, **settings: Any) -> tuple[str, str]:
    return device.pick_acceleration(config(**settings), place, capturable=capturable)


def test_acceleration_is_chosen_where_it_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert chosen(CPU) == ("eager", "there are no CUDA graphs on cpu")
    assert chosen(CUDA) == ("cudagraph", "steps and updates are launched as CUDA graphs")
    assert chosen(CUDA, capturable=False) == ("eager", "the environment is not capturable")
    assert chosen(CUDA, acceleration="eager") == ("eager", "as set")
    assert chosen(CUDA, deterministic=True) == (
        "eager",
        "deterministic: graphs are not known to repeat",
    )
    assert chosen(CUDA, algo_kwargs={"encoder": "torch.nn:Flatten"})[0] == "eager"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert chosen(CUDA) == ("eager", "cudagraph needs Triton and a C compiler")


def test_a_default_is_not_a_choice_but_what_is_stored_is() -> None:
    unset: TrainConfig[Any] = TrainConfig()
    assert unset.acceleration == "eager"
    assert not unset.with_overrides(seed=5).is_given("acceleration")
    assert unset.with_overrides(acceleration="eager").is_given("acceleration")
    stored = unset.to_dict()
    assert type(stored["acceleration"]) is str
    assert config_from_mapping(stored).is_given("acceleration")


def test_the_choice_is_told_in_one_line_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "progress": True, "num_steps": 16, "output_dir": tmp_path}
    run = train_ppo(config(), callbacks=[StopAt(100)], **settings)
    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if line.startswith("device: ")]
    assert torch.cuda.is_available() or told == (
        "device: cpu, acceleration: eager (there are no CUDA graphs on cpu)"
    )
    (run.run_dir / "metadata.json").write_text(
        json.dumps({**json.loads((run.run_dir / "metadata.json").read_text()), "gpu": "Other"})
    )
    resume_training(run.run_dir)
    lineage = json.loads((run.run_dir / "metadata.json").read_text())["resumes"]
    assert [one["resume"] for one in lineage] == ["approximate"]  # it began on a GPU


def test_a_generator_of_another_device_is_seeded_by_the_saved_state() -> None:
    state = torch.arange(16, dtype=torch.uint8)  # as long as CUDA's
    one, same, other = (torch.Generator() for _ in range(3))
    restore_generator(one, state)
    restore_generator(same, state)
    restore_generator(other, state + 1)
    drawn = [torch.rand(3, generator=generator).tolist() for generator in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
