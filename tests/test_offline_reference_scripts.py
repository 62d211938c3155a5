"""The scripts of the offline algorithms run alone and take the same steps as the package."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from conftest import RecordedData
from reference_runs import load_script
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.models.mlp_continuous import EnsembleMLP
from rl_training.registry import config_type, get_spec
from rl_training.types import EnvInfo, Progress
from test_off_policy_reference_scripts import (
    Pairs,
    check_agreement,
    copy_parameters,
    enlarge_critics,
    enlarge_outputs,
    paired_critics,
    paired_networks,
)
from test_reference_script import ALLOWED, imported_packages, linears

pytest.importorskip("minari")

from rl_training.datasets.reading import RecordedEpisode, open_dataset
from rl_training.datasets.writing import Recorded, find_destination, write_dataset
from rl_training.runtime.dataset_source import DatasetSource, specs_of

NAMES = ("bc", "td3_bc", "iql", "cql", "rebrac", "awac")
SCRIPTS = {
    name: Path(__file__).parent.parent / "examples" / f"{name}_reference.py" for name in NAMES
}
OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(np.array([-2.0, -1.0], np.float32), np.array([2.0, 3.0], np.float32))
CHOICES = spaces.Discrete(3, start=1)
SPACES: dict[str, spaces.Space[Any]] = {"box": BOX, "discrete": CHOICES}
EPISODES, BATCH, WIDTHS = 40, 64, (24, 24)

scripts = pytest.mark.parametrize("algo", NAMES)


def load(algo: str) -> Any:
    return load_script(SCRIPTS[algo])


# -- each script alone -----------------------------------------------------------------------------


@scripts
def test_imports_nothing_but_torch_gymnasium_numpy_h5py_and_the_standard_library(algo: str) -> None:
    packages = imported_packages(SCRIPTS[algo].read_text())
    assert {"torch", "gymnasium", "h5py"} <= packages
    assert packages <= ALLOWED | {"h5py"}


@scripts
def test_never_names_the_package(algo: str) -> None:
    assert "rl_training" not in SCRIPTS[algo].read_text()


RUNS = [*((name, "Pendulum-v1") for name in NAMES), ("bc", "CartPole-v1"), ("iql", "CartPole-v1")]
RUN_ALL = """
import json, runpy, sys
for path, *flags in json.loads(sys.argv[1]):
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")
    print("end of a run")
"""


def flags_of(env_id: str, recorded_data: RecordedData) -> list[str]:
    flags = ["--dataset", str(recorded_data(env_id)), "--env-id", env_id, "--updates", "8"]
    flags += ["--batch-size", "16", "--hidden-sizes", "16", "16", "--report-interval", "5"]
    return [*flags, "--eval-episodes", "1"]


@pytest.fixture(scope="module")
def printed(
    recorded_data: RecordedData, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], str]:
    """What every run prints in a process without this package's tests.

    All runs are in one process: loading torch takes longer than the runs.
    """
    folder = tmp_path_factory.mktemp("alone")
    commands = [[str(SCRIPTS[algo]), *flags_of(env_id, recorded_data)] for algo, env_id in RUNS]
    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN_ALL, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return dict(zip(RUNS, done.stdout.split("end of a run\n"), strict=False))


@pytest.mark.parametrize(("algo", "env_id"), RUNS)
def test_runs_alone_twice_alike_and_reports_losses_and_an_evaluation(
    printed: dict[tuple[str, str], str], recorded_data: RecordedData, algo: str, env_id: str
) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as again:
        load(algo).main(flags_of(env_id, recorded_data))
    assert printed[algo, env_id] == again.getvalue()
    *losses, evaluation = again.getvalue().splitlines()
    assert [line.split()[:2] for line in losses] == [["update", "5"], ["update", "8"]]
    assert all("loss" in line and "nan" not in line for line in losses)
    assert evaluation.startswith("evaluation:")


@scripts
def test_script_has_the_defaults_of_the_package(algo: str) -> None:
    args = vars(load(algo).parse_args(["--dataset", "anywhere"]))
    args["hidden_sizes"] = tuple(args["hidden_sizes"])
    config = vars(config_type(algo)())
    shared = {name: value for name, value in config.items() if name in args}
    if algo == "cql":
        assert shared.pop("conservative_weight") is None, "by the kind of actions: 5 for Box ones"
        assert args["conservative_weight"] == 5.0
    assert shared == {name: args[name] for name in shared}
    others = {"dataset", "env_id", "updates", "seed", "report_interval", "eval_episodes"}
    assert set(args) - set(shared) - {"conservative_weight"} <= others


# -- the dataset -----------------------------------------------------------------------------------


def random_episode(index: int, kind: str) -> RecordedEpisode:
    """Every third episode is terminated, the others are truncated; some actions are at a bound."""
    random = np.random.default_rng(index)
    length = 2 + index % 5
    last = np.arange(length) == length - 1
    if kind == "box":
        wide = random.uniform(1.2 * BOX.low - 0.5, 1.2 * BOX.high + 0.5, (length, 2))
        actions: Any = wide.clip(BOX.low, BOX.high).astype(np.float32)
    else:
        actions = random.integers(1, 4, length)
    return RecordedEpisode(
        index,
        random.normal(0.5, 1.5, (length + 1, 3)).astype(np.float32),
        actions,
        random.normal(size=length),
        last & (index % 3 == 0),
        last & (index % 3 != 0),
    )


Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A dataset with each kind of actions."""
    made = {}
    for kind, space in SPACES.items():
        episodes = (random_episode(index, kind) for index in range(EPISODES))
        place = find_destination(tmp_path_factory.mktemp("datasets") / kind)
        made[kind] = write_dataset(place, episodes, Recorded(OBS, space, "random"), dict)
    return made


def read(algo: str, folders: Folders, kind: str = "box", *more: Any) -> dict[str, Tensor]:
    data: dict[str, Tensor] = load(algo).read_transitions(folders[kind], SPACES[kind], *more)
    return data


def package_config(algo: str, folder: Path, **knobs: Any) -> TrainConfig[Any]:
    return TrainConfig(
        algo=algo,
        dataset=str(folder),
        env_id="",
        total_updates=1000,
        progress=False,
        algo_kwargs=config_type(algo)(**knobs),
    )


def package_source(config: TrainConfig[Any]) -> DatasetSource:
    dataset = open_dataset(str(config.dataset))
    return DatasetSource(dataset, EnvInfo(*specs_of(dataset), num_envs=1), config)


def package_replay(config: TrainConfig[Any], *, next_actions: bool) -> ReplayBuffer:
    return package_source(config).load(torch.device("cpu"), next_actions=next_actions)


@pytest.mark.parametrize(
    ("algo", "kind"),
    [*((name, "box") for name in NAMES[1:]), ("iql", "discrete")],
)
def test_script_reads_what_the_package_loads(algo: str, kind: str, folders: Folders) -> None:
    data = read(algo, folders, kind)
    config = package_config(algo, folders[kind])
    replay = package_replay(config, next_actions=algo == "rebrac")
    assert len(replay) == len(data["obs"])
    batch = replay._gather(np.arange(len(replay)))
    batch["terminated"] = (batch.pop("discounts") == 0).float()
    if algo == "rebrac":
        batch["has_next_action"] = batch.pop("next_recorded")
    assert set(batch) == set(data)
    for name, column in data.items():
        torch.testing.assert_close(column, batch[name], atol=1e-6, rtol=0)


def test_script_reads_successors_terminations_and_next_actions(folders: Folders) -> None:
    data = read("rebrac", folders)
    row = 0
    for index in range(EPISODES):
        episode = random_episode(index, "box")
        rows = slice(row, row + len(episode))
        assert np.array_equal(data["obs"][rows], episode.observations[:-1])
        assert np.array_equal(data["next_obs"][rows], episode.observations[1:])
        assert data["terminated"][rows].tolist() == episode.terminations.tolist()
        assert torch.equal(data["next_actions"][rows][:-1], data["actions"][rows][1:])
        assert data["has_next_action"][rows].tolist() == [1.0] * (len(episode) - 1) + [0.0]
        row += len(episode)
    assert row == len(data["obs"])
    assert 5 <= int(data["terminated"].sum()) < EPISODES - 5
    assert data["actions"].min() == -1
    assert data["actions"].max() == 1


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_script_clones_the_episodes_that_the_package_clones(
    kind: str, fraction: float, folders: Folders
) -> None:
    data = read("bc", folders, kind, fraction)
    config = package_config("bc", folders[kind], top_fraction=fraction)
    replay = package_replay(config, next_actions=False)
    batch = replay._gather(np.arange(len(replay)))
    for name, column in data.items():
        torch.testing.assert_close(column, batch[name], atol=1e-6, rtol=0)


def test_script_standardises_as_the_package_does(folders: Folders) -> None:
    data = read("td3_bc", folders)
    config = package_config("td3_bc", folders["box"], hidden_sizes=WIDTHS)
    config = dataclasses.replace(config, normalize_obs=True)
    source = package_source(config)
    source.load(torch.device("cpu"))
    info = source.info
    learner = get_spec("td3_bc").build(config, info.obs_spec, info.action_spec, torch.device("cpu"))
    source.set_normalizers(learner.module)
    raw = data["obs"]
    load("td3_bc").standardize(data)
    standardised, _ = learner.model.actor.observe(raw)
    # The script adds 0.001 to deviations of about 1, which the package does not.
    torch.testing.assert_close(data["obs"], standardised, atol=0.005, rtol=0)
    assert (data["obs"] - raw).abs().mean() > 0.1


# -- the same steps --------------------------------------------------------------------------------


@dataclasses.dataclass
class Twins:
    """A script's agent and the package's learner, with the same parameters."""

    learner: Any
    config: TrainConfig[Any]
    data: dict[str, Tensor]
    """All transitions, read by the script."""
    update: Callable[[dict[str, Tensor], Tensor], Any]
    """The script's update, given a batch and the package's noise."""
    pairs: Callable[[], Pairs]


def settings(algo: str, **knobs: Any) -> tuple[Any, dict[str, Any]]:
    """The script's arguments and the package's settings, which are the same."""
    same = {"learning_rate": 5e-3, "batch_size": BATCH, "hidden_sizes": WIDTHS, **knobs}
    flags = ["--dataset", "anywhere"]
    for name, value in same.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(one) for one in (value if isinstance(value, tuple) else [value])]
    return load(algo).parse_args(flags), same


def package_learner(algo: str, folder: Path, knobs: dict[str, Any]) -> tuple[Any, TrainConfig[Any]]:
    config = package_config(algo, folder, **knobs)
    specs = specs_of(open_dataset(folder))
    return get_spec(algo).build(config, *specs, torch.device("cpu")), config


def twins(
    built: tuple[Any, TrainConfig[Any]],
    data: dict[str, Tensor],
    update: Callable[[dict[str, Tensor], Tensor], Any],
    trained: Callable[[], Pairs],
    targets: Callable[[], Pairs] = dict,
) -> Twins:
    """Copy the script's parameters to the package."""
    copy_parameters(trained())
    built[0].sync_targets()
    return Twins(*built, data, update, lambda: {**trained(), **targets()})


def paired_norms(name: str, ours: list[nn.Sequential], theirs: EnsembleMLP) -> Pairs:
    pairs: Pairs = {}
    assert theirs.norms is not None
    for member, network in enumerate(ours):
        own = [layer for layer in network if isinstance(layer, nn.LayerNorm)]
        for i, (a, b) in enumerate(zip(own, theirs.norms, strict=True)):
            for part in ("weight", "bias"):
                flat = getattr(b, part).detach()[member, 0]
                pairs[f"{name}{member + 1}.norm{i}.{part}"] = (getattr(a, part).detach(), flat)
    return pairs


def bc_twins(folders: Folders, kind: str) -> Twins:
    script = load("bc")
    args, knobs = settings("bc")
    agent = script.Agent(3, SPACES[kind], args)
    learner, config = package_learner("bc", folders[kind], knobs)
    return twins(
        (learner, config),
        read("bc", folders, kind, 1.0),
        lambda batch, _: script.bc_update(agent, batch),
        lambda: paired_networks("actor", agent.actor, learner.model.actor.net),
    )


def deterministic_twins(algo: str, folders: Folders, **knobs: Any) -> Twins:
    """TD3+BC and ReBRAC."""
    script = load(algo)
    args, same = settings(
        algo, tau=0.5, policy_delay=2, target_policy_noise=0.5, target_noise_clip=0.3, **knobs
    )
    agent = script.Agent(3, 2, args)
    enlarge_outputs(agent.actor, 5.0)
    agent.target_actor.load_state_dict(agent.actor.state_dict())
    enlarge_critics(agent)
    learner, config = package_learner(algo, folders["box"], same)
    update = getattr(script, f"{algo}_update")

    def of(name: str, critics: list[nn.Sequential], theirs: EnsembleMLP) -> Pairs:
        pairs = paired_critics(name, critics, theirs)
        return pairs if algo == "td3_bc" else {**pairs, **paired_norms(name, critics, theirs)}

    return twins(
        (learner, config),
        read(algo, folders),
        lambda batch, noise: update(agent, batch, noise, args),
        lambda: {
            **paired_networks("actor", agent.actor, learner.model.actor.net),
            **of("critic", [agent.critic_1, agent.critic_2], learner.model.critics.net),
        },
        lambda: {
            **paired_networks("target_actor", agent.target_actor, learner.target_actor.module.net),
            **of("target", [agent.target_1, agent.target_2], learner.target_critics.module.net),
        },
    )


def critic_pairs(agent: Any, learner: Any) -> Pairs:
    return paired_critics("critic", [agent.critic_1, agent.critic_2], learner.model.critics.net)


def target_pairs(agent: Any, learner: Any) -> Pairs:
    return paired_critics("target", [agent.target_1, agent.target_2], learner.target.module.net)


def spread_deviations(agent: Any) -> None:
    """One deviation within its bounds, and one above them."""
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([-0.5, 2.3]))


def iql_twins(folders: Folders, kind: str) -> Twins:
    script = load("iql")
    args, knobs = settings(
        "iql", tau=0.5, gamma=0.9, expectile=0.8, inverse_temperature=2.0, max_weight=5.0
    )
    agent = script.Agent(3, SPACES[kind], args)
    enlarge_critics(agent)
    enlarge_outputs(agent.value, 5.0)
    if kind == "box":
        spread_deviations(agent)
    learner, config = package_learner("iql", folders[kind], knobs)

    def trained() -> Pairs:
        pairs = {
            **paired_networks("actor", agent.actor, learner.model.actor.net),
            **paired_networks("value", agent.value, learner.model.value.net),
            **critic_pairs(agent, learner),
        }
        if kind == "box":
            pairs["log_std"] = (agent.log_std.detach(), learner.model.actor.head.log_std.detach())
        return pairs

    return twins(
        (learner, config),
        read("iql", folders, kind),
        lambda batch, _: script.iql_update(agent, batch, args),
        trained,
        lambda: target_pairs(agent, learner),
    )


def awac_twins(folders: Folders) -> Twins:
    script = load("awac")
    args, knobs = settings("awac", tau=0.5, gamma=0.9, temperature=0.7)
    agent = script.Agent(3, 2, args)
    enlarge_critics(agent)
    spread_deviations(agent)
    learner, config = package_learner("awac", folders["box"], knobs)
    return twins(
        (learner, config),
        read("awac", folders),
        lambda batch, noise: script.awac_update(agent, batch, noise, args),
        lambda: {
            **paired_networks("actor", agent.actor, learner.model.actor.net),
            **critic_pairs(agent, learner),
            "log_std": (agent.log_std.detach(), learner.model.actor.head.log_std.detach()),
        },
        lambda: target_pairs(agent, learner),
    )


def cql_twins(folders: Folders, **more: Any) -> Twins:
    script = load("cql")
    args, knobs = settings(
        "cql",
        tau=0.5,
        gamma=0.9,
        actor_learning_rate=2e-3,
        ent_coef_init=0.7,
        num_action_samples=3,
        **more,
    )
    agent = script.Agent(3, 2, args)
    enlarge_outputs(agent.actor, 5.0)
    linears(agent.actor)[-1].bias.data[2:] += 1.5  # deviations on both sides of their clamp
    enlarge_critics(agent)
    learner, config = package_learner("cql", folders["box"], knobs)

    def update(batch: dict[str, Tensor], noise: Tensor) -> None:
        uniform = 2 * torch.special.ndtr(noise[8:]) - 1
        given = script.Noise(noise[0], noise[1], noise[2:5], noise[5:8], uniform)
        script.cql_update(agent, batch, given, args)

    def trained() -> Pairs:
        temperature = learner.model.temperature.log_ent_coef.detach()
        pairs = {
            **paired_networks("actor", agent.actor, learner.model.actor.net),
            **critic_pairs(agent, learner),
            "log_ent_coef": (agent.log_ent_coef.detach(), temperature),
        }
        if learner.learnt_weight is not None:
            factor = learner.learnt_weight.logarithm.detach()
            pairs["log_factor"] = (agent.log_factor.detach(), factor)
        return pairs

    return twins(
        (learner, config),
        read("cql", folders),
        update,
        trained,
        lambda: target_pairs(agent, learner),
    )


class DiscreteCQLOracle:
    """Double DQN with CQL's conservative loss, for the learner that has no script."""

    def __init__(self, weight: float, rate: float, gamma: float, tau: float) -> None:
        first, second, last = nn.Linear(3, 24), nn.Linear(24, 24), nn.Linear(24, 3)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        enlarge_outputs(self.network, 10.0)
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=rate)
        self.weight, self.gamma, self.tau = weight, gamma, tau

    def update(self, batch: dict[str, Tensor]) -> None:
        rows = torch.arange(len(batch["obs"]))
        with torch.no_grad():
            best = self.network(batch["next_obs"]).argmax(1)
            following = self.target(batch["next_obs"])[rows, best]
            goal = batch["rewards"] + self.gamma * (1 - batch["terminated"]) * following
        values = self.network(batch["obs"])
        chosen = values[rows, batch["actions"]]
        gap = (values.exp().sum(1).log() - chosen).mean()
        loss = nn.functional.huber_loss(chosen, goal) + self.weight * gap
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
            for slow, fast in pairs:
                slow.copy_((1 - self.tau) * slow + self.tau * fast)


def discrete_cql_twins(folders: Folders, weight: float | None) -> Twins:
    knobs = {"learning_rate": 5e-3, "gamma": 0.9, "tau": 0.5}
    oracle = DiscreteCQLOracle(1.0 if weight is None else weight, *knobs.values())
    same = {**knobs, "batch_size": BATCH, "hidden_sizes": WIDTHS, "conservative_weight": weight}
    learner, config = package_learner("cql", folders["discrete"], same)
    return twins(
        (learner, config),
        read("iql", folders, "discrete"),
        lambda batch, _: oracle.update(batch),
        lambda: paired_networks("online", oracle.network, learner.model.advantage),
        lambda: paired_networks("target", oracle.target, learner.target.module.advantage),
    )


CASES: dict[str, Callable[[Folders], Twins]] = {
    "bc": lambda folders: bc_twins(folders, "box"),
    "bc, discrete": lambda folders: bc_twins(folders, "discrete"),
    "td3_bc": lambda folders: deterministic_twins("td3_bc", folders, alpha=1.7),
    "rebrac": lambda folders: deterministic_twins(
        "rebrac", folders, actor_penalty=0.3, critic_penalty=0.2
    ),
    "iql": lambda folders: iql_twins(folders, "box"),
    "iql, discrete": lambda folders: iql_twins(folders, "discrete"),
    "awac": awac_twins,
    "cql": cql_twins,
    "cql, learnt weight": lambda folders: cql_twins(
        folders, conservative_weight=2.0, conservative_threshold=1.5
    ),
    "cql, soft backup": lambda folders: cql_twins(folders, soft_backup=True),
    "cql, discrete": lambda folders: discrete_cql_twins(folders, None),
    "cql, discrete, weight": lambda folders: discrete_cql_twins(folders, 2.5),
}

cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def _double() -> Iterator[None]:
    """Networks that are built, and numbers that are drawn, have 64 bits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_twins(case: str, folders: Folders) -> Twins:
    torch.manual_seed(0)
    return CASES[case](folders)


def draw(pair: Twins, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A batch for the script and the noise of one update, as `ReplayLearner.learn` draws them."""
    rows = torch.randint(len(pair.data["obs"]), (BATCH,), generator=generator)
    batch = {name: column[rows] for name, column in pair.data.items()}
    shape = pair.learner.noise_shape
    noise = torch.empty(0) if shape is None else torch.randn(shape, generator=generator)
    return {k: x.to(noise.dtype) if x.is_floating_point() else x for k, x in batch.items()}, noise


def for_package(batch: dict[str, Tensor], noise: Tensor, gamma: float) -> dict[str, Tensor]:
    """The script's batch with the package's names."""
    batch = {**batch, "noise": noise}
    if "terminated" in batch:
        batch["discounts"] = gamma * (1 - batch.pop("terminated"))
        batch["weights"] = torch.ones_like(batch["discounts"])
        assert BATCH > int((batch["discounts"] == 0).sum()) > 0
    if "has_next_action" in batch:
        batch["next_recorded"] = batch.pop("has_next_action")
        lone = (batch["next_recorded"] == 0) & (batch["discounts"] > 0)
        assert int(lone.sum()) > 0, "truncated, so that there is no next action"
        # Whatever is there must not matter.
        batch["next_actions"] = torch.where(lone[:, None], 0.9, batch["next_actions"])
    return batch


@pytest.mark.usefixtures("_double")
@cases
def test_script_and_package_take_the_same_steps(case: str, folders: Folders) -> None:
    pair = make_twins(case, folders)
    gamma = pair.config.algo_kwargs.gamma
    delay = getattr(pair.config.algo_kwargs, "policy_delay", 1)
    start = {name: ours.clone() for name, (ours, _) in pair.pairs().items()}
    draws = torch.Generator().manual_seed(4)
    for number in range(1, 6):
        batch, noise = draw(pair, draws)
        pair.update(batch, noise)
        pair.learner.update(for_package(batch, noise, gamma), delayed=number % delay == 0)
        if number in (2, 5):
            check_agreement(pair.pairs(), start, tolerance=1e-10)


@cases
def test_script_and_package_learn_the_same_from_the_dataset(case: str, folders: Folders) -> None:
    """The package's own loading, draws and schedules, in the precision it trains in."""
    pair = make_twins(case, folders)
    replay = package_replay(pair.config, next_actions=pair.learner.needs_next_actions)
    start = {name: ours.clone() for name, (ours, _) in pair.pairs().items()}
    draws = torch.Generator()
    draws.set_state(pair.learner.generators[0].get_state())
    for number in range(1, 6):
        pair.update(*draw(pair, draws))
        pair.learner.learn(replay, Progress(number, 1000))
    check_agreement(pair.pairs(), start, tolerance=1e-5)
