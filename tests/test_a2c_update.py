"""A2C's loss on numbers worked by hand, and its learning phase against plain torch."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from rl_training.algorithms.a2c import A2C, A2CConfig, a2c_loss
from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.ppo import OnPolicyConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError, Paused
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.types import (
    ActionSpec,
    Array,
    ArraySpec,
    ObsSpec,
    Progress,
    RunSettings,
    VectorStep,
)
from state_compare import differences

STEPS, ENVS = 5, 4
OBS = ObsSpec({"": ArraySpec((4,), "float32")})
DISCRETE = ActionSpec("discrete", (), "int64", nvec=(3,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
START = Progress(0, 1000)
COEFFICIENTS: dict[str, float] = {"ent_coef": 0.1, "vf_coef": 0.5}
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])


def by_hand(**changes: Tensor) -> dict[str, Tensor]:
    batch = {
        "logprobs": torch.tensor([-1.0, -2.0, -0.5, -4.0]),
        "advantages": torch.tensor([2.0, -1.0, 4.0, 0.5]),
        "new_values": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "returns": torch.tensor([0.0, 2.0, 5.0, 7.0]),
        "entropy": torch.tensor([0.1, 0.2, 0.3, 0.6]),
    }
    return {**batch, **changes}


def test_every_part_of_the_loss_by_hand() -> None:
    """A logprob is -2, 2, -2, -2: mean -1. Errors 1, 0, -2, -3: squares 14. Entropies 1.2."""
    losses = a2c_loss(by_hand(), **COEFFICIENTS)
    assert losses["policy_loss"].item() == pytest.approx(1.0)
    assert losses["value_loss"].item() == pytest.approx(14 / 4 / 2)
    assert losses["entropy_loss"].item() == pytest.approx(0.3)
    assert losses["loss"].item() == pytest.approx(1.0 + 0.5 * 1.75 - 0.1 * 0.3)
    assert list(losses) == ["loss", "policy_loss", "value_loss", "entropy_loss"]


def test_masked_rows_have_no_weight_by_hand() -> None:
    """Without the second row: -2, -2, -2; squares 1, 4, 9; entropies 0.1, 0.3, 0.6."""
    losses = a2c_loss({**by_hand(), "mask": MASK}, **COEFFICIENTS)
    assert losses["policy_loss"].item() == pytest.approx(2.0)
    assert losses["value_loss"].item() == pytest.approx(14 / 3 / 2)
    assert losses["entropy_loss"].item() == pytest.approx(1 / 3)
    assert losses["loss"].item() == pytest.approx(2.0 + 0.5 * 14 / 6 - 0.1 / 3)


def test_a_mask_of_zeros_gives_no_loss() -> None:
    losses = a2c_loss({**by_hand(), "mask": torch.zeros(4)}, **COEFFICIENTS)
    assert all(loss.item() == 0.0 for loss in losses.values())


def test_gradients_by_hand() -> None:
    leaves = {k: by_hand()[k].requires_grad_() for k in ("logprobs", "new_values", "entropy")}
    loss = a2c_loss({**by_hand(**leaves), "mask": MASK}, **COEFFICIENTS)["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {
        "logprobs": [-2 / 3, 0.0, -4 / 3, -0.5 / 3],
        "new_values": [0.5 / 3, 0.0, 0.5 * -2 / 3, 0.5 * -3 / 3],
        "entropy": [-0.1 / 3, 0.0, -0.1 / 3, -0.1 / 3],
    }
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.tolist() == pytest.approx(expected[name]), name


# -- the learning phase ----------------------------------------------------------------------------


def make_model(action: ActionSpec = DISCRETE, **kwargs: Any) -> MLPActorCritic:
    torch.manual_seed(0)
    return MLPActorCritic(OBS, action, hidden_sizes=(16, 16), **kwargs)


def make_rollout(action: ActionSpec = DISCRETE, seed: int = 1, **kwargs: Any) -> RolloutBuffer:
    """Random transitions with terminations and truncations."""
    rng = np.random.default_rng(seed)
    buffer = RolloutBuffer(
        *(STEPS, ENVS, (4,), action.shape),
        action_dtype=getattr(torch, action.policy_dtype),
        **kwargs,
    )
    observations = rng.normal(size=(STEPS + 1, ENVS, 4)).astype(np.float32)
    for t in range(STEPS):
        chosen: Array = (
            rng.normal(size=(ENVS, *action.shape)).astype(np.float32)
            if action.kind == "box"
            else rng.integers(action.nvec[0], size=ENVS)
        )
        step = VectorStep(
            obs=observations[t + 1],
            final_obs=rng.normal(size=(ENVS, 4)).astype(np.float32),
            reward=rng.normal(size=ENVS) + observations[t, :, 0],
            terminated=rng.random(ENVS) < 0.2,
            truncated=rng.random(ENVS) < 0.2,
            valid=np.arange(ENVS) != t if buffer.masked else np.ones(ENVS, bool),
            episodes=(),
        )
        buffer.add(observations[t], chosen, {}, step)
    assert buffer.truncated_observations() is not None
    return buffer


def make_a2c(
    model: MLPActorCritic | None = None, acceleration: Acceleration = "eager", **knobs: Any
) -> A2C:
    return A2C(model or make_model(), A2CConfig(**knobs), acceleration=acceleration)


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().clone().flatten() for p in module.parameters()])


def n_step_targets(model: MLPActorCritic, rollout: RolloutBuffer, gamma: float) -> Tensor:
    """Discounted rewards up to the end of the episode or rollout, and the value after it."""
    targets = torch.zeros(STEPS, ENVS)
    for env in range(ENVS):
        following = float(model.value(rollout.next_inputs())[env])
        for t in reversed(range(STEPS)):
            if rollout.dones[t, env]:
                following = float(rollout.bootstrap[t, env])
            following = float(rollout.rewards[t, env]) + gamma * following
            targets[t, env] = following
    return targets.flatten()


def plain_update(
    model: MLPActorCritic,
    optimizer: torch.optim.Optimizer,
    rollout: RolloutBuffer,
    config: OnPolicyConfig,
) -> None:
    """The same update with torch's own distributions, optimizer and gradient clipping."""
    obs, actions = rollout.flat()["obs"], rollout.flat()["actions"]
    valid = rollout.valid.flatten() if rollout.masked else torch.ones(STEPS * ENVS, dtype=bool)  # type: ignore[call-overload]
    with torch.no_grad():
        returns = n_step_targets(model, rollout, config.gamma)
        advantages = (returns - model.value(obs))[valid]
    if config.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    outputs = model.actor(obs[valid])
    policy: Any
    if actions.dtype == torch.int64:
        policy = Categorical(logits=outputs)
        logprob, entropy = policy.log_prob(actions[valid]), policy.entropy()
    else:
        policy = Normal(outputs, cast("Any", model).head.log_std.exp())
        logprob = policy.log_prob(actions[valid]).sum(-1)
        entropy = policy.entropy().sum(-1)
    policy_loss = -(advantages * logprob).sum() / valid.sum()
    value_loss = nn.functional.mse_loss(model.value(obs[valid]), returns[valid]) / 2
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"norm_adv": True, "ent_coef": 0.02, "vf_coef": 0.3, "gamma": 0.9, "max_grad_norm": 0.1}],
    ids=["defaults", "other settings"],
)
def test_three_rollouts_agree_with_plain_torch(
    knobs: dict[str, Any], action: ActionSpec, masked: bool
) -> None:
    ours, theirs = make_model(action), make_model(action)
    a2c = make_a2c(ours, **knobs)
    rmsprop = torch.optim.RMSprop(theirs.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    before = parameters(ours)
    for seed in range(3):
        rollout = make_rollout(action, seed, masked=masked)
        assert a2c.learn(rollout, START) == 1
        plain_update(theirs, rmsprop, rollout, a2c.config)
    assert (parameters(ours) - before).abs().max() > 1e-3
    torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=0, atol=2e-5)


def test_lambda_below_one_shortens_the_returns() -> None:
    """With lambda 0 an advantage is the one-step error."""
    a2c, rollout = make_a2c(gae_lambda=0.0), make_rollout()
    a2c.learn(rollout, START)
    values = torch.cat((rollout.values[1:], make_model().value(rollout.next_obs)[None])).detach()
    following = (1 - rollout.dones) * values + rollout.bootstrap
    torch.testing.assert_close(rollout.returns, rollout.rewards + 0.99 * following)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_updates_agree_with_eager_ones(masked: bool) -> None:
    ends = []
    modes: tuple[Acceleration, ...] = ("eager", "compile")
    for acceleration in modes:
        a2c = make_a2c(acceleration=acceleration, lr_schedule="linear")
        for seed in range(3):
            a2c.learn(make_rollout(seed=seed, masked=masked), Progress(seed, 4))
        ends.append(parameters(a2c.module))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-5)


def test_metrics_are_of_the_one_update_and_the_rate_follows_its_schedule() -> None:
    a2c, rollout = make_a2c(lr_schedule="linear"), make_rollout()
    a2c.learn(rollout, Progress(250, 1000))
    metrics = a2c.pop_metrics()
    names = ("loss", "policy_loss", "value_loss", "entropy", "explained_variance")
    assert list(metrics) == [*(f"losses/{name}" for name in names), "losses/learning_rate"]
    assert metrics["losses/learning_rate"] == pytest.approx(7e-4 * 0.75)
    expected = make_a2c().loss(rollout.flat())
    expected["entropy"] = expected["entropy_loss"]
    for name in names[:-1]:
        assert metrics[f"losses/{name}"] == pytest.approx(expected[name].item(), rel=1e-5)
    assert a2c.pop_metrics() == {}


def test_statistics_of_observations_change_after_the_update() -> None:
    a2c = make_a2c(make_model(normalize_obs=True))
    rollout = make_rollout(masked=True)
    a2c.learn(rollout, START)
    counted = [float(v) for k, v in a2c.module.state_dict().items() if k.endswith("count")]
    assert counted == [pytest.approx(float(rollout.valid.sum()))]


def test_a_stop_before_the_update_leaves_the_weights_alone() -> None:
    a2c = make_a2c()
    before = parameters(a2c.module)
    with pytest.raises(Paused):
        a2c.learn(make_rollout(), START, lambda: True)
    assert torch.equal(parameters(a2c.module), before)
    assert a2c.pop_metrics() == {}


def test_a_saved_state_continues_exactly() -> None:
    one = make_a2c()
    one.learn(make_rollout(seed=0), START)
    state = copy.deepcopy(one.state_dict())
    other = make_a2c(MLPActorCritic(OBS, DISCRETE, hidden_sizes=(16, 16)))
    other.load_state_dict(state)
    for a2c in (one, other):
        a2c.learn(make_rollout(seed=1), START)
    assert differences(one.state_dict(), other.state_dict()) == []


def test_advantages_of_a_single_transition_cannot_be_standardised() -> None:
    def run(num_envs: int) -> RunSettings:
        return cast("RunSettings", SimpleNamespace(num_envs=num_envs, acceleration="eager"))

    config = A2CConfig(num_steps=1, norm_adv=True)
    config.check_run(run(2))
    with pytest.raises(ConfigError, match=r"algo_kwargs\.norm_adv.*one transition"):
        config.check_run(run(1))
    A2CConfig(num_steps=1).check_run(run(1))
