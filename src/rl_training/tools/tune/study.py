"""A study in its storage: which trial comes next, and how trials end.

Processes that share a study hold the lock of its storage while they choose a trial, and the lock
of a trial's folder while they run it. The kernel releases both when a process dies, so that a trial
whose folder is not locked was left by a dead process and can be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError
from rl_training.runs import RunLock, storage_errors
from rl_training.tools.tune.locks import locked, try_lock
from rl_training.tools.tune.samplers import make_sampler, tries_all
from rl_training.tools.tune.settings import StudySettings, require_same
from rl_training.tools.tune.storage import check_storage, lock_file, open_storage

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial, Trial

_SETTINGS, _FOLDER, _COMMAND = "rl_training", "folder", "command"
_EXTENDS, _REASON = "extends", "reason"
"""Names of attributes that are stored with the study and with trials."""


@dataclasses.dataclass(frozen=True)
class ClaimedTrial:
    """A trial that this process runs."""

    trial: Trial
    number: int
    folder: Path
    params: Mapping[str, Any]
    extends: int | None
    """The pruned trial whose runs it continues to their end."""
    reported: frozenset[int]
    """Steps at which a value was reported already."""
    lock: RunLock

    @property
    def name(self) -> str:
        """Name for display."""
        return f"trial {self.number}" + (
            "" if self.extends is None else f" (continues trial {self.extends})"
        )


class TuningStudy:
    """A study, its folder and its storage."""

    def __init__(
        self, settings: StudySettings, name: str, folder: Path, storage: Path, command: str = ""
    ) -> None:
        self.settings, self.name, self.folder = settings, name, folder
        self.command = command
        """The command that created the study."""
        self._storage_path = storage
        check_storage(storage)
        # A sampler that cannot be made is an error before there is a study.
        make_sampler(settings.sampler, settings.sampler_seed, 0)
        try:
            with storage_errors():
                folder.mkdir(parents=True, exist_ok=True)
                storage.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # a file where a folder is needed
            raise UserError(f"cannot create {error.filename}: {error.strerror}") from None
        self._distributions = settings.space.distributions()
        self._claimed: set[int] = set()
        with self._exclusive():
            self.study = self._create_or_load()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with locked(lock_file(self._storage_path)):
            yield

    def _create_or_load(self) -> Study:
        import optuna

        storage = open_storage(self._storage_path)
        with _readable(self._storage_path):
            study = optuna.create_study(
                study_name=self.name, storage=storage, direction="maximize", load_if_exists=True
            )
            study.pruner = _pruner(self.settings)
            stored = study.user_attrs
            trials = study.get_trials(deepcopy=False)
        here = os.path.relpath(self.folder, self._storage_path.parent)
        if set(stored) <= {_FOLDER, _COMMAND} and not trials:  # new, or left while it was made
            study.set_user_attr(_FOLDER, here)
            study.set_user_attr(_COMMAND, self.command)
            study.set_user_attr(_SETTINGS, self.settings.to_plain())
            # The first trial is the preset itself, as near as the space allows.
            study.enqueue_trial(self.settings.space.params_near(self.settings.config))
            return study
        require_same(self.settings.to_plain(), stored.get(_SETTINGS), self.name)
        if stored.get(_FOLDER) != here:
            raise UserError(
                f"the runs of the study {self.name!r} in {self._storage_path} are in another"
                f" folder, {str(stored.get(_FOLDER))!r} relative to the storage: give the same"
                " --output-dir and --study as before"
            )
        self.command = str(stored.get(_COMMAND, self.command))
        return study

    # -- which trial comes next ------------------------------------------------------------------

    def next_trial(self, target: int) -> ClaimedTrial | None:
        """Return a trial to run: one that a dead process left, or a new one up to ``target``."""
        from optuna.trial import TrialState

        with self._exclusive():
            trials = self.trials()
            for frozen in trials:
                if frozen.state == TrialState.RUNNING and frozen.number not in self._claimed:
                    lock = try_lock(self.folder_of(frozen))
                    if lock is not None:
                        return self._claim(frozen, lock)
            if tries_all(self.settings.sampler):
                target = min(target, self.settings.space.combinations or target)
            waiting = any(frozen.state == TrialState.WAITING for frozen in trials)
            if not waiting and self._counted(trials) >= target:
                return None
            return self._ask(len(trials))

    def extend(self, number: int) -> ClaimedTrial:
        """Return a new trial that continues the runs of a pruned one.

        Raises:
            UserError: There is no pruned trial of this number.
        """
        from optuna.trial import TrialState

        by_number = {frozen.number: frozen for frozen in self.trials()}
        frozen = by_number.get(number)
        if frozen is None or frozen.state != TrialState.PRUNED or _REASON in frozen.user_attrs:
            pruned = [
                str(one.number)
                for one in by_number.values()
                if one.state == TrialState.PRUNED and _REASON not in one.user_attrs
            ]
            state = "does not exist" if frozen is None else "was not pruned while it ran"
            raise UserError(
                f"trial {number} of the study {self.name!r} {state}; pruned trials:"
                f" {', '.join(pruned) or 'none'}"
            )
        with self._exclusive():
            lock = try_lock(self.folder_of(frozen))
            if lock is None:
                raise UserError(f"trial {number} is being run by another process")
            lock.release()
            self.study.enqueue_trial(dict(frozen.params), {_EXTENDS: number})
            return self._ask(len(by_number))

    def _ask(self, number: int) -> ClaimedTrial:
        self.study.sampler = make_sampler(self.settings.sampler, self.settings.sampler_seed, number)
        asked = self.study.ask().number
        frozen = next(one for one in self.trials() if one.number == asked)
        lock = try_lock(self.folder_of(frozen))
        if lock is None:
            raise UserError(f"{self.folder_of(frozen)} is used by another process")
        return self._claim(frozen, lock)

    def _claim(self, frozen: FrozenTrial, lock: RunLock) -> ClaimedTrial:
        import optuna

        self.study.sampler = make_sampler(
            self.settings.sampler, self.settings.sampler_seed, frozen.number
        )
        trial = optuna.trial.Trial(self.study, frozen._trial_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Returns what is stored already, if a process died between two parameters.
            params = {
                name: trial._suggest(name, distribution)
                for name, distribution in self._distributions.items()
            }
        self._claimed.add(frozen.number)
        return ClaimedTrial(
            trial,
            frozen.number,
            self.folder_of(frozen),
            params,
            frozen.user_attrs.get(_EXTENDS),
            frozenset(frozen.intermediate_values),
            lock,
        )

    # -- how trials end --------------------------------------------------------------------------

    def finish(self, claimed: ClaimedTrial, value: float) -> None:
        """Record the value of a trial."""
        self._tell(claimed, "COMPLETE", value)

    def prune(self, claimed: ClaimedTrial, reason: str | None = None) -> None:
        """Record that a trial was pruned; with a reason, that it could not be started."""
        if reason is not None:
            claimed.trial.set_user_attr(_REASON, reason)
        self._tell(claimed, "PRUNED")

    def fail(self, claimed: ClaimedTrial, reason: str) -> None:
        """Record that a run of a trial failed."""
        claimed.trial.set_user_attr(_REASON, reason)
        self._tell(claimed, "FAIL")

    def _tell(self, claimed: ClaimedTrial, state: str, value: float | None = None) -> None:
        from optuna.samplers import RandomSampler
        from optuna.trial import TrialState

        # With brute force the end of the last combination would be an error outside of `optimize`.
        self.study.sampler = RandomSampler()
        self.study.tell(claimed.number, value, state=TrialState[state])
        self.release(claimed)

    def release(self, claimed: ClaimedTrial) -> None:
        """Leave a trial to whoever claims it next."""
        self._claimed.discard(claimed.number)
        claimed.lock.release()

    # -- what there is ---------------------------------------------------------------------------

    def trials(self) -> Sequence[FrozenTrial]:
        """Return all trials."""
        with _readable(self._storage_path):
            return self.study.get_trials(deepcopy=False)

    def folder_of(self, frozen: FrozenTrial) -> Path:
        """Return the folder of a trial's runs."""
        extends = frozen.user_attrs.get(_EXTENDS)
        number = extends if isinstance(extends, int) else frozen.number
        return self.folder / f"trial-{number:04d}"

    def is_running(self) -> bool:
        """Return whether a trial has not ended, here or in another process."""
        from optuna.trial import TrialState

        return any(one.state == TrialState.RUNNING for one in self.trials())

    def _counted(self, trials: Sequence[FrozenTrial]) -> int:
        return sum(_EXTENDS not in frozen.user_attrs for frozen in trials)

    def best(self) -> FrozenTrial | None:
        """Return the complete trial with the highest value; the first one of several."""
        from optuna.trial import TrialState

        done = [
            (one.value, -one.number, one)
            for one in self.trials()
            if one.state == TrialState.COMPLETE and one.value is not None
        ]
        return max(done, key=lambda each: each[:2])[2] if done else None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise UserError if the content of a storage cannot be used."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read the study in {path}: {reason}") from error


def _pruner(settings: StudySettings) -> BasePruner:
    from optuna import pruners

    first = max(1, settings.evaluations // 3)
    if settings.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=first)
    if settings.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=3)
    if settings.pruner == "hyperband":
        most = settings.evaluations * len(settings.seeds)
        return pruners.HyperbandPruner(min_resource=first, max_resource=most, reduction_factor=3)
    return pruners.NopPruner()
