"""Real processes killed or stopped in the middle of a run: the run ends, and no personal model is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from client_app.node.warm import Warm
from tests.conftest import PATIENCE, free_port
from tests.deployment import LONG, Deployment, below, children, commands, finish, in_round, refused, trained, until
from tests.harness import ROOT


@pytest.mark.slow
def test_a_node_killed_in_mid_training_and_started_again(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    run = deployment.run(rounds=3, **LONG)
    in_round(a, 2)
    assert deployment.rounds_kept("a") == [1]
    below_a = children(a.popen.pid)
    a.kill()
    until(lambda: not commands(below_a), "a killed node leaves processes behind")
    assert deployment.rounds_kept("a") == [1]
    deployment.node("a", "--partition", "0/2")
    log = finish(run)
    assert "Client a is back" in log
    assert "Client a was started again: its train message is sent again" in log
    assert trained(deployment) == [["a", "b"]] * 3
    assert refused(deployment) == []
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [2, 3]


@pytest.mark.slow
def test_the_warm_process_killed_in_mid_training(deployment: Deployment) -> None:
    a, b = deployment.nodes(2)
    run = deployment.run(rounds=3, **LONG)
    in_round(a, 2)
    _, fork = below(a.popen.pid, "forkserver")
    os.kill(fork, signal.SIGKILL)
    a.wait_for(r"The client process did not answer: it was killed by signal 9")
    in_round(b, 3)
    for pid in below(b.popen.pid, "forkserver"):  # the warm process, then its fork
        os.kill(pid, signal.SIGKILL)
    finish(run)
    assert trained(deployment) == [["a", "b"]] * 3
    assert refused(deployment) == []
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [2, 3]


@pytest.mark.thorough
def test_a_call_right_after_the_warm_process_was_killed() -> None:
    warm = Warm(datasets=False)
    for _ in range(2):
        assert warm.call("check", [], ("", "cpu", ""), 60, lambda: True) == b""
        (pid,) = below(os.getpid(), "forkserver")
        os.kill(pid, signal.SIGKILL)
        # Not waited for: the next call meets a process that is about to be gone.


@pytest.mark.thorough
def test_a_warm_process_rests_until_the_next_call() -> None:
    def warm_processes() -> list[int]:
        return below(os.getpid(), "forkserver")

    warm = Warm(datasets=False)
    warm.rest()  # there is none
    assert warm_processes() == []
    for _ in range(2):
        assert warm.call("check", [], ("", "cpu", ""), 60, lambda: True) == b""
        assert len(warm_processes()) == 1
        warm.rest()
        until(lambda: not warm_processes(), "the warm process is still there")
        warm.rest()  # twice is once


# A node's supervisor that is interrupted while its warm process is imported.
_INTERRUPTED = """
import signal, threading
from client_app.node.warm import LostError, Warm

stopped = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stopped.set())
try:
    Warm(datasets=False).call("check", [], ("", "cpu", ""), 60, lambda: not stopped.is_set())
except LostError as error:
    print(error)
"""


@pytest.mark.thorough
def test_an_interrupt_while_the_warm_process_is_imported_ends_in_silence() -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def imports_pytorch() -> bool:
        maps = (Path(f"/proc/{pid}/maps") for pid in below(node.pid, "forkserver"))
        return any(file.exists() and "libtorch" in file.read_text() for file in maps)

    until(imports_pytorch, "no warm process")
    os.killpg(node.pid, signal.SIGINT)  # as a terminal does
    out, err = node.communicate(timeout=PATIENCE)
    assert (node.returncode, err) == (0, "")
    assert out in ("", "the node is stopping\n")  # it may have answered first


# A ``floret node`` as it is just after it has started its SuperNode, whose id it prints.
_STARTED = """
import sys, time
from pathlib import Path
from client_app.node.options import NodeOptions
from client_app.node.supervisor import Node

options = NodeOptions(
    host="127.0.0.1", port=int(sys.argv[1]), insecure=True, root_certificates=None, key=None, client_name="a",
    data_dir=None, partition=(0, 2), state_dir=Path(sys.argv[2]), device=None, max_wait=None, health_address=None,
)
with Node(options)._started(int(sys.argv[3])) as supernode:
    print(supernode.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.thorough
def test_a_node_killed_before_its_supernode_has_imported_anything(tmp_path: Path) -> None:
    arguments = [str(free_port()), str(tmp_path), str(free_port())]
    node = subprocess.Popen(
        [sys.executable, "-c", _STARTED, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert node.stdout
    supernode = int(node.stdout.readline())
    try:
        node.kill()
        node.wait(30)
        deadline = time.monotonic() + 60
        while commands([supernode]):
            assert time.monotonic() < deadline, "the SuperNode is still there"
            time.sleep(0.2)
    finally:
        if commands([supernode]):
            os.kill(supernode, signal.SIGKILL)


@pytest.mark.slow
def test_the_server_app_killed_and_the_run_resumed(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    deployment.run(rounds=4, **LONG)
    in_round(a, 3)
    (server_app,) = below(deployment.superlink.popen.pid, "flwr-serverapp")
    os.kill(server_app, signal.SIGKILL)
    until(lambda: not commands([server_app]), "the ServerApp is still there")
    assert deployment.rounds_kept("a")[-1] in (2, 3)
    again = deployment.run(rounds=4, **LONG, resume="latest")
    log = finish(again)
    assert "after round 2" in log
    assert [line["round"] for line in deployment.history()] == [1, 2, 3, 4]
    assert trained(deployment) == [["a", "b"]] * 4
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [3, 4]


@pytest.mark.slow
def test_a_node_that_is_gone_for_good_is_waited_for_as_long_as_the_config_says(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    run = deployment.run(rounds=2, **LONG, return_timeout=1.0)
    in_round(a, 1)
    a.kill()
    log = finish(run)
    assert "Client a refused: Error: Node Unavailable" in log
    assert trained(deployment) == [["b"]] * 2
    ((_, client, reason),) = refused(deployment)
    assert client == "a"
    assert "Node Unavailable" in reason


@pytest.mark.slow
def test_the_superlink_killed_and_started_again_with_its_database(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    run = deployment.run(rounds=4, **LONG)
    in_round(a, 2)
    inside = children(deployment.superlink.popen.pid)
    deployment.superlink.kill()
    until(lambda: not commands(inside), "processes of the SuperLink are left")
    run.end()
    deployment.start_superlink()
    log = finish(deployment.run(rounds=4, **LONG, resume="latest"))
    assert "Resuming" in log
    assert trained(deployment) == [["a", "b"]] * 4
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [3, 4]


@pytest.mark.slow
def test_a_node_that_hangs_past_the_timeout_is_gone_without_and_comes_back(deployment: Deployment) -> None:
    a, b = deployment.nodes(2)
    run = deployment.run(rounds=4, **LONG | {"local_epochs": 150}, round_timeout=15.0)
    in_round(a, 2)
    everything = [a.popen.pid, *children(a.popen.pid)]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for(r"round 2/4 .* 1 refused")
    finally:
        for pid in everything:
            os.kill(pid, signal.SIGCONT)
    finish(run)
    reasons = refused(deployment)
    assert (2, "a", "no answer within round-timeout = 15 s") in reasons
    assert {client for _, client, _ in reasons} == {"a"}
    assert trained(deployment)[3] == ["a", "b"]
    assert deployment.rounds_kept("a")[-1] == 4
    assert b.popen.poll() is None
