"""What `check_env` found: the findings of one environment, as values, text and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check."""

    severity: Severity
    """An error makes training impossible, a warning makes it worse; a note is information."""
    check: str
    """What was checked, in one or two words."""
    expected: str
    """What was expected; the whole message if `found` is empty."""
    found: str = ""
    """What came instead."""
    advice: str = ""
    """What to do."""

    @property
    def message(self) -> str:
        """What was expected and what came."""
        if not self.found:
            return f"{self.check}: {self.expected}"
        return f"{self.check}: expected {self.expected}; got {self.found}"

    def __str__(self) -> str:
        """Return the finding in one line."""
        return f"{self.severity}: {self.message}. {self.advice}".rstrip()


@dataclasses.dataclass(frozen=True)
class Played:
    """Episodes with random actions."""

    steps: int = 0
    lengths: tuple[int, ...] = ()
    """Lengths of the episodes that ended."""
    returns: tuple[float, ...] = ()
    steps_per_second: float = 0.0
    """Of one environment, resets included."""


@dataclasses.dataclass(frozen=True, repr=False)
class EnvReport:
    """The result of `check_env`; ``print(report)`` shows it."""

    name: str
    """Id or class of the environment."""
    observation_space: str
    action_space: str
    findings: tuple[Finding, ...]
    """Errors first, notes last."""
    algorithms: tuple[str, ...]
    """Names of the algorithms that can be trained on it."""
    refused: Mapping[str, str]
    """Why the others cannot, by name."""
    played: Played

    @property
    def ok(self) -> bool:
        """Whether the environment can be trained on: no errors."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make training impossible."""
        return tuple(one for one in self.findings if one.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make training worse."""
        return tuple(one for one in self.findings if one.severity == "warning")

    @property
    def verdict(self) -> str:
        """The result in one line."""
        counts = [
            f"{len(some)} {word}{'' if len(some) == 1 else 's'}"
            for some, word in ((self.errors, "error"), (self.warnings, "warning"))
            if some
        ]
        counted = f" ({', '.join(counts)})" if counts else ""
        if self.ok:
            return f"{self.name} can be trained on{counted}: {', '.join(self.algorithms)}"
        return f"{self.name} cannot be trained on{counted}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as ``rl-training check-env --json`` prints them."""
        plain = dataclasses.asdict(self)
        return {**plain, "refused": dict(self.refused), "ok": self.ok, "verdict": self.verdict}

    def __repr__(self) -> str:
        """Return the report as text."""
        return str(self)

    def __str__(self) -> str:
        """Return the report as text: facts, findings, and the verdict on the last line."""
        facts = {
            "observations": self.observation_space,
            "actions": self.action_space,
            "episodes": self._episodes(),
            "speed": self._speed(),
            **self._refusals(),
        }
        lines = [self.name, *(_row(f"  {name}", text, 16) for name, text in facts.items() if text)]
        for finding in self.findings:
            lines += ["", _row(finding.severity, finding.message, 9)]
            if finding.advice:
                lines.append(_row("", finding.advice, 9))
        return "\n".join([*lines, "", self.verdict])

    def _episodes(self) -> str:
        lengths, returns = self.played.lengths, self.played.returns
        if not self.played.steps:
            return ""
        if not lengths:
            return f"none ended within {self.played.steps:,} steps"
        return (
            f"{len(lengths)} in {self.played.steps:,} random steps; length {min(lengths):,} to"
            f" {max(lengths):,}, return {min(returns):.6g} to {max(returns):.6g}"
        )

    def _speed(self) -> str:
        speed = self.played.steps_per_second
        return f"{speed:,.0f} steps/s of one environment" if speed else ""

    def _refusals(self) -> dict[str, str]:
        """The algorithms that cannot be trained, with those of one reason together."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason.replace(name, "", 1).strip(), []).append(name)
        parts = [
            f"{', '.join(names)} ({reason if len(names) == 1 else _in_plural(reason)})"
            for reason, names in by_reason.items()
        ]
        return {"not for": "; ".join(parts)} if parts else {}


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings, the worst first."""
    return tuple(sorted(findings, key=lambda one: _ORDER.index(one.severity)))


def _in_plural(reason: str) -> str:
    """A reason that begins with a verb, for several algorithms."""
    verb, _, rest = reason.partition(" ")
    return f"{ {'takes': 'take', 'does': 'do'}.get(verb, verb) } {rest}"


def _row(label: str, text: str, indent: int) -> str:
    filled = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=label.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled or label
