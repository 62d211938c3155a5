"""Run trials side by side until a study has as many as requested."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rl_training.errors import ConfigError, EnvironmentFailure
from rl_training.tools.tune.settings import StudySettings
from rl_training.tools.tune.study import ClaimedTrial, TuningStudy
from rl_training.tools.tune.trial import TrialEnd, TrialRun
from rl_training.tools.zoo.run import Runs, stop_request
from rl_training.tools.zoo.view import LiveLines, number

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 1.0
"""Seconds between two looks for trials that other processes leave."""
_MOST_FAILURES = 3
"""Trials in a row that may fail."""


def run_trials(
    study: TuningStudy,
    runs: Runs,
    lines: LiveLines,
    *,
    target: int,
    extend: Sequence[int] = (),
    changed: Callable[[], None],
) -> bool:
    """Run trials until the study has ``target``; return whether a signal requested a stop.

    ``extend`` names pruned trials, which are continued instead. Trials that a stop interrupts stay
    open: the next call continues them. ``changed`` is called when a trial ended.

    Raises:
        EnvironmentFailure: Several trials in a row failed.
    """
    loop = _Loop(study, runs, lines, changed)
    with stop_request() as stop:
        asked = 0
        to_extend = list(extend)
        next_look, exhausted = 0.0, False
        while True:
            while not stop.count and len(loop.active) < runs.at_once:
                if to_extend:
                    loop.add(study.extend(to_extend.pop(0)))
                    continue
                if extend or time.monotonic() < next_look:
                    break
                found = study.next_trial(target)
                exhausted = found is None
                if found is None:
                    next_look = time.monotonic() + _LOOK_SECONDS
                    break
                loop.add(found)
            if stop.count > asked:
                asked = stop.count
                for one in loop.active:
                    one.stop(hard=asked > 1)
            loop.advance()
            if not loop.active:
                ended = not to_extend if extend else exhausted and not study.is_running()
                if ended or stop.count:
                    return stop.count > 0
            time.sleep(_POLL_SECONDS)


class _Loop:
    """The trials that this process runs."""

    def __init__(
        self, study: TuningStudy, runs: Runs, lines: LiveLines, changed: Callable[[], None]
    ) -> None:
        self.active: list[TrialRun] = []
        self._study, self._runs, self._lines = study, runs, lines
        self._changed = changed
        self._failures = 0

    def add(self, claimed: ClaimedTrial) -> None:
        """Begin or continue a trial; one whose combination is refused is pruned at once."""
        settings: StudySettings = self._study.settings
        try:
            config = settings.trial_config(claimed.params)
        except ConfigError as error:
            self._study.prune(claimed, reason=str(error))
            self._lines.say(f"{claimed.name}: pruned, not a valid combination: {error}")
            self._changed()
            return
        self.active.append(TrialRun(claimed, settings, config))

    def advance(self) -> None:
        """Advance every trial; record those that ended."""
        for one in list(self.active):
            end = one.advance(self._runs)
            if end is not None:
                self.active.remove(one)
                self._record(one.claimed, end)
        self._lines.update([one.line() for one in self.active])

    def _record(self, claimed: ClaimedTrial, end: TrialEnd) -> None:
        if end.state == "stopped":
            self._study.release(claimed)
            self._lines.say(f"{claimed.name}: stopped; the same command continues it")
            return
        if end.state == "complete" and end.value is not None:
            self._study.finish(claimed, end.value)
        elif end.state == "pruned":
            self._study.prune(claimed)
        else:
            self._study.fail(claimed, end.reason)
        self._failures = self._failures + 1 if end.state == "failed" else 0
        best = self._study.best()
        so_far = "" if best is None else f" (best: {number(best.value)}, trial {best.number})"
        detail = end.reason if end.state == "failed" else number(end.value)
        text = "pruned" if end.state == "pruned" else f"{end.state}: {detail}"
        self._lines.say(f"{claimed.name}: {text}{so_far}")
        self._changed()
        if self._failures == _MOST_FAILURES:
            for one in self.active:
                one.stop(hard=False)
            raise EnvironmentFailure(
                f"{_MOST_FAILURES} trials in a row failed, the last one with: {end.reason}"
            )
