"""A small stand-in for Hugging Face: one repository, downloads and uploads of whole files."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Serves ``files`` as the repository user/policy; uploads replace them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        """Sizes that are claimed in place of the true ones."""
        self.requests: list[str] = []
        self.tokens: set[str] = set()

    @property
    def address(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._note()
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/user/policy"):
            siblings = [
                {"rfilename": name, "size": self.server.sizes.get(name, len(content))}
                for name, content in self.server.files.items()
            ]
            return self._json({"id": "user/policy", "sha": COMMIT, "siblings": siblings})
        return self._file(path, body=True)

    def do_HEAD(self) -> None:
        self._note()
        self._file(self.path.partition("?")[0], body=False)

    def do_POST(self) -> None:
        self._note()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            return self._json({"url": f"{self.server.address}/user/policy", "name": "user/policy"})
        if path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return self._json({"files": files})
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                value = json.loads(line)
                if value["key"] == "file":
                    content = base64.b64decode(value["value"]["content"])
                    self.server.files[value["value"]["path"]] = content
            url = f"{self.server.address}/user/policy/commit/{COMMIT}"
            return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self._json({})

    def _note(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.tokens.add(self.headers.get("Authorization", ""))

    def _file(self, path: str, *, body: bool) -> None:
        prefix = f"/user/policy/resolve/{COMMIT}/"
        content = self.server.files.get(path.removeprefix(prefix))
        if content is None or not path.startswith(prefix):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.send_header("X-Error-Code", "RepoNotFound")
            return self.end_headers()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)
        return None

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve in a thread while the block runs."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
