"""Corrupt files and replies, a full disk, duplicate nodes: real processes end the run and lose no personal model."""

import json
import resource
import sys
from typing import Any

import pytest

from tests.deployment import LONG, SHORT, Deployment, Process, finish, refused, trained
from tests.harness import ROOT, timeless

pytestmark = pytest.mark.slow


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
    process.wait_for("SuperNode ID")
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
    assert sorted(kept) == [[], [1, 2, 3, 4]]
    assert second.popen.poll() is None
