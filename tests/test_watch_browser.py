"""The page of ``floret watch`` in a browser: Debian's Chromium, driven by Selenium.

Runs are real federations in processes of their own, paced by a file. Pictures are left in ``tmp_path``.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from results.text import duration, percent
from results.watch import Board, WatchServer
from tests.conftest import PATIENCE
from tests.harness import DirectGrid, federate, without_the_first_after_two_rounds
from tests.test_report import make_run, never_used
from tests.test_watch import HOSTILE, lines_of

pytestmark = pytest.mark.slow

# A federation that goes no further than the round that a file says; the replies of some clients are spoilt.
PACED = """
import json, sys, time
from pathlib import Path
from tests.harness import federate

output, states, gate, clients, keys = sys.argv[1:]

def tamper(message, reply):
    if message.metadata.message_type == "train":
        while int(message.metadata.group_id) > int(Path(gate).read_text()):
            time.sleep(0.02)
        if int(clients) > 20 and reply.metadata.src_node_id in (1003, 1017):
            reply.content["metrics"]["num-examples"] = -1
    return reply

Path(states).mkdir(exist_ok=True)
federate(Path(output), int(clients), states=Path(states), tamper=tamper, **json.loads(keys))
"""

# Every text against what lies behind it: the least contrast, and where it is.
CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parts = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = parts(getComputedStyle(element).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
let least = [99, ""];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest("script,style")) continue;
  const style = getComputedStyle(element);
  const own = light(parts(element instanceof SVGElement ? style.fill : style.color)), other = light(behind(element));
  const ratio = (Math.max(own, other) + 0.05) / (Math.min(own, other) + 0.05);
  if (ratio < least[0]) least = [ratio, element.outerHTML.slice(0, 120)];
}
return least;
"""


class Browser:
    """A page in Chromium."""

    def __init__(self, folder: Path, address: str) -> None:
        from selenium import webdriver

        self._folder, self._address = folder, address
        options = webdriver.ChromeOptions()
        options.binary_location = needed("chromium", "chromium-browser", "google-chrome")
        profile = f"--user-data-dir={folder / 'profile'}"
        for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", profile):
            options.add_argument(argument)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(needed("chromedriver")))
        self.look(1200)
        self.driver.get(address)

    def look(self, width: int, scheme: str = "light") -> None:
        """Set the width and the scheme of colours."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, name: str) -> None:
        """Leave a picture of the whole page."""
        wanted = {"captureBeyondViewport": True, "format": "png"}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", wanted)
        (self._folder / f"{name}.png").write_bytes(base64.b64decode(found["data"]))

    def js(self, code: str) -> Any:
        """Return what a function body returns."""
        return self.driver.execute_script(code)

    def text(self, name: str) -> str:
        """Return the text of the element with this id."""
        found: str = self.js(f"return document.getElementById({name!r}).textContent")
        return found.replace("\u00a0", " ")

    def rows(self, body: str = "clients-body") -> list[list[str]]:
        """Return the cells of a table's body."""
        cells = (
            f"[...document.getElementById({body!r}).rows].map((row) => [...row.cells].map((cell) => cell.innerText))"
        )
        return [[cell.replace("\u00a0", " ") for cell in row] for row in self.js(f"return {cells}")]

    def until(self, true: Callable[[], Any]) -> None:
        """Wait until the page shows what it should."""
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, self.js("return document.body.innerText")[:3000]
            time.sleep(0.05)

    def check(self) -> None:
        """Nothing went wrong, and nothing was asked of anybody else."""
        assert self.driver.get_log("browser") == []
        asked = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.add(message["params"]["request"]["url"])
        own = f"http://{urlsplit(self._address).netloc}/"
        assert asked
        # The browser's own start page has other schemes.
        outside = {url for url in asked if urlsplit(url).scheme in ("http", "https", "ws", "wss", "ftp")}
        assert {url for url in outside if not url.startswith(own)} == set()


def needed(*names: str) -> str:
    """Return the path of a program that the tests need."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if not found:
        pytest.fail(f"{names[0]} is not installed: apt-get install chromium chromium-driver")
    return found


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    """Show runs in a browser; all of it is ended with the test."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        pytest.fail("selenium is not installed: pip install -c constraints.txt -e '.[test,browser]'")
    ends: list[Callable[[], Any]] = []

    def start(*runs: Path) -> Browser:
        server = WatchServer(Board(lambda: runs), 0)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        ends.extend((server.server_close, server.shutdown))
        browser = Browser(tmp_path, server.address)
        ends.append(browser.driver.quit)
        return browser

    try:
        yield start
    finally:
        for end in reversed(ends):
            end()


class Paced:
    """A federation in a process of its own that stops before the round after ``gate``."""

    def __init__(self, folder: Path, clients: int, **keys: Any) -> None:
        self.folder, self.clients, self.keys = folder, clients, keys
        self.runs, self._gate = folder / "runs", folder / "gate"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, gate: int, **more: Any) -> None:
        """Start it, or start it again."""
        self.let(gate)
        arguments = [str(self.runs), str(self.folder / "states"), str(self._gate), str(self.clients)]
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PACED, *arguments, json.dumps(self.keys | more)], stdout=log, stderr=log
            )

    def let(self, gate: int) -> None:
        """Let it go on up to and including round ``gate``."""
        new = self._gate.with_suffix(".new")
        new.write_text(str(gate))
        new.replace(self._gate)

    def directory(self) -> Path:
        """Return its directory, as soon as it is there."""
        deadline = time.monotonic() + PATIENCE
        while not (found := list(self.runs.glob("*/config.json"))):
            assert time.monotonic() < deadline, (self.folder / "log.txt").read_text()
            time.sleep(0.1)
        return found[0].parent

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self.process:
            self.process.kill()
            self.process.wait()


@contextmanager
def paced(folder: Path, clients: int, **keys: Any) -> Iterator[Paced]:
    run = Paced(folder, clients, **keys)
    try:
        yield run
    finally:
        run.kill()


def test_a_run_that_goes_is_killed_and_resumed(tmp_path: Path, show: Callable[..., Browser]) -> None:
    with paced(tmp_path, 6, rounds=8, local_epochs=1) as run:
        run.start(gate=3)
        page = show(run.directory())
        page.until(lambda: "round 4 of 8: training" in page.text("doing"))
        assert page.text("title") == "pfakd on digits"
        assert page.text("state") == "Going"
        assert page.text("rounds") == "3 of 8 rounds, 37 %"
        page.until(lambda: page.text("waits").startswith("0 of 6 clients answered; waits for client 0 ("))
        assert "then reads the answers of 1, 2, 3, 4, 5." in page.text("waits")
        assert page.js("return document.title") == "3/8 \u00b7 pfakd on digits"
        history = [json.loads(line) for line in lines_of(run.directory())]
        accuracy = history[-1]["accuracy"]["after"]["test"]["mean"]
        assert page.text("after-value") == f"{100 * accuracy:.1f} %"
        assert page.text("left-value").endswith("s")
        rows = page.rows()
        assert [row[0] for row in rows] == ["0awaited", "1", "2", "3", "4", "5"]
        assert [row[5] for row in rows] == ["3"] * 6
        assert page.js("return document.querySelectorAll('#curves polyline').length") == 2
        page.picture("going")
        run.let(5)
        page.until(lambda: page.text("rounds") == "5 of 8 rounds, 62 %")
        page.until(lambda: [row[5] for row in page.rows()] == ["5"] * 6)
        assert page.text("live").startswith("pfakd: Going, round")

        page.until(lambda: "round 6 of 8: training" in page.text("doing"))
        run.kill()
        page.until(lambda: page.text("state") == "Stopped")
        assert page.text("doing") == "after round 5 of 8, in round 6 while training"
        assert page.text("waits").startswith("When it ended it waited for client 0. No process writes its directory.")
        assert page.text("left-value") == "\N{EN DASH}"
        page.until(lambda: page.text("live").startswith("pfakd: Stopped, after round 5"))
        page.picture("killed")

        run.start(gate=6, resume="latest", checkpoint_every=1)
        page.until(lambda: "round 7 of 8: training; resumed after round 5" in page.text("doing"))
        assert page.text("state") == "Going"
        assert page.text("rounds") == "6 of 8 rounds, 75 %"
        page.picture("resumed")
        run.let(8)
        page.until(lambda: page.text("state") == "Finished")
        assert page.text("doing") == "all 8 rounds; resumed after round 5"
        assert [row[5] for row in page.rows()] == ["8"] * 6
        page.picture("finished")
        page.check()


def test_a_run_resumed_from_an_older_checkpoint_takes_rounds_back(tmp_path: Path, show: Callable[..., Browser]) -> None:
    with paced(tmp_path, 3, rounds=9, local_epochs=1, checkpoint_every=4) as run:
        run.start(gate=6)
        page = show(run.directory())
        page.until(lambda: page.text("rounds").startswith("6 of 9"))
        run.kill()
        page.until(lambda: page.text("state") == "Stopped")
        run.start(gate=4, resume="latest")
        page.until(lambda: page.text("rounds").startswith("4 of 9"))
        page.until(lambda: "round 5 of 9: training; resumed after round 4" in page.text("doing"))
        assert [row[5] for row in page.rows()] == ["4"] * 3
        page.check()


def test_200_clients(tmp_path: Path, show: Callable[..., Browser]) -> None:
    keys = {"rounds": 4, "local_epochs": 1, "partition": "iid", "method": "fedper", "validation_fraction": 0.0}
    with paced(tmp_path, 200, **keys) as run:
        run.start(gate=2)
        page = show(run.directory())
        page.until(lambda: page.text("rounds").startswith("2 of 4"))
        page.until(lambda: "round 3 of 4: training" in page.text("doing"))
        page.until(lambda: page.text("waits").startswith("0 of 200 clients answered; waits for client 0 ("))
        assert "then reads the answers of 1, 2, 3, 4, 5 and 194 more." in page.text("waits")
        assert page.text("count") == "200 clients"
        rows = page.rows()
        assert [row[0].removesuffix("awaited").strip() for row in rows] == [str(place) for place in range(200)]
        assert page.text("refused-value") == "4"
        assert page.text("refused-note") == "2 in round 2"

        page.js("document.querySelector('[data-key=refusals] button').click()")
        first = page.rows()[:3]
        assert [row[0].removesuffix("awaited").strip() for row in first] == ["3", "17", "0"]
        assert first[0][-1].startswith("round 2: ")
        assert "num-examples" in first[0][-1]
        assert page.js("return document.querySelector('[data-key=refusals]').ariaSort") == "descending"
        page.picture("200-refused-first")

        page.js("document.querySelector('[data-key=after] button').click()")
        shown = [float(row[2].removesuffix(" %")) for row in page.rows() if row[2].endswith("%")]
        assert len(shown) == 198
        assert shown == sorted(shown)

        page.driver.find_element("id", "filter").send_keys("17")
        assert page.text("count") == "12 of 200 clients"
        assert all("17" in row[0] for row in page.rows())
        page.driver.find_element("id", "only-refused").click()
        assert [row[0].removesuffix("awaited").strip() for row in page.rows()] == ["17"]
        page.driver.find_element("id", "only-refused").click()
        page.driver.find_element("id", "filter").clear()
        run.let(4)
        page.until(lambda: page.text("state") == "Finished")
        for scheme in ("light", "dark"):
            page.look(1200, scheme)
            page.picture(f"200-{scheme}")
        page.check()


def test_1000_clients_do_not_freeze_the_page(tmp_path: Path, show: Callable[..., Browser]) -> None:
    run = make_run(tmp_path / "run", rounds=40, done=39, names=[f"site-{place}" for place in range(1000)])
    page = show(run)
    page.until(lambda: page.text("count") == "1,000 clients")
    assert len(page.rows()) == 250
    page.driver.find_element("id", "more").click()
    assert len(page.rows()) == 1000
    took = page.js("""
      const begun = performance.now();
      for (const key of ["after", "seen", "name"]) {
        document.querySelector(`[data-key=${key}] button`).click();
        document.body.offsetHeight;
      }
      return (performance.now() - begun) / 3;
    """)
    assert took < 1000
    page.check()


def test_hostile_names_are_text(tmp_path: Path, show: Callable[..., Browser]) -> None:
    names = [HOSTILE, "__proto__", "constructor", "\u202egnp.exe", "a" * 300, "${alert(3)}"]
    refused = {2: (HOSTILE, HOSTILE), 3: ("toString", "'\"><svg onload=alert(4)>")}
    run = make_run(tmp_path / "run", rounds=4, names=names, refused=refused, method=HOSTILE, model=HOSTILE)
    page = show(run)
    page.until(lambda: page.text("count") == "7 clients")
    assert {row[0] for row in page.rows()} == {*names, "toString"}
    assert page.text("title") == f"{HOSTILE} on digits"
    assert page.js("return document.querySelectorAll('img, main script, [onload], [onerror]').length") == 0
    page.look(400)
    assert page.js("return document.documentElement.scrollWidth") <= 400
    page.check()


def test_several_runs_side_by_side(tmp_path: Path, show: Callable[..., Browser]) -> None:
    names = [f"ward-{place}" for place in range(10)]
    runs = [
        make_run(tmp_path / method, rounds=20, done=done, method=method, level=level, names=names, part=4)
        for method, done, level in (("pfakd", 20, 0.9), ("fedper", 12, 0.85), ("local", 20, 0.8))
    ]
    page = show(*runs)
    page.until(lambda: page.text("title") == "3 runs")
    rows = page.rows("runs-body")
    assert [row[:3] for row in rows] == [
        ["pfakd", "Finished", "20 of 20"],
        ["fedper", "Stopped", "12 of 20"],
        ["local", "Finished", "20 of 20"],
    ]
    assert page.js("return document.querySelectorAll('#curves polyline').length") == 6
    page.js("document.querySelector('#runs-body tr:nth-child(2) button').click()")
    assert page.text("which") == "fedper"
    assert page.text("doing").startswith("after round 12 of 20")
    assert page.js("return document.querySelector('[aria-current=true] button').textContent") == "fedper"
    for width, scheme in ((1200, "light"), (1200, "dark"), (400, "light")):
        page.look(width, scheme)
        time.sleep(0.3)
        page.picture(f"several-{width}-{scheme}")
        assert page.js("return document.documentElement.scrollWidth") <= width
        ratio, where = page.js(CONTRAST)
        assert ratio >= 4.5, where
    page.check()


def test_figures_are_rounded_as_in_the_report(tmp_path: Path, show: Callable[..., Browser]) -> None:
    page = show(federate(tmp_path, 3, method="fedper", rounds=1).directory)
    page.until(lambda: page.text("state") == "Finished")
    for part in range(161):
        assert page.js(f"return percent({part}/160)") == percent(part / 160)
    for seconds in (0.5, 0.123, 1.25, 3.75, 59.94):
        assert page.js(f"return duration({seconds})").replace("\u00a0", " ") == duration(seconds)
    page.check()


def test_a_run_of_which_no_reply_was_used_says_so(tmp_path: Path, show: Callable[..., Browser]) -> None:
    page = show(never_used(make_run(tmp_path / "run")))
    page.until(lambda: page.text("problems") == "no reply has been used up to now")
    page.check()


def test_a_mean_over_some_clients_says_over_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: Callable[..., Browser]
) -> None:
    monkeypatch.setattr(DirectGrid, "get_node_ids", without_the_first_after_two_rounds)
    page = show(federate(tmp_path, 4, method="fedper", rounds=4).directory)
    page.until(lambda: page.text("after-note") == "\u00b1 std over 3 of 4 clients, round 4")
    page.check()


def test_the_page_is_used_by_keyboard_and_read_out(tmp_path: Path, show: Callable[..., Browser]) -> None:
    from selenium.webdriver.common.keys import Keys

    run = make_run(tmp_path / "run", rounds=9, done=6, refused={2: ("3", "a tensor is not finite")})
    page = show(run)
    page.until(lambda: page.text("count") == "5 clients")
    reached = []
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(
            page.js("""
              const at = document.activeElement;
              return at.id || at.closest("[data-key]")?.dataset.key || at.getAttribute("aria-labelledby") || at.tagName;
            """)
        )
    assert reached[:4] == ["curves", "SUMMARY", "filter", "only-refused"]
    columns = ["name", "after", "before", "loss", "seen", "trained", "samples", "seconds", "up", "down", "refusals"]
    assert reached[4:16] == ["clients-title", *columns]

    page.driver.find_element("id", "curves").send_keys(Keys.ARROW_LEFT)
    assert page.text("reading").startswith("Round 6: before")
    page.driver.find_element("id", "curves").send_keys(Keys.ARROW_LEFT)
    assert page.text("reading").startswith("Round 5: before")
    wide = page.js("return document.getElementById('curves').getAttribute('viewBox')")
    page.look(900)  # what is drawn anew keeps its place
    page.until(lambda: page.js("return document.getElementById('curves').getAttribute('viewBox')") != wide)
    assert page.js("return document.querySelector('#curves .cursor').getAttribute('visibility')") == "visible"
    assert page.text("reading").startswith("Round 5: before")
    page.look(1200)
    label = page.js("return document.getElementById('curves').getAttribute('aria-label')")
    assert label.startswith("Accuracy in each round, mean over clients. Last, pfakd: after local training")

    page.driver.find_element("tag name", "summary").send_keys(Keys.ENTER)
    page.until(lambda: len(page.rows("rounds-body")) == 6)
    assert [row[0] for row in page.rows("rounds-body")] == ["6", "5", "4", "3", "2", "1"]

    # What has no name cannot be read out.
    assert page.js("return [...document.querySelectorAll('input')].every((input) => input.labels.length === 1)")
    assert page.js("return [...document.querySelectorAll('th')].every((head) => ['col', 'row'].includes(head.scope))")
    assert page.js("return document.getElementById('progress').getAttribute('aria-label')") == "Rounds done"
    assert page.js("return document.documentElement.lang") == "en"
    page.picture("rounds")
    page.check()


def test_a_watch_that_has_ended_is_told(tmp_path: Path, show: Callable[..., Browser]) -> None:
    run = make_run(tmp_path / "run", rounds=4)
    server = WatchServer(Board(lambda: [run]), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    page = show(run)
    page.driver.get(server.address)
    page.until(lambda: page.text("count") == "5 clients")
    server.shutdown()
    server.server_close()
    # A connection that is kept open is still answered by its thread, which ends with the command.
    server.token = "another"
    page.until(lambda: page.js("return !document.getElementById('lost').hidden"))
    assert page.text("lost").startswith("floret watch ")
    assert page.text("count") == "5 clients"
