"""The table of algorithms: all that the package knows of each before it is imported.

The managed classes, ``train_*``, the command line, the zoo, the tables in the docs and every
refusal of what an algorithm does not support are made from this table. Names of code are strings
``"module:attribute"``, so that reading the table imports none of it.

An installed package adds algorithms through the entry point group ``rl_training.algorithms``: the
name of an entry point is that of the algorithm, its value an `Entry`, e.g. in its pyproject.toml

    [project.entry-points."rl_training.algorithms"]
    reinforce = "my_package.registration:REINFORCE"
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rl_training._internal.lazy import resolve
from rl_training.errors import ConfigError, did_you_mean
from rl_training.plugins import installed_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rl_training.config import TrainConfig
    from rl_training.runtime.spec import AlgorithmSpec
    from rl_training.types import ActionSpec, ObsSpec

ENTRY_POINTS = "rl_training.algorithms"
"""Group in which installed packages register algorithms."""

VECTOR, IMAGE, DICT = "vector", "image", "Dict"
_DISCRETE, _BOUNDED_BOX = "Discrete", "bounded Box"
_MULTI_DISCRETE = "MultiDiscrete"
_ANY_ACTION = (_DISCRETE, _BOUNDED_BOX, "unbounded Box", _MULTI_DISCRETE, "MultiBinary")
_HYBRID = "hybrid"
_ANY_OBSERVATION = (VECTOR, IMAGE, DICT)
_RECURRENT = ("lstm", "gru")
_ANY_MEMORY = ("none", *_RECURRENT)
_ANY_ACCELERATION = ("eager", "compile", "cudagraph")
TORCHRUN, RAY = "torchrun", "ray"
_ANY_ENGINE = ("local", TORCHRUN, RAY)
ASYNC = "async"


class Entry(NamedTuple):
    """One algorithm: where its code is, and what it supports."""

    config: str
    """Its config dataclass, as "module:Class"."""
    spec: str
    """Its `AlgorithmSpec`, as "module:NAME"."""
    actions: tuple[str, ...]
    """Kinds of action space, as `ActionSpec.described` names them."""
    observations: tuple[str, ...] = (VECTOR,)
    """Kinds of observation: "vector", "image", "Dict"."""
    memory: tuple[str, ...] = ("none",)
    """Allowed values of its setting ``memory``. A policy with another one than "none" is recurrent:
    ``predict`` then takes and returns a state."""
    masks: bool = False
    """Whether it respects action masks."""
    accelerations: tuple[str, ...] = ("eager",)
    """Allowed values of ``acceleration``."""
    engines: tuple[str, ...] = ("local",)
    """What can run it: "local", one process and one shard; "torchrun", any number of shards in one
    process or in several; "ray", environments stepped by Ray actors. Of an entry with "torchrun",
    `AlgorithmSpec.build` takes a `Communicator` and `AlgorithmSpec.actor` a shard."""
    lags: tuple[int | str, ...] = (0,)
    """Allowed values of ``lag``: by how many learning phases acting may be behind."""
    device_envs: bool = False
    """Whether it learns from environments on the device (``vectorization: device``)."""
    online: bool = True
    """Whether it can learn from environments that it steps."""
    offline: bool = False
    """Whether it can learn from a dataset alone."""
    multi_agent: bool = False
    """Whether it trains several agents; its config then derives from `AgentsConfig`."""
    prior_data: bool = False
    """Whether a part of every batch may come from a dataset while it steps environments."""
    class_name: str = ""
    """Name of its managed class; unset: the algorithm's name in capital letters."""
    title: str = ""
    """What it is, in a few words."""

    @property
    def is_recurrent(self) -> bool:
        """Whether all its policies are recurrent."""
        return "none" not in self.memory

    def class_name_of(self, name: str) -> str:
        """Return the name of the managed class of the algorithm ``name``."""
        return self.class_name or name.upper()


class Registry(dict[str, Entry]):
    """The algorithms by name; those of installed packages are loaded when they are asked for."""

    def __missing__(self, name: str) -> Entry:
        found = _installed().get(name)
        if found is None:
            raise KeyError(name)
        self[name] = _load(found)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in _installed()

    def names(self) -> list[str]:
        """Return all names, those of installed packages last."""
        return list(dict.fromkeys([*self, *_installed()]))


def _installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages by name; nothing of them is imported yet."""
    return installed_points(ENTRY_POINTS, "an algorithm")


def _load(point: EntryPoint) -> Entry:
    try:
        entry = point.load()
    except Exception as error:
        raise ConfigError(
            f"algorithm {point.name!r}: {point.value} cannot be imported"
            f" ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(entry, Entry):
        raise ConfigError(
            f"algorithm {point.name!r}: {point.value} is a {type(entry).__name__}, not an Entry"
        )
    return entry


ALGORITHMS = Registry(
    {
        "ppo": Entry(
            "rl_training.algorithms.ppo:PPOConfig",
            "rl_training.runtime.ppo_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, 1),
            device_envs=True,
            title="Proximal policy optimisation",
        ),
        "a2c": Entry(
            "rl_training.algorithms.a2c:A2CConfig",
            "rl_training.runtime.a2c_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, 1),
            device_envs=True,
            title="Advantage actor-critic",
        ),
        "recurrent_ppo": Entry(
            "rl_training.contrib.recurrent_ppo:RecurrentPPOConfig",
            "rl_training.runtime.recurrent_ppo_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            memory=_RECURRENT,
            masks=True,
            class_name="RecurrentPPO",
            engines=_ANY_ENGINE,
            lags=(0, 1),
            title="PPO with memory",
        ),
        "ppg": Entry(
            "rl_training.algorithms.ppg:PPGConfig",
            "rl_training.runtime.ppg_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, 1),
            device_envs=True,
            title="Phasic policy gradient",
        ),
        "impala": Entry(
            "rl_training.algorithms.impala:IMPALAConfig",
            "rl_training.runtime.impala_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, 1, ASYNC),
            title="Actor-critic with V-trace",
        ),
        "appo": Entry(
            "rl_training.algorithms.appo:APPOConfig",
            "rl_training.runtime.appo_trainer:SPEC",
            actions=(*_ANY_ACTION, _HYBRID),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, 1, ASYNC),
            title="PPO with V-trace",
        ),
        "dqn": Entry(
            "rl_training.algorithms.dqn:DQNConfig",
            "rl_training.runtime.dqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            device_envs=True,
            title="Deep Q-learning",
        ),
        "qrdqn": Entry(
            "rl_training.algorithms.qrdqn:QRDQNConfig",
            "rl_training.runtime.qrdqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            title="DQN of quantiles of returns",
        ),
        "c51": Entry(
            "rl_training.algorithms.c51:C51Config",
            "rl_training.runtime.c51_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            title="DQN of a categorical distribution",
        ),
        "iqn": Entry(
            "rl_training.algorithms.iqn:IQNConfig",
            "rl_training.runtime.iqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            title="DQN of quantiles at random fractions",
        ),
        "pqn": Entry(
            "rl_training.algorithms.pqn:PQNConfig",
            "rl_training.runtime.pqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            title="Q-learning from rollouts",
        ),
        "drqn": Entry(
            "rl_training.algorithms.drqn:DRQNConfig",
            "rl_training.runtime.drqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            memory=_RECURRENT,
            masks=True,
            engines=_ANY_ENGINE,
            title="Deep recurrent Q-learning",
        ),
        "sac": Entry(
            "rl_training.algorithms.sac:SACConfig",
            "rl_training.runtime.sac_trainer:SPEC",
            actions=(_BOUNDED_BOX,),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            prior_data=True,
            device_envs=True,
            title="Soft actor-critic",
        ),
        "sac_discrete": Entry(
            "rl_training.algorithms.sac_discrete:SACDiscreteConfig",
            "rl_training.runtime.sac_discrete_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            prior_data=True,
            class_name="SACDiscrete",
            title="SAC for discrete actions",
        ),
        "td3": Entry(
            "rl_training.algorithms.td3:TD3Config",
            "rl_training.runtime.td3_trainer:SPEC",
            actions=(_BOUNDED_BOX,),
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            accelerations=_ANY_ACCELERATION,
            engines=_ANY_ENGINE,
            lags=(0, ASYNC),
            prior_data=True,
            device_envs=True,
            title="Twin delayed DDPG",
        ),
        "ippo": Entry(
            "rl_training.algorithms.ippo:IPPOConfig",
            "rl_training.runtime.ippo_trainer:SPEC",
            actions=_ANY_ACTION,
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=("local", TORCHRUN),
            multi_agent=True,
            title="PPO for several agents",
        ),
        "mappo": Entry(
            "rl_training.algorithms.mappo:MAPPOConfig",
            "rl_training.runtime.mappo_trainer:SPEC",
            actions=_ANY_ACTION,
            observations=_ANY_OBSERVATION,
            memory=_ANY_MEMORY,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=("local", TORCHRUN),
            multi_agent=True,
            title="PPO for agents with a central critic",
        ),
        "idqn": Entry(
            "rl_training.algorithms.idqn:IDQNConfig",
            "rl_training.runtime.idqn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=("local", TORCHRUN),
            multi_agent=True,
            title="DQN for several agents",
        ),
        "vdn": Entry(
            "rl_training.algorithms.vdn:VDNConfig",
            "rl_training.runtime.vdn_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=("local", TORCHRUN),
            multi_agent=True,
            title="Q-learning of a team's sum of values",
        ),
        "qmix": Entry(
            "rl_training.algorithms.qmix:QMIXConfig",
            "rl_training.runtime.qmix_trainer:SPEC",
            actions=(_DISCRETE,),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            engines=("local", TORCHRUN),
            multi_agent=True,
            title="Q-learning of a team with a mixer",
        ),
        "bc": Entry(
            "rl_training.algorithms.bc:BCConfig",
            "rl_training.runtime.bc_trainer:SPEC",
            actions=(_DISCRETE, _BOUNDED_BOX),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            online=False,
            offline=True,
            title="Behavioural cloning",
        ),
        "td3_bc": Entry(
            "rl_training.algorithms.td3_bc:TD3BCConfig",
            "rl_training.runtime.td3_bc_trainer:SPEC",
            actions=(_BOUNDED_BOX,),
            observations=_ANY_OBSERVATION,
            accelerations=_ANY_ACCELERATION,
            online=False,
            offline=True,
            class_name="TD3BC",
            title="TD3 with behavioural cloning",
        ),
        "iql": Entry(
            "rl_training.algorithms.iql:IQLConfig",
            "rl_training.runtime.iql_trainer:SPEC",
            actions=(_DISCRETE, _BOUNDED_BOX),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            offline=True,
            prior_data=True,
            title="Implicit Q-learning",
        ),
        "cql": Entry(
            "rl_training.algorithms.cql:CQLConfig",
            "rl_training.runtime.cql_trainer:SPEC",
            actions=(_DISCRETE, _BOUNDED_BOX),
            observations=_ANY_OBSERVATION,
            masks=True,
            accelerations=_ANY_ACCELERATION,
            online=False,
            offline=True,
            title="Conservative Q-learning",
        ),
        "rebrac": Entry(
            "rl_training.algorithms.rebrac:ReBRACConfig",
            "rl_training.runtime.rebrac_trainer:SPEC",
            actions=(_BOUNDED_BOX,),
            observations=_ANY_OBSERVATION,
            accelerations=_ANY_ACCELERATION,
            online=False,
            offline=True,
            class_name="ReBRAC",
            title="Behaviour-regularised TD3",
        ),
        "awac": Entry(
            "rl_training.algorithms.awac:AWACConfig",
            "rl_training.runtime.awac_trainer:SPEC",
            actions=(_BOUNDED_BOX,),
            observations=_ANY_OBSERVATION,
            accelerations=_ANY_ACCELERATION,
            offline=True,
            prior_data=True,
            title="Advantage-weighted actor-critic",
        ),
    }
)


SURFACE = "rl_training.surface"
"""Module of the managed classes of the algorithms above."""


def class_exports() -> dict[str, str]:
    """Return where the managed class of each algorithm of this package is, by the class's name."""
    names = (entry.class_name_of(name) for name, entry in ALGORITHMS.items() if _is_ours(entry))
    return {name: f"{SURFACE}:{name}" for name in names}


def train_exports() -> dict[str, str]:
    """Return where ``train_x`` of each algorithm of this package is, by the function's name."""
    return {
        f"train_{name}": f"{entry.spec.partition(':')[0]}:train_{name}"
        for name, entry in ALGORITHMS.items()
        if _is_ours(entry)
    }


def _is_ours(entry: Entry) -> bool:
    return entry.spec.startswith("rl_training.")


def find_entry(name: str) -> Entry:
    """Return the entry of an algorithm; raises `ConfigError` for an unknown name."""
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algo {name!r}.{did_you_mean(name, ALGORITHMS.names())}")
    return ALGORITHMS[name]


def get_spec(name: str) -> AlgorithmSpec:
    """Return the spec of a registered algorithm."""
    return cast("AlgorithmSpec", resolve(find_entry(name).spec))


def spec_of(config: TrainConfig[Any]) -> AlgorithmSpec:
    """Return what a run is built by: the spec of its algorithm, or the one for runs with memory."""
    spec = get_spec(config.algo)
    recurrent = spec.with_memory if config.has_memory else None
    return recurrent or spec


def config_type(name: str) -> type[Any]:
    """Return the config dataclass of an algorithm."""
    return cast("type[Any]", resolve(find_entry(name).config))


# -- refusals --------------------------------------------------------------------------------------


def check_settings(
    name: str,
    *,
    acceleration: str,
    overlap: bool,
    shards: int = 1,
    dataset: bool = False,
    engine: str = "local",
    lag: int | str = 0,
    memory: str = "none",
) -> None:
    """Refuse settings of a run that an algorithm does not support."""
    entry = find_entry(name)
    if engine not in entry.engines:
        raise ConfigError(
            f"'engine' must be {' or '.join(one for one in entry.engines if one != TORCHRUN)} for"
            f" {name}; got {engine!r}{others_with_engine(engine)}"
        )
    if lag and engine != RAY:
        raise ConfigError(f"'lag' must be 0 with engine: {engine}; got {lag} (or set engine: ray)")
    if lag not in entry.lags:
        allowed = " or ".join(map(str, entry.lags))
        raise ConfigError(
            f"'lag' must be {allowed} for {name}; got {lag}"
            f"{_others(entry, lambda one: lag in one.lags)}"
        )
    if overlap and engine == RAY:
        raise ConfigError("'overlap' does not work with engine: ray")
    if dataset and not (entry.offline or entry.prior_data):
        found = _names(lambda one: one.offline or one.prior_data)
        raise ConfigError(f"{name} does not learn from a dataset; use {found}")
    if dataset and shards > 1:
        raise ConfigError(f"'shards' must be 1 with a dataset; got {shards}")
    if shards > 1 and TORCHRUN not in entry.engines:
        others = others_with_engine(TORCHRUN)
        raise ConfigError(f"'shards' must be 1 for {name}; got {shards}{others}")
    if acceleration not in entry.accelerations:
        raise ConfigError(
            f"'acceleration' must be {' or '.join(entry.accelerations)} for {name}; got"
            f" {acceleration!r}{_others(entry, lambda one: acceleration in one.accelerations)}"
        )
    _check_memory(name, memory, overlap=overlap, lag=lag)


def _check_memory(name: str, memory: str, *, overlap: bool, lag: int | str) -> None:
    """Refuse a memory that an algorithm does not have, or what does not work with one."""
    entry = find_entry(name)
    if memory == "none" and not entry.is_recurrent:
        return
    if memory not in (*entry.memory, "none"):
        raise ConfigError(
            f"'algo_kwargs.memory' must be {' or '.join(entry.memory)} for {name}; got {memory!r}"
            f"{_others(entry, lambda one: memory in one.memory)}"
        )
    if overlap:
        raise ConfigError(
            f"'overlap' does not work with {name}, whose policy is recurrent"
            f"{_others(entry, lambda one: IMAGE in one.observations and not one.is_recurrent)}"
        )
    if lag == ASYNC:
        raise ConfigError(f"'lag' must be 0 with memory: {memory}; got {lag}")


def check_device_envs(name: str) -> None:
    """Refuse an algorithm that does not learn from environments on the device."""
    if not find_entry(name).device_envs:
        raise ConfigError(
            f"vectorization: device does not work with {name}; use"
            f" {_names(lambda one: one.device_envs)}"
        )


def check_spaces(name: str, obs_spec: ObsSpec, action_spec: ActionSpec) -> None:
    """Refuse observations, actions or masks that an algorithm does not support."""
    from rl_training.types import specs_of_groups

    for one in specs_of_groups(obs_spec, action_spec).values():
        _check_spaces(name, *one)


def _check_spaces(name: str, obs_spec: ObsSpec, action_spec: ActionSpec) -> None:
    entry = find_entry(name)
    action = action_spec.described

    def fits(other: Entry) -> bool:
        return action in other.actions

    if not fits(entry):
        combinations = action == _MULTI_DISCRETE and _DISCRETE in entry.actions
        why = _COMBINATIONS if combinations else ""
        raise ConfigError(
            f"{name} takes {' and '.join(entry.actions)} actions, not {action} ones{why}"
            f"{_others(entry, fits)}"
        )
    kinds = _kinds(obs_spec)

    def fits_all(other: Entry) -> bool:
        masks = other.masks or not obs_spec.has_mask
        return fits(other) and masks and set(kinds) <= set(other.observations)

    if obs_spec.has_mask and not entry.masks:  # before Dict: the mask may have made it one
        raise ConfigError(f"{name} does not support action masks{_others(entry, fits_all)}")
    if missing := [kind for kind in kinds if kind not in entry.observations]:
        found = "Tuple" if missing[0] == DICT and _is_tuple(obs_spec) else missing[0]
        raise ConfigError(
            f"{name} takes {' and '.join(entry.observations)} observations, not {found} ones"
            f"{_others(entry, fits_all)}"
        )


def others_offline() -> str:
    """Return which algorithms learn from a dataset alone, as the end of a sentence."""
    return f"use {_names(lambda one: one.offline)}"


def others_with_engine(engine: str) -> str:
    """Return the end of a refusal: which algorithms have an engine."""
    found = _names(lambda one: engine in one.engines)
    return f"; use {found}" if found else ""


_COMBINATIONS = (
    ": its network has one output for each action, here each combination of the components. Number"
    " the combinations in a wrapper (gymnasium.ActionWrapper) that has a Discrete space"
)


def _kinds(obs_spec: ObsSpec) -> list[str]:
    """The kinds of observation in a spec."""
    parts = [DICT] if obs_spec.is_dict else []
    if obs_spec.has_images:
        parts.append(IMAGE)
    return parts or [VECTOR]


def _is_tuple(obs_spec: ObsSpec) -> bool:
    """Whether the environment's own observation is a Tuple, which is stored as a Dict."""
    return all(isinstance(obs_spec.path(name)[0], int) for name in obs_spec.leaves)


def _others(entry: Entry, can: Callable[[Entry], bool]) -> str:
    """The end of a refusal: which algorithms of the same kind would work."""
    found = _names(
        lambda one: (
            (one.offline, one.multi_agent) == (entry.offline, entry.multi_agent) and can(one)
        )
    )
    return f"; use {found}" if found else ""


def _names(can: Callable[[Entry], bool]) -> str:
    """The algorithms that have a property, as text."""
    names = []
    for name in ALGORITHMS.names():
        with contextlib.suppress(ConfigError):  # an installed package that cannot be imported
            if can(ALGORITHMS[name]):
                names.append(name)
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
