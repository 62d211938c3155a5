"""``rl-training record``: a video of whole episodes with their score in a caption."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.errors import UserError
from rl_training.runtime.video import captioned, open_video, require_video_extra
from rl_training.seeding import stream_seed
from rl_training.terminal import one_line, say, show
from rl_training.trust import trust_from_flag
from rl_training.untrusted_files import require_no_links

_SECONDS_BETWEEN_LINES = 5.0
_FORMATS = (".mp4", ".gif")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordArgs:
    """Record whole episodes of a trained policy as a video.

    With the same --seed and --num-episodes it plays the same episodes as ``rl-training eval``. If
    actions are sampled, this holds only for one episode.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its last checkpoint is used) or a checkpoint file."""
    output: Path | None = None
    """Output file, .mp4 or .gif; unset: an .mp4 under videos/ in the run folder."""
    num_episodes: int = 1
    """Number of episodes to record."""
    env_id: str | None = None
    """Gymnasium id of the environment to play, with the spaces of the policy; unset: that of the
    run. A run from a dataset alone may have none."""
    env_kwargs: dict[str, Any] | None = None
    """Keyword arguments of gymnasium.make (YAML: '{gravity: -5.0}'); unset: those of the run, or
    none with --env-id."""
    seed: int | None = None
    """Seed of the episodes; unset: derived from the run's seed, and different from training."""
    deterministic: bool | None = None
    """Take the most likely action, or sample one (DQN, DRQN: random with probability
    exploration_final_eps; TD3: with exploration noise); unset: as the run's own evaluations
    (eval_deterministic)."""
    fps: float | None = None
    """Frames per second; unset: the environment's own rate."""
    max_steps: int | None = None
    """Maximum number of steps per episode; unset: no limit."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Run the command."""
    text = HelpText(
        "RUN [flags]",
        examples=(
            "rl-training record runs/RUN",
            "rl-training record runs/RUN --output best.gif --num-episodes 2",
        ),
    )
    options: RecordArgs = parse_flags(RecordArgs, args, "rl-training record", text)
    _check_output(Path("video.mp4") if options.output is None else options.output)
    from rl_training.tools import episodes

    episodes.check_counts(options.num_episodes, options.max_steps, options.fps)
    episodes.prefer_offscreen()
    policy, step = episodes.load_player(
        options.checkpoint,
        options.device,
        trust_from_flag(options.trust_modules),
        env_id=options.env_id,
        env_kwargs=options.env_kwargs,
    )
    seed_given = policy.config.seed if options.seed is None else options.seed
    seed = stream_seed(seed_given, "evaluation")
    output = options.output or _default_output(options, step)
    with contextlib.ExitStack() as stack:
        stack.enter_context(episodes.sdl_without_display())
        envs: list[Any] = episodes.evaluation_envs(policy, options.num_episodes, "rgb_array")
        for env in envs:
            stack.callback(_close, env)
            env.reseed(seed)
        player = episodes.policy_player(
            policy, envs[0], deterministic=options.deterministic, seed=seed
        )
        fps = options.fps or episodes.natural_fps(policy.config, envs[0])
        add = stack.enter_context(open_video(output, fps))
        finished, frames, said = 0, 0, time.monotonic()
        results: list[dict[str, Any]] = []
        quotas = episodes.shares(options.num_episodes, len(envs))
        for env, quota in zip(envs, quotas, strict=True):
            for moment in episodes.played(
                env, player, quota, first=finished + 1, max_steps=options.max_steps
            ):
                add(captioned(episodes.picture_of(env), moment.caption()))
                frames += 1
                if moment.last:
                    show(moment.result())
                    results.append({"return": moment.ret, "length": moment.step})
                elif time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                    said = time.monotonic()
                    say(moment.caption())
            finished += quota
    name = one_line(str(output))
    show(f"{name}: {frames} frames, {frames / fps:.1f} s at {fps:g} frames per second\n")
    if options.json:
        video = {"output": str(output), "frames": frames, "fps": fps}
        show(json.dumps({**video, "episodes": results}) + "\n")
    return 0


def _check_output(path: Path) -> None:
    """Raise UserError if the format is not supported or a package is missing."""
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"--output {path} must end in {' or '.join(_FORMATS)}")
    if path.is_dir():
        raise UserError(f"--output {path} is a folder: give a file name")
    require_video_extra("recording")


def _default_output(options: RecordArgs, step: int | None) -> Path:
    """A file in the run folder; raises where a link in that folder leads out of it."""
    from rl_training.checkpointing import find_checkpoint

    path = find_checkpoint(options.checkpoint)
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    name = path.stem if step is None else f"step_{step:012d}"
    episode = "" if options.seed is None else f"-seed{options.seed}"
    output = run / "videos" / f"{name}{episode}.mp4"
    require_no_links(output, run)
    return output


def _close(env: Any) -> None:
    with contextlib.suppress(Exception):  # a renderer that failed also fails to close
        env.close()
