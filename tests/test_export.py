"""Exported policies choose the actions of `predict`, or are refused."""

from __future__ import annotations

import ast
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from conftest import MakeConfig
from export_cases import CASES, MASKED, Case, Noise, env_of, make_policy
from rl_training import IPPO, MAPPO, PPO, RecurrentPPO
from rl_training.cli import main
from rl_training.errors import CheckpointError, ConfigError, ParityError, UserError
from rl_training.export import export_policy, load_exported, module, observations, parity
from rl_training.export.formats import FILES
from rl_training.export.module import PolicyModule, module_of
from rl_training.export.observations import Observations, observe
from rl_training.export.parity import compare
from rl_training.registry import DICT, IMAGE, VECTOR
from rl_training.runtime.policy import TrainedPolicy
from rl_training.types import ACTION_MASK, Array
from team_envs import Mortals

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "deploy_onnx_any.py"
EVERYWHERE = [
    (Case("recurrent_ppo", "MultiDiscrete", MASKED), "onnx", False),
    (Case("sac", "bounded Box", VECTOR), "onnx", True),
    (Case("impala", "MultiBinary", IMAGE), "onnx", True),
    (Case("dqn", "Discrete", MASKED), "torch", True),
    (Case("drqn", "Discrete", VECTOR), "torch", True),
    (Case("ppo", "hybrid", MASKED), "onnx", True),
    (Case("ppo", "hybrid", VECTOR), "safetensors", False),
    (Case("mappo", "MultiDiscrete", VECTOR), "torch", True),
    (Case("recurrent_ppo", "bounded Box", DICT), "safetensors", False),
    (Case("bc", "Discrete", VECTOR), "safetensors", False),
]
"""Files of every format, of every head and kind of observation; all others in the full tests."""


@pytest.fixture(autouse=True)
def _few_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "STEPS", 24)


def is_deterministic(case: Case) -> bool:
    """Whether a policy does not sample."""
    own = {"cql": "Discrete", "bc": "bounded Box"}
    return case.algo in ("td3_bc", "rebrac") or own.get(case.algo) == case.action


def eager(made: PolicyModule) -> parity.Run:
    """Run the module itself, without a file."""

    @torch.no_grad()
    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        outputs = made(*(torch.from_numpy(inputs[port.name]) for port in made.signature.inputs))
        pairs = zip(made.signature.outputs, outputs, strict=True)
        return {port.name: output.numpy() for port, output in pairs}

    return run


def seen_by(policy: TrainedPolicy, case: Case) -> Observations:
    network = module_of(policy, stochastic=False).model
    return observe(policy, network, env_of(case), without=None, required=True)


def _marked(case: Case) -> Any:
    """Those of most cases are networks and actors of PPO or DQN: they are in the full tests."""
    others = ("a2c", "impala", "appo", "ippo", "mappo", "idqn", "vdn", "qmix", "pqn")
    same = case.algo in others and case.observation != VECTOR
    return pytest.param(case, marks=[pytest.mark.full] if same else [])


@pytest.mark.parametrize("case", [_marked(case) for case in CASES], ids=str)
def test_every_combination_of_the_registry_is_all_of_predict(case: Case) -> None:
    policy = make_policy(case)
    seen = seen_by(policy, case)
    assert seen.starts.sum() >= 3
    for stochastic in (False, True):
        if stochastic and is_deterministic(case):
            with pytest.raises(ConfigError, match="does not sample"):
                module_of(policy, stochastic=True)
            continue
        made = module_of(policy, stochastic=stochastic)
        found = compare(policy, made, eager(made), seen)
        assert found.ties <= 1
        assert found.largest_difference < 2e-5  # one unit in the last place of [100, 100.5]


@pytest.mark.parametrize(("case", "name", "stochastic"), EVERYWHERE, ids=str)
def test_files_agree_with_predict(case: Case, name: Any, stochastic: bool, tmp_path: Path) -> None:
    check_file(case, name, stochastic, tmp_path / "made")


@pytest.mark.full
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", ["onnx", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_files_agree_with_predict(
    case: Case, name: Any, stochastic: bool, tmp_path: Path
) -> None:
    if not (stochastic and is_deterministic(case)):
        check_file(case, name, stochastic, tmp_path / "made")


@pytest.mark.parametrize(
    ("algo", "action", "memory", "name"),
    [
        ("sac", "bounded Box", "gru", "torch"),
        pytest.param("td3", "bounded Box", "lstm", "onnx", marks=pytest.mark.full),
        pytest.param("ppg", "Discrete", "gru", "torch", marks=pytest.mark.full),
        pytest.param("a2c", "MultiDiscrete", "gru", "onnx", marks=pytest.mark.full),
        pytest.param("dqn", "Discrete", "gru", "onnx", marks=pytest.mark.full),
    ],
)
def test_files_of_policies_with_memory(
    algo: str, action: str, memory: str, name: Any, tmp_path: Path
) -> None:
    for number, observation in enumerate((VECTOR,) if algo == "sac" else (VECTOR, DICT)):
        folder = tmp_path / str(number) / "made"
        check_file(Case(algo, action, observation), name, True, folder, memory)


def check_file(
    case: Case, name: Any, stochastic: bool, folder: Path, memory: str | None = None
) -> None:
    policy = make_policy(case, memory=memory)
    made = export_policy(
        policy, folder, name, stochastic=stochastic, env_fn=env_of(case), needs_env=True
    )
    assert {path.name for path in folder.iterdir()} == {FILES[name], "policy.json", "parity.json"}
    report = json.loads((folder / "parity.json").read_text())
    assert report["observations"] == 24
    assert report["batch_sizes"] == [1, 7, 64]
    assert report["largest_difference"] == made.parity.largest_difference < 2e-5
    about = json.loads((folder / "policy.json").read_text())
    inputs = {port["name"]: port for port in about["inputs"]}
    drawn = {name for name, port in inputs.items() if "distribution" in port}
    assert bool(drawn) == about["stochastic"] == stochastic
    if case.action == "hybrid":
        outputs = {port["name"]: port for port in about["outputs"]}
        assert outputs["action.more.0"]["path"] == ["more", 0]
        assert outputs["action.force"]["shape"] == ["batch", 2, 1]
        assert not drawn or inputs["noise.force"]["distribution"] == "normal"
    assert ("state" in inputs) == (case.algo in ("recurrent_ppo", "drqn") or memory is not None)
    if case.observation in (DICT, MASKED):
        assert inputs["observation.inner.0"]["path"] == ["inner", 0]
        assert inputs["observation.inner.0"]["dtype"] == "int64"
    assert [path.name for path in folder.parent.iterdir()] == ["made"]
    for path in folder.iterdir():  # no paths of this machine
        assert str(Path(module.__file__).parents[2]).encode() not in path.read_bytes()


# -- wrong exports ---------------------------------------------------------------------------------


def _breaks() -> dict[str, tuple[Case, bool, Callable[[pytest.MonkeyPatch], None]]]:
    read, choose = PolicyModule._read, PolicyModule._chosen
    to_env, arrange = module._ToEnv.forward, module._Leaf.forward

    def without_mask(self: Any, head: Any, params: Any, mask: Any, drawn: Any) -> Any:
        return choose(self, head, params, None, drawn)

    def without_noise(self: Any, head: Any, params: Any, mask: Any, drawn: Any) -> Any:
        return choose(self, head, params, mask, torch.zeros_like(drawn) + 0.5)

    def without_reset(self: Any, inputs: Any) -> Any:
        names = [port.name for port in self.signature.inputs]
        start = names.index("episode_start")
        never = (*inputs[:start], torch.zeros_like(inputs[start]), *inputs[start + 1 :])
        return read(self, never)

    def scaled(self: Any, action: Any) -> Any:
        return to_env(self, action * (1 + 1e-3))

    def without_offset(self: Any, action: Any) -> Any:
        return action.to(self._dtype)

    def other_dtype(self: Any, action: Any) -> Any:
        return to_env(self, action).to(torch.int32)

    def mirrored(self: Any, given: Any) -> Any:
        return arrange(self, given).flip(-1)

    vector, box, masked = VECTOR, "bounded Box", Case("dqn", "Discrete", MASKED)
    small = Case("dqn", "Discrete", VECTOR)

    def patching(owner: Any, name: str, broken: Any) -> Callable[[pytest.MonkeyPatch], None]:
        return lambda patch: patch.setattr(owner, name, broken)

    leaf, bounds = module._Leaf, module._ToEnv
    return {
        "mask of a part": (
            Case("ppo", "hybrid", MASKED),
            False,
            patching(PolicyModule, "_chosen", without_mask),
        ),
        "mask": (masked, False, patching(PolicyModule, "_chosen", without_mask)),
        "noise": (Case("sac", box, vector), True, patching(PolicyModule, "_chosen", without_noise)),
        "reset": (
            Case("drqn", "Discrete", vector),
            False,
            patching(PolicyModule, "_read", without_reset),
        ),
        "bounds": (Case("td3", box, vector), False, patching(bounds, "forward", scaled)),
        "offset": (small, False, patching(bounds, "forward", without_offset)),
        "dtype": (small, False, patching(bounds, "forward", other_dtype)),
        "image": (Case("ppo", box, IMAGE), False, patching(leaf, "forward", mirrored)),
        "order": (Case("ppg", "Discrete", vector), False, patching(leaf, "forward", mirrored)),
    }


BREAKS = _breaks()


@pytest.mark.parametrize("broken", BREAKS)
def test_a_wrong_export_differs_from_predict(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, stochastic, break_it = BREAKS[broken]
    policy = make_policy(case)
    break_it(monkeypatch)
    made = module_of(policy, stochastic=stochastic)
    with pytest.raises(ParityError, match=r"batch size 1, .* predict"):
        compare(policy, made, eager(made), seen_by(policy, case))


def test_of_a_wrong_export_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, break_it = BREAKS["bounds"]
    policy = make_policy(case)
    break_it(monkeypatch)
    with pytest.raises(ParityError, match=r"policy.pt2, batch size 1, .* predict.*Nothing was"):
        export_policy(policy, tmp_path / "made", "torch", env_fn=env_of(case), needs_env=True)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_training.export.writing.compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PPO("CartPole-v1").export(tmp_path / "a" / "b" / "made", "safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.8])
def test_ctrl_c_leaves_nothing(seconds: float, tmp_path: Path) -> None:
    model = PPO("CartPole-v1")
    model.save(tmp_path / "policy.pt")
    command = [sys.executable, "-m", "rl_training.cli", "export", str(tmp_path / "policy.pt")]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "made")], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".made-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 1
    assert printed.decode().splitlines() == ["stopped"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy.pt"]


def test_choices_between_equal_scores_are_ties() -> None:
    case = Case("ppo", "MultiDiscrete", VECTOR)
    policy = make_policy(case)
    last: Any = policy.module
    with torch.no_grad():
        last.actor.layers[-1].weight.zero_()
        last.actor.layers[-1].bias.copy_(torch.tensor([1, 1, 0, 0, 1, 0, 0, 0, 0.0]))
    made = module_of(policy, stochastic=False)
    seen = seen_by(policy, case)

    def choosing(*choice: int) -> parity.Run:
        action = np.array(choice, np.int64)
        return lambda inputs: {"action": np.tile(action, (len(inputs["observation"]), 1))}

    assert compare(policy, made, choosing(1, 0, 0), seen).ties == 0
    assert compare(policy, made, choosing(2, 0, 3), seen).ties == 2 * 3 * 24
    for wrong in ((3, 0, 0), (1, -1, 0), (9, 0, 0), (0, 0, 0)):
        with pytest.raises(ParityError, match="their scores differ"):
            compare(policy, made, choosing(*wrong), seen)


# -- deployment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_example_runs_without_torch(stochastic: bool, tmp_path: Path) -> None:
    model = RecurrentPPO("CartPole-v1", lstm_size=8, normalize_obs=True)
    model.export(tmp_path / "made", stochastic=stochastic)
    script = f"""
import json, runpy, sys
import numpy as np
Policy = runpy.run_path({str(EXAMPLE)!r})["Policy"]
policy = Policy(sys.argv[1], rows=2)
seen = np.random.default_rng(1).normal(size=(9, 2, 4)) * 3
acts = [policy.act({{"observation": obs}}, [i % 4 == 0, i == 0]) for i, obs in enumerate(seen)]
print(json.dumps([act.tolist() for act in acts]))
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
assert not {{"torch", "rl_training", "gymnasium"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "made")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed, of_the_program = done.stdout.splitlines()
    assert of_the_program.startswith("[")
    actions = json.loads(printed)
    if stochastic:
        assert {a for pair in actions for a in pair} == {0, 1}
        return
    state, expected = None, []
    for i, obs in enumerate(np.random.default_rng(1).normal(size=(9, 2, 4)) * 3):
        action, state = model.predict(obs, state, [i % 4 == 0, i == 0])
        expected.append(action.tolist())
    assert actions == expected
    assert len({tuple(pair) for pair in expected}) > 1


def test_the_short_example_needs_two_libraries(tmp_path: Path) -> None:
    text = (EXAMPLES / "deploy_onnx.py").read_text(encoding="utf-8")
    imports = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    assert imports == ["numpy", "onnxruntime"]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 20
    model = RecurrentPPO("Pendulum-v1", lstm_size=8, num_steps=32, normalize_obs=True, seed=3)
    model.learn(256, run_dir=None)
    model.export(tmp_path / "deployed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "deploy_onnx.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    printed = [ast.literal_eval(line)["action"] for line in done.stdout.splitlines()]
    state, expected = None, []
    for step in range(5):
        action, state = model.predict(np.zeros((3, 3), np.float32), state, [step == 0] * 3)
        expected.append(action)
    np.testing.assert_allclose(printed, expected, atol=1e-5)
    assert len(np.unique(printed)) == 5, "the memory changes what is done"


# -- the command and the method --------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "drqn"])
def test_the_command_exports_a_run(
    algo: str, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rl_training.api import managed_class

    model = managed_class(algo)(make_config(algo=algo, total_timesteps=128, normalize_obs=True))
    run = model.learn().run_dir
    out = tmp_path / "a" / "b"
    assert main(["export", str(run), "--out", str(out), "--format", "torch", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "agrees with predict on 24 observations" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["file"] == str(out / "policy.pt2")
    assert result["parity"]["origin"] == "recorded from CartPole-v1"
    about = json.loads((out / "policy.json").read_text())
    assert about["step"] == 128
    own = tmp_path / "own"
    made = model.export(own, "safetensors")
    described = json.loads((own / "policy.json").read_text())
    assert described["checkpoint_digest"] == about["checkpoint_digest"] is not None
    assert described["digest"] == about["digest"]
    assert str(tmp_path) not in (own / "policy.json").read_text()
    loaded = load_exported(made.folder)
    obs = np.random.default_rng(0).normal(size=(30, 4))
    np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])


def test_exporting_does_not_change_what_a_model_does(tmp_path: Path) -> None:
    one, other = PPO("CartPole-v1", seed=5), PPO("CartPole-v1", seed=5)
    obs = np.zeros((50, 4))
    one.predict(obs, deterministic=False), other.predict(obs, deterministic=False)
    one.export(tmp_path / "made", "torch", stochastic=True)
    pair = [model.predict(obs, deterministic=False)[0] for model in (one, other)]
    np.testing.assert_array_equal(*pair)


def test_of_an_environment_that_is_gone_random_observations_are_compared(tmp_path: Path) -> None:
    gym.register("Gone-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    model = PPO("Gone-v0", normalize_obs=True)
    model.predict(np.zeros(4))
    del gym.registry["Gone-v0"]
    with pytest.warns(UserWarning, match="compared on random observations: .*Gone"):
        made = model.export(tmp_path / "made", "safetensors")
    assert made.parity.origin.startswith("random, because")


def test_without_an_environment_observations_are_random(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("recurrent_ppo", "MultiDiscrete", VECTOR)
    model = RecurrentPPO(make_config(algo="recurrent_ppo", total_timesteps=128))
    model = RecurrentPPO(model.config, env_fn=env_of(case))
    model.learn()
    run = str(model.run_dir)
    assert main(["export", run, "--out", str(tmp_path / "a"), "--format", "safetensors"]) == 0
    warned = "warning: the export is compared on random observations: the run was trained with"
    assert warned in capsys.readouterr().err
    report = json.loads((tmp_path / "a" / "parity.json").read_text())
    assert report["origin"].startswith("random, because the run was trained with env_fn")
    loaded = RecurrentPPO.load(run)
    made = loaded.export(tmp_path / "b", "safetensors", env_fn=env_of(case))
    assert made.parity.origin == "recorded from Noise"
    with pytest.raises(ConfigError, match="does not match the policy"):
        loaded.export(tmp_path / "c", "safetensors", env_fn=lambda: Noise(CASES[0]))
    capsys.readouterr()
    flags = ["--out", str(tmp_path / "c"), "--env-id", "CartPole-v1"]
    assert main(["export", run, *flags]) == 2
    assert "does not match the policy" in capsys.readouterr().err


@pytest.mark.parametrize("case", [c for c in CASES if c.algo == "appo"], ids=str)
def test_random_observations_are_in_the_spaces(case: Case) -> None:
    policy = make_policy(case)
    with pytest.warns(UserWarning, match="random observations: nowhere"):
        seen = observe(policy, policy.module, env_of(case), without="nowhere", required=False)
    made = module_of(policy, stochastic=True)
    assert compare(policy, made, eager(made), seen).ties <= 1
    if ACTION_MASK in seen.parts:
        assert not policy.action_spec.without_choice(seen.parts[ACTION_MASK]).any()


class Branching(nn.Module):
    """Cannot be traced: what it does depends on a value."""

    def __init__(self, obs_spec: Any, num_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, num_outputs + 1)

    def forward(self, obs: Any) -> Any:
        outputs = self.layer(obs) if float(obs.sum()) > 0 else self.layer(-obs)
        return outputs[:, :-1], outputs[:, -1]


def test_a_network_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    model = PPO("CartPole-v1", network=Branching)
    with pytest.raises(UserError, match=r"torch\.export cannot trace this network"):
        model.export(tmp_path / "made")
    assert not list(tmp_path.iterdir())
    model.export(tmp_path / "made", "safetensors")  # its weights alone can be
    assert load_exported(tmp_path / "made").act(np.zeros(4)) in (0, 1)


def test_agents_with_a_number_and_a_state_of_the_team_act_on_what_they_see(tmp_path: Path) -> None:
    model = MAPPO(env_fn=Mortals, agent_id=True)
    made = model.export(tmp_path / "made", "torch", stochastic=True)
    assert made.parity.origin == "recorded from Mortals"
    inputs = json.loads((made.folder / "policy.json").read_text())["inputs"]
    names = ["observation.observation", "observation.agent", "noise"]
    assert [port["name"] for port in inputs] == names


def test_groups_of_agents_with_networks_of_their_own_are_refused(tmp_path: Path) -> None:
    model = IPPO(env_fn=Mortals, policies="separate")
    with pytest.raises(ConfigError, match="has the groups a, b, c, each with"):
        model.export(tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_keys_that_give_two_outputs_the_same_name_are_refused(tmp_path: Path) -> None:
    class Twice(Noise):
        def __init__(self) -> None:
            super().__init__(Case("ppo", "hybrid", VECTOR))
            side = spaces.Discrete(2)
            self.action_space = spaces.Dict({"a.b": side, "a": spaces.Dict({"b": side})})

    with pytest.raises(ConfigError, match=r"the same name: action\.a\.b, action\.a\.b"):
        PPO(env_fn=Twice).export(tmp_path / "made", "torch")
    assert not list(tmp_path.iterdir())


# -- what is refused -------------------------------------------------------------------------------


def test_wrong_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PPO("CartPole-v1")
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"folder": used}, "used exists: name another folder"),
        ({"folder": used / "file"}, "file exists"),
        ({"folder": used / "file" / "made"}, "cannot create .*Not a directory"),
        ({"folder": link}, "link exists"),
        ({"format": "onxx"}, "unknown format 'onxx'. Did you mean 'onnx'"),
        ({"format": "safetensors", "stochastic": True}, "deterministic=False"),
        ({"tolerance": 0.0}, "'tolerance' must be above 0"),
        ({"tolerance": float("nan")}, "'tolerance' must be above 0"),
        ({"folder": 3}, "folder"),
        ({"opset_version": 18}, "export has no argument 'opset_version'"),
    ]
    for given, message in wrong:
        with pytest.raises(UserError, match=message):
            model.export(**{"folder": tmp_path / "made", **given})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx, .* pip install '.\[export\]'"):
        model.export(tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"used", "link"}
    assert (used / "file").read_text() == "mine"


def test_the_command_refuses_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "none"), "--out", str(tmp_path / "made")]) == 2
    assert "no checkpoint or run folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none")]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["export", "x", "--out", str(tmp_path), "--format", "pickle"]) == 2
    assert "onnx" in capsys.readouterr().err


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with exported weights."""
    return PPO("CartPole-v1").export(tmp_path / "weights", "safetensors").folder


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "policy.json"
    about = json.loads(path.read_text())
    about = change(about) or about
    path.write_text(about if isinstance(about, str) else json.dumps(about))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not JSON": (lambda about: "{", "is not JSON"),
    "deep": (lambda about: "[" * 200_000, "is not JSON"),
    "a list": (lambda about: "[1]", "does not describe an exported policy"),
    "newer": (lambda about: about.update(layout=2), "does not describe an exported policy"),
    "onnx": (lambda about: about.update(format="onnx"), "exported with format 'onnx'"),
    "lacking": (lambda about: about["rebuilt_from"].pop("config") and None, "lacks config"),
    "other digest": (lambda about: about.update(digest="0"), "altered or damaged"),
    "other config": (
        lambda about: about["rebuilt_from"]["config"].update(seed=2),
        "altered or damaged",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_descriptions_are_refused(name: str, weights: Path) -> None:
    change, message = CHANGES[name]
    changed(weights, change)
    with pytest.raises(CheckpointError, match=message):
        load_exported(weights)


def test_damaged_weights_are_refused(weights: Path) -> None:
    path = weights / "policy.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="altered or damaged"):
        load_exported(weights)
    path.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_exported(weights)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_exported(weights)
    with pytest.raises(CheckpointError, match="holds no exported policy"):
        load_exported(weights / "none")


def test_weights_that_name_code_need_trust(weights: Path) -> None:
    from safetensors.torch import load_file

    from rl_training.export.metadata import policy_digest  # as an attacker would compute it

    def name_code(about: dict[str, Any]) -> None:
        about["rebuilt_from"]["config"]["algo_kwargs"]["encoder"] = "antigravity:Encoder"
        found = load_file(weights / "policy.safetensors")
        about["digest"] = policy_digest(about["rebuilt_from"], found)

    changed(weights, name_code)
    with pytest.raises(CheckpointError, match="names code that would be imported"):
        load_exported(weights)
    assert "antigravity" not in sys.modules
