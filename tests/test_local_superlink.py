"""A local SuperLink of another environment is refused before a run is sent to it."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common import local_superlink
from common.errors import FloretError
from common.local_superlink import check_local_superlink, environment_of, use_own_commands
from tests.conftest import BIN, PATIENCE, free_port, wait_for_port
from tests.harness import ROOT

# Elsewhere nothing shows whose a SuperLink is; test_one_of_another_user_is_refused has, in its last lines, what is done
# there, and runs on every system.
needs_proc = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(),
    reason="check_local_superlink reads /proc/net/tcp and does nothing on a system without it",
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another virtual environment, with the packages of this one and Flower's commands."""
    folder = tmp_path_factory.mktemp("environment") / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=PATIENCE)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for command in ("flower-superlink", "flower-superexec", "flwr-simulation", "flwr-serverapp"):
        lines = (BIN / command).read_text().splitlines()[1:]
        (folder / "bin" / command).write_text("\n".join([f"#!{folder}/bin/python", *lines, ""]))
        (folder / "bin" / command).chmod(0o755)
    return folder


@contextmanager
def superlink(folder: Path, environment: Path, port: int, *options: str, **variables: str) -> Iterator[int]:
    """Start the SuperLink of an environment on ``port``, and give its pid; ``config.toml`` in ``folder`` names it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = os.environ | {"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    log = folder / "superlink.log"
    command: list[str | Path] = [environment / "bin" / "flower-superlink", "--insecure", *options]
    command += ["--control-api-address", f"127.0.0.1:{port}", "--serverappio-api-address", "127.0.0.1:0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=env | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for_port(port, process, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def floret(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@needs_proc
@pytest.mark.thorough
def test_a_simulation_of_another_environment_is_refused(tmp_path: Path, other: Path) -> None:
    port, home = free_port(), tmp_path / "flwr"
    with superlink(home, other, port, "--simulation") as pid:
        stop = f"stop it with kill {pid} (its runs end with it)"
        started = f"floret: the SuperLink at 127.0.0.1:{port} was started from another environment, {other}, and would"
        for command in (
            ["run", ".", "--stream"],
            ["run", ".", "own"],
            ["sweep", ".", "--engine", "ray", "--grid", "seed=[0]", "-c", "rounds=1", "--output", tmp_path / "sweep"],
            [
                "reproduce",
                "experiments/feddfpa-table1.yaml",
                "--engine",
                "ray",
                "--scale",
                "0.01",
                "--output",
                tmp_path / "results",
            ],
        ):
            done = floret(*command, FLWR_HOME=str(home))
            assert done.returncode == 2, done.stdout + done.stderr
            assert done.stderr.count("\n") == 1
            assert done.stderr.startswith(started)
            assert f"not those of {sys.prefix}: {stop}\n" in done.stderr
        # The one that `flwr run` starts itself, where its file does not say otherwise.
        done = floret("run", ".", FLWR_HOME=str(tmp_path / "none"), FLWR_LOCAL_CONTROL_API_PORT=str(port))
        assert done.returncode == 2
        assert done.stderr.startswith(started)
        assert done.stderr.endswith(f"{stop}, or set FLWR_LOCAL_CONTROL_API_PORT to another port\n")
        assert not (tmp_path / "none").exists()
        # Nothing was stopped, nothing was run.
        assert not [path for path in tmp_path.rglob("*") if path.name in ("log.txt", "config.json", "cell.json")]
        os.kill(pid, 0)


@needs_proc
@pytest.mark.thorough
def test_the_environment_that_runs_the_apps_counts(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "flwr"
    monkeypatch.setenv("FLWR_HOME", str(home))
    port = free_port()
    own = f"{BIN}:{os.environ['PATH']}"
    with superlink(home, other, port, "--simulation", PATH=own) as pid:
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(bytes(other))
        check_local_superlink()


@needs_proc
@pytest.mark.thorough
def test_one_with_real_nodes_was_chosen(tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "flwr"
    monkeypatch.setenv("FLWR_HOME", str(home))
    port, fleet = free_port(), free_port()
    with superlink(home, other, port, "--fleet-api-address", f"127.0.0.1:{fleet}") as pid:
        assert local_superlink._owners(set(local_superlink._listening(port))) == [pid]
        check_local_superlink()


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel shows it: the socket's owner, but not which process has it."""
    from flwr.cli import constant

    port = int(constant.LOCAL_CONTROL_API_PORT)
    (tmp_path / "net").mkdir()
    line = (
        f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  {os.getuid() + 1} 0 77 1 0"
    )
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{line}\n")
    (tmp_path / "12").mkdir()
    monkeypatch.setattr(local_superlink, "PROC", tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    with pytest.raises(FloretError) as error:
        check_local_superlink()
    said = str(error.value)
    assert said.startswith(f"the SuperLink at 127.0.0.1:{port} is that of user ")
    assert said.endswith(", who would run this: set FLWR_LOCAL_CONTROL_API_PORT to another port")
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{line.replace(' 0A ', ' 01 ')}\n")  # connected
    check_local_superlink()
    # Another system.
    monkeypatch.setattr(local_superlink, "PROC", tmp_path / "none")
    check_local_superlink()


def test_a_file_that_is_closed_while_they_are_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "12" / "fd"
    files.mkdir(parents=True)
    for number in range(9):
        (files / str(number)).symlink_to(f"socket:[{70 + number}]")
    whole = Path.readlink

    def readlink(self: Path) -> Path:
        if self.name != "7":
            raise FileNotFoundError
        return whole(self)

    monkeypatch.setattr(local_superlink, "PROC", tmp_path)
    monkeypatch.setattr(Path, "readlink", readlink)
    assert local_superlink._owners({"77"}) == [12]
    assert local_superlink._owners({"78"}) == []


def test_environments(other: Path) -> None:
    assert environment_of(other / "bin" / "python") == other.resolve()
    assert environment_of(Path(sys.executable)) == Path(sys.prefix).resolve()
    base = (other / "bin" / "python").resolve()
    assert environment_of(base) == Path(sys.base_prefix).resolve()


def test_commands_of_this_environment_are_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    use_own_commands()
    assert os.environ["PATH"] == f"{BIN}:/somewhere"
