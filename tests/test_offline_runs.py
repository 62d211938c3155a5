"""Runs from a dataset alone, and runs that step environments and learn from a dataset as well."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rl_training
from conftest import QUICK_KNOBS, MakeConfig, RecordedData, any_env, write_random_episodes
from rl_training import cli
from rl_training.checkpointing import load_checkpoint
from rl_training.config import TrainConfig, config_from_file
from rl_training.errors import CheckpointError, ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.experiment.registry import ALGORITHMS
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.stored import IN_MEMORY
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training
from state_compare import assert_same_run, differences, final_state, metric_rows
from test_resume import run_and_kill

pytest.importorskip("minari")

OFFLINE = [name for name, entry in ALGORITHMS.items() if entry.offline]
ON_BOX = "Pendulum-v1"
ONLINE_FROM = {"sac": "cql", "td3": "td3_bc", "iql": "iql", "awac": "awac"}
"""Algorithms that step environments and take a dataset, and where their first weights come from."""
METRICS = {
    "bc": {"loss", "action_distance"},
    "td3_bc": {"critic_loss", "q_mean", "actor_loss", "action_distance"},
    "rebrac": {"critic_loss", "q_mean", "actor_loss", "action_distance"},
    "iql": {"critic_loss", "value_loss", "q_mean", "actor_loss", "advantage_weight"},
    "awac": {"critic_loss", "q_mean", "actor_loss", "advantage_weight", "action_distance"},
    "cql": {"critic_loss", "td_loss", "conservative_loss", "q_mean", "actor_loss", "ent_coef"},
}


def kept(**settings: Any) -> dict[str, Any]:
    """A run whose iterations, checkpoints and evaluations end together, every 100 updates."""
    return {**settings, "total_timesteps": 330, "checkpoint_interval": 100, "eval_interval": 100}


@pytest.mark.parametrize("algo", OFFLINE)
def test_killed_and_resumed_equals_never_stopped(
    algo: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(**kept(algo=algo, normalize_obs=True))
    whole = ExperimentManager.setup(config).train()
    killed = run_and_kill(config, tmp_path / "killed", "step", "200")
    assert metric_rows(killed) != metric_rows(whole.run_dir)
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)
    assert final_state(killed)["training"]["counters"]["global_step"] == 330


@pytest.mark.parametrize("algo", sorted(METRICS))
def test_it_logs_what_it_learns(algo: str, make_config: MakeConfig) -> None:
    result = ExperimentManager.setup(make_config(algo=algo, env_id=ON_BOX)).train()
    assert {f"losses/{name}" for name in METRICS[algo]} <= set(result.metrics)
    assert result.stop_reason == "total_updates reached"
    assert result.metrics["global_step"] == 512
    assert result.metrics["time/updates_per_second"] > 0
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["total_updates"] == 512
    assert "total_timesteps" not in summary


@pytest.mark.parametrize("algo", ["bc", "iql", "cql"])
def test_discrete_actions_report_how_often_they_match(algo: str, make_config: MakeConfig) -> None:
    result = ExperimentManager.setup(make_config(algo=algo)).train()
    assert 0 < result.metrics["losses/action_match"] <= 1


def test_the_last_iteration_may_be_short_and_any_number_of_updates_is_possible(
    make_config: MakeConfig,
) -> None:
    result = ExperimentManager.setup(make_config(algo="bc", total_timesteps=1003)).train()
    assert result.metrics["global_step"] == 1003
    assert load_checkpoint(result.checkpoint_path)["algorithm"]["num_updates"] == 1003


def test_a_longer_run_is_extended_in_updates(make_config: MakeConfig) -> None:
    short = ExperimentManager.setup(make_config(algo="td3_bc")).train()
    with pytest.raises(ConfigError, match="counts updates: give total_updates instead"):
        resume_training(short.run_dir, total_timesteps=700)
    longer = resume_training(short.run_dir, total_updates=700)
    assert longer.metrics["global_step"] == 700
    whole = ExperimentManager.setup(make_config(algo="td3_bc", total_timesteps=700)).train()
    states = [final_state(run.run_dir)["algorithm"] for run in (longer, whole)]
    assert differences(*states) == []


def test_the_managed_class_counts_updates(recorded_data: RecordedData, tmp_path: Path) -> None:
    data = str(recorded_data(ON_BOX))
    quick = {**QUICK_KNOBS["iql"], "output_dir": tmp_path, "progress": False, "eval_episodes": 2}
    agent = rl_training.IQL(dataset=data, **quick)
    assert agent.config.total_updates == 100_000
    agent.learn(300)
    agent.learn(200)
    assert agent.result is not None
    assert agent.result.metrics["global_step"] == 500
    assert agent.config.env_id == ON_BOX, "the one that the dataset names"
    assert "500 updates trained" in repr(agent)
    action, _ = agent.predict(np.zeros(3, np.float32))
    assert action.shape == (1,)
    agent.save(tmp_path / "policy.pt")
    loaded = rl_training.IQL.load(tmp_path / "policy.pt")
    assert np.array_equal(loaded.predict(np.zeros(3, np.float32))[0], action)
    assert evaluate_checkpoint(agent.result.run_dir, 2).returns


def test_totals_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bc learns from a dataset alone.*set total_updates"):
        TrainConfig(algo="bc", total_timesteps=1000)
    with pytest.raises(ConfigError, match=r"'total_updates' is for.*ppo counts environment steps"):
        TrainConfig(algo="ppo", total_updates=1000)
    with pytest.raises(ConfigError, match=r"set total_updates.*or total_timesteps"):
        TrainConfig(algo="iql", total_updates=5, total_timesteps=5)
    with pytest.raises(ConfigError, match="'total_updates' must be"):
        TrainConfig(algo="bc", total_updates=-1)
    with pytest.raises(ConfigError, match="ppo does not learn from a dataset; use sac"):
        TrainConfig(algo="ppo", dataset="a/b-v0")
    with pytest.raises(ConfigError, match="'shards' must be 1 with a dataset"):
        TrainConfig(algo="sac", dataset="a/b-v0", shards=2, num_envs=2)
    with pytest.raises(ConfigError, match="bc learns from recorded data: set dataset"):
        ExperimentManager.setup(TrainConfig(algo="bc"))


@pytest.mark.parametrize(
    ("settings", "offline"),
    [
        ({"algo": "iql"}, True),
        ({"algo": "iql", "total_updates": 7}, True),
        ({"algo": "iql", "total_timesteps": 7}, False),
        ({"algo": "awac", "total_timesteps": 7, "total_updates": 0}, False),
        ({"algo": "bc"}, True),
        ({"algo": "sac"}, False),
    ],
)
def test_what_a_run_counts_survives_its_file(
    settings: dict[str, Any], offline: bool, tmp_path: Path
) -> None:
    config: TrainConfig[Any] = TrainConfig(**settings)
    assert config.is_offline == offline
    assert config.total == max(config.total_updates, config.total_timesteps)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert config_from_file(path) == config
    assert config_from_file(path).is_offline == offline


# -- the environment -------------------------------------------------------------------------------


def test_without_an_environment_it_warns_and_learns_the_same(
    make_config: MakeConfig, recorded_data: RecordedData, tmp_path: Path
) -> None:
    evaluated = ExperimentManager.setup(make_config(algo="td3_bc")).train()
    config = make_config(algo="td3_bc", env_id=ON_BOX).with_overrides(env_id="")
    with pytest.warns(UserWarning, match="the policy will not be evaluated"):
        alone = ExperimentManager.setup(config).train()
    assert "eval/return_mean" not in alone.metrics
    states = [final_state(run.run_dir)["algorithm"] for run in (evaluated, alone)]
    assert differences(*states) == []
    with pytest.raises(ConfigError, match=r"there is no environment to play.*--env-id ENV"):
        evaluate_checkpoint(alone.run_dir, 1)
    resume_training(alone.run_dir, total_updates=600)


def test_a_run_without_an_environment_is_evaluated_on_one_that_is_named(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(algo="bc", env_id=ON_BOX, total_timesteps=8)
    same = ExperimentManager.setup(config).train().run_dir
    alone = config.with_overrides(env_id="", eval_episodes=0, output_dir=config.output_dir / "b")
    (tmp_path / "alone.yaml").write_text(alone.to_yaml())
    assert cli.main(["train", "--config", str(tmp_path / "alone.yaml"), "--json"]) == 0
    *lines, printed = capsys.readouterr().out.splitlines()
    run = json.loads(printed)["run_dir"]
    assert any(re.fullmatch(r"evaluate: \S*rl-training eval \S+ --env-id ENV", x) for x in lines)
    assert cli.main(["eval", run, "--num-episodes", "3", "--env-id", ON_BOX, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["returns"] == list(evaluate_checkpoint(same, 3).returns)
    light = ["--env-kwargs", "{g: 1.0}"]
    assert cli.main(["eval", run, "--num-episodes", "3", "--env-id", ON_BOX, *light]) == 0
    kwargs = {"g": 1.0}
    lighter = evaluate_checkpoint(run, 3, env_id=ON_BOX, env_kwargs=kwargs).returns
    assert lighter == evaluate_checkpoint(same, 3, env_kwargs=kwargs).returns
    assert lighter != tuple(found["returns"])
    own = config.with_overrides(env_kwargs=kwargs, output_dir=config.output_dir / "c")
    own_run = ExperimentManager.setup(own).train().run_dir
    assert evaluate_checkpoint(own_run, 3).returns == lighter
    assert evaluate_checkpoint(own_run, 3, env_id=ON_BOX).returns == tuple(found["returns"])
    for words, message in {
        (): "there is no environment to play: .* with --env-id ENV",
        ("--env-id", "CartPole-v1"): "CartPole-v1 does not match the policy: its observations",
        ("--env-id", ""): "'env_id' must be the id of an environment",
        ("--env-id", "Pendulm-v1"): "Did you mean 'Pendulum-v1'",
        ("--env-id", ON_BOX, "--env-kwargs", "{h: 1}"): "argument 'h'",
    }.items():
        capsys.readouterr()
        assert cli.main(["eval", run, *words]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_run_of_env_fn_is_evaluated_on_one_that_is_named(make_config: MakeConfig) -> None:
    config = make_config(env_id="Own", total_timesteps=128)
    trainer = ExperimentManager.setup(config, env_fn=lambda: gym.make("CartPole-v1"))
    run = trainer.train().run_dir
    with pytest.raises(CheckpointError, match=r"was trained with env_fn.*--env-id"):
        evaluate_checkpoint(run, 2, env_kwargs={"sutton_barto_reward": True})
    assert evaluate_checkpoint(run, 2, env_id="CartPole-v1").returns
    with pytest.raises(ConfigError, match="env_fn and env_id were given"):
        evaluate_checkpoint(run, 2, env_id="CartPole-v1", env_fn=lambda: gym.make("CartPole-v1"))


def test_another_environment_than_the_recorded_one_is_refused(make_config: MakeConfig) -> None:
    config = make_config(algo="bc", env_id=ON_BOX)
    for env_id in ("CartPole-v1", "MountainCarContinuous-v0"):
        other = config.with_overrides(env_id=env_id)
        with pytest.raises(ConfigError, match=f"does not fit {env_id}: its observations are"):
            ExperimentManager.setup(other)


def test_a_module_that_a_dataset_names_is_not_imported(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = write_random_episodes(ON_BOX, tmp_path / "foreign")
    path = folder / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    spec = json.loads(metadata["env_spec"])
    marker = tmp_path / "imported"
    (tmp_path / "hostile_module.py").write_text(f"open({str(marker)!r}, 'w').close()")
    spec["id"], spec["entry_point"] = "hostile_module:Pendulum-v99", "hostile_module:Env"
    metadata["env_spec"] = json.dumps(spec)
    path.write_text(json.dumps(metadata))
    code = (
        "import rl_training, sys; rl_training.BC(dataset=sys.argv[1], progress=False,"
        " output_dir=sys.argv[2]).learn(5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent.parent / 'src'}:{tmp_path}"},
    )
    assert done.returncode == 0, done.stderr
    assert "will not be evaluated" in done.stderr
    assert not marker.exists()


# -- resume ----------------------------------------------------------------------------------------


def test_a_dataset_that_changed_is_refused_on_resume(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = write_random_episodes(ON_BOX, tmp_path / "data")
    config = make_config(algo="bc", env_id=ON_BOX, dataset=str(folder), total_updates=64)
    result = ExperimentManager.setup(config).train()
    moved = folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no dataset"):
        resume_training(result.run_dir, total_updates=100)
    write_random_episodes(ON_BOX, folder, steps=49)
    with pytest.raises(CheckpointError, match="is not the one that this run was trained on"):
        resume_training(result.run_dir, total_updates=100)
    shutil.rmtree(folder)
    moved.rename(folder)
    assert resume_training(result.run_dir, total_updates=100).metrics["global_step"] == 100


# -- a dataset beside a replay ---------------------------------------------------------------------


def online_config(algo: str, make_config: MakeConfig, data: Path, **more: Any) -> TrainConfig[Any]:
    settings: dict[str, Any] = {
        "dataset": str(data),
        "total_timesteps": 600,
        "learning_starts": 20,
        "buffer_size": 300,
        "train_freq": 4,
        "checkpoint_interval": 200,
        "eval_interval": 300,
        "num_envs": 1,
    }
    return make_config(algo=algo, env_id=ON_BOX, **{**settings, **more})


@pytest.mark.parametrize("algo", ONLINE_FROM)
def test_online_from_offline_starts_from_its_weights_and_resumes_exactly(
    algo: str, make_config: MakeConfig, recorded_data: RecordedData, tmp_path: Path
) -> None:
    first = ONLINE_FROM[algo]
    before = ExperimentManager.setup(make_config(algo=first, env_id=ON_BOX)).train()
    data = recorded_data(ON_BOX)
    config = online_config(algo, make_config, data, init_from=before.run_dir)
    trainer = ExperimentManager.setup(config)
    loaded = final_state(before.run_dir)["algorithm"]["model"]
    own = trainer.learner.module.state_dict()
    assert all(torch.equal(own[name], loaded[name]) for name in loaded if "temperature" not in name)
    whole = trainer.train()
    assert whole.metrics["global_step"] == 600
    assert whole.stop_reason == "total_timesteps reached"
    killed = run_and_kill(config, tmp_path / "killed", "step", "400")
    resume_training(killed)
    assert_same_run(whole.run_dir, killed)


def managed(data: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a model that learns quickly from a dataset, in a folder of its own."""
    quick: dict[str, Any] = {**QUICK_KNOBS["cql"], "eval_episodes": 0, "progress": False}
    return {**quick, "dataset": str(data), "output_dir": folder, "tensorboard": False, **more}


def test_a_model_gives_its_weights_as_they_are_and_names_its_checkpoint(
    recorded_data: RecordedData, tmp_path: Path
) -> None:
    data = recorded_data(ON_BOX)
    online = managed(
        data, tmp_path / "b", learning_starts=20, total_timesteps=60, checkpoint_interval=20
    )
    model = rl_training.CQL(**managed(data, tmp_path / "a"))
    before = model.learn(8)
    from_path = rl_training.SAC(ON_BOX, init_from=before.checkpoint_path, **online)
    from_path.learn()
    agent = rl_training.SAC(ON_BOX, init_from=model, **online)
    other = rl_training.SAC(ON_BOX, init_from=model, **online)
    model.learn(8)
    assert agent.config.init_from == before.checkpoint_path
    agent.learn()
    assert agent.run_dir is not None
    assert from_path.run_dir is not None
    assert_same_run(from_path.run_dir, agent.run_dir)
    stored = config_from_file(agent.run_dir / "config.yaml")
    assert stored.init_from == before.checkpoint_path
    weights = agent.policy.module.state_dict()
    with pytest.warns(UserWarning, match="a new run starts from the weights"):
        agent.learn(20, run_dir=tmp_path / "c")  # from its own weights, and no update yet
    own = agent.policy.module.state_dict()
    assert all(torch.equal(weights[name], own[name]) for name in own if "temperature" not in name)

    class StopAt(Callback):
        def on_iteration(self, trainer: Any, event: Any) -> None:
            trainer.request_stop("enough")

    run = other.learn(callbacks=[StopAt()])
    shutil.rmtree(before.run_dir)
    assert resume_training(run.run_dir, total_timesteps=80).metrics["global_step"] == 80


def test_a_model_in_memory_is_recorded_as_such(
    recorded_data: RecordedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recorded_data(ON_BOX)
    model = rl_training.IQL(**managed(data, tmp_path / "a"))
    model.learn(8, run_dir=None)
    weights = model.policy.module.state_dict()
    online = managed(data, tmp_path / "b", learning_starts=60, total_timesteps=40)
    agent = rl_training.IQL(ON_BOX, init_from=model, **online)
    model.learn(8)
    result = agent.learn()  # no update yet
    assert all(torch.equal(weights[k], v) for k, v in agent.policy.module.state_dict().items())
    assert not (tmp_path / "a").exists()
    config = config_from_file(result.run_dir / "config.yaml")
    assert config == agent.config
    assert config.init_from == IN_MEMORY
    longer = resume_training(result.run_dir, total_timesteps=80)
    assert longer.metrics["global_step"] == 80
    loaded = rl_training.IQL.load(result.run_dir)
    assert loaded.config.init_from == IN_MEMORY
    again = rl_training.IQL(ON_BOX, init_from=loaded, **online)
    assert again.config.init_from == result.run_dir / "checkpoints" / "last.pt"
    again.learn(run_dir=None)
    in_memory = rl_training.IQL(ON_BOX, init_from=again, **online)
    assert in_memory.config.init_from == IN_MEMORY
    assert in_memory.learn(run_dir=None).folder is None
    assert cli.main(["train", "--config", str(result.run_dir / "config.yaml")]) == 2
    assert "started from a model in memory, whose weights are in no file" in capsys.readouterr().err


def test_what_gives_no_weights_is_refused(recorded_data: RecordedData, tmp_path: Path) -> None:
    settings = managed(recorded_data(ON_BOX), tmp_path)
    model = rl_training.CQL(**settings)
    with pytest.raises(ConfigError, match=r"init_from: <CQL .*> has learnt nothing"):
        rl_training.SAC(ON_BOX, init_from=model)
    with pytest.raises(ConfigError, match=r"SAC\(env, init_from=model\)"):
        TrainConfig(algo="sac", init_from=model)  # type: ignore[arg-type]
    model.learn(2, run_dir=None)
    with pytest.raises(CheckpointError, match="its observations are"):
        rl_training.SAC("MountainCarContinuous-v0", init_from=model, output_dir=tmp_path).learn(9)
    narrow = rl_training.SAC(ON_BOX, init_from=model, hidden_sizes=[8], output_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"weights of a model in memory do not fit.*hidden_"):
        narrow.learn(9)


def test_a_part_of_every_batch_comes_from_the_dataset(
    make_config: MakeConfig, recorded_data: RecordedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.algorithms.sac import SAC

    config = online_config(
        "sac", make_config, recorded_data(ON_BOX), dataset_fraction=0.25, total_timesteps=100
    )
    trainer = ExperimentManager.setup(config)
    data = trainer._sampled.data  # type: ignore[attr-defined]
    recorded = {tuple(row) for row in data.observations(np.arange(len(data))).tolist()}
    counts = []
    real = SAC.update

    def watched(self: SAC, *batches: Any, delayed: bool = True) -> Any:
        counts.append([tuple(row) in recorded for row in batches[0]["obs"].tolist()])
        return real(self, *batches, delayed=delayed)

    monkeypatch.setattr(SAC, "update", watched)
    trainer.train()
    assert len(counts) >= 20
    assert all(batch == [True] * 8 + [False] * 24 for batch in counts)


def test_iql_steps_no_environment_with_discrete_actions(
    make_config: MakeConfig, recorded_data: RecordedData
) -> None:
    data = str(recorded_data("CartPole-v1"))
    with pytest.raises(ConfigError, match="iql learns Discrete actions from a dataset alone"):
        ExperimentManager.setup(make_config(algo="iql", dataset=data, total_timesteps=100))


def test_a_dataset_that_does_not_fit_the_environment_is_refused_beside_a_replay(
    make_config: MakeConfig, recorded_data: RecordedData
) -> None:
    config = online_config("sac", make_config, recorded_data("CartPole-v1"))
    with pytest.raises(ConfigError, match="does not fit Pendulum-v1"):
        ExperimentManager.setup(config)


def test_weights_that_do_not_fit_name_the_settings_that_differ(
    make_config: MakeConfig, recorded_data: RecordedData
) -> None:
    offline = make_config(algo="cql", env_id=ON_BOX, normalize_obs=True, total_timesteps=8)
    before = ExperimentManager.setup(offline).train()
    config = online_config("sac", make_config, recorded_data(ON_BOX), init_from=before.run_dir)
    with pytest.raises(CheckpointError, match="cql and sac: normalize_obs True there, False here"):
        ExperimentManager.setup(config)


def test_settings_that_have_no_effect_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="'dataset_fraction' has no effect here"):
        TrainConfig(algo="bc", dataset_fraction=0.3)
    with pytest.raises(ConfigError, match="'dataset_transitions' must be unset without a dataset"):
        TrainConfig(algo="sac", dataset_transitions=3)
    for name, value in (("conservative_threshold", 1.0), ("soft_backup", True)):
        with pytest.raises(ConfigError, match=f"{name}' is for Box actions"):
            ExperimentManager.setup(make_config(algo="cql", **{name: value}))


def test_a_relative_path_is_found_from_another_folder(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_episodes(ON_BOX, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    config = make_config(algo="bc", env_id=ON_BOX, dataset="data", total_updates=8)
    result = ExperimentManager.setup(config).train()
    monkeypatch.chdir(tmp_path.parent)
    assert resume_training(result.run_dir, total_updates=16).metrics["global_step"] == 16


@pytest.mark.parametrize("algo", OFFLINE)
def test_every_algorithm_learns_from_its_default_environment(
    algo: str, make_config: MakeConfig
) -> None:
    """The default settings of an algorithm, not the quick ones, make a run."""
    config: TrainConfig[Any] = TrainConfig(
        algo=algo,
        dataset=make_config(algo=algo).dataset,
        total_updates=3,
        output_dir=make_config(algo=algo).output_dir,
        progress=False,
        eval_episodes=1,
    )
    result = ExperimentManager.setup(config).train()
    assert result.metrics["eval/episodes"] == 1
    assert load_checkpoint(result.checkpoint_path)["config"]["env_id"] == any_env(algo)
