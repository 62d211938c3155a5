"""Measure the speed of a config and of alternatives within a time limit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError, UserError
from rl_training.tools.doctor.system import System
from rl_training.tools.doctor.trials import Trial, baseline, combined, trials

WORTH_TELLING = 0.05
"""Smallest gain that is recommended, if noise is not larger."""
_WINDOWS = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurement of a trial."""

    trial: Trial
    rates: tuple[float, ...]
    reason: str = ""
    """Why there are no measurements; empty if there are."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """Largest deviation of a window from the median, relative to it."""
        if not self.rates:
            return 0.0
        return max(abs(rate - self.rate) for rate in self.rates) / self.rate


@dataclasses.dataclass(frozen=True)
class Advice:
    """Shares of time of a config, and results of all trials."""

    device: str
    base: Result
    shares: dict[str, float]
    transfer: float
    checkpoint_seconds: float
    tried: tuple[Result, ...]
    acceleration: str = "eager"
    unit: str = "steps"
    """What the run counts, and rates are of."""

    def ratio(self, result: Result) -> float:
        """Return the speed relative to the unchanged config."""
        return result.rate / self.base.rate

    def noise(self, result: Result) -> float:
        """Return the gain below which a difference may be noise."""
        return max(self.base.spread, result.spread)

    def is_faster(self, result: Result) -> bool:
        """Return whether a result is faster than the config by more than noise."""
        return bool(result.rates) and self.ratio(result) - 1 > max(
            WORTH_TELLING, self.noise(result)
        )

    def is_slower(self, result: Result) -> bool:
        """Return whether a result is slower than the config by more than noise."""
        return 1 - self.ratio(result) > max(WORTH_TELLING, self.noise(result))


def advise(
    config: TrainConfig[Any], system: System, seconds: float, say: Callable[[str], None]
) -> Advice:
    """Measure a config and its trials for about ``seconds`` seconds."""
    runner = _TrialRunner(config, seconds, say)
    first = runner.first()
    chosen = config.with_overrides(acceleration=first["acceleration"])
    measured = Result(baseline(), tuple(first["rates"]))
    candidates = trials(chosen, first["device"], system, first["shares"])
    tried = [
        runner.attempt(trial, still_to_come=len(candidates) - i)
        for i, trial in enumerate(candidates)
    ]
    rough = Advice(first["device"], measured, {}, 0.0, 0.0, tuple(tried))
    winners = [r.trial for r in tried if rough.is_faster(r) and not r.trial.changes]
    if (both := combined(winners, {r.trial.name: r.rate for r in tried})) is not None:
        tried.append(runner.attempt(both, still_to_come=1))
    again = runner.attempt(baseline(), still_to_come=0)
    return Advice(
        device=first["device"],
        acceleration=first["acceleration"],
        base=Result(baseline(), (*measured.rates, *again.rates)),
        shares=first["shares"],
        transfer=first["transfer"],
        checkpoint_seconds=first["checkpoint_seconds"],
        tried=tuple(tried),
        unit=config.unit,
    )


class _TrialRunner:
    """Runs child processes one at a time in a temporary folder until the time limit."""

    def __init__(
        self, config: TrainConfig[Any], seconds: float, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._deadline = time.monotonic() + seconds
        self._measure = min(5.0, max(1.0, seconds / 20))
        self._start_up = 0.0
        self._say = say

    def first(self) -> dict[str, Any]:
        """Measure the unchanged config and its shares of time; this may use the whole limit."""
        self._say("the unchanged config, and its time per part")
        begun = time.monotonic()
        reply = self._child(self._config, profile=True, limit=self._left())
        if reply is None:
            raise UserError(
                f"a few iterations of {self._config.algo} on"
                f" {self._config.env_id or self._config.dataset} take longer than"
                " the time limit: raise --seconds"
            )
        if reply["error"] is not None:
            raise ConfigError(reply["error"])
        # Overhead of a child process besides its windows; the profile is one more window.
        self._start_up = max(1.0, time.monotonic() - begun - self._measure * (1 + 1 / _WINDOWS))
        return reply

    def attempt(self, trial: Trial, *, still_to_come: int) -> Result:
        """Measure one trial, and leave enough time for the ``still_to_come`` others."""
        usual = self._start_up + self._measure
        limit = self._left() - still_to_come * usual
        if limit < usual:
            limit = usual if self._left() >= usual else 0.0
        if limit == 0.0:
            return Result(trial, (), "not tried: no time left (--seconds)")
        self._say(trial.name)
        try:
            config = self._config.with_overrides(**trial.overrides)
        except ConfigError as error:
            return Result(trial, (), f"not possible: {error}")
        reply = self._child(config, profile=False, limit=limit)
        if reply is None:
            return Result(trial, (), f"stopped after {limit:.0f} s, during warm-up (--seconds)")
        if reply["error"] is not None:
            return Result(trial, (), f"not possible: {reply['error']}")
        return Result(trial, tuple(reply["rates"]))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _child(
        self, config: TrainConfig[Any], *, profile: bool, limit: float
    ) -> dict[str, Any] | None:
        """Return the child's reply; None if it exceeded its time limit."""
        with tempfile.TemporaryDirectory(prefix="rl_training-doctor-") as folder:
            settings = config.to_dict()
            if not config.is_given("acceleration"):  # the run chooses it
                del settings["acceleration"]
            request = {
                "settings": settings,
                "folder": folder,
                "seconds": self._measure,
                "windows": _WINDOWS,
                "profile": profile,
            }
            command = [sys.executable, "-m", "rl_training.tools.doctor.probe", json.dumps(request)]
            output, errors, code = _run(command, max(limit, 1.0))
        try:
            reply: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            if code is None:
                return None
            last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"
            return {"error": f"the run failed ({last[:300]})"}
        return reply


def _run(command: list[str], limit: float) -> tuple[str, str, int | None]:
    """Run a process; return output, errors and exit code (None: stopped at its limit).

    The process and all its children are ended in every case.
    """
    group = os.name == "posix"
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",  # an environment may print anything
        start_new_session=group,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException as error:
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        output, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return output, errors, None
    return output, errors, process.returncode
