"""`TrainConfig`: the typed, validated settings of a run, read from and written to YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from rl_training._internal.coerce import (
    OldName,
    build_dataclass,
    check_types,
    hidden_fields,
    renamed,
    require,
    take_old_names,
    to_plain,
)
from rl_training._internal.yaml_io import dump_yaml, load_yaml_file
from rl_training.errors import ConfigError, did_you_mean
from rl_training.registry import (
    ALGORITHMS,
    check_device_envs,
    check_settings,
    config_type,
    find_entry,
    others_offline,
)

FORMAT = 1
_NOT_SETTINGS = {"format", "preset", "verified", "partial", "tuned"}
"""Keys of a config file that describe the file and are not settings of a run."""

_MAX_ENVS, _MAX_WORKERS, _MAX_THREADS = 65_536, 4_096, 1_024
"""Larger values are refused: the run would use up all memory before it fails."""

AlgoConfig = TypeVar("AlgoConfig")


class _DefaultName(str):
    """A default that can be distinguished from the same name given by the user."""

    __slots__ = ()


class _DefaultNumber(int):
    """A number that is computed from other settings, because none was given."""

    __slots__ = ()


_COMPUTED = ("total_timesteps", "total_updates", "num_envs", "eval_interval")
"""Settings whose default depends on other settings, each after those it depends on."""
_NAMED = ("env_id", "acceleration")
"""Settings whose default name stands for a choice that depends on others."""
_TOTALS = ("total_timesteps", "total_updates")
_DEFAULT_TOTAL = 100_000
_HALF = 0.5


@dataclasses.dataclass(frozen=True)
class WrapperConfig:
    """A Gymnasium wrapper applied to every environment."""

    path: str
    """The wrapper class, as 'module:Class'."""
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of its constructor, besides the environment."""

    def __post_init__(self) -> None:
        check_types(self, "wrappers")
        module, _, name = self.path.partition(":")
        require(bool(module and name), "wrappers", "named as 'module:Class'", self.path)

    @staticmethod
    def from_plain(value: Any, where: str) -> WrapperConfig:
        """Accept ``"module:Class"`` or ``{path: ..., kwargs: {...}}``."""
        if isinstance(value, str):
            return WrapperConfig(value)
        if isinstance(value, Mapping):
            return build_dataclass(WrapperConfig, value, where)
        if isinstance(value, type):
            path = f"{value.__module__}:{value.__qualname__}"
            raise ConfigError(f"'{where}': name the class as text, {path!r}")
        raise ConfigError(
            f"'{where}' must be 'module:Class' or a mapping, {{path: 'module:Class', kwargs:"
            f" {{...}}}}; got {value!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtariConfig:
    """The standard Atari pipeline (Mnih et al. 2015; Machado et al. 2018, arXiv:1709.06009).

    Frames are grayscale, the pixelwise maximum of the last two frames of a skip, and resized.
    Evaluation always plays whole games and reports raw scores, independent of these settings.
    """

    noop_max: int = 30
    """Maximum number of no-op frames at the start of a game (random, at least 1); 0: none."""
    frame_skip: int = 4
    """Number of frames for which each action is repeated."""
    screen_size: int = 84
    """Height and width of resized frames, in pixels."""
    frame_stack: int = 4
    """Number of latest frames in an observation, as channels; black before a game's first frame."""
    terminal_on_life_loss: bool = True
    """End the training episode when a life is lost, without restarting the game."""
    fire_on_reset: bool = True
    """Press FIRE at the start of a game, if the game has this action."""
    clip_rewards: bool = True
    """Clip rewards to -1, 0 or 1 (their sign) for training."""
    sticky_actions: float | None = None
    """Probability of repeating the previous action; unset: that of the id (v5: 0.25, v4: 0)."""
    max_frames: int = 108_000
    """Number of frames after which a game is truncated (108,000: half an hour of play)."""

    seed_interval: int = 10_000
    """Reseed an environment at its first new game after this many steps (10,000 are about 11
    minutes of play); 0: never.

    Resume with vectorization: native replays the steps since the last reseed: a larger value makes
    resume slower; 0 makes it inexact (new games).
    """

    def __post_init__(self) -> None:
        check_types(self, "atari")
        require(self.seed_interval >= 0, "atari.seed_interval", "zero or more", self.seed_interval)
        for name, most in (("frame_skip", 1000), ("screen_size", 1024), ("frame_stack", 64)):
            value = getattr(self, name)
            require(1 <= value <= most, f"atari.{name}", f"at least 1, at most {most:,}", value)
        require(self.noop_max >= 0, "atari.noop_max", "zero or more", self.noop_max)
        require(
            self.max_frames >= self.frame_skip,
            "atari.max_frames",
            "a skip or more",
            self.max_frames,
        )
        if self.sticky_actions is not None:
            allowed = 0 <= self.sticky_actions < 1
            require(allowed, "atari.sticky_actions", "at least 0, below 1", self.sticky_actions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Generic[AlgoConfig]):
    """One training run. Every field is also a command-line flag."""

    algo: str = _DefaultName("ppo")
    """Name of the algorithm, for example ppo, dqn or sac."""
    env_id: str = _DefaultName("CartPole-v1")
    """Gymnasium id; 'my_package:MyEnv-v0' imports my_package first, which must register it. Of a
    run from a dataset alone, the environment to evaluate on: unset, the one that the dataset names;
    empty, none."""
    seed: int = 1
    """Seed from which all random numbers of the run are derived."""
    total_timesteps: int = _DefaultNumber()
    """Total environment steps, summed over all environments; rounded up to whole rollouts, or
    off-policy to a multiple of num_envs; by default 100,000, and 0 for a run from a dataset alone,
    which ends after total_updates."""
    total_updates: int = _DefaultNumber()
    """Total gradient updates of a run that learns from a dataset alone; it counts updates where
    others count environment steps, in all intervals, schedules and logs. By default 100,000 for
    algorithms that learn so, else 0."""
    dataset: str | None = None
    """Recorded episodes to learn from: a Minari id ('namespace/name-v0') or the folder of a
    dataset. With total_timesteps, a part of every batch comes from it."""
    dataset_transitions: int | None = None
    """Load only so many transitions of the dataset, as whole episodes drawn at random; unset: all
    of it."""
    dataset_fraction: float = _HALF
    """Part of every batch that comes from the dataset while environments are stepped, too."""
    num_envs: int = _DefaultNumber()
    """Number of parallel environments; by default 8 for algorithms that learn from rollouts and 1
    for those with a replay buffer."""
    shards: int = 1
    """Equal parts that a run is divided into, so that several processes (torchrun) can execute it;
    a divisor of num_envs. Changing it changes results as another seed does; the number of processes
    does not."""
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of gymnasium.make (on the command line as YAML: '{gravity: -5.0}')."""
    engine: Literal["local", "ray"] = "local"
    """What steps the environments of training: 'local', this process (and its workers, see
    vectorization); 'ray', a Ray actor per shard."""
    lag: Literal[0, 1, "async"] = 0
    """Learning phases that acting may be behind, with engine: ray. 1: the next rollout is collected
    while this one is learnt from, with the weights from before that. 'async': workers collect all
    the time, and what they send is learnt from in the order of arrival; not reproducible."""
    worker_cpus: float = 1.0
    """CPUs that each Ray actor requests (logical: nothing binds it to them)."""
    max_worker_failures: int = 3
    """Failures in a row of a Ray actor that end the run; until then it is replaced, and its steps
    are taken again."""
    vectorization: Literal["sync", "async", "native", "device"] = "sync"
    """'sync': all in this process; 'async': one process each; 'native': the environment's own
    vector implementation; 'device': environments in torch, on the device of the networks."""
    worker_timeout: float = 60.0
    """Seconds that an async worker may take for a step or reset before the run fails, and a Ray
    actor before it is replaced."""
    max_recorded_steps: int = 100_000
    """Steps recorded per episode for exact resume. In a longer episode a warning is printed and
    resume is approximate: it starts a new episode."""
    wrappers: tuple[WrapperConfig, ...] = ()
    """Wrappers applied to each environment, innermost first (on the command line as YAML:
    '["gymnasium.wrappers:TimeAwareObservation"]')."""
    preprocessing: Literal["none", "atari"] = "none"
    """'atari' applies the standard Atari preprocessing, configured by the atari.* settings."""
    atari: AtariConfig = dataclasses.field(default_factory=AtariConfig)
    """Settings of the Atari preprocessing (used with preprocessing: atari)."""
    overlap: bool = False
    """Step half of the environments while the policy acts for the other half; needs preprocessing:
    atari and vectorization: native."""

    normalize_obs: bool = False
    """Standardise observations with their running mean and variance (of a run from a dataset alone:
    those of the dataset), saved with the policy."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_obs: float = 10.0
    """Clip normalised observations to [-clip_obs, clip_obs]."""
    clip_reward: float = 10.0
    """Clip normalised rewards to [-clip_reward, clip_reward]."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the networks; 'auto': a GPU for images, the CPU (usually faster) for vectors."""
    acceleration: Literal["eager", "compile", "cudagraph"] = cast(
        "Literal['eager']",
        _DefaultName("eager"),
    )
    """How updates run: 'compile' compiles loss and gradients; 'cudagraph' also replays the
    update as one CUDA graph. Unset: cudagraph for environments on a GPU, where it is possible."""
    deterministic: bool = False
    """Use only operations on CUDA whose results do not depend on timing; slower. It has no effect
    on other devices."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of networks for images; bfloat16 needs CUDA."""
    torch_threads: int | None = None
    """CPU threads of torch; unset: torch's default for images, at most 8 for large networks on
    vectors, else 1."""

    eval_interval: int = _DefaultNumber()
    """Environment steps, or updates of a run from a dataset alone, between evaluations; by default
    a tenth of the total; 0: only at the end."""
    eval_episodes: int = 10
    """Number of episodes per evaluation; 0: no evaluation."""
    eval_deterministic: bool = True
    """Evaluate with the most likely action instead of a sampled one."""

    record_interval: int = 0
    """Environment steps, or updates, between videos of evaluations, videos/step_N.mp4 in the run
    folder (extra: video); 0: none."""

    checkpoint_interval: int = 50_000
    """Environment steps, or updates of a run from a dataset alone, between checkpoints; also at
    start, end, new best and every 5 minutes."""
    keep_checkpoints: int = 2
    """How many numbered checkpoints to keep, besides 'last' and 'best'."""

    output_dir: Path = Path("runs")
    """Folder in which run folders are created."""
    log_interval_steps: int = 1
    """Minimum environment steps, or updates of a run from a dataset alone, between rows of metrics;
    1: a row after every iteration."""
    log_info: tuple[str, ...] = ()
    """Keys of the info that an episode's last step returns, for example is_success: their means are
    logged as rollout/KEY_mean (last 100 episodes) and eval/KEY_mean."""
    log_interval: int | None = None
    """Deprecated: use log_interval_steps; here 0 logged every iteration."""
    OLD_NAMES: ClassVar[Mapping[str, OldName]] = {
        "log_interval": OldName("log_interval_steps", lambda value: 1 if value == 0 else value)
    }
    """Renamed settings."""
    tensorboard: bool = True
    """Write TensorBoard events in addition to metrics.jsonl."""
    wandb: bool = False
    """Also log to Weights & Biases (needs an extra; in the clone: pip install '.[wandb]')."""
    wandb_project: str = "rl_training"
    """Name of the Weights & Biases project."""
    mlflow: bool = False
    """Also log to MLflow, at MLFLOW_TRACKING_URI (extra: mlflow)."""
    mlflow_experiment: str = "rl_training"
    """Name of the MLflow experiment."""
    trackers: tuple[str, ...] = ()
    """Also log to these trackers of installed packages."""
    progress: bool = True
    """Show a progress bar (plain lines if the output is not a terminal)."""

    init_from: Path | None = None
    """Checkpoint or run folder to load the initial policy weights from."""

    algo_kwargs: AlgoConfig = cast("AlgoConfig", None)  # noqa: RUF009 - replaced at once below
    """Hyperparameters of the algorithm: a mapping, or its config dataclass."""

    def __post_init__(self) -> None:
        not_given = self._not_given()
        given_dataset: Any = self.dataset
        if isinstance(given_dataset, Path):
            object.__setattr__(self, "dataset", str(given_dataset))
        check_types(self)
        take_old_names(self)
        find_entry(self.algo)
        given = self.algo_kwargs
        object.__setattr__(self, "algo_kwargs", self._typed_algo_kwargs())
        if self.algo_kwargs == algo_config_type(self.algo)():
            given = cast("AlgoConfig", None)  # the defaults, also of a copy by dataclasses.replace
        object.__setattr__(self, "_given_algo_kwargs", given)
        self._check_totals(not_given)
        require(1 <= self.shards <= _MAX_ENVS, "shards", f"1 to {_MAX_ENVS:,}", self.shards)
        for name in not_given:
            object.__setattr__(self, name, _DefaultNumber(self._computed(name)))
        require(self.seed >= 0, "seed", "zero or more", self.seed)
        for name in (self.total_setting, "num_envs", "max_recorded_steps"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        most = _MAX_WORKERS if self.vectorization == "async" else _MAX_ENVS
        rule = f"at most {most:,} with vectorization: {self.vectorization}"
        require(self.num_envs <= most, "num_envs", rule, self.num_envs)
        rule = f"a divisor of num_envs = {self.num_envs} (or set num_envs to a multiple of it)"
        require(self.num_envs % self.shards == 0, "shards", rule, self.shards)
        for name in ("eval_interval", "eval_episodes", "record_interval", "checkpoint_interval"):
            require(getattr(self, name) >= 0, name, "zero or more", getattr(self, name))
        steps = self.log_interval_steps
        require(steps >= 1, "log_interval_steps", "at least 1", steps)
        require(self.keep_checkpoints >= 1, "keep_checkpoints", "at least 1", self.keep_checkpoints)
        least = self.max_worker_failures
        require(least >= 1, "max_worker_failures", "at least 1", least)
        for name in ("worker_timeout", "worker_cpus", "clip_obs", "clip_reward"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        if self.torch_threads is not None:
            require(self.torch_threads >= 1, "torch_threads", "at least 1", self.torch_threads)
            few = self.torch_threads <= _MAX_THREADS
            require(few, "torch_threads", f"at most {_MAX_THREADS:,}", self.torch_threads)
        if not self.is_offline:
            require(bool(self.env_id.strip()), "env_id", "the id of an environment", self.env_id)
        self._check_dataset()
        if self.vectorization == "native" and self.wrappers:
            raise ConfigError(
                "'wrappers' cannot be put around a native vector; use vectorization: sync or async"
            )
        self._check_atari()
        self._check_device_envs()
        check_settings(
            self.algo,
            acceleration=self.acceleration,
            overlap=self.overlap,
            shards=self.shards,
            dataset=self.dataset is not None,
            engine=self.engine,
            lag=self.lag,
            memory=getattr(self.algo_kwargs, "memory", "none"),
        )
        self.algo_kwargs.check_run(self)  # type: ignore[attr-defined]

    def _not_given(self) -> list[str]:
        """Return the settings to compute, and replace None by a number until they are."""
        names = [n for n in _COMPUTED if isinstance(getattr(self, n), _DefaultNumber | None)]
        for name in names:
            object.__setattr__(self, name, _DefaultNumber())
        return names

    def _computed(self, name: str) -> int:
        """Return the value of a setting that was not given."""
        if name in ("total_timesteps", "total_updates"):
            other = "total_updates" if name == "total_timesteps" else "total_timesteps"
            counted = name == ("total_updates" if self.is_offline else "total_timesteps")
            return _DEFAULT_TOTAL if counted and not getattr(self, other) else 0
        if name == "num_envs":
            least = int(getattr(self.algo_kwargs, "default_num_envs", 1))
            return -(-least // self.shards) * self.shards
        return max(1, self.total // 10)

    def _check_totals(self, not_given: list[str]) -> None:
        """Refuse totals that the algorithm does not count."""
        entry = find_entry(self.algo)
        steps, updates = (
            0 if name in not_given else getattr(self, name)
            for name in ("total_timesteps", "total_updates")
        )
        if steps > 0 and not entry.online:
            raise ConfigError(
                f"{self.algo} learns from a dataset alone and counts updates: set total_updates"
                " instead of total_timesteps"
            )
        if updates > 0 and not entry.offline:
            raise ConfigError(
                f"'total_updates' is for algorithms that learn from a dataset alone; {self.algo}"
                f" counts environment steps: set total_timesteps, or {others_offline()}"
            )
        if steps > 0 and updates > 0:
            raise ConfigError(
                "set total_updates, to learn from the dataset alone, or total_timesteps, to step"
                f" environments, too; got {updates} and {steps}"
            )
        require(updates >= 0, "total_updates", "zero or more", updates)
        require(steps >= 0, "total_timesteps", "at least 1", steps)
        offline = entry.offline and not steps
        object.__setattr__(self, "_learns_offline", offline)

    def _check_dataset(self) -> None:
        if self.dataset is not None:
            require(bool(self.dataset.strip()), "dataset", "a Minari id or a folder", self.dataset)
        if (most := self.dataset_transitions) is not None:
            require(most >= 1, "dataset_transitions", "at least 1", most)
            require(
                self.dataset is not None, "dataset_transitions", "unset without a dataset", most
            )
        part = self.dataset_fraction
        require(0 < part < 1, "dataset_fraction", "above 0 and below 1", part)
        if part != _HALF and (self.dataset is None or self.is_offline):
            raise ConfigError(
                "'dataset_fraction' has no effect here: it divides batches between a dataset and a"
                " replay, in runs with dataset and total_timesteps"
            )

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from a dataset alone, and counts updates."""
        return bool(vars(self)["_learns_offline"])

    @property
    def total_setting(self) -> str:
        """The setting that ends the run."""
        return "total_updates" if self.is_offline else "total_timesteps"

    @property
    def total(self) -> int:
        """Environment steps of the run, or updates of a run from a dataset alone."""
        return int(getattr(self, self.total_setting))

    @property
    def has_memory(self) -> bool:
        """Whether policies are recurrent: `predict` then takes and returns a state."""
        return bool(self.algo_kwargs.has_memory)  # type: ignore[attr-defined]

    @property
    def unit(self) -> str:
        """What the run counts: "steps" of environments, or "updates"."""
        return "updates" if self.is_offline else "steps"

    def _check_device_envs(self) -> None:
        if self.vectorization != "device":
            return
        check_device_envs(self.algo)
        for name, fits, wanted in (
            ("wrappers", not self.wrappers, "empty"),
            ("preprocessing", self.preprocessing == "none", "none"),
            ("engine", self.engine == "local", "local"),
            ("shards", self.shards == 1, "1"),
            ("dataset", self.dataset is None, "unset"),
            ("normalize_reward", not self.normalize_reward, "false"),
            ("algo_kwargs.memory", not self.has_memory, "none"),
            ("algo_kwargs.noisy", not getattr(self.algo_kwargs, "noisy", False), "false"),
            ("log_info", not self.log_info, "empty"),
            ("device", self.device != "mps", "auto, cpu or cuda"),  # sums are float64
        ):
            if not fits:
                raise ConfigError(f"'{name}' must be {wanted} with vectorization: device")

    def _check_atari(self) -> None:
        if self.preprocessing == "none" and self.atari != AtariConfig():
            raise ConfigError("settings under 'atari' do nothing without preprocessing: atari")
        if self.overlap:
            native_atari = self.preprocessing == "atari" and self.vectorization == "native"
            if not native_atari:
                raise ConfigError("'overlap' needs preprocessing: atari and vectorization: native")
            halved = self.num_envs // self.shards % 2 == 0
            rule = "even with overlap" + (" in each shard" if self.shards > 1 else "")
            require(halved, "num_envs", rule, self.num_envs)

    def _typed_algo_kwargs(self) -> Any:
        wanted = algo_config_type(self.algo)
        given: Any = self.algo_kwargs
        if given is None:
            return wanted()
        if isinstance(given, wanted):
            return given
        if isinstance(given, Mapping):
            return build_dataclass(wanted, given, "algo_kwargs")
        raise ConfigError(
            f"'algo_kwargs' must be a mapping or {wanted.__name__}, as in algo_kwargs:"
            f" {{learning_rate: 0.001}}; got {type(given).__name__}"
        )

    @property
    def names_algo(self) -> bool:
        """Whether the algorithm was named, instead of being the default."""
        return self.is_given("algo")

    def is_given(self, name: str) -> bool:
        """Whether a setting with a default that depends on others was set by the user."""
        return not isinstance(getattr(self, name), _DefaultName | _DefaultNumber)

    def for_algo(self, algo: str) -> TrainConfig[Any]:
        """Return this config for an algorithm; one that names another algorithm is refused."""
        if self.algo == algo:
            return self
        if self.names_algo:
            raise ConfigError(f"a config with algo: {self.algo} was given where {algo} is trained")
        given = vars(self)["_given_algo_kwargs"]
        return config_from_mapping({**self._given(), "algo": algo, "algo_kwargs": given})

    def with_overrides(self, **overrides: Any) -> TrainConfig[Any]:
        """Return a copy with new values for fields or for hyperparameters of the algorithm."""
        if not self.names_algo and overrides.get("algo", self.algo) != self.algo:
            return self.for_algo(overrides["algo"]).with_overrides(**overrides)
        base = self._given()
        if not self.names_algo:  # it stays unnamed, with the settings that were given for it
            base["algo_kwargs"] = to_plain(vars(self)["_given_algo_kwargs"]) or {}
        settings = merge_settings(base, _sort_overrides(self, overrides))
        if not self.names_algo and "algo" not in overrides:
            del settings["algo"]
        return config_from_mapping(settings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as stored in YAML, JSON and checkpoints."""
        plain = cast("dict[str, Any]", to_plain(self))
        named = {name: str(plain[name]) for name in ("algo", *_NAMED)}
        settings = {**plain, **named, **{name: int(plain[name]) for name in _COMPUTED}}
        if self.is_offline and not self.is_given("env_id"):  # it is that of the dataset
            del settings["env_id"]
        return settings

    def _given(self) -> dict[str, Any]:
        """Return plain values without those that were computed from others."""
        computed = [name for name in (*_COMPUTED, *_NAMED) if not self.is_given(name)]
        return {key: value for key, value in self.to_dict().items() if key not in computed}

    def to_yaml(self) -> str:
        """Return YAML that :func:`config_from_file` reads back to an equal config."""
        return dump_yaml({"format": FORMAT, **self.to_dict()})


def algo_config_type(algo: str) -> type[Any]:
    """Return the config dataclass of an algorithm."""
    return config_type(algo)


def _sort_overrides(config: TrainConfig[Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(config)}
    knobs = {f.name for f in dataclasses.fields(config.algo_kwargs)}
    result: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    for key, value in overrides.items():
        if key == "algo_kwargs":
            if not isinstance(plain := to_plain(value), Mapping):
                raise ConfigError(f"'algo_kwargs' must be a mapping; got {value!r}")
            moved.update(plain)
        elif key in fields:
            result[key] = value
        elif key in knobs:
            moved[key] = value
        else:
            known = fields | knobs | {"env_fn"}
            raise ConfigError(f"unknown setting '{key}'.{_suggestion(key, known, config.algo)}")
    return {**result, "algo_kwargs": moved} if moved else result


def _suggestion(key: str, known: set[str], algo: str = "ppo") -> str:
    """Return what to do about an unknown setting of a run with ``algo``."""
    near = did_you_mean(key, known)
    if near and not near.startswith(" Known"):
        return near
    others = [name for name in ALGORITHMS if key in _shown_settings(config_type(name))]
    if others:
        return f" It is a setting of {', '.join(others)}, not of {algo}."
    return near or f" 'rl-training train --algo {algo} --help' lists the settings."


def _shown_settings(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} - hidden_fields(kind)


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``over``; ``algo_kwargs`` are merged key by key.

    If ``over`` names another algorithm, the ``algo_kwargs`` of ``base`` are dropped.
    """
    base, over = _renamed_settings(base), _renamed_settings(over, base.get("algo", "ppo"))
    merged = {**base, **over}
    if over.get("preprocessing") == "none":
        merged["atari"] = over.get("atari", {})
    elif isinstance(base.get("atari"), Mapping) and isinstance(over.get("atari"), Mapping):
        merged["atari"] = {**base["atari"], **over["atari"]}
    for total, other in (_TOTALS, _TOTALS[::-1]):  # a run has one end
        if over.get(total) and other not in over:
            merged.pop(other, None)
    same_algo = over.get("algo", base.get("algo")) == base.get("algo")
    knobs, new_knobs = base.get("algo_kwargs"), over.get("algo_kwargs")
    if isinstance(knobs, Mapping) and same_algo:
        if new_knobs is None or isinstance(new_knobs, Mapping):  # else refused when validated
            merged["algo_kwargs"] = {**knobs, **(new_knobs or {})}
    elif not same_algo:
        merged["algo_kwargs"] = new_knobs
    return merged


def _renamed_settings(settings: Mapping[str, Any], algo: Any = "ppo") -> dict[str, Any]:
    """Return settings under their new names, so that a later one replaces an earlier one."""
    result = renamed(TrainConfig, settings)
    algo, knobs = result.get("algo", algo), result.get("algo_kwargs")
    if isinstance(knobs, Mapping) and isinstance(algo, str) and algo in ALGORITHMS:
        result["algo_kwargs"] = renamed(config_type(algo), knobs, "algo_kwargs")
    return result


def config_from_mapping(values: Mapping[str, Any]) -> TrainConfig[Any]:
    """Validate plain values into a config."""
    values = renamed(TrainConfig, values)
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    for key in values:
        if key not in fields:
            hint = _suggestion(str(key), fields)
            algo = values.get("algo", "ppo")
            if (
                isinstance(algo, str)
                and algo in ALGORITHMS
                and key in {f.name for f in dataclasses.fields(algo_config_type(algo))}
            ):
                hint = " It is a setting of the algorithm: put it under 'algo_kwargs'."
            raise ConfigError(f"unknown key '{key}'.{hint}")
    return TrainConfig(**values)


def presets_dir() -> Path:
    """Return the folder of the packaged presets."""
    return Path(__file__).parent / "assets" / "configs"


def zoo_dir() -> Path:
    """Return the folder of the packaged benchmarks and their presets."""
    return Path(__file__).parent / "assets" / "zoo"


def preset_names() -> list[str]:
    """Return the preset names that ``rl-training train NAME`` accepts."""
    root = presets_dir()
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))


def find_config(name: str | Path) -> Path:
    """Return the path of a config file, or of a packaged preset given by name."""
    path = Path(name)
    if path.is_file():
        return path
    if str(name) in preset_names():
        return presets_dir() / f"{name}.yaml"
    in_zoo = zoo_dir() / f"{str(name).removeprefix('zoo/')}.yaml"
    if str(name).startswith("zoo/") and in_zoo.is_file():
        return in_zoo
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"config file {path} does not exist")
    hint = did_you_mean(str(name), preset_names()) or " rl-training presets lists the presets."
    raise ConfigError(f"no preset or file {str(name)!r}.{hint}")


def settings_from_file(name: str | Path) -> dict[str, Any]:
    """Return the settings of a file, merged into those of the preset it names (if any)."""
    path = find_config(name)
    values = load_yaml_file(path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(values).__name__}")
    version = values.get("format", FORMAT)
    if version != FORMAT:
        raise ConfigError(
            f"{path} has format {version!r}; this version of rl_training reads format {FORMAT}"
            " (a newer rl_training is needed)"
        )
    settings = {key: value for key, value in values.items() if key not in _NOT_SETTINGS}
    if "preset" in values:
        preset = values["preset"]
        if preset not in preset_names():
            raise ConfigError(
                f"{path}: no preset {preset!r}.{did_you_mean(str(preset), preset_names())}"
            )
        settings = merge_settings(settings_from_file(preset), settings)
    return settings


def config_from_file(name: str | Path) -> TrainConfig[Any]:
    """Load a YAML file or a packaged preset."""
    try:
        return config_from_mapping(settings_from_file(name))
    except ConfigError as error:
        if str(find_config(name)) in str(error):
            raise
        raise ConfigError(f"{find_config(name)}: {error}") from None
