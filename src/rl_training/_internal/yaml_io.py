"""YAML as users mean it: ``1e-3`` is a number, duplicate keys are refused, nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rl_training.errors import ConfigError
from rl_training.untrusted_files import read_regular

MAX_BYTES = 1 << 20
"""Largest text that is parsed; configs and manifests have a few thousand bytes."""
_MAX_VALUES = 20_000
"""Most values of a document, each alias counted with all that it repeats."""
_MAX_DEPTH = 100
_MAX_DIGITS = 100
"""Most characters of a number."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Size(NamedTuple):
    """Values in a node with aliases expanded, and how deeply they are nested."""

    values: int
    depth: int


class _Loader(yaml.SafeLoader):
    """Refuses documents that are small as text and huge as values, before values are built."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[int, _Size] = {}
        """Of the nodes that are complete, by their ids."""
        self._started = 0
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count what it holds."""
        is_alias = self.check_event(yaml.AliasEvent)
        self._started += 1
        self._level += 1
        if self._level > _MAX_DEPTH:
            raise yaml.YAMLError(f"values are nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is None:
            return None
        line = node.start_mark.line + 1
        if not is_alias:
            self._sizes[id(node)] = self._size(node)
        elif id(node) not in self._sizes:
            raise ConfigError(f"the value in line {line} contains itself")
        size = self._sizes[id(node)]
        if max(size.values, self._started) > _MAX_VALUES:
            raise ConfigError(f"it has more than {_MAX_VALUES:,} values (line {line})")
        if self._level + size.depth > _MAX_DEPTH:
            raise yaml.YAMLError(
                f"values are nested more than {_MAX_DEPTH} levels deep (line {line})"
            )
        return node

    def _size(self, node: yaml.Node) -> _Size:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
                line = node.start_mark.line + 1
                raise ConfigError(f"a number is longer than {_MAX_DIGITS} digits (line {line})")
            return _Size(1, 1)
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        sizes = [self._sizes[id(part)] for part in parts]
        values = 1 + sum(size.values for size in sizes)
        return _Size(values, 1 + max((size.depth for size in sizes), default=0))


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
            raise ConfigError(f"duplicate key {key!r} (line {key_node.start_mark.line + 1})")
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
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (LookupError, AttributeError, ArithmeticError):  # PyYAML's own, for '!!int ""'
        raise ConfigError(f"{where} is not valid YAML: a value does not fit its tag") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        detail = " ".join(_reason(error).split())
        raise ConfigError(f"{where} is not valid YAML: {detail}") from None


def _reason(error: Exception) -> str:
    """Return what is wrong, with line and column where PyYAML gives them."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None or not error.problem:
        return str(error)
    return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"


def load_yaml_file(path: Path) -> Any:
    """Parse a file."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
    return load_yaml(text, str(path))


def dump_yaml(value: Any) -> str:
    """Write ``value`` so that :func:`load_yaml` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
