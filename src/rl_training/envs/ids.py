"""Registered environments by id; what is suggested for an id that is not registered."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from rl_training.envs import envpool
from rl_training.envs.team_env import PREFIX, team_spec
from rl_training.errors import ConfigError, is_one_mistake
from rl_training.plugins import import_named

_ATARI_ID = r"ALE/|\w+(NoFrameskip|Deterministic)-v[04]$"
_MIN_SIMILARITY = 0.75
_MOST_LISTED = 12
_PACKAGES = (
    (r"(MiniGrid|BabyAI)-", "minigrid", "minigrid"),
    (
        r"(highway|merge|roundabout|parking|intersection|racetrack)(-|$)",
        "highway_env",
        "highway-env",
    ),
    (r"dm_control/", "shimmy", "'shimmy[dm-control]'"),
    (
        r"(Fetch|HandReach|HandManipulate|AdroitHand|AntMaze|PointMaze|FrankaKitchen)",
        "gymnasium_robotics",
        "gymnasium-robotics",
    ),
)
"""Ids of well-known packages, the module that registers them and the name to install."""


def find_spec(env_id: str) -> EnvSpec:
    """Return the spec of an id such as ``CartPole-v1`` or ``my_package:MyEnv-v0``.

    The module before the colon is imported first. Raises `ConfigError`, with what was probably
    meant, for an id that is not registered.
    """
    module, _, name = env_id.rpartition(":")
    if module == PREFIX:
        return team_spec(name)
    if module == envpool.PREFIX:
        return envpool.envpool_spec(name)
    before = set(gym.registry)
    if module:
        import_named(module, "env_id")
    new = set(gym.registry) - before
    if name not in gym.registry and re.match(_ATARI_ID, name):
        _register_atari(env_id)
    try:
        return gym.spec(name)
    except gym.error.Error:
        own = _registered_by(module, new) if module else []
        hint = _hint_in_module(module, name, own) if module else _hint(name)
        raise ConfigError(f"no environment {env_id!r}.{hint}") from None


def needs_extra(env_id: str, extra: str) -> str:
    """Return the message for an environment whose optional dependencies are not installed."""
    return f"{env_id} needs an extra: pip install 'rl_training[{extra}]'"


def _register_atari(env_id: str) -> None:
    try:
        import ale_py
    except ImportError:
        raise ConfigError(needs_extra(env_id, "atari")) from None
    gym.register_envs(ale_py)


def _registered_by(module: str, new: set[str]) -> list[str]:
    """Return the ids that a module, or its package, registered: now, or when first imported."""
    package = module.partition(".")[0]
    return sorted(
        name
        for name, spec in gym.registry.items()
        if name in new or _module_of(spec).partition(".")[0] == package
    )


def _module_of(spec: EnvSpec) -> str:
    entry = spec.entry_point
    if isinstance(entry, str):
        return entry.partition(":")[0]
    return str(getattr(entry, "__module__", ""))


def _hint_in_module(module: str, name: str, own: list[str]) -> str:
    if not own:
        return (
            f" The module {module!r} was imported and registers no environment: call"
            f" gymnasium.register({name!r}, entry_point=...) in it."
        )
    if near := _nearest(name, own):
        return f" Did you mean '{module}:{near}'?"
    listed = ", ".join(own[:_MOST_LISTED]) + (", ..." if len(own) > _MOST_LISTED else "")
    return f" The module {module!r} registers: {listed}."


def _hint(name: str) -> str:
    namespace, slash, _ = name.rpartition("/")
    inside = [known for known in gym.registry if known.rpartition("/")[0] == namespace]
    if near := (not slash and _with_this_name(name)) or _nearest(name, inside):
        return f" Did you mean {near!r}?"
    for pattern, module, package in _PACKAGES:
        if re.match(pattern, name):
            return f" It is in another package: pip install {package}, then use '{module}:{name}'."
    return (
        " An environment of your own must be registered: '{0}:{1}' imports {0} first. In Python,"
        " env_fn=MyEnv needs no registration."
    ).format("my_module", name)


def _with_this_name(name: str) -> str | None:
    """Return an id of this name in any namespace (Atari games have one), the newest if several."""
    with contextlib.suppress(ImportError):
        import ale_py

        gym.register_envs(ale_py)
    same = [known for known in gym.registry if _base(known) == _base(name)]
    return max(same, key=lambda known: _rank(known, name), default=None)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the id whose name, without version and case, is nearest."""
    wanted = _base(name)
    by_base: dict[str, list[str]] = {}
    for one in known:
        by_base.setdefault(_base(one), []).append(one)
    close = [wanted] if wanted in by_base else []
    if len(wanted) <= 4:
        close = close or [base for base in by_base if is_one_mistake(wanted, base)][:1]
    else:
        close = close or difflib.get_close_matches(wanted, by_base, 1, cutoff=_MIN_SIMILARITY)
    if not close:
        return None
    return max(by_base[close[0]], key=lambda one: _rank(one, name))


def _rank(known: str, name: str) -> tuple[bool, int, bool]:
    """The order of ids of one name: the version that was asked for, then newer ones first."""
    return _version(known) == _version(name), _version(known), "/" not in known


def _base(name: str) -> str:
    """The name of an id without namespace, version and case."""
    return re.sub(r"-v\d+$", "", name.rpartition("/")[2], flags=re.IGNORECASE).lower()


def _version(name: str) -> int:
    found = re.search(r"-v(\d+)$", name, re.IGNORECASE)
    return int(found[1]) if found else -1
