"""IMPALA and APPO: V-trace targets in place of GAE, and what they learn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeConfig
from rl_training.algorithms.impala import IMPALAConfig
from rl_training.errors import ConfigError, Paused
from rl_training.experiment.manager import ExperimentManager
from rl_training.types import Progress
from state_compare import differences, final_state


def collected(make_config: MakeConfig, algo: str, **settings: Any) -> Any:
    """A trainer with a rollout that was collected and not learnt from; truncations included."""
    config = make_config(
        algo=algo,
        env_id="CartPole-v1",
        env_kwargs={"max_episode_steps": 9},
        num_envs=3,
        num_steps=24,
        **settings,
    )
    trainer: Any = ExperimentManager.setup(config, run_dir=None)
    trainer.source.collect(trainer.buffer, 24, Progress(0, 512))
    return trainer


def made_older(trainer: Any) -> None:
    """Let the recorded log-probabilities be those of another policy."""
    buffer, learner = trainer.buffer, trainer.learner
    with torch.no_grad():
        now = learner.model.evaluate(buffer.whole())
    noise = torch.randn(now.logprob.shape, generator=torch.Generator().manual_seed(3))
    buffer.logprobs.view(-1).copy_(now.logprob + 0.5 * noise)
    buffer.values.fill_(123.0)  # of older weights: must not be used
    buffer.recorded = frozenset({"logprobs", "values"})


def targets_by_hand(trainer: Any) -> tuple[Any, Any]:
    """V-trace as a loop over steps, written from the formulas of the paper; float64."""
    buffer, learner, config = trainer.buffer, trainer.learner, trainer.config.algo_kwargs
    with torch.no_grad():
        now = learner.model.evaluate(buffer.whole())
        last = learner.model.value(buffer.next_obs).double().numpy().reshape(-1)
        bootstrap = np.zeros((24, 3))
        found = buffer.truncated_observations()
        assert found is not None
        index, final_obs = found
        bootstrap.reshape(-1)[index.numpy()] = learner.model.value(final_obs).double().numpy()
    values, new = (one.double().numpy().reshape(24, 3) for one in (now.value, now.logprob))
    ratio = np.exp(new - buffer.logprobs.double().numpy())
    rewards, dones = buffer.rewards.double().numpy(), buffer.dones.double().numpy()
    targets, advantages = np.zeros((24, 3)), np.zeros((24, 3))
    gamma, lam = config.gamma, config.gae_lambda
    for n in range(3):
        following, value_after = last[n], last[n]
        for t in reversed(range(24)):
            if dones[t, n]:
                mixed = follow_v = bootstrap[t, n]
                trace = 0.0
            else:
                follow_v = value_after
                mixed = (1 - lam) * value_after + lam * following
                trace = following - value_after
            rho, c = min(ratio[t, n], config.rho_bar), lam * min(ratio[t, n], config.c_bar)
            delta = rho * (rewards[t, n] + gamma * follow_v - values[t, n])
            targets[t, n] = values[t, n] + delta + gamma * c * trace
            advantages[t, n] = rho * (rewards[t, n] + gamma * mixed - values[t, n])
            following, value_after = targets[t, n], values[t, n]
    return targets, advantages


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
@pytest.mark.parametrize("algo", ["impala", "appo"])
def test_targets_are_corrected_for_the_policy_that_acted(
    algo: str, gae_lambda: float, make_config: MakeConfig
) -> None:
    trainer = collected(make_config, algo, gae_lambda=gae_lambda, rho_bar=1.2)
    trainer.learner._lagged = True
    made_older(trainer)
    before = trainer.buffer.logprobs.clone()
    targets, advantages = targets_by_hand(trainer)
    trainer.learner.prepare(trainer.buffer, Progress(0, 512))
    batch = trainer.buffer.flat()
    assert np.allclose(batch["returns"].reshape(24, 3), targets, atol=1e-4)
    assert np.allclose(batch["advantages"].reshape(24, 3), advantages, atol=1e-4)
    assert torch.equal(trainer.buffer.logprobs, before)  # a repeated learning phase needs them
    with torch.no_grad():
        now = trainer.learner.model.evaluate(trainer.buffer.whole())
    assert torch.equal(batch["old_logprobs"], now.logprob)
    assert torch.equal(batch["values"], now.value)


def test_the_weights_of_ratios_are_clipped(make_config: MakeConfig) -> None:
    """Where the current policy makes an action far more likely, it counts as much as before."""
    trainer = collected(make_config, "impala")
    trainer.learner._lagged = True
    with torch.no_grad():
        now = trainer.learner.model.evaluate(trainer.buffer.whole())
    found = []
    for older in (2.0, 3.0):
        trainer.buffer.logprobs.view(-1).copy_(now.logprob - older)
        trainer.buffer.recorded = frozenset({"logprobs"})
        trainer.learner.prepare(trainer.buffer, Progress(0, 512))
        found.append(trainer.buffer.advantages.clone())
    assert torch.equal(*found)


def test_without_a_lag_appo_is_ppo(make_config: MakeConfig) -> None:
    settings = {"num_steps": 64, "normalize_obs": True, "target_kl": 0.01, "clip_vloss": True}
    states = [
        final_state(ExperimentManager.setup(make_config(algo=algo, **settings)).train().run_dir)
        for algo in ("ppo", "appo")
    ]
    assert differences(states[0]["algorithm"], states[1]["algorithm"]) == []


def test_one_update_per_rollout_is_that_of_a2c(make_config: MakeConfig) -> None:
    """Equal but for the order in which rows are added."""
    settings = {"num_steps": 16, "gae_lambda": 1.0, "ent_coef": 0.01, "max_grad_norm": 0.5}
    plain = {"optimizer": "adam", "optimizer_betas": (0.9, 0.999), "learning_rate": 1e-3}
    models = [
        ExperimentManager.setup(make_config(algo=algo, **settings, **plain, **more)).train().run_dir
        for algo, more in (("a2c", {}), ("impala", {"num_minibatches": 1}))
    ]
    a2c, impala = (final_state(run)["algorithm"]["model"] for run in models)
    for name, value in a2c.items():
        assert torch.allclose(value, impala[name], atol=1e-5), name


def test_a_learning_phase_that_was_stopped_is_repeated_exactly(make_config: MakeConfig) -> None:
    """Targets of a later epoch were computed with weights that the stop takes back."""
    trainer = collected(make_config, "impala", update_epochs=3, num_minibatches=2)
    learner, buffer = trainer.learner, trainer.buffer
    learner._lagged = True
    made_older(trainer)
    start = {k: v.clone() for k, v in learner.module.state_dict().items()}
    generator = learner.generators[0].get_state()
    calls = iter(range(100))
    with pytest.raises(Paused):
        learner.learn(buffer, Progress(0, 512), lambda: next(calls) >= 4)
    results = []
    for _ in range(2):
        learner.load_state_dict(
            {**learner.state_dict(), "model": start, "optimizer": fresh(learner)}
        )
        learner.generators[0].set_state(generator)
        assert learner.learn(buffer, Progress(0, 512)) == 6
        results.append((learner.step.flat.clone(), learner.pop_metrics()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert results[0][1]["losses/ratio_mean"] != 1.0


def fresh(learner: Any) -> dict[str, Any]:
    state = learner.step.state_dict()
    return {k: torch.zeros_like(v) if torch.is_tensor(v) else v for k, v in state.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho_bar": 0.0}, "rho_bar' must be above 0"),
        ({"c_bar": 2.0}, r"c_bar' must be at most rho_bar = 1"),
        ({"num_minibatches": 0}, "num_minibatches' must be at least 1"),
        ({"update_epochs": 0}, "update_epochs' must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IMPALAConfig(**settings)


def test_minibatches_divide_a_rollout(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="num_minibatches' must be a divisor of the rollout"):
        make_config(algo="impala", num_steps=5, num_minibatches=3)
    with pytest.raises(ConfigError, match="norm_adv' must be false"):
        make_config(algo="impala", num_steps=2, num_minibatches=4, norm_adv=True)
