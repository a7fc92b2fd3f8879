"""The local engine: the same numbers as every other way to run a federation, and what happens when processes end."""

import gc
import json
import logging
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from selectors import EVENT_READ
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import ConsoleHandler
from safetensors.numpy import load_file

from client_app.setting import Agreed, Resident
from common.errors import ConfigError
from common.flower import format_log
from common.resources import Resources
from common.simulation import KeptState
from common.wire import to_record
from engine.grid import EngineGrid, _Worker
from engine.parcels import Answer, Batch, Shared, Task, from_bytes, to_bytes
from engine.plan import Plan
from engine.supervisor import prepare
from engine.worker import FIRST_NODE, work
from models import build_model
from server_app.settings import read_config
from strategies.core import Setup, send_and_receive
from strategies.fedavg import FedAvg
from tests.conftest import PATIENCE, Simulator
from tests.deployment import children, commands, until
from tests.harness import EVERY_METHOD, ON_MLP, ROOT, copy_app, federate, run_config, timeless
from tests.local import Local, histories, read_history

# Rounds that take a second or two, so that there is a middle.
LONG = "local-epochs=60 lr=0.002"


@pytest.fixture
def runner(tmp_path: Path) -> Iterator["Runner"]:
    """Runs ``floret run --engine local``; what it started is ended."""
    runner = Runner(tmp_path)
    yield runner
    runner.end()


class Runner:
    """Starts runs of the local engine as a user does, with private folders."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "runs"
        self.env = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLORET_HOME": str(folder / "floret"),
            "NO_COLOR": "1",
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, run_config: str, clients: int = 4, app: Path = ROOT, *rest: str) -> "subprocess.Popen[str]":
        """Start a run with two workers."""
        federation = f"num-supernodes={clients} init-args-num-cpus=2"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cli.main", "run", str(app), "--engine", "local"),
                *("--run-config", f'output-dir="{self.output}" {run_config}', "--federation-config", federation, *rest),
            ],
            env=self.env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, run_config: str, clients: int = 4, app: Path = ROOT, *rest: str, code: int = 0) -> str:
        """Make a run; return what it printed."""
        process = self.start(run_config, clients, app, *rest)
        log: str = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == code, log
        return log

    def until_round(self, server_round: int) -> None:
        """Return when the newest run has finished a round."""

        def rounds() -> int:
            found = [directory / "history.jsonl" for directory in self.directories()]
            return found[-1].read_bytes().count(b"\n") if found and found[-1].exists() else 0

        until(lambda: rounds() >= server_round, f"no round {server_round}")

    def directories(self) -> list[Path]:
        """Return the run directories, oldest first."""
        return sorted(self.output.glob("*/"))

    def end(self) -> None:
        """End what is still going."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def numbers(directory: Path) -> tuple[Any, dict[str, dict[str, bytes]]]:
    """Return the history of a run without times, and the personal models that it left."""
    files = sorted((directory / "checkpoints" / "personal").glob("*.safetensors"))
    models = {file.name: {name: array.tobytes() for name, array in load_file(file).items()} for file in files}
    return timeless(read_history(directory)), models


# Whether a message is answered by a fork or in this process, by a node with its files or from memory: all the same.
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_gives_the_numbers_that_it_gives_elsewhere(local: Local, tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"method": method, "rounds": 3, "participation": 0.5, "local_epochs": 1, "evaluate_every": 2}
    keys |= ON_MLP.get(method, {})
    here = federate(tmp_path / "here", 5, **keys)
    there = local.run(tmp_path / "there", 5, **keys)
    assert timeless(here.history) == timeless(there.history)
    assert there.summary["accuracy"] == here.summary["accuracy"]


# What is planned over all rounds is planned otherwise in a run that is made longer.
UNPLANNED: dict[str, dict[str, Any]] = {
    "dispfl": {"dispfl__prune_rate": 0.0},
    "fedkd": {"fedkd__energy_end": 0.95},
    "apple": {"apple__scheduled_part": 0.0},
}
# Every method is resumed in tests/test_resume.py; here it is the engine, with a method of every kind of state.
STATES = ["pfps-lwc", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("ua-pdfl", "fedkd", "apple", "dispfl"))]


@pytest.mark.parametrize("method", STATES)
def test_a_method_goes_on_from_its_checkpoint(local: Local, tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"method": method, "participation": 0.5, "local_epochs": 1, "evaluate_every": 1}
    keys |= ON_MLP.get(method, {}) | UNPLANNED.get(method, {})
    whole = local.run(tmp_path / "whole", 5, rounds=4, **keys)
    first = local.run(tmp_path / "parts", 5, rounds=2, **keys)
    longer = local.run(tmp_path / "parts", 5, rounds=4, resume=str(first.directory), **keys)
    assert longer.directory == first.directory
    assert numbers(longer.directory) == numbers(whole.directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        'method="pfakd" rounds=3 participation=0.5',
        'method="ua-pdfl" rounds=4 local-epochs=1 participation=0.5 batch-norm="local" checkpoint-every=0',
    ],
)
def test_the_same_history_and_models_as_with_ray(simulator: Simulator, runner: Runner, keys: str) -> None:
    ray = simulator.output / f"engine-{len(list(simulator.output.iterdir()))}"
    simulator.run(f'{keys} output-dir="{ray}"', "num-supernodes=5 client-resources-num-cpus=1 init-args-num-cpus=2")
    runner.run(keys, 5)
    (directory,) = ray.iterdir()
    history, models = numbers(directory)
    assert len(models) >= 4
    assert numbers(runner.directories()[0]) == (history, models)


@pytest.mark.slow
def test_a_run_goes_on_with_the_other_engine(simulator: Simulator, runner: Runner, tmp_path: Path) -> None:
    """Local, then Ray, then local: the numbers of one that was never interrupted."""
    keys = 'method="pfps-lwc" participation=0.5 local-epochs=1 evaluate-every=1'
    runner.run(f"{keys} rounds=6")
    (whole,) = runner.directories()
    runner.run(f"{keys} rounds=2")
    (parts,) = set(runner.directories()) - {whole}
    again = f'{keys} resume="{parts}"'
    simulator.run(f"{again} rounds=4", "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2")
    runner.run(f"{again} rounds=6")
    assert numbers(parts) == numbers(whole)
    resumed = json.loads((parts / "config.json").read_text())["resumed"]
    assert [entry["round"] for entry in resumed] == [2, 4]


def idle_grid(clients: int, round_timeout: float) -> tuple[EngineGrid, Connection]:
    """Return a grid without workers, and the supervisor's end of its connection."""
    control, supervisor = Pipe()
    values = {"round-timeout": round_timeout, "federation": "f", "method": "m"}
    plan: Any = SimpleNamespace(values=values, resources=SimpleNamespace(clients=clients))
    return EngineGrid(plan, control, lambda *_: None), supervisor


@contextmanager
def worker_of(grid: EngineGrid) -> Iterator[tuple[Connection, "subprocess.Popen[bytes]"]]:
    """Give ``grid`` a worker that does nothing; yield its end of the connection and its process."""
    near, far = Pipe()
    with subprocess.Popen(["sleep", "60"]) as process:
        grid._workers[0] = _Worker(process.pid, near)
        grid._selector.register(near, EVENT_READ, 0)
        try:
            yield far, process
        finally:
            process.kill()


def to_train(client: int, server_round: int) -> Message:
    content = RecordDict({"config": ConfigRecord({"x": 1})})
    return Message(content, FIRST_NODE + client, "train", ttl=60, group_id=str(server_round))


def test_an_answer_that_comes_when_its_time_has_run_out_is_passed_over() -> None:
    grid, _ = idle_grid(2, 0.1)
    with worker_of(grid) as (far, process):
        (key,) = grid.push_messages([to_train(0, 1)])
        grid._turn(0.0)
        time.sleep(0.2)
        grid._turn(0.0)  # ends the process and takes back its message
        far.send_bytes(to_bytes(Answer(int(key), {}, None, 0.2)))
        grid._turn(0.1)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        # What ends gets nothing more, and so nobody's attempt counts.
        grid.push_messages([to_train(1, 1)])
        assert not grid._workers[0].tasks
        grid._drop(0, "signal 9")
        assert [item.attempts for item in grid._open.values()] == [0]
        # Nor does it end the run that the supervisor has seen it end first.
        grid._workers[0] = _Worker(process.pid, Pipe()[0], began=-1e9, tasks=deque([99]))
        grid._expire()
    assert not list(grid.pull_messages([key]))


def test_a_batch_forgets_nothing_that_it_needs() -> None:
    """Six clients get arrays of their own, more than a worker keeps."""
    grid, _ = idle_grid(6, 60.0)
    messages = [to_train(client, 1) for client in range(6)]
    for client, message in enumerate(messages):
        message.content["arrays"] = to_record({"w": np.full(2, client, np.float32)})
    keys = [int(key) for key in grid.push_messages(messages)]
    worker = _Worker(1, Pipe()[0])
    batch = grid._batch(worker, keys)
    used = [task.parts["arrays"] for task in batch.tasks]
    assert all(isinstance(part, Shared) for part in used)
    assert {part.number for part in used} == batch.shared.keys()  # type: ignore[union-attr]
    assert len(batch.shared) == 6
    assert not batch.forget
    # The next one forgets those that were used longest ago.
    assert len(grid._batch(worker, keys[-1:]).forget) == 2
    assert len(worker.shared) == 4


def test_what_a_worker_that_took_too_long_had_not_begun_counts_as_no_attempt() -> None:
    grid, _ = idle_grid(2, 60.0)
    keys = [int(key) for key in grid.push_messages([to_train(0, 1), to_train(1, 1)])]
    with worker_of(grid) as (_far, process):
        worker = grid._workers[0]
        worker.began, worker.tasks = -1e9, deque(keys)
        grid._queue.clear()
        grid._expire()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        grid._drop(0, "signal 9")
    assert {number: item.attempts for number, item in grid._open.items()} == {keys[1]: 0}


def test_messages_that_are_out_of_time_are_forgotten() -> None:
    grid, _ = idle_grid(2, 60.0)
    first, second = (int(key) for key in grid.push_messages([to_train(0, 1), to_train(1, 1)]))
    grid._open[first].deadline = time.monotonic() - 1
    grid._expire()
    assert [*grid._open] == [*grid._queue] == [second]


def test_messages_of_a_round_that_is_over_are_not_delivered() -> None:
    """Two of three clients do not answer in round 1: the worker has one of their messages, the other one waits."""
    grid, _ = idle_grid(3, 60.0)
    with worker_of(grid) as (far, _process):
        assert not list(send_and_receive(grid, [to_train(client, 1) for client in range(3)], timeout=0.3))
        (late,) = from_bytes(far.recv_bytes()).tasks
        assert (late.client, late.group) == (0, "1")
        keys = list(grid.push_messages([to_train(client, 2) for client in range(3)]))
        assert not far.poll(0.1)  # the worker has not answered yet
        state = KeptState(1, b"{}", b"")
        far.send_bytes(to_bytes(Answer(late.number, {}, state, 0.2)))
        done: list[tuple[int, str]] = []
        while len(done) < 3:
            grid.wait(0.1)
            for task in from_bytes(far.recv_bytes()).tasks:
                assert task.state is None
                done.append((task.client, task.group))
                far.send_bytes(to_bytes(Answer(task.number, {}, None, 0.2)))
        grid.wait(0.1)
        assert sorted(done) == [(client, "2") for client in range(3)]
        assert grid._answers.keys() == set(keys)
        assert not grid._open
        # A reply that came and was never taken goes, too.
        grid.forget(keys)
        assert not grid._answers


def test_a_worker_that_is_replaced_while_the_server_is_busy_holds_nothing_up() -> None:
    """The new worker's connection is told of before the end of the old one's is: nothing is read from the new one."""
    grid, supervisor = idle_grid(1, 60.0)

    def attach(why: str) -> Connection:
        near, far = Pipe()
        supervisor.send((0, os.getpid(), why))
        send_handle(supervisor, near.fileno(), os.getpid())
        near.close()
        return far

    first = attach("")
    grid._turn(0.0)
    first.close()
    second = attach("signal 9")
    turn = threading.Thread(target=grid._turn, args=(0.5,), daemon=True)
    turn.start()
    turn.join(5)
    assert not turn.is_alive()
    assert len(grid._workers) == 1
    second.close()


@pytest.mark.parametrize("method", [pytest.param("ua-pdfl", marks=pytest.mark.slow), "pfps-lwc"])
def test_a_run_that_was_stopped_is_resumed_with_the_same_numbers(runner: Runner, method: str) -> None:
    keys = f'method="{method}" {LONG} participation=0.5'
    runner.run(f"{keys} rounds=5")
    process = runner.start(f"{keys} rounds=5")
    until(lambda: len(list(runner.output.iterdir())) == 2, "no run")
    runner.until_round(2)
    inside = children(process.pid)
    assert len(inside) == 3
    process.send_signal(signal.SIGTERM if method == "ua-pdfl" else signal.SIGINT)
    log: str = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 130
    assert 'The run was stopped; resume="latest" goes on from its last checkpoint' in log
    assert "Traceback" not in log
    assert commands(inside) == {}
    whole, stopped = runner.directories()
    assert not (stopped / "summary.json").exists()
    runner.run(f'{keys} rounds=5 resume="latest"')
    assert numbers(stopped) == numbers(whole)


# The server's process of a run that does nothing, and is stopped just before or just after that.
STOPPED_AT = """
import os, signal, sys
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace
from engine import supervisor

@contextmanager
def display(*_):
    if sys.argv[1] == "the beginning":
        os.kill(os.getpid(), signal.SIGTERM)
    yield lambda *_: None
    os.kill(os.getpid(), signal.SIGTERM)

supervisor.display, supervisor.run_server = display, lambda *_: None
values = {"rounds": 1, "round-timeout": 1.0, "federation": "f", "method": "m", "checkpoint-every": 1}
plan = SimpleNamespace(run_id=1, values=values, resources=SimpleNamespace(clients=2))
sys.exit(supervisor._serve(plan, Pipe()[0]))
"""


@pytest.mark.parametrize(("moment", "code"), [("the beginning", 130), ("the end", 0)])
def test_a_run_that_is_stopped_at_its_first_or_last_moment_shows_no_traceback(moment: str, code: int) -> None:
    command = [sys.executable, "-c", STOPPED_AT, moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("The run was stopped" in done.stderr) == (code == 130)


# Makes the terminal that its input is the one of its session, and goes on as another command.
ON_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGHUP, signal.Handlers[sys.argv[1]]); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def test_a_run_whose_streams_are_closed_is_made(runner: Runner, tmp_path: Path) -> None:
    """Their numbers would be those of the pipes between its processes."""
    keys = f'output-dir="{runner.output}" rounds=1 local-epochs=1 model="mlp" max-samples=200'
    federation = "num-supernodes=2 init-args-num-cpus=2"
    command = [sys.executable, "-m", "cli.main", "run", str(ROOT), "--engine", "local"]
    command += ["--run-config", keys, "--federation-config", federation]
    script = f"exec {shlex.join(command)} <&- >&- 2>&-"
    assert (
        subprocess.run(["bash", "-c", script], env=runner.env, cwd=ROOT, timeout=PATIENCE, check=False).returncode == 0
    )
    assert [json.loads(path.read_text())["rounds"] for path in runner.output.glob("*/summary.json")] == [1]


@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_terminal_that_closes_stops_a_run_unless_it_is_to_go_on(runner: Runner, ignored: bool) -> None:
    terminal, inside = os.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, "SIG_IGN" if ignored else "SIG_DFL", "-m", "cli.main", "run"]
    command += [str(ROOT), "--engine", "local", "--federation-config", "num-supernodes=4 init-args-num-cpus=2"]
    command += ["--run-config", f'output-dir="{runner.output}" method="fedper" {LONG} rounds=4']
    process = subprocess.Popen(
        command, env=runner.env, cwd=ROOT, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)

    def began() -> bool:
        while select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 65536)
        return any(path.read_bytes().count(b"\n") > 0 for path in histories(runner.output))

    until(began, "no round")
    forks = children(process.pid)
    os.close(terminal)
    assert process.wait(PATIENCE) == (0 if ignored else 130)
    assert commands(forks) == {}
    (directory,) = runner.directories()
    assert (directory / "summary.json").exists() == ignored
    assert not (directory / "status.json").exists()


def test_a_worker_whose_server_has_ended_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer, and its line for the log, come to nobody."""
    near, far = Pipe()
    answered = []

    def answer(task: Task, *_: object) -> Answer:
        far.close()
        logging.getLogger("flwr").warning("a line")
        answered.append(task.number)
        return Answer(task.number, {}, None, 0.1)

    far.send_bytes(to_bytes(Batch([Task(number, 0, "train", "1", 60.0, {}, None) for number in (7, 8)])))
    monkeypatch.setattr("engine.worker._answer", answer)
    monkeypatch.setattr("engine.worker.enter_simulation", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
    plan: Any = SimpleNamespace(resources=SimpleNamespace(cpus=1, gpus=[[]]))
    work(near, plan, 0)
    assert answered[0] == 7


def is_computing(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def test_a_worker_that_is_killed_is_replaced_and_its_client_asked_again(
    local: Local, runner: Runner, tmp_path: Path
) -> None:
    whole = local.run(tmp_path / "whole", method="fedper", rounds=8, local_epochs=40)
    # A message that is lost is refused after a while, and so changes the history.
    process = runner.start('method="fedper" rounds=8 local-epochs=40 round-timeout=30')
    runner.until_round(1)
    # The server's process is the oldest of the three.
    killed = children(process.pid)[1:]
    assert len(killed) == 2
    # Between two rounds nobody is asked again.
    until(lambda: any(map(is_computing, killed)), "no worker computes")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    log: str = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, log
    assert "is asked again: its process ended (signal 9, out of memory?)" in log
    (disturbed,) = runner.directories()
    assert numbers(disturbed) == numbers(whole.directory)


def broken_app(folder: Path, line: str) -> Path:
    """Return a copy of the app in which client 1 does something else when it trains."""
    app = copy_app(folder / "app")
    file = app / "client_app" / "methods" / "local.py"
    body = (
        f"\n    def train(self) -> float:\n        import os, time\n\n"
        f"        if self.setting.name == '1':\n            {line}\n        return super().train()\n"
    )
    file.write_text(file.read_text() + body)
    return app


def test_a_client_whose_process_always_ends_is_refused_and_the_others_go_on(runner: Runner, tmp_path: Path) -> None:
    app = broken_app(tmp_path, "os.kill(os.getpid(), 9)")
    log = runner.run('method="local" rounds=2 local-epochs=1', 4, app)
    history = read_history(runner.directories()[0])
    assert [sorted(line["clients"]) for line in history] == [["0", "2", "3"]] * 2
    for line in history:
        (refused,) = line["refused"]
        assert refused["client"] == "1"
        assert "its process ended 3 times (signal 9, out of memory?)" in refused["reason"]
    assert log.count("Client 1 is asked again") == 4


def test_a_client_that_takes_too_long_is_ended_and_the_others_go_on(runner: Runner, tmp_path: Path) -> None:
    app = broken_app(tmp_path, "time.sleep(1000)")
    runner.run('method="local" rounds=3 local-epochs=1 round-timeout=3', 4, app)
    history = read_history(runner.directories()[0])
    assert [sorted(line["clients"]) for line in history] == [["0", "2", "3"]] * 3
    assert {r["reason"] for line in history for r in line["refused"]} == {"no answer within round-timeout = 3 s"}


def test_a_run_that_used_no_reply_ends_with_an_error(runner: Runner) -> None:
    log = runner.run('method="local" rounds=1 lr=1e12 momentum=0.0', code=2)
    assert "no reply of any round was used, so nothing was learned" in log.splitlines()[-1]
    assert (runner.directories()[0] / "report.html").is_file()


def test_what_killed_the_server_of_a_run_is_told(runner: Runner) -> None:
    process = runner.start(f"{LONG} rounds=50")
    runner.until_round(1)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    log: str = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 128 + signal.SIGKILL, log
    assert "The server's process was ended by signal 9, out of memory?" in log.splitlines()[-1]


def test_nothing_is_left_when_the_engine_is_killed(runner: Runner) -> None:
    process = runner.start(f"{LONG} rounds=50")
    runner.until_round(1)
    inside = children(process.pid)
    assert len(inside) == 3
    process.kill()
    process.wait(PATIENCE)
    until(lambda: commands(inside) == {}, "processes are left")


@pytest.mark.parametrize(
    ("run_config", "rest", "line"),
    [
        ('method="fedpr"', [], "method = 'fedpr': "),
        ("lr=0.0", [], "lr = 0.0: "),
        ('dataset="mnist"', [], "dataset mnist needs data-dir"),
        ("threads=2", [], "threads = 2: each client has 1 CPU(s)"),
        ('device="cuda"', [], "device = 'cuda': clients get no GPU; client-resources-num-gpus=0.25 in --federation-c"),
        ("", ["--federation-config", "num-supernodes=0"], "--federation-config num-supernodes=0: must be a whole"),
        ("", ["--federation-config", "supernodes=3"], "--federation-config supernodes: the local engine knows"),
        (
            "",
            ["--federation-config", "num-supernodes = 3"],
            "--federation-config 'num-supernodes = 3': 'num-supernodes'",
        ),
        ("", ["my-superlink"], "--engine local takes the app's folder"),
    ],
)
def test_what_cannot_run_ends_with_a_line(runner: Runner, run_config: str, rest: list[str], line: str) -> None:
    log = runner.run(run_config, 4, ROOT, *rest, code=2)
    assert line in log.splitlines()[-1]
    assert "Traceback" not in log


def test_a_log_that_goes_to_a_file_has_no_colours(runner: Runner) -> None:
    del runner.env["NO_COLOR"]
    log = runner.run('method="local" rounds=1 local-epochs=1')
    assert "INFO :      round 1/1 | " in log
    assert "\x1b" not in log


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_a_log_has_colours_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, coloured: bool
) -> None:
    (handler,) = (one for one in logging.getLogger("flwr").handlers if isinstance(one, ConsoleHandler))
    monkeypatch.setattr(handler, "colored", not coloured)
    monkeypatch.setattr(handler, "timestamps", False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    format_log()
    assert (handler.colored, handler.timestamps) == (coloured, False)
    format_log(times=True)
    assert (handler.colored, handler.timestamps) == (coloured, True)


def test_a_terminal_has_a_bar_and_the_log_above_it(runner: Runner) -> None:
    main, side = pty.openpty()
    command = [
        *(sys.executable, "-m", "cli.main", "run", str(ROOT), "--engine", "local", "--run-config"),
        f'output-dir="{runner.output}" method="fedper" fedprox.mu=0.1 rounds=3 {LONG}',
    ]
    process = subprocess.Popen(command, env=runner.env | {"TERM": "xterm"}, cwd=ROOT, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            shown += os.read(main, 65536)
        except OSError:  # so Linux tells the end
            break
    os.close(main)
    assert process.wait(PATIENCE) == 0
    text = shown.decode(errors="replace")
    assert re.search(r"round [123]/3, \d+ clients", text)
    assert "\x1b[" in text
    assert text.count("round 3/3 | accuracy before") == 1
    assert text.count("Report: ") == 1
    assert "floret: run config: fedprox.mu changes nothing: it needs method = 'fedprox'" in text


def test_a_resident_model_has_no_traces_of_the_client_before(tmp_path: Path) -> None:
    config = read_config(run_config(tmp_path, method="fedavg"))[0]
    made: list[Agreed] = []

    def make() -> Agreed:
        model = build_model("mlp", (1, 8, 8), 10, 1, torch.Generator())
        made.append(Agreed.of(Setup(config, None, model, 1, (1, 8, 8)), FedAvg))
        return made[-1]

    resident = Resident()
    model = resident.get(("one",), make).setup.model
    model(torch.ones(2, 1, 8, 8)).sum().backward()
    model.extractor.requires_grad_(False)
    again = resident.get(("one",), make).setup.model
    assert again is model
    assert all(parameter.requires_grad and parameter.grad is None for parameter in again.parameters())
    assert resident.get(("another",), make).setup.model is not model
    assert len(made) == 2


def test_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.resources.own_cpus", lambda: 8)
    monkeypatch.setattr("common.resources.count_gpus", lambda: 2)
    assert Resources.of([]) == Resources(10, 8, 1, ((),) * 8)
    assert Resources.of(["num-supernodes=3"]) == Resources(3, 3, 1, ((),) * 3)
    assert Resources.of(["num-supernodes=30 client-resources-num-cpus=3"]) == Resources(30, 2, 3, ((),) * 2)
    assert Resources.of(["init-args-num-cpus=2"]).workers == 2
    # A quarter of a GPU each: eight places on two, but CPUs for three.
    shared = Resources.of(["client-resources-num-gpus=0.25 init-args-num-cpus=3"])
    assert (shared.workers, shared.gpus) == (3, ((0,), (1,), (0,)))
    assert Resources.of(["client-resources-num-gpus=2"]).gpus == ((0, 1),)
    # Parts of a machine for several runs at a time.
    halves = [Resources.of(["num-supernodes=9 init-args-num-cpus=9"], (place, 2)).workers for place in (0, 1)]
    assert halves == [5, 4]
    quarters = [Resources.of(["client-resources-num-gpus=0.5"], (place, 2)).gpus for place in (0, 1)]
    assert quarters == [((0,), (0,)), ((1,), (1,))]
    for text, part, wrong in (
        ("client-resources-num-cpus=5", (0, 2), "num-cpus=5: 2 runs at once have 8 CPU"),
        ("init-args-num-cpus=2", (2, 3), "num-cpus=1: 3 runs at once have 2 CPU"),
        ("client-resources-num-gpus=1", (2, 3), "num-gpus=1: too much for each of 3 runs at once"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            Resources.of([text], part)
    for text, wrong in (
        ("client-resources-num-gpus=3", "this machine has 2"),
        ("client-resources-num-gpus=1.5", "above 1 it must be a whole number"),
        ("num-supernodes=2.5", "must be a whole number"),
        ("num-supernodes=many", "num-supernodes=many: must be a whole number, at least 1 and below 1000000"),
        ("num-supernodes=-1", "must be a whole number, at least 1"),
        ("num-supernodes=1000000", "must be a whole number, at least 1 and below 1000000"),
        ("num-supernode=3", r"num-supernode: the local engine knows .* \(did you mean 'num-supernodes'\?\)"),
        ("client-resources-num-cpus=0", "must be a whole number, at least 1"),
        ("client-resources-num-cpus=9", "client-resources-num-cpus=9: there are 8$"),
        ("client-resources-num-cpus=3 init-args-num-cpus=2", "client-resources-num-cpus=3: there are 2$"),
        ("num-supernodes=3 num-supernodes=4", "num-supernodes is there twice; give it once$"),
        ("init-args-num-cpus=-1", "must be a whole number, at least 0"),
        ("client-resources-num-gpus=nan", "gpus=nan: must be a number, at least 0"),
        ("verbose=true", "verbose: the local engine knows"),
        ("nonsense", "'nonsense' is not key=value, without blanks around the '='"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            Resources.of([text])


@pytest.mark.parametrize(("device", "gpus", "said"), [("auto", 1, True), ("auto", 0, False), ("cpu", 1, False)])
def test_a_gpu_that_no_client_gets_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    device: str,
    gpus: int,
    said: bool,
) -> None:
    monkeypatch.setattr("engine.supervisor.count_gpus", lambda: gpus)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.INFO, "flwr"):
        prepare(Plan.of(run_config(tmp_path, device=device), []))
    gc.unfreeze()
    assert ("Clients compute on CPUs and get no GPU of this machine" in caplog.text) == said


def test_data_are_read_once_for_all_processes(runner: Runner, tmp_path: Path) -> None:
    """The pool of a run is that of the process which forked the others: its pages are shared, not copied."""
    import numpy as np

    file = tmp_path / "pool.npz"
    x = np.random.default_rng(0).integers(0, 256, (40_000, 3, 32, 32), dtype=np.uint8)
    y = np.arange(len(x)) % 10
    np.savez(file, x_train=x[100:], y_train=y[100:], x_test=x[:100], y_test=y[:100])
    keys = f'dataset="npz" data-dir="{file}" partition="iid" method="local" rounds=30 batch-size=500'
    process = runner.start(keys, 10)
    runner.until_round(1)
    workers = children(process.pid)[1:]
    own = [private_bytes(pid) for pid in workers]
    # 123 MB of pool; a worker has one client's samples at a time, 12 MB, and what training takes.
    assert all(size < 100e6 for size in own), own
    assert len(histories(runner.output)) == 1


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


@pytest.mark.thorough
def test_a_start_imports_no_database_and_leaves_flower_whole() -> None:
    script = (
        "import sys\n"
        "from common.imports import quick_imports\n"
        "with quick_imports():\n    import engine.supervisor\n"
        "print(sorted({'alembic', 'datasets', 'pandas', 'sqlalchemy'} & {*sys.modules}))\n"
        "from flwr.supercore.object_store.sql_object_store import SqlObjectStore\n"
        "print(hasattr(SqlObjectStore, 'preregister'))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]
