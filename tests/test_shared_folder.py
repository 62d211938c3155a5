"""Shared folders: loaded as they were written, complete or absent, and harmless."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

from conftest import MakeConfig
from rl_training import IPPO, PPO, SAC, cli, evaluate_checkpoint, load_policy, shared_folder
from rl_training.api.made import managed_class
from rl_training.checkpointing import find_checkpoint, load_checkpoint, save_checkpoint
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.experiment.manager import ExperimentManager
from rl_training.registry import ALGORITHMS
from rl_training.runtime.stored import load_model_weights, load_state
from rl_training.safetensors_file import read_header, read_tensors, safetensors_bytes
from rl_training.shared_folder import CARD, CONFIG, FILES, SPACES, WEIGHTS
from rl_training.stored_zip import ArchiveError
from rl_training.tools.dataset.loaded_run import load_run

SRC = Path(__file__).resolve().parents[1] / "src"
ESCAPE = "\x1b]0;owned\x07"


def shared_ppo(folder: Path, **settings: Any) -> Path:
    """A small untrained policy."""
    model = PPO("CartPole-v1", **{"hidden_sizes": [4], **settings})
    return model.share(folder, num_episodes=0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_ppo(tmp_path_factory.mktemp("original") / "policy")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "downloaded"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of SAC, whose temperature is no longer the initial one."""
    model = SAC(
        "Pendulum-v1", hidden_sizes=[8], learning_starts=50, normalize_obs=True, progress=False,
        eval_episodes=1, tensorboard=False, output_dir=tmp_path_factory.mktemp("sac"), seed=4,
    )  # fmt: skip
    return model.learn(200).run_dir


# -- what is loaded equals what was written --------------------------------------------------------


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_policies_of_every_algorithm_are_loaded_as_they_were(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = managed_class(algo)(make_config(algo=algo))
    module = model.policy.module
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    assert model._state is not None
    model._state["algorithm"] = model.policy.algorithm.state_dict()
    loaded = managed_class(algo).load(model.share(tmp_path / "policy", num_episodes=0))
    found, expected = loaded.policy.module.state_dict(), module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    targets = [name for name in loaded.policy.algorithm.state_dict() if name.startswith("target")]
    if algo == "sac":
        there = loaded.policy.algorithm.state_dict()["target"]
        assert targets == ["target"]
        assert torch.equal(there["net.weights.0"], expected["critics.net.weights.0"])


def test_groups_of_agents_are_shared(tmp_path: Path) -> None:
    pytest.importorskip("mpe2")
    model = IPPO(
        "pettingzoo:mpe2/simple_adversary_v3", policies="separate", hidden_sizes=[4],
        num_envs=2, num_steps=16, progress=False, eval_episodes=1,
    )  # fmt: skip
    model.learn(32, run_dir=None)
    expected = model.evaluate(2).returns
    assert len(model.env_info.action_spec.to_plain()["groups"]) > 1
    loaded = IPPO.load(model.share(tmp_path / "policy", num_episodes=2))
    assert loaded.evaluate(2).returns == expected
    assert "agent" in (tmp_path / "policy" / CARD).read_text()


def test_a_run_is_shared_by_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy"
    words = ["share", str(run), "--out", str(out), "--num-episodes", "2", "--seed", "9", "--json"]
    assert cli.main(words) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    expected = evaluate_checkpoint(run, 2, seed=9)
    assert evaluate_checkpoint(out, 2, seed=9).returns == expected.returns
    assert printed["metrics"] == expected.metrics()
    last = find_checkpoint(run)
    assert printed["checkpoint"] == str(last)
    there, here = load_checkpoint(last)["algorithm"]["model"], load_state(out / WEIGHTS)
    assert not torch.equal(there["temperature.log_ent_coef"], torch.zeros(()))
    for name, value in here["algorithm"]["model"].items():
        assert torch.equal(value, there[name])
    card = (out / CARD).read_text()
    mean = f"{expected.mean_return:.2f} | {expected.std_return:.2f}"
    for part in (
        *(printed["checkpoint_sha256"], mean, "of the run 4, of the evaluation 9", "`200`"),
        hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest(),
    ):
        assert part in card, part


def test_a_shared_folder_is_used_like_a_policy_file(run: Path, tmp_path: Path) -> None:
    out = SAC.load(run).share(tmp_path / "policy", num_episodes=0)
    assert cli.main(["eval", str(out), "--num-episodes", "1"]) == 0
    settings: dict[str, Any] = {"hidden_sizes": [8], "normalize_obs": True, "progress": False}
    model = SAC("Pendulum-v1", init_from=out, learning_starts=1000, **settings)
    model.learn(100, run_dir=tmp_path / "more")
    there = load_policy(out).module.state_dict()
    found = model.policy.module.state_dict()
    assert torch.equal(found["actor.net.layers.0.weight"], there["actor.net.layers.0.weight"])
    assert load_run(out, False).step is None
    again = SAC.load(out)
    again.save(tmp_path / "file")
    assert torch.equal(
        load_policy(tmp_path / "file.pt").module.state_dict()["actor.net.layers.0.weight"],
        there["actor.net.layers.0.weight"],
    )
    with pytest.raises(CheckpointError, match="without its training state"):
        ExperimentManager.resume(out)
    with pytest.raises(CheckpointError, match="holds a policy of algo 'sac', not 'ppo'"):
        PPO.load(out)


def test_the_weights_are_those_of_the_safetensors_library(original: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    found = library.load_file(original / WEIGHTS)
    expected = load_state(original / WEIGHTS)["algorithm"]["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    tensors = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
    }
    written = library.load(safetensors_bytes(tensors))
    assert all(torch.equal(written[name], value) for name, value in tensors.items())


def test_the_card_has_the_metadata_of_hugging_face(run: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    out = SAC.load(run).share(tmp_path / "policy", num_episodes=2, seed=9)
    data = hub.ModelCard.load(out / CARD).data
    (result,) = data.eval_results
    expected = evaluate_checkpoint(out, 2, seed=9)
    assert result.metric_value == f"{expected.mean_return:.2f} +/- {expected.std_return:.2f}"
    assert (result.task_type, result.dataset_name) == ("reinforcement-learning", "Pendulum-v1")
    assert (data.library_name, data.model_name) == ("rl_training", "sac-Pendulum-v1")
    assert "sac" in data.tags


def test_nothing_in_the_folder_names_this_machine(run: Path, tmp_path: Path) -> None:
    model = SAC.load(run)
    changed = model.config.with_overrides(
        init_from=run, torch_threads=1, mlflow=True, trackers=["x"]
    )
    assert model._state is not None
    model._state["config"] = changed.to_dict()
    out = model.share(tmp_path / "policy", num_episodes=0)
    for path in out.iterdir():
        assert str(run.parent).encode() not in path.read_bytes(), path.name
        assert str(Path.home()).encode() not in path.read_bytes().replace(b"~/", b""), path.name
    config = yaml.safe_load((out / CONFIG).read_text())
    assert (config["output_dir"], config["init_from"], config["device"]) == ("runs", None, "auto")
    assert (config["mlflow"], config["trackers"]) == (False, [])


def test_infinite_bounds_are_valid_json(tmp_path: Path) -> None:
    class Unbounded(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def reset(self, **_: Any) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, True, False, {}

    out = PPO(env_fn=Unbounded).share(tmp_path / "policy", num_episodes=2)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    about = json.loads((out / SPACES).read_text(), parse_constant=refuse)
    assert about["action_spec"]["low"] == ["-inf"]
    loaded = PPO.load(out, env_fn=Unbounded)
    assert loaded.env_info.action_spec.low == (-np.inf,)
    assert loaded.evaluate(1).returns == (0.0,)
    words = ["share", str(out), "--out", str(tmp_path / "again")]
    assert cli.main(words) == 2
    assert cli.main([*words, "--num-episodes", "0"]) == 0


# -- complete or absent ----------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["file", "full", "link"])
def test_only_a_free_folder_is_written(taken: str, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if taken == "file":
        out.write_text("x")
    elif taken == "full":
        (out / "sub").mkdir(parents=True)
    else:
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match="choose another"):
        PPO.load(original).share(out, num_episodes=0)
    assert cli.main(["share", str(original), "--out", str(out), "--num-episodes", "0"]) == 2
    assert not list(tmp_path.rglob(WEIGHTS))


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_killed_process_leaves_no_folder(number: int, original: Path, tmp_path: Path) -> None:
    """Killed while it makes its first, third or last file durable."""
    out = tmp_path / "out"
    model = PPO.load(original)
    child = os.fork()
    if child == 0:
        calls = 0

        def fsync(fd: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        model.share(out, num_episodes=0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not out.exists()
    model.share(out, num_episodes=0)
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)


# -- folders of other people -----------------------------------------------------------------------

Change = Callable[[Path], None]


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def weights(change: Callable[[bytes], bytes]) -> Change:
    """Other bytes, with the digest that fits them."""

    def apply(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(change(path.read_bytes()))
        spaces(lambda about: about.update(model_sha256=sha256_of(path)))(folder)

    return apply


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        found = json.loads(content[8 : 8 + length])
        text = change(found)
        encoded = text if isinstance(text, bytes) else json.dumps(found).encode()
        return with_header(encoded, content[8 + length :])

    return weights(apply)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Other weights, in a file that is valid in itself."""

    def apply(folder: Path) -> None:
        found = load_model_weights(folder / WEIGHTS)["algorithm"]["model"]
        change(found)
        weights(lambda _: safetensors_bytes(found))(folder)

    return apply


def config(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Other settings; those that ``env.json`` repeats are changed there as well."""

    def apply(folder: Path) -> None:
        settings = yaml.safe_load((folder / CONFIG).read_text())
        change(settings)
        (folder / CONFIG).write_text(yaml.safe_dump(settings))
        repeated = {name: settings.get(name) for name in shared_folder._OF_ENVIRONMENT}
        spaces(lambda about: about.update(repeated))(folder)

    return apply


def spaces(change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(folder: Path) -> None:
        about = json.loads((folder / SPACES).read_text())
        change(about)
        (folder / SPACES).write_text(json.dumps(about))

    return apply


def text(name: str, content: str) -> Change:
    return lambda folder: void((folder / name).write_text(content))


def void(_: object) -> None:
    return None


def linked(name: str, target: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return apply


def piped(name: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


NAME = "actor.layers.0.weight"
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 18)
)
HOSTILE: dict[str, tuple[Change, str]] = {
    "cut off": (weights(lambda b: b[:-9]), "describes"),
    "longer": (weights(lambda b: b + b"x"), "describes"),
    "empty": (weights(lambda _: b""), "too short"),
    "huge header": (weights(lambda b: struct.pack("<Q", 1 << 60) + b[8:]), "its header would have"),
    "long header": (header(lambda _: b" " * (5 << 20)), "its header would have"),
    "no JSON": (header(lambda _: b"{"), "not valid JSON"),
    "deep JSON": (header(lambda _: b"[" * 100_000), "not valid JSON"),
    "a list": (header(lambda _: b"[]"), "not a mapping"),
    "a name twice": (header(lambda _: b'{"a": 1, "a": 2}'), "not valid JSON"),
    "no entry": (header(lambda h: h.update({NAME: 1})), "does not describe"),
    "other type": (header(lambda h: h[NAME].update(dtype="F8_E4M3")), "of type 'F8_E4M3'"),
    "negative": (header(lambda h: h[NAME].update(shape=[-4, -4])), "no valid shape"),
    "not whole": (header(lambda h: h[NAME].update(shape=[4.0, 4])), "no valid shape"),
    "larger": (header(lambda h: h[NAME].update(shape=[1 << 40, 4])), "do not match"),
    "overlap": (
        header(lambda h: h[NAME].update(data_offsets=h["actor.layers.0.bias"]["data_offsets"])),
        "do not match",
    ),
    "escapes": (
        header(lambda h: h.update({ESCAPE: h.pop(NAME)})),
        "(lacks|unexpected) weight",
    ),
    "missing": (tensors(lambda t: t.pop(NAME)), "lacks weight 'actor.layers.0.weight'"),
    "more": (tensors(lambda t: t.update(more=torch.zeros(3))), "unexpected weight 'more'"),
    "other shape": (
        tensors(lambda t: t.update({NAME: torch.zeros(5, 4)})),
        r"of shape \(5, 4\).* needs .*\(4, 4\)",
    ),
    "other dtype": (
        tensors(lambda t: t.update({NAME: torch.zeros(4, 4, dtype=torch.float64)})),
        "is torch.float64",
    ),
    "not a number": (tensors(lambda t: t[NAME].fill_(torch.nan)), "holds a NaN"),
    "other digest": (spaces(lambda a: a.update(model_sha256="0" * 64)), "altered or damaged"),
    "digest of a type": (spaces(lambda a: a.update(model_sha256=[1])), "altered or damaged"),
    "config bomb": (text(CONFIG, BOMB), "more than 20,000 values"),
    "config code": (text(CONFIG, "!!python/object/apply:os.getcwd []"), "not valid YAML"),
    "config list": (text(CONFIG, "[1]"), "does not hold a mapping"),
    "config long": (text(CONFIG, "#" * (2 << 20)), "larger than 1 MiB"),
    "config format": (config(lambda c: c.update(format=2)), "has format 2"),
    "config unknown": (config(lambda c: c.update(x=1)), "unknown key 'x'"),
    "config algorithm": (config(lambda c: c.update(algo="os.system")), "os.system"),
    "huge network": (
        config(lambda c: c["algo_kwargs"].update(hidden_sizes=[1 << 40, 1 << 40])),
        "(needs|cannot be restored)",
    ),
    "contradiction": (spaces(lambda a: a.update(env_id="Acrobot-v1")), "contradict each other"),
    "spaces deep": (text(SPACES, "[" * 500_000), "not valid JSON"),
    "spaces list": (text(SPACES, "[]"), "does not hold a mapping"),
    "spaces lack": (spaces(lambda a: a.pop("obs_spec")), "lacks obs_spec"),
    "spaces wrong": (spaces(lambda a: a.update(obs_spec={"": [[4], "float99"]})), "not stored as"),
    "spaces huge": (
        spaces(lambda a: a.update(obs_spec={"": [[1 << 50], "float32"]})),
        "(needs|cannot be restored)",
    ),
    "env_fn": (spaces(lambda a: a.update(custom_env="no")), "not true or false"),
    "link to zeros": (linked(WEIGHTS, "/dev/zero"), "contains no checkpoint"),
    "text of zeros": (linked(CONFIG, "/dev/zero"), "not a regular file"),
    "pipe": (piped(WEIGHTS), "contains no checkpoint"),
    "pipe of text": (piped(SPACES), "not a regular file"),
    "no spaces": (lambda folder: (folder / SPACES).unlink(), "has no env.json"),
    "lines": (config(lambda c: c.update(env_id=f"os\n{ESCAPE}:X-v0")), "names code"),
    "environment": (config(lambda c: c.update(env_id="os:CartPole-v1")), "names code"),
    "wrapper": (config(lambda c: c.update(wrappers=["timeit:timeit"])), "names code"),
    "encoder": (config(lambda c: c["algo_kwargs"].update(encoder="os:system")), "names code"),
    "network": (
        config(
            lambda c: c["algo_kwargs"].update(
                network="subprocess:run", hidden_sizes=None, critic_hidden_sizes=None
            )
        ),
        "names code",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = HOSTILE[name]
    change(folder)
    for use in (PPO.load, load_policy, load_run_untrusted):
        with pytest.raises(CheckpointError, match=reason):
            use(folder)
    assert cli.main(["eval", str(folder)]) == 2
    assert cli.main(["share", str(folder), "--out", str(folder.parent / "out")]) == 2
    printed = capsys.readouterr()
    assert "\x1b" not in printed.err + printed.out
    assert len(printed.err.strip().splitlines()) == 2
    assert not (folder.parent / "out").exists()


def load_run_untrusted(path: Path) -> Any:
    return load_run(path, False)


def test_weights_are_read_only_once_their_shapes_are_known_to_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 3 GiB, valid in itself, beside the config of a small network."""

    def read(*_: Any) -> Any:
        raise AssertionError("memory would be taken")

    monkeypatch.setattr(shared_folder, "read_tensors", read)
    size = 3 << 30
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    content = json.dumps({NAME: entry}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(with_header(content, b""))
        file.truncate(8 + len(content) + size)
    for use in (PPO.load, load_policy, lambda path: load_model_weights(path / WEIGHTS)):
        with pytest.raises(CheckpointError, match="lacks weight"):
            use(folder)


def test_values_that_are_neither_true_nor_false(tmp_path: Path) -> None:
    content = safetensors_bytes({"flags": torch.tensor([True])})
    (tmp_path / "flags").write_bytes(content[:-1] + b"\x07")
    with (tmp_path / "flags").open("rb") as file:
        header = read_header(file, len(content))
        with pytest.raises(ArchiveError, match="neither true nor false"):
            read_tensors(file, header)


def test_damaged_folders_are_errors_of_the_user(folder: Path) -> None:
    """Bytes changed anywhere, cut off anywhere: the weights are checked by their digest."""
    drawn, refused = random.Random(2), 0
    contents = {name: (folder / name).read_bytes() for name in FILES}
    for number in range(120):
        name = drawn.choice(FILES[:3])
        changed = bytearray(contents[name])
        for _ in range(drawn.randint(1, 3)):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        if number % 4 == 0:
            changed = changed[: drawn.randrange(len(changed))]
        (folder / name).write_bytes(changed)
        try:
            load_policy(folder)
        except (CheckpointError, ConfigError):
            refused += 1
        else:
            assert name != WEIGHTS or changed == contents[name]
        (folder / name).write_bytes(contents[name])
    assert refused > 60
    load_policy(folder)


# -- trust -----------------------------------------------------------------------------------------

MODULE = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from rl_training.models.encoders import FlattenEncoder

class Encoder(FlattenEncoder):
    pass

gym.register("Named-v0", CartPoleEnv, max_episode_steps=50)
"""


def test_modules_are_imported_for_those_who_wrote_the_folder_or_trust_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shared_module_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = PPO(f"{name}:Named-v0", encoder=f"{name}:Encoder", hidden_sizes=[4])
    out = model.share(tmp_path / "policy", num_episodes=0)
    assert PPO.load(out).evaluate(1).returns  # by who wrote it
    imported = tmp_path / "imported"

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    imported.unlink()
    del sys.modules[name], gym.registry["Named-v0"]
    for use in (PPO.load, load_policy, evaluate_checkpoint):
        with pytest.raises(CheckpointError, match=f"--trust-modules {name}"):
            use(out)
    assert load_model_weights(out / WEIGHTS)["algorithm"]["model"]
    assert not imported.exists()
    assert PPO.load(out, trust=[name]).evaluate(1).returns
    assert imported.exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    PPO.load(out)
    settings = yaml.safe_load((out / CONFIG).read_text())
    (out / CONFIG).write_text(yaml.safe_dump({**settings, "seed": 7}))
    with pytest.raises(CheckpointError, match="names code"):  # changed since
        PPO.load(out)


def test_names_cannot_write_markdown_or_drive_the_terminal(folder: Path, tmp_path: Path) -> None:
    """The id of an environment is shown in the model card."""
    evil = f"A`</x>\n\n# Owned\n---\nlicense mit\n![]({ESCAPE}|"
    config(lambda c: c.update(env_id=evil))(folder)
    out = PPO.load(folder).share(tmp_path / "again", num_episodes=0)
    card = (out / CARD).read_text()
    assert "\x1b" not in card
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert set(yaml.safe_load(front)) == {"library_name", "pipeline_tag", "tags"}
    assert evil in yaml.safe_load(front)["tags"]
    assert "\n# Owned" not in body
    assert "<" not in body.replace("\\<", "").replace("`A'</x>", "")


def test_a_damaged_run_folder_does_not_write_into_the_card(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    evil = {"command": ["/home/x/bin/rl-training", "train\n```\n# Owned"], "created": 5,
            "versions": {"torch": f"`{ESCAPE}"}, "git_commit": "`x` [a](b)"}  # fmt: skip
    (copy / "metadata.json").write_text(json.dumps(evil))
    assert cli.main(["share", str(copy), "--out", str(tmp_path / "o"), "--num-episodes", "0"]) == 0
    card = (tmp_path / "o" / CARD).read_text()
    assert "\n# Owned" not in card
    assert "/home/x" not in card
    assert "\x1b" not in card
    assert "- git_commit: `'x' [a](b)`" in card


def test_a_class_of_the_running_script_is_refused(tmp_path: Path) -> None:
    state = load_state(shared_ppo(tmp_path / "a") / WEIGHTS)
    state["config"]["algo_kwargs"]["encoder"] = "__main__:Mine"
    weights_of = state["algorithm"]["model"]
    about = {name: state[name] for name in ("custom_env", "obs_spec", "action_spec")}
    with pytest.raises(ConfigError, match="running script"):
        shared_folder.write_shared(tmp_path / "b", state["config"], about, weights_of, "")
    assert not (tmp_path / "b").exists()


def test_a_saved_file_without_optimizer_is_loaded(original: Path, tmp_path: Path) -> None:
    state = load_state(original / WEIGHTS)
    save_checkpoint(tmp_path / "policy.pt", state)
    assert load_policy(tmp_path / "policy.pt").act(np.zeros(4, np.float32)) in (0, 1)
