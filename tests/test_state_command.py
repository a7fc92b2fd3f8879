"""``floret state``: what a device keeps is listed as it is, and an older version is used again when it is restored."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import main as command
from client_app.inventory import remove, remove_unused, shelves
from client_app.serving import find_personal, load_personal
from client_app.state import ClientState, FileStore
from common.durable import claim_client
from common.errors import FloretError
from tests.conftest import PATIENCE
from tests.harness import ROOT, federate

Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def floret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``floret state``; return its exit code and its lines."""

    def call(*arguments: object) -> tuple[int, list[str]]:
        monkeypatch.setattr("sys.argv", ["floret", "state", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), (said.out + said.err).splitlines()

    return call


KEYS: dict[str, Any] = {"method": "fedper", "local_epochs": 1, "participation": 1.0}


def test_an_older_version_is_found_and_used_again(floret: Command, tmp_path: Path) -> None:
    states = tmp_path / "states"
    federate(tmp_path / "runs", 1, states=states, rounds=3, **KEYS)
    good = ClientState(find_personal(states, "default", "fedper", "0")).load()
    federate(tmp_path / "runs", 1, states=states, rounds=2, lr=0.5, **KEYS)
    bad = ClientState(find_personal(states, "default", "fedper", "0")).load()
    assert not torch.equal(good["model.head.weight"], bad["model.head.weight"])

    code, lines = floret("list", "--state-dir", states)
    assert code == 0
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        *("federation", "method", "client", "version", "run", "round", "when", "bytes")
    ]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[1:]]
    assert [(row[0], row[1], row[2], row[3], row[5], row[8]) for row in rows] == [
        ("default", "fedper", "0", "5", "2", "intact, in use"),
        ("default", "fedper", "0", "4", "1", "intact"),
        ("default", "fedper", "0", "3", "3", "intact"),
        ("default", "fedper", "0", "2", "2", "intact"),  # what the server of that run could go back to
        ("default", "fedper", "0", "1", "1", "intact"),  # its first milestone
    ]
    assert rows[0][4] == rows[1][4] != rows[2][4]

    # While a node runs on it, nothing changes.
    before = sorted(path.name for path in (states / "default/fedper/0").iterdir())
    with claim_client(states, "0"):
        code, lines = floret("restore", 3, "--state-dir", states)
        assert (code, lines) == (2, [f"floret: a node of client 0 is running on {states}; stop it first"])
    with FileStore.at(states, "default", "fedper", "0", sync=True).claim():
        code, lines = floret("restore", 3, "--state-dir", states)
        assert code == 2
        assert "is in use by another process" in lines[0]
    assert sorted(path.name for path in (states / "default/fedper/0").iterdir()) == before

    code, lines = floret("restore", 3, "--state-dir", states)
    assert lines == ["client 0 in federation default, fedper: version 3, of round 3, is in use again, as version 6"]
    assert code == 0
    left = {path.name for path in (states / "default/fedper/0").iterdir()}
    assert left == {*before, "00000006.json", "00000006.safetensors"}
    personal = load_personal(find_personal(states, "default", None, None))
    assert (personal.round, personal.notes) == (3, ())
    again = ClientState(find_personal(states, "default", "fedper", "0")).load()
    assert all(torch.equal(good[name], again[name]) for name in good)

    # The next run goes on from it: as if the second one had not been.
    after = federate(tmp_path / "runs", 1, states=states, rounds=1, **KEYS)
    undisturbed = tmp_path / "undisturbed"
    federate(tmp_path / "others", 1, states=undisturbed, rounds=3, **KEYS)
    expected = federate(tmp_path / "others", 1, states=undisturbed, rounds=1, **KEYS)
    assert after.summary["accuracy"] == expected.summary["accuracy"]


def test_what_cannot_be_restored_says_why(floret: Command, tmp_path: Path) -> None:
    states = tmp_path / "states"
    missing = (
        f"floret: --state-dir {states}: is not there, so no node has kept anything in it; name that of floret node"
    )
    assert floret("list", "--state-dir", states) == (2, [missing])
    states.touch()
    nowhere = f"floret: --state-dir {states}: is no directory; name that of floret node"
    assert floret("list", "--state-dir", states) == (2, [nowhere])
    states.unlink()
    states.mkdir()
    nothing = f"floret: {states}: no client has a state here yet; see --state-dir"
    assert floret("list", "--state-dir", states) == (2, [nothing])
    federate(tmp_path / "runs", 2, states=states, rounds=2, **KEYS)
    folder = states / "default/fedper/0"
    (folder / "00000002.json").write_bytes(b'{"round": "\xff"}')

    code, lines = floret("list", "--state-dir", states)
    assert code == 0
    assert len(lines) == 5
    assert "is damaged: it is not a complete manifest" in lines[1]
    assert lines[2].endswith("intact, in use")
    code, lines = floret("list", "--state-dir", states, "--client-name", 1)
    assert len(lines) == 3

    for arguments, line in (
        ((9,), "version 9: there is none; see floret state list"),
        ((1,), "version 1: several have one (client 0 in federation default, fedper; client 1 in federation default"),
        ((2, "--client-name", 0), f"version 2 cannot be restored: {folder}/00000002.json is damaged"),
        ((1, "--client-name", 0), "version 1 of client 0 in federation default, fedper is in use already"),
        ((1, "--client-name", 7), "--client-name '7': must be one of 0, 1"),
        ((1, "--method", "fedavg"), "--method 'fedavg': must be one of fedper"),
        ((0,), "Invalid value for 'VERSION': 0 is not in the range x>=1."),
        (("abc",), "Invalid value for 'VERSION': 'abc' is not a valid integer."),
    ):
        code, lines = floret("restore", *arguments, "--state-dir", states)
        assert code == 2
        assert lines[0].startswith(f"floret: {line}")


@pytest.mark.parametrize(
    ("answer", "terminal", "ends", "line"),
    [
        ("n\n", True, 0, "nothing was deleted"),
        ("", False, 2, "floret: nothing was deleted: nobody answers here; --yes does not ask"),
        ("", True, 130, "floret: interrupted"),
        ("y\n", False, 0, "deleted: "),
    ],
)
def test_what_is_removed_is_asked_for(
    floret: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, terminal: bool, ends: int, line: str
) -> None:
    class Input(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    folder = tmp_path / "states/default/fedper/0"
    federate(tmp_path / "runs", 1, states=tmp_path / "states", rounds=1, **KEYS)
    monkeypatch.setattr("sys.stdin", Input(answer))
    code, lines = floret("remove", "--state-dir", tmp_path / "states", "--federation", "default")
    assert code == ends
    assert line in lines[-1]
    assert folder.is_dir() == (answer != "y\n")


def with_version(tmp_path: Path) -> FileStore:
    store = FileStore.at(tmp_path, "f", "fedper", "a", sync=True)
    with store.claim():
        ClientState(store).commit(1, {"model.w": torch.ones(2)})
    return store


def test_what_a_node_keeps_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, released = with_version(tmp_path), FileStore.claim

    @contextmanager
    def claim(self: FileStore) -> Iterator[None]:
        with released(self):
            yield
        with released(store):  # a node that starts just then
            ClientState(store).commit(1, {"model.w": torch.zeros(2)})

    monkeypatch.setattr(FileStore, "claim", claim)
    remove(list(shelves(tmp_path, "f", None, None)), tmp_path)
    assert ClientState(store).load()["model.w"].tolist() == [0, 0]


def test_a_folder_that_gets_a_version_meanwhile_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, free = FileStore.at(tmp_path, "f", "fedper", "a", sync=True), FileStore.claim
    with store.claim():
        pass

    @contextmanager
    def claim(self: FileStore) -> Iterator[None]:
        with free(self):
            ClientState(store).commit(1, {"model.w": torch.ones(2)})  # by a node that had it just before
            yield

    monkeypatch.setattr(FileStore, "claim", claim)
    assert not remove_unused(tmp_path)
    assert ClientState(store).load()["model.w"].tolist() == [1, 1]
    monkeypatch.undo()
    assert not remove_unused(tmp_path)
    with FileStore.at(tmp_path, "f", "fedper", "b", sync=True).claim():
        pass
    assert remove_unused(tmp_path)
    assert [path.name for path in (tmp_path / "f/fedper").iterdir()] == ["a"]


def test_what_cannot_be_removed_is_told_and_what_is_not_florets_stays(tmp_path: Path) -> None:
    store = with_version(tmp_path)
    (store.directory / "notes.txt").write_text("mine")
    odd = store.directory / "00000009.json"
    odd.mkdir()
    with pytest.raises(FloretError, match=rf"^{odd}: cannot be removed \("):
        remove(list(shelves(tmp_path, "f", None, None)), tmp_path)
    odd.rmdir()
    with_version(tmp_path)
    remove(list(shelves(tmp_path, "f", None, None)), tmp_path)
    assert [path.name for path in store.directory.iterdir()] == ["notes.txt"]


@pytest.mark.thorough
def test_the_default_is_the_nodes_own(tmp_path: Path) -> None:
    federate(tmp_path / "runs", 1, states=tmp_path / "state", rounds=1, **KEYS)
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "state", "list"],
        env=os.environ | {"FLORET_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
