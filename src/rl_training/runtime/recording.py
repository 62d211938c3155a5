"""Videos of a run's evaluations, in its folder. Training is not changed by them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rl_training.envs.checks import name_of
from rl_training.errors import ConfigError, Paused, UserError
from rl_training.runtime.callbacks import Callback, EvaluationEnd, IterationEnd, TrainingEnd
from rl_training.runtime.playing import Player, actor_player, played
from rl_training.runtime.rendering import (
    MakeRenderingEnv,
    natural_fps,
    picture_of,
    sdl_without_display,
)
from rl_training.runtime.video import captioned, open_video, require_video_extra
from rl_training.seeding import shard_key, stream_seed, torch_stream
from rl_training.untrusted_files import require_no_links

if TYPE_CHECKING:
    from rl_training.config import TrainConfig
    from rl_training.runtime.trainer import Trainer

MAX_STEPS = 3000
"""Steps after which the video of an episode ends."""


def check_recording(
    config: TrainConfig[Any], make_env: MakeRenderingEnv, *, in_memory: bool
) -> None:
    """Raise ConfigError or UserError where a run cannot record its evaluations."""
    if not config.record_interval:
        return
    if in_memory:
        raise ConfigError("record_interval needs a run folder, and run_dir=None has none")
    if not config.eval_episodes:
        raise ConfigError(
            "record_interval records episodes at evaluations, and this run has none"
            " (eval_episodes: 0)"
        )
    require_video_extra("record_interval")
    with sdl_without_display(), _opened(make_env) as env:
        env.reset()
        picture_of(env)


class RecordingCallback(Callback):
    """Records an episode at the first evaluation after each crossing of a step interval.

    It is the first episode of that evaluation, played again with pictures. A recording that fails
    ends the recordings with a warning, not the training.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._evaluated = -1
        """Step of the last evaluation."""
        self._recorded = 0
        """Step of the last video."""

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        """Note that there is something to record once the iteration is complete."""
        self._evaluated = event.step

    def on_iteration(self, trainer: Trainer, event: IterationEnd) -> None:
        """Record where there was an evaluation and the interval was crossed."""
        self._record_if_due(trainer)

    def on_end(self, trainer: Trainer, event: TrainingEnd) -> None:
        """Record after the final evaluation, unless the run is to be resumed."""
        if not event.interrupted:
            self._record_if_due(trainer)

    def _record_if_due(self, trainer: Trainer) -> None:
        step = trainer.global_step
        crossed = self.interval and step // self.interval > self._recorded // self.interval
        if not crossed or self._evaluated != step:
            return
        try:
            self._record(trainer)
        except Exception as error:  # noqa: BLE001 - a renderer of the user's, ffmpeg, the disk
            if trainer.stopping.signals.received is not None:  # ffmpeg got the signal, too
                self._pause(trainer)
                return
            self.interval = 0
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            warnings.warn(f"no more videos are recorded, training goes on: {reason}", stacklevel=2)
            return
        self._recorded = step

    def _pause(self, trainer: Trainer) -> None:
        """Leave the recording to the resumed run; of several ranks this one alone cannot pause."""
        if not trainer.ranks.several:
            raise Paused

    def _record(self, trainer: Trainer) -> None:
        config, step = trainer.config, trainer.global_step
        output = trainer.run_dir / "videos" / f"step_{step:012d}.mp4"
        require_no_links(output, trainer.run_dir)
        module = trainer.learner.module
        was_training = module.training
        module.eval()
        trainer.activity = "recording"
        try:
            with sdl_without_display(), _opened(trainer.make_rendering_env) as env:
                env.reseed(stream_seed(config.seed, "evaluation", step, *shard_key(0)))
                with open_video(output, natural_fps(config, env)) as add:
                    for moment in played(env, _player(trainer, env), 1, max_steps=MAX_STEPS):
                        if trainer.stopping.signals.received is not None:
                            raise _StoppedError
                        add(captioned(picture_of(env), moment.caption()))
        finally:
            trainer.activity = ""
            module.train(was_training)

    def state_dict(self) -> dict[str, Any]:
        """Which steps were evaluated and recorded last."""
        return {"evaluated": self._evaluated, "recorded": self._recorded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._evaluated, self._recorded = int(state["evaluated"]), int(state["recorded"])


class _StoppedError(Exception):
    """A signal arrived while an episode was recorded."""


def _player(trainer: Trainer, env: Any) -> Player:
    config = trainer.config
    sampling = None
    if not config.eval_deterministic:
        sampling = torch_stream(config.seed, "recording_actions", trainer.global_step)
    actor = trainer.spec.eval_actor(trainer.learner, trainer.device, sampling)
    info = trainer.source.info
    return actor_player(actor, env, info.obs_spec, info.action_spec)


@contextlib.contextmanager
def _opened(make_env: MakeRenderingEnv) -> Iterator[Any]:
    """Make an environment that renders pictures, and close it at the end."""
    env: Any = make_env()
    try:
        if env.render_mode != "rgb_array":
            raise UserError(
                f"record_interval needs pictures, and {name_of(env)} was made with render_mode"
                f" {env.render_mode!r}; its metadata lists {env.metadata.get('render_modes', [])}."
                " An env_fn must pass render_mode='rgb_array' itself"
            )
        yield env
    finally:
        with contextlib.suppress(Exception):  # a renderer that failed also fails to close
            env.close()
