"""``rl-training dataset``: list, describe, write and delete datasets in Minari's format."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.datasets.reading import datasets_root, local_ids, open_dataset
from rl_training.datasets.writing import (
    Destination,
    delete_dataset,
    find_deletable,
    find_destination,
    write_dataset,
)
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.seeding import stream_seed
from rl_training.terminal import one_line, say, show, show_result
from rl_training.tools.dataset.describing import Info, Listed, Spread, described, listed
from rl_training.trust import trust_from_flag

if TYPE_CHECKING:
    from rl_training.datasets.reading import RecordedEpisode
    from rl_training.tools.dataset.from_replay import ReplayedEpisode
    from rl_training.tools.dataset.loaded_run import Returns
    from rl_training.tools.dataset.playing import PlayedEpisode

_HELP = """\
rl-training dataset: datasets of recorded episodes, in Minari's format.

  rl-training dataset list               datasets under MINARI_DATASETS_PATH
  rl-training dataset info ID            what a dataset contains and where it comes from
  rl-training dataset make RUN           record episodes of a trained policy
  rl-training dataset from-replay RUN    write what the replay of a run holds
  rl-training dataset delete ID          delete a dataset under MINARI_DATASETS_PATH

ID is a Minari id ('pendulum/medium-v0') or the path of a dataset's folder. RUN is a run folder or a
checkpoint file.
"""
_RETURN = "return of whole episodes"
_SECONDS_BETWEEN_LINES = 5.0
_RUN = tyro.conf.arg(metavar="RUN")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArgs:
    """List the datasets under MINARI_DATASETS_PATH (unset: ~/.minari/datasets)."""

    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArgs:
    """Read a dataset and show its spaces, sizes, returns and provenance."""

    dataset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """A Minari id, or the path of a dataset's folder."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeArgs:
    """Record episodes of a trained policy as a dataset.

    It plays the environment of the run's evaluations: with the run's wrappers, raw rewards and
    whole games. The last episode is cut after --steps transitions and marked as truncated.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, _RUN]
    """A run folder (its last checkpoint is used), a checkpoint or a policy file."""
    steps: int
    """Number of transitions to record."""
    out: str
    """The dataset to write: a Minari id such as pendulum/medium-v0, or the path of a folder that
    begins with '.', '/' or '~'."""
    epsilon: float | None = None
    """Probability of a random legal action in place of the policy's; unset: 0."""
    stochastic: bool = False
    """Sample actions (DQN, DRQN: random with probability exploration_final_eps; TD3: with
    exploration noise); unset: the most likely action."""
    env_id: str | None = None
    """Gymnasium id of the environment to play, with the spaces of the policy; unset: that of the
    run. A run from a dataset alone may have none."""
    env_kwargs: dict[str, Any] | None = None
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}'); unset: those of the run, or
    none with --env-id."""
    seed: int | None = None
    """Seed of the episodes; unset: the run's. They differ from those of training and evaluation."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromReplayArgs:
    """Write the transitions in the replay of an off-policy run as a dataset.

    Rewards and ends of episodes are those of training: on Atari rewards may be clipped, and a lost
    life may end an episode. Observations have the precision of the replay (float32).
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, _RUN]
    """A run folder (its last checkpoint is used), or its checkpoint last.pt or best.pt."""
    out: str
    """The dataset to write: a Minari id such as pendulum/replay-v0, or the path of a folder that
    begins with '.', '/' or '~'."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeleteArgs:
    """Delete a dataset under MINARI_DATASETS_PATH (unset: ~/.minari/datasets).

    Runs that were trained on it can be evaluated without it, but not resumed.
    """

    dataset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Its Minari id. Folders elsewhere are not deleted, and neither are links."""
    yes: bool = False
    """Do not ask before it is deleted."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """``rl-training dataset``."""
    if not args or args[0] in ("-h", "--help"):
        show_result(_HELP)
        return 0
    commands = {
        "list": _list,
        "info": _info,
        "make": _make,
        "from-replay": _from_replay,
        "delete": _delete,
    }
    if args[0] not in commands:
        raise UserError(f"unknown command 'dataset {args[0]}'.{did_you_mean(args[0], commands)}")
    return commands[args[0]](args[1:])


# -- list and info ---------------------------------------------------------------------------------


def _list(args: list[str]) -> int:
    options: ListArgs = parse_flags(
        ListArgs, args, "rl-training dataset list", HelpText("[--json]")
    )
    root = datasets_root()
    found = [listed(root, name) for name in local_ids()]
    if found:
        head = ["dataset", "environment", "episodes", "transitions", "size", f"mean {_RETURN}"]
        show_result(_table([head, *map(_listed_row, found)]) + "\n")
    else:
        show_result(f"no datasets under {root} (MINARI_DATASETS_PATH)\n")
    for one in found:
        if one.error is not None:
            say(f"warning: {one.error}")
    if options.json:
        datasets = [dataclasses.asdict(one) for one in found]
        show_result(json.dumps({"root": str(root), "datasets": datasets}) + "\n")
    return 0


def _listed_row(one: Listed) -> list[str]:
    counts = ["-" if count is None else f"{count:,}" for count in (one.episodes, one.transitions)]
    mean = "-" if one.mean_return is None else f"{one.mean_return:,.2f}"
    return [one_line(one.id), one_line(one.env or "-"), *counts, _readable(one.bytes), mean]


def _info(args: list[str]) -> int:
    text = HelpText(
        "ID [--json]",
        examples=(
            "rl-training dataset info pendulum/medium-v0",
            "rl-training dataset info ./data/medium-v0 --json",
        ),
    )
    options: InfoArgs = parse_flags(InfoArgs, args, "rl-training dataset info", text)
    dataset = open_dataset(options.dataset)
    info = described(dataset, _Progress("read", dataset.total_steps))
    show_result(_info_text(info))
    if options.json:
        show_result(json.dumps(dataclasses.asdict(info)) + "\n")
    return 0


def _info_text(info: Info) -> str:
    ends = {"terminated": info.terminated, "truncated": info.truncated, "neither": info.unfinished}
    ended = ", ".join(f"{count:,} {name}" for name, count in ends.items() if count)
    replay = f"not supported: {info.replay_error}"
    if info.replay_bytes is not None:
        whole = _readable(info.replay_bytes * info.transitions)
        replay = f"{info.replay_bytes:,} bytes a transition, {whole} in all"
    rows = [
        ("dataset", info.id),
        ("folder", f"{info.path} ({_readable(info.bytes)})"),
        ("environment", info.env or "unknown"),
        ("observations", info.observation_space),
        ("actions", info.action_space),
        ("episodes", f"{info.episodes:,} ({ended}; {info.whole:,} whole)"),
        ("transitions", f"{info.transitions:,}"),
        ("length", _spread(info.lengths)),
        (_RETURN, _spread(info.returns)),
        ("images", "JPEG, pixels differ from those observed" if info.jpeg else "exact, or none"),
        ("in the replay", replay),
    ]
    rows += [(f"made: {name}", value) for name, value in _provenance_rows(info.provenance or {})]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{one_line(name):<{width}}  {one_line(value)}\n" for name, value in rows)


def _provenance_rows(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in provenance.items():
        if name == "config" and isinstance(value, dict):
            yield name, f"{len(value)} settings (printed with --json)"
            continue
        yield name, value if isinstance(value, str) else json.dumps(value)


def _spread(one: Spread | None) -> str:
    if one is None:
        return "no episode is whole"
    return f"mean {one.mean:,.2f}, std {one.std:,.2f}, {one.min:,.2f} to {one.max:,.2f}"


# -- make and from-replay --------------------------------------------------------------------------


def _make(args: list[str]) -> int:
    text = HelpText(
        "RUN --steps N --out ID [flags]",
        examples=(
            "rl-training dataset make runs/RUN --steps 1e5 --out pendulum/expert-v0",
            "rl-training dataset make runs/RUN --steps 1e5 --stochastic --out pendulum/medium-v0",
            "rl-training dataset make runs/RUN --steps 1e5 --epsilon 0.3 --out ./data/noisy-v0",
        ),
    )
    options: MakeArgs = parse_flags(MakeArgs, args, "rl-training dataset make", text)
    _check_make(options)
    place = find_destination(options.out)
    from rl_training.runtime.workflows import policy_from_state
    from rl_training.tools.dataset import loaded_run, playing

    run = loaded_run.load_run(
        options.checkpoint,
        trust_from_flag(options.trust_modules),
        env_id=options.env_id,
        env_kwargs=options.env_kwargs,
    )
    policy = policy_from_state(run.state, options.device)
    seed_given = run.config.seed if options.seed is None else options.seed
    seed, epsilon = stream_seed(seed_given, "dataset"), options.epsilon or 0.0
    player = playing.RecordingPlayer(
        policy, deterministic=not options.stochastic, epsilon=epsilon, seed=seed
    )
    details: dict[str, Any] = {
        "seed": seed_given,
        "steps": options.steps,
        "epsilon": epsilon,
        "stochastic": options.stochastic,
    }
    if run.played != run.config:
        details |= {"env_id": run.played.env_id, "env_kwargs": run.played.env_kwargs}
    returns = loaded_run.Returns()
    provenance = loaded_run.Provenance("make", run, details)
    with loaded_run.evaluation_env(run) as adapter:
        env = loaded_run.single_env(adapter)
        env.reseed(seed)
        played = playing.play(env, player, options.steps, _Progress("recorded", options.steps))
        counted = _Counted(played, returns)
        recorded = loaded_run.recorded_from(run, env)
        write_dataset(place, counted, recorded, lambda: provenance.plain(returns, counted.cut))
    return _written(place, counted, returns, as_json=options.json)


def _check_make(options: MakeArgs) -> None:
    if options.steps < 1:
        raise ConfigError(f"--steps must be at least 1; got {options.steps}")
    if options.epsilon is not None and not 0 <= options.epsilon <= 1:
        raise ConfigError(f"--epsilon must be between 0 and 1; got {options.epsilon:g}")
    if options.epsilon is not None and options.stochastic:
        raise ConfigError(
            "--epsilon replaces actions of the deterministic policy: set it or --stochastic, not"
            " both"
        )
    if options.seed is not None and options.seed < 0:
        raise ConfigError(f"--seed must be 0 or more; got {options.seed}")


def _from_replay(args: list[str]) -> int:
    text = HelpText(
        "RUN --out ID [flags]",
        examples=("rl-training dataset from-replay runs/RUN --out pendulum/replay-v0",),
    )
    options: FromReplayArgs = parse_flags(
        FromReplayArgs, args, "rl-training dataset from-replay", text
    )
    place = find_destination(options.out)
    from rl_training.tools.dataset import from_replay, loaded_run

    run = loaded_run.load_run(options.checkpoint, trust_from_flag(options.trust_modules))
    from_replay.require_replay(run)
    returns = loaded_run.Returns()
    with loaded_run.evaluation_env(run) as adapter:
        recorded = loaded_run.recorded_from(run, loaded_run.single_env(adapter))
        frame_stack = adapter.frame_stack
    found = from_replay.episodes_of_replay(run, recorded.observation_space, frame_stack)
    counted = _Counted(found, returns, _Progress("wrote"))

    def provenance() -> dict[str, Any]:
        details = {"seed": run.config.seed, "steps": counted.steps}
        return loaded_run.Provenance("from-replay", run, details).plain(returns, counted.cut)

    write_dataset(place, counted, recorded, provenance)
    return _written(place, counted, returns, as_json=options.json)


# -- delete ----------------------------------------------------------------------------------------


def _delete(args: list[str]) -> int:
    text = HelpText(
        "ID [--yes] [--json]", examples=("rl-training dataset delete pendulum/medium-v0",)
    )
    options: DeleteArgs = parse_flags(DeleteArgs, args, "rl-training dataset delete", text)
    folder = find_deletable(options.dataset)
    found = listed(datasets_root(), options.dataset)
    what = f"{found.id}: {_content(found)} in {one_line(str(folder))}"
    if not options.yes:
        _require_consent(f"delete {what}? [y/N]")
    delete_dataset(folder)
    show(f"deleted {what}\n")
    if options.json:
        counts = {"episodes": found.episodes, "transitions": found.transitions}
        deleted = {"dataset": found.id, "folder": str(folder), **counts, "bytes": found.bytes}
        show(json.dumps(deleted) + "\n")
    return 0


def _content(found: Listed) -> str:
    counts = {"episodes": found.episodes, "transitions": found.transitions}
    known = [f"{count:,} {name}" for name, count in counts.items() if count is not None]
    return ", ".join([*known, _readable(found.bytes)])


def _require_consent(question: str) -> None:
    """Raise `UserError` unless the user answers yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("nothing was deleted: there is nobody to ask; --yes deletes without asking")
    say(question)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was deleted")


class _Counted:
    """Episodes on their way to the file: counts them, and the returns of whole ones."""

    def __init__(
        self,
        found: Iterable[PlayedEpisode | ReplayedEpisode],
        returns: Returns,
        on_step: _Progress | None = None,
    ) -> None:
        self._found = found
        self._returns = returns
        self._on_step = on_step
        self.episodes = 0
        self.steps = 0
        self.cut: list[int] = []
        """Numbers of the episodes that are not whole."""

    def __iter__(self) -> Iterator[RecordedEpisode]:
        for episode, whole in self._found:
            if whole:
                self._returns.add(episode)
            else:
                self.cut.append(self.episodes)
            self.episodes += 1
            self.steps += len(episode)
            if self._on_step is not None:
                self._on_step(self.steps)
            yield episode


def _written(place: Destination, counted: _Counted, returns: Returns, *, as_json: bool) -> int:
    """Print what was written; return the exit code."""
    summary = returns.summary()
    whole = f"{summary['episodes']:,} of them whole"
    if summary["episodes"]:
        whole += f", with a return of {summary['mean']:,.2f} +- {summary['std']:,.2f}"
    show(
        f"{one_line(str(place.folder))}: {counted.steps:,} transitions in {counted.episodes:,}"
        f" episodes, {whole}\n"
    )
    if as_json:
        figures = {"episodes": counted.episodes, "transitions": counted.steps, "returns": summary}
        found = {"dataset": place.id, "folder": str(place.folder), **figures}
        show(json.dumps(found) + "\n")
    return 0


# -- output ----------------------------------------------------------------------------------------


class _Progress:
    """Prints how far the command is, every few seconds."""

    def __init__(self, verb: str, total: int | None = None) -> None:
        self._verb = verb
        self._total = total
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            share = f" of {self._total:,} ({done / self._total:.0%})" if self._total else ""
            say(f"{self._verb} {done:,}{share} transitions")


def _readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
