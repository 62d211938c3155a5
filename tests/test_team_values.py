"""IDQN, VDN and QMIX: mixers, losses and replays of teams against numbers worked by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import MakeConfig
from rl_training import DQN, IDQN, QMIX, VDN
from rl_training.algorithms.vdn import team_td_loss
from rl_training.config import TrainConfig
from rl_training.data.replay_buffer import Draw, ReplayBuffer
from rl_training.data.team_replay import TeamReplay
from rl_training.envs import TeamAdapter, make_adapter
from rl_training.errors import ConfigError, NonFiniteError
from rl_training.experiment.manager import ExperimentManager
from rl_training.models.team_q_network import MonotonicMixer
from rl_training.runtime.assembly import build_algorithm
from rl_training.runtime.callbacks import Callback
from rl_training.types import ActionSpec, ArraySpec, ObsSpec, Progress

pytest.importorskip("pettingzoo")
from team_envs import LENGTH, Duel, Mortals, SoloCartPole, TwoSteps

CPU = torch.device("cpu")
START = Progress(0, 1)
JOINT = ["vdn", "qmix"]


def collected(env_fn: Callable[[], Any], make_config: MakeConfig, steps: int, **knobs: Any) -> Any:
    """A trainer whose replay holds that many steps of random actions in one environment."""
    config = make_config(num_envs=1, gamma=0.5, **knobs)
    trainer: Any = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)
    trainer.source.collect(trainer.replay, steps, START)
    return trainer


def at(replay: ReplayBuffer, *cells: int) -> dict[str, Any]:
    """The stored transitions of these cells."""
    return replay.batch(Draw(np.array(cells), None), 1.0, 1.0)


# -- mixers and losses -----------------------------------------------------------------------------


def test_the_loss_of_a_team() -> None:
    batch = {
        "q_values": torch.tensor([1.0, 2.0]),
        "targets": torch.tensor([3.0, 1.0]),
        "weights": torch.tensor([1.0, 0.5]),
    }
    found = team_td_loss(batch)
    assert found["loss"] == (1.0 * 4.0 + 0.5 * 1.0) / 2 / 2
    assert found["td_error"] == 1.5
    assert found["q_mean"] == 1.5
    assert found["td_errors"].tolist() == [2.0, -1.0]


def test_the_mixer_by_hand() -> None:
    mixer = MonotonicMixer(ObsSpec({"team_state": ArraySpec((1,), "float32")}), 2, size=2)
    with torch.no_grad():
        # Of the state s: W1 = |s (-1 2; 3 -4)|, b1 = s (-20 1), w2 = |s (-1 0.5)|.
        for net, weights in (
            (mixer.weights, [-1.0, 2.0, 3.0, -4.0]),
            (mixer.bias, [-20.0, 1.0]),
            (mixer.final_weights, [-1.0, 0.5]),
        ):
            net.layers[0].weight.copy_(torch.tensor(weights).view(-1, 1))  # type: ignore[operator]
            net.layers[0].bias.zero_()  # type: ignore[operator]
        for layer, matrix in zip(
            mixer.state_value.layers, ([[3.0], [-1.0]], [[2.0, 5.0]]), strict=True
        ):
            layer.weight.copy_(torch.tensor(matrix))  # type: ignore[operator]
            layer.bias.fill_(1.0)  # type: ignore[operator]
    found = mixer(torch.tensor([[0.5, 2.0]]), torch.tensor([[2.0]])).detach()
    hidden = (0.5 * 2 + 2.0 * 6 - 40, 0.5 * 4 + 2.0 * 8 + 2)  # before the ELU: -27 and 20
    value = 2.0 * 7.0 + 5.0 * 0.0 + 1.0  # relu(2 * 3 + 1) = 7, relu(-2 + 1) = 0
    expected = 2.0 * (math.exp(hidden[0]) - 1) + 1.0 * hidden[1] + value
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("hidden_sizes", [(), (16,)])
def test_the_mixer_falls_with_no_value(hidden_sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    state_spec = ObsSpec({"team_state": ArraySpec((5,), "float32")})
    mixer = MonotonicMixer(state_spec, 4, size=8, hidden_sizes=hidden_sizes)
    values = (10 * torch.randn(200, 4)).requires_grad_()
    (slopes,) = torch.autograd.grad(mixer(values, 3 * torch.randn(200, 5)).sum(), values)
    assert (slopes >= 0).all()
    assert (slopes > 0).float().mean() > 0.9


ROW = ObsSpec(
    {
        "observation": ArraySpec((1,), "float32"),
        "action_mask": ArraySpec((2,), "bool"),
        "team_state": ArraySpec((1,), "float32"),
        "team_alive": ArraySpec((2,), "bool"),
    }
)
TWO_ACTIONS = ActionSpec("discrete", (), "int64", nvec=(2,), start=(0,))


def linear_team(algo: str, **knobs: Any) -> Any:
    """A learner with Q(o) = (o, 2 - o), and -10 times that in the target network."""
    config: TrainConfig[Any] = TrainConfig(algo=algo).with_overrides(hidden_sizes=[], **knobs)
    learner = build_algorithm(config, ROW, TWO_ACTIONS, CPU)
    with torch.no_grad():
        for network, factor in ((learner.module, 1.0), (learner.target.module, -10.0)):
            (layer,) = network.advantage.layers
            layer.weight.copy_(factor * torch.tensor([[1.0], [-1.0]]))
            layer.bias.copy_(factor * torch.tensor([0.0, 2.0]))
    return learner


def a_batch() -> dict[str, Any]:
    """Two steps of a team of two; in the second, and after the first, one agent is gone."""
    alive, masks = torch.tensor([[True, True], [False, True]]), torch.ones(2, 2, 2).bool()
    masks[0, 1] = torch.tensor([True, False])
    obs = torch.tensor([[[0.5], [3.0]], [[9.0], [4.0]]])
    after = torch.tensor([[[8.0], [0.0]], [[9.0], [1.5]]])
    state = torch.tensor([[1.0], [-1.0]])
    return {
        "obs": {"observation": obs, "action_mask": masks, "team_state": state, "team_alive": alive},
        "next_obs": {
            "observation": after,
            "action_mask": masks,
            "team_state": -state,
            "team_alive": torch.tensor([[False, True], [False, True]]),
        },
        "actions": torch.tensor([[1, 0], [1, 1]]),
        "rewards": torch.tensor([1.0, 2.0]),
        "discounts": torch.tensor([0.5, 0.5]),
        "weights": torch.ones(2),
    }


def test_the_loss_of_vdn_by_hand() -> None:
    """Step 1: agents take 1 and 0, so Q = (2 - 0.5) + 3. Step 2: the second takes 1: Q = 2 - 4.

    After step 1 only the second lives, at o = 0; its mask allows action 0 alone, of -10 * 0 = 0.
    After step 2 at o = 1.5: the greatest of -10 (1.5, 0.5) is -5; `double` takes the action that
    the network itself prefers, the first: -15.
    """
    for double, best in ((False, -5.0), (True, -15.0)):
        metrics = linear_team("vdn", double=double).loss(a_batch())
        errors = [1.0 + 0.5 * 0.0 - 4.5, 2.0 + 0.5 * best + 2.0]
        assert metrics["td_errors"].tolist() == errors
        assert float(metrics["loss"].detach()) == sum(x * x for x in errors) / 4


def test_the_loss_of_qmix_mixes_both_sides_with_their_own_states() -> None:
    learner = linear_team("qmix")
    batch = a_batch()
    metrics = learner.loss(batch)
    mixer, target = learner.module.mixer, learner.target.module.mixer
    chosen = torch.tensor([[1.5, 3.0], [0.0, -2.0]])
    best = torch.tensor([[0.0, 0.0], [0.0, -5.0]])
    values = mixer(chosen, batch["obs"]["team_state"])
    targets = batch["rewards"] + 0.5 * target(best, batch["next_obs"]["team_state"])
    torch.testing.assert_close(metrics["td_errors"], (targets - values).detach())


@pytest.mark.parametrize("algo", JOINT)
def test_what_the_dead_observe_and_do_reaches_no_loss(algo: str) -> None:
    learner = linear_team(algo)

    def gradient(poison: float, action: int) -> Tensor:
        batch = a_batch()
        for part in ("obs", "next_obs"):
            batch[part]["observation"][~batch[part]["team_alive"]] = poison
        batch["actions"][1, 0] = action
        parameters = list(learner.module.parameters())
        parts = torch.autograd.grad(learner.loss(batch)["loss"], parameters)
        return torch.cat([part.flatten() for part in parts])

    assert gradient(0.0, 0).abs().sum() > 0
    torch.testing.assert_close(gradient(0.0, 0), gradient(1e6, 1), rtol=0, atol=0)


# -- replays ---------------------------------------------------------------------------------------

REWARDS = [1 + 11, 2 + 12, 13, 14 + 24, 15 + 25, 26, 27]
ALIVE = ["ab", "ab", "b", "bc", "bc", "c", "c"]
"""Of `Mortals`: a dies in step 2, c appears after 3, b dies in 5, and 7 truncates the team."""


def test_a_replay_of_teams(make_config: MakeConfig) -> None:
    trainer = collected(Mortals, make_config, LENGTH + 2, algo="qmix")
    replay = trainer.replay
    assert isinstance(replay, TeamReplay)
    batch = at(replay, *range(LENGTH))
    assert batch["rewards"].tolist() == REWARDS
    assert batch["discounts"].tolist() == [0.5] * LENGTH  # truncated, not terminated
    lives = [[agent in alive for agent in "abc"] for alive in ALIVE]
    assert batch["obs"]["team_alive"].tolist() == lives
    assert batch["next_obs"]["team_alive"].tolist() == [*lives[1:], [False, False, True]]
    assert batch["obs"]["team_state"][:, 0].tolist() == list(range(LENGTH))
    assert batch["next_obs"]["team_state"].tolist() == [
        [t + 1, len(alive), 0.5, 7.0] for t, alive in enumerate([*ALIVE[1:], ""])
    ]
    assert batch["obs"]["observation"][3].tolist() == [[0, 0], [1, 3], [2, 3]]
    assert batch["next_obs"]["observation"][6, 2].tolist() == [2, 7]
    assert at(replay, LENGTH)["obs"]["team_state"].tolist() == [[0, 2, 0.5, 7]]  # the next episode
    trainer.close()


def test_returns_of_several_steps_of_a_team(make_config: MakeConfig) -> None:
    trainer = collected(Mortals, make_config, LENGTH + 1, algo="vdn", n_step=3)
    batch = at(trainer.replay, 0, 5)
    assert batch["rewards"].tolist() == [12 + 0.5 * 14 + 0.25 * 13, 26 + 0.5 * 27]
    assert batch["discounts"].tolist() == [0.125, 0.25]
    assert batch["next_obs"]["team_alive"].tolist() == [[False, True, True], [False, False, True]]
    trainer.close()


def test_a_terminated_team_has_no_value_after_it(make_config: MakeConfig) -> None:
    trainer = collected(TwoSteps, make_config, 2, algo="vdn")
    batch = at(trainer.replay, 0, 1)
    assert batch["discounts"].tolist() == [0.5, 0.0]
    assert not batch["next_obs"]["team_alive"][1].any()
    trainer.close()


def test_a_wrappers_time_limit_truncates_a_team(make_config: MakeConfig) -> None:
    limit = {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 4}}
    trainer = collected(Mortals, make_config, 5, algo="qmix", wrappers=[limit])
    batch = at(trainer.replay, 3)
    assert batch["discounts"].tolist() == [0.5]
    assert batch["next_obs"]["team_alive"].tolist() == [[False, True, True]]
    assert batch["next_obs"]["team_state"].tolist() == [[4, 2, 0.5, 7]]
    trainer.close()


def test_a_replay_of_agents(make_config: MakeConfig) -> None:
    """Cells are steps times three agents."""
    trainer = collected(Mortals, make_config, 3 * LENGTH, algo="idqn", n_step=2)
    replay = trainer.replay
    batch = at(replay, 0, 3, 3 * 6 + 2)
    # a: 1 + 0.5 * 2 and dead; from its last step 2; c: 27, truncated.
    assert batch["rewards"].tolist() == [1 + 0.5 * 2, 2, 27]
    assert batch["discounts"].tolist() == [0, 0, 0.5]
    assert batch["next_obs"][2].tolist() == [2, 7]
    drawn = replay.draw(400, torch.Generator().manual_seed(1)).cells
    lives = np.array([["abc"[i] in alive for i in range(3)] for alive in ALIVE * 3]).reshape(-1)
    assert lives[drawn].all()
    assert set(drawn) == set(np.flatnonzero(lives))
    trainer.close()


def test_statistics_are_of_living_agents_alone(make_config: MakeConfig) -> None:
    config = make_config(algo="qmix", total_timesteps=256, num_envs=1, normalize_obs=True)
    trainer: Any = ExperimentManager.setup(config, env_fn=Mortals, run_dir=None)
    steps = trainer.train().metrics["global_step"]
    network = trainer.learner.module
    of_agents, of_state = network.norm["leaf0"], network.mixer.norm["leaf0"]
    assert float(of_agents.count) == float(of_state.count) == steps
    episode = [[i, t] for t, alive in enumerate(ALIVE) for i in range(3) if "abc"[i] in alive]
    assert of_agents.mean.tolist() == pytest.approx(np.mean(episode, 0), abs=0.2)
    trainer.close()


# -- acting ----------------------------------------------------------------------------------------


def test_the_mask_of_a_truncated_agent_is_kept() -> None:
    config: TrainConfig[Any] = TrainConfig(algo="qmix", num_envs=1)
    adapter = make_adapter(config, functools.partial(Mortals, masks=True))
    assert isinstance(adapter, TeamAdapter)
    obs: Any = adapter.reset()
    for _ in range(LENGTH):
        step = adapter.step(obs["action_mask"].argmax(1))
        obs = step.obs
    final: Any = step.final_obs
    assert final["action_mask"].tolist() == [[True] * 3, [True] * 3, [True, False, True]]
    adapter.close()


@pytest.mark.parametrize("algo", ["idqn", "vdn", "qmix"])
def test_illegal_actions_are_never_taken(algo: str, make_config: MakeConfig) -> None:
    """Neither at random nor by choice: `Mortals` raises an error."""
    config = make_config(algo=algo, exploration_fraction=0.5, total_timesteps=320)
    env_fn = functools.partial(Mortals, masks=True)
    trainer = ExperimentManager.setup(config, env_fn=env_fn, run_dir=None)
    metrics = trainer.train().metrics
    each = {"a": 1 + 2, "b": sum(10 + t for t in range(1, 6)), "c": 24 + 25 + 26 + 27}
    for agent, value in each.items():
        assert metrics[f"rollout/return_{agent}_mean"] == value
        assert metrics[f"eval/return_{agent}_mean"] == value
    assert metrics["eval/return_mean"] == sum(each.values())


def test_one_agent_is_dqn_bit_for_bit() -> None:
    settings: dict[str, Any] = {
        "seed": 5, "num_envs": 4, "learning_starts": 128, "prioritized": True, "n_step": 2,
        "double": True, "progress": False,
    }  # fmt: skip
    team = IDQN(env_fn=SoloCartPole, **settings)
    team.learn(1024, run_dir=None)
    alone = DQN("CartPole-v1", **settings)
    alone.learn(1024, run_dir=None)
    ours, theirs = team.policy.module.state_dict(), alone.policy.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("kind", "value"), [(QMIX, 8.0), (VDN, 7.0)])
def test_the_two_step_game(kind: type[Any], value: float) -> None:
    """A sum of values cannot represent the second game: its best fit to 8 is 6.5."""
    model = kind(
        env_fn=TwoSteps, seed=1, num_envs=8, agent_id=True, hidden_sizes=[32], learning_rate=3e-3,
        exploration_initial_eps=1.0, exploration_final_eps=1.0, learning_starts=400, train_freq=16,
        batch_size=64, buffer_size=2000, target_update_interval_steps=200, eval_interval=0,
        progress=False,
    )  # fmt: skip
    model.learn(6000, run_dir=None)
    assert model.evaluate(2).mean_return == value


@pytest.mark.parametrize("policies", ["shared", "separate"])
def test_groups_have_replays_of_their_own(policies: str, make_config: MakeConfig) -> None:
    trainer = collected(Mortals, make_config, 5, algo="idqn", policies=policies)
    if policies == "shared":
        assert isinstance(trainer.replay, ReplayBuffer)
        assert len(trainer.replay) == 15
    else:
        assert [len(one) for one in trainer.replay.groups.values()] == [5, 5, 5]
        assert at(trainer.replay.groups["b"], 4)["rewards"].tolist() == [15]
    trainer.close()


def test_agents_with_different_spaces(make_config: MakeConfig) -> None:
    config = make_config(
        algo="idqn", env_id="pettingzoo:mpe2/simple_speaker_listener_v4", policies="separate",
        total_timesteps=384, normalize_obs=True, buffer_size=1000,
    )  # fmt: skip
    seen: set[str] = set()

    class Seen(Callback):
        def on_update(self, trainer: Any, event: Any) -> None:
            seen.update(event.metrics)

    trainer: Any = ExperimentManager.setup(config, callbacks=[Seen()])
    result = trainer.train()
    assert {"losses/speaker_0/loss", "losses/listener_0/td_error"} <= seen
    norms = [one.module.norm["leaf0"] for one in trainer.learner.groups.values()]
    assert [float(norm.count) for norm in norms] == [192, 192]
    assert norms[0].mean.shape != norms[1].mean.shape
    assert np.isfinite(result.metrics["losses/speaker_0/loss"])
    assert np.isfinite(result.metrics["losses/listener_0/q_mean"])
    chosen = IDQN.load(result.run_dir).act(
        {"speaker_0": np.zeros(3, np.float32), "listener_0": np.zeros((2, 11), np.float32)}
    )
    assert np.shape(chosen["listener_0"]) == (2,)


def test_a_policy_of_qmix_needs_no_state(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(algo="qmix", total_timesteps=192, agent_id=True, normalize_obs=True)
    model = QMIX.load(ExperimentManager.setup(config).train().run_dir)
    obs = {"observation": np.zeros((2, 18), np.float32), "agent": np.array([0, 2])}
    assert model.act(obs).shape == (2,)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IDQN(env_fn=Duel).learn(10), "idqn trains agents that act at the same time"),
        (lambda: QMIX("pettingzoo:classic/tictactoe_v3").learn(10), "take turns: use ippo"),
        (lambda: VDN(policies="separate"), "policies' must be unset: .* idqn has separate ones"),
        (lambda: QMIX(groups={"all": ["a"]}), "groups' must be unset"),
        (lambda: VDN(network="torch.nn:Linear"), "network' must be unset"),
        (lambda: QMIX(mixing_size=0), "mixing_size' must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ("idqn", "environment 0, agent b, returned a non-finite observation"),
        ("vdn", r"environment 0 returned a non-finite observation\['observation'\] of agent b"),
    ],
)
def test_a_nan_names_the_environment_and_the_agent(
    algo: str, message: str, make_config: MakeConfig
) -> None:
    class Broken(Mortals):
        def step(self, actions: Any) -> Any:
            observations, *rest = super().step(actions)
            if self.count == 4:
                observations["b"] = np.array([np.nan, 0], np.float32)
            return observations, *rest

    config = make_config(algo=algo, learning_starts=400)
    trainer = ExperimentManager.setup(config, env_fn=Broken, run_dir=None)
    with pytest.raises(NonFiniteError, match=message):
        trainer.train()
