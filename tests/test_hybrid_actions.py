"""Dict and Tuple actions: one row of numbers within, the environment's own structure outside."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from conftest import MakeConfig
from probe_envs import Aim
from rl_training import A2C, check_env
from rl_training.envs import make_vector_env
from rl_training.envs.spaces import action_spec, with_rows_of_actions
from rl_training.errors import ConfigError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.action_heads import HybridHead
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.registry import ALGORITHMS, check_spaces
from rl_training.runtime.callbacks import Callback
from rl_training.types import ACTION_MASK, ActionSpec, ArraySpec, HybridActionSpec, ObsSpec
from state_compare import assert_same_run
from test_resume import StopAt

D: Any = torch.distributions
VECTOR = ObsSpec({"": ArraySpec((3,), "float32")})
HYBRID = [name for name, entry in ALGORITHMS.items() if "hybrid" in entry.actions]


def spec_of(space: spaces.Space[Any]) -> HybridActionSpec:
    class Env(gym.Env[Any, Any]):
        action_space = space

    spec = action_spec(with_rows_of_actions(Env()).action_space)
    assert isinstance(spec, HybridActionSpec)
    return spec


AIM = spec_of(Aim().action_space)


def test_a_row_holds_every_number_of_an_action() -> None:
    """The keys are sorted: force, the switches of ``more``, side."""
    assert (AIM.shape, AIM.nvec, AIM.choices) == ((5,), (2, 2, 3), ((1, 0), (2, 0), (4, 1)))
    rows = AIM.to_env(np.array([[0.5, 1, 0, 1, 2], [9.0, 0, 1, 0, 0]], np.float32))
    assert rows.tolist() == [[40.0, 1, 0, 1, 3], [60.0, 0, 1, 0, 1]]
    one = AIM.joined(rows[0])
    assert Aim().action_space.contains(one)
    assert one["side"] == 3
    assert one["force"].tolist() == [40.0]
    assert [part.tolist() for part in one["more"]] == [[1, 0], [1]]
    assert AIM.row(one).tolist() == rows[0].tolist()
    assert AIM.from_env(rows).tolist() == [[0.5, 1, 0, 1, 2], [1.0, 0, 1, 0, 0]]
    both = AIM.joined(rows)
    assert both["side"].tolist() == [3, 1]
    assert both["more"][0].tolist() == [[1, 0], [0, 1]]
    assert ActionSpec.from_plain(AIM.to_plain()) == AIM


def test_a_tuple_of_actions_is_a_tuple() -> None:
    space = spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (2, 2))))
    one = spec_of(space).joined(np.array([1.0, 0.1, 0.2, 0.3, 0.4]))
    assert isinstance(one, tuple)
    assert space.contains(one)


@pytest.mark.parametrize(
    "plain",
    [
        {"parts": []},
        {"parts": 3},
        {"parts": [[[], AIM.parts[0][1].to_plain()]]},
        {"parts": [[["a"], AIM.to_plain()]]},
        {"parts": [["a"]]},
    ],
)
def test_a_damaged_description_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"part|list"):
        ActionSpec.from_plain(plain)


def test_the_space_is_sampled_compared_and_copied() -> None:
    space: Any = with_rows_of_actions(Aim()).action_space
    space.seed(3)
    same = pickle.loads(pickle.dumps(space))
    assert same == copy.deepcopy(space) == space
    assert space != spaces.Box(-np.inf, np.inf, (5,), np.float64)
    mask = np.array([1, 0, 0, 1, 1, 0, 1], bool)
    rows = np.array([space.sample(mask) for _ in range(60)])
    assert set(rows[:, 1]) == {0.0}
    assert set(rows[:, 2]) == {1.0}
    assert set(rows[:, 4]) == {1.0, 3.0}
    assert all(space.given.contains(AIM.joined(row)) for row in rows)


# -- the distribution ------------------------------------------------------------------------------


def head_and_params(rows: int = 6) -> tuple[HybridHead, torch.Tensor]:
    head = HybridHead(AIM, -0.5)
    return head, torch.randn(rows, head.param_size, generator=torch.Generator().manual_seed(2))


def test_log_probabilities_and_entropies_are_sums_by_hand() -> None:
    """force ~ N(0, 1) at its mean; even choices: of two twice, one switch, and of three."""
    head = HybridHead(AIM, 0.0)
    row = torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0]])
    logprob, entropy = head.logprob_entropy(torch.zeros(1, head.param_size), row, None)
    half_log = 0.5 * math.log(2 * math.pi)
    assert logprob.item() == pytest.approx(-half_log - 3 * math.log(2) - math.log(3))
    assert entropy.item() == pytest.approx(0.5 + half_log + 3 * math.log(2) + math.log(3))
    mask = torch.tensor([[True, True, True, False, True, False, True]])
    logprob, entropy = head.logprob_entropy(torch.zeros(1, head.param_size), row, mask)
    assert logprob.item() == pytest.approx(-half_log - 3 * math.log(2))
    assert entropy.item() == pytest.approx(0.5 + half_log + 3 * math.log(2))


def test_the_distribution_is_the_product_of_torchs() -> None:
    head, params = head_and_params()
    mean, first, second, switch, side = torch.split(params, [1, 2, 2, 1, 3], -1)
    theirs = [
        D.Normal(mean[:, 0], math.exp(-0.5)),
        D.Categorical(logits=first),
        D.Categorical(logits=second),
        D.Bernoulli(logits=switch[:, 0]),
        D.Categorical(logits=side),
    ]
    noise = head.draw_noise((6,), torch.Generator().manual_seed(4))
    actions = head.sample(params, noise, None)
    assert actions.dtype == torch.float32
    logprob, entropy = head.logprob_entropy(params, actions, None)
    columns = actions.unbind(-1)
    expected = sum(one.log_prob(given) for one, given in zip(theirs, columns, strict=True))
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, sum(one.entropy() for one in theirs))
    others = params.flip(0)
    found = head.kl(head.distribution(params, None), head.distribution(others, None))
    of_parts = [
        part.kl(part.distribution(own, None), part.distribution(other, None))
        for part, own, other in zip(
            head._parts(),
            torch.split(params, [1, 4, 1, 3], -1),
            torch.split(others, [1, 4, 1, 3], -1),
            strict=True,
        )
    ]
    torch.testing.assert_close(found, sum(of_parts))
    best = head.mode(params, None)
    assert best[:, 4].tolist() == side.argmax(-1).tolist()
    torch.testing.assert_close(best[:, :1], mean)


def test_samples_have_these_probabilities_and_only_legal_choices() -> None:
    head, params = head_and_params(1)
    count = 20_000
    noise = head.draw_noise((count,), torch.Generator().manual_seed(5))
    mask = torch.tensor([[True, True, False, True, True, False, True]])
    drawn = head.sample(params.expand(count, -1), noise, mask.expand(count, -1))
    assert set(drawn[:, 2].tolist()) == {1.0}
    assert set(drawn[:, 4].tolist()) == {0.0, 2.0}
    odds = torch.softmax(params[0, [6, 8]], -1)
    assert (drawn[:, 4] == 2).float().mean().item() == pytest.approx(odds[1].item(), abs=0.02)
    assert drawn[:, 3].mean().item() == pytest.approx(params[0, 5].sigmoid().item(), abs=0.02)
    assert drawn[:, 0].std().item() == pytest.approx(math.exp(-0.5), rel=0.03)


@pytest.mark.parametrize("greedy", [True, False])
def test_numpy_acts_as_torch_does(greedy: bool) -> None:
    spec = spec_of(spaces.Dict({"n": spaces.Discrete(3), "x": spaces.Box(-1.0, 1.0, (2, 2))}))
    torch.manual_seed(0)
    model = MLPActorCritic(VECTOR, spec)
    act = model.numpy_actor()
    assert act is not None
    obs = torch.randn(7, 3)
    noise = None if greedy else model.head.draw_noise((7,), torch.Generator().manual_seed(1))
    with torch.no_grad():
        params, _ = model.policy(obs)
        expected = (
            model.head.mode(params, None)
            if noise is None
            else model.head.sample(params, noise, None)
        )
    found = act(obs.numpy(), None if noise is None else noise.numpy())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    assert MLPActorCritic(VECTOR, AIM).numpy_actor() is None  # switches and dials act by torch


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "masks"),
    [
        pytest.param(
            algo, masks, marks=[] if (algo, masks) == ("ppo", True) else [pytest.mark.full]
        )
        for algo in HYBRID
        for masks in (False, True)
    ],
)
def test_it_learns_every_part(algo: str, masks: bool, make_config: MakeConfig) -> None:
    knobs: dict[str, Any] = {"num_steps": 8 if algo in ("a2c", "impala") else 32}
    knobs |= {"policy_phases": 8} if algo == "ppg" else {}
    config = make_config(
        algo=algo,
        env_id="probe/Aim-v0",
        env_kwargs={"masks": masks},
        num_envs=8,
        eval_episodes=20,
        learning_rate=3e-3,
        gamma=0.9,
        ent_coef=0.01,
        total_timesteps=8192,
        lr_schedule="linear",
        **knobs,
    )
    trainer = ExperimentManager.setup(config)
    trainer.train()
    # 1 at best; a wrong side or switch costs 1. IMPALA's force is not exact yet.
    assert trainer.metrics["eval/return_min"] > (0.5 if algo == "impala" else 0.9)


class Seen(Callback):
    def __init__(self) -> None:
        self.actions: list[Any] = []

    def on_step(self, trainer: Any, event: Any) -> None:
        self.actions.append(event.actions)


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.full)])
def test_it_resumes_exactly_in_any_vector(vectorization: str, make_config: MakeConfig) -> None:
    config = make_config(
        env_id="probe/Aim-v0",
        vectorization=vectorization,
        total_timesteps=384,
        eval_interval=128,
    )
    whole = ExperimentManager.setup(config).train()
    part = ExperimentManager.setup(config, callbacks=[StopAt(128)]).train()
    assert part.interrupted
    ExperimentManager.resume(part.run_dir).train()
    assert_same_run(whole.run_dir, part.run_dir)


def test_predict_returns_the_structure_of_the_space(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    model = A2C(make_config(algo="a2c", env_id="probe/Aim-v0"))
    seen = Seen()
    model.learn(callbacks=[seen])
    space = Aim().action_space
    assert set(seen.actions[0]) == {"force", "more", "side"}
    assert seen.actions[0]["force"].shape == (2, 1)
    loaded = A2C.load(model.save(tmp_path / "policy"))
    obs = np.ones((4, 1), np.float32)
    for deterministic in (True, False):
        one, state = loaded.predict(obs[0], deterministic=deterministic)
        assert state is None
        assert space.contains(one)
        many = loaded.act(obs, deterministic)
        assert many["side"].shape == (4,)
        assert many["more"][1].shape == (4, 1)
    assert loaded.evaluate(2).mean_return == model.evaluate(2).mean_return
    assert loaded.export(tmp_path / "file", "torch").parity.origin == "recorded from probe/Aim-v0"
    A2C.load(loaded.share(tmp_path / "shared")).act(obs)


def test_others_refuse_them_by_name() -> None:
    for algo in ("dqn", "sac", "td3"):
        with pytest.raises(ConfigError, match=r"not hybrid ones; use ppo, a2c, .* or appo$"):
            check_spaces(algo, VECTOR, AIM)
    report = check_env(Aim, steps=20)
    assert report.ok
    assert set(report.algorithms) == set(HYBRID)
    assert check_env(lambda: Aim(masks=True), steps=20).ok


def test_masks_that_a_method_returns(make_config: MakeConfig) -> None:
    class Masked(Aim):
        def action_masks(self) -> Any:
            return [1, 1, 1, 1, 1, 0, 1]

    env = make_vector_env(make_config(), 1, env_fn=Masked)
    obs, _ = env.reset()
    assert obs[ACTION_MASK].tolist() == [[1, 1, 1, 1, 1, 0, 1]]
    env.close()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"a": spaces.Text(3)}), "Dict or Tuple of them"),
        (spaces.Dict({"a": spaces.Dict({}), "b": spaces.Discrete(2)}), "its entry 'a' is empty"),
        (spaces.Dict({"a": spaces.Box(0, 9, (2,), np.int64)}), "Box \\(of floats\\)"),
    ],
)
def test_parts_that_nothing_takes_are_refused(space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(space)


def test_multi_discrete_actions_of_value_learners_name_the_way_out() -> None:
    dials = ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0))
    message = r"one output for each action, here each combination .* Discrete space; use ppo"
    with pytest.raises(ConfigError, match=message):
        check_spaces("dqn", VECTOR, dials)
