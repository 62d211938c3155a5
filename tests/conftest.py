"""Shared fixtures. Importing `probe_envs` registers the small environments tests train on."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import probe_envs  # noqa: F401 - registers environments
from direct_workers import DirectWorkers
from rl_training.config import TrainConfig
from rl_training.experiment.registry import ALGORITHMS

pytest.register_assert_rewrite("state_compare")

QUICK_KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps": 64},
    "dqn": {"learning_starts": 64, "batch_size": 32, "train_freq": 4, "buffer_size": 300},
}
QUICK_KNOBS["ippo"] = QUICK_KNOBS["mappo"] = {"num_steps": 32}
QUICK_KNOBS["idqn"] = QUICK_KNOBS["vdn"] = QUICK_KNOBS["qmix"] = QUICK_KNOBS["dqn"]
QUICK_KNOBS["c51"] = {  # all that Rainbow has
    **QUICK_KNOBS["dqn"],
    **dict.fromkeys(("double", "dueling", "noisy", "prioritized"), True),
    "n_step": 3,
}
QUICK_KNOBS["qrdqn"] = {**QUICK_KNOBS["dqn"], "num_quantiles": 16}
QUICK_KNOBS["iqn"] = {**QUICK_KNOBS["dqn"], "num_quantiles": 8, "num_target_quantiles": 8}
QUICK_KNOBS["a2c"] = {"num_steps": 16}
QUICK_KNOBS["pqn"] = {"num_steps": 32, "num_minibatches": 2}
QUICK_KNOBS["impala"] = {"num_steps": 32, "num_minibatches": 2}
QUICK_KNOBS["appo"] = {"num_steps": 64}
QUICK_KNOBS["ppg"] = {"num_steps": 64, "policy_phases": 3, "aux_epochs": 2}
QUICK_KNOBS["recurrent_ppo"] = {"num_steps": 64, "lstm_size": 16}
QUICK_KNOBS["drqn"] = {
    **{name: value for name, value in QUICK_KNOBS["dqn"].items() if name != "batch_size"},
    "batch_sequences": 8,
    "lstm_size": 16,
}
QUICK_KNOBS["sac"] = QUICK_KNOBS["td3"] = {**QUICK_KNOBS["dqn"], "hidden_sizes": [32, 32]}
QUICK_KNOBS["sac_discrete"] = QUICK_KNOBS["sac"]
for _offline in ("bc", "td3_bc", "iql", "cql", "rebrac", "awac"):
    QUICK_KNOBS[_offline] = {"batch_size": 32, "hidden_sizes": [32, 32]}

MEMORY_KNOBS: dict[str, dict[str, Any]] = {
    "ppo": {"lstm_size": 16},
    "a2c": {"lstm_size": 16, "sequence_length": 8},
    "ppg": {"lstm_size": 16, "sequence_length": 16, "num_aux_minibatches": 4},
    **{algo: {"lstm_size": 16, "batch_sequences": 8} for algo in ("dqn", "sac", "td3")},
}
WITH_MEMORY = ["ppo+gru", "a2c+gru", "ppg+lstm", "dqn+gru", "sac+lstm", "td3+gru"]
"""Algorithms and values of their setting ``memory``, as `make_config` takes them."""

REPEATED = (
    "test_acceleration.py::test_modes_agree_after_eight_updates[sac_discrete-compile",
    # RecurrentPPO and DRQN are PPO and DQN with memory, and SAC and TD3 share what is recurrent.
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[ppo+gru]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[a2c+gru]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[ppg+lstm]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[dqn+gru]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[sac+lstm]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[td3+gru]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[ppo+gru]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[dqn+gru]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[sac+lstm]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[ppo+gru]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[a2c+gru]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[dqn+gru]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[td3+gru]",
    "test_probes.py::test_policy_that_depends_on_the_observation[ppo+gru]",
    "test_probes.py::test_policy_that_depends_on_the_observation[a2c+gru]",
    "test_probes.py::test_policy_that_depends_on_the_observation[ppg+lstm]",
    "test_probes.py::test_policy_that_depends_on_the_observation[dqn+gru]",
    "test_probes.py::test_policy_that_depends_on_the_observation[sac+lstm]",
    "test_probes.py::test_policy_that_depends_on_the_observation[td3+gru]",
    "test_atari_dqn_trainer_smoke.py::test_killed_and_resumed_equals_never_stopped[native",
    "test_atari_envs.py::test_games_come_back_bit_for_bit[async-60]",
    "test_atari_envs.py::test_no_ops_and_seeds_make_games_differ_and_repeat[sync]",
    "test_atari_ppo_trainer_smoke.py::test_killed_and_resumed_equals_never_stopped[native",
    "test_doctor.py::test_it_recommends_what_is_faster_and_changes_nothing",
    # Without a lag APPO is PPO bit for bit (test_vtrace_learner.py).
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[appo]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[appo]",
    "test_probes.py::test_box_actions_of_an_odd_scale[appo]",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[appo]",
    "test_probes.py::test_policy_that_depends_on_the_observation[appo]",
    "test_probes.py::test_value_of_a_constant_reward[appo]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[appo]",
    "test_probes.py::test_value_that_depends_on_the_observation[appo]",
    # IDQN is DQN on rows, and VDN is QMIX without a mixer; groups and teams are cases of their own.
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[idqn]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[qmix]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[vdn]",
    "test_doctor.py::test_every_algorithm_can_be_measured[idqn]",
    "test_doctor.py::test_every_algorithm_can_be_measured[qmix]",
    "test_doctor.py::test_every_algorithm_can_be_measured[vdn]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[idqn]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[vdn]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[idqn]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[vdn]",
    "test_shared_folder.py::test_policies_of_every_algorithm_are_loaded_as_they_were[idqn]",
    "test_shared_folder.py::test_policies_of_every_algorithm_are_loaded_as_they_were[vdn]",
    # QR-DQN, C51 and IQN are DQN with another loss; here C51 has all of Rainbow's switches.
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[c51]",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[iqn]",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[qrdqn]",
    "test_probes.py::test_policy_that_depends_on_the_observation[c51]",
    "test_probes.py::test_policy_that_depends_on_the_observation[iqn]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[iqn]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[qrdqn]",
    "test_probes.py::test_value_that_depends_on_the_observation[c51]",
    "test_probes.py::test_value_that_depends_on_the_observation[qrdqn]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[iqn]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[qrdqn]",
    "test_doctor.py::test_every_algorithm_can_be_measured[iqn]",
    "test_doctor.py::test_every_algorithm_can_be_measured[qrdqn]",
    "test_doctor.py::test_every_algorithm_can_be_measured[c51]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[qrdqn]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[iqn]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[qrdqn]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[iqn]",
    "test_shared_folder.py::test_policies_of_every_algorithm_are_loaded_as_they_were[qrdqn]",
    "test_record_play.py::test_the_policy_plays_an_environment_that_is_named",
    "test_results_queue.py::test_a_stopped_queue_continues_its_runs",
    "test_torchrun.py::test_a_failure_of_one_rank_ends_all[reset]",
    "test_torchrun.py::test_a_failure_of_one_rank_ends_all[nan]",
    "test_workers.py::test_closing_does_not_wait_for_an_environment_that_never_closes",
    "test_device_source.py::test_graphs_that_run_no_python_compute_the_same[td3]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[awac]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[rebrac]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[td3_bc]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[awac]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[rebrac]",
    "test_resume.py::test_every_algorithm_stops_and_resumes_exactly[td3_bc]",
    "test_probes.py::test_box_actions_of_an_odd_scale[a2c]",
    "test_probes.py::test_box_actions_of_an_odd_scale[impala]",
    "test_probes.py::test_box_actions_of_an_odd_scale[recurrent_ppo]",
    "test_probes.py::test_box_actions_of_an_odd_scale[sac]",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[drqn]",
    "test_probes.py::test_policy_that_depends_on_the_observation[drqn]",
    "test_probes.py::test_policy_that_depends_on_the_observation[sac_discrete]",
    "test_probes.py::test_policy_that_depends_on_the_observation[td3]",
    "test_probes.py::test_value_that_depends_on_the_observation[drqn]",
    "test_probes.py::test_value_that_depends_on_the_observation[sac]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[drqn]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[sac_discrete]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[td3]",
    "test_recurrent_ppo_trainer_smoke.py::test_it_learns_to_recall_the_first_observation[drqn]",
    "test_remote_source.py::test_a_cluster_of_its_own_ends_with_the_run[Ctrl-C]",
    "test_remote_source.py::test_a_killed_failed_or_hanging_worker_changes_nothing[0]",
    "test_results_queue.py::test_the_time_limit_stops_the_runs",
    "test_sac_trainer_smoke.py::test_mujoco_is_resumed_exactly[td3]",
    "test_torchrun.py::test_rank_0_alone_writes_and_prints",
    "test_zoo_presets.py::test_a_failed_run_does_not_sink_the_rest",
    "test_zoo_presets.py::test_an_interrupted_benchmark_goes_on_where_it_stopped[Ctrl-C]",
    # As above; PQN and discrete SAC share networks and replay with DQN and SAC.
    "test_probes.py::test_value_of_a_constant_reward[iqn]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[c51]",
    "test_probes.py::test_value_that_depends_on_the_observation[iqn]",
    "test_probes.py::test_value_that_depends_on_the_observation[sac_discrete]",
    "test_probes.py::test_box_actions_of_an_odd_scale[ppg]",
    "test_async_source.py::test_it_trains_to_the_end_and_resumes[c51]",
    "test_async_source.py::test_it_trains_to_the_end_and_resumes[sac_discrete]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[awac]",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[rebrac]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[iql]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[impala]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[sac_discrete]",
    "test_offline_runs.py::test_killed_and_resumed_equals_never_stopped[awac]",
    "test_offline_runs.py::test_killed_and_resumed_equals_never_stopped[rebrac]",
    "test_offline_runs.py::test_killed_and_resumed_equals_never_stopped[td3_bc]",
    "test_offline_runs.py::test_online_from_offline_starts_from_its_weights_and_resumes_exactly[awac]",
    "test_offline_runs.py::test_online_from_offline_starts_from_its_weights_and_resumes_exactly[td3]",
    "test_offline_mistakes.py::test_shifted_successors_cost_half[1]",
    "test_offline_mistakes.py::test_values_are_learnt_across_truncated_episodes[1]",
    "test_a2c_reference_script.py::test_it_runs_alone_and_twice_the_same",
    "test_off_policy_reference_scripts.py::test_runs_alone_and_reports_returns_and_an_evaluation[td3",
    "test_off_policy_reference_scripts.py::test_runs_alone_and_reports_returns_and_an_evaluation[sac_discrete",
    "test_atari_envs.py::test_games_come_back_bit_for_bit[sync-60]",
    "test_atari_envs.py::test_both_backends_show_the_same_frame_by_frame[SpaceInvaders-standard]",
    "test_atari_envs.py::test_both_backends_show_the_same_frame_by_frame[Breakout-short]",
    "test_atari_ppo_trainer_smoke.py::test_overlapped_runs_repeat_and_resume",
    "test_results_queue.py::test_a_failed_run_is_named_and_stops_no_other",
    "test_torchrun.py::test_four_shards_on_four_two_and_one",
    "test_torchrun.py::test_failures_and_stops_in_unusual_places",
    "test_zoo_presets.py::test_an_interrupted_benchmark_goes_on_where_it_stopped[killed]",
    "test_zoo_presets.py::test_runs_of_other_settings_are_neither_counted_nor_touched",
    "test_zoo_ray.py::test_a_lost_task_continues_and_so_does_a_stopped_benchmark",
    "test_remote_source.py::test_a_cluster_of_its_own_ends_with_the_run[SIGKILL]",
    "test_atari_dqn_trainer_smoke.py::test_it_trains_saves_loads_and_evaluates[native]",
    "test_atari_envs.py::test_games_come_back_bit_for_bit[native-10000]",
    "test_atari_envs.py::test_no_ops_and_seeds_make_games_differ_and_repeat[native]",
    "test_atari_ppo_trainer_smoke.py::test_it_trains_saves_loads_and_evaluates[native]",
    "test_atari_ppo_trainer_smoke.py::test_overlap_changes_nothing_but_the_order_of_work",
    "test_atari_reference_scripts.py::test_runs_alone_and_reports_scores_and_an_evaluation[dqn",
    "test_determinism.py::test_same_seed_same_run_and_another_seed_another_run[iql]",
    "test_doctor.py::test_every_algorithm_can_be_measured[a2c]",
    "test_doctor.py::test_every_algorithm_can_be_measured[appo]",
    "test_doctor.py::test_every_algorithm_can_be_measured[awac]",
    "test_doctor.py::test_every_algorithm_can_be_measured[cql]",
    "test_doctor.py::test_every_algorithm_can_be_measured[rebrac]",
    "test_doctor.py::test_every_algorithm_can_be_measured[sac_discrete]",
    "test_doctor.py::test_every_algorithm_can_be_measured[td3]",
    "test_drqn_reference_script.py::test_runs_alone_and_reports_returns_and_an_evaluation",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[c51]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[qmix]",
    "test_pause.py::test_interrupted_anywhere_it_ends_the_same[td3]",
    "test_plugin_package.py::test_it_learns_as_the_page_uses_it",
    "test_ppg_reference_script.py::test_runs_alone_and_reports_returns_and_an_evaluation",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[recurrent_ppo]",
    "test_probes.py::test_masked_actions_are_honoured_and_learnt[sac_discrete]",
    "test_probes.py::test_policy_that_depends_on_the_observation[qrdqn]",
    "test_probes.py::test_policy_that_depends_on_the_observation[sac]",
    "test_probes.py::test_value_of_a_delayed_reward_is_discounted[sac]",
    "test_probes.py::test_value_that_depends_on_the_observation[ppg]",
    "test_probes.py::test_value_that_depends_on_the_observation[td3]",
    "test_record_play.py::test_the_keyboard_plays_atari",
    "test_resume.py::test_killed_and_resumed_equals_never_stopped[HalfCheetah-v5-sync]",
    "test_torchrun.py::test_a_failure_of_one_rank_ends_all[evaluation]",
    "test_torchrun.py::test_world_size_changes_between_resumes",
    "test_zoo_presets.py::test_fewer_seeds_and_a_share_of_the_steps",
)
"""Slow tests of what others test, too, with another algorithm, signal or number of processes: in
`make test-full`."""


def pytest_sessionstart() -> None:
    """Let tests interrupt processes with SIGINT, which jobs in the background of a shell ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `REPEATED`."""
    for item in items:
        if any(item.nodeid.startswith(f"tests/{name}") for name in REPEATED):
            item.add_marker(pytest.mark.full)


ONLINE = [n for n, entry in ALGORITHMS.items() if not (entry.offline or entry.multi_agent)]
"""Algorithms that step environments of one agent, and only so."""
NOT_MEASURED = {
    "classic": {"c51", "sac_discrete"},
    "box2d": {"qrdqn", "c51", "iqn", "pqn", "sac_discrete"},
}
"""Algorithms whose presets are not in these benchmarks of the zoo yet, by benchmark."""


def takes_discrete(algo: str) -> bool:
    """Whether an algorithm is tried on discrete actions, or on continuous ones."""
    return "Discrete" in ALGORITHMS[plain(algo)].actions


def plain(algo: str) -> str:
    """The name of an algorithm without its memory."""
    return algo.partition("+")[0]


def any_env(algo: str) -> str:
    """A real environment that an algorithm can be trained on."""
    if ALGORITHMS[plain(algo)].multi_agent:
        return "pettingzoo:mpe2/simple_spread_v3"
    return "CartPole-v1" if takes_discrete(algo) else "Pendulum-v1"


def probe(algo: str, name: str) -> dict[str, Any]:
    """A probe environment that an algorithm can be trained on."""
    kwargs = {} if takes_discrete(algo) else {"continuous": True}
    return {"env_id": f"probe/{name}-v0", "env_kwargs": kwargs}


def write_random_episodes(
    env_id: str,
    folder: Path,
    episodes: int = 4,
    steps: int = 50,
    *,
    kwargs: Mapping[str, Any] = {},
    masked: bool = True,
) -> Path:
    """A dataset of random actions, legal ones unless ``masked`` is False.

    Episodes end after ``steps`` at the latest.
    """
    from rl_training.datasets.reading import RecordedEpisode
    from rl_training.datasets.writing import Recorded, find_destination, stacked, write_dataset

    env = gym.make(env_id, **kwargs)
    env.action_space.seed(5)

    def played(index: int) -> RecordedEpisode:
        observations: list[Any] = [env.reset(seed=index)[0]]
        actions: list[Any] = []
        rewards: list[Any] = []
        ended = False
        while not ended and len(actions) < steps:
            seen = observations[-1]
            legal = seen.get("action_mask") if isinstance(seen, dict) and masked else None
            actions.append(env.action_space.sample(legal))
            obs, reward, ended, _, _ = env.step(actions[-1])
            observations.append(obs)
            rewards.append(reward)
        last = np.arange(len(actions)) == len(actions) - 1
        return RecordedEpisode(
            index,
            stacked(env.observation_space, observations),
            np.array(actions),
            np.array(rewards, np.float64),
            last & ended,
            last & (not ended),
        )

    recorded = Recorded(env.observation_space, env.action_space, "random", env.spec)
    place = find_destination(folder)
    return write_dataset(place, map(played, range(episodes)), recorded, dict)


MakeConfig = Callable[..., TrainConfig[Any]]


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the list of the user's own checkpoints out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks: one thread is fastest and keeps parallel test runs honest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RecordedData = Callable[[str], Path]


@pytest.fixture(scope="session")
def recorded_data(tmp_path_factory: pytest.TempPathFactory) -> RecordedData:
    """Datasets of random actions, by the id of the environment; each is made once."""

    @functools.cache
    def made(env_id: str) -> Path:
        pytest.importorskip("minari")
        return write_random_episodes(env_id, tmp_path_factory.mktemp("recorded") / "random")

    return made


@pytest.fixture
def make_config(tmp_path: Path, recorded_data: RecordedData) -> MakeConfig:
    """A quick, quiet config; keywords replace fields and algorithm knobs alike.

    The name of an algorithm may end with a memory: "sac+lstm".

    An algorithm that learns from a dataset alone gets one, and as many updates as others get
    ``total_timesteps``, unless ``dataset`` is given.
    """

    def make(**overrides: Any) -> TrainConfig[Any]:
        algo, _, memory = overrides.pop("algo", "ppo").partition("+")
        if memory:
            overrides = {"memory": memory, **MEMORY_KNOBS[algo], **overrides}
        total: dict[str, Any] = {"total_timesteps": overrides.pop("total_timesteps", 512)}
        if "total_updates" in overrides:
            total = {"total_updates": overrides.pop("total_updates")}
        elif ALGORITHMS[algo].offline and "dataset" not in overrides:
            env_id = overrides.get("env_id", any_env(algo))
            total = {"total_updates": total["total_timesteps"]}
            overrides["dataset"] = str(recorded_data(env_id))
        if total.get("total_updates"):
            overrides.setdefault("eval_interval", 0)
        base: TrainConfig[Any] = TrainConfig(
            algo=algo,
            env_id=any_env(algo),
            **total,
            num_envs=2,
            seed=7,
            output_dir=tmp_path / "runs",
            eval_episodes=2,
            progress=False,
            tensorboard=False,
        )
        return base.with_overrides(**{**QUICK_KNOBS[algo], **overrides})

    return make


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> type[DirectWorkers]:
    """Let engine: ray use workers in this process."""
    from rl_training.runtime import ray_workers

    workers = type("Workers", (DirectWorkers,), {})
    monkeypatch.setattr(ray_workers, "RayWorkers", workers)
    return workers
