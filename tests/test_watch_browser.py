"""The page of ``rl-training watch`` in a real browser, while runs write."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_training.tools.watch.server import WatchServer
from test_report import HOSTILE, write_run
from test_report_browser import CHROMIUM, CONTRASTS, Browser
from test_watch import serve, start

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


CONNECTION = "document.querySelector('#connection').textContent"
CHART = (
    "Array.from(document.querySelectorAll('#charts h3'))"
    ".find(h => h.textContent === 'CartPole-v1').nextElementSibling.querySelector('.chart')"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all kinds: several environments, hostile names, long names, damage."""
    folder = tmp_path_factory.mktemp("watched")
    for seed in (1, 2, 3):
        write_run(
            folder,
            seed,
            evals=[(500, 20.0 * seed), (1000, 90.0)],
            returns=[(s, float(s)) for s in range(100, 1001, 100)],
            algo_kwargs={"learning_rate": 1e-3 * seed},
        )
    write_run(folder, 4, evals=[(500, 7.0)], status="interrupted")
    write_run(folder, 5, evals=[(500, 7.0)], status=None)
    hostile = write_run(folder / ("long-name-" * 12), 6, evals=[(9, 1.0)], env_id=HOSTILE * 4)
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, HOSTILE: 1.0}) + "\n")
    (hostile / "videos").mkdir()
    (hostile / "videos" / "step_000000000009.mp4").write_bytes(b"no video")
    (write_run(folder, 7) / "metrics.jsonl").write_text("nothing\n")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WatchServer]:
    yield from serve(folder)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def open_page(browser: Browser, url: str, width: int = 1280, scheme: str = "light") -> None:
    browser.send("Page.navigate", url="about:blank")  # another fragment alone loads nothing
    browser.open(url, width, 900, scheme)
    wait_until(lambda: browser.evaluate("document.querySelectorAll('.chart path').length > 4"))


def names_shown(browser: Browser) -> list[str]:
    names = "Array.from(document.querySelectorAll('#table tbody th code'), c => c.textContent)"
    found: list[str] = browser.evaluate(names)
    return found


def test_it_runs_no_text_of_the_runs_and_loads_nothing_else(
    browser: Browser, server: WatchServer
) -> None:
    open_page(browser, server.url)
    bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening")
    assert not [event for event in browser.events if event["method"] in bad]
    refused = [e["params"] for e in browser.events if e["method"] == "Log.entryAdded"]
    assert not refused
    for event in browser.events:
        if event["method"] == "Network.requestWillBeSent":
            # The browser's own buttons of a video are pictures in data: addresses.
            assert event["params"]["request"]["url"].startswith((server.url, "about:", "data:"))
    assert browser.evaluate("document.scripts.length") == 2
    assert HOSTILE * 4 in browser.evaluate("document.querySelector('#charts').textContent")
    assert "6 runs" in browser.evaluate("document.body.textContent")
    assert "is not a row" in browser.evaluate(
        "document.querySelector('#damaged').parentElement.textContent"
    )


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(
    browser: Browser, server: WatchServer, width: int
) -> None:
    open_page(browser, server.url, width)
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("innerWidth") == width
    sizes = browser.evaluate(
        "Array.from(document.querySelectorAll('.chart svg'),"
        " s => [s.getBoundingClientRect().width, s.getBoundingClientRect().height])"
    )
    assert all(w > 250 and h > 150 for w, h in sizes)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_themes(
    browser: Browser, server: WatchServer, scheme: str
) -> None:
    open_page(browser, server.url, scheme=scheme)
    ratios: dict[str, float] = browser.evaluate(CONTRASTS)
    assert "figure text" in ratios
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_runs_are_filtered_and_hidden(browser: Browser, server: WatchServer) -> None:
    open_page(browser, server.url)
    assert len(names_shown(browser)) == 6
    type_in = (
        "(value => {{ const f = document.querySelector('#controls'); f.{0}.value = value;"
        " f.{0}.dispatchEvent(new Event('input', {{bubbles: true}})); }})('{1}')"
    )
    browser.evaluate(type_in.format("filter", "learning_rate=0.002"))
    wait_until(lambda: len(names_shown(browser)) == 1)
    browser.evaluate(type_in.format("filter", ""))
    browser.evaluate(type_in.format("status", "finished"))
    wait_until(lambda: len(names_shown(browser)) == 3)
    lines = f"{CHART}.querySelectorAll('path').length"
    before = browser.evaluate(lines)
    browser.evaluate("document.querySelector('#table [type=checkbox]').click()")
    browser.evaluate("document.querySelectorAll('#table [type=checkbox]')[1].click()")
    wait_until(lambda: browser.evaluate(lines) < before)
    assert "status=finished" in browser.evaluate("location.hash")


@pytest.mark.full
def test_rows_that_a_run_writes_appear_and_a_lost_server_is_reported(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path, 1, evals=[(100, 1.0), (200, 2.0)], status=None)
    label = "document.querySelector('.chart svg')?.getAttribute('aria-label') ?? ''"
    watch = start("watch", str(tmp_path), "--port", "0", cwd=tmp_path)
    try:
        assert watch.stdout is not None
        url = watch.stdout.readline().split()[1]
        browser.send("Page.navigate", url="about:blank")
        browser.open(url, 1280, 900)
        wait_until(lambda: "is at 2.00" in browser.evaluate(label))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 300, "eval/return_mean": 33.5}\n')
        wait_until(lambda: "is at 33.50" in browser.evaluate(label))
        assert "1 running" in browser.evaluate("document.title")
        watch.send_signal(signal.SIGINT)
        wait_until(lambda: "No answer" in browser.evaluate(CONNECTION))
    finally:
        watch.kill()
        watch.communicate()


def test_the_values_under_the_pointer_are_shown(browser: Browser, server: WatchServer) -> None:
    open_page(browser, server.url)
    browser.evaluate(f"{CHART}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = browser.evaluate(
        f"(b => [b.left, b.top, b.width, b.height])({CHART}.getBoundingClientRect())"
    )
    x, y = box[0] + box[2] - 20, box[1] + box[3] / 2
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = f"{CHART}.querySelector('.tip:not([hidden])')?.textContent ?? ''"
    wait_until(lambda: "90.00" in browser.evaluate(tip))
