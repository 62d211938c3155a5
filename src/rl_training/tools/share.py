"""``rl-training share`` and ``rl-training fetch``: policies as folders, on Hugging Face or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.errors import CheckpointError, ConfigError, UserError
from rl_training.terminal import one_line, say, show
from rl_training.trust import trust_from_flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareArgs:
    """Write a policy as a folder to share: weights, config, spaces and a model card.

    The folder has the layout of Hugging Face. It is evaluated, recorded and started from like a
    policy file. Nothing is uploaded without --push.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its last checkpoint is used), a checkpoint or a policy file."""
    out: Path
    """The folder to write, missing or empty."""
    num_episodes: int = 20
    """Number of episodes that are played for the model card; 0: none."""
    seed: int | None = None
    """Seed of these episodes; unset: derived from the run's seed, and different from training."""
    push: str | None = None
    """Repository on Hugging Face, USER/REPO, that the folder is uploaded to (needs an extra; in the
    clone: pip install '.[share]'); unset: nothing is uploaded."""
    private: bool = False
    """Make the repository private where it does not exist yet."""
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    """Device of the networks while episodes are played; unset: as in training."""
    trust_modules: tuple[str, ...] | None = None
    """Python modules (environments, wrappers, encoders) that the checkpoint may import; without a
    value: any; unset: any for checkpoints that you wrote on this machine, otherwise only Gymnasium
    and rl_training."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchArgs:
    """Download a shared policy from Hugging Face; nothing in it is imported or executed."""

    repository: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="USER/REPO")]
    """The repository."""
    out: Path | None = None
    """The folder to write, missing or empty; unset: REPO in the current folder."""
    revision: str | None = None
    """Branch, tag or commit; unset: the main branch."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def share(args: list[str]) -> int:
    """Run ``rl-training share``."""
    text = HelpText(
        "RUN --out FOLDER [flags]",
        examples=(
            "rl-training share runs/RUN --out my-policy",
            "rl-training share runs/RUN/checkpoints/best.pt --out my-policy --num-episodes 100",
            "rl-training share runs/RUN --out my-policy --push USER/my-policy",
        ),
    )
    options: ShareArgs = parse_flags(ShareArgs, args, "rl-training share", text)
    if options.num_episodes < 0:
        raise ConfigError(f"--num-episodes must be 0 or more; got {options.num_episodes}")
    if options.private and options.push is None:
        raise ConfigError("--private has no effect without --push USER/REPO")
    from rl_training.shared_folder import require_free
    from rl_training.sharing import hub

    require_free(options.out)
    if options.push is not None:
        hub.check_repository(options.push)
        hub.require_hub()
        hub.require_token()
    result = _written(options)
    out = one_line(str(options.out))
    show(f"wrote {out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}\n")
    if options.push is not None:
        try:
            result["address"] = hub.push(options.out, options.push, private=options.private)
        except UserError as error:
            raise UserError(
                f"{error}. The folder is complete: 'hf upload {options.push} {options.out}' uploads"
                " it later"
            ) from error
        show(f"uploaded to {one_line(result['address'])}\n")
    if options.json:
        show(json.dumps(result) + "\n")
    return 0


def _written(options: ShareArgs) -> dict[str, Any]:
    """Write the folder; return what ``--json`` prints."""
    from rl_training.checkpointing import find_checkpoint
    from rl_training.runtime.stored import load_stored
    from rl_training.runtime.workflows import policy_from_state
    from rl_training.sharing.card import Played
    from rl_training.sharing.portable import origin_of, share_policy

    path = find_checkpoint(options.checkpoint)
    stored = load_stored(path, trust=trust_from_flag(options.trust_modules))
    policy = policy_from_state(stored.state, options.device)
    played = None
    if options.num_episodes:
        _require_environment(options, stored.state)
        seed = policy.config.seed if options.seed is None else options.seed
        say(f"playing {options.num_episodes} episodes for the model card")
        result = policy.evaluate(options.num_episodes, seed=seed)
        played = Played(result, policy.config.eval_deterministic, seed)
        show(f"return {result.mean_return:.2f} +/- {result.std_return:.2f}\n")
    origin = origin_of(path, stored.state, stored.digest)
    share_policy(options.out, stored.state, origin, played)
    return {
        "folder": str(options.out),
        "checkpoint": str(path),
        "checkpoint_sha256": stored.digest,
        "metrics": None if played is None else played.result.metrics(),
    }


def _require_environment(options: ShareArgs, state: dict[str, Any]) -> None:
    named = options.checkpoint
    if state["custom_env"]:
        raise CheckpointError(
            f"{named} was trained with env_fn, and the command line cannot create that environment:"
            " share it in Python with model.share(folder, env_fn=MyEnv), or without an evaluation:"
            " --num-episodes 0"
        )
    if not state["config"].get("env_id"):
        raise CheckpointError(
            f"{named} names no environment to evaluate on: add --num-episodes 0 to share it without"
            " an evaluation"
        )


def fetch(args: list[str]) -> int:
    """Run ``rl-training fetch``."""
    text = HelpText(
        "USER/REPO [flags]",
        examples=(
            "rl-training fetch USER/my-policy",
            "rl-training fetch USER/my-policy --revision v1 --out downloaded",
        ),
    )
    options: FetchArgs = parse_flags(FetchArgs, args, "rl-training fetch", text)
    from rl_training.sharing import hub

    hub.check_repository(options.repository)
    hub.require_hub()
    out = options.out or Path(options.repository.partition("/")[2])
    commit = hub.fetch(options.repository, out, options.revision)
    shown = one_line(str(out))
    show(f"wrote {shown}, of commit {one_line(commit)}\nevaluate: rl-training eval {shown}\n")
    if options.json:
        show(json.dumps({"folder": str(out), "commit": commit}) + "\n")
    return 0
