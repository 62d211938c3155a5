"""Runs as tasks of a Ray cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.errors import ConfigError, UserError
from rl_training.runtime.ray_workers import cause_of, connect, disconnect, module_paths
from rl_training.terminal import one_line
from rl_training.tools.zoo.jobs import Job, job_status
from rl_training.tools.zoo.processes import is_locked, last_words, start_process
from rl_training.tools.zoo.run import Ended

_POLL_SECONDS = 0.1
_SECONDS_TO_SAVE = 60.0
"""How long a run whose task was lost may take to save and end."""
_BY_RAY = re.compile("RAY_|OMP_NUM_THREADS$")
"""Environment variables that Ray sets for its tasks, and that a run must not take for its own."""


def run_job(
    job: Job, torch_threads: int, trust_modules: Sequence[str] | None, names: frozenset[str]
) -> int:
    """Run a job in a process on the machine of this task, and return its exit code.

    A task that is cancelled lets the run save. ``names`` are the environment variables that the
    user has set.
    """
    if not job.folder.is_dir():
        raise UserError(
            f"{job.folder} does not exist on {socket.gethostname()}: --output-dir must be on a file"
            " system that all machines share"
        )
    # Ray cancels by this signal, which is ignored where the command was started with "&".
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _wait_until_unlocked(job)
    mine = {name: value for name, value in os.environ.items() if _is_own(name, names)}
    process = start_process(job, torch_threads, trust_modules, mine)
    try:
        while (code := process.poll()) is None:
            time.sleep(_POLL_SECONDS)  # a cancellation does not interrupt a call that waits
    except KeyboardInterrupt:
        process.terminate()
        return process.wait()
    return code


def _is_own(name: str, names: frozenset[str]) -> bool:
    if name == "RAY_ADDRESS":  # a run with engine: ray would wait for CPUs that runs occupy
        return False
    return name in names or not _BY_RAY.match(name)


def _wait_until_unlocked(job: Job) -> None:
    """Wait until the process of a task that was lost has saved and ended."""
    run_dir = job_status(job).run_dir
    end = time.monotonic() + _SECONDS_TO_SAVE
    while run_dir is not None and is_locked(run_dir):
        if time.monotonic() > end:
            raise UserError(f"{run_dir} is being trained by another process")
        time.sleep(0.5)


def _available_cpus(ray: Any) -> float:
    return float(ray.cluster_resources().get("CPU", 0.0))


class RayRuns:
    """Runs each job as a Ray task, on the cluster of ``RAY_ADDRESS`` or on one of its own."""

    def __init__(
        self,
        processes: int | None,
        cpus: float,
        retries: int,
        trust_modules: Sequence[str] | None = None,
    ) -> None:
        wanted = processes or max(1, int((os.cpu_count() or 1) / cpus))
        self._guard = connect(wanted * cpus)
        import ray

        available = _available_cpus(ray)
        self.at_once = processes or int(available / cpus)
        if available < cpus:
            self.close()
            raise ConfigError(
                f"the Ray cluster has {available:g} CPUs and a run requests {cpus:g}: reduce"
                " --cpus-per-run"
            )
        self.retries = retries
        names = frozenset(os.environ)
        self._arguments = (max(1, int(cpus)), trust_modules, names)
        self._task: Any = ray.remote(
            num_cpus=cpus,
            max_retries=0,  # run_jobs retries, and reports it
            runtime_env={"env_vars": {"PYTHONPATH": module_paths()}},
        )(run_job)

    def start(self, job: Job) -> RayRun:
        """Start a job, or resume its run, where there are CPUs for it."""
        job.folder.mkdir(parents=True, exist_ok=True)
        return RayRun(job, self._task.remote(job.at(Path.cwd()), *self._arguments))

    def close(self) -> None:
        """Shut the cluster down, if it was started for these runs."""
        disconnect(self._guard)


class RayRun:
    """A job as a Ray task."""

    def __init__(self, job: Job, result: Any) -> None:
        self.job = job
        self._result = result

    def poll(self) -> Ended | None:
        """Return how the task ended; None: it has not."""
        import ray

        ready, _ = ray.wait([self._result], timeout=0)
        if not ready:
            return None
        try:
            code: int = ray.get(self._result)
        except ray.exceptions.TaskCancelledError:
            return Ended(succeeded=True, reason="")
        except ray.exceptions.RayTaskError as error:
            return Ended(succeeded=False, reason=one_line(str(cause_of(error)).partition("\n")[0]))
        except ray.exceptions.RayError as error:
            reason = f"its task was lost ({type(error).__name__})"
            return Ended(succeeded=False, reason=reason, was_lost=True)
        reason = last_words(self.job) or f"exit code {code}"
        if code < 0:
            reason = f"its process was killed by signal {-code}"
        return Ended(code == 0, reason, was_lost=code < 0)

    def stop(self, *, hard: bool) -> None:
        """Let the run save and end; ``hard`` does not wait for that."""
        import ray

        ray.cancel(self._result, force=hard)
