"""SAC and TD3 with memory: losses along sequences, and the states that sequences begin with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MakeConfig
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.recurrent.continuous import ActingMemories
from rl_training.runtime.assembly import build_algorithm
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress

OBS = ObsSpec({"": ArraySpec((3,), "float32")})
ACTION = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
LENGTH, ROWS = 5, 3
KINDS = pytest.mark.parametrize("algo", ["sac+lstm", "sac+gru", "td3+lstm", "td3+gru"])


def make_learner(algo: str, make_config: MakeConfig, **overrides: Any) -> Any:
    config = make_config(
        algo=algo,
        **{
            "sequence_length": LENGTH, "burn_in": 1, "batch_sequences": ROWS, "lstm_size": 4,
            "hidden_sizes": [8], "n_step": 2, **overrides,
        },
    )  # fmt: skip
    learner = build_algorithm(config, OBS, ACTION, torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # targets differ from the networks
        for parameter in learner.module.parameters():
            if parameter.ndim:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return learner


def make_batch(learner: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mask = torch.ones(LENGTH, ROWS)
    mask[0, 1] = 0.0  # burn-in
    mask[3:, 2] = 0.0  # padding
    discounts = torch.full((LENGTH, ROWS), 0.9)
    discounts[2, 2] = 0.0  # terminated there
    return {
        "obs": normal(LENGTH + 1, ROWS, 3),
        "actions": normal(LENGTH, ROWS, 2).tanh(),
        "rewards": normal(LENGTH, ROWS),
        "discounts": discounts,
        "mask": mask,
        "state": 0.5 * normal(ROWS, learner.state_size),
        "noise": normal(*learner.noise_shape),
    }


def walked(actor: Any, batch: dict[str, Tensor], row: int) -> list[Tensor]:
    """Parameters of the actions at every observation of a sequence, one at a time."""
    state, found = batch["state"][row : row + 1, : actor.state_size], []
    for seen in batch["obs"][:, row]:
        params, _, state = actor.policy_step(seen[None], state)
        found.append(params)
    return found


def valued(critics: Any, batch: dict[str, Tensor], row: int) -> list[Any]:
    """Functions from an action to the critics' values, one for every observation."""
    state, found = batch["state"][row : row + 1, -critics.state_size :], []
    for seen in batch["obs"][:, row]:
        outputs, state = critics.remember(seen[None], state)
        found.append(
            lambda action, outputs=outputs: critics.net(torch.cat([outputs, action], 1)).flatten()
        )
    return found


def losses_step_by_step(learner: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The losses of critics and policy from single steps of single rows, with sums over them."""
    is_sac = hasattr(learner.model, "temperature")
    model = learner.model
    target = learner.target.module if is_sac else learner.target_critics.module
    next_actor = model.actor if is_sac else learner.target_actor.module
    alpha = learner._ent_coef() if is_sac else torch.tensor(0.0)
    critic_loss, actor_loss = torch.zeros(()), torch.zeros(())
    for row in range(ROWS):
        own, q = walked(model.actor, batch, row), valued(model.critics, batch, row)
        following, next_q = walked(next_actor, batch, row), valued(target, batch, row)
        values = []
        for t in range(LENGTH):
            if is_sac:
                noise = batch["noise"][0, t, row : row + 1]
                action, logprob = model.actor.head.sample_logprob(following[t + 1], noise)
                values.append(next_q[t + 1](action).min() - alpha * logprob.squeeze())
            else:
                noise = (0.2 * batch["noise"][t, row : row + 1]).clamp(-0.5, 0.5)
                action = (following[t + 1].tanh() + noise).clamp(-1, 1)
                values.append(next_q[t + 1](action).min())
        r, d, mask = (batch[name][:, row] for name in ("rewards", "discounts", "mask"))
        for t in range(LENGTH):
            if not mask[t]:
                continue
            ahead = values[t]
            if t + 1 < LENGTH and mask[t + 1]:
                ahead = r[t + 1] + d[t + 1] * values[t + 1]
            wanted = (r[t] + d[t] * ahead).detach()
            error = q[t](batch["actions"][t, row : row + 1]) - wanted
            critic_loss = critic_loss + 0.5 * error.square().sum()
            if is_sac:
                noise = batch["noise"][1, t, row : row + 1]
                action, logprob = model.actor.head.sample_logprob(own[t], noise)
                actor_loss = actor_loss + alpha * logprob.squeeze() - q[t](action).min()
            else:
                actor_loss = actor_loss - q[t](own[t].tanh())[0]
    return critic_loss / (LENGTH * ROWS), actor_loss / (LENGTH * ROWS)


@KINDS
def test_losses_along_sequences_are_those_step_by_step(algo: str, make_config: MakeConfig) -> None:
    """And so are their gradients, which reach the memories through time."""
    learner = make_learner(algo, make_config)
    batch = make_batch(learner)
    critic_loss, actor_loss = losses_step_by_step(learner, batch)
    found = learner.actor_loss(batch)
    pairs = [
        (learner.critic_loss(batch)["loss"], critic_loss, learner.model.critics),
        (found.get("actor_loss", found["loss"]), actor_loss, learner.model.actor),
    ]
    for ours, theirs, module in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        parameters = list(module.parameters())
        mine, other = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
        assert all(gradient.abs().max() > 0 for gradient in mine)
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@KINDS
def test_numpy_acts_as_torch_does(algo: str, make_config: MakeConfig) -> None:
    learner = make_learner(algo, make_config)
    acting = ActingMemories(learner.model.actor, learner.model.critics)
    act = acting.numpy_actor()
    assert act is not None
    state = torch.zeros(ROWS, acting.state_size)
    other = state.numpy()
    for t, obs in enumerate(make_batch(learner)["obs"]):
        noise = torch.randn(ROWS, 2) if t % 2 else None
        with torch.no_grad():
            actions, state, _ = acting.act(obs, state, noise)
        same, other = act(obs.numpy(), other, None if noise is None else noise.numpy())
        np.testing.assert_allclose(same, actions.numpy(), atol=1e-5)
        np.testing.assert_allclose(other, state.numpy(), atol=1e-6)


@pytest.mark.parametrize("learning_starts", [0, 1000])
def test_stored_states_are_those_of_both_memories(
    learning_starts: int, make_config: MakeConfig
) -> None:
    """Also while actions are uniform; every sequence begins with what both remembered there."""
    config = make_config(
        algo="td3+gru", num_envs=2, sequence_length=4, burn_in=0, learning_starts=learning_starts,
        env_id="probe/Recall-v0", env_kwargs={"continuous": True, "delay": 10},
    )  # fmt: skip
    trainer: Any = ExperimentManager.setup(config)
    trainer.source.collect(trainer.replay, 60, Progress(0, 2000))
    acting = ActingMemories(trainer.learner.model.actor, trainer.learner.model.critics)
    batch = trainer.replay.sample(64, torch.Generator().manual_seed(0))
    later = ~batch["episode_starts"][0]
    assert later.any()
    assert not batch["state"][~later].any()
    split = trainer.learner.model.actor.state_size
    assert batch["state"][later][:, :split].any(1).all()
    assert batch["state"][later][:, split:].any(1).all()
    # Weights have not changed: the state after a whole sequence is that of the one behind it.
    known = {tuple(row.round(decimals=4).tolist()) for row in batch["state"][later]}
    whole = batch["mask"].all(0) & (batch["discounts"][-1] > 0)
    state = batch["state"]
    with torch.no_grad():
        for obs in batch["obs"][:-1]:
            _, state, _ = acting.act(obs, state, None)
    after = {tuple(row.round(decimals=4).tolist()) for row in state[whole]}
    assert after & known
    trainer.close()


def test_a_policy_acts_without_the_memory_of_its_critics(make_config: MakeConfig) -> None:
    from rl_training import SAC

    model = SAC(make_config(algo="sac+lstm"))
    action, state = model.predict(np.zeros(3, np.float32))
    assert action.shape == (1,)
    assert state.shape == (2 * model.config.algo_kwargs.lstm_size,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"burn_in": 16}, "burn_in' must be 0 to sequence_length - 1 = 15"),
        ({"n_step": 17}, "n_step' must be at most sequence_length = 16"),
        ({"replay_device": "accelerator"}, "replay_device' must be cpu"),
        ({"acceleration": "compile"}, "'acceleration' must be eager with memory: lstm"),
        ({"buffer_size": 60}, "buffer_size' must be at least 2 num_envs sequence_length"),
        ({"memory_span": 2}, "memory_span' must be above 2"),
        ({"algo": "dqn+lstm", "prioritized": True}, "prioritized' must be false with memory"),
        ({"algo": "dqn+lstm", "dueling": True}, "dueling' must be false with memory: lstm"),
        ({"engine": "ray", "lag": "async"}, "'lag' must be 0 with memory: lstm"),
    ],
)
def test_what_does_not_fit_sequences_is_refused(
    settings: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**{"algo": "sac+lstm", **settings})
