"""The PPG script stands alone, runs, and takes the package's steps through both of its phases."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor
from torch.distributions import Categorical

from reference_runs import load_script, printed_twice
from rl_training.algorithms.advantages import combine_minibatches
from rl_training.algorithms.ppg import PPG, PPGConfig
from rl_training.config import TrainConfig, config_from_file
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs import VectorAdapter
from rl_training.models.mlp_ppg import MLPPPGModel
from rl_training.models.normalizer import RewardNormalizer
from rl_training.runtime.actors import PolicyActor
from rl_training.runtime.collector import Collector
from rl_training.runtime.ppg_trainer import build_ppg
from rl_training.types import ActionSpec, Array, ArraySpec, ObsSpec, Progress, VectorStep
from test_recurrent_ppo_reference_script import TwoReasons
from test_reference_script import ALLOWED, imported_packages, linears

SCRIPT = Path(__file__).parent.parent / "examples" / "ppg_cartpole_reference.py"
NUM_ENVS, NUM_STEPS, ITERATIONS = 4, 32, 5
ROWS = NUM_ENVS * NUM_STEPS
CPU = torch.device("cpu")
OBS_SPEC = ObsSpec({"": ArraySpec((4,), "float32")})
ACTION_SPEC = ActionSpec("discrete", (), "int64", nvec=(2,))
KNOBS: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "num_minibatches": 4,
    "update_epochs": 2,
    "policy_phases": 2,
    "aux_epochs": 3,
    "num_aux_minibatches": 8,
    "beta_clone": 1.5,
    "learning_rate": 3e-3,
    "clip_coef": 0.05,
    "ent_coef": 0.01,
    "gamma": 0.98,
    "gae_lambda": 0.8,
}
SAME_METRICS = {"policy_loss": "policy_loss", "value_loss": "value_loss", "entropy": "entropy_loss"}


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(SCRIPT)


def test_imports_nothing_but_torch_gymnasium_numpy_and_the_standard_library() -> None:
    packages = imported_packages(SCRIPT.read_text())
    assert {"torch", "gymnasium"} <= packages
    assert packages <= ALLOWED
    assert "rl_training" not in SCRIPT.read_text()


def test_runs_alone_and_reports_returns_and_an_evaluation(tmp_path: Path) -> None:
    flags = ["--total-timesteps", "384", "--seed", "3"]
    flags += ["--num-envs", "2", "--num-steps", "64", "--policy-phases", "2"]
    flags += ["--update-epochs", "2", "--aux-epochs", "2", "--eval-episodes", "2"]
    lines = printed_twice(SCRIPT, flags, tmp_path)
    assert [line.split()[1] for line in lines[:-1]] == ["256", "384"]
    assert all("return" in line for line in lines[:-1])
    assert "clone_kl" in lines[0]
    assert "clone_kl" not in lines[1], "this one ends in the midst of a cycle"
    assert lines[-1].startswith("evaluation:")


@pytest.mark.parametrize("wrong", [["--num-minibatches", "3"], ["--num-aux-minibatches", "24"]])
def test_refuses_what_does_not_divide(script: Any, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(wrong)


def flags(knobs: Mapping[str, Any]) -> list[str]:
    said = []
    for name, value in knobs.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            said.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            said.append(f"--{flag}={value}")
    return said


Pairs = dict[str, tuple[Tensor, Tensor]]


def paired(agent: Any, model: MLPPPGModel) -> Pairs:
    *trunk, policy_head = linears(model.actor)
    (aux_head,) = linears(model.aux_critic)
    layers = {
        "policy_head": (agent.policy_head, policy_head),
        "aux_head": (agent.aux_head, aux_head),
    }
    for name, ours, theirs in (
        ("trunk", linears(agent.trunk), trunk),
        ("value_head", linears(agent.value_head), linears(model.critic)),
    ):
        for i, both in enumerate(zip(ours, theirs, strict=True)):
            layers[f"{name}{i}"] = both
    pairs: Pairs = {}
    for name, (a, b) in layers.items():
        pairs[f"{name}.weight"], pairs[f"{name}.bias"] = (a.weight, b.weight), (a.bias, b.bias)
    assert len(pairs) == len(list(agent.parameters())) == len(list(model.parameters()))
    return pairs


class Twins:
    """The script's agent and optimizers, and the package's PPG, alike in every weight and knob."""

    def __init__(self, script: Any, dtype: torch.dtype = torch.float64, **knobs: Any) -> None:
        self.script = script
        self.dtype = dtype
        self.args = script.parse_args([*flags({**KNOBS, **knobs}), f"--num-envs={NUM_ENVS}"])
        shared = ("anneal_lr", "gamma", "gae_lambda", "vf_coef", "max_grad_norm")
        rest = {name: getattr(self.args, name) for name in shared}
        self.config = PPGConfig(**{**KNOBS, **rest, **knobs})
        torch.manual_seed(0)
        self.agent = script.Agent().to(dtype)
        with torch.no_grad():  # so that the policy has something to lose, and no bias is zero
            self.agent.policy_head.weight *= 100
            for layer in linears(self.agent):
                layer.bias.normal_(std=0.1)
        self.optimizers = script.make_optimizers(self.agent, self.args)
        self.order = torch.Generator().manual_seed(5)
        model = MLPPPGModel(OBS_SPEC, ACTION_SPEC).to(dtype)
        for ours, theirs in paired(self.agent, model).values():
            theirs.data.copy_(ours.data)
        self.ppg = PPG(model, self.config, generator=torch.Generator().manual_seed(5))
        self.start = {name: ours.detach().clone() for name, (ours, _) in self.pairs().items()}

    @property
    def model(self) -> Any:
        return self.ppg.model

    def pairs(self) -> Pairs:
        return paired(self.agent, self.model)

    def restart(self) -> None:
        """Another PPG that knows of the first what a checkpoint would tell it."""
        state = copy.deepcopy(self.ppg.state_dict())
        model = MLPPPGModel(OBS_SPEC, ACTION_SPEC).to(self.dtype)
        self.ppg = PPG(model, self.config)
        self.ppg.load_state_dict(state)

    def check(self, tolerance: float, *, still: tuple[str, ...] = ()) -> None:
        """Both have the same parameters, and all have moved but those that are ``still``."""
        for name, (ours, theirs) in self.pairs().items():
            close(theirs, ours, tolerance, name)
            moved = float((ours - self.start[name]).detach().abs().max())
            assert moved == 0.0 if name.startswith(still) else moved > 1e-4, name


def close(theirs: Tensor, ours: Tensor, tolerance: float, what: str) -> None:
    assert theirs.shape == ours.shape, what
    worst = float((theirs - ours).detach().abs().max())
    assert worst <= tolerance, f"{what}: {worst}"


def random_rows(twins: Twins, rows: int = 64) -> dict[str, Tensor]:
    """What a minibatch may hold, far from where the policy stands."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(twins.dtype)

    return {
        "obs": normal(rows, 4),
        "actions": torch.randint(2, (rows,), generator=random),
        "old_logprobs": -0.7 + 0.1 * normal(rows),
        "advantages": 3 + 2 * normal(rows),
        "returns": 1 + 2 * normal(rows),
        "teacher": torch.log_softmax(normal(rows, 2), -1),
    }


def as_script_rows(minibatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    other = {"old_logprobs": "logprobs", "teacher": "teacher_logits"}
    return {other.get(name, name): tensor for name, tensor in minibatch.items()}


def test_the_knobs_are_those_of_the_preset(script: Any) -> None:
    config = config_from_file("ppg/cartpole")
    for name, value in vars(script.parse_args([])).items():
        where = config if hasattr(config, name) else config.algo_kwargs
        if name != "seed":
            assert value == getattr(where, name), name


def test_both_begin_with_weights_of_the_same_kind(script: Any) -> None:
    """Orthogonal up to a gain: all singular values of a layer are that gain. Biases are zero."""
    config: TrainConfig[Any] = TrainConfig(algo="ppg", env_id="CartPole-v1")
    built = build_ppg(config, OBS_SPEC, ACTION_SPEC, CPU)
    model: Any = built.model
    torch.manual_seed(4)
    for name, (ours, theirs) in paired(script.Agent(), model).items():
        assert ours.shape == theirs.shape, name
        if name.endswith("bias"):
            assert not ours.any(), name
            assert not theirs.any(), name
        else:
            close(torch.linalg.svdvals(theirs), torch.linalg.svdvals(ours), 1e-5, name)


def what_they_say(
    twins: Twins, minibatch: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    obs, actions = minibatch["obs"], minibatch["actions"]
    policy: Any = twins.agent.policy(obs)
    ours = (policy.log_prob(actions), policy.entropy(), twins.agent.value(obs))
    joint, now = twins.model.joint(obs), twins.model.evaluate(minibatch)
    params, mask = twins.model.policy(obs)
    assert mask is None
    return {
        "log_probs": (joint.policy, policy.logits),
        "aux_value": (joint.aux_value, twins.agent.aux_value(obs)),
        "joint value": (joint.value, ours[2]),
        "value": (twins.model.value(obs), ours[2]),
        "policy": (torch.softmax(params, -1), policy.probs),
        "evaluated logprob": (now.logprob, ours[0]),
        "evaluated entropy": (now.entropy, ours[1]),
        "evaluated value": (now.value, ours[2]),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
def test_same_weights_say_the_same(script: Any, dtype: torch.dtype, tolerance: float) -> None:
    """And depend on each weight in the same way: values, say, not at all on the trunk's."""
    twins = Twins(script, dtype)
    minibatch = random_rows(twins)
    weigh = torch.randn(64, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    untouched = set()
    for name, (theirs, ours) in what_they_say(twins, minibatch).items():
        close(theirs, ours, tolerance, name)
        both = paired(twins.agent, twins.model)
        gradients = []
        for side, said in enumerate((ours, theirs)):
            grads = torch.autograd.grad(
                (said * (weigh if said.ndim == 2 else weigh[:, 0])).sum(),
                [pair[side] for pair in both.values()],
                allow_unused=True,
                materialize_grads=True,
                retain_graph=True,
            )
            gradients.append(grads)
        for place, mine, yours in zip(both, *gradients, strict=True):
            close(yours, mine, 100 * tolerance, f"{name} by {place}")
            if not mine.any():
                untouched.add((name, place))
    assert ("value", "trunk0.weight") in untouched
    assert ("joint value", "trunk0.weight") in untouched
    assert ("aux_value", "trunk0.weight") not in untouched
    assert ("aux_value", "policy_head.weight") in untouched


def standardised(minibatch: dict[str, Any]) -> dict[str, Any]:
    """The minibatch as the learner makes it."""
    ((result,),) = combine_minibatches([[minibatch]], norm_adv=True)
    return result


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e3])
def test_a_policy_step_agrees(script: Any, max_grad_norm: float) -> None:
    twins = Twins(script, max_grad_norm=max_grad_norm)
    minibatch = random_rows(twins)
    for _ in range(3):
        losses = script.policy_update(
            twins.agent, twins.optimizers.policy, as_script_rows(minibatch), twins.args
        )
        metrics = twins.ppg.update(standardised(minibatch))
        for name, by_package in SAME_METRICS.items():
            close(metrics[by_package], losses[name], 1e-10, name)
        assert 0 < float(metrics["clip_fraction"]) < 1
        twins.check(1e-10, still=("aux_head",))


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e3])
@pytest.mark.parametrize("beta_clone", [0.0, 1.0, 7.0])
def test_an_auxiliary_step_agrees(script: Any, beta_clone: float, max_grad_norm: float) -> None:
    twins = Twins(script, beta_clone=beta_clone, max_grad_norm=max_grad_norm)
    minibatch = random_rows(twins)
    for _ in range(3):
        losses = script.auxiliary_update(
            twins.agent, twins.optimizers.auxiliary, as_script_rows(minibatch), twins.args
        )
        metrics = twins.ppg.auxiliary_step(minibatch)
        assert losses.keys() == metrics.keys() - {"loss"}
        for name, loss in losses.items():
            close(metrics[name], loss, 1e-10, name)
        parts = losses["aux_value_loss"] + losses["value_loss"] + beta_clone * losses["clone_kl"]
        close(metrics["loss"], parts, 1e-10, "loss")
        assert float(losses["clone_kl"]) > 0.1
        twins.check(1e-10, still=() if beta_clone else ("policy_head",))


def test_an_auxiliary_phase_agrees(script: Any) -> None:
    """From the same rollouts in the same order, twice, with steps of the policy's in between."""
    twins = Twins(script)
    minibatch = random_rows(twins, rows=2 * ROWS)
    halves = [{name: part[i::2] for name, part in minibatch.items()} for i in range(2)]
    for phase in (1, 2):
        script.policy_update(
            twins.agent, twins.optimizers.policy, as_script_rows(minibatch), twins.args
        )
        twins.ppg.update(standardised(minibatch))
        twins.ppg.kept = [[{name: half[name] for name in ("obs", "returns")} for half in halves]]
        losses = script.auxiliary_phase(
            twins.agent, twins.optimizers, halves, twins.args, twins.order
        )
        metrics = twins.ppg.auxiliary_update()
        for name, loss in losses.items():
            assert metrics[f"auxiliary/{name}"] == pytest.approx(loss, abs=1e-10), name
        assert losses["clone_kl"] > 1e-5, "a teacher that moves along is never far"
        assert twins.ppg.auxiliary_phases == phase
        assert twins.ppg.kept == [[]]
        twins.check(1e-10)


def short_cartpole() -> gym.Env[Any, Any]:
    """A time limit about as long as a first episode: some fall, some run out, some do both."""
    return TwoReasons(gym.make("CartPole-v1", max_episode_steps=17))


def short_cartpoles(mode: AutoresetMode = AutoresetMode.SAME_STEP) -> SyncVectorEnv[Any, Any]:
    return SyncVectorEnv([short_cartpole] * NUM_ENVS, autoreset_mode=mode)


class Witness(RewardNormalizer):
    """Remembers rewards as they were."""

    def __init__(self, gamma: float) -> None:
        super().__init__(NUM_ENVS, gamma, clip=10.0)
        self.raw: list[Array] = []

    def __call__(self, reward: Array, done: Array, valid: Array) -> Array:
        self.raw.append(reward.copy())
        return super().__call__(reward, done, valid)


class Recorder:
    """One buffer of the package's, in any precision, and what the script needs to know besides."""

    def __init__(self, dtype: torch.dtype, *, masked: bool) -> None:
        self.dtype = dtype
        self.numpy_dtype = "float64" if dtype == torch.float64 else "float32"
        self.buffer = RolloutBuffer(
            *(NUM_STEPS, NUM_ENVS, (4,), ()),
            obs_dtype=dtype,
            action_dtype=torch.int64,
            masked=masked,
        )
        fields = ("logprobs", "rewards", "dones", "values", "bootstrap", "advantages", "returns")
        for name in fields:
            setattr(self.buffer, name, getattr(self.buffer, name).to(dtype))
        # What is said of a step is written where these fields are now.
        written = [getattr(self.buffer, name) for name in ("actions", "rewards", "dones", "valid")]
        self.buffer._sent = self.buffer._waiting = written
        self.buffer._slots = [tensor.numpy() for tensor in written]
        self.steps: list[tuple[Any, Any, VectorStep]] = []

    def reset(self) -> None:
        self.buffer.reset()
        self.steps.clear()

    def add(self, obs: Any, action: Any, record: Mapping[str, Any], step: VectorStep) -> None:
        self.steps.append((obs, action, step))
        cast = step._replace(
            obs=np.asarray(step.obs).astype(self.numpy_dtype),
            final_obs=np.asarray(step.final_obs).astype(self.numpy_dtype),
        )
        self.buffer.add(obs.astype(self.numpy_dtype), action, record, cast)

    def grid(self, rows: Any) -> Tensor:
        stacked = torch.as_tensor(np.stack(list(rows)))
        return stacked.to(self.dtype) if stacked.is_floating_point() else stacked

    def script_rollout(self, script: Any) -> Any:
        obs, actions, steps = zip(*self.steps, strict=True)
        return script.Rollout(
            obs=self.grid(obs),
            actions=self.grid(actions),
            rewards=self.grid(step.reward for step in steps),
            terminated=self.grid(step.terminated for step in steps),
            truncated=self.grid(step.truncated for step in steps),
            final_obs=self.grid(step.final_obs for step in steps),
            next_obs=self.grid([steps[-1].obs])[0],
        )

    def valid(self) -> Tensor:
        return self.grid(step.valid for _, _, step in self.steps).flatten()


class Runs:
    """Rollouts by the package's own collector, and all that both learn from them."""

    def __init__(
        self, twins: Twins, tolerance: float, mode: AutoresetMode = AutoresetMode.SAME_STEP
    ) -> None:
        self.twins, self.script, self.tolerance = twins, twins.script, tolerance
        self.env = VectorAdapter(short_cartpoles(mode), seed=11)
        self.recorder = Recorder(twins.dtype, masked=self.env.has_invalid_rows)
        self.witness: Witness | None = None
        if not self.env.has_invalid_rows:
            self.witness = Witness(twins.args.gamma)
        self.scaler = self.script.RewardScaler(NUM_ENVS, twins.args.gamma)
        self.collector = self.make_collector()
        self.kept: list[dict[str, Tensor]] = []
        self.last_auxiliary: dict[str, float] = {}
        self.phases = 0
        self.terminated = self.truncated = self.both = self.invalid = 0
        self.clipped = 0.0

    def make_collector(self) -> Collector:
        generator = torch.Generator().manual_seed(6)
        actor = PolicyActor(self.twins.model, NUM_STEPS, generator, CPU)
        return Collector(self.env, actor, self.recorder, self.witness)

    def restart(self) -> None:
        self.twins.restart()
        obs = self.collector.source.obs
        self.collector = self.make_collector()
        self.collector.source.obs = obs

    def collect(self, progress: Progress) -> Any:
        """A rollout, as the script would have kept it."""
        self.recorder.reset()
        self.collector.collect(NUM_STEPS, progress)
        rollout = self.recorder.script_rollout(self.script)
        self.terminated += int((rollout.terminated & ~rollout.truncated).sum())
        self.truncated += int((rollout.truncated & ~rollout.terminated).sum())
        self.both += int((rollout.terminated & rollout.truncated).sum())
        self.invalid += int((~self.recorder.valid()).sum())
        if self.witness is not None:
            raw, self.witness.raw = self.recorder.grid(self.witness.raw), []
            assert (raw == 1.0).all()
            rollout = self.script.scale_rewards(self.scaler, rollout._replace(rewards=raw))
            close(self.recorder.buffer.rewards, rollout.rewards, self.tolerance, "rewards")
        return rollout

    def iterate(self, iteration: int) -> dict[str, float]:
        twins, script, args = self.twins, self.script, self.twins.args
        progress = Progress(iteration * ROWS, ITERATIONS * ROWS)
        rollout = self.collect(progress)
        whole = script.make_batch(twins.agent, rollout, args)
        # What the package masks, the script never sees.
        valid = self.recorder.valid()
        batch = {name: tensor[valid] for name, tensor in whole.items()}
        if args.anneal_lr:
            rate = args.learning_rate * (1 - iteration / ITERATIONS)
            script.set_learning_rate(twins.optimizers, rate)
        losses = script.policy_phase(twins.agent, twins.optimizers, batch, args, twins.order)
        expected = {f"losses/{name}": loss for name, loss in losses.items()}
        self.kept.append(batch)
        if len(self.kept) == args.policy_phases:
            losses = script.auxiliary_phase(
                twins.agent, twins.optimizers, self.kept, args, twins.order
            )
            self.last_auxiliary = {f"auxiliary/{name}": loss for name, loss in losses.items()}
            self.phases += 1
            self.kept.clear()
        expected |= self.last_auxiliary | {"auxiliary/phases": self.phases}

        twins.ppg.learn(self.recorder.buffer, progress)
        metrics = twins.ppg.pop_metrics()
        said = {name for name in metrics if name.startswith("auxiliary/")} - {"auxiliary/loss"}
        assert said == {name for name in expected if name.startswith("auxiliary/")}
        for name, loss in expected.items():
            assert metrics[name] == pytest.approx(loss, abs=100 * self.tolerance), name
        for name in ("advantages", "returns"):
            grid = getattr(self.recorder.buffer, name).flatten()[valid]
            close(grid, batch[name], 100 * self.tolerance, name)
        assert len(twins.ppg.kept[0]) == len(self.kept)
        twins.check(self.tolerance, still=() if twins.ppg.auxiliary_phases else ("aux_head",))
        self.clipped += metrics["losses/clip_fraction"]
        return metrics


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "with restarts"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "knobs"),
    [
        (torch.float64, 1e-10, {}),
        (torch.float64, 1e-10, {"anneal_lr": False, "max_grad_norm": 1e3, "vf_coef": 1.0}),
        (torch.float32, 3e-4, {}),
    ],
    ids=["float64", "float64, other knobs", "float32"],
)
def test_script_and_package_take_the_same_steps(
    script: Any, dtype: torch.dtype, tolerance: float, knobs: dict[str, Any], restarts: bool
) -> None:
    """Two cycles of two policy phases and an auxiliary one each, and the beginning of a third."""
    twins = Twins(script, dtype, **knobs)
    runs = Runs(twins, tolerance)
    for iteration in range(ITERATIONS):
        runs.iterate(iteration)
        if restarts:  # in the midst of a cycle as well as between two
            runs.restart()
    runs.env.close()
    assert twins.ppg.auxiliary_phases == 2
    assert len(twins.ppg.kept[0]) == 1
    assert runs.terminated >= 5
    assert runs.truncated >= 5
    assert runs.both >= 3
    assert runs.clipped


def test_reset_only_rows_teach_nothing_in_either_phase(script: Any) -> None:
    """Environments that reset by a step of their own: the script is not shown those steps.

    All rows are one minibatch: how many count in a smaller one depends on who else is drawn.
    """
    twins = Twins(script, num_minibatches=1, num_aux_minibatches=1)
    runs = Runs(twins, 1e-10, AutoresetMode.NEXT_STEP)
    for iteration in range(ITERATIONS):
        runs.iterate(iteration)
    runs.env.close()
    assert runs.invalid >= 10
    assert runs.terminated >= 5
    assert runs.truncated >= 5


def test_returns_agree_where_episodes_are_cut_short(script: Any) -> None:
    twins = Twins(script)
    runs = Runs(twins, 1e-12)
    rollout = runs.collect(Progress(0, 1))
    runs.env.close()
    batch = script.make_batch(twins.agent, rollout, twins.args)
    buffer = runs.recorder.buffer
    twins.ppg.prepare(buffer, Progress(0, 1))
    cut_short = (rollout.truncated & ~rollout.terminated).flatten()
    assert cut_short.any()
    assert runs.both
    assert (buffer.bootstrap.flatten() != 0).equal(cut_short)
    for name in ("advantages", "returns"):
        close(getattr(buffer, name).flatten(), batch[name], 1e-10, name)
    close(buffer.logprobs.flatten(), batch["logprobs"], 1e-10, "logprobs")


class FirstNumber(torch.nn.Module):
    """Values an observation by its first number."""

    def value(self, obs: Tensor) -> Tensor:
        return obs[..., 0]

    def policy(self, obs: Tensor) -> Categorical:
        return Categorical(logits=torch.zeros(*obs.shape[:-1], 2))


def test_script_bootstraps_truncated_episodes_and_not_terminated_ones(script: Any) -> None:
    """By hand, gamma 0.5, lambda 0: returns are r + 0.5 * (what follows)."""
    args = script.parse_args(["--gamma=0.5", "--gae-lambda=0"])
    obs = torch.zeros(5, 1, 4)
    obs[:, 0, 0] = torch.tensor([2.0, 4.0, 6.0, 8.0, 10.0])
    rollout = script.Rollout(
        obs=obs,
        actions=torch.zeros(5, 1, dtype=torch.int64),
        rewards=torch.ones(5, 1),
        terminated=torch.tensor([[False], [True], [False], [True], [False]]),
        truncated=torch.tensor([[False], [False], [True], [True], [False]]),
        final_obs=torch.full((5, 1, 4), 100.0),
        next_obs=torch.full((1, 4), 12.0),
    )
    batch = script.make_batch(FirstNumber(), rollout, args)
    assert batch["returns"].tolist() == [3, 1, 51, 1, 7]
    assert batch["advantages"].tolist() == [1, -3, 45, -7, -3]


def test_rewards_are_scaled_alike(script: Any) -> None:
    """Rewards of any size and sign, the largest beyond what is let through."""
    random = np.random.default_rng(0)
    ours, theirs = script.RewardScaler(3, 0.9), RewardNormalizer(3, 0.9, clip=10.0)
    largest = 0.0
    for step in range(200):
        reward = random.normal(0.5, 2.0, 3) * (100.0 if step == 150 else 1.0)
        done = random.random(3) < 0.1
        scaled = ours(reward, done)
        np.testing.assert_allclose(theirs(reward, done, np.ones(3, bool)), scaled, rtol=1e-9)
        largest = max(largest, float(np.abs(scaled).max()))
    assert largest == 10.0


def test_script_keeps_time_as_the_package_does(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step sizes, which rollouts each phase is about, and what rewards they come with."""
    seen: list[tuple[str, float, list[int]]] = []
    rewards: list[Tensor] = []
    make_batch = script.make_batch

    def watched_batch(agent: Any, rollout: Any, args: Any) -> Any:
        rewards.append(rollout.rewards)
        return make_batch(agent, rollout, args)

    def rates(optimizers: Any) -> float:
        (rate,) = {optimizer.param_groups[0]["lr"] for optimizer in optimizers}
        return float(rate)

    def policy_phase(_: Any, optimizers: Any, batch: Any, args: Any) -> dict[str, float]:
        seen.append(("policy", rates(optimizers), [id(batch)]))
        return {}

    def auxiliary_phase(_: Any, optimizers: Any, kept: Any, args: Any) -> dict[str, float]:
        seen.append(("auxiliary", rates(optimizers), [id(batch) for batch in kept]))
        return {}

    monkeypatch.setattr(script, "make_batch", watched_batch)
    monkeypatch.setattr(script, "policy_phase", policy_phase)
    monkeypatch.setattr(script, "auxiliary_phase", auxiliary_phase)
    knobs = {"num_envs": 2, "num_steps": 8, "policy_phases": 2, "num_aux_minibatches": 2}
    knobs |= {"total_timesteps": 5 * 16 - 3, "eval_episodes": 1}
    script.main([*flags(knobs), "--learning-rate=0.5"])
    assert [name for name, _, _ in seen] == [*["policy", "policy", "auxiliary"] * 2, "policy"]
    expected = [0.5, 0.4, 0.4, 0.3, 0.2, 0.2, 0.1]
    assert [rate for _, rate, _ in seen] == pytest.approx(expected)
    for i in (2, 5):
        assert seen[i][2] == seen[i - 2][2] + seen[i - 1][2]
    # Returns begin alike, so their deviation is zero: only the limit holds.
    assert rewards[0][0].tolist() == [10.0, 10.0]
    assert all((grid < 1).all() for grid in rewards[1:])


def test_script_records_the_true_successor_where_an_episode_ends(script: Any) -> None:
    torch.manual_seed(0)
    envs = short_cartpoles()
    obs, _ = envs.reset(seed=0)
    rollout = script.collect(envs, script.Agent(), obs, 64)
    envs.close()
    dones = rollout.terminated | rollout.truncated
    assert int(dones.sum()) >= 8
    following = torch.cat((rollout.obs[1:], rollout.next_obs[None]))
    assert (following[dones].abs() <= 0.05).all(), "a reset CartPole is within 0.05 of zero"
    fell = rollout.final_obs[rollout.terminated]
    assert ((fell[:, 2].abs() > 0.2) | (fell[:, 0].abs() > 2.4)).all(), "where a CartPole falls"
    assert (rollout.final_obs[~dones] == 0).all()
