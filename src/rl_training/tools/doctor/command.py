"""``rl-training doctor``: installed versions, and the time of the parts of a training step."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, Any

from rl_training.errors import ConfigError
from rl_training.terminal import say, show_result

if TYPE_CHECKING:
    from rl_training.tools.doctor.advice import Advice, Result

_LEAST_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Show what is installed; with --config, measure a training step and try faster settings.

    It makes short training runs in a temporary folder, which is removed afterwards.
    """

    config: str | None = None
    """Preset or YAML file to measure; unset: measure nothing."""
    seconds: float = 60.0
    """Approximate total time for measurements, in seconds."""
    json: bool = False
    """Print the result as one JSON object on the last line."""


def main(args: list[str]) -> int:
    """Entry point."""
    from rl_training._internal.flag_help import HelpText
    from rl_training._internal.flags import parse_flags

    text = HelpText(examples=("rl-training doctor", "rl-training doctor --config ppo/cartpole"))
    options: DoctorArgs = parse_flags(DoctorArgs, args, "rl-training doctor", text)
    if options.seconds < _LEAST_SECONDS:
        raise ConfigError(f"--seconds must be at least {_LEAST_SECONDS:g}; got {options.seconds:g}")
    config: Any = None
    if options.config is not None:
        from rl_training.config import config_from_file

        config = config_from_file(options.config)
    from rl_training.tools.doctor import system as machine

    system = machine.examine()
    show_result(machine.as_text(system))
    found: dict[str, Any] = dataclasses.asdict(system)
    if config is not None:
        from rl_training.tools.doctor.advice import advise

        say(f"measuring {options.config} for about {options.seconds:g} s")
        advice = advise(config, system, options.seconds, lambda line: say(f"  {line}"))
        show_result(_as_text(advice, str(options.config), config.checkpoint_interval))
        found["measured"] = _as_plain(advice)
    if options.json:
        show_result(json.dumps(found) + "\n")
    return 0


def _as_text(advice: Advice, name: str, checkpoint_interval: int) -> str:
    base = advice.base
    if not advice.shares:
        return (
            f"\n{name} on {_place(advice)}: roughly {base.rate:,.0f} {advice.unit}/s, from its"
            " first iterations alone.\nThe time limit was reached before the parts of a step were"
            " measured: raise --seconds.\n"
        )
    lines = [
        "",
        f"{name} on {_place(advice)}: {base.rate:,.0f} {advice.unit}/s (+/- {base.spread:.0%})",
        "",
        "share of the time",
        *(f"  {part:12s} {share:6.1%}" for part, share in _parts(advice).items()),
        f"  copies to and from the device, included above: {advice.transfer:.1%}",
        "  not included: evaluation, checkpoints" + _checkpoint_share(advice, checkpoint_interval),
        "",
        "alternatives",
        *(f"  {_row(advice, result)}" for result in advice.tried),
        "",
        *_recommendation(advice, name),
    ]
    return "\n".join(lines) + "\n"


def _place(advice: Advice) -> str:
    """Return the device, and the acceleration where there is one."""
    mode = advice.acceleration
    return advice.device if mode == "eager" else f"{advice.device} (acceleration: {mode})"


def _parts(advice: Advice) -> dict[str, float]:
    rest = max(0.0, 1.0 - sum(advice.shares.values()))
    return {**advice.shares, "rest": rest}


def _checkpoint_share(advice: Advice, interval: int) -> str:
    each = f" ({advice.checkpoint_seconds:.2f} s each"
    if not interval:
        return f"{each})"
    between = interval / advice.base.rate
    share = advice.checkpoint_seconds / (between + advice.checkpoint_seconds)
    return f"{each}: {share:.1%} at one every {interval:,} {advice.unit})"


def _row(advice: Advice, result: Result) -> str:
    if not result.rates:
        return f"{result.trial.name:40s} {result.reason}"
    noise = advice.noise(result)
    verdict = "faster" if advice.is_faster(result) else "no clear gain"
    if advice.is_slower(result):
        verdict = "slower"
    figures = f"{result.rate:9,.0f} {advice.unit}/s  {advice.ratio(result):5.2f}x"
    return f"{result.trial.name:40s} {figures}  {verdict} (noise {noise:.0%})"


def _recommendation(advice: Advice, name: str) -> list[str]:
    faster = sorted(filter(advice.is_faster, advice.tried), key=advice.ratio, reverse=True)
    same = [result for result in faster if not result.trial.changes]
    other = [result for result in faster if result.trial.changes]
    lines = []
    for results, problem in (
        (same, "without a change to learning"),
        (other, "but learning CHANGES"),
    ):
        if results:
            best = results[0]
            why = f" ({best.trial.changes})" if best.trial.changes else ""
            lines += [
                f"faster, {advice.ratio(best):.2f}x, {problem}{why}:",
                f"  rl-training train {shlex.quote(name)} {best.trial.flags}",
            ]
    if not any(result.rates for result in advice.tried):
        return ["no alternative was measured" + (": raise --seconds" if advice.tried else "")]
    return lines or ["none of these is clearly faster: keep the config"]


def _as_plain(advice: Advice) -> dict[str, Any]:
    return {
        "device": advice.device,
        "acceleration": advice.acceleration,
        "steps_per_second": advice.base.rate,
        "noise": advice.base.spread,
        "shares": _parts(advice),
        "transfer": advice.transfer,
        "checkpoint_seconds": advice.checkpoint_seconds,
        "alternatives": [
            {
                "settings": result.trial.overrides,
                "flags": result.trial.flags,
                "rates": list(result.rates),
                "ratio": advice.ratio(result) if result.rates else None,
                "faster": advice.is_faster(result),
                "changes_learning": result.trial.changes or None,
                "reason": result.reason or None,
            }
            for result in advice.tried
        ],
    }
