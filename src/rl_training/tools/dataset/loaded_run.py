"""The run that a dataset is made from: its checkpoint, its environment and its provenance."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.registration import EnvSpec, WrapperSpec

from rl_training.checkpointing import find_checkpoint
from rl_training.config import TrainConfig
from rl_training.datasets.reading import RecordedEpisode
from rl_training.datasets.writing import Recorded
from rl_training.envs.action_masks import ActionMaskObservation
from rl_training.envs.adapter import VectorAdapter
from rl_training.envs.ids import find_spec
from rl_training.errors import CheckpointError, ConfigError
from rl_training.eval import make_eval_env
from rl_training.runs import versions
from rl_training.runtime.stored import (
    config_from_state,
    load_stored,
    malformed_state,
    with_environment,
)
from rl_training.trust import Trust
from rl_training.types import ActionSpec, ObsSpec

_PLACES = ("output_dir", "init_from")
"""Settings that name places on a machine, which the provenance leaves out."""


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A checkpoint's content, and where it was read from."""

    path: Path
    digest: str
    """The SHA-256 that the checkpoint contains."""
    state: dict[str, Any]
    config: TrainConfig[Any]
    played: TrainConfig[Any]
    """The config with the environment that is recorded, which may be another one."""
    obs_spec: ObsSpec
    action_spec: ActionSpec

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None for a portable policy file."""
        training = self.state.get("training")
        with malformed_state(self.path):
            return int(training["counters"]["global_step"]) if training is not None else None


def load_run(
    given: Path,
    trust: Trust,
    *,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> LoadedRun:
    """Return the content of a run's last checkpoint, of a checkpoint, or of a policy file.

    ``env_id`` and ``env_kwargs`` replace the environment that is recorded.
    """
    path = find_checkpoint(given)
    digest, state = load_stored(path, trust=trust)
    changed = with_environment(state, env_id, env_kwargs)
    if changed["custom_env"]:
        raise CheckpointError(
            f"{given} was trained with env_fn, and the command line cannot create that environment:"
            " train with a registered environment, or name one for dataset make (--env-id"
            " my_package:MyEnv-v0)"
        )
    config, played = config_from_state(state), config_from_state(changed)
    with malformed_state(path):
        obs_spec = ObsSpec.from_plain(state["obs_spec"])
        action_spec = ActionSpec.from_plain(state["action_spec"])
    return LoadedRun(path, digest, state, config, played, obs_spec, action_spec)


@contextlib.contextmanager
def evaluation_env(run: LoadedRun) -> Iterator[VectorAdapter]:
    """Yield one environment as the run's evaluations use it; close it afterwards."""
    config = run.played.with_overrides(vectorization="sync", overlap=False)
    adapter = make_eval_env(config, 1, spaces=(run.obs_spec, run.action_spec))
    try:
        if not isinstance(adapter, VectorAdapter):
            raise ConfigError(f"{adapter.name} has several agents: datasets are of one agent")
        yield adapter
    finally:
        adapter.close()


def single_env(adapter: VectorAdapter) -> Any:
    """Return the environment of `evaluation_env`, with seeded episodes."""
    vector: Any = adapter.env
    return vector.envs[0]


def recorded_from(run: LoadedRun, env: Any) -> Recorded:
    """Return the spaces and the spec of the run's environment."""
    return Recorded(
        env.observation_space, env.action_space, str(run.config.algo), _env_spec(run.played, env)
    )


def _env_spec(config: TrainConfig[Any], env: Any) -> EnvSpec | None:
    """Return what makes the environment with its time limit and the run's wrappers."""
    spec: EnvSpec | None = env.unwrapped.spec
    if spec is None:
        return None
    limit = find_spec(config.env_id).max_episode_steps  # gymnasium.make removes it from the spec
    wrappers = [(one.path, dict(one.kwargs)) for one in config.wrappers]
    if isinstance(env.env, ActionMaskObservation):
        kind = ActionMaskObservation
        wrappers.append((f"{kind.__module__}:{kind.__name__}", {}))
    return dataclasses.replace(
        spec,
        max_episode_steps=config.env_kwargs.get("max_episode_steps", limit),
        order_enforce=True,
        disable_env_checker=False,
        additional_wrappers=tuple(
            WrapperSpec(path.rpartition(":")[2], path, kwargs) for path, kwargs in wrappers
        ),
    )


class Returns:
    """Returns of whole episodes."""

    def __init__(self) -> None:
        self._returns: list[float] = []

    def add(self, episode: RecordedEpisode) -> float:
        """Count an episode that was recorded from its start to its end; return its return."""
        self._returns.append(episode.ret)
        return episode.ret

    def summary(self) -> dict[str, Any]:
        """Return their number, mean and standard deviation; of none both are None."""
        found = self._returns
        return {
            "episodes": len(found),
            "mean": float(np.mean(found)) if found else None,
            "std": float(np.std(found)) if found else None,
        }


class Provenance(NamedTuple):
    """Where a dataset comes from; nothing in it depends on the machine's folders or on time."""

    kind: str
    """The command that wrote it."""
    run: LoadedRun
    details: dict[str, Any]

    def plain(self, returns: Returns, cut_episodes: list[int]) -> dict[str, Any]:
        """Return plain values for the metadata."""
        config = self.run.config
        settings = {
            name: value
            for name, value in config.to_dict().items()
            if name not in _PLACES and not _is_place(value)
        }
        return {
            "kind": self.kind,
            "checkpoint": self.run.digest,
            "checkpoint_step": self.run.step,
            "algorithm": str(config.algo),
            **self.details,
            "returns": returns.summary(),
            "cut_episodes": cut_episodes,
            "versions": {**versions(), **_env_package(self.run.played)},
            "config": settings,
        }


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()


def _env_package(config: TrainConfig[Any]) -> dict[str, str]:
    """Return the version of the package that defines the environment, if it is installed."""
    entry = find_spec(config.env_id).entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    top = module.partition(":")[0].partition(".")[0]
    if not top or top in sys.stdlib_module_names:
        return {}
    names = sorted(set(importlib.metadata.packages_distributions().get(top, ())))
    return {name.lower(): importlib.metadata.version(name) for name in names}
