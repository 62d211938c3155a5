"""PPG's losses on numbers worked by hand, and what each of its phases may and may not move."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.acceleration import Acceleration
from rl_training.algorithms.ppg import PPG, PPGConfig, ppg_auxiliary_loss, ppg_loss
from rl_training.algorithms.ppo import ppo_loss
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.errors import ConfigError
from rl_training.models.action_heads import CategoricalHead
from rl_training.models.encoders import EncoderConfig
from rl_training.models.mlp_ppg import MLPPPGModel
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress, VectorStep
from state_compare import differences
from test_acceleration import MODES

OBS = ObsSpec({"": ArraySpec((4,), "float32")})
MASKED_OBS = ObsSpec({"seen": ArraySpec((4,), "float32"), "action_mask": ArraySpec((3,), "bool")})
ACTION = ActionSpec("discrete", (), "int64", nvec=(3,), start=(0,))
STEPS, ENVS = 16, 4
HALFWAY = Progress(500, 1000)


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def by_hand() -> dict[str, Tensor]:
    """KL of row 1: 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.5 ln(4/3); of row 2: nothing."""
    return {
        "kl": CategoricalHead((2,), ()).kl(
            torch.tensor([log(0.5, 0.5), log(0.9, 0.1)]),
            torch.tensor([log(0.25, 0.75), log(0.9, 0.1)]),
        ),
        "aux_values": torch.tensor([1.0, 2.0]),
        "new_values": torch.tensor([0.0, 6.0]),
        "returns": torch.tensor([3.0, 5.0]),
    }


def test_auxiliary_loss_by_hand() -> None:
    """Squares of the auxiliary errors: 4 and 9; of the value errors: 9 and 1."""
    losses = ppg_auxiliary_loss(by_hand(), beta_clone=2.0)
    kl = 0.5 * math.log(4 / 3) / 2
    assert losses["aux_value_loss"].item() == pytest.approx(13 / 4)
    assert losses["value_loss"].item() == pytest.approx(10 / 4)
    assert losses["clone_kl"].item() == pytest.approx(kl)
    assert losses["loss"].item() == pytest.approx(13 / 4 + 10 / 4 + 2 * kl)


def test_auxiliary_loss_weighs_rows_by_their_mask() -> None:
    minibatch = {**by_hand(), "mask": torch.tensor([1.0, 0.0])}
    losses = ppg_auxiliary_loss(minibatch, beta_clone=1.0)
    assert losses["aux_value_loss"].item() == pytest.approx(2.0)
    assert losses["value_loss"].item() == pytest.approx(4.5)
    assert losses["clone_kl"].item() == pytest.approx(0.5 * math.log(4 / 3))


def make_model(
    obs: ObsSpec = OBS,
    action: ActionSpec = ACTION,
    hidden_sizes: tuple[int, ...] = (32, 32),
    **kwargs: Any,
) -> MLPPPGModel:
    torch.manual_seed(0)
    return MLPPPGModel(obs, action, hidden_sizes=hidden_sizes, value_sizes=(16,), **kwargs)


def make_rollout(
    seed: int,
    *,
    obs: ObsSpec = OBS,
    action_spec: ActionSpec = ACTION,
    masked: bool = False,
    device: str = "cpu",
) -> RolloutBuffer:
    """Random steps whose reward follows the first two numbers of what is seen."""
    rng = np.random.default_rng(seed)
    dtypes = {key: getattr(torch, leaf.dtype) for key, leaf in obs.leaves.items()}
    buffer = RolloutBuffer(
        STEPS,
        ENVS,
        obs.shape(),
        action_spec.shape,
        obs_dtype=dtypes if obs.is_dict else dtypes[""],
        action_dtype=getattr(torch, action_spec.policy_dtype),
        masked=masked,
        device=device,
    )

    def draw() -> Any:
        seen = rng.normal(size=(ENVS, 4)).astype(np.float32)
        if obs.has_images:
            return {"seen": seen, "camera": rng.integers(0, 256, (ENVS, 1, 36, 36), np.uint8)}
        if not obs.is_dict:
            return seen
        return {"seen": seen, "action_mask": np.tile([True, False, True], (ENVS, 1))}

    now = draw()
    for t in range(STEPS):
        seen = now["seen"] if obs.is_dict else now
        following = draw()
        step = VectorStep(
            obs=following,
            final_obs=draw(),
            reward=5 * np.sin(2 * seen[:, 0]) + seen[:, 1],
            terminated=rng.random(ENVS) < 0.3,
            truncated=rng.random(ENVS) < 0.1,
            valid=np.full(ENVS, not masked or t % 4 != 0),
            episodes=(),
        )
        action = 2 * rng.integers(2, size=ENVS) if obs.has_mask else rng.integers(3, size=ENVS)
        if action_spec.shape:
            action = np.tile(action[:, None], (1, *action_spec.shape)) % 2
        buffer.add(now, action, {}, step)
        now = following
    return buffer


def make_ppg(
    model: MLPPPGModel | None = None, *, acceleration: Acceleration = "eager", **knobs: Any
) -> PPG:
    given = {
        "learning_rate": 3e-3,
        "num_steps": STEPS,
        "gamma": 0.5,
        "policy_phases": 3,
        "num_aux_minibatches": 4,
    }
    generator = torch.Generator().manual_seed(5)
    config = PPGConfig(**{**given, **knobs})
    return PPG(model or make_model(), config, generator=generator, acceleration=acceleration)


def learnt_metrics(ppg: PPG, rollout: RolloutBuffer) -> dict[str, float]:
    ppg.learn(rollout, HALFWAY)
    return ppg.pop_metrics()


def parameters(model: MLPPPGModel, *parts: str) -> Tensor:
    return torch.cat(
        [
            p.detach().clone().flatten()
            for name, p in model.named_parameters()
            if not parts or name.startswith(parts)
        ]
    )


def test_the_policy_phase_is_ppos_own_loss() -> None:
    ppg, rollout = make_ppg(), make_rollout(0)
    ppg.prepare(rollout, HALFWAY)
    batch = rollout.flat()
    full = {**batch, "logprobs": batch["old_logprobs"] - 0.3, "new_values": batch["values"] + 1}
    full["entropy"] = torch.ones(STEPS * ENVS)
    knobs = {"clip_coef": 0.2, "ent_coef": 0.1, "vf_coef": 0.5}
    found, expected = ppg_loss(full, **knobs), ppo_loss(full, **knobs)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_values_never_move_the_trunk_and_auxiliary_values_do() -> None:
    model, obs = make_model(), torch.randn(8, 4)
    trunk = [p for name, p in model.named_parameters() if name.startswith("actor.layers.0")]
    joint = model.joint(obs)
    for value in (model.value(obs), joint.value, model.policy_and_value(obs)[1]):
        assert not any(
            g is not None and g.any()
            for g in torch.autograd.grad(value.sum(), trunk, retain_graph=True, allow_unused=True)
        )
    assert all(g.any() for g in torch.autograd.grad(joint.aux_value.sum(), trunk))


def test_a_policy_phase_leaves_the_auxiliary_head_alone() -> None:
    ppg = make_ppg()
    model: Any = ppg.model
    before, rest = parameters(model, "aux_critic"), parameters(model, "actor", "critic")
    ppg.learn(make_rollout(0), HALFWAY)
    assert torch.equal(parameters(model, "aux_critic"), before)
    assert not torch.equal(parameters(model, "actor", "critic"), rest)
    assert not ppg.auxiliary_step.moments["exp_avg"].any()


def auxiliary_phase(beta_clone: float) -> dict[str, float]:
    """What a phase does to the policy and to both values, on observations it learnt from."""
    ppg = make_ppg(policy_phases=9, aux_epochs=20, beta_clone=beta_clone)
    for seed in range(8):
        ppg.learn(make_rollout(seed), Progress(0, 1000))
    model: Any = ppg.model
    obs = torch.cat([one["obs"] for one in ppg.kept[0]])
    returns = torch.cat([one["returns"] for one in ppg.kept[0]])

    def look() -> tuple[Tensor, float, float]:
        with torch.no_grad():
            now = model.joint(obs)
        errors = [float((v - returns).square().mean()) for v in (now.aux_value, now.value)]
        return now.policy, errors[0], errors[1]

    before, aux_before, value_before = look()
    ppg.auxiliary_update()
    after, aux_after, value_after = look()
    return {
        "kl": float((before.exp() * (before - after)).sum(-1).mean()),
        "aux": aux_after / aux_before,
        "value": value_after / value_before,
    }


def test_an_auxiliary_phase_improves_values_and_keeps_the_policy() -> None:
    kept, free = auxiliary_phase(10.0), auxiliary_phase(0.0)
    assert kept["kl"] < 0.01
    assert kept["aux"] < 0.6
    assert kept["value"] < 0.7
    # It is the cloning that keeps it: values alone would drag the policy along.
    assert free["kl"] > 10 * kept["kl"]


def test_an_auxiliary_phase_comes_after_so_many_policy_phases() -> None:
    ppg = make_ppg(policy_phases=3)
    seen = [learnt_metrics(ppg, make_rollout(i)) for i in range(7)]
    assert [one["auxiliary/phases"] for one in seen] == [0, 0, 1, 1, 1, 2, 2]
    assert ["auxiliary/clone_kl" in one for one in seen] == [False] * 2 + [True] * 5
    losses = [one["auxiliary/aux_value_loss"] for one in seen[2:]]
    assert losses[0] == losses[1] == losses[2] != losses[3] == losses[4]
    assert ppg.auxiliary_phases == 2
    assert len(ppg.kept[0]) == 1


def test_its_steps_are_counted_and_use_the_annealed_rate() -> None:
    ppg = make_ppg(policy_phases=2, aux_epochs=5, num_aux_minibatches=4, update_epochs=3)
    updates = [ppg.learn(make_rollout(i), HALFWAY) for i in range(2)]
    assert updates == [3 * 4, 3 * 4 + 5 * 4]
    assert ppg.auxiliary_step.moments["step"].item() == 5 * 4
    assert ppg.step.moments["step"].item() == 2 * 3 * 4
    assert ppg.auxiliary_step.learning_rate == pytest.approx(3e-3 / 2)


def test_rollouts_are_copied_before_their_memory_is_written_again() -> None:
    ppg, rollout = make_ppg(), make_rollout(0)
    ppg.learn(rollout, HALFWAY)
    obs, returns = rollout.obs.clone(), rollout.returns.clone()  # type: ignore[union-attr]
    for tensor in (rollout.obs, rollout.returns):
        tensor.fill_(-1.0)  # type: ignore[union-attr]
    torch.testing.assert_close(ppg.kept[0][0]["obs"], obs.flatten(0, 1))
    torch.testing.assert_close(ppg.kept[0][0]["returns"], returns.flatten())


def test_without_rollouts_there_is_nothing_to_learn() -> None:
    with pytest.raises(RuntimeError, match="no rollout"):
        make_ppg().auxiliary_update()


@pytest.mark.parametrize("done", range(5))
def test_a_saved_state_goes_on_exactly_wherever_in_the_cycle(done: int) -> None:
    one = make_ppg()
    for i in range(done):
        learnt_metrics(one, make_rollout(i))
    state = copy.deepcopy(one.state_dict())
    torch.manual_seed(99)
    other = make_ppg(MLPPPGModel(OBS, ACTION, hidden_sizes=(32, 32), value_sizes=(16,)))
    other.load_state_dict(state)
    assert len(other.kept[0]) == done % 3
    assert other.auxiliary_phases == done // 3
    for i in range(done, done + 4):
        assert learnt_metrics(one, make_rollout(i)) == learnt_metrics(other, make_rollout(i))
    assert differences(one.state_dict(), other.state_dict()) == []


def test_a_state_is_not_changed_by_learning_on() -> None:
    ppg = make_ppg()
    ppg.learn(make_rollout(0), HALFWAY)
    state = ppg.state_dict()
    ppg.learn(make_rollout(1), HALFWAY)
    assert len(state["kept"]) == 1


def test_rows_that_are_only_resets_are_not_learnt() -> None:
    """What they hold may be anything: both phases end alike."""
    ends = []
    for noise in (0.0, 50.0):
        ppg = make_ppg(policy_phases=1)
        rollout = make_rollout(0, masked=True)
        super(PPG, ppg).learn(rollout, HALFWAY)
        (kept,) = [{k: v.clone() for k, v in rollout.flat().items()}]
        kept["returns"] += noise * (1 - kept["mask"])
        ppg.kept[0] = [{k: kept[k] for k in ("obs", "returns", "mask")}]
        ppg.auxiliary_update()
        ends.append(parameters(ppg.model))  # type: ignore[arg-type]
    assert torch.equal(*ends)
    ppg = make_ppg(policy_phases=2)
    ppg.learn(make_rollout(0, masked=True), HALFWAY)
    assert ppg.kept[0][0]["mask"].mean() == 0.75


def test_illegal_actions_stay_illegal_and_the_kl_finite() -> None:
    ppg = make_ppg(make_model(MASKED_OBS), policy_phases=1)
    metrics = learnt_metrics(ppg, make_rollout(0, obs=MASKED_OBS))
    assert math.isfinite(metrics["auxiliary/clone_kl"])
    assert metrics["auxiliary/clone_kl"] < 0.1
    model: Any = ppg.model
    obs = {"seen": torch.randn(5, 4), "action_mask": torch.tensor([[True, False, True]] * 5)}
    probabilities = model.joint(obs).policy.exp()
    assert (probabilities[:, 1] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))


BOX = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
ACTIONS = {
    "discrete": ACTION,
    "box": BOX,
    "multi_discrete": ActionSpec("multi_discrete", (2,), "int64", nvec=(2, 3), start=(0, 0)),
    "multi_binary": ActionSpec("multi_binary", (3,), "int8"),
}
IMAGES = ObsSpec({"seen": OBS.leaves[""], "camera": ArraySpec((1, 36, 36), "uint8")})


@pytest.mark.parametrize("kind", ACTIONS)
def test_a_cycle_for_every_kind_of_actions(kind: str) -> None:
    """Cloning keeps the policy that values alone would change, a Gaussian's deviation too."""
    found = []
    for beta in (0.0, 10.0):
        model = make_model(action=ACTIONS[kind], log_std_init=-0.5)
        with torch.no_grad():  # the first policy is nearly uniform
            model.actor.layers[-1].weight.mul_(100)  # type: ignore[operator]
        ppg = make_ppg(model, policy_phases=2, aux_epochs=9, beta_clone=beta)
        ppg.learn(make_rollout(0, action_spec=ACTIONS[kind]), HALFWAY)
        found.append(learnt_metrics(ppg, make_rollout(1, action_spec=ACTIONS[kind])))
    assert 0 <= found[1]["auxiliary/clone_kl"] < 0.3 * found[0]["auxiliary/clone_kl"]
    assert found[1]["auxiliary/aux_value_loss"] > 0


@pytest.mark.parametrize("hidden_sizes", [(), (32,)], ids=["encoder alone", "trunk"])
def test_images_have_a_shared_encoder_that_values_do_not_move(
    hidden_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = EncoderConfig(feature_size=16, orthogonal=True)
    model = make_model(IMAGES, hidden_sizes=hidden_sizes, encoder=encoder)
    rollout = make_rollout(0, obs=IMAGES)
    obs = rollout.flat()["obs"]
    joint, shared = model.joint(obs), list(model.encoder.parameters())
    for value in (model.value(obs), joint.value):
        grads = torch.autograd.grad(value.sum(), shared, retain_graph=True, allow_unused=True)
        assert not any(g is not None and g.any() for g in grads)
    assert all(g.any() for g in torch.autograd.grad(joint.aux_value.sum(), shared))
    monkeypatch.setattr("rl_training.algorithms.ppg._IMAGES_AT_ONCE", 10)
    ppg = make_ppg(model, policy_phases=1, aux_epochs=1)
    before = parameters(model, "encoder")
    assert math.isfinite(learnt_metrics(ppg, rollout)["auxiliary/clone_kl"])
    assert ppg.auxiliary_phases == 1
    assert not torch.equal(parameters(model, "encoder"), before)


@pytest.mark.parametrize(("mode", "device"), MODES)
@pytest.mark.parametrize(
    "action", [ACTION, pytest.param(BOX, marks=pytest.mark.full)], ids=["discrete", "box"]
)
def test_modes_agree_over_a_cycle(mode: Acceleration, device: str, action: ActionSpec) -> None:
    def learnt(mode: Acceleration, device: str) -> Tensor:
        knobs = {"learning_rate": 1e-3, "policy_phases": 2, "aux_epochs": 2, "update_epochs": 2}
        model = make_model(action=action).to(device)
        ppg = make_ppg(model, acceleration=mode, **knobs)
        for i in range(2):
            ppg.learn(make_rollout(i, action_spec=action, device=device), HALFWAY)
        assert ppg.auxiliary_phases == 1
        return parameters(model).cpu()

    expected = learnt("eager", "cpu")
    assert (expected - parameters(make_model(action=action))).abs().max() > 1e-3
    torch.testing.assert_close(learnt(mode, device), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("policy_phases", 0),
        ("aux_epochs", 0),
        ("num_aux_minibatches", 0),
        ("beta_clone", -1.0),
        ("beta_clone", math.inf),
        ("hidden_sizes", ()),
        ("value_sizes", (0,)),
    ],
)
def test_impossible_knobs_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo_kwargs.{knob}"):
        PPGConfig(**{knob: value})
