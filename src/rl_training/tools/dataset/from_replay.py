"""``rl-training dataset from-replay``: episodes of the replay that a run saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl_training.communicator import saved_shards
from rl_training.data.replay_buffer import Draw, ReplayBuffer
from rl_training.datasets.reading import RecordedEpisode
from rl_training.datasets.writing import nested
from rl_training.errors import CheckpointError
from rl_training.runtime.memory import check_host_memory
from rl_training.runtime.replay_store import ReplayStore
from rl_training.runtime.stored import malformed_state
from rl_training.tools.dataset.loaded_run import LoadedRun
from rl_training.types import Array


class ReplayedEpisode(NamedTuple):
    """An episode, and whether the replay holds it from its start to its end."""

    episode: RecordedEpisode
    whole: bool


def require_replay(run: LoadedRun) -> tuple[Path, list[Mapping[str, Any]]]:
    """Return the folder of a run's replay files, and what its checkpoint states of each shard's.

    Raises `CheckpointError` for a run without a replay, and where its files are gone.
    """
    with malformed_state(run.path):
        training = run.state.get("training")
        extra = training.get("extra") if training is not None else None
        saved = extra.get("replay") if isinstance(extra, Mapping) else None
        if saved is None:
            raise CheckpointError(f"{run.path} names no replay: {_why_none(run)}")
        shards = saved_shards(saved)
        names = [str(name) for shard in shards for name in shard["chunks"]]
    folder = run.path.parent.parent / "replay"
    missing = sum(not (folder / f"{name}.replay").is_file() for name in names)
    if missing:
        raise CheckpointError(
            f"{missing} of {len(names)} replay files of {run.path} are not in {folder}: only those"
            " of a run's checkpoints 'last' and 'best' are kept"
        )
    return folder, shards


def _why_none(run: LoadedRun) -> str:
    if "training" not in run.state:
        return "it contains a policy alone. Name the run folder or one of its checkpoints"
    return (
        f"{run.config.algo} keeps none, only off-policy algorithms such as dqn and sac do. To"
        " record episodes of this policy, use rl-training dataset make"
    )


def episodes_of_replay(
    run: LoadedRun, space: spaces.Space[Any], frame_stack: int
) -> Iterator[ReplayedEpisode]:
    """Yield what the replay holds, by environment and then by time.

    The oldest episode of an environment may lack its beginning. The newest, which is unfinished, is
    marked truncated; the environment's current observation is its last one. ``space`` is that of
    the environment's observations.
    """
    folder, shards = require_replay(run)
    index = 0
    for saved in shards:
        replay = _loaded(run, folder, saved, frame_stack)
        is_complete = _holds_whole_run(run, replay, len(shards))
        for cells, from_start in _segments(replay, is_complete):
            episode, ended = _episode(run, replay, cells, space, index)
            yield ReplayedEpisode(episode, from_start and ended)
            index += 1


def _loaded(
    run: LoadedRun, folder: Path, saved: Mapping[str, Any], frame_stack: int
) -> ReplayBuffer:
    """Return a shard's replay; one that samples sequences is read as a ring of transitions."""
    with malformed_state(f"the replay of {run.path}"):
        ring, num_envs, _ = (int(size) for size in saved["ring"]["shape"])
        specs = (run.obs_spec, run.action_spec)
        each = ReplayBuffer.bytes_per_transition(*specs, frame_stack=frame_stack)
        capacity = (ring - frame_stack) * num_envs
        check_host_memory(capacity, each, quiet=True)
        replay = ReplayBuffer(capacity, num_envs, *specs, gamma=1.0, frame_stack=frame_stack)
        try:
            ReplayStore(folder).load(replay, saved)
        except CheckpointError as error:  # without advice for a resume
            raise CheckpointError(str(error).partition("; resume ")[0]) from None
    return replay


def _cells(replay: ReplayBuffer) -> Array:
    """Return the cells of all transitions, (rows, environments), oldest row first."""
    state = replay.ring_state()
    (ring, num_envs, _), (head, filled) = state["shape"], state["position"]
    rows: Array = (head - filled + np.arange(filled)) % ring
    cells: Array = rows[:, None] * num_envs + np.arange(num_envs)
    return cells


def _holds_whole_run(run: LoadedRun, replay: ReplayBuffer, shards: int) -> bool:
    """Return whether the replay holds all steps of the run: its oldest episodes are whole then."""
    stored = int(replay.is_valid(_cells(replay)).sum())
    return run.step is not None and stored * shards >= run.step


def _segments(replay: ReplayBuffer, is_complete: bool) -> Iterator[tuple[Array, bool]]:
    """Yield the cells of each episode, and whether they begin with it, by environment and time."""
    cells = _cells(replay)
    valid = replay.is_valid(cells)
    rows = (int(row) for row in cells[:, 0] // replay.num_envs)
    continues = np.array([replay.episode_continues(row) for row in rows], bool)
    for env in range(replay.num_envs):
        kept = np.flatnonzero(valid[:, env])
        # A new episode begins after an end, or after rows that only reset the environment.
        begins = np.flatnonzero(~continues[kept[:-1], env] | (np.diff(kept) > 1)) + 1
        for number, part in enumerate(np.split(kept, begins)):
            if len(part):
                yield cells[part, env], number > 0 or is_complete


def _episode(
    run: LoadedRun, replay: ReplayBuffer, cells: Array, space: spaces.Space[Any], index: int
) -> tuple[RecordedEpisode, bool]:
    """Return the episode of some cells as the environment returned it, and whether it ended."""
    batch = replay.batch(Draw(cells, None), 1.0, 1.0)
    arrays = {}
    for name, leaf in run.obs_spec.leaves.items():
        here, after = (
            (batch[key][name] if run.obs_spec.is_dict else batch[key]).numpy()
            for key in ("obs", "next_obs")
        )
        arrays[name] = leaf.returned(np.concatenate((here, after[-1:])))
    terminated = batch["discounts"].numpy() == 0.0
    row, env = divmod(int(cells[-1]), replay.num_envs)
    ended = not replay.episode_continues(row)[env]
    truncated = np.zeros(len(cells), bool)
    truncated[-1] = not terminated[-1]
    episode = RecordedEpisode(
        index,
        nested(space, arrays),
        run.action_spec.to_env(batch["actions"].numpy()),
        batch["rewards"].numpy(),
        terminated,
        truncated,
    )
    return episode, ended
