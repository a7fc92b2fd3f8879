"""Real processes killed, stopped and spoilt in the middle of a run: the run ends, and nothing personal is lost."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_app.node.warm import Warm
from tests.deployment import Deployment, Process, children, finish, until
from tests.harness import ROOT, timeless

# Training that takes some seconds, so that there is a middle to be killed in.
LONG: dict[str, Any] = {"method": "fedper", "local_epochs": 400, "min_clients": 2}
SHORT: dict[str, Any] = {"method": "fedper", "local_epochs": 2, "min_clients": 2}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path / "deployment")
    try:
        yield deployment
    finally:
        deployment.end()


def commands(pids: list[int]) -> dict[int, str]:
    """Return the command lines of those processes that are there."""
    lines = subprocess.run(["ps", "-e", "-ww", "-o", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    table = {int(line.split()[0]): line.split(maxsplit=1)[1] for line in lines if "<defunct>" not in line}
    return {pid: table[pid] for pid in pids if pid in table}


def below(process: Process, part: str) -> list[int]:
    """Return the pids of the processes below ``process`` whose command has ``part``, parents first."""
    return [pid for pid, command in commands(children(process.popen.pid)).items() if part in command]


def in_round(node: Process, server_round: int) -> None:
    """Return while the node is training in this round."""
    node.wait_for(rf"ROUND {server_round}\]\s+INFO :\s+Receiving: train.*\n.*Received successfully", 90)
    # The warm process and the fork that has this message.
    until(lambda: len(below(node, "forkserver")) == 2, "no fork of the warm process", 30)


def refused(deployment: Deployment) -> list[tuple[int, str, str]]:
    return [(line["round"], r["client"], r["reason"]) for line in deployment.history() for r in line["refused"]]


def trained(deployment: Deployment) -> list[list[str]]:
    return [sorted(n for n, c in line["clients"].items() if c["trained"]) for line in deployment.history()]


def test_a_node_killed_in_mid_training_and_started_again(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    run = deployment.run(rounds=3, **LONG)
    in_round(a, 2)
    assert deployment.rounds_kept("a") == [1]
    below_a = children(a.popen.pid)
    a.kill()
    until(lambda: not commands(below_a), "a killed node leaves processes behind", 30)
    assert deployment.rounds_kept("a") == [1]
    deployment.node("a", "--partition", "0/2")
    log = finish(run)
    assert "Client a is back" in log
    assert "Client a was started again: its train message is sent again" in log
    assert trained(deployment) == [["a", "b"]] * 3
    assert refused(deployment) == []
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [2, 3]


def test_the_warm_process_killed_in_mid_training(deployment: Deployment) -> None:
    a, b = deployment.nodes(2)
    run = deployment.run(rounds=3, **LONG)
    in_round(a, 2)
    _, fork = below(a, "forkserver")
    os.kill(fork, signal.SIGKILL)
    a.wait_for(r"The client process did not answer: it was killed by signal 9", 30)
    in_round(b, 3)
    for pid in below(b, "forkserver"):  # the warm process, then its fork
        os.kill(pid, signal.SIGKILL)
    finish(run)
    assert trained(deployment) == [["a", "b"]] * 3
    assert refused(deployment) == []
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [2, 3]


def test_a_call_right_after_the_warm_process_was_killed() -> None:
    warm = Warm(datasets=False)
    for _ in range(2):
        assert warm.call("check", [], ("", "cpu"), 60, lambda: True) == b""
        (pid,) = (pid for pid, command in commands(children(os.getpid())).items() if "forkserver" in command)
        os.kill(pid, signal.SIGKILL)
        # Not waited for: the next call meets a process that is about to be gone.


def test_the_server_app_killed_and_the_run_resumed(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    deployment.run(rounds=4, **LONG)
    in_round(a, 3)
    (server_app,) = below(deployment.superlink, "flwr-serverapp")
    os.kill(server_app, signal.SIGKILL)
    until(lambda: not commands([server_app]), "the ServerApp is still there", 30)
    assert deployment.rounds_kept("a")[-1] in (2, 3)
    again = deployment.run(rounds=4, **LONG, resume="latest")
    log = finish(again)
    assert "after round 2" in log
    assert [line["round"] for line in deployment.history()] == [1, 2, 3, 4]
    assert trained(deployment) == [["a", "b"]] * 4
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [3, 4]


def test_the_superlink_killed_and_started_again_with_its_database(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    run = deployment.run(rounds=4, **LONG)
    in_round(a, 2)
    inside = children(deployment.superlink.popen.pid)
    deployment.superlink.kill()
    until(lambda: not commands(inside), "processes of the SuperLink are left", 30)
    run.end()
    deployment.start_superlink()
    log = finish(deployment.run(rounds=4, **LONG, resume="latest"), 200)
    assert "Resuming" in log
    assert trained(deployment) == [["a", "b"]] * 4
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [3, 4]


def test_a_node_that_hangs_past_the_timeout_is_gone_without_and_comes_back(deployment: Deployment) -> None:
    a, b = deployment.nodes(2)
    run = deployment.run(rounds=4, **LONG | {"local_epochs": 150}, round_timeout=15.0)
    in_round(a, 2)
    everything = [a.popen.pid, *children(a.popen.pid)]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for(r"round 2/4 .* 1 refused", 60)
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


def test_damaged_state_files_are_told_and_the_versions_before_them_used(deployment: Deployment) -> None:
    deployment.nodes(2)
    finish(deployment.run(rounds=3, **SHORT))
    newest = {name: max((deployment.folder / f"state-{name}").rglob("*.safetensors")) for name in "ab"}
    content = bytearray(newest["a"].read_bytes())
    newest["a"].write_bytes(content[: len(content) // 2])
    content = bytearray(newest["b"].read_bytes())
    content[-100] ^= 0x40
    newest["b"].write_bytes(content)
    log = finish(deployment.run(rounds=5, **SHORT, resume="latest"))
    assert refused(deployment) == []
    notes = [(line["round"], note["client"], note["note"]) for line in deployment.history() for note in line["notes"]]
    assert [note[:2] for note in notes] == [(4, "a"), (4, "a"), (4, "b"), (4, "b")]
    assert "bytes instead of" in notes[0][2]
    assert "its checksum is wrong" in notes[2][2]
    assert notes[1][2] == notes[3][2] == "went on from the client's state after round 2"
    assert notes[0][2] in log
    assert deployment.rounds_kept("a") == deployment.rounds_kept("b") == [4, 5]


def test_a_full_disk_costs_rounds_and_no_state(deployment: Deployment) -> None:
    a, _ = deployment.nodes(2)
    finish(deployment.run(rounds=2, **SHORT))
    a.end()
    before = {path: path.read_bytes() for path in (deployment.folder / "state-a").rglob("0*")}
    assert len(before) == 4
    size = max(len(content) for content in before.values())
    # Nothing that this node writes may become larger; its log is a new one.
    limit = (size // 2, size // 2)
    full = deployment.node(
        "a-full",
        *("--client-name", "a", "--partition", "0/2", "--state-dir", deployment.folder / "state-a"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    finish(deployment.run(rounds=4, **SHORT, resume="latest"))
    reasons = refused(deployment)
    assert {(r, client) for r, client, _ in reasons} == {(3, "a"), (4, "a")}
    assert all("cannot be written (File too large); the client's state is as it was" in text for _, _, text in reasons)
    assert trained(deployment) == [["a", "b"], ["a", "b"], ["b"], ["b"]]
    assert {path: path.read_bytes() for path in (deployment.folder / "state-a").rglob("0*")} == before
    full.end()
    deployment.node("a", "--partition", "0/2")
    finish(deployment.run(rounds=5, **SHORT, resume="latest"))
    assert trained(deployment)[4] == ["a", "b"]
    assert deployment.rounds_kept("a") == [2, 5]


def rogue(deployment: Deployment, name: str, faults: str, *arguments: str) -> Process:
    """Start a node that spoils its answers; see ``tests.rogue``."""
    process = Process(
        [
            *(sys.executable, "-m", "tests.rogue", "node", "--insecure", "--client-name", name, *arguments),
            *("--superlink", f"127.0.0.1:{deployment.fleet}", "--state-dir", deployment.folder / f"state-{name}"),
        ],
        deployment.folder / f"{name}.log",
        deployment.env | {"ROGUE": faults, "PYTHONPATH": str(ROOT)},
    )
    deployment.processes.append(process)
    process.wait_for("SuperNode ID", 90)
    return process


def test_spoilt_answers_are_refused_with_their_reason(deployment: Deployment) -> None:
    deployment.node("a", "--partition", "0/2")
    rogue(deployment, "b", "nan,shape,unknown,missing,negative,none", "--partition", "1/2")
    finish(deployment.run(rounds=6, **SHORT))
    tensor = "extractor.fc1.weight"
    assert refused(deployment) == [
        (1, "b", f"tensor {tensor} is not finite"),
        (2, "b", f"tensor {tensor} is float32 (128, 63), it must be float32 (128, 64)"),
        (3, "b", "tensor extra is unknown"),
        (4, "b", f"tensor {tensor} is missing"),
        (5, "b", "num-examples is -5, not a positive whole number"),
    ]
    assert trained(deployment) == [*[["a"]] * 5, ["a", "b"]]
    assert deployment.rounds_kept("a")[-1] == deployment.rounds_kept("b")[-1] == 6


def test_a_message_delivered_twice_counts_once(deployment: Deployment) -> None:
    deployment.node("a", "--partition", "0/2")
    rogue(deployment, "b", "twice", "--partition", "1/2")
    finish(deployment.run(rounds=3, **SHORT))
    twice = timeless(deployment.history())
    assert deployment.processes[2].text().count("Answered: train") == 3
    for name in "ab":
        deployment.processes[1 if name == "a" else 2].end()
    deployment.node("a", "--partition", "0/2")
    deployment.node("b", "--partition", "1/2")
    deployment.output = deployment.folder / "again"
    finish(deployment.run(rounds=3, **SHORT, federation="another"))
    assert timeless(deployment.history()) == twice


def test_two_nodes_under_one_client_name(deployment: Deployment) -> None:
    deployment.nodes(2)
    second = deployment.node("other", "--client-name", "a", "--partition", "0/2")
    run = deployment.run(rounds=4, **LONG)
    log = finish(run)
    assert "A client cannot take part: client-name a is taken: a node with another state directory has it" in log
    assert trained(deployment) == [["a", "b"]] * 4
    assert refused(deployment) == []
    # One of the two nodes has trained all along, the other never.
    states = [deployment.folder / f"state-{name}" / "default" / "fedper" / "a" for name in ("a", "other")]
    kept: list[list[Any]] = [
        [json.loads(path.read_text())["round"] for path in sorted(s.glob("*.json"))] for s in states
    ]
    assert sorted(kept) == [[], [3, 4]]
    assert second.popen.poll() is None
