"""Uploads to Hugging Face and downloads from it, against a local server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import COMMIT, Hub, running_hub
from rl_training import PPO, cli
from rl_training.errors import ConfigError, UserError
from rl_training.shared_folder import FILES, MAX_WEIGHTS, WEIGHTS
from rl_training.sharing import hub as our_hub

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = PPO("CartPole-v1", hidden_sizes=[4])
    return model.share(tmp_path_factory.mktemp("shared") / "policy", num_episodes=1)


def served(hub: Hub, folder: Path) -> None:
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_policy_is_uploaded_and_downloaded(
    hub: Hub, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["share", str(shared), "--out", "out", "--num-episodes", "1"]
    assert cli.main([*words, "--push", "user/policy", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["address"] == f"{hub.address}/user/policy"
    assert {name: (Path("out") / name).read_bytes() for name in FILES} == hub.files
    assert "Bearer hf_of_the_test" in hub.tokens
    assert cli.main(["fetch", "user/policy", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {"folder": "policy", "commit": COMMIT}
    assert {p.name: p.read_bytes() for p in Path("policy").iterdir()} == hub.files
    assert cli.main(["eval", "policy", "--num-episodes", "1"]) == 0


def test_nothing_is_uploaded_without_push(hub: Hub, shared: Path) -> None:
    assert cli.main(["share", str(shared), "--out", "out", "--num-episodes", "0"]) == 0
    assert not hub.requests


def test_other_files_of_a_repository_are_not_downloaded(hub: Hub, shared: Path) -> None:
    served(hub, shared)
    hub.files |= {"evil.py": b"print()", "sub/model.safetensors": b"x", "pytorch_model.bin": b"x"}
    our_hub.fetch("user/policy", Path("out"))
    assert {path.name for path in Path("out").rglob("*")} == set(FILES)
    asked = {line.rpartition("/")[2] for line in hub.requests if "/resolve/" in line}
    assert asked == set(FILES)


def test_what_cannot_be_used_leaves_no_folder(hub: Hub, shared: Path) -> None:
    for change, reason in (
        (lambda: hub.files.pop("config.yaml"), "holds no policy of rl_training: it lacks config"),
        (lambda: hub.sizes.update({WEIGHTS: MAX_WEIGHTS + 1}), "more than the 4,294,967,296"),
        (lambda: hub.sizes.update({"env.json": 2 << 20}), "env.json has 2,097,152 bytes"),
        (
            lambda: hub.files.update({WEIGHTS: hub.files[WEIGHTS][:-4] + b"xxxx"}),
            "altered or damaged",
        ),
    ):
        served(hub, shared)
        hub.sizes.clear()
        change()
        with pytest.raises(UserError, match=reason):
            our_hub.fetch("user/policy", Path("out"))
        assert not list(Path.cwd().iterdir())


def test_errors_of_the_network_are_one_line(
    hub: Hub, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"user/missing was not downloaded: .*404"):
        our_hub.fetch("user/missing", Path("out"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["fetch", "user/policy"]) == 2
    words = ["share", str(shared), "--out", "out", "--num-episodes", "0", "--push", "user/policy"]
    assert cli.main(words) == 2
    message = capsys.readouterr().err.strip().splitlines()
    assert message[0].startswith("error: user/policy was not downloaded: ")
    assert "'hf upload user/policy out' uploads it later" in message[-1]
    assert (Path("out") / WEIGHTS).is_file()


def test_a_missing_token_is_found_before_anything_is_written(
    hub: Hub, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"no token .*hf auth login"):
        our_hub.require_token()
    assert cli.main(["share", str(shared), "--out", "out", "--push", "user/policy"]) == 2
    assert not Path("out").exists()
    assert not hub.requests


@pytest.mark.parametrize("name", ["policy", "/policy", "user/", "a/b/c", ""])
def test_a_repository_is_user_and_name(name: str) -> None:
    with pytest.raises(ConfigError, match="write USER/REPO"):
        our_hub.check_repository(name)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, shared: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[share\]'"):
        our_hub.require_hub()
    out = str(tmp_path / "out")
    assert cli.main(["fetch", "user/policy", "--out", out]) == 2
    assert cli.main(["share", str(shared), "--out", out, "--num-episodes", "0"]) == 0
