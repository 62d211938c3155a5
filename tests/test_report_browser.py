"""The report in a real browser: nothing fetched, nothing wider than a phone, both themes, keys."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_training.tools.report import write_report
from test_report import HOSTILE, write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# DevTools reads descriptor 3 and writes 4.
LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


class Browser:
    """A headless browser, driven over the pipe that DevTools offers."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        their_input, self._output = os.pipe()
        self._input, their_output = os.pipe()
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}"]
        words += ["--disable-background-networking", "--remote-debugging-pipe"]
        launch = [sys.executable, "-I", "-c", LAUNCHER, str(their_input), str(their_output)]
        self._process = subprocess.Popen(
            [*launch, *words],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._number, self._rest = 0, b""
        self._session: str | None = None  # none yet: the browser's own
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of DevTools, keeping the events that come before its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._input], [], [], left)
            assert ready, "the browser does not answer"
            more = os.read(self._input, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path | str, width: int, height: int, scheme: str = "light") -> None:
        """Load a file or an address in a window of this size, the system being light or dark."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        url = page.resolve().as_uri() if isinstance(page, Path) else page
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._input)
        os.close(self._output)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all there can be: long names, many groups, hostile ids, damage."""
    folder = tmp_path_factory.mktemp("pages")
    for seed in (1, 2):
        for rate in (1e-3, 3e-4):
            write_run(
                folder / "runs",
                seed,
                evals=[(500, 20.0 * seed), (1000, 90.0)],
                returns=[(s, s * rate) for s in range(100, 1001, 100)],
                algo_kwargs={"learning_rate": rate},
            )
    write_run(folder / "runs", 3, evals=[(500, 7.0)], status="interrupted")
    write_run(folder / "runs", 1, evals=[(9, 1.0)], env_id=HOSTILE * 4)
    broken = write_run(folder / "runs" / ("long-name-" * 12), 4)
    (broken / "metrics.jsonl").write_text("nothing\n")
    return write_report([folder / "runs"], folder / "report").page


def background(browser: Browser) -> str:
    found: str = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_it_loads_in_silence_and_fetches_nothing(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, 900)
    time.sleep(0.3)
    title = browser.evaluate("document.title")
    assert "ppo on" in title
    methods = [event["method"] for event in browser.events]
    assert "Runtime.exceptionThrown" not in methods
    assert "Runtime.consoleAPICalled" not in methods
    assert "Log.entryAdded" not in methods
    requests = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert requests == [page.resolve().as_uri()]
    assert browser.evaluate("document.querySelectorAll('script').length") == 1


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width, 740)
    browser.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("innerWidth") == width  # a phone would zoom out instead
    boxes = "Array.from(document.querySelectorAll('.scroll'))"
    assert browser.evaluate(f"{boxes}.every(box => box.clientWidth <= innerWidth)")
    if width == 360:
        assert browser.evaluate(f"{boxes}.some(box => box.scrollWidth > box.clientWidth)")


def test_figures_have_a_size_and_legible_labels(browser: Browser, page: Path) -> None:
    for width in (360, 1280):
        browser.open(page, width, 740)
        sizes = browser.evaluate(
            "Array.from(document.querySelectorAll('figure svg'),"
            " s => [s.getBoundingClientRect().width, s.getBoundingClientRect().height])"
        )
        assert len(sizes) >= 4
        assert all(w > 250 and h > 150 for w, h in sizes)
        smallest = browser.evaluate(
            "Math.min(...Array.from(document.querySelectorAll('figure svg text'),"
            " t => t.getBoundingClientRect().height))"
        )
        assert smallest > 8


def test_dark_and_light_differ_in_figures_too(browser: Browser, page: Path) -> None:
    line = "getComputedStyle(document.querySelector('figure svg path[style*=series-1]')).stroke"
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(page, 1280, 900, scheme)
        seen[scheme] = (background(browser), browser.evaluate(line), browser.screenshot())
    assert seen["light"][0] == "rgb(255, 255, 255)"
    assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))


CONTRASTS = """
(() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = colour => {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = Array.from(paint.getImageData(0, 0, 1, 1).data, v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
  };
  const ratio = (one, two) => {
    const [low, high] = [light(one), light(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = {};
  for (const element of document.querySelectorAll('p, a, th, td, code, button, li, span, h1, h2')) {
    const style = getComputedStyle(element);
    if (!element.offsetParent) continue;
    const key = `${element.tagName}.${element.className}`;
    found[key] = Math.min(found[key] ?? 99, ratio(style.color, behind(element)));
  }
  for (const line of document.querySelectorAll('.key line')) {
    const stroke = getComputedStyle(line).stroke;
    found[stroke] = ratio(stroke, behind(line.closest('li, th, td')));
  }
  for (const text of document.querySelectorAll('figure svg text')) {
    found['figure text'] = ratio(getComputedStyle(text).fill, behind(text.closest('figure')));
  }
  return found;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_stands_out_from_what_is_behind_it(
    browser: Browser, page: Path, scheme: str
) -> None:
    browser.open(page, 1280, 900, scheme)
    ratios: dict[str, float] = browser.evaluate(CONTRASTS)
    assert len(ratios) > 8
    assert "figure text" in ratios
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_the_keyboard_reaches_the_toggle_and_turns_it(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, 900)
    browser.press("Tab", 9)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    browser.press("Tab", 9)
    assert browser.evaluate("document.activeElement.id") == "theme"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.evaluate(outline) == "solid"
    before = background(browser)
    assert browser.evaluate("document.activeElement.textContent") == "Dark theme"
    browser.press(" ", 32, " ")
    assert background(browser) != before
    assert browser.evaluate("document.activeElement.textContent") == "Light theme"
    browser.press("Enter", 13, "\r")
    assert background(browser) == before


def test_wide_tables_scroll_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page, 360, 740)
    browser.evaluate(
        "window.box = Array.from(document.querySelectorAll('.scroll'))"
        ".find(b => b.scrollWidth > b.clientWidth); box.focus()"
    )
    assert browser.evaluate("document.activeElement === box")
    browser.press("ArrowRight", 39)
    deadline = time.monotonic() + 5
    while not browser.evaluate("box.scrollLeft > 0"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_skip_link_leads_to_the_results(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, 900)
    browser.press("Tab", 9)
    browser.press("Enter", 13, "\r")
    assert browser.evaluate("document.activeElement.id") == "main"


def test_commands_are_copied(browser: Browser, page: Path) -> None:
    browser.open(page, 1280, 900)
    browser.evaluate("window.copy = document.querySelector('.copy'); copy.focus()")
    browser.press("Enter", 13, "\r")
    deadline = time.monotonic() + 5
    while browser.evaluate("copy.textContent") not in ("Copied", "Selected"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
