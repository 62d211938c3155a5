"""Every network encodes observations alike: mask split off, vectors normalised, then encoded."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rl_training.models
from rl_training._internal.tree import tree_map
from rl_training.algorithms.drqn import DRQN, DRQNConfig
from rl_training.algorithms.sac import SACConfig, SACModel
from rl_training.errors import ConfigError
from rl_training.models.action_heads import SquashedGaussianHead, TanhGaussianHead, TanhHead
from rl_training.models.central_actor_critic import CentralActorCritic, CentralLSTMActorCritic
from rl_training.models.custom import CustomActorCritic, CustomQNetwork
from rl_training.models.encoders import FlattenEncoder, ImageEncoder
from rl_training.models.iqn_network import CosineEmbedding, IQNNetwork
from rl_training.models.mlp import MLP
from rl_training.models.mlp_actor_critic import FeedForwardActorCritic, MLPActorCritic
from rl_training.models.mlp_continuous import (
    ActorCritics,
    EnsembleLayerNorm,
    EnsembleMLP,
    MLPActor,
    MLPCritics,
    MLPValue,
)
from rl_training.models.mlp_ppg import MLPPPGModel
from rl_training.models.mlp_q_network import FeedForwardQNetwork, MLPQNetwork
from rl_training.models.noisy_mlp import NoisyMLP
from rl_training.models.normalizer import RunningNorm
from rl_training.models.observing import ObservingModule, update_normalizers
from rl_training.models.recurrent import LSTMActorCritic, LSTMPPGModel, LSTMQNetwork
from rl_training.models.recurrent.continuous import (
    RecurrentActor,
    RecurrentCritics,
    RecurrentNetwork,
    Sequences,
)
from rl_training.models.recurrent.gru import GRU
from rl_training.models.recurrent.lstm import LSTM, RecurrentLayer
from rl_training.models.team_q_network import MixedQNetwork, MonotonicMixer, SummedQNetwork
from rl_training.models.user_class import UserClass
from rl_training.models.value_distributions import Atoms, Quantiles
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Rows

VECTOR = ObsSpec({"": ArraySpec((3,), "float32")})
IMAGE = ObsSpec({"": ArraySpec((1, 36, 36), "uint8")})
DICT = ObsSpec({"a": ArraySpec((2,), "float32"), "b.c": ArraySpec((2, 2), "float32")})
MASKED = ObsSpec({**DICT.leaves, "action_mask": ArraySpec((4,), "bool")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(4,), start=(0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
ROWS = 6
SHAPE: dict[str, Any] = {"hidden_sizes": (8, 8), "activation": "tanh"}


class OwnQNetwork(nn.Module):
    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__()
        self.flatten = FlattenEncoder(obs_spec)
        self.layer = nn.Linear(self.flatten.output_size, num_outputs)

    def forward(self, obs: Any) -> Any:
        return self.layer(self.flatten(obs))


class OwnActorCritic(OwnQNetwork):
    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__(obs_spec, num_outputs + 1)

    def forward(self, obs: Any) -> Any:
        outputs = super().forward(obs)
        return outputs[:, :-1], outputs[:, -1:]


def own(cls: type[nn.Module]) -> UserClass:
    return UserClass(cls, {}, "network")


Make = Callable[..., Any]
MODELS: dict[str, Make] = {
    "actor critic": lambda spec, **more: MLPActorCritic(spec, DISCRETE, **SHAPE, **more),
    "box actor critic": lambda spec, **more: MLPActorCritic(spec, BOX, **SHAPE, **more),
    "ppg": lambda spec, **more: MLPPPGModel(spec, DISCRETE, **SHAPE, **more),
    "q network": lambda spec, **more: MLPQNetwork(spec, DISCRETE, **SHAPE, **more),
    "dueling": lambda spec, **more: MLPQNetwork(spec, DISCRETE, dueling=True, **SHAPE, **more),
    "iqn": lambda spec, **more: IQNNetwork(
        spec, DISCRETE, num_policy_quantiles=8, embedding_size=4, **SHAPE, **more
    ),
    "sac actor": lambda spec, **more: MLPActor(spec, SquashedGaussianHead((2,)), **SHAPE, **more),
    "td3 actor": lambda spec, **more: MLPActor(spec, TanhHead((2,), 0.1), **SHAPE, **more),
    "critics": lambda spec, **more: MLPCritics(spec, 2, num_critics=3, **SHAPE, **more),
    "value": lambda spec, **more: MLPValue(spec, **SHAPE, **more),
    "cloning policy": lambda spec, **more: MLPActor(
        spec, TanhGaussianHead((2,), -1.0), **SHAPE, **more
    ),
    "lstm actor critic": lambda spec, **more: LSTMActorCritic(
        spec, DISCRETE, lstm_size=8, **SHAPE, **more
    ),
    "lstm q network": lambda spec, **more: LSTMQNetwork(
        spec, DISCRETE, lstm_size=8, **SHAPE, **more
    ),
    "lstm ppg": lambda spec, **more: LSTMPPGModel(
        spec, DISCRETE, lstm_size=8, value_sizes=(8,), **SHAPE, **more
    ),
    "recurrent actor": lambda spec, **more: RecurrentActor(
        spec, TanhHead((2,), 0.1), memory="gru", lstm_size=8, **SHAPE, **more
    ),
    "recurrent critics": lambda spec, **more: RecurrentCritics(
        spec, 2, num_critics=3, memory="gru", lstm_size=8, **SHAPE, **more
    ),
    "own actor critic": lambda spec, **more: CustomActorCritic(
        spec, DISCRETE, own(OwnActorCritic), **more
    ),
    "own box actor critic": lambda spec, **more: CustomActorCritic(
        spec, BOX, own(OwnActorCritic), **more
    ),
    "own q network": lambda spec, **more: CustomQNetwork(spec, DISCRETE, own(OwnQNetwork), **more),
}
VECTORS_ONLY = {"lstm q network"}
WITHOUT_ENCODER = {"own actor critic", "own box actor critic", "own q network"}
WITHOUT_ACTIONS = {"critics", "value", "recurrent critics"}
WITH_NUMPY = [name for name in MODELS if name not in {*WITHOUT_ACTIONS, *WITHOUT_ENCODER}]
WITH_DICTS = [name for name in MODELS if name not in VECTORS_ONLY]
WITHOUT_MASK = {
    *("box actor critic", "own box actor critic", "sac actor", "td3 actor", "cloning policy"),
    *("critics", "value", "recurrent actor", "recurrent critics"),
}


def made(name: str, spec: ObsSpec = VECTOR, **more: Any) -> Any:
    """A model that is far from uniform, so that what it observes matters."""
    torch.manual_seed(0)
    model = MODELS[name](spec, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def observations(spec: ObsSpec, rows: int = ROWS, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    leaves = {
        key: torch.rand(rows, *leaf.shape, generator=generator) < 0.5
        if leaf.dtype == "bool"
        else torch.randn(rows, *leaf.shape, generator=generator)
        for key, leaf in spec.leaves.items()
    }
    return leaves if spec.is_dict else leaves[""]


@torch.no_grad()
def outputs(model: Any, obs: Any) -> list[Tensor]:
    """All that a model computes of observations."""
    if isinstance(model, MLPCritics):
        actions = torch.linspace(-1, 1, 2 * ROWS).reshape(ROWS, 2)
        many = model.of_samples(obs, torch.stack([actions, -actions]))
        return [model(obs, actions), model(obs, actions, members=1), many]
    if isinstance(model, MLPValue):
        return [model(obs)]
    if isinstance(model, LSTMQNetwork):
        state = torch.full((ROWS, model.state_size), 0.1)
        return [model.q_values_sequence(obs.unsqueeze(0), state), model.act(obs, state)[1]]
    if isinstance(model, RecurrentNetwork):
        seen = Sequences(tree_map(lambda x: x[None], obs), torch.full((ROWS, 8), 0.1), 0)
        if isinstance(model, RecurrentActor):
            return [model.actions(seen)]
        return [model(seen, torch.linspace(-1, 1, 2 * ROWS).reshape(1, ROWS, 2))]
    if isinstance(model, LSTMActorCritic):
        _, after, record = model.act(obs, torch.full((ROWS, model.state_size), 0.1))
        return [after, *record.values()]
    found = [model.policy(obs)[0]]
    if isinstance(model, FeedForwardQNetwork):
        found.append(model.q_values(obs))
    if isinstance(model, FeedForwardActorCritic):
        found.append(model.value(obs))
    if isinstance(model, MLPPPGModel):
        found += model.joint(obs)
    return found


def scaled(obs: Any) -> Any:
    """What an environment in other units would show."""
    if isinstance(obs, dict):
        return {k: leaf if leaf.dtype == torch.bool else scaled(leaf) for k, leaf in obs.items()}
    return obs * 40.0 - 7.0


def standardized(obs: Any, rows: Any, clip: float) -> Any:
    """Observations as a normaliser that saw ``rows`` should show them to the encoder."""
    if isinstance(obs, dict):
        return {
            key: leaf if leaf.dtype == torch.bool else standardized(leaf, rows[key], clip)
            for key, leaf in obs.items()
        }
    mean, deviation = rows.double().mean(0), rows.double().std(0, correction=0)
    return ((obs.double() - mean) / deviation).clamp(-clip, clip).float()


ALL = torch.ones(200, dtype=torch.bool)


def check_normalizes(name: str, spec: ObsSpec) -> None:
    plain, model = made(name, spec), made(name, spec, normalize_obs=True, clip_obs=1.5)
    obs, rows = scaled(observations(spec)), scaled(observations(spec, 200, seed=1))
    for before, expected in zip(outputs(model, obs), outputs(plain, obs), strict=True):
        assert not torch.equal(before, expected)  # clipped, though nothing was learnt yet
    update_normalizers(model, Rows(rows, ALL))
    wanted = outputs(plain, standardized(obs, rows, 1.5))
    for actual, expected in zip(outputs(model, obs), wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    differs = zip(wanted, outputs(plain, obs), strict=True)
    assert not any(torch.allclose(a, b) for a, b in differs)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_normalizes_vectors(name: str) -> None:
    check_normalizes(name, VECTOR)


@pytest.mark.parametrize("name", WITH_DICTS)
def test_every_model_normalizes_the_leaves_of_dicts(name: str) -> None:
    check_normalizes(name, DICT if name in WITHOUT_MASK else MASKED)


@pytest.mark.parametrize("name", [name for name in WITH_DICTS if name not in WITHOUT_ENCODER])
def test_the_mask_is_no_feature(name: str) -> None:
    model, obs = made(name, MASKED), observations(MASKED)
    features, mask = model.encode(obs)
    assert torch.equal(mask, obs["action_mask"])
    assert features.shape == (ROWS, 6)
    assert model.num_features == 6
    obs["action_mask"] = torch.ones_like(mask)
    assert torch.equal(model.encode(obs)[0], features)
    if hasattr(model, "policy") and not isinstance(model, RecurrentNetwork):
        assert model.policy(obs)[1] is obs["action_mask"]


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_not_valid_are_left_out(name: str) -> None:
    some, all_of_them = made(name, normalize_obs=True), made(name, normalize_obs=True)
    rows, valid = observations(VECTOR, 200), torch.arange(200) < 50
    some.update_normalizer(Rows(rows, valid))
    all_of_them.update_normalizer(Rows(rows[:50], ALL[:50]))
    norms = [part for part in some.modules() if isinstance(part, RunningNorm)]
    assert len(norms) == 1
    assert norms[0].frozen_between_updates
    assert float(norms[0].count) == 50
    for key, value in some.state_dict().items():
        assert torch.equal(value, all_of_them.state_dict()[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_without_normalize_obs_there_is_nothing_to_update_or_save(name: str) -> None:
    model = made(name)
    before = copy.deepcopy(model.state_dict())
    model.update_normalizer(Rows(observations(VECTOR), ALL[:ROWS]))
    assert not [key for key in before if "norm" in key]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"ppg", *VECTORS_ONLY}])
def test_images_alone_are_not_normalized(name: str) -> None:
    with pytest.raises(ConfigError, match="'normalize_obs' normalises vectors"):
        made(name, IMAGE, normalize_obs=True)


# Acting in NumPy.


@pytest.mark.parametrize("name", WITH_NUMPY)
@pytest.mark.parametrize("normalize", [False, True])
def test_numpy_acts_as_torch_does(name: str, normalize: bool) -> None:
    model = made(name, normalize_obs=normalize, clip_obs=1.5)
    act = model.numpy_actor()
    obs = scaled(observations(VECTOR)) if normalize else observations(VECTOR)
    noise = model.head.draw_noise((ROWS,), torch.Generator().manual_seed(2))
    for shown in (0, 1):
        if shown:  # the function reads the statistics of the model, also those that come later
            model.update_normalizer(Rows(scaled(observations(VECTOR, 200, seed=1)), ALL))
        for given in (None,) if name == "iqn" else (None, noise):  # its noise: test_distributional
            for a, b in zip(*both(model, act, obs, given), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def both(model: Any, act: Any, obs: Tensor, noise: Tensor | None) -> tuple[list[Any], list[Any]]:
    """Actions (and states) by torch and by NumPy."""
    numpy_noise = None if noise is None else noise.numpy()
    if isinstance(model, LSTMActorCritic | LSTMQNetwork | RecurrentActor):
        state = torch.full((ROWS, model.state_size), 0.1)
        actions, after, _ = model.act(obs, state, noise)
        by_torch = [actions.numpy(), after.numpy()]
        return by_torch, [*act(obs.numpy(), state.numpy(), numpy_noise)]
    params, mask = model.policy(obs)
    if noise is None:
        actions = model.head.mode(params, mask)
    elif isinstance(model, MLPQNetwork) and model.state_value is not None:
        actions = model.head.sample(model.advantage(model.encode(obs)[0]), noise, mask)
    else:
        actions = model.head.sample(params, noise, mask)
    return [actions.numpy()], [act(obs.numpy(), numpy_noise)]


@pytest.mark.parametrize("name", WITH_NUMPY)
def test_numpy_acts_on_plain_vectors_and_known_activations_alone(name: str) -> None:
    assert made(name).numpy_actor() is not None
    assert made(name, ObsSpec({"": ArraySpec((2, 2), "float32")})).numpy_actor() is None
    model = made(name)
    for part in model.modules():
        if isinstance(part, MLP):
            part.activation = "gelu"
    assert model.numpy_actor() is None


# Copies and checkpoints.


def actor_critics(**more: Any) -> ActorCritics:
    return ActorCritics(made("sac actor", **more), made("critics", **more))


@pytest.mark.parametrize("of_sac", [False, True], ids=["td3", "sac"])
def test_all_networks_inside_a_module_are_updated_and_copies_are_their_own(of_sac: bool) -> None:
    networks = actor_critics(normalize_obs=True)
    model: nn.Module = SACModel(networks, SACConfig()) if of_sac else networks
    target = copy.deepcopy(networks.critics)
    rows = scaled(observations(VECTOR, 200))
    if of_sac:
        update_normalizers(model, Rows(rows, ALL))
    else:
        networks.update_normalizer(Rows(rows, ALL))
    counts = [float(part.count) for part in model.modules() if isinstance(part, RunningNorm)]
    assert counts == [200.0, 200.0]
    obs = scaled(observations(VECTOR))
    assert not torch.allclose(outputs(target, obs)[0], outputs(networks.critics, obs)[0])
    update_normalizers(target, Rows(rows, ALL))
    assert torch.equal(outputs(target, obs)[0], outputs(networks.critics, obs)[0])


def with_old_names(state: dict[str, Any]) -> dict[str, Any]:
    old = {key.replace("trunk.layers.", "encoder.layers."): value for key, value in state.items()}
    assert list(old) != list(state)
    return old


def test_old_checkpoints_of_drqn_load_network_and_target() -> None:
    config = DRQNConfig(hidden_sizes=(8, 8), activation="tanh", lstm_size=8)
    saved = DRQN(made("lstm q network"), config)
    with torch.no_grad():
        saved.target.module.values.bias.add_(1)
    state = saved.state_dict()
    for part in ("model", "target"):
        state[part] = with_old_names(state[part])
    names = {part: list(state[part]) for part in ("model", "target")}
    torch.manual_seed(5)
    loaded = DRQN(MODELS["lstm q network"](VECTOR), config)
    loaded.load_state_dict(state)
    assert {part: list(state[part]) for part in ("model", "target")} == names
    obs = observations(VECTOR)
    pairs = ((saved.module, loaded.module), (saved.target.module, loaded.target.module))
    for one, other in pairs:
        same = zip(outputs(one, obs), outputs(other, obs), strict=True)
        assert all(torch.equal(a, b) for a, b in same)
    wrapped = nn.ModuleDict({"q": MODELS["lstm q network"](VECTOR)})
    wrapped.load_state_dict({f"q.{key}": value for key, value in state["model"].items()})
    assert torch.equal(outputs(wrapped["q"], obs)[0], outputs(saved.module, obs)[0])


def test_unknown_names_in_a_checkpoint_are_still_refused() -> None:
    model = made("lstm q network")
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.other"):
        model.load_state_dict({**state, "encoder.other": torch.zeros(1)})
    state.pop("trunk.layers.0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*trunk\.layers\.0\.weight"):
        model.load_state_dict(state)


# Every model there is.

PARTS = {
    *(MLP, EnsembleMLP, EnsembleLayerNorm, RunningNorm),
    *(LSTM, GRU, RecurrentLayer, RecurrentNetwork),
    *(FlattenEncoder, ImageEncoder, ActorCritics),
    *(NoisyMLP, CosineEmbedding, Quantiles, Atoms),
}
"""Modules that are given features, or are encoders, or only hold networks."""


OF_TEAMS = {
    *(CentralActorCritic, CentralLSTMActorCritic),
    *(SummedQNetwork, MixedQNetwork, MonotonicMixer),
}
"""Networks that observe the state of a team: test_teams.py, test_team_memory.py and
test_team_values.py."""


def test_every_network_is_an_observing_module_and_tested_here() -> None:
    parents = pkgutil.walk_packages(rl_training.models.__path__, "rl_training.models.")
    modules = [importlib.import_module(info.name) for info in parents]
    classes = {
        found
        for module in modules
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, nn.Module) and found.__module__ == module.__name__
    }
    heads_and_cnns = ("rl_training.models.action_heads", "rl_training.models.cnn")
    networks = {c for c in classes - PARTS if not c.__module__.startswith(heads_and_cnns)}
    assert [c for c in networks if not issubclass(c, ObservingModule)] == []
    concrete = {c for c in networks - {ObservingModule} if not inspect.isabstract(c)}
    assert concrete == {type(made(name)) for name in MODELS} | OF_TEAMS
