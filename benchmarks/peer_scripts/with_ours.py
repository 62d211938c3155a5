"""This package's side of `peers.py`."""

from __future__ import annotations

from typing import Any

from common import Clock, Request, TimeUpError, Trained, answer

from rl_training import TrainConfig
from rl_training.runtime.callbacks import Callback, UpdateEnd
from rl_training.runtime.setup import ExperimentManager
from rl_training.runtime.workflows import policy_from_weights

OWN_NAMES = {
    "ppo": {"anneal_lr": False},
    "recurrent_ppo": {"anneal_lr": False},
}
"""What makes defaults equal to those of the request."""


class Stop(Callback):
    """Ends a run when the clock is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_update(self, trainer: Any, event: UpdateEnd) -> None:
        if self._clock.is_over(event.step):
            raise TimeUpError


def train(request: Request, clock: Clock) -> Trained:
    knobs = {**request.settings, **OWN_NAMES.get(request.algo, {})}
    acceleration = "compile" if request.library == "ours_compile" else "eager"
    config: TrainConfig[Any] = TrainConfig(
        algo=request.algo,
        env_id=request.env_id,
        num_envs=request.num_envs,
        seed=request.seed,
        total_timesteps=request.steps,
        device="cpu",
        acceleration=acceleration,
        torch_threads=request.threads or None,
        eval_episodes=0,
        checkpoint_interval=0,
        log_interval_steps=10**9,
        tensorboard=False,
        progress=False,
        algo_kwargs=knobs,
    )
    callbacks = [Stop(clock)] if request.seconds else []
    trainer = ExperimentManager.setup(config, callbacks=callbacks, run_dir=None)
    trainer.train()
    policy = policy_from_weights(trainer.policy_state())

    def begin() -> Any:
        state = None

        def act(obs: Any) -> Any:
            nonlocal state
            action, state = policy.predict(obs, state)
            return action

        return act

    return begin


if __name__ == "__main__":
    answer(train, ("rl_training", "torch"))
