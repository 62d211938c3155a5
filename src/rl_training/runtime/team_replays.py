"""Off-policy training of several agents: a replay for each group, or one of whole teams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.algorithms.grouped import GroupedReplayLearner
from rl_training.data.grouped_replay import GroupedReplay
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.team_replay import TeamReplay, joint_specs
from rl_training.errors import ConfigError
from rl_training.models.observing import update_normalizers
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.reporting import mean_losses
from rl_training.runtime.trainer import Setup
from rl_training.types import ActionSpec, GroupedObsSpec, ObsSpec, specs_of_groups


class AgentReplayTrainer(OffPolicyTrainer):
    """The off-policy loop, with a replay of the rows of each group of agents."""

    @staticmethod
    def check(setup: Setup) -> None:
        """Refuse games with turns, and a replay that the machine cannot hold."""
        if setup.source.info.has_turns:
            raise ConfigError(
                f"{setup.config.algo} trains agents that act at the same time, and those of"
                f" {setup.config.env_id} take turns: use ippo or mappo"
            )
        OffPolicyTrainer.check(setup)

    @staticmethod
    def stored_specs(setup: Setup) -> tuple[ObsSpec, ActionSpec]:
        """Return the specs of a transition in the replay, of the group whose rows are largest."""
        info = setup.source.info
        groups = specs_of_groups(info.obs_spec, info.action_spec).values()
        return max(groups, key=lambda specs: ReplayBuffer.bytes_per_transition(*specs))

    def make_replay(self, setup: Setup) -> Any:
        """Return storage for the ``buffer_size`` transitions of a shard."""
        info, capacity = setup.source.info, setup.config.algo_kwargs.buffer_size
        groups = specs_of_groups(info.obs_spec, info.action_spec)
        rows = -(-capacity // info.num_envs)
        replays = {}
        for name, (obs_spec, action_spec) in groups.items():
            agents = info.agents[name] if name else next(iter(info.agents.values()))
            width = info.num_envs // info.rows_per_env * len(agents)
            own = info._replace(obs_spec=obs_spec, action_spec=action_spec, num_envs=width)
            size = rows * width if len(groups) > 1 else capacity
            replays[name] = self.make_replay_of(ReplayBuffer, setup, size, own)
            replays[name].agents = agents
        return GroupedReplay(replays) if isinstance(info.obs_spec, GroupedObsSpec) else replays[""]

    def update_normalizers(self, counts: Sequence[int]) -> None:
        """Add the newest rows of every replay to the statistics of the networks of their group."""
        if not isinstance(self.learner, GroupedReplayLearner):
            super().update_normalizers(counts)
            return
        for name, learner in self.learner.groups.items():
            replays: list[Any] = self.replays
            pairs = zip(replays, counts, strict=True)
            rows = [replay.groups[name].newest_observations(count) for replay, count in pairs]
            update_normalizers(learner.module, *rows, communicator=self.communicator)

    def _mean_losses(self) -> dict[str, float]:
        if not isinstance(self.learner, GroupedReplayLearner):
            return super()._mean_losses()
        return {
            f"losses/{group}/{name.removeprefix('losses/')}": value
            for group, sums in self.learner.metric_sums()["groups"].items()
            for name, value in mean_losses(sums).items()
        }


class TeamReplayTrainer(AgentReplayTrainer):
    """The off-policy loop, with a replay whose transitions are steps of whole teams."""

    @staticmethod
    def stored_specs(setup: Setup) -> tuple[ObsSpec, ActionSpec]:
        """Return the specs of a transition in the replay."""
        info = setup.source.info
        return joint_specs(info.obs_spec, info.action_spec, info.rows_per_env)

    def make_replay(self, setup: Setup) -> TeamReplay:
        """Return storage for the ``buffer_size`` transitions of a shard, each of a whole team."""
        info = setup.source.info
        teams = info._replace(num_envs=info.num_envs // info.rows_per_env)
        capacity = setup.config.algo_kwargs.buffer_size
        replay = self.make_replay_of(TeamReplay, setup, capacity, teams)
        (replay.members,) = info.agents.values()
        return replay
