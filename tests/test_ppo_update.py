"""PPO's loss on numbers worked by hand, and its learning phase against plain torch."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.advantages import combine_minibatches
from rl_training.algorithms.gradient_step import GradientStep
from rl_training.algorithms.metrics import explained_variance
from rl_training.algorithms.ppo import PPO, PPOConfig, ppo_loss
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.types import ActionSpec, Array, ArraySpec, ObsSpec, Progress, VectorStep

DISCRETE = ActionSpec("discrete", (), "int64", nvec=(3,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
COEFFICIENTS: dict[str, Any] = {"clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5}
START = Progress(0, 1000)

# Ratios on both sides of the clip, with advantages of both signs, and one inside it.
RATIOS = [1.5, 1.5, 0.5, 0.5, 1.1]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0, 2.0]


def by_hand(**changes: Tensor) -> dict[str, Tensor]:
    minibatch = {
        "logprobs": torch.tensor([math.log(r) for r in RATIOS]) - 1.0,
        "old_logprobs": torch.full((5,), -1.0),
        "advantages": torch.tensor(ADVANTAGES),
        "new_values": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        "values": torch.tensor([0.5, 1.0, 3.0, 5.0, 4.9]),
        "returns": torch.tensor([0.0, 2.0, 5.0, 4.0, 1.0]),
        "entropy": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    }
    return {**minibatch, **changes}


def test_policy_loss_clips_only_what_would_profit() -> None:
    """min(r A, clip(r) A) is 1.2 (clipped), -1.5, 0.5, -0.8 (clipped), 2.2; their mean 0.32."""
    losses = ppo_loss(by_hand(), **COEFFICIENTS)
    assert losses["policy_loss"].item() == pytest.approx(-0.32)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.5, 1.0, 1.2),
        (1.5, -1.0, -1.5),
        (0.5, 1.0, 0.5),
        (0.5, -1.0, -0.8),
        (1.1, 2.0, 2.2),
        (0.9, -2.0, -1.8),
        (1.0, 3.0, 3.0),
    ],
)
def test_policy_loss_of_one_row(ratio: float, advantage: float, objective: float) -> None:
    row = {name: tensor[:1] for name, tensor in by_hand().items()}
    row["logprobs"] = row["old_logprobs"] + math.log(ratio)
    row["advantages"] = torch.tensor([advantage])
    assert ppo_loss(row, **COEFFICIENTS)["policy_loss"].item() == pytest.approx(-objective)


def test_value_loss_is_half_the_mean_square() -> None:
    """Errors 1, 0, -2, 0, 4: squares 21 over 5 rows, halved."""
    assert ppo_loss(by_hand(), **COEFFICIENTS)["value_loss"].item() == pytest.approx(2.1)


def test_clipped_value_loss_takes_the_worse_of_both() -> None:
    """Clipped predictions 0.7, 1.2, 3, 4.8, 5: the worse squares are 1, 0.64, 4, 0.64, 16."""
    losses = ppo_loss(by_hand(), **COEFFICIENTS, clip_vloss=True)
    assert losses["value_loss"].item() == pytest.approx(22.28 / 10)
    assert losses["loss"].item() == pytest.approx(-0.32 + 0.5 * 2.228 - 0.01 * 0.3)


def test_entropy_kl_clip_fraction_and_total() -> None:
    losses = ppo_loss(by_hand(), **COEFFICIENTS)
    assert losses["entropy_loss"].item() == pytest.approx(0.3)
    kl = sum(r - 1 - math.log(r) for r in RATIOS) / 5
    assert losses["approx_kl"].item() == pytest.approx(kl, rel=1e-5)
    assert losses["clip_fraction"].item() == pytest.approx(0.8)
    assert losses["loss"].item() == pytest.approx(-0.32 + 0.5 * 2.1 - 0.01 * 0.3)


def test_no_move_has_no_kl_and_nothing_clipped() -> None:
    losses = ppo_loss(by_hand(logprobs=torch.full((5,), -1.0)), **COEFFICIENTS)
    assert losses["approx_kl"].item() == 0.0
    assert losses["clip_fraction"].item() == 0.0


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_required_keys_are_there_as_scalars(clip_vloss: bool) -> None:
    losses = ppo_loss(by_hand(), **COEFFICIENTS, clip_vloss=clip_vloss)
    wanted = {"loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction"}
    assert wanted <= set(losses)
    assert all(loss.shape == () for loss in losses.values())


def test_a_tensor_clip_is_the_same_as_a_float() -> None:
    for clip_vloss in (False, True):
        other = {**COEFFICIENTS, "clip_coef": torch.tensor(0.2), "clip_vloss": clip_vloss}
        expected = ppo_loss(by_hand(), **COEFFICIENTS, clip_vloss=clip_vloss)
        for name, loss in ppo_loss(by_hand(), **other).items():
            assert loss.item() == pytest.approx(expected[name].item()), name


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_a_mask_is_the_same_as_dropping_the_rows(clip_vloss: bool) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    masked = ppo_loss({**by_hand(), "mask": mask}, **COEFFICIENTS, clip_vloss=clip_vloss)
    kept = {name: tensor[mask > 0] for name, tensor in by_hand().items()}
    dropped = ppo_loss(kept, **COEFFICIENTS, clip_vloss=clip_vloss)
    whole = ppo_loss(by_hand(), **COEFFICIENTS, clip_vloss=clip_vloss)
    for name, loss in masked.items():
        assert loss.item() == pytest.approx(dropped[name].item(), rel=1e-5), name
        assert loss.item() != pytest.approx(whole[name].item(), rel=1e-3), name


def test_a_mask_of_ones_changes_nothing_and_one_of_zeros_gives_no_loss() -> None:
    whole = ppo_loss(by_hand(), **COEFFICIENTS)
    ones = ppo_loss({**by_hand(), "mask": torch.ones(5)}, **COEFFICIENTS)
    zeros = ppo_loss({**by_hand(), "mask": torch.zeros(5)}, **COEFFICIENTS)
    for name, loss in whole.items():
        assert ones[name].item() == pytest.approx(loss.item(), rel=1e-6), name
        assert zeros[name].item() == 0.0, name


def test_no_gradient_passes_through_a_clipped_ratio() -> None:
    """d policy_loss / d logprob = -A r / n where the unclipped term is the smaller one, else 0."""
    logprobs = by_hand()["logprobs"].requires_grad_()
    ppo_loss(by_hand(logprobs=logprobs), **COEFFICIENTS)["policy_loss"].backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    expected = [0.0, 1.5 / 5, -0.5 / 5, 0.0, -2.2 / 5]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_gradients_of_value_and_entropy_and_of_the_metrics() -> None:
    new_values = by_hand()["new_values"].requires_grad_()
    entropy = by_hand()["entropy"].requires_grad_()
    logprobs = by_hand()["logprobs"].requires_grad_()
    minibatch = by_hand(new_values=new_values, entropy=entropy, logprobs=logprobs)
    losses = ppo_loss(minibatch, **COEFFICIENTS)
    losses["loss"].backward()  # type: ignore[no-untyped-call]
    assert new_values.grad is not None
    assert entropy.grad is not None
    assert new_values.grad.tolist() == pytest.approx([0.5 * e / 5 for e in (1, 0, -2, 0, 4)])
    assert entropy.grad.tolist() == pytest.approx([-0.01 / 5] * 5)
    assert not losses["approx_kl"].requires_grad
    assert not losses["clip_fraction"].requires_grad


def test_no_gradient_passes_through_a_clipped_value() -> None:
    """Rows 2 and 4 count the clipped prediction, which the new value cannot move."""
    new_values = by_hand()["new_values"].requires_grad_()
    losses = ppo_loss(by_hand(new_values=new_values), **COEFFICIENTS, clip_vloss=True)
    losses["value_loss"].backward()  # type: ignore[no-untyped-call]
    assert new_values.grad is not None
    # Row 3 stands still and row 5 moves within the clip: both terms are the same, and shared.
    assert new_values.grad.tolist() == pytest.approx([1 / 5, 0.0, -2 / 5, 0.0, 4 / 5])


def test_masked_rows_have_no_gradient() -> None:
    leaves = {k: by_hand()[k].requires_grad_() for k in ("logprobs", "new_values", "entropy")}
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    loss = ppo_loss({**by_hand(**leaves), "mask": mask}, **COEFFICIENTS)["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad[mask == 0].tolist() == [0.0, 0.0], name
        assert leaf.grad.abs().sum() > 0, name


def normalized(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """The standardised advantages of one minibatch."""
    minibatch = {"advantages": advantages} | ({} if mask is None else {"mask": mask})
    ((result,),) = combine_minibatches([[minibatch]], norm_adv=True)
    standardised: Tensor = result["advantages"]
    return standardised


def test_advantages_are_standardised_as_by_torch() -> None:
    """By merged moments: the same as by mean and std to rounding, each minibatch for itself."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(3, 64, generator=generator, dtype=torch.float64) * 7 + 3
    found = combine_minibatches([[{"advantages": row} for row in drawn]], norm_adv=True)
    for row, (one,) in zip(drawn, found, strict=True):
        expected = (row - row.mean()) / (row.std() + 1e-8)
        torch.testing.assert_close(one["advantages"], expected, rtol=1e-12, atol=1e-12)


def test_normalized_advantages_have_mean_0_and_deviation_1() -> None:
    """Mean 3, unbiased variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5."""
    normal = normalized(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), None)
    assert normal.tolist() == pytest.approx([d / math.sqrt(2.5) for d in (-2, -1, 0, 1, 2)])


def test_normalized_advantages_over_a_mask_are_those_of_the_rows_kept() -> None:
    advantages = torch.tensor([1.0, 100.0, 3.0, -50.0, 8.0])
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    normal = normalized(advantages, mask)
    expected = normalized(advantages[mask > 0], None)
    torch.testing.assert_close(normal[mask > 0], expected)
    torch.testing.assert_close(normalized(advantages, torch.ones(5)), normalized(advantages, None))


@pytest.mark.parametrize("mask", [torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 0.0])])
def test_normalizing_hardly_any_rows_stays_finite(mask: Tensor) -> None:
    assert torch.isfinite(normalized(torch.tensor([5.0, -2.0, 0.0, 1.0]), mask)).all()


def test_equal_advantages_normalize_to_zero() -> None:
    for mask in (None, torch.ones(3)):
        assert normalized(torch.full((3,), 4.0), mask).tolist() == [0.0, 0.0, 0.0]


def test_explained_variance_of_known_cases() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def of(values: Tensor, returns: Tensor = returns, **extra: Tensor) -> float:
        return float(explained_variance([{"returns": returns, "values": values, **extra}]))

    assert of(returns) == pytest.approx(1.0)
    assert of(returns + 10.0) == pytest.approx(1.0)
    assert of(torch.full((4,), 7.0)) == pytest.approx(0.0)
    assert of(-returns) == pytest.approx(-3.0)
    assert of(torch.tensor([1.5, 1.5, 3.5, 3.5])) == pytest.approx(1 - 0.25 / 1.25)
    assert of(returns, torch.full((4,), 2.0)) == 0.0
    spoilt = torch.tensor([1.0, 2.0, 3.0, -99.0])
    assert of(spoilt, mask=torch.tensor([1.0, 1.0, 1.0, 0.0])) == pytest.approx(1.0)
    assert of(spoilt) < -10


def make_model(action: ActionSpec = DISCRETE, seed: int = 0, **kwargs: Any) -> MLPActorCritic:
    torch.manual_seed(seed)
    spec = ObsSpec({"": ArraySpec((4,), "float32")})
    return MLPActorCritic(spec, action, hidden_sizes=(16, 16), **kwargs)


def make_rollout(
    action: ActionSpec = DISCRETE, seed: int = 1, steps: int = 16, envs: int = 4, **kwargs: Any
) -> RolloutBuffer:
    """Random transitions with a few terminations and truncations."""
    rng = np.random.default_rng(seed)
    buffer = RolloutBuffer(
        steps,
        envs,
        (4,),
        action.shape,
        action_dtype=getattr(torch, action.policy_dtype),
        **kwargs,
    )
    observations = rng.normal(size=(steps + 1, envs, 4)).astype(np.float32)
    for t in range(steps):
        chosen: Array = (
            rng.normal(size=(envs, *action.shape)).astype(np.float32)
            if action.kind == "box"
            else rng.integers(action.nvec[0], size=envs)
        )
        step = VectorStep(
            obs=observations[t + 1],
            final_obs=rng.normal(size=(envs, 4)).astype(np.float32),
            reward=rng.normal(size=envs) + observations[t, :, 0],
            terminated=rng.random(envs) < 0.1,
            truncated=rng.random(envs) < 0.1,
            valid=np.ones(envs, bool),
            episodes=(),
        )
        buffer.add(observations[t], chosen, {}, step)
    assert buffer.truncated_observations() is not None
    return buffer


def make_ppo(
    model: MLPActorCritic | None = None,
    *,
    seed: int = 5,
    acceleration: Acceleration = "eager",
    **knobs: Any,
) -> PPO:
    config = PPOConfig(**{"learning_rate": 1e-3, "num_steps": 16, **knobs})
    generator = torch.Generator().manual_seed(seed)
    return PPO(model or make_model(), config, generator=generator, acceleration=acceleration)


def learnt_metrics(ppo: PPO, rollout: RolloutBuffer, progress: Progress) -> dict[str, float]:
    ppo.learn(rollout, progress)
    return ppo.pop_metrics()


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().clone().flatten() for p in module.parameters()])


def test_prepare_fills_what_the_model_says_of_the_rollout() -> None:
    model, rollout = make_model(), make_rollout()
    ppo = make_ppo(model, gamma=0.9, gae_lambda=0.8)
    ppo.prepare(rollout, START)
    flat = rollout.flat()
    with torch.no_grad():
        said = model.evaluate(flat)
        last_value = model.value(rollout.next_obs)
        truncated = rollout.truncated_observations()
        assert truncated is not None
        bootstrap = torch.zeros(64)
        bootstrap[truncated[0]] = model.value(truncated[1])
    torch.testing.assert_close(flat["old_logprobs"], said.logprob)
    torch.testing.assert_close(flat["values"], said.value)
    torch.testing.assert_close(rollout.bootstrap.flatten(), bootstrap)
    following = torch.cat((rollout.values[1:], last_value[None]))
    going_on = 1 - rollout.dones
    delta = rollout.rewards + 0.9 * (going_on * following + rollout.bootstrap) - rollout.values
    torch.testing.assert_close(rollout.advantages[-1], delta[-1])
    torch.testing.assert_close(
        rollout.advantages[:-1], delta[:-1] + 0.72 * going_on[:-1] * rollout.advantages[1:]
    )
    torch.testing.assert_close(rollout.returns, rollout.advantages + rollout.values)


def test_an_epoch_normalizes_advantages_only_where_asked() -> None:
    for norm_adv in (False, True):
        ppo, rollout = make_ppo(norm_adv=norm_adv), make_rollout()
        ppo.prepare(rollout, START)
        order = torch.Generator()
        order.set_state(ppo.generators[0].get_state())
        (batch,) = rollout.iter_minibatches(1, generator=order)
        ((given,),) = ppo.epoch([rollout], 1)
        now = ppo.model.evaluate(batch)
        advantages = batch["advantages"]
        if norm_adv:
            advantages = (advantages - advantages.mean()) / advantages.std()
        full = {
            **batch,
            "advantages": advantages,
            "logprobs": now.logprob,
            "entropy": now.entropy,
            "new_values": now.value,
        }
        expected = ppo_loss(full, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5)
        for name, loss in ppo.loss(given).items():
            torch.testing.assert_close(loss, expected[name], msg=name)


class FakeStep:
    """Counts gradient steps and reports KLs that were decided beforehand."""

    def __init__(self, kls: list[float]) -> None:
        self.kls = kls
        self.taken = 0

    def __call__(self, step: GradientStep, minibatch: Mapping[str, Any]) -> dict[str, Tensor]:
        del step, minibatch
        self.taken += 1
        return {"approx_kl": torch.tensor(self.kls[self.taken - 1])}


@pytest.mark.parametrize(
    ("target_kl", "epochs"), [(None, 4), (0.5, 4), (0.035, 3), (0.025, 2), (0.001, 1)]
)
def test_epochs_end_once_their_mean_kl_is_above_the_target(
    target_kl: float | None, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch means 0.02, 0.03, 0.04, 0.05; single minibatches of 0.1 do not count by themselves."""
    ppo = make_ppo(target_kl=target_kl, update_epochs=4)
    means = (0.02, 0.03, 0.04, 0.05)
    fake = FakeStep([kl for mean in means for kl in (0.1, 0.0, 0.0, 4 * mean - 0.1)])
    monkeypatch.setattr(GradientStep, "__call__", lambda *args: fake(*args))
    assert ppo.learn(make_rollout(), START) == fake.taken == 4 * epochs
    metrics = ppo.pop_metrics()
    assert metrics["losses/epochs"] == epochs
    assert metrics["losses/approx_kl"] == pytest.approx(sum(means[:epochs]) / epochs)


def test_a_real_run_stops_early_for_a_small_target_and_learns_less() -> None:
    moved = {}
    for target_kl in (None, 1e-5):
        ppo = make_ppo(target_kl=target_kl, learning_rate=1e-2)
        before = parameters(ppo.module)
        metrics = learnt_metrics(ppo, make_rollout(), START)
        assert metrics["losses/epochs"] == (4 if target_kl is None else 1)
        moved[target_kl] = float((parameters(ppo.module) - before).norm())
    assert moved[1e-5] < moved[None]


@pytest.mark.parametrize(("done", "left"), [(0, 1.0), (250, 0.75), (900, 0.1), (1000, 0.0)])
def test_learning_rate_falls_linearly_with_progress(done: int, left: float) -> None:
    ppo = make_ppo(learning_rate=1e-3)
    metrics = learnt_metrics(ppo, make_rollout(), Progress(done, 1000))
    assert metrics["losses/learning_rate"] == pytest.approx(1e-3 * left)
    assert ppo.step.learning_rate == pytest.approx(1e-3 * left)


def test_learning_rate_stays_where_annealing_is_off() -> None:
    ppo = make_ppo(anneal_lr=False)
    for done in (0, 500, 1000):
        metrics = learnt_metrics(ppo, make_rollout(), Progress(done, 1000))
        assert metrics["losses/learning_rate"] == 1e-3


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    ppo = make_ppo()
    before = parameters(ppo.module)
    ppo.learn(make_rollout(), Progress(1000, 1000))
    assert torch.equal(parameters(ppo.module), before)


@pytest.mark.parametrize(
    ("anneal", "done", "clip"),
    [(True, 0, 0.2), (True, 500, 0.1), (True, 900, 0.02), (True, 1000, 1e-6), (False, 900, 0.2)],
)
def test_clip_falls_linearly_where_asked(anneal: bool, done: int, clip: float) -> None:
    ppo, rollout = make_ppo(anneal_clip=anneal, clip_vloss=True, norm_adv=False), make_rollout()
    ppo.learn(rollout, Progress(done, 1000))
    batch = rollout.flat()
    batch["old_logprobs"] = batch["old_logprobs"] + torch.linspace(-0.4, 0.4, 64)
    now = ppo.model.evaluate(batch)
    full = {**batch, "logprobs": now.logprob, "entropy": now.entropy, "new_values": now.value}
    for other in (clip, 0.05):
        expected = ppo_loss(full, clip_coef=other, ent_coef=0.01, vf_coef=0.5, clip_vloss=True)
        same = torch.isclose(ppo.loss(batch)["loss"], expected["loss"], rtol=1e-5)
        assert bool(same) is (other == clip)


def plain_update(
    model: MLPActorCritic,
    optimizer: torch.optim.Optimizer,
    minibatch: Mapping[str, Any],
    config: PPOConfig,
) -> float:
    """One step as a textbook has it; returns the gradient norm before clipping."""
    now = model.evaluate(minibatch)
    advantages = minibatch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    full = {**minibatch, "advantages": advantages, "logprobs": now.logprob}
    full |= {"entropy": now.entropy, "new_values": now.value}
    loss = ppo_loss(
        full, clip_coef=config.clip_coef, ent_coef=config.ent_coef, vf_coef=config.vf_coef
    )["loss"]
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("max_grad_norm", [1e-4, 0.5, 1e6])
def test_learn_is_clip_grad_norm_and_adam_on_a_plain_copy(
    action: ActionSpec, max_grad_norm: float
) -> None:
    """Parameters within 1e-6 after two rollouts, whether every gradient is clipped or none is."""
    model = make_model(action)
    copied = copy.deepcopy(model)
    ppo = make_ppo(model, max_grad_norm=max_grad_norm, anneal_lr=False)
    optimizer = torch.optim.Adam(copied.parameters(), lr=1e-3, eps=1e-5)
    order = torch.Generator().manual_seed(5)
    before = parameters(copied)
    norms: list[float] = []
    for seed in (1, 2):
        rollout, other = make_rollout(action, seed), make_rollout(action, seed)
        ppo.learn(rollout, START)
        PPO(copy.deepcopy(copied), ppo.config).prepare(other, START)
        for _ in range(ppo.config.update_epochs):
            epoch = other.iter_minibatches(ppo.config.num_minibatches, generator=order)
            norms += [plain_update(copied, optimizer, part, ppo.config) for part in epoch]
    assert len(norms) == 32
    if max_grad_norm == 1e-4:
        assert min(norms) > max_grad_norm
    if max_grad_norm == 1e6:
        assert max(norms) < max_grad_norm
    torch.testing.assert_close(parameters(model), parameters(copied), rtol=0, atol=1e-6)
    assert (parameters(copied) - before).abs().max() > 1e-4


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_gradient_applied_is_at_most_the_maximal_norm(scale: float) -> None:
    """d(w . x)/dw = x with norm 5 * scale; the limit is 0.5."""
    layer = nn.Linear(2, 1, bias=False)
    step = GradientStep(
        layer,
        lambda batch: {"loss": layer(batch["x"]).sum()},
        learning_rate=0.1,
        max_grad_norm=0.5,
    )
    before = parameters(layer)
    metrics = step({"x": torch.tensor([[3.0, 4.0]]) * scale})
    expected = [0.3, 0.4] if scale == 1.0 else [0.003, 0.004]
    gradient = step.moments["exp_avg"] / 0.1  # Adam's first average, from zero
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5)
    assert not metrics["loss"].requires_grad
    # Adam's first step has the size of the learning rate, against the gradient.
    assert (parameters(layer) - before).tolist() == pytest.approx([-0.1, -0.1], rel=1e-2)


def test_gradient_step_leaves_frozen_parameters_alone() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in network[0].parameters():
        parameter.requires_grad_(False)
    frozen, free = parameters(network[0]), parameters(network[1])
    step = GradientStep(
        network,
        lambda batch: {"loss": network(batch["x"]).square().sum()},
        learning_rate=0.1,
        max_grad_norm=1.0,
    )
    step({"x": torch.ones(3, 2)})
    assert torch.equal(parameters(network[0]), frozen)
    assert not torch.equal(parameters(network[1]), free)


def test_learn_reports_the_explained_variance_of_the_rollout() -> None:
    ppo, rollout = make_ppo(), make_rollout()
    metrics = learnt_metrics(ppo, rollout, START)
    returns, values = rollout.returns.double(), rollout.values.double()
    expected = 1 - float(np.var((returns - values).numpy()) / np.var(returns.numpy()))
    assert metrics["losses/explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert metrics["losses/explained_variance"] != 0.0


def test_value_loss_falls_when_a_rollout_is_learnt_again_and_again() -> None:
    ppo, rollout = make_ppo(anneal_lr=False, learning_rate=1e-2, gamma=0.0), make_rollout()
    history = [learnt_metrics(ppo, rollout, START)["losses/value_loss"] for _ in range(15)]
    assert history[-1] < 0.3 * history[0]


def test_the_normalizer_sees_valid_rows_after_learning() -> None:
    model = make_model(normalize_obs=True)
    ppo, rollout = make_ppo(model), make_rollout(masked=True)
    rollout.valid[3, 1] = False
    ppo.learn(rollout, START)
    assert isinstance(rollout.obs, Tensor)
    assert model.norm is not None
    norm: Any = model.norm["leaf0"]
    assert norm.count.item() == 63
    torch.testing.assert_close(norm.mean, rollout.obs[rollout.valid].double().mean(0))


def test_what_invalid_rows_hold_changes_nothing() -> None:
    """Reset-only rows follow the end of an episode; their contents must not reach the weights."""
    learnt = []
    for garbage in (0.0, 50.0):
        ppo, rollout = make_ppo(), make_rollout(masked=True)
        rollout.dones[4, 2] = 1.0
        for t, env in ((0, 1), (5, 2)):
            rollout.valid[t, env] = False
            rollout.rewards[t, env] = garbage
            assert isinstance(rollout.obs, Tensor)
            rollout.obs[t, env] = garbage
        metrics = learnt_metrics(ppo, rollout, START)
        learnt.append((parameters(ppo.module), metrics))
    torch.testing.assert_close(learnt[0][0], learnt[1][0], rtol=0, atol=1e-6)
    for name, value in learnt[0][1].items():
        assert learnt[1][1][name] == pytest.approx(value, abs=1e-5), name
    unmasked = make_ppo()
    unmasked.learn(make_rollout(), START)
    assert not torch.allclose(parameters(unmasked.module), learnt[0][0], atol=1e-4)


def learn_thrice(ppo: PPO, action: ActionSpec = DISCRETE) -> Tensor:
    for iteration in range(3):
        ppo.learn(make_rollout(action, seed=iteration), Progress(iteration, 3))
    return parameters(ppo.module)


def test_learning_is_bitwise_the_same_under_a_seed() -> None:
    first, second = learn_thrice(make_ppo()), learn_thrice(make_ppo())
    assert torch.equal(first, second)
    assert not torch.equal(first, learn_thrice(make_ppo(seed=6)))


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    ppo = make_ppo()
    ppo.learn(make_rollout(seed=1), Progress(0, 2))
    other = make_ppo(make_model(seed=99), seed=77)
    other.load_state_dict(copy.deepcopy(ppo.state_dict()))
    for each in (ppo, other):
        each.learn(make_rollout(seed=2), Progress(1, 2))
    assert torch.equal(parameters(ppo.module), parameters(other.module))


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_compiled_equals_eager(action: ActionSpec) -> None:
    """Within 1e-5 after 48 gradient steps, while learning rate and clip both fall."""
    knobs: dict[str, Any] = {"anneal_clip": True, "clip_vloss": True, "clip_coef": 0.05}
    eager = learn_thrice(make_ppo(make_model(action), **knobs), action)
    compiled = learn_thrice(make_ppo(make_model(action), acceleration="compile", **knobs), action)
    fixed = learn_thrice(make_ppo(make_model(action), **{**knobs, "anneal_clip": False}), action)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    assert (fixed - eager).abs().max() > 1e-4, "the clip must matter here"
