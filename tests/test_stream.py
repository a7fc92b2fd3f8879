"""``floret run --stream`` with a command in the place of ``flwr``; ``tests/test_simulation.py`` has the real one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import stream
from tests.conftest import PATIENCE

# As `flwr run --stream` and `flwr list` of Flower print.
COMMAND = """#!{python}
import os, sys, time
if sys.argv[1] == "list":
    assert sys.argv[2:] == ["--run-id", "7", "--format", "json", "place"], sys.argv
    print(os.environ["LISTED"])
    sys.exit()
assert sys.argv[1:] == ["run", ".", "place", "--stream"], sys.argv
print(os.environ.get("STARTED", ""))
print("A log may say anything: Successfully started run 8" if "STARTED" in os.environ else "Error: no app", flush=True)
while os.environ["CODE"] == "none":
    time.sleep(0.1)
    print("round", flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
STARTED = "\N{CONFETTI BALL} Successfully started run 7"


def started(folder: Path, ignored: tuple[str, ...] = (), **variables: str) -> "subprocess.Popen[bytes]":
    """Start a run whose command prints and does what ``variables`` say, with these signals ignored and no others."""
    (folder / "flwr").write_text(COMMAND.format(python=sys.executable), encoding="utf-8")
    (folder / "flwr").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"} | variables
    command = [sys.executable, "-P", str(stream.__file__), "place", "flwr", "run", ".", "place", "--stream"]

    def take_signals() -> None:
        for name in SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_IGN if name in ignored else signal.SIG_DFL)

    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, preexec_fn=take_signals)


def listed(status: str) -> str:
    return f'{{"success": true, "runs": [{{"run-id": "7", "status": "{status}"}}]}}'


def test_a_superlink_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flwr").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(stream, "_PATIENCE", 0.2)
    said = stream._status("7", ["clinic"])
    assert said == "the SuperLink does not answer within 0.2 s; flwr list clinic asks it again"


@pytest.mark.parametrize(
    ("answer", "code", "result", "line"),
    [
        (listed("finished:completed"), 0, 0, ""),
        (listed("finished:failed"), 0, 2, "run 7 failed; its log says why"),
        (listed("finished:stopped"), 0, 130, "run 7 was stopped"),
        (listed("running"), 1, 2, "whether run 7 finished cannot be told: running"),
        ("Error: nobody answers", 0, 2, "whether run 7 finished cannot be told: Error: nobody answers"),
        (
            '{\n "success": false,\n "error-message": " Looking for run 7...\\n\\nThe SuperLink is unavailable."\n}',
            *(0, 2),
            "whether run 7 finished cannot be told: The SuperLink is unavailable; start the SuperLink again and run "
            'with resume="latest" if the run did not finish',
        ),
        ('{"runs": []}', 0, 2, 'whether run 7 finished cannot be told: {"runs": []}'),
    ],
)
def test_the_exit_code_tells_whether_the_run_finished(
    tmp_path: Path, answer: str, code: int, result: int, line: str
) -> None:
    process = started(tmp_path, STARTED=STARTED, LISTED=answer, CODE=str(code))
    out, error = process.communicate(timeout=PATIENCE)
    assert out.decode().splitlines()[0] == STARTED
    assert error.decode() == (f"floret: {line}\n" if line else "")
    assert process.returncode == result


@pytest.mark.parametrize(("code", "result", "line"), [(3, 3, ""), (0, 2, "floret: flwr run did not say which run")])
def test_what_started_no_run_ends_with_the_code_of_the_command(
    tmp_path: Path, code: int, result: int, line: str
) -> None:
    out, error = (process := started(tmp_path, CODE=str(code))).communicate(timeout=PATIENCE)
    assert out.decode().splitlines()[-1] == "Error: no app"
    assert error.decode()[: len(line) or None] == line
    assert process.returncode == result


@pytest.mark.parametrize("name", [*SIGNALS, "pipe"])
def test_the_log_of_a_run_that_goes_on_is_left(tmp_path: Path, name: str) -> None:
    process = started(tmp_path, STARTED=STARTED, CODE="none")
    assert process.stdout is not None
    assert process.stderr is not None
    while process.stdout.readline() != b"round\n":
        pass
    if name == "pipe":
        process.stdout.close()
    else:
        process.send_signal(getattr(signal, name))
    assert process.wait(PATIENCE) == 128 + (signal.SIGTERM if name == "pipe" else getattr(signal, name))
    line = "floret: run 7 goes on without its log here; flwr log 7 place shows it; flwr stop 7 place stops the run\n"
    assert process.stderr.read().decode().endswith(line)
    process.stderr.close()
    process.stdout.close()


def test_a_signal_that_is_ignored_from_the_start_leaves_the_log(tmp_path: Path) -> None:
    process = started(tmp_path, ignored=("SIGINT", "SIGHUP"), STARTED=STARTED, CODE="none")
    assert process.stdout is not None
    for number in (signal.SIGHUP, signal.SIGINT):
        while process.stdout.readline() != b"round\n":
            pass
        process.send_signal(number)
        # What was printed before the signal may wait in the pipe.
        assert [process.stdout.readline() for _ in range(5)] == [b"round\n"] * 5
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_command_that_a_signal_ends_before_there_is_a_run_has_the_code_of_the_signal(tmp_path: Path) -> None:
    process = started(tmp_path, CODE="none")
    assert process.stdout is not None
    while process.stdout.readline() != b"round\n":
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
