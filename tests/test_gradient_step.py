"""`GradientStep`: adding, clipping, stepping; placement; train and eval mode; targets."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_training.algorithms.acceleration import graphed
from rl_training.algorithms.gradient_step import (
    GradientStep,
    Target,
)
from rl_training.algorithms.module_mode import changing_buffers, mode_dependent
from rl_training.algorithms.optimizers import Optimizer
from rl_training.communicator import SHARD_WEIGHT, Communicator, add_in_order
from rl_training.errors import ConfigError
from rl_training.models.encoders import FlattenEncoder
from rl_training.models.normalizer import RunningNorm
from rl_training.types import ArraySpec, ObsSpec

COMPILER = shutil.which("g++") or shutil.which("clang++")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MODES = [
    pytest.param("eager", "cpu"),
    pytest.param("compile", "cpu", marks=pytest.mark.skipif(not COMPILER, reason="no compiler")),
    *(pytest.param(mode, "cuda", marks=NEEDS_CUDA) for mode in ("eager", "compile", "cudagraph")),
]


def squared_loss(module: nn.Module) -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    return lambda batch: {"loss": module(batch["x"]).square().mean()}


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().flatten().clone() for p in module.parameters()])


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


BATCH = {"x": torch.randn(5, 3, generator=torch.Generator().manual_seed(0))}


# -- add, clip, step -------------------------------------------------------------------------------


def weighted(x: list[float], weight: float | None = None) -> dict[str, Tensor]:
    """One row, with the share of its shard."""
    batch = {"x": torch.tensor([x])}
    return batch if weight is None else {**batch, SHARD_WEIGHT: torch.tensor(weight)}


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("limit", [4.0, 100.0])
def test_gradients_of_shards_are_added_and_then_clipped(mode: Any, limit: float) -> None:
    """d(w . x)/dw = x: shares of 1/4 and 3/4 of (12, 0) and (0, 16/3) give (3, 4), of norm 5."""
    layer = nn.Linear(2, 1, bias=False)
    step = GradientStep(
        layer,
        lambda batch: {"loss": layer(batch["x"]).sum(), "size": batch["x"].sum(), **batch},
        learning_rate=0.1,
        max_grad_norm=limit,
        acceleration=mode,
        communicator=Communicator(2),
    )
    metrics = step(weighted([12.0, 0.0], 0.25), weighted([0.0, 16 / 3], 0.75))
    assert float(metrics["size"]) == pytest.approx(0.25 * 12 + 0.75 * 16 / 3)
    assert [row.tolist() for row in metrics["x"]] == [[[12.0, 0.0]], [[0.0, pytest.approx(16 / 3)]]]
    applied = step.moments["exp_avg"] / 0.1  # Adam's first average, from zero
    norm = min(5.0, limit)
    assert applied.tolist() == pytest.approx([0.6 * norm, 0.8 * norm], rel=1e-5)


def test_shards_without_weights_have_equal_shares() -> None:
    layer = nn.Linear(2, 1, bias=False)
    step = GradientStep(
        layer,
        lambda batch: {"loss": layer(batch["x"]).sum()},
        learning_rate=0.1,
        communicator=Communicator(4),
    )
    step(*(weighted([float(4 * i), 1.0]) for i in range(4)))
    assert (step.moments["exp_avg"] / 0.1).tolist() == pytest.approx([6.0, 1.0])


def test_rows_are_added_from_first_to_last() -> None:
    """In float32 (1 + 1e8) - 1e8 is 0 and 1 + (1e8 - 1e8) is 1."""
    rows = torch.tensor([[1.0, 1e8], [1e8, -1e8], [-1e8, 1.0]])
    assert add_in_order(rows).tolist() == [0.0, 1.0]
    assert add_in_order(rows[:1]).tolist() == [1.0, 1e8]
    assert rows[0].tolist() == [1.0, 1e8], "the rows are left as they are"


@pytest.mark.parametrize(("mode", "device"), MODES)
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "radam"])
def test_modes_agree_for_every_optimizer(name: Any, mode: Any, device: str) -> None:
    found = []
    runs: list[tuple[Any, str]] = [("eager", "cpu"), (mode, device)]
    for each_mode, place in runs:
        module = linear().to(place)
        step = GradientStep(
            module,
            squared_loss(module),
            learning_rate=0.01,
            max_grad_norm=0.5,
            optimizer=Optimizer(name, weight_decay=0.1),
            acceleration=each_mode,
        )
        update = graphed(step.__call__, each_mode, torch.device(place))
        for i in range(8):
            step.learning_rate = 0.01 / (i + 1)
            update({"x": BATCH["x"].to(place)})
        found.append(weights(module))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)
    assert (found[0] - weights(linear())).abs().max() > 1e-3


# -- placement -------------------------------------------------------------------------------------


def replace_data(module: nn.Module) -> None:
    last = list(module.parameters())[1]
    last.data = last.data.clone()


def replace_parameter(module: nn.Module) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def flatten_again(module: nn.Module) -> None:
    GradientStep(module, squared_loss(module), learning_rate=0.1)


@pytest.mark.parametrize("move", [nn.Module.double, replace_data, replace_parameter, flatten_again])
def test_a_module_that_was_moved_is_refused(move: Callable[[nn.Module], Any]) -> None:
    module = linear()
    step = GradientStep(module, squared_loss(module), learning_rate=0.1)
    step(BATCH)
    move(module)
    with pytest.raises(RuntimeError, match=r"parameter '0\..*moved after its GradientStep"):
        step({"x": BATCH["x"].double()})
    with pytest.raises(RuntimeError, match="build a new GradientStep"):
        step.check_placement()


def test_loading_weights_and_a_step_beside_are_no_moves() -> None:
    module = linear()
    step = GradientStep(module, squared_loss(module), learning_rate=0.1)
    other = GradientStep(module, squared_loss(module), learning_rate=0.1, beside=step)
    module.load_state_dict(linear(seed=1).state_dict())
    module.to("cpu")
    before = weights(module)
    step(BATCH)
    between = weights(module)
    other(BATCH)
    assert not torch.equal(before, between)
    assert not torch.equal(between, weights(module))


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "radam"])
def test_state_continues_alike(name: Any) -> None:
    found = []
    for resumed in (False, True):
        module = linear()
        step = GradientStep(
            module, squared_loss(module), learning_rate=0.1, optimizer=Optimizer(name)
        )
        step(BATCH)
        step.learning_rate = 0.01
        if resumed:
            saved = copy.deepcopy(step.state_dict())
            step = GradientStep(
                module, squared_loss(module), learning_rate=0.5, optimizer=Optimizer(name)
            )
            step.load_state_dict(saved)
        step(BATCH)
        found.append(weights(module))
    assert torch.equal(*found)


def test_the_state_of_adam_has_the_keys_of_old_checkpoints() -> None:
    module = linear()
    step = GradientStep(module, squared_loss(module), learning_rate=0.1)
    assert list(step.state_dict()) == ["step", "exp_avg", "exp_avg_sq", "learning_rate"]


@pytest.mark.parametrize(("saved", "loaded"), [("adam", "adamw"), ("rmsprop", "adam")])
def test_the_state_of_another_optimizer_is_refused(saved: Any, loaded: Any) -> None:
    module = linear()
    states = [
        GradientStep(module, squared_loss(module), learning_rate=0.1, optimizer=Optimizer(name))
        for name in (saved, loaded)
    ]
    with pytest.raises(ValueError, match=f"that of '{saved}' and cannot be loaded into '{loaded}'"):
        states[1].load_state_dict(states[0].state_dict())


# -- train and eval mode ---------------------------------------------------------------------------


class Noisy(nn.Module):
    """An encoder with statistics, and dropout that keeps or removes everything."""

    calls: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # Without a bias: BatchNorm would remove it, and Adam would scale rounding errors up.
        self.first, self.last = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.modes.append((self.training, self.dropout.training))
        if self.training:
            self.calls = self.calls + 1  # a buffer that is replaced, not changed in place
        return self.last(self.dropout(self.norm(self.first(x))))  # type: ignore[no-any-return]


def noisy(device: str = "cpu", dropout: float = 0.0) -> Noisy:
    torch.manual_seed(0)
    return Noisy(dropout).to(device).eval()


def statistics(module: Noisy) -> list[float]:
    norm = module.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    tracked = float(norm.num_batches_tracked or 0)
    return [*norm.running_mean.tolist(), *norm.running_var.tolist(), tracked, float(module.calls)]


@pytest.mark.parametrize(("mode", "device"), MODES)
def test_statistics_move_in_learning_alone_and_alike_in_every_mode(mode: Any, device: str) -> None:
    expected: list[float] = []
    runs: list[tuple[Any, str]] = [("eager", "cpu"), (mode, device)]
    for each_mode, place in runs:
        module = noisy(place)
        target = Target(module)
        step = GradientStep(
            module, squared_loss(module), learning_rate=0.01, acceleration=each_mode
        )
        update = graphed(step.__call__, each_mode, torch.device(place))
        start = statistics(module)
        module(BATCH["x"].to(place))
        assert statistics(module) == start, "in eval mode nothing moves"
        for i in range(6):
            update({"x": BATCH["x"].to(place) + i})
        found = statistics(module)
        assert found[-2:] == [6.0, 6.0]
        assert found != start
        assert statistics(target.module) == start
        target.follow(step.flat, 0.5)
        assert statistics(target.module) == found
        assert not any(part.training for part in (*module.modules(), *target.module.modules()))
        if not expected:
            expected = found
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("mode", "device"), MODES[:2])
def test_dropout_acts_in_learning_alone(mode: Any, device: str) -> None:
    """With everything dropped the loss is that of the last layer's bias."""
    module = noisy(device, dropout=1.0)
    step = GradientStep(module, squared_loss(module), learning_rate=0.0, acceleration=mode)
    bias_alone = float(module.last.bias.detach().square().mean())
    assert float(step(BATCH)["loss"]) == pytest.approx(bias_alone)
    assert float(squared_loss(module)(BATCH)["loss"].detach()) != pytest.approx(bias_alone)


def test_the_mode_is_restored_where_the_loss_raises() -> None:
    module = noisy()

    def loss(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        module(batch["x"])
        raise ZeroDivisionError

    step = GradientStep(module, loss, learning_rate=0.1)
    with pytest.raises(ZeroDivisionError):
        step(BATCH)
    assert module.modes == [(True, True)]
    assert not any(part.training for part in module.modules())


def test_other_modules_that_a_loss_reads_keep_their_mode() -> None:
    actor, critic = noisy(), noisy()
    step = GradientStep(
        actor,
        lambda batch: {"loss": (actor(batch["x"]) + critic(batch["x"])).square().mean()},
        learning_rate=0.1,
    )
    step(BATCH)
    assert (actor.modes, critic.modes) == ([(True, True)], [(False, False)])


class Frozen(nn.Module):
    """Keeps its BatchNorm in eval mode, as fine-tuned networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.0)
        self.modes: list[tuple[bool, bool]] = []

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append((self.norm.training, self.dropout.training))
        return self.last(self.dropout(self.norm(x)))  # type: ignore[no-any-return]


def test_a_module_with_a_train_method_of_its_own_switches_what_it_contains() -> None:
    frozen = Frozen().eval()
    module = nn.Sequential(frozen)
    step = GradientStep(module, squared_loss(module), learning_rate=0.1)
    before = copy.deepcopy(frozen.norm.state_dict())
    step(BATCH)
    after = frozen.norm.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in ("running_mean", "running_var"))
    assert frozen.modes == [(False, True)]
    assert not frozen.dropout.training
    assert mode_dependent(module) == [frozen]


def test_usual_networks_have_nothing_to_switch() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        nn.Flatten(),
        FlattenEncoder(ObsSpec({"": ArraySpec((3,), "float32")})),
        RunningNorm((3,), 10.0),
        nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(4)]),
    )
    assert mode_dependent(module) == []
    assert changing_buffers(module) == {}


def test_what_is_unknown_is_switched() -> None:
    module = nn.Sequential(nn.Dropout(0.0), nn.LSTM(2, 2), noisy(), nn.Linear(2, 2))
    parts = mode_dependent(module)
    assert parts == [module[0], module[1], module[2], module[2].norm, module[2].dropout]
    assert list(changing_buffers(module)) == [
        "2.calls",
        "2.norm.running_mean",
        "2.norm.running_var",
        "2.norm.num_batches_tracked",
    ]


class Declared(nn.Module):
    frozen_between_updates = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


def test_declared_buffers_do_not_change() -> None:
    assert mode_dependent(Declared())
    assert changing_buffers(Declared()) == {}


# -- targets ---------------------------------------------------------------------------------------


def test_a_target_gets_the_statistics_of_a_normaliser() -> None:
    module = nn.Sequential(RunningNorm((3,), 10.0), nn.Linear(3, 2))
    target = Target(module)
    step = GradientStep(module, squared_loss(module), learning_rate=0.1)
    module[0].update(BATCH["x"])  # type: ignore[operator]
    assert not torch.equal(target.module(BATCH["x"]), module(BATCH["x"]))
    target.follow(step.flat, 1.0)
    assert torch.equal(target.module(BATCH["x"]), module(BATCH["x"]))
    for key, saved in module.state_dict().items():
        assert torch.equal(target.module.state_dict()[key], saved), key


# -- random numbers under CUDA graphs --------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), True),
        (nn.LSTM(2, 2), False),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.RReLU(), True),
    ],
    ids=str,
)
def test_modules_that_draw_are_refused_under_cudagraph(module: nn.Module, refused: bool) -> None:
    network = nn.Sequential(nn.Linear(2, 2), module)

    def build() -> None:
        GradientStep(network, squared_loss(network), learning_rate=0.1, acceleration="cudagraph")

    if refused:
        with pytest.raises(ConfigError, match=r"eager or compile: 1 \(.*draws random numbers"):
            build()
    else:
        build()


@NEEDS_CUDA
def test_draws_of_a_function_are_refused_when_a_graph_warms_up() -> None:
    device = torch.device("cuda")
    run: Any = graphed(lambda x: functional.dropout(x, 0.5), "cudagraph", device)
    run(torch.ones(3, device=device))  # the first call may compile: what it draws is not counted
    with pytest.raises(ConfigError, match="a network draws random numbers"):
        run(torch.ones(3, device=device))


def test_a_replaced_submodule_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    step = GradientStep(module, lambda batch: {"loss": module(batch["x"]).sum()}, learning_rate=0.1)
    step({"x": torch.ones(3, 2)})
    module[0] = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="replaced"):
        step({"x": torch.ones(3, 2)})
