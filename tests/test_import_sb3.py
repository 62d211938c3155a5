"""Models of Stable-Baselines3 act and value here as they do there; others are refused."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import runpy
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import sb3_envs  # noqa: F401 - registers them
from rl_training import PPO, cli, load_policy
from rl_training.api.made import managed_class
from rl_training.errors import UserError
from rl_training.runtime.policy import TrainedPolicy
from rl_training.tools.importing.plain_zip import read_arrays
from rl_training.tools.importing.sb3_checks import TOLERANCE
from rl_training.tools.importing.sb3_file import read_model
from rl_training.types import Array

sb3 = pytest.importorskip("stable_baselines3")
ROOT = Path(__file__).resolve().parent.parent
PICTURES, PICTURES_BOX = "sb3_envs:Sb3Pictures-v0", "sb3_envs:Sb3PicturesBox-v0"
ROWS = 32

Saved = tuple[Any, Path]


def saved(folder: Path, algo: str, policy: str, env_id: str, **options: Any) -> Saved:
    """A model with random weights that act differently in different states, and its file."""
    kwargs = {"net_arch": [24, 16], **options.pop("policy_kwargs", {})}
    if policy == "CnnPolicy":
        kwargs = {"features_extractor_kwargs": {"features_dim": 20}, **kwargs}
    if algo in ("dqn", "sac", "td3"):
        options |= {"buffer_size": 100}
    kind = getattr(sb3, algo.upper())
    model = kind(policy, env_id, device="cpu", seed=1, policy_kwargs=kwargs, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.policy.named_parameters():
            fan_in = value.shape[1:].numel() if value.ndim > 1 else 1
            scale = 0.3 if name == "log_std" or value.ndim == 1 else 1.5 / fan_in**0.5
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
    model.save(folder / "model.zip")
    return model, folder / "model.zip"


def observations(env_id: str, rows: int = ROWS) -> Array:
    """Observations of random actions, as the environment returns them."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    found = []
    for _ in range(rows):
        found.append(obs)
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            obs, _ = env.reset()
    return np.stack(found)


def reference(folder: Path, model: Any, env_id: str, normalize: Any = None) -> Path:
    """What examples/sb3_reference.py writes."""
    obs = observations(env_id)
    seen = obs if normalize is None else normalize(obs)
    actions, _ = model.predict(seen, deterministic=True)
    np.savez(folder / "reference.npz", observations=obs, actions=actions)
    return folder / "reference.npz"


def convert(file: Path, env_id: str, expected: Path, out: Path, *more: str | Path) -> int:
    words = ["import-sb3", file, "--env-id", env_id, "--reference", expected, "--out", out, *more]
    return cli.main([str(word) for word in words])


def values_there(algo: str, model: Any, obs: Array, actions: Array) -> Array:
    """State values, or the values of actions, of the model."""
    seen, _ = model.policy.obs_to_tensor(obs)
    with torch.no_grad():
        if algo in ("ppo", "a2c"):
            return np.asarray(model.policy.predict_values(seen)[:, 0])
        if algo == "dqn":
            return np.asarray(model.policy.q_net(seen))
        critics = model.policy.critic(seen, torch.as_tensor(actions))
        return np.stack([np.asarray(one[:, 0]) for one in critics])


def values_here(algo: str, policy: TrainedPolicy, obs: Array, actions: Array) -> Array:
    """The same of a policy of this package."""
    module: Any = policy.module
    seen = torch.as_tensor(policy.obs_spec.cast(obs))
    with torch.no_grad():
        if algo in ("ppo", "a2c"):
            return np.asarray(module.value(seen))
        if algo == "dqn":
            return np.asarray(module.q_values(seen))
        return np.asarray(module.critics(seen, torch.as_tensor(actions)))


CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("ppo", "MlpPolicy", "CartPole-v1", {}),
    ("ppo", "MlpPolicy", "Pendulum-v1", {"net_arch": {"pi": [8], "vf": [12, 20]}}),
    ("a2c", "MlpPolicy", "CartPole-v1", {"activation_fn": nn.ELU}),
    ("a2c", "MlpPolicy", "FrozenLake-v1", {"net_arch": []}),
    ("dqn", "MlpPolicy", "CartPole-v1", {"activation_fn": nn.Tanh}),
    ("sac", "MlpPolicy", "Pendulum-v1", {"net_arch": {"pi": [8, 6], "qf": [10]}}),
    ("td3", "MlpPolicy", "Pendulum-v1", {"n_critics": 3, "activation_fn": nn.SiLU}),
    ("ppo", "CnnPolicy", PICTURES, {"net_arch": []}),
    ("ppo", "CnnPolicy", PICTURES_BOX, {}),
    ("a2c", "CnnPolicy", PICTURES, {"net_arch": []}),
    ("dqn", "CnnPolicy", PICTURES, {"net_arch": []}),
    ("sac", "CnnPolicy", PICTURES_BOX, {}),
    ("sac", "CnnPolicy", PICTURES_BOX, {"share_features_extractor": True}),
    ("td3", "CnnPolicy", PICTURES_BOX, {}),
]


@pytest.mark.parametrize(("algo", "policy", "env_id", "kwargs"), CASES)
def test_a_model_acts_and_values_as_there(
    algo: str, policy: str, env_id: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    model, file = saved(tmp_path, algo, policy, env_id, policy_kwargs=kwargs, gamma=0.9)
    out = tmp_path / "out"
    assert convert(file, env_id, reference(tmp_path, model, env_id), out) == 0
    obs = observations(env_id)
    loaded = managed_class(algo).load(out, trust=["sb3_envs"])
    assert loaded.config.algo_kwargs.gamma == 0.9
    expected, _ = model.predict(obs, deterministic=True)
    assert len(np.unique(expected, axis=0)) > 1
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(loaded.act(obs), expected, rtol=0, atol=1e-4)
    else:
        np.testing.assert_array_equal(loaded.act(obs), expected)
    size = loaded.env_info.action_spec.size
    actions = np.random.default_rng(0).uniform(-1, 1, (ROWS, size)).astype(np.float32)
    found = values_here(algo, loaded.policy, obs, actions)
    expected_values = values_there(algo, model, obs, actions)
    assert expected_values.std() > 0.01
    np.testing.assert_allclose(found, expected_values, rtol=1e-4, atol=1e-4)


def test_a_gaussian_samples_in_the_units_of_the_environment(tmp_path: Path) -> None:
    """There its deviation is in those units, here in units of half the range."""
    model, file = saved(tmp_path, "ppo", "CnnPolicy", PICTURES_BOX)
    assert (
        convert(file, PICTURES_BOX, reference(tmp_path, model, PICTURES_BOX), tmp_path / "o") == 0
    )
    head: Any = load_policy(tmp_path / "o", trust=["sb3_envs"]).module.head
    there = model.policy.log_std.exp().detach().numpy()
    np.testing.assert_allclose(head.log_std.exp().detach() * torch.tensor([4, 0.5]), there, 1e-5)


def test_the_deviation_of_sac_is_imported(tmp_path: Path) -> None:
    model, file = saved(tmp_path, "sac", "MlpPolicy", "Pendulum-v1")
    expected = reference(tmp_path, model, "Pendulum-v1")
    assert convert(file, "Pendulum-v1", expected, tmp_path / "o") == 0
    obs = torch.as_tensor(observations("Pendulum-v1"))
    with torch.no_grad():
        mean, log_std, _ = model.policy.actor.get_action_dist_params(obs)
        actor: Any = load_policy(tmp_path / "o").module
        params, _ = actor.actor.policy(obs)
    torch.testing.assert_close(params, torch.cat([mean, log_std], 1))


def test_a_model_of_ddpg_becomes_one_of_td3_with_one_critic(tmp_path: Path) -> None:
    model = sb3.DDPG("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [8]}, buffer_size=9)
    model.save(tmp_path / "model.zip")
    expected = reference(tmp_path, model, "Pendulum-v1")
    assert convert(tmp_path / "model.zip", "Pendulum-v1", expected, tmp_path / "o") == 0
    config = load_policy(tmp_path / "o").config
    assert (config.algo, config.algo_kwargs.num_critics) == ("td3", 1)


def test_an_imported_policy_is_evaluated_and_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = saved(tmp_path, "ppo", "MlpPolicy", "CartPole-v1")
    out = tmp_path / "out"
    assert (
        convert(file, "CartPole-v1", reference(tmp_path, model, "CartPole-v1"), out, "--json") == 0
    )
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {
        "folder": str(out),
        "algo": "ppo",
        "rows": ROWS,
        "different_actions": 2,
        "largest": 0.0,
    }
    assert cli.main(["eval", str(out), "--num-episodes", "2"]) == 0
    card = (out / "README.md").read_text()
    assert "Converted from a model of Stable-Baselines3, model.zip" in card
    more = PPO("CartPole-v1", init_from=out, hidden_sizes=[24, 16], progress=False, num_envs=2)
    result = more.learn(256, run_dir=None)
    assert result.metrics["global_step"] == 256
    fresh = load_policy(out).module.state_dict()["actor.layers.0.weight"]
    there = model.policy.mlp_extractor.policy_net[0].weight
    torch.testing.assert_close(fresh, there.detach(), rtol=0, atol=0)


# -- the script and VecNormalize -------------------------------------------------------------------


def test_the_script_writes_references_and_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an epsilon and a clipping that are not the usual ones."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    model, file = saved(tmp_path, "td3", "MlpPolicy", "Pendulum-v1")
    env = VecNormalize(make_vec_env("Pendulum-v1"), clip_obs=0.8, epsilon=0.05)
    env.reset()
    for _ in range(50):
        env.step(np.array([env.action_space.sample()]))
    env.save(str(tmp_path / "vec.pkl"))
    script = ROOT / "examples" / "sb3_reference.py"
    monkeypatch.setattr(sys, "argv", [
        script.name, "model.zip", "--algo", "td3", "--env-id", "Pendulum-v1", "--out", "ref.npz",
        "--vecnormalize", "vec.pkl", "--statistics", "stats.npz", "--steps", "40",
    ])  # fmt: skip
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    words = (file, "Pendulum-v1", tmp_path / "ref.npz")
    with pytest.raises(UserError, match=r"does not agree.*--vecnormalize"):
        convert_raising(*words, tmp_path / "without")
    assert not (tmp_path / "without").exists()
    assert convert(*words, tmp_path / "o", "--vecnormalize", tmp_path / "stats.npz") == 0
    policy = load_policy(tmp_path / "o")
    assert policy.config.normalize_obs
    assert policy.config.clip_obs == 0.8
    obs = observations("Pendulum-v1")
    expected, _ = model.predict(env.normalize_obs(obs), deterministic=True)
    np.testing.assert_allclose(policy.act(obs), expected, rtol=0, atol=TOLERANCE)
    norm: Any = policy.module.get_submodule("critics.norm.leaf0")
    np.testing.assert_allclose(norm(torch.as_tensor(obs)), env.normalize_obs(obs), 1e-4, 1e-5)


def test_statistics_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, file = saved(tmp_path, "ppo", "MlpPolicy", "CartPole-v1")
    expected = reference(tmp_path, model, "CartPole-v1")
    good: dict[str, Any] = {
        "mean": np.zeros(4),
        "var": np.ones(4),
        "count": 5.0,
        "clip_obs": 10.0,
        "epsilon": 1e-8,
    }
    for change, reason in (
        ({"mean": np.zeros(3)}, r"'mean' has shape \(3,\)"),
        ({"var": -np.ones(4)}, "'var' has numbers below 0"),
        ({"var": np.full(4, np.nan)}, "'var' holds a NaN"),
        ({"count": 0.0}, "'count' must be a number above 0"),
        ({"epsilon": np.ones(2)}, "'epsilon' must be a number above 0"),
    ):
        np.savez(tmp_path / "stats.npz", **{**good, **change})
        with pytest.raises(UserError, match=reason):
            convert_raising(
                file, "CartPole-v1", expected, tmp_path / "o", "--vecnormalize",
                tmp_path / "stats.npz",
            )  # fmt: skip


# -- what is refused -------------------------------------------------------------------------------


def convert_raising(file: Path, env_id: str, expected: Path, out: Path, *more: str | Path) -> None:
    """Convert and raise what the command line prints."""
    from rl_training.tools.importing.sb3 import main

    words = [file, "--env-id", env_id, "--reference", expected, "--out", out, *more]
    main([str(word) for word in words])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {**a, "actions": 1 - a["actions"]}, "32 of 32 actions differ"),
        (lambda a: {**a, "actions": np.roll(a["actions"], 1)}, "actions differ, the first in row"),
        (lambda a: {k: v[:5] for k, v in a.items()}, "at least 10"),
        (lambda a: {**a, "actions": a["actions"][:-1]}, "32 observations and 31 actions"),
        (lambda a: {**a, "observations": a["observations"][:, :3]}, "observations of shape"),
        (lambda a: {"observations": a["observations"]}, "has no array 'actions'"),
    ],
)
def test_a_model_that_does_not_agree_is_not_written(
    change: Callable[[dict[str, Array]], dict[str, Array]], reason: str, tmp_path: Path
) -> None:
    model, file = saved(tmp_path, "ppo", "MlpPolicy", "CartPole-v1")
    path = reference(tmp_path, model, "CartPole-v1")
    with np.load(path) as arrays:
        changed = change(dict(arrays))
    np.savez(path, **changed)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=reason):
        convert_raising(file, "CartPole-v1", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Encoder(nn.Flatten):
    pass


@pytest.mark.parametrize(
    ("algo", "policy", "env_id", "options", "reason"),
    [
        ("ppo", "MlpPolicy", "Pendulum-v1", {"use_sde": True}, "state-dependent exploration"),
        (
            *("ppo", "MlpPolicy", "CartPole-v1"),
            {"policy_kwargs": {"activation_fn": nn.LeakyReLU}},
            "activation .*LeakyReLU",
        ),
        (
            *("ppo", "CnnPolicy", PICTURES),
            {"policy_kwargs": {"share_features_extractor": False}},
            "different encoders",
        ),
        ("dqn", "MlpPolicy", PICTURES, {}, "as vectors"),
    ],
)
def test_models_without_a_counterpart_are_refused(
    algo: str, policy: str, env_id: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model, file = saved(tmp_path, algo, policy, env_id, **options)
    with pytest.raises(UserError, match=reason):
        convert_raising(file, env_id, reference(tmp_path, model, env_id), tmp_path / "out")


def test_the_wrong_environment_is_named(tmp_path: Path) -> None:
    model, file = saved(tmp_path, "ppo", "MlpPolicy", "CartPole-v1")
    expected = reference(tmp_path, model, "CartPole-v1")
    with pytest.raises(UserError, match="does not fit Acrobot-v1: is it the environment"):
        convert_raising(file, "Acrobot-v1", expected, tmp_path / "out")
    with pytest.raises(UserError, match="no NatureCNN"):
        convert_raising(file, PICTURES, expected, tmp_path / "out")
    with pytest.raises(UserError, match=r"no Box actions.*bounded Box: is it the environment"):
        convert_raising(file, "Pendulum-v1", expected, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "reason"), [("QRDQN", r"a policy of 'sb3_contrib\."), ("TRPO", "is of TRPO")]
)
def test_algorithms_of_other_packages_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    options = {"device": "cpu", "policy_kwargs": {"net_arch": [4]}}
    getattr(contrib, kind)("MlpPolicy", "CartPole-v1", **options).save(tmp_path / "model.zip")
    with pytest.raises(UserError, match=reason):
        convert_raising(tmp_path / "model.zip", "CartPole-v1", tmp_path, tmp_path / "out")


# -- files of other people -------------------------------------------------------------------------


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def rewritten(
    file: Path, change: Callable[[dict[str, bytes]], None], compressed: bool = False
) -> Path:
    """A copy of a model with other entries."""
    with zipfile.ZipFile(file) as found:
        entries = {name: found.read(name) for name in found.namelist()}
    change(entries)
    path = file.with_name("changed.zip")
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as written:
        for name, content in entries.items():
            written.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "ppo", "MlpPolicy", "CartPole-v1")[1]


def saved_weights(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_nothing_is_unpickled(model_file: Path, tmp_path: Path) -> None:
    """Neither the values of the settings, nor the other files, nor weights that name code."""
    touched = tmp_path / "touched"
    payload = pickle.dumps(Touch(touched))

    def plant(entries: dict[str, bytes]) -> None:
        data = json.loads(entries["data"])
        for name in ("policy_class", "lr_schedule", "observation_space"):
            data[name][":serialized:"] = base64.b64encode(payload).decode()
        entries["data"] = json.dumps(data).encode()
        entries["pytorch_variables.pth"] = entries["policy.optimizer.pth"] = payload

    found = read_model(rewritten(model_file, plant))
    assert "action_net.weight" in found.weights
    assert ":serialized:" not in str(found.data)
    for content in (payload, saved_weights({"x": Touch(touched)})):
        changed = rewritten(model_file, lambda e, c=content: e.update({"policy.pth": c}))  # type: ignore[misc]
        with pytest.raises(UserError, match=r"policy\.pth"):
            read_model(changed)
    assert not touched.exists()
    pickle.loads(payload)
    assert touched.exists(), "the payload would have worked"


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"w": torch.zeros(1).expand(1 << 40)}, "a view of fewer numbers"),
        ({"w": torch.full((2,), torch.nan)}, "a NaN or an infinity"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "it names 'torch DoubleStorage'"),
        ({"w": [1]}, "is no weight"),
        ({1: torch.zeros(2)}, "is no weight"),
        ([], "holds no weights"),
        ({"w": torch.nn.Parameter(torch.zeros(2))}, "it names 'torch._utils _rebuild_parameter'"),
    ],
)
def test_weights_that_are_none(weights: Any, reason: str, model_file: Path) -> None:
    content = saved_weights(weights)
    changed = rewritten(model_file, lambda e: e.update({"policy.pth": content}))
    with pytest.raises(UserError, match=reason):
        read_model(changed)


def test_compressed_and_oversized_files_are_refused(model_file: Path, tmp_path: Path) -> None:
    bomb = rewritten(model_file, lambda e: e.update({"data": b" " * (64 << 20)}), compressed=True)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="compressed"):
        read_model(bomb)
    large = rewritten(model_file, lambda e: e.update({"data": b" " * (17 << 20)}))
    with pytest.raises(UserError, match="larger than 16 MiB"):
        read_model(large)
    nested = rewritten(model_file, lambda e: e.update({"data": b"[" * 1_000_000}))
    with pytest.raises(UserError, match="not valid JSON"):
        read_model(nested)
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(UserError, match="cannot read"):
        read_model(tmp_path / "pipe.zip")
    with pytest.raises(UserError, match="no file"):
        read_model(tmp_path / "missing.zip")
    (tmp_path / "other.zip").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="is not a model of Stable-Baselines3"):
        read_model(tmp_path / "other.zip")


def test_damaged_files_are_errors_of_the_user(model_file: Path, tmp_path: Path) -> None:
    """Bytes changed anywhere, cut off anywhere: a message, or a file that is still whole."""
    content, drawn = model_file.read_bytes(), random.Random(1)
    path = tmp_path / "damaged.zip"
    refused = 0
    for number in range(300):
        changed = bytearray(content)
        for _ in range(drawn.randint(1, 4)):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        if number % 3 == 0:
            changed = changed[: drawn.randrange(len(changed))]
        path.write_bytes(changed)
        try:
            read_model(path)
        except UserError:
            refused += 1
    assert refused > 100


def test_arrays_are_numbers_of_the_size_that_they_have(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez(path, x=np.array([Touch(tmp_path / "touched")], object))
    with pytest.raises(UserError, match="must be numbers"):
        read_arrays(path, ("x",), 1 << 20)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}"
    magic = b"\x93NUMPY\x01\x00"
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("x.npy", magic + len(header).to_bytes(2, "little") + header + bytes(8))
    with pytest.raises(UserError, match="does not match its size"):
        read_arrays(path, ("x",), 1 << 20)
    np.savez_compressed(path, x=np.zeros(10))
    with pytest.raises(UserError, match="compressed"):
        read_arrays(path, ("x",), 1 << 20)
    assert not (tmp_path / "touched").exists()
