"""The web server of ``rl-training watch``: reads, never writes, and answers GET alone."""

from __future__ import annotations

import http.server
import ipaddress
import json
import re
import socket
import socketserver
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rl_training.errors import UserError
from rl_training.terminal import one_line, say
from rl_training.tools.watch.runs import WatchedRuns
from rl_training.untrusted_files import open_regular

_HERE = Path(__file__).parent
_PAGES = {
    "/": (_HERE / "watch.html", "text/html"),
    "/watch.css": (_HERE / "watch.css", "text/css"),
    "/watch.js": (_HERE / "watch.js", "text/javascript"),
    "/chart.js": (_HERE / "chart.js", "text/javascript"),
    "/report.css": (_HERE.parent / "report" / "report.css", "text/css"),
    "/report.js": (_HERE.parent / "report" / "report.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; media-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_VIDEO_PATH = re.compile(r"/videos/([0-9a-f]{16})/([A-Za-z0-9._-]{1,200})")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_MAX_VIDEO_BYTES = 1 << 30
_MOST_CURVES = 50
"""Most metrics of one request."""
_PIECE = 1 << 18
_PORTS_TO_TRY = 50


class WatchServer(http.server.ThreadingHTTPServer):
    """Serves the page and what it shows of some runs.

    A request is refused unless its Host header is an address, ``localhost`` or the host that was
    given: a web page on another host could otherwise have its name resolved to this machine (DNS
    rebinding) and read the answers.
    """

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would share a port that is in use

    def __init__(self, host: str, port: int, runs: WatchedRuns) -> None:
        self.runs = runs
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of this machine, which may take long."""
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """The address of the page on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        name = urlsplit(f"//{header}").hostname or ""
        return name in ("localhost", self.host.lower()) or is_address(name)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Print the error of a request in a line; a browser that went away is none."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            say(f"warning: a request failed: {type(error).__name__}: {one_line(str(error))}")


def open_server(host: str, port: int | None, first: int, runs: WatchedRuns) -> WatchServer:
    """Return a server on ``port``; without one, on the first free port from ``first`` on."""
    ports = range(first, first + _PORTS_TO_TRY) if port is None else [port]
    problem: OSError | None = None
    for number in ports:
        try:
            return WatchServer(host, number, runs)
        except OSError as error:
            problem = error
            if isinstance(error, socket.gaierror) or error.errno is None:
                break
    advice = "" if port is None else "; without --port a free one is chosen"
    where = f"{host}:{port}" if port is not None else f"{host}, ports {ports[0]} to {ports[-1]}"
    reason = "" if problem is None else problem.strerror or str(problem)
    raise UserError(f"cannot serve on {where}: {reason}{advice}")


def is_address(name: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version = "rl-training"
    sys_version = ""
    timeout = 60  # seconds that a connection may be idle

    def parse_request(self) -> bool:
        """Read a request; refuse all but GET."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._refuse(405, "only GET is answered")
        return self.command == "GET"

    def do_GET(self) -> None:
        """Answer a request."""
        hosts = self.headers.get_all("Host") or []
        try:
            allowed = len(hosts) == 1 and self.server.allows_host(hosts[0])
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=_MOST_CURVES + 1, errors="strict")
        except ValueError:  # not a host, a path or a query
            self._refuse(400, "bad request")
            return
        if not allowed:
            self._refuse(403, f"unknown host: open {self.server.url}, or start with --host NAME")
        elif url.path in _PAGES:
            path, kind = _PAGES[url.path]
            self._send(200, f"{kind}; charset=utf-8", path.read_bytes())
        elif url.path == "/api/runs":
            self._send_json(self.server.runs.overview())
        elif url.path == "/api/curves":
            self._send_curves(query.get("run", []), query.get("metric", []))
        elif found := _VIDEO_PATH.fullmatch(url.path):
            self._send_video(*found.groups())
        elif url.path == "/favicon.ico":
            self._send(204, "image/x-icon", b"")
        else:
            self._refuse(404, "not found")

    def _send_curves(self, runs: Sequence[str], metrics: Sequence[str]) -> None:
        found = self.server.runs.curves(runs[0], metrics) if len(runs) == 1 else None
        if found is None:
            self._refuse(404, "no such run")
        else:
            self._send_json(found)

    def _send_json(self, value: Any) -> None:
        content = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        self._send(200, "application/json", content)

    def _send_video(self, run: str, name: str) -> None:
        """Send a video, or the part of it that the browser asks for."""
        path = self.server.runs.video(run, name)
        try:
            if path is None:
                raise FileNotFoundError
            file = open_regular(path, _MAX_VIDEO_BYTES)
        except OSError:
            self._refuse(404, "no such video")
            return
        with file:
            size = file.seek(0, 2)
            part = _part(self.headers.get("Range"), size)
            if part is None:
                self._begin(416, "video/mp4", 0, {"Content-Range": f"bytes */{size}"})
                return
            start, end = part
            headers = {"Accept-Ranges": "bytes"}
            if self.headers.get("Range"):
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self._begin(
                206 if self.headers.get("Range") else 200, "video/mp4", end - start, headers
            )
            file.seek(start)
            while start < end and (piece := file.read(min(_PIECE, end - start))):
                self.wfile.write(piece)
                start += len(piece)
            if start < end:  # it was cut meanwhile: the length that was announced cannot be kept
                self.close_connection = True

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self._begin(status, kind, len(content))
        self.wfile.write(content)

    def _begin(
        self, status: int, kind: str, length: int, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(length), **_HEADERS, **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer with an error; the rest of the connection is not read."""
        self.close_connection = True
        allow = {"Allow": "GET"} if status == 405 else {}
        content = f"{reason}\n".encode()
        self._begin(
            status, "text/plain; charset=utf-8", len(content), {"Connection": "close"} | allow
        )
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer a request that is not HTTP without repeating it."""
        self._refuse(code, self.responses.get(code, ("bad request", ""))[0])

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _part(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte of a Range header and the one after the last; None if there is none.

    Without a header, or with one that names several parts, it is the whole.
    """
    if header is None or "," in header:
        return 0, size
    found = _RANGE.fullmatch(header.strip())
    if found is None or not any(found.groups()):
        return 0, size
    first, last = found.groups()
    if not first:  # the last bytes
        return (max(0, size - int(last)), size) if int(last) and size else None
    end = min(int(last) + 1, size) if last else size
    return (int(first), end) if int(first) < end else None
