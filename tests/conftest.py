"""What tests share: real SuperLinks, the local engine, free ports, and draws that are the same in each run."""

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import settings

# Two workers whose PyTorch takes all cores each would spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from tests.deployment import Deployment
    from tests.local import Local

BIN = Path(sys.executable).parent
# Seconds that a test waits at most for what takes a few of them on an idle machine.
PATIENCE = 400.0
_PORTS_GIVEN: set[int] = set()
# What a test made with Hypothesis takes depends on the machine, and each run of the tests has the same examples.
settings.register_profile("floret", deadline=None, derandomize=True)
settings.load_profile("floret")


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out fsync in this process: a test that cuts the power there is none, and each wait takes a millisecond."""
    with patch("os.fsync"):
        yield


@pytest.fixture(autouse=True)
def _the_same_secrets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let what this process draws in secret, as a device its noise and its seed, be the same in each run of a test."""
    draws = random.Random(request.node.nodeid)
    with (
        patch("secrets.randbits", draws.getrandbits),
        patch("secrets.token_hex", lambda count: draws.randbytes(count).hex()),
    ):
        yield


@dataclass(frozen=True)
class Simulator:
    """Runs ``flwr run`` against a SuperLink of its own, on free ports and with private folders."""

    env: dict[str, str]
    app: Path
    output: Path
    pid: int

    def run(
        self, run_config: str, federation_config: str, *, app: Path | None = None, timeout: float = PATIENCE
    ) -> str:
        """Run the app, or another one, to its end; return what the user sees."""
        command = [str(BIN / "flwr"), "run", str(app or self.app), "test", "--stream", "--run-config", run_config]
        done = subprocess.run(
            [*command, "--federation-config", federation_config],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=self.output,
        )
        log: str = done.stdout
        return log


def free_port() -> int:
    """Return a port that nothing listened on a moment ago, and that no other program gets by asking for any port."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # below those that Linux gives, and above Ray's
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _PORTS_GIVEN:
                _PORTS_GIVEN.add(port)
                return port


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when something listens on ``port``; fail when ``process`` ends or time is up before."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on port {port}:\n{log.read_text(errors='replace')}")


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """A SuperLink in simulation mode that ends with the tests."""
    with running_simulator(tmp_path_factory.mktemp("simulator")) as started:
        yield started


@contextmanager
def running_simulator(folder: Path) -> Iterator[Simulator]:
    """Start a SuperLink in simulation mode whose files are below ``folder``, and end it."""
    from tests.harness import copy_app

    home, output = folder / "flwr", folder / "runs"
    home.mkdir()
    output.mkdir()
    control = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    env = os.environ | {
        "FLWR_HOME": str(home),
        "FLORET_HOME": str(folder / "floret"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Ray's actors give way to every other process, and with the other tests' beside them stand still for minutes.
        "RAY_worker_niceness": "0",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    log = folder / "superlink.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(BIN / "flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"),
                *("--control-api-address", f"127.0.0.1:{control}"),
                *("--serverappio-api-address", "127.0.0.1:0"),
            ],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        wait_for_port(control, process, log)
        yield Simulator(env, copy_app(folder / "app"), output, process.pid)
    finally:
        from tests.deployment import children, commands  # which needs the ports of this module

        inside = commands(children(process.pid))
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        # A run that was ending just now would look for its SuperLink for ever.
        for pid in commands([pid for pid, command in inside.items() if "flwr-simulation" in command]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def local() -> "Iterator[Local]":
    """The local engine, warm for all tests of a process."""
    from tests.local import Local

    local = Local()
    try:
        yield local
    finally:
        local.close()


@pytest.fixture
def deployment(tmp_path: Path) -> "Iterator[Deployment]":
    """A SuperLink with its own folder; what was started for it is ended."""
    from tests.deployment import Deployment  # which needs the ports of this module

    deployment = Deployment(tmp_path / "deployment")
    try:
        yield deployment
    finally:
        deployment.end()


# What takes longest: begun first, so that no worker is left with it at the end.
_LONG = ("simulation", "engine", "kills", "nodes", "faults", "experiments", "operator", "serving", "certificates")
# A test with one of these waits for processes that it starts.
_PROCESSES = {"simulator", "deployment", "plain", "fedper", "secure", "superlink", "runner", "exported"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first, and tests that start processes among the thorough ones, but for those marked quick."""
    places = {f"test_{name}.py": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        waits = _PROCESSES & set(getattr(item, "fixturenames", ()))
        if waits and not any(item.get_closest_marker(name) for name in ("quick", "slow")):
            item.add_marker("thorough")
