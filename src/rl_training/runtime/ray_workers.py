"""Workers as Ray actors, on a cluster that exists or on one that is started for the run."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training.config import TrainConfig
from rl_training.envs import EnvFn
from rl_training.errors import ConfigError, WorkerError
from rl_training.runtime.cluster_guard import ClusterGuard
from rl_training.runtime.remote_worker import (
    Described,
    Request,
    ShardWorker,
    StateRequired,
    StillWorking,
    Taken,
)
from rl_training.runtime.supervision import Weights

_START_SECONDS = 120.0
"""What a worker may take to start, besides ``worker_timeout``."""
_CONNECT_SECONDS = 10.0
_STORE_BYTES = 500_000_000
"""Size of the object store of a cluster that is started for a run; it is taken as it fills."""


def require_ray() -> None:
    """Raise `ConfigError` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray needs the extra 'ray'; in the clone: pip install '.[ray]'")


def connect(num_cpus: float) -> ClusterGuard | None:
    """Connect to the cluster of ``RAY_ADDRESS``, else start one.

    Returns the guard of a cluster that was started; `disconnect` shuts it down.
    """
    require_ray()
    # Without it Ray would install the project anew for every worker under uv.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address and _has_token():  # read when Ray is imported; clusters without tokens accept it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if ray.is_initialized():
        return None
    shared: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address:
        _require_answer(address)
        try:
            ray.init(address, **shared)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at RAY_ADDRESS={address}: {error}. If it requires a token, set"
                " RAY_AUTH_TOKEN_PATH to its file"
            ) from error
        return None
    guard = ClusterGuard()
    ray.init(
        "local",  # never one that happens to run on this machine
        num_cpus=max(1, round(num_cpus + 0.499)),  # logical: what the workers request
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        **shared,
    )
    guard.watch()
    return guard


def _has_token() -> bool:
    """Whether there is a token for clusters with token authentication, where Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


def _require_answer(address: str) -> None:
    """Raise `ConfigError` if nothing listens at a cluster's address; Ray tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return  # "auto" and other names
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster at RAY_ADDRESS={address}: {error}") from None


def module_paths() -> str:
    """Return the PYTHONPATH with which workers find what this process finds, as the user's code."""
    return os.pathsep.join(path for path in sys.path if path)


def disconnect(guard: ClusterGuard | None) -> None:
    """Shut down the cluster that `connect` started, if it did."""
    import ray

    if guard is not None:
        ray.shutdown()
        guard.close()


class RayWorkers:
    """Starts a Ray actor per shard."""

    def __init__(self, config: TrainConfig[Any], env_fn: EnvFn | None, threads: int | None) -> None:
        self._guard = connect(config.shards * config.worker_cpus)
        import ray

        variables = {"CUDA_VISIBLE_DEVICES": ""}  # also where a worker requests no GPU
        # Ray would set it to the CPUs that are requested, which may change how sums are rounded.
        variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        variables["PYTHONPATH"] = module_paths()
        self._actor: Any = ray.remote(
            num_cpus=config.worker_cpus,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": variables},
        )(ShardWorker)
        try:
            self._arguments = (ray.put(config), ray.put(env_fn))
        except (TypeError, pickle.PicklingError) as error:
            self.close()
            raise ConfigError(
                f"env_fn cannot be sent to the workers: {' '.join(str(error).split())}"
            ) from None
        self._threads = threads
        self._timeout = config.worker_timeout

    def start(self, shard: int) -> RayWorker:
        """Start the actor of a shard."""
        actor = self._actor.remote(*self._arguments, shard, self._threads)
        return RayWorker(actor, self._timeout)

    def put(self, weights: Mapping[str, Any]) -> Any:
        """Put weights into the object store."""
        import ray

        return ray.put(dict(weights))

    def wait(self, handles: Sequence[Any], seconds: float) -> None:
        """Wait until one of the actors has yielded something."""
        import ray

        answers = [one.answers for one in handles if one.answers is not None]
        if answers:
            ray.wait(answers, num_returns=1, timeout=seconds, fetch_local=False)

    def close(self) -> None:
        """Shut the cluster down, if it was started for this run."""
        guard, self._guard = self._guard, None
        disconnect(guard)


class RayWorker:
    """The handle of one actor."""

    def __init__(self, actor: Any, timeout: float) -> None:
        self._actor = actor
        self._timeout = timeout
        self._weights: int | None = None
        self.answers: Any = None
        """What the current request yields; None: there is no request."""

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=self._timeout + _START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            seconds = self._timeout + _START_SECONDS
            raise WorkerError(
                f"a worker was not ready after {seconds:,.0f} s: the cluster may not have the CPUs"
                " that it requests (worker_cpus)"
            ) from None
        except ray.exceptions.RayError as error:
            raise cause_of(error) from None

    def describe(self) -> Described:
        """Wait for the actor to start."""
        described: Described = self._get(self._actor.describe.remote())
        return described

    def load_state(self, name: int, state: Mapping[str, Any]) -> bool:
        """Send a state, and wait until it is restored."""
        return bool(self._get(self._actor.load_state.remote(name, dict(state))))

    def load_weights(self, weights: Weights) -> None:
        """Send weights, unless the actor has them; requests that follow are executed after it."""
        if self._weights != weights.number:
            self._actor.load_weights.remote(weights.version, weights.put)
            self._weights = weights.number

    def start(self, request: Request) -> None:
        """Send a request."""
        self.answers = self._actor.take.options(num_returns="streaming").remote(request)

    def poll(self) -> StateRequired | StillWorking | Taken | Exception | None:
        """Return what the actor yielded next; None: nothing yet."""
        import ray

        if self.answers is None:
            return WorkerError("no request was sent")
        ready, _ = ray.wait([self.answers], num_returns=1, timeout=0, fetch_local=False)
        if not ready:
            return None
        try:
            answer: StateRequired | StillWorking | Taken = ray.get(next(self.answers))
        except ray.exceptions.RayError as error:
            return cause_of(error)
        except StopIteration:
            return WorkerError("the worker ended its answer early")
        return answer

    def kill(self) -> None:
        """Kill the process of the actor."""
        import ray

        self.answers = None
        with contextlib.suppress(Exception):  # it may be gone, and the cluster with it
            ray.kill(self._actor)


def cause_of(error: Exception) -> Exception:
    """Return what a worker raised, or why it is gone."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return WorkerError(f"{_last_line(str(error))}\n{error}")
    reason, _, _ = _last_line(str(error)).partition(" Worker exit type:")  # and a page of advice
    return WorkerError(f"it was lost ({type(error).__name__}): {reason}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
