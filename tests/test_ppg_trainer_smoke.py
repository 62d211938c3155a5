"""PPG on the runtime: its phases are its own, the loop is the on-policy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_training
from conftest import MakeConfig
from rl_training import PPG
from rl_training.checkpointing import load_checkpoint
from rl_training.cli import main
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.ppg_trainer import train_ppg
from rl_training.runtime.workflows import resume_training
from rl_training.seeding import torch_stream
from state_compare import assert_same_run, metric_rows
from test_resume import StopAt


def test_it_is_part_of_the_core_surface() -> None:
    assert rl_training.PPG is rl_training.api.PPG
    assert rl_training.train_ppg is train_ppg
    assert rl_training.algorithms.PPG is not PPG


def test_the_trainer_is_the_one_of_every_on_policy_algorithm(make_config: MakeConfig) -> None:
    trainer = ExperimentManager.setup(make_config(algo="ppg"))
    assert type(trainer) is OnPolicyTrainer
    trainer.close()


def test_its_knobs_and_its_seed_reach_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(
        algo="ppg",
        hidden_sizes=[8, 12],
        value_sizes=[5],
        activation="relu",
        normalize_obs=True,
        clip_obs=3.0,
    )
    trainer: Any = ExperimentManager.setup(config)
    trainer.close()
    model = trainer.algorithm.model
    sizes = {
        name: [layer.out_features for layer in net.layers]
        for name, net in model.named_children()
        if name in ("actor", "critic", "aux_critic")
    }
    assert sizes == {"actor": [8, 12, 2], "critic": [5, 1], "aux_critic": [1]}
    assert model.actor.activation == model.critic.activation == "relu"
    assert model.encode(torch.full((1, 4), 1e9))[0].tolist() == [[3.0] * 4]
    expected = torch_stream(config.seed, "minibatches")
    assert torch.equal(trainer.algorithm.generators[0].get_state(), expected.get_state())


def test_an_encoder_of_the_users_own_is_below_the_trunk(make_config: MakeConfig) -> None:
    config = make_config(algo="ppg", encoder="test_trainer_smoke:TinyEncoder")
    trainer: Any = ExperimentManager.setup(config)
    trainer.close()
    model = trainer.algorithm.model
    assert type(model.encoder).__name__ == "TinyEncoder"
    assert model.actor.layers[0].in_features == model.encoder.output_size


def test_it_logs_both_phases(make_config: MakeConfig) -> None:
    """Rollouts of 128 steps, three to a cycle: after 384 and 768 of 1024 steps."""
    result = train_ppg(make_config(algo="ppg", total_timesteps=1024))
    rows = metric_rows(result.run_dir)
    found = {row["step"]: row["auxiliary/phases"] for row in rows if "auxiliary/phases" in row}
    assert found == {128: 0, 256: 0, 384: 1, 512: 1, 640: 1, 768: 2, 896: 2, 1024: 2}
    logged = next(row for row in rows if row.get("step") == 384)
    for name in ("auxiliary/aux_value_loss", "auxiliary/value_loss", "losses/policy_loss"):
        assert np.isfinite(logged[name])


@pytest.mark.parametrize("stop", [256, 384])  # within a cycle, and between two
def test_resume_is_exact_wherever_in_the_cycle(
    stop: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    knobs: dict[str, Any] = {"normalize_reward": True, "anneal_lr": False, "eval_episodes": 0}
    knobs |= {"algo": "ppg", "eval_interval": 0}
    whole = ExperimentManager.setup(
        make_config(**knobs, total_timesteps=1024, output_dir=tmp_path / "whole")
    ).train()
    part = ExperimentManager.setup(
        make_config(**knobs, total_timesteps=stop, output_dir=tmp_path / "part")
    ).train()
    kept = load_checkpoint(part.checkpoint_path)["algorithm"]["kept"]
    assert len(kept) == (stop // 128) % 3
    resume_training(part.run_dir, total_timesteps=1024)
    assert_same_run(whole.run_dir, part.run_dir)


def test_it_predicts_saves_and_loads(make_config: MakeConfig, tmp_path: Path) -> None:
    model = PPG(make_config(algo="ppg"))
    model.learn()
    obs = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    actions = model.act(obs)
    assert actions.shape == (6,)
    loaded = PPG.load(model.save(tmp_path / "policy"))
    np.testing.assert_array_equal(loaded.act(obs), actions)
    assert loaded.evaluate(2).mean_return > 0


def test_a_run_can_start_from_its_weights(make_config: MakeConfig) -> None:
    first = train_ppg(make_config(algo="ppg"))
    second = train_ppg(make_config(algo="ppg", init_from=first.checkpoint_path, seed=8))
    assert second.metrics["global_step"] >= 512


def test_images_are_below_the_trunk_and_box_actions_resume_exactly(
    make_config: MakeConfig,
) -> None:
    """Interrupted within a cycle; the encoder of images is the trunk unless layers are set."""
    config = make_config(
        algo="ppg",
        env_id="probe/Camera-v0",
        env_kwargs={"continuous": True},
        num_steps=32,
        total_timesteps=256,
        feature_size=8,
        eval_interval=128,
    )
    whole = train_ppg(config)
    part = train_ppg(config, callbacks=[StopAt(128)])
    assert part.interrupted
    resume_training(part.run_dir)
    assert_same_run(whole.run_dir, part.run_dir)
    policy: Any = PPG.load(whole.run_dir)
    model = policy.policy.module
    sizes = [layer.in_features for layer in (model.actor.layers[0], model.aux_critic.layers[0])]
    assert sizes == [8, 8]
    assert policy.act(np.zeros((36, 36, 1), np.uint8)).shape == (1,)


def test_a_shared_memory_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="shared_lstm"):
        make_config(algo="ppg", shared_lstm=True)


def test_minibatches_that_do_not_divide_the_cycle_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"num_aux_minibatches.*3 \* 2 \* 64 = 384; got 5"):
        make_config(algo="ppg", num_aux_minibatches=5)


def test_the_command_line_trains_both_presets_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--total-timesteps", "1500", "--output-dir", "out", "--eval-episodes", "1"]
    for preset in ("ppg/cartpole", "ppg/acrobot"):
        assert main(["train", preset, *flags]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 2
