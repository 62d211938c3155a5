"""``rl-training watch``: real runs through HTTP while they train, and what it refuses."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote, urlsplit

import pytest

from rl_training import cli
from rl_training.errors import UserError
from rl_training.logging import JsonlSink
from rl_training.runs import read_json, write_json
from rl_training.tools.report.data import RunInfo, read_info
from rl_training.tools.report.limits import DamagedError
from rl_training.tools.watch import follower
from rl_training.tools.watch import runs as watched
from rl_training.tools.watch.follower import MAX_POINTS, LiveCurve, LogFollower
from rl_training.tools.watch.runs import RECENT_SECONDS, WatchedRuns
from rl_training.tools.watch.server import WatchServer, open_server
from rl_training.untrusted_files import open_regular
from test_report import HOSTILE, write_run

LATER = 1e12
SRC = Path(__file__).resolve().parents[1] / "src"


def serve(*roots: Path) -> Iterator[WatchServer]:
    """A server of some folders in a thread of this process."""
    with open_server("127.0.0.1", 0, 0, WatchedRuns(roots)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def request(
    url: str, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """One request on a connection of its own; the path is sent as it is."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def get(url: str, path: str) -> Any:
    status, _, content = request(url, path)
    assert status == 200, content
    return json.loads(content)


def wait_for(wanted: Callable[[], Any], seconds: float = 40.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


# -- real processes --------------------------------------------------------------------------------


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training.cli", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


TRAIN = (
    *("train", "--env-id", "CartPole-v1", "--total-timesteps", "50_000_000", "--no-progress"),
    *("--no-tensorboard", "--eval-episodes", "1", "--eval-interval", "1024"),
)


def test_a_run_is_watched_from_its_start_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    watch = start("watch", "runs", "--port", "0", cwd=tmp_path)
    train = start(*TRAIN, cwd=tmp_path)
    try:
        assert watch.stdout is not None
        url = watch.stdout.readline().split()[1]
        assert url.startswith("http://127.0.0.1:")

        def evaluated() -> dict[str, Any] | None:
            runs: list[dict[str, Any]] = get(url, "/api/runs")["runs"]
            return runs[0] if runs and runs[0]["evaluation"] else None

        first = wait_for(evaluated)
        assert first["status"] == "running"
        assert first["speed"] > 0
        assert first["total"] == 50_000_000
        path = f"/api/curves?run={first['id']}&metric=" + quote("eval/return_mean", safe="")
        before = len(get(url, path)["curves"]["eval/return_mean"][0])

        def grown() -> bool:
            assert get(url, "/api/runs")["runs"][0]["step"] >= first["step"]
            return len(get(url, path)["curves"]["eval/return_mean"][0]) > before

        wait_for(grown)
        train.kill()
        train.wait(timeout=30)
        (ended,) = get(url, "/api/runs")["runs"]
        assert ended["status"] == "no end recorded"
        assert "killed" in ended["reason"]
        watch.send_signal(signal.SIGINT)
        output, errors = watch.communicate(timeout=20)
        assert (watch.returncode, output, errors) == (0, "", "")
    finally:
        for process in (watch, train):
            process.kill()
            process.communicate()


# -- reading while a run writes --------------------------------------------------------------------


def test_every_byte_of_a_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = open_regular

    class Counting:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def read(self, size: int) -> bytes:
            nonlocal count
            found = self._file.read(size)
            count += len(found)
            return found

    monkeypatch.setattr(follower, "open_regular", lambda *args: Counting(real(*args)))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    log = LogFollower(tmp_path / "metrics.jsonl")
    for step in range(2000):
        sink.write(step, {"rollout/return_mean": float(step), "losses/loss": 0.5})
    assert log.read_more(LATER)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert count == size
    for step in range(2000, 2010):
        sink.write(step, {"rollout/return_mean": float(step)})
        revision = log.revision
        assert log.read_more(LATER)
        assert log.revision > revision
        assert log.last_step == step
    assert count < size + 10 * 500  # each new row, and the end of what was read before
    before, revision = count, log.revision
    assert log.read_more(LATER)
    assert (count, log.revision) == (before, revision)


def write_rows(path: Path, first: int, last: int, value: float) -> None:
    rows = [json.dumps({"step": s, "a": value}) for s in range(first, last)]
    path.write_text("\n".join(['{"format": 1}', *rows]) + "\n")


@pytest.mark.parametrize("how", ["resume", "same length", "shorter"])
def test_a_log_that_was_cut_back_or_replaced_is_read_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, 0, 100, 1.0)
    log = LogFollower(path)
    assert log.read_more(LATER)
    if how == "resume":
        lines = path.read_bytes().splitlines(keepends=True)
        sink = JsonlSink(path, resume_at=sum(map(len, lines[:51])))
        for step in range(50, 120):
            sink.write(step, {"a": 2.0})
        sink.close()
        expected = [1.0] * 50 + [2.0] * 70
    else:  # in place: the file is the same
        last = 100 if how == "same length" else 40
        write_rows(path, 0, last, 3.0)
        os.utime(path, ns=(0, 0))
        expected = [3.0] * last
    assert log.read_more(LATER)
    assert log.curves["a"].points()[2] == expected


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = LogFollower(path)
    with pytest.raises(DamagedError, match="missing"):
        log.read_more(LATER)
    with path.open("w") as file:
        for part in ('{"format": 1}\n{"step": 1, "a": 1', '.5}\n\n{"step": 2, "a": NaN}\n{"st'):
            file.write(part)
            file.flush()
            assert log.read_more(LATER)
        assert log.curves["a"].points() == ([1.0], [0.0], [1.5])
        assert log.last_step == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"format": 9}\n', "format 9"),
        (b"nothing\n", "line 1"),
        (b'{"step": 2, "a": 1}\n{"step": 1, "a": 1}\n', "smaller than before"),
        (b'{"step": 1, "a": "x"}\n', "line 1"),
        (b"\xff\n", "line 1"),
        (b"1" * (1 << 21), "bytes"),
    ],
)
def test_a_damaged_log_stays_damaged_until_it_is_replaced(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    log = LogFollower(path)
    with pytest.raises(DamagedError, match=reason):
        log.read_more(LATER)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "a": 1}\n')
    with pytest.raises(DamagedError, match=reason):
        log.read_more(LATER)
    path.unlink()
    write_rows(path, 0, 3, 1.0)
    assert log.read_more(LATER)
    assert log.last_step == 2


def test_reading_ends_at_the_deadline_and_continues_there(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", 0, 60_000, 1.0)
    log, calls = LogFollower(tmp_path / "metrics.jsonl"), 1
    while not log.read_more(0.0):
        calls += 1
    assert calls > 3
    assert log.last_step == 59_999


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, MAX_POINTS + 2, 12_345])
def test_long_curves_are_thinned_evenly_and_keep_the_newest_value(count: int) -> None:
    curve = LiveCurve()
    for i in range(count):
        curve.add(i, i / 2, -i)
        if i in (0, 700, 5000):
            assert curve.points()[0][-1] == i
    steps, seconds, values = curve.points()
    assert seconds == [step / 2 for step in steps]
    assert values == [-step for step in steps]
    assert (steps[0], steps[-1]) == (0, count - 1)
    assert len(steps) <= MAX_POINTS + 1
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1
    assert len(steps) >= min(count, MAX_POINTS // 2)


# -- what is shown ---------------------------------------------------------------------------------


def test_statuses_settings_and_damage(tmp_path: Path) -> None:
    old = time.time() - RECENT_SECONDS - 600
    evals = [(500, 20.0), (1000, 90.0)]
    write_run(tmp_path, 1, evals=evals)
    write_run(tmp_path, 2, evals=evals, status="failed", algo_kwargs={"learning_rate": 0.5})
    write_run(tmp_path, 3, evals=evals, status=None)
    silent = write_run(tmp_path, 4, evals=evals, status=None)
    os.utime(silent / "metrics.jsonl", (old, old))
    resumed = write_run(tmp_path, 5, evals=evals, status="interrupted")
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1500, "eval/return_mean": 7.0}\n')
    metadata = read_json(resumed / "metadata.json")
    resumes = [{"total_timesteps": 3000}, {"step": 1000}, "x", {"total_timesteps": True}]
    write_json(resumed / "metadata.json", {**metadata, "resumes": resumes})
    broken = write_run(tmp_path, 6, evals=evals)
    (broken / "config.yaml").write_text("algo: [")
    found = WatchedRuns([tmp_path]).overview()
    runs = {run["seed"]: run for run in found["runs"]}
    assert [runs[seed]["status"] for seed in "12345"] == [
        *("finished", "failed", "running", "no end recorded", "running")
    ]
    assert "12 minutes" in runs["4"]["reason"]
    assert (runs["5"]["step"], runs["5"]["evaluation"]) == (1500, (7.0, 1500))
    assert [runs[seed]["total"] for seed in "135"] == [1000, 100_000, 3000]
    assert runs["2"]["settings"] == {"algo_kwargs.learning_rate": "0.5"}
    assert [run["name"] for run in found["damaged"]] == [broken.name]
    assert "config.yaml" in found["damaged"][0]["reason"]


def test_a_damaged_config_is_read_again_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, 1, evals=[(1, 1.0)])
    good = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("algo: [")
    calls = []

    def counted(folder: Path) -> RunInfo:
        calls.append(folder)
        return read_info(folder)

    monkeypatch.setattr(watched, "read_info", counted)
    runs = WatchedRuns([tmp_path])
    for _ in range(3):
        assert len(runs.overview()["damaged"]) == 1
    assert len(calls) == 1
    (run / "config.yaml").write_text(good)
    found = runs.overview()
    assert (len(found["runs"]), found["damaged"]) == (1, [])


def test_new_and_removed_runs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.tools.watch.runs._SECONDS_BETWEEN_SEARCHES", 0.0)
    runs = WatchedRuns([tmp_path])
    assert runs.overview()["runs"] == []
    added = write_run(tmp_path, 1, evals=[(1, 1.0)])
    (one,) = runs.overview()["runs"]
    for path in added.iterdir():
        path.unlink()
    assert runs.overview()["runs"] == []
    assert runs.curves(one["id"], ["eval/return_mean"]) is None


def test_text_of_run_folders_is_data_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", ""), 1, evals=[(1, 1.0)], env_id=HOSTILE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, HOSTILE: 1.0, "\ud800\x1b[31m": 2.0}) + "\n")
    for server in serve(tmp_path):
        found = get(server.url, "/api/runs")
        assert found["runs"][0]["env"] == HOSTILE
        assert r"\ud800\x1b[31m" in found["metrics"]  # escaped: it can be asked for by this name
        for path in ("/", "/api/runs"):
            _, headers, content = request(server.url, path)
            assert b"alert" not in content or headers["Content-Type"] == "application/json"
            assert headers["X-Content-Type-Options"] == "nosniff"
        path = f"/api/curves?run={found['runs'][0]['id']}&metric={quote(HOSTILE, safe='')}"
        assert get(server.url, path)["curves"] == {HOSTILE: [[2.0], [0.0], [1.0]]}


# -- what is answered, and to whom -----------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    folder = tmp_path_factory.mktemp("watched")
    run = write_run(folder / "runs", 1, evals=[(1, 1.0)])
    videos = run / "videos"
    videos.mkdir()
    (folder / "secret.mp4").write_bytes(b"secret")
    (videos / "step_000000000001.mp4").write_bytes(bytes(range(200)))
    (videos / "link.mp4").symlink_to(folder / "secret.mp4")
    (videos / "notes.txt").write_text("secret")
    (videos / "pipe.mp4").mkdir()
    yield from serve(folder / "runs")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),  # forwarded by ssh
        ("127.0.0.1", 200),
        ("[::1]:6007", 200),
        ("evil.example", 403),
        ("evil.example:6007", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.example@127.0.0.1x", 403),
        ("", 403),
        ("[", 400),
    ],
)
def test_other_hosts_are_refused(server: WatchServer, host: str, status: int) -> None:
    for path in ("/", "/api/runs"):
        assert request(server.url, path, Host=host)[0] == status


def test_a_request_needs_one_host(server: WatchServer) -> None:
    for head in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
            assert b" 403 " in connection.recv(100)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X"])
def test_only_get_is_answered(server: WatchServer, method: str) -> None:
    status, headers, content = request(server.url, "/", method)
    assert status == 405
    assert headers["Allow"] == "GET"
    assert b"html" not in content


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/secret.mp4",
        "/config.yaml",
        "/videos/",
        "/videos/RUN/",
        "/videos/RUN/notes.txt",
        "/videos/RUN/link.mp4",
        "/videos/RUN/pipe.mp4",
        "/videos/RUN/../config.yaml",
        "/videos/RUN/..%2fconfig.yaml",
        "/videos/0000000000000000/step_000000000001.mp4",
        "/api/curves",
        "/api/curves?run=x&metric=a",
        "/api/curves?run=RUN&run=RUN",
        "//evil.example/",
    ],
)
def test_nothing_else_is_served(server: WatchServer, path: str) -> None:
    run = get(server.url, "/api/runs")["runs"][0]
    status, _, content = request(server.url, path.replace("RUN", run["id"]))
    assert status in (404, 200 if path == "//evil.example/" else 404)
    assert b"secret" not in content
    assert run["videos"] == ["step_000000000001.mp4"]


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        (None, 200, 0, 200),
        ("bytes=0-", 206, 0, 200),
        ("bytes=10-19", 206, 10, 20),
        ("bytes=150-999", 206, 150, 200),
        ("bytes=-5", 206, 195, 200),
        ("bytes=200-", 416, 0, 0),
        ("bytes=9-3", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
def test_videos_are_sent_in_the_parts_that_browsers_ask_for(
    server: WatchServer, asked: str | None, status: int, start: int, end: int
) -> None:
    run = get(server.url, "/api/runs")["runs"][0]
    headers = {} if asked is None else {"Range": asked}
    path = f"/videos/{run['id']}/{run['videos'][0]}"
    answer = request(server.url, path, **headers)
    assert (answer[0], answer[2]) == (status, bytes(range(200))[start:end])
    if status == 206:
        assert answer[1]["Content-Range"] == f"bytes {start}-{end - 1}/200"


def test_pages_allow_scripts_of_their_own_alone(server: WatchServer) -> None:
    for path in ("/", "/watch.js", "/chart.js", "/watch.css", "/report.css", "/report.js"):
        status, headers, _ = request(server.url, path)
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in headers


def test_nonsense_is_refused_without_an_echo(server: WatchServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
        connection.sendall(b"<script> nonsense of four words\r\n\r\n")
        answer = connection.recv(4000)
    assert b"script>" not in answer
    assert b"Bad Request" in answer


def test_a_taken_port_is_named_or_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"{port}: Address already in use"):
            open_server("127.0.0.1", port, 0, WatchedRuns([]))
        with open_server("127.0.0.1", None, port, WatchedRuns([])) as server:
            assert port < server.server_address[1] < port + 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least one run folder"),
        (["missing"], "missing does not exist"),
        (["file"], "file is not a folder"),
        ([".", "--port", "70000"], "--port must be 0 to 65535"),
        ([".", "--host", "no.such.host.invalid"], "cannot serve on no.such.host.invalid"),
    ],
)
def test_mistakes_are_explained_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["watch", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
