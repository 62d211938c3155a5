"""PPG with memory: auxiliary phases on whole sequences, and what each loss may train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conftest import MakeConfig
from rl_training.algorithms.recurrent_ppg import RecurrentPPG
from rl_training.data.sequences import joined_sequences, shuffled_sequences
from rl_training.experiment.manager import ExperimentManager
from rl_training.types import Progress

START = Progress(0, 1000)


def batch_of(first: float, length: int, sequence: list[int]) -> dict[str, Tensor]:
    """Segments whose steps count up from ``first``."""
    steps = first + torch.arange(length * len(sequence)).view(length, -1).float()
    return {
        "obs": steps.unsqueeze(-1),
        "returns": steps,
        "mask": torch.ones_like(steps),
        "state": steps[0].unsqueeze(-1),
        "sequence": torch.tensor(sequence),
    }


def test_joined_sequences_are_padded_and_numbered() -> None:
    joined = joined_sequences([batch_of(10.0, 2, [0, 0, 1]), batch_of(50.0, 3, [0, 1])])
    assert joined["returns"].T.tolist() == [
        [10.0, 13.0, 0.0], [11.0, 14.0, 0.0], [12.0, 15.0, 0.0], [50.0, 52.0, 54.0],
        [51.0, 53.0, 55.0],
    ]  # fmt: skip
    assert joined["mask"].sum(0).tolist() == [2.0, 2.0, 2.0, 3.0, 3.0]
    assert joined["state"].flatten().tolist() == [10.0, 11.0, 12.0, 50.0, 51.0]
    assert joined["sequence"].tolist() == [0, 0, 1, 2, 3]


def test_minibatches_have_every_sequence_once_and_its_segments_together() -> None:
    batch = joined_sequences([batch_of(10.0, 2, [0, 0, 1]), batch_of(50.0, 3, [0, 1])])
    parts = list(shuffled_sequences(batch, 2, torch.Generator().manual_seed(1)))
    assert [len(part["sequence"].unique()) for part in parts] == [2, 2]
    columns = torch.cat([part["returns"][0] for part in parts]).sort().values
    assert columns.tolist() == [10.0, 11.0, 12.0, 50.0, 51.0]
    for part in parts:
        assert torch.equal(part["state"].flatten(), part["returns"][0])
        assert torch.equal(part["obs"].squeeze(-1), part["returns"])
    of_first = [(part["sequence"] == 0).sum().item() for part in parts]
    assert sorted(of_first) == [0, 2]


def trainer_of(make_config: MakeConfig, **settings: Any) -> Any:
    config = make_config(algo="ppg+gru", num_steps=32, policy_phases=2, **settings)
    trainer: Any = ExperimentManager.setup(config)
    assert isinstance(trainer.learner, RecurrentPPG)
    return trainer


def collect(trainer: Any) -> Any:
    trainer.buffer.reset()
    trainer.source.collect(trainer.buffer, trainer.buffer.num_steps, START)
    return trainer.buffer


def test_the_value_loss_trains_the_values_own_memory_alone(make_config: MakeConfig) -> None:
    trainer = trainer_of(make_config)
    learner, rollout = trainer.learner, collect(trainer)
    learner.prepare(rollout, START)
    model, batch = learner.model, rollout.batch()
    names, parameters = zip(*model.named_parameters(), strict=True)
    losses = {
        "value": learner.loss({**batch, "advantages": torch.zeros_like(batch["returns"])}),
        "auxiliary": learner.auxiliary_loss(learner._with_teacher(batch)),
    }
    for kind, loss in (("value", "value_loss"), ("auxiliary", "aux_value_loss")):
        found = torch.autograd.grad(losses[kind][loss], parameters, allow_unused=True)
        moved = {
            name.partition(".")[0]
            for name, one in zip(names, found, strict=True)
            if one is not None and one.abs().max() > 0
        }
        wanted = {"critic_lstm", "critic"} if kind == "value" else {"actor_lstm", "aux_critic"}
        assert moved - {"actor"} == wanted
    assert losses["auxiliary"]["clone_kl"].item() == 0.0  # nothing has moved since it began
    trainer.close()


def test_an_auxiliary_phase_learns_from_every_step_since_the_last(make_config: MakeConfig) -> None:
    trainer = trainer_of(make_config, env_kwargs={"max_episode_steps": 9})
    learner = trainer.learner
    seen: list[Tensor] = []
    learner._run_auxiliary = lambda batch: seen.append(batch["returns"][batch["mask"] > 0])
    learner.auxiliary_metrics.pop = lambda name: {}
    kept = []
    for _ in range(2):
        rollout = collect(trainer)
        learner.learn(rollout, START)
        kept.append(rollout.returns.flatten().clone())
    epochs = learner.config.aux_epochs
    assert learner.auxiliary_phases == 1
    assert torch.equal(torch.cat(seen).sort().values, torch.cat(kept * epochs).sort().values)
    trainer.close()
