"""YAML as users mean it: ``1e-3`` is a number, duplicate keys are refused, nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rl_training.errors import ConfigError


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 wants a dot and a sign in the exponent; people write 1e-3 and 1e6.
_NUMBER = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
for _yaml_class in (_Loader, _Dumper):
    _yaml_class.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in rules if tag != "tag:yaml.org,2002:float"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789."))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:  # before merging: what `<<: *base` brings may be replaced
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise ConfigError(f"key {key!r} stands twice (line {key_node.start_mark.line + 1})")
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _string(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # PyYAML folds these line breaks into spaces unless they stand between double quotes.
    style = '"' if set(value) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _string)
_Dumper.add_representer(
    tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", list(value))
)


def load_yaml(text: str, where: str) -> Any:
    """Parse ``text``; ``where`` names its source in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {detail}") from None


def load_yaml_file(path: Path) -> Any:
    """Parse a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return load_yaml(text, str(path))


def dump_yaml(value: Any) -> str:
    """Write ``value`` so that :func:`load_yaml` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
