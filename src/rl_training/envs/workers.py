"""Environments in worker processes that load no torch, ignore Ctrl-C and are always ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.util
import os
import queue
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker

from rl_training.envs import checks
from rl_training.errors import ConfigError, EnvironmentFailure, UserError, WorkerError
from rl_training.seeding import stream_seed

_BROKEN = (EOFError, BrokenPipeError, ConnectionResetError)
_START_TIMEOUT = 120.0
_CLOSE_TIMEOUT = 5.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class _TextErrors:
    """Sends failures to the main process as text, whatever classes they are of.

    An exception class of the user's script, or a local one, cannot be sent to another process.
    """

    def __init__(self, errors: Any, index: int) -> None:
        self._errors = errors
        self._index = index

    def put(self, failure: tuple[int, type[BaseException], BaseException, str]) -> None:
        """Send what Gymnasium's worker reports: index, class, exception, traceback."""
        _, _, error, trace = failure
        self.send(error, f"environment {self._index} raised in its worker process:\n{trace}")

    def send(self, error: BaseException, text: str) -> None:
        """Send an exception as ``text``, or as its own message where that names all."""
        named = isinstance(error, (EnvironmentFailure, UserError))
        self._errors.put((self._index, str(error) if named else text))


def _worker(
    seed: int, index: int, env_fn: Any, pipe: Any, parent: Any, memory: Any, errors: Any, *rest: Any
) -> None:
    """Gymnasium's worker, which ignores Ctrl-C and reports an environment that fails to start."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach a whole process group
        signal.signal(number, signal.SIG_IGN)
    # Forked workers would share one state of the global generators, and an unseeded one.
    random.seed(stream_seed(seed, "python", index))
    np.random.seed(stream_seed(seed, "numpy", index) >> 32)  # noqa: NPY002 - that one is meant
    texts: Any = _TextErrors(errors, index)
    try:
        env = env_fn()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an environment raises
        texts.send(error, str(checks.failure(index, "failed in its constructor", error)))
        pipe.send((None, False))
        return
    _async_worker(index, lambda: env, pipe, parent, memory, texts, *rest)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep workers from running the user's script again, as multiprocessing would.

    The script may import torch, or start training without an ``if __name__`` guard. What it
    defines reaches the workers all the same: Gymnasium pickles it by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class WorkerVectorEnv(AsyncVectorEnv):
    """Gymnasium's `AsyncVectorEnv` with timeouts, and errors that name the environment."""

    def __init__(
        self, env_fns: list[Callable[[], gym.Env[Any, Any]]], timeout: float, seed: int
    ) -> None:
        self._timeout = timeout
        self.processes: list[Any] = []
        self.parent_pipes: list[Any] = []
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["rl_training.envs.factory"])
        with (
            _main_module_hidden(),
            self._named_failures(_START_TIMEOUT),
            self._named_shortage(len(env_fns)),
        ):
            # copy=False: the adapter above makes its own copy of every observation.
            super().__init__(
                env_fns,
                context="forkserver",
                worker=functools.partial(_worker, seed),
                autoreset_mode=AutoresetMode.SAME_STEP,
                copy=False,
            )

        # Before multiprocessing's own exit hook, which waits for children to obey SIGTERM.
        mp.util.Finalize(self, _kill_all, args=(self.processes,), exitpriority=100)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Reset all, within the timeout."""
        with self._named_failures():
            self.reset_async(seed=seed, options=options)
            return self.reset_wait(timeout=self._timeout)

    def step(self, actions: Any) -> Any:
        """Step all, within the timeout."""
        with self._named_failures():
            self.step_async(actions)
            return self.step_wait(timeout=self._timeout)

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        try:
            return super()._add_info(vector_infos, env_info, env_num)
        except EnvironmentFailure:
            raise
        except Exception as error:
            name = str(self.metadata.get("rl_training/name", ""))
            raise checks.failure(env_num, "returned a wrong info", error, "", name) from error

    def call_each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call method ``name`` of each environment with its own arguments."""
        timeout = max(self._timeout, _START_TIMEOUT)  # an episode may be played again
        with self._named_failures(timeout):
            for pipe, given in zip(self.parent_pipes, arguments, strict=True):
                pipe.send(("_call", (name, given, {})))
            return [self._answer(i, timeout) for i in range(self.num_envs)]

    def _check_spaces(self) -> None:
        """Wait for the workers to make their environments, which must have the same spaces."""
        question = (self.observation_mode, self.single_observation_space, self.single_action_space)
        for pipe in self.parent_pipes:
            pipe.send(("_check_spaces", question))
        answers = [self._answer(i, _START_TIMEOUT) for i in range(self.num_envs)]
        if not all(all(answer) for answer in answers):
            self._kill()
            raise ConfigError("the environments of one vector must have the same spaces")

    def _answer(self, index: int, timeout: float) -> Any:
        pipe = self.parent_pipes[index]
        if not pipe.poll(timeout):
            raise mp.TimeoutError
        result, success = pipe.recv()
        self._raise_if_errors([success if i == index else True for i in range(self.num_envs)])
        return result

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        failed = [i for i, success in enumerate(successes) if not success]
        if failed:
            try:
                _, text = self.error_queue.get(timeout=5)
            except queue.Empty:
                text = f"environment {failed[0]} failed in its worker process, for no known reason"
            self._kill()
            raise WorkerError(text)

    @contextlib.contextmanager
    def _named_failures(self, timeout: float | None = None) -> Iterator[None]:
        try:
            yield
        except mp.TimeoutError:
            silent = [i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll(0)]
            self._kill()
            limit = f"{self._timeout:g} s (worker_timeout)" if timeout is None else f"{timeout:g} s"
            raise WorkerError(
                f"environment worker {silent} did not answer within {limit}; it was stopped"
            ) from None
        except _BROKEN:
            message = self._describe_dead()
            self._kill()
            raise WorkerError(message) from None

    @contextlib.contextmanager
    def _named_shortage(self, count: int) -> Iterator[None]:
        """Turn a lack of file descriptors into an error that names what needs them."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            started = len(self.processes)
            self._kill()
            for pipe in self.parent_pipes:
                pipe.close()
            raise ConfigError(
                f"'num_envs' is {count:,} and vectorization async, one process each: the system"
                f" allows too few open files for that ({os.strerror(error.errno)} at process"
                f" {started:,}; each takes about three). Lower num_envs, raise the limit"
                f" (ulimit -n{_file_limit()}), or use vectorization: sync"
            ) from None

    def _describe_dead(self) -> str:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            # In this order: a worker puts its error into the queue before it ends.
            dead = [(i, p.exitcode) for i, p in enumerate(self.processes) if not p.is_alive()]
            if not self.error_queue.empty():
                return str(self.error_queue.get()[1])
            if dead and self.processes[dead[0][0]].pid is None:
                return (
                    f"environment worker {dead[0][0]} could not be started: the system allows no"
                    " more processes (ulimit -u) or has no memory for them; lower num_envs"
                )
            if dead:
                index, code = dead[0]
                how = f"was killed by signal {-code}" if code and code < 0 else f"exited ({code})"
                return (
                    f"environment worker {index} {how}: it sent no traceback. "
                    "Its own output, above, may contain the reason."
                )
            time.sleep(0.05)
        return "an environment worker closed its connection and sent no error"

    def _kill(self) -> None:
        _kill_all(self.processes)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask the workers to close, then end those that have not within a few seconds."""
        if not terminate:
            for pipe in self.parent_pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            deadline = time.monotonic() + (_CLOSE_TIMEOUT if timeout is None else timeout)
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        for pipe in self.parent_pipes:
            pipe.close()


def _kill_all(processes: list[Any]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.kill()
    for process in started:
        process.join(5)


def _file_limit() -> str:
    """The limit on open files, where the system has one, as an addition to its command."""
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    return f", now {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}"
