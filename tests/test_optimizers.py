"""Optimizers against torch.optim, schedules on numbers worked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_training.algorithms.metrics import MetricSums
from rl_training.algorithms.optimizers import (
    Optimizer,
    OptimizerName,
    _adam_formula,
    _adam_kernel,
)
from rl_training.algorithms.schedules import OptimizationConfig
from rl_training.errors import ConfigError
from rl_training.types import Progress

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]
SETTINGS = [
    Optimizer(name, betas, eps, decay)
    for name in ("adam", "adamw", "rmsprop", "radam")
    for betas, eps, decay in (
        ((0.9, 0.999), 1e-8, 0.0),
        ((0.5, 0.9), 1e-3, 0.0),
        ((0.9, 0.99), 1e-5, 0.3),
        ((0.0, 0.0), 1e-2, 0.1),
    )
]


def of_torch(spec: Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {"lr": 1e-2, "eps": spec.eps, "weight_decay": spec.weight_decay}
    if spec.name == "rmsprop":
        return torch.optim.RMSprop([parameter], alpha=spec.betas[1], **shared)
    kinds: dict[OptimizerName, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "radam": torch.optim.RAdam,
    }
    kind: torch.optim.Optimizer = kinds[spec.name]([parameter], betas=spec.betas, **shared)
    return kind


def gradients(steps: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(20, generator=generator).to(device) for _ in range(steps)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SETTINGS, ids=str)
def test_updates_are_those_of_torch(spec: Optimizer, device: str) -> None:
    start = torch.linspace(-1, 1, 20, device=device)
    flat, twin = start.clone(), nn.Parameter(start.clone())
    modes: list[Any] = ["eager"] if device == "cpu" else ["eager", "compile"]
    for mode in modes:
        flat, twin = start.clone(), nn.Parameter(start.clone())
        update, state = spec.update_function(flat.device, mode), spec.init_state(flat)
        reference = of_torch(spec, twin)
        rate: float | Tensor = 1e-2 if mode == "eager" else torch.tensor(1e-2, device=device)
        for gradient in gradients(30, device):
            given = gradient.clone()
            update(flat, given, state, rate)
            assert torch.equal(given, gradient), "the gradient belongs to the caller"
            twin.grad = gradient.clone()
            reference.step()
        assert float(state["step"]) == 30
        torch.testing.assert_close(flat, twin.detach(), rtol=0, atol=1e-6)
        assert (flat - start).abs().max() > 1e-2


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_the_formula_of_adam_is_the_fused_kernel(betas: tuple[float, float]) -> None:
    spec = Optimizer(betas=betas)
    flats = [torch.linspace(-1, 1, 20) for _ in range(2)]
    states = [spec.init_state(flat) for flat in flats]
    for gradient in gradients(30):
        for rule, flat, state in zip((_adam_kernel, _adam_formula), flats, states, strict=True):
            rule(flat, gradient, **state, rate=1e-2, beta1=betas[0], beta2=betas[1], eps=1e-8)
    torch.testing.assert_close(flats[0], flats[1], rtol=0, atol=1e-6)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_default_adam_is_torch_s_fused_adam_bit_for_bit() -> None:
    start = torch.linspace(-1, 1, 20)
    flat, twin = start.clone(), nn.Parameter(start.clone())
    spec = Optimizer()
    update, state = spec.update_function(CPU, "eager"), spec.init_state(flat)
    reference = torch.optim.Adam([twin], lr=1e-2, fused=True)
    for gradient in gradients(10):
        update(flat, gradient, state, 1e-2)
        twin.grad = gradient.clone()
        reference.step()
    assert torch.equal(flat, twin.detach())


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "radam"])
def test_decay_applies_where_the_mask_is_one(name: OptimizerName) -> None:
    decayed = torch.tensor([1.0, 0.0])
    found = []
    for decay in (0.0, 0.5):
        spec = Optimizer(name, weight_decay=decay)
        flat = torch.ones(2)
        update = spec.update_function(CPU, "eager", decayed=decayed)
        state = spec.init_state(flat)
        for gradient in (torch.ones(2), torch.full((2,), -0.5)):
            update(flat, gradient, state, 0.1)
        found.append(flat)
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]


# -- schedules -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annealed(OptimizationConfig):
    anneal_lr: bool = True


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizationConfig(learning_rate=0.1), [0.1, 0.1, 0.1, 0.1]),
        (Annealed(learning_rate=0.1, anneal_lr=False), [0.1, 0.1, 0.1, 0.1]),
        (Annealed(learning_rate=0.1), [0.1, 0.075, 0.05, 0.0]),
        (Annealed(learning_rate=0.1, lr_schedule="constant"), [0.1, 0.1, 0.1, 0.1]),
        (OptimizationConfig(learning_rate=0.1, lr_schedule="linear"), [0.1, 0.075, 0.05, 0.0]),
        (OptimizationConfig(learning_rate=0.1, lr_schedule="cosine"), [0.1, 0.0853553, 0.05, 0.0]),
        (OptimizationConfig(learning_rate=0.1, lr_warmup_fraction=0.5), [0.001, 0.05, 0.1, 0.1]),
        (
            OptimizationConfig(learning_rate=0.1, lr_schedule="linear", lr_warmup_fraction=0.25),
            [0.001, 0.1, 0.2 / 3, 0.0],
        ),
    ],
)
def test_rates_at_quarters_of_the_run(config: OptimizationConfig, expected: list[float]) -> None:
    found = [config.rate_at(Progress(step, 100)) for step in (0, 25, 50, 100)]
    assert found == pytest.approx(expected, abs=1e-7)
    assert config.rate_changes == (len(set(expected)) > 1)


def test_a_linear_schedule_has_the_arithmetic_of_old_runs() -> None:
    config = Annealed(learning_rate=2.5e-4)
    for step in range(0, 1000, 7):
        progress = Progress(step, 997)
        assert config.rate_at(progress) == 2.5e-4 * (1 - progress.fraction)


def test_settings_describe_the_optimizer() -> None:
    config = OptimizationConfig(
        optimizer="radam", optimizer_betas=(0.5, 0.9), optimizer_eps=1e-5, weight_decay=0.1
    )
    assert config.optimizer_spec() == Optimizer("radam", (0.5, 0.9), 1e-5, 0.1)
    assert OptimizationConfig().optimizer_spec() == Optimizer()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("lr_schedule", "exponential"),
        ("lr_warmup_fraction", 1.0),
        ("lr_warmup_fraction", -0.1),
        ("optimizer", "sgd"),
        ("optimizer_betas", (0.9,)),
        ("optimizer_betas", (0.9, 0.99, 0.999)),
        ("optimizer_betas", (0.9, 1.0)),
        ("optimizer_eps", 0.0),
        ("weight_decay", -1e-3),
        ("weight_decay", float("inf")),
    ],
)
def test_impossible_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{name}"):
        OptimizationConfig(**{name: value})


# -- metrics ---------------------------------------------------------------------------------------


def test_metric_means_and_other_numbers_in_one_mapping() -> None:
    sums = MetricSums(CPU)
    assert sums.pop("losses") == {}
    for value in (1.0, 2.0, 6.0):
        sums.add({"a": torch.tensor(value), "b": torch.tensor(-value)})
        sums.updates += 1
    popped = sums.pop("losses", rate=0.5, variance=torch.tensor(0.25))
    assert popped == {
        "losses/a": 3.0,
        "losses/b": -3.0,
        "losses/rate": 0.5,
        "losses/variance": 0.25,
    }
    assert list(popped) == ["losses/a", "losses/b", "losses/rate", "losses/variance"]
    assert sums.pop("losses") == {}


def test_metrics_of_other_names_are_refused() -> None:
    sums = MetricSums(CPU)
    sums.add({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    with pytest.raises(ValueError, match="same names in the same order"):
        sums.add({"b": torch.tensor(2.0), "a": torch.tensor(1.0)})


def test_metric_sums_are_restored_in_place() -> None:
    source, target, fresh = (MetricSums(CPU) for _ in range(3))
    for sums, value in ((source, 4.0), (target, 100.0)):
        sums.add({"a": torch.tensor(value)})
        sums.updates += 2
    memory = target.state_dict()["sums"]
    for sums in (target, fresh):
        sums.load_state_dict(source.state_dict())
    assert target.state_dict()["sums"] is memory
    assert [sums.pop("x") for sums in (source, target, fresh)] == [{"x/a": 2.0}] * 3
    target.add({"a": torch.tensor(1.0)})
    target.updates += 1
    target.load_state_dict(MetricSums(CPU).state_dict())
    assert target.pop("x") == {}
    assert not memory.any()
