"""``rl-training watch``: a web page of runs, updated while they train."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import webbrowser
from pathlib import Path
from typing import Annotated

import tyro

from rl_training._internal.flag_help import HelpText
from rl_training._internal.flags import parse_flags
from rl_training.errors import UserError
from rl_training.terminal import one_line, say, show

FIRST_PORT = 6007


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchArgs:
    """Show runs on a web page that is updated while they train: curves, status, videos.

    The page is served to this machine alone, until Ctrl-C. Nothing is written, and nothing of the
    run folders is executed. New runs appear by themselves.
    """

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUNS...", help_behavior_hint=""),
    ]
    """Run folders, or folders that contain them at any depth."""
    port: int | None = None
    """Port of the page; 0: any free one; unset: 6007, or the next free one."""
    host: str = "127.0.0.1"
    """Address to serve on. With any other than the default, everybody who reaches it can see the
    runs: there is no password."""
    open: bool = False
    """Open the page in a browser."""
    json: bool = False
    """Print the address as one JSON object, as soon as the page is served."""


def main(args: list[str]) -> int:
    """The command."""
    text = HelpText(
        "RUNS... [flags]",
        examples=(
            "rl-training watch runs",
            "rl-training watch runs --open",
            "ssh -L 6007:localhost:6007 HOST  # then, on HOST, rl-training watch runs",
        ),
    )
    options: WatchArgs = parse_flags(WatchArgs, args, "rl-training watch", text)
    _check(options)
    from rl_training.tools.watch.runs import WatchedRuns
    from rl_training.tools.watch.server import open_server

    runs = WatchedRuns(options.runs)
    with open_server(options.host, options.port, FIRST_PORT, runs) as server:
        if not _is_loopback(options.host):
            say(
                f"warning: everybody who reaches {one_line(options.host)} can see these runs:"
                " there is no password, and no encryption"
            )
        named = ", ".join(one_line(str(path)) for path in options.runs)
        show(f"{named}: {server.url} (Ctrl-C to stop)\n")
        if options.json:
            show(json.dumps({"url": server.url}) + "\n")
        if options.open and not webbrowser.open(server.url):
            say("warning: no browser was found: open the address above")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _check(options: WatchArgs) -> None:
    if not options.runs:
        raise UserError("name at least one run folder, or a folder that contains some: runs/")
    for path in options.runs:
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if not path.is_dir():
            raise UserError(f"{path} is not a folder: give a run folder, or one that contains some")
    if options.port is not None and not 0 <= options.port <= 65_535:
        raise UserError(f"--port must be 0 to 65535; got {options.port}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
