"""Networks of the user's own: encoders, whole networks, separate sizes, and what goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import QUICK_KNOBS, any_env
from rl_training import A2C, DQN, PPO, PQN, TrainConfig
from rl_training.api import managed_class
from rl_training.checkpointing import load_checkpoint, save_checkpoint
from rl_training.cli import main
from rl_training.config import config_from_file, config_from_mapping
from rl_training.errors import CheckpointError, ConfigError
from rl_training.runtime.workflows import load_policy
from rl_training.trust import foreign_names, require_importable
from rl_training.types import ObsSpec

HERE = "test_custom_networks"
SEPARATE = ["sac", "td3", "sac_discrete"]
"""Algorithms whose policy and critics have an encoder each."""
WITH_ENCODER = ["ppo", "a2c", "ppg", "recurrent_ppo", "dqn", "pqn", *SEPARATE]


class Encoder(nn.Module):
    """One layer; it states no output size."""

    def __init__(self, obs_spec: ObsSpec, width: int = 5, names: list[str] | None = None) -> None:
        super().__init__()
        self.names = names
        self.layer = nn.Linear(obs_spec.leaves[""].size, width)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.layer(obs))


class QNetwork(nn.Module):
    def __init__(self, obs_spec: ObsSpec, num_outputs: int, width: int = 8) -> None:
        super().__init__()
        sizes = [leaf.size for leaf in obs_spec.encoded.values()]
        self.layers = nn.Sequential(
            nn.Linear(sum(sizes), width), nn.Tanh(), nn.Linear(width, num_outputs)
        )

    def forward(self, obs: Any) -> Any:
        leaves = obs.values() if isinstance(obs, dict) else [obs]
        flat = torch.cat([leaf.flatten(1).float() for leaf in leaves], 1)
        return self.layers(flat)


class ActorCritic(QNetwork):
    """The last output is the value."""

    def __init__(self, obs_spec: ObsSpec, num_outputs: int, width: int = 8) -> None:
        super().__init__(obs_spec, num_outputs + 1, width)

    def forward(self, obs: Any) -> Any:
        outputs = super().forward(obs)
        return outputs[:, :-1], outputs[:, -1:]


class FirstQNetwork(QNetwork):
    """It would always choose the first action."""

    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__(obs_spec, num_outputs)
        last = cast("nn.Linear", self.layers[-1])
        nn.init.constant_(last.bias[:1], 1000.0)


class FirstActorCritic(FirstQNetwork):
    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__(obs_spec, num_outputs + 1)

    def forward(self, obs: Any) -> Any:
        outputs = super().forward(obs)
        return outputs[:, :-1], outputs[:, -1]


class LazyEncoder(nn.Module):
    """Layers whose input size torch finds out, with statistics that depend on the mode."""

    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__()
        del obs_spec
        self.layer = nn.LazyLinear(6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, obs: Tensor) -> Tensor:
        return cast("Tensor", self.norm(self.layer(obs)))


def settings(algo: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "total_timesteps": 256,
        "num_envs": 2,
        "eval_episodes": 1,
        "progress": False,
        "tensorboard": False,
        "output_dir": folder,
        **QUICK_KNOBS[algo],
        **more,
    }


def trained(algo: str, folder: Path, **more: Any) -> Any:
    """A short run of any algorithm."""
    model = managed_class(algo)(any_env(algo), **settings(algo, folder, **more))
    model.learn()
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return dict(model.policy.module.state_dict())


def action(model: Any) -> Any:
    obs = np.linspace(-1, 1, model.policy.obs_spec.leaves[""].size, dtype=np.float32)
    return model.predict(obs)[0]


# -- encoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", WITH_ENCODER)
def test_every_algorithm_takes_an_encoder_class_with_kwargs(algo: str, tmp_path: Path) -> None:
    model = trained(algo, tmp_path, encoder=Encoder, encoder_kwargs={"width": 7})
    assert model.config.algo_kwargs.encoder == f"{HERE}:Encoder"
    encoders = [value for name, value in weights(model).items() if "encoder.layer.weight" in name]
    assert [len(value) for value in encoders] == [7] * (2 if algo in SEPARATE else 1)
    loaded = managed_class(algo).load(model.run_dir)
    assert np.array_equal(action(loaded), action(model))
    stored = config_from_file(model.run_dir / "config.yaml")
    assert stored.algo_kwargs == model.config.algo_kwargs


def test_a_class_and_its_name_are_the_same_setting() -> None:
    by_class: TrainConfig[Any] = TrainConfig(algo_kwargs={"encoder": Encoder})
    by_name: TrainConfig[Any] = TrainConfig(algo_kwargs={"encoder": f"{HERE}:Encoder"})
    assert by_class == by_name
    assert by_class.to_yaml() == by_name.to_yaml()
    assert config_from_mapping(by_class.to_dict()) == by_class
    changed = by_class.with_overrides(encoder_kwargs={"width": np.int64(3), "names": ("a", "b")})
    assert changed.algo_kwargs.encoder_kwargs == {"width": 3, "names": ["a", "b"]}
    assert TrainConfig(algo="dqn").with_overrides(network=QNetwork).algo_kwargs.network == (
        f"{HERE}:QNetwork"
    )


def test_flags_take_kwargs_as_yaml(tmp_path: Path) -> None:
    flags = [
        *("--env-id", "CartPole-v1", "--total-timesteps", "128", "--num-envs", "2"),
        *("--eval-episodes", "0", "--no-progress", "--no-tensorboard", "--output-dir", tmp_path),
        *("--algo-kwargs.num-steps", "64", "--algo-kwargs.encoder", f"{HERE}:Encoder"),
        *("--algo-kwargs.encoder-kwargs", "{width: 9, names: [a]}"),
        *("--algo-kwargs.critic-hidden-sizes", "32", "16"),
    ]
    assert main(["train", "--algo", "ppo", *map(str, flags)]) == 0
    (run,) = tmp_path.iterdir()
    stored = load_checkpoint(run / "checkpoints" / "last.pt")
    assert stored["config"]["algo_kwargs"]["encoder_kwargs"] == {"width": 9, "names": ["a"]}
    model = stored["algorithm"]["model"]
    assert model["actor.layers.0.weight"].shape == (64, 9)
    assert [len(model[f"critic.layers.{i}.weight"]) for i in range(3)] == [32, 16, 1]


def test_the_size_is_measured_and_nothing_is_changed_by_that(tmp_path: Path) -> None:
    model = PPO("CartPole-v1", **settings("ppo", tmp_path, encoder=LazyEncoder))
    start = weights(model)
    assert start["encoder.layer.weight"].shape == (6, 4)
    assert start["encoder.norm.num_batches_tracked"] == 0
    model.learn()
    assert weights(model)["encoder.norm.num_batches_tracked"] > 0


def test_the_encoder_sees_what_the_run_shows_it(tmp_path: Path) -> None:
    """Bytes become floats where they are normalised, and the batch of the check is alike."""
    env = gym.make("CartPole-v1", disable_env_checker=True)
    board = gym.spaces.Box(0, 255, (4,), np.uint8)
    shown = gym.wrappers.TransformObservation(env, lambda obs: np.zeros(4, np.uint8), board)
    more = settings("ppo", tmp_path, encoder=Encoder, eval_episodes=0, num_envs=1)
    PPO(shown, **more, normalize_obs=True).learn()
    with pytest.raises(ConfigError, match=r"observations: a uint8 tensor of shape \(3, 4\)"):
        PPO(shown, **more).learn()


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "a2c", "recurrent_ppo", "sac", "td3"])
def test_actor_and_critic_may_have_sizes_of_their_own(algo: str, tmp_path: Path) -> None:
    model = trained(algo, tmp_path, hidden_sizes=[12], critic_hidden_sizes=[20, 10])
    state = weights(model)
    if algo in ("sac", "td3"):
        actor = [len(state[f"actor.net.layers.{i}.bias"]) for i in range(2)]
        critic = [state[f"critics.net.biases.{i}"].shape[-1] for i in range(3)]
    else:
        actor = [len(state[f"actor.layers.{i}.bias"]) for i in range(2)]
        critic = [len(state[f"critic.layers.{i}.bias"]) for i in range(3)]
    assert actor[0] == 12
    assert critic == [20, 10, 1]
    loaded = managed_class(algo).load(model.run_dir)
    assert np.array_equal(action(loaded), action(model))


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_unset_or_equal_critic_sizes_change_nothing(algo: str, tmp_path: Path) -> None:
    sizes = [12, 12]
    unset = trained(algo, tmp_path, hidden_sizes=sizes)
    equal = trained(algo, tmp_path, hidden_sizes=sizes, critic_hidden_sizes=sizes)
    assert list(weights(unset)) == list(weights(equal))
    for name, value in weights(unset).items():
        assert torch.equal(value, weights(equal)[name]), name


def test_a_linear_critic_is_possible(tmp_path: Path) -> None:
    state = weights(PPO("CartPole-v1", **settings("ppo", tmp_path, critic_hidden_sizes=[])))
    assert [name for name in state if name.startswith("critic")] == [
        "critic.layers.0.weight",
        "critic.layers.0.bias",
    ]


# -- whole networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("managed", [PPO, A2C, DQN, PQN])
def test_a_network_of_the_users_own_is_trained_saved_and_resumed(
    managed: type[Any], tmp_path: Path
) -> None:
    network = QNetwork if managed in (DQN, PQN) else ActorCritic
    chosen = settings(managed.algo, tmp_path, network=network, network_kwargs={"width": 6})
    # Nothing that depends on the total, so that two halves equal the whole.
    if managed in (DQN, PQN):
        chosen |= {"exploration_initial_eps": 0.2, "exploration_final_eps": 0.2}
    if managed is not DQN:
        chosen |= {"lr_schedule": "constant", "normalize_obs": True}
    whole = managed("CartPole-v1", **chosen)
    start = {name: value.clone() for name, value in weights(whole).items()}
    assert start["network.layers.0.weight"].shape == (6, 4)
    whole.learn(256)
    learnt = weights(whole)["network.layers.0.weight"]
    assert not torch.equal(learnt, start["network.layers.0.weight"])
    halves = managed("CartPole-v1", **chosen)
    halves.learn(128)
    again = managed.load(halves.run_dir)
    again.learn(128)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name


class MaskedEnv(gym.Env[Any, Any]):
    """The first action is never legal."""

    observation_space = gym.spaces.Dict(
        {
            "x": gym.spaces.Box(-1, 1, (2,), np.float32),
            "action_mask": gym.spaces.Box(0, 1, (3,), np.int8),
        }
    )
    action_space = gym.spaces.Discrete(3)

    def _observe(self) -> Any:
        x = self.np_random.normal(size=2).clip(-1, 1).astype(np.float32)
        return {"x": x, "action_mask": np.array([0, 1, 1], np.int8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action != 0
        self.t += 1
        return self._observe(), 1.0, self.t == 9, False, {}


@pytest.mark.parametrize("managed", [PPO, DQN])
def test_action_masks_are_applied_to_its_outputs(managed: type[Any], tmp_path: Path) -> None:
    network = FirstQNetwork if managed is DQN else FirstActorCritic
    model = managed(env_fn=MaskedEnv, **settings(managed.algo, tmp_path, network=network))
    assert model.learn().metrics["eval/return_mean"] == 9.0


def test_it_may_act_in_a_box(tmp_path: Path) -> None:
    model = trained("ppo", tmp_path, env_id="Pendulum-v1", network=ActorCritic)
    state = weights(model)
    assert state["head.log_std"].shape == (1,)
    assert state["network.layers.2.weight"].shape == (2, 8)


class ImageEnv(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.integers(0, 256, (12, 12, 3), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        obs = self.np_random.integers(0, 256, (12, 12, 3), np.uint8)
        return obs, 1.0, self.t == 9, False, {}


class ConvActorCritic(nn.Module):
    """Small images, which NatureCNN does not take."""

    def __init__(self, obs_spec: ObsSpec, num_outputs: int) -> None:
        super().__init__()
        channels = obs_spec.leaves[""].shape[0]
        self.layers = nn.Sequential(nn.Conv2d(channels, 16, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.policy, self.value = nn.LazyLinear(num_outputs), nn.LazyLinear(1)

    def forward(self, obs: Tensor) -> Any:
        features = self.layers(obs.float() / 255)
        return self.policy(features), self.value(features).squeeze(-1)


def test_it_may_see_images(tmp_path: Path) -> None:
    chosen = settings("ppo", tmp_path, network=ConvActorCritic, device="cpu")
    model = PPO(env_fn=ImageEnv, **chosen)
    result = model.learn()
    assert result.metrics["eval/return_mean"] == 9.0
    loaded = PPO.load(result.run_dir)
    image = np.full((12, 12, 3), 7, np.uint8)
    assert loaded.act(image) == model.act(image)


@pytest.mark.parametrize(
    ("algo", "chosen", "message"),
    [
        ("ppo", {"network": ActorCritic, "hidden_sizes": [8]}, "'algo_kwargs.hidden_sizes' has no"),
        ("ppo", {"network": ActorCritic, "encoder": Encoder}, "'algo_kwargs.encoder' has no"),
        ("ppo", {"network": ActorCritic, "critic_hidden_sizes": []}, "critic_hidden_sizes' has no"),
        ("a2c", {"network": ActorCritic, "activation": "relu"}, "default, 'tanh'"),
        ("dqn", {"network": QNetwork, "dueling": True}, "'algo_kwargs.dueling' has no effect"),
        ("pqn", {"network": QNetwork, "layer_norm": False}, "'algo_kwargs.layer_norm' has no"),
        ("dqn", {"critic_hidden_sizes": [8]}, "unknown setting 'critic_hidden_sizes'"),
        ("ppo", {"network_kwargs": {"width": 8}}, "network_kwargs' must be empty"),
        ("sac", {"encoder_kwargs": {"width": 8}}, "encoder_kwargs' must be empty"),
        ("ppg", {"network": ActorCritic}, "network' must be unset: ppg takes an 'encoder'"),
        ("ppg", {"critic_hidden_sizes": [8]}, "unset: ppg has value_sizes"),
        ("recurrent_ppo", {"network": ActorCritic}, "unset: recurrent_ppo takes an 'encoder'"),
        ("td3", {"critic_hidden_sizes": [8, 0]}, "widths of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    algo: str, chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(algo=algo).with_overrides(**chosen)


# -- mistakes ----------------------------------------------------------------------------------


class NoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()


class Broken(Encoder):
    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__(obs_spec)
        self.size = self.no_such_attribute


class WrongInput(Encoder):
    def __init__(self, obs_spec: ObsSpec) -> None:
        super().__init__(obs_spec)
        self.layer = nn.Linear(99, 5)


class Returns(nn.Module):
    """Returns what the test wants."""

    def __init__(self, obs_spec: ObsSpec, num_outputs: int = 0, what: str = "") -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what

    def forward(self, obs: Tensor) -> Any:
        rows = len(obs)
        return {
            "none": None,
            "3d": torch.zeros(rows, 2, 8),
            "row": torch.zeros(rows),
            "integers": torch.zeros(rows, 8, dtype=torch.int64),
            "one row": torch.zeros(1, 8),
            "empty": torch.zeros(rows, 0),
            "pair": (torch.zeros(rows, 2), torch.zeros(rows)),
            "wide pair": (torch.zeros(rows, 3), torch.zeros(rows)),
            "wide values": (torch.zeros(rows, 2), torch.zeros(rows, 2)),
            "logits": torch.zeros(rows, 2),
            "three": (torch.zeros(rows, 2), torch.zeros(rows), torch.zeros(rows)),
        }[self.what]


def not_a_class(obs_spec: ObsSpec) -> nn.Module:
    return Encoder(obs_spec)


@pytest.mark.parametrize(
    ("encoder", "kwargs", "message"),
    [
        (dict, {}, "must name a subclass of torch.nn.Module; builtins:dict is"),
        (f"{HERE}:not_a_class", {}, "is a function"),
        ("Encoder", {}, "must be of the form 'module:Class'; got 'Encoder'"),
        (NoArguments, {}, "NoArguments(obs_spec) raised TypeError: "),
        (NoArguments, {}, "its signature is NoArguments()"),
        (Encoder, {"size": 3}, "Encoder(obs_spec, size=3) raised TypeError: "),
        (Encoder, {"size": 3}, "by position and with 'algo_kwargs.encoder_kwargs' by name"),
        (Broken, {}, "AttributeError: 'Broken' object has no attribute 'no_such_attribute' ("),
        (Broken, {}, f"{HERE}.py, line "),
        (WrongInput, {}, "WrongInput.forward raised RuntimeError: mat1 and mat2 shapes cannot"),
        (WrongInput, {}, "batch of 3 observations: a float32 tensor of shape (3, 4)"),
        (Returns, {"what": "none"}, "it returned an object of type NoneType"),
        (Returns, {"what": "3d"}, "must return features of shape (batch, number of features)"),
        (Returns, {"what": "3d"}, "shape (3, 4)) it returned a float32 tensor of shape (3, 2, 8)"),
        (Returns, {"what": "row"}, "float32 tensor of shape (3,)"),
        (Returns, {"what": "integers"}, "int64 tensor of shape (3, 8)"),
        (Returns, {"what": "one row"}, "float32 tensor of shape (1, 8)"),
        (Returns, {"what": "empty"}, "float32 tensor of shape (3, 0)"),
        (Returns, {"what": "pair"}, "a tuple of a float32 tensor of shape (3, 2), a float32"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_encoder_is_explained_before_anything_is_written(
    encoder: Any, kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    chosen = settings("ppo", runs, encoder=encoder, encoder_kwargs=kwargs)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        PPO("CartPole-v1", **chosen).learn()
    assert str(raised.value).startswith("'algo_kwargs.encoder'")
    assert "\n" not in str(raised.value)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("managed", "what", "message"),
    [
        (PPO, "logits", "a tuple of action parameters (batch, 2) and values (batch,), floats;"),
        (PPO, "logits", "shape (3, 4)) it returned a float32 tensor of shape (3, 2)"),
        (PPO, "wide pair", "a tuple of a float32 tensor of shape (3, 3), a float32 tensor of "),
        (PPO, "wide values", "a float32 tensor of shape (3, 2), a float32 tensor of shape (3, 2)"),
        (PPO, "three", "a tuple of a float32"),
        (DQN, "pair", "must return values of all actions (batch, 2), floats"),
        (DQN, "3d", "float32 tensor of shape (3, 2, 8)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_network_is_explained(
    managed: type[Any], what: str, message: str, tmp_path: Path
) -> None:
    chosen = settings(managed.algo, tmp_path, network=Returns, network_kwargs={"what": what})
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        managed("CartPole-v1", **chosen).learn()
    assert str(raised.value).startswith("'algo_kwargs.network': Returns.forward must return")


class Outer:
    class Inner(Encoder):
        pass


def test_a_class_that_has_no_name_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Encoder):
        pass

    with pytest.raises(ConfigError, match=r"'algo_kwargs\.encoder'.*Local.*inside a function"):
        PPO("CartPole-v1", encoder=Local)
    with pytest.raises(ConfigError, match=r"Inner is defined inside another class"):
        PPO("CartPole-v1", encoder=Outer.Inner)
    with pytest.raises(ConfigError, match=r"a class \(not an object.*of type Linear$"):
        PPO("CartPole-v1", encoder=nn.Linear(4, 8))
    before = Encoder
    monkeypatch.setattr(sys.modules[HERE], "Encoder", Local)
    with pytest.raises(ConfigError, match=f"is not the 'Encoder' that module '{HERE}' has now"):
        PPO("CartPole-v1", encoder=before)


# -- classes of the running program ------------------------------------------------------------

SCRIPT = """\
import torch
from torch import nn
from rl_training import PPO
from rl_training.errors import ConfigError

class Mine(nn.Module):
    def __init__(self, obs_spec):
        super().__init__()
        self.layer = nn.LazyLinear(8)

    def forward(self, obs):
        return self.layer(obs)

def make():
    return PPO("CartPole-v1", encoder=Mine, total_timesteps=64, num_envs=1, num_steps=64,
               eval_episodes=0, progress=False, tensorboard=False)

model = make()
model.learn(run_dir=None)
print("acts", model.act([0.0, 0.0, 0.0, 0.0]) in (0, 1))
for write in (make().learn, lambda: model.save("policy.pt")):
    try:
        write()
    except ConfigError as error:
        print("refused", error)
"""


def test_a_class_of_the_running_script_is_refused_when_it_would_be_saved(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "acts True"
    assert len(lines) == 3, done.stdout
    for line in lines[1:]:
        assert line.startswith("refused 'algo_kwargs.encoder' is the class Mine of the running")
        assert "my_networks.py" in line
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_what_require_importable_refuses() -> None:
    for named in (
        {"algo_kwargs": {"network": "__main__:Net"}},
        {"wrappers": [{"path": "__main__:Wrapper", "kwargs": {}}]},
    ):
        with pytest.raises(ConfigError, match="__main__"):
            require_importable(named)
    require_importable({"algo_kwargs": {"network": "my_networks:Net"}, "env_id": "CartPole-v1"})
    require_importable({"env_id": "__main__:Mine-v0"})


# -- trust -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["encoder", "network"])
@pytest.mark.parametrize("form", ["{}:Net", "{}:Net.Inner", "{}:no name", "{}"])
def test_a_checkpoint_of_somebody_else_imports_neither(
    setting: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"their_networks_{os.urandom(4).hex()}"
    (tmp_path / f"{module}.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = PPO("CartPole-v1", **settings("ppo", tmp_path / "runs"))
    path = model.save(tmp_path / "policy.pt")
    state = load_checkpoint(path)
    state["config"]["algo_kwargs"][setting] = form.format(module)
    state["config"]["algo_kwargs"][f"{setting}_kwargs"] = {"other": f"{module}:Net"}
    assert [one.setting for one in foreign_names(state["config"])] == [f"algo_kwargs.{setting}"]
    with monkeypatch.context() as other_user:
        other_user.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        save_checkpoint(path, state)
    uses: list[Callable[[], Any]] = [lambda: PPO.load(path), lambda: load_policy(path)]
    for use in uses:
        with pytest.raises(CheckpointError, match=f"{module}.*algo_kwargs.{setting}.*trust"):
            use()
    assert module not in sys.modules
    assert not (tmp_path / "imported").exists()
    with pytest.raises(ConfigError):  # trusted, it is imported, and is no network
        PPO.load(path, trust=[module])
    assert (tmp_path / "imported").exists() == (form != "{}")
