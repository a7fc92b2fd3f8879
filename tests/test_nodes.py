"""Real nodes: their data and options, their error messages, and what they send."""

import contextlib
import http.server
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import pytest
from flwr.app import Message
from flwr.proto.appio_pb2 import ClaimTaskResponse, PullPendingTasksResponse
from flwr.proto.task_pb2 import Task
from PIL import Image
from safetensors.numpy import load_file

from cli import main as command
from client_app.node import preflight, tasks, transport
from client_app.node.preflight import UnreachableError, check_connection, check_health_address
from client_app.node.supervisor import Node
from client_app.node.transport import WRONG_VERSION, Reason
from common.config import RunConfig, read_keys
from common.errors import FloretError
from data import ClientData, load_own
from tests.conftest import PATIENCE, free_port
from tests.deployment import BIN, Deployment, Process, children, commands, finish, node_options, until
from tests.harness import ROOT, copy_app, federate, run_config, timeless
from tests.test_data_paths import NOBODY, forbidden

NAMES = ("north", "east", "south", "west")


def draw(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return grey images, uint8 (n, 16, 16), whose bright quarter is their class, and the labels, in a random order."""
    generator = np.random.default_rng(seed)
    y = generator.permutation(np.arange(n) % 4)
    x = generator.integers(0, 150, (n, 16, 16))
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 2)
        image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 60
    return x.astype(np.uint8), y


def make_files(folder: Path, seed: int) -> Path:
    """Write a node's own data as npz files."""
    folder.mkdir()
    for part, n in (("train", 120), ("test", 40)):
        x, y = draw(seed + (part == "test"), n)
        np.savez(folder / f"{part}.npz", x=x, y=y)
    return folder


def make_pictures(folder: Path, seed: int) -> Path:
    """Write a node's own data as images in class folders."""
    for part, n in (("train", 120), ("test", 40)):
        for i, (image, label) in enumerate(zip(*draw(seed + (part == "test"), n), strict=True)):
            place = folder / part / NAMES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{i}.png")
    return folder


class Proxy:
    """Stands between a node and the SuperLink and takes down what passes; ``pause`` holds it up until ``go_on``."""

    def __init__(self, target: int) -> None:
        self.up: list[bytearray] = []
        self.down: list[bytearray] = []
        self._flows = threading.Event()
        self._flows.set()
        self._most: dict[bool, float] = {}
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", target)) as server:
                    ways = [(self.request, server, proxy.up), (server, self.request, proxy.down)]
                    threads = [threading.Thread(target=proxy._carry, args=way, daemon=True) for way in ways]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, record: list[bytearray]) -> None:
        taken = bytearray()
        record.append(taken)
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                self._flows.wait(PATIENCE)
                taken += content
                sink.sendall(content)
                if sum(map(len, record)) > self._most.get(record is self.up, float("inf")):
                    self.pause()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pause(self) -> None:
        self._flows.clear()

    def pause_after(self, more: int, *, up: bool = False) -> None:
        """Pause when the node has received, or sent, so many bytes more."""
        self._most = {up: sum(map(len, self.up if up else self.down)) + more}

    def held_up(self) -> bool:
        return not self._flows.is_set()

    def go_on(self) -> None:
        self._most = {}
        self._flows.set()

    def mark(self) -> list[int]:
        """Return how much was sent so far, to be given to ``raw`` and ``sent`` for what came later."""
        return [len(connection) for connection in self.up]

    def raw(self, since: Sequence[int] = ()) -> bytes:
        """Return what the node sent, as it was on the wire."""
        return b"".join(bytes(connection[mark:]) for connection, mark in self._marked(since))

    def sent(self, since: Sequence[int] = ()) -> bytes:
        """Return what the node sent in gRPC messages: the payload of HTTP/2's DATA frames, stream by stream."""
        found = (payloads(bytes(connection), mark) for connection, mark in self._marked(since))
        return b"".join(itertools.chain.from_iterable(found))

    def _marked(self, since: Sequence[int]) -> Iterator[tuple[bytearray, int]]:
        return zip(self.up, itertools.chain(since, itertools.repeat(0)), strict=False)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def payloads(content: bytes, since: int) -> list[bytes]:
    """Return the data of each stream of what an HTTP/2 client sent, of frames that begin at ``since`` or later.

    gRPC compresses nothing unless it is told to.
    """
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    if not content.startswith(preface):
        return []
    streams: dict[int, bytearray] = {}
    place = len(preface)
    while place + 9 <= len(content):
        length, kind = int.from_bytes(content[place : place + 3]), content[place + 3]
        stream = int.from_bytes(content[place + 5 : place + 9])
        if kind == 0 and place >= since:
            streams.setdefault(stream, bytearray()).extend(content[place + 9 : place + 9 + length])
        place += 9 + length
    return [bytes(stream) for stream in streams.values()]


def occurs(array: np.ndarray, content: bytes, piece: int = 256) -> bool:
    """Return whether the bytes of an array, or a long piece of them, are in ``content``."""
    whole = np.ascontiguousarray(array).tobytes()
    pieces = [whole[i : i + piece] for i in range(0, len(whole), piece) if len(whole) - i >= min(piece, len(whole))]
    assert pieces
    assert all(len(set(part)) > 3 for part in pieces)  # anything less may be somewhere by chance
    return any(part in content for part in pieces)


def own_data(folder: Path, name: str, **keys: Any) -> ClientData:
    """Return a node's data as its ClientApp reads them in a run with these keys."""
    return load_own(folder, read_keys(RunConfig, run_config(folder, **keys)), name)


@dataclass
class Floret:
    """The command ``floret`` in an environment, each call bounded."""

    env: dict[str, str]
    folder: Path

    def __call__(self, *arguments: str | Path, code: int = 0) -> tuple[str, str]:
        """Return what it prints on stdout and on stderr."""
        done = subprocess.run(
            [BIN / "floret", *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def fail(self, *calls: Sequence[str | Path]) -> list[str]:
        """Return the line with which each of these calls ends, which go side by side.

        The exit code is 2, and before the line there is nothing but the log.
        """
        started = [
            subprocess.Popen(
                [str(BIN / "floret"), *map(str, arguments)],
                env=self.env,
                cwd=self.folder,
                stderr=subprocess.PIPE,
                text=True,
            )
            for arguments in calls
        ]
        lines = []
        try:
            for process in started:
                _, err = process.communicate(timeout=PATIENCE)
                assert process.returncode == 2, err
                assert "Traceback" not in err
                assert "StatusCode" not in err
                *log, last = err.splitlines()
                assert all("floret: " not in line for line in log)
                assert last.startswith("floret: ")
                lines.append(last.removeprefix("floret: "))
        finally:
            for process in started:
                process.kill()
                process.wait(10)
        return lines


@dataclass
class Plain:
    """A SuperLink without TLS, a proxy in front of it, and data for nodes."""

    deployment: Deployment
    proxy: Proxy
    files: Path
    pictures: Path
    late: Path
    floret: Floret
    marks: dict[str, Any] = field(default_factory=dict)

    def finished(self, run: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return history and summary of the run in the output folder of this name."""
        (directory,) = (self.deployment.folder / run).iterdir()
        history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
        return history, json.loads((directory / "summary.json").read_text())

    def rounds(self, run: str) -> int:
        """Return how many rounds the run has finished."""
        paths = list((self.deployment.folder / run).glob("*/history.jsonl"))
        return len(paths[0].read_text().splitlines()) if paths else 0

    def state(self, name: str, method: str) -> list[dict[str, np.ndarray]]:
        """Return the tensors of every version that a client keeps, oldest first."""
        folder = self.deployment.folder / f"state-{name}" / "default" / method / name
        return [load_file(path) for path in sorted(folder.glob("*.safetensors"))]


KEYS: dict[str, Any] = {"model": "cnn2", "class_names": ",".join(NAMES), "local_epochs": 2, "lr": 0.02}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain")
    deployment = Deployment(folder / "dep")
    proxy = Proxy(deployment.fleet)
    try:
        yield Plain(
            deployment,
            proxy,
            make_files(folder / "files", 1),
            make_pictures(folder / "pictures", 11),
            make_files(folder / "late", 21),
            Floret(deployment.env, folder),
        )
    finally:
        proxy.go_on()
        deployment.end()
        proxy.close()


@pytest.fixture(scope="module")
def fedper(plain: Plain) -> Plain:
    """A run of FedPer: a node with npz files behind the proxy, one with images, and a third from the middle on."""
    dep = plain.deployment
    join = ("--superlink", f"127.0.0.1:{plain.proxy.port}")
    files = dep.node("files", "--data-dir", plain.files, *join, wait=False)
    pictures = dep.node("pictures", "--data-dir", plain.pictures, wait=False)
    for node in (files, pictures):
        node.wait_for("SuperNode ID")
    run = dep.run(method="fedper", rounds=9, min_clients=2, output_dir=str(dep.folder / "fedper"), **KEYS)
    until(lambda: plain.rounds("fedper") >= 2 or run.popen.poll() is not None, "two rounds")
    # The round that is going on now lasts until the third node is there, however slow it is to start.
    plain.proxy.pause()
    try:
        late = dep.node("late", "--data-dir", plain.late)
        late.wait_for("Answered: query.describe")
    finally:
        plain.proxy.go_on()
    finish(run)
    for node in (pictures, late):
        node.end()
    return plain


@pytest.mark.quick
def test_real_nodes_give_the_numbers_of_the_other_ways(deployment: Deployment, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "pfps-lwc", "rounds": 3, "local_epochs": 1, "min_clients": 2}
    nodes = [deployment.node(name, "--partition", f"{name}/2", wait=False) for name in ("0", "1")]
    finish(deployment.run(**keys))
    here = federate(tmp_path / "here", 2, **keys)
    # Their logs go to files: they have times, and no codes of colours.
    logs = [node.log.read_text() for node in nodes]
    answered = re.compile(r"^INFO 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}: +Answered: train message", re.MULTILINE)
    assert all(answered.search(text) and "\x1b" not in text for text in logs)
    assert not any(re.search(r"^[A-Z]+ +:", text, re.MULTILINE) for text in logs)
    assert timeless(deployment.history()) == timeless(here.history)
    for name in ("0", "1"):
        assert deployment.rounds_kept(name, "pfps-lwc") == [2, 3]


@pytest.mark.slow
def test_nodes_with_their_own_files_and_images(fedper: Plain, tmp_path: Path) -> None:
    history, summary = fedper.finished("fedper")
    assert [line["round"] for line in history] == list(range(1, 10))
    assert all(line["refused"] == [] for line in history)
    assert {"files", "pictures"} <= history[0]["clients"].keys()
    assert summary["dataset"] == summary["partition"] == "each client's own data"
    reported = {name: entry["after"]["test"] for name, entry in history[-1]["clients"].items()}
    assert min(reported.values()) > 0.5

    for name, folder in (("files", fedper.files), ("pictures", fedper.pictures)):
        test = own_data(folder, name, **KEYS).test
        np.savez(tmp_path / f"{name}.npz", x=test.x.numpy(), y=test.y.numpy())
        state = fedper.deployment.folder / f"state-{name}"
        out, err = fedper.floret("predict", "--state-dir", state, "--input", tmp_path / f"{name}.npz")
        said = re.fullmatch(r"accuracy [\d.]+: (\d+) of (\d+)\n", err)
        assert said, err
        assert int(said[2]) == 40
        assert int(said[1]) / int(said[2]) == reported[name]
        assert out.splitlines()[0] == "input,class," + ",".join(f"score {label}" for label in NAMES)


def test_a_client_that_comes_in_the_middle_of_a_run(fedper: Plain) -> None:
    history, _ = fedper.finished("fedper")
    first = next(line["round"] for line in history if "late" in line["clients"])
    assert 3 <= first <= 8
    for line in history:
        assert ("late" in line["clients"]) == (line["round"] >= first)
    entries = [line["clients"]["late"] for line in history[first - 1 :]]
    assert all(entry["trained"] for entry in entries)
    # It begins with the extractor of the others: after one round it is no less far than they were after one.
    assert entries[0]["after"]["test"] >= history[0]["clients"]["files"]["after"]["test"]
    assert entries[-1]["after"]["test"] > 0.5
    assert fedper.deployment.rounds_kept("late")[-1] == 9
    (directory,) = (fedper.deployment.folder / "fedper").iterdir()
    clients = json.loads((directory / "config.json").read_text())["clients"]
    assert clients["late"]["samples"] == {"train": 108, "validation": 12, "test": 40}
    assert clients["late"]["labels"] is None


def never_sent(plain: Plain, content: bytes, private: list[np.ndarray], **keys: Any) -> None:
    """Check that neither private tensors nor anything of the node's data or paths is in ``content``."""
    assert private
    for array in private:
        assert not occurs(array, content)
    data = own_data(plain.files, "files", **KEYS | keys)
    images = [image for split in (data.train, data.validation, data.test) for image in split.x.numpy()]
    assert len(images) == 160
    for image in images:
        assert not occurs(image, content, 64)
        assert not occurs(image.astype(np.float32) / np.float32(127.5) - np.float32(1), content)
    stored = [np.load(plain.files / f"{part}.npz")["y"] for part in ("train", "test")]
    for labels in (*stored, *(split.y.numpy() for split in (data.train, data.validation, data.test))):
        for kind in (np.int64, np.int32, np.uint8, np.float32):
            assert labels.astype(kind).tobytes() not in content
    for path in (plain.files, plain.deployment.folder, ROOT):
        assert str(path).encode() not in content


def test_what_fedper_keeps_private_never_leaves_the_node(fedper: Plain) -> None:
    content = fedper.proxy.sent()
    versions = fedper.state("files", "fedper")
    assert len(versions) == 5  # after 1, 2, 4, 8 and 9 rounds
    # What is shared is found, whole: so what is private would be.
    shared = {name: array for name, array in versions[-1].items() if name.startswith("model.extractor.")}
    assert max(array.nbytes for array in shared.values()) > 100_000
    for array in shared.values():
        assert array.tobytes() in content
    assert b"files" in content
    private = [array for tensors in versions for name, array in tensors.items() if name.startswith("model.head.")]
    assert sorted(array.shape for array in private) == [*[(4,)] * 5, *[(4, 512)] * 5]
    never_sent(fedper, content + fedper.proxy.raw(), private)


@pytest.mark.slow
def test_a_run_that_ends_while_a_node_receives_a_message(plain: Plain) -> None:
    dep = plain.deployment
    proxy = Proxy(dep.fleet)  # of this node alone: others take part in its runs, too
    join = ("--superlink", f"127.0.0.1:{proxy.port}")
    node = dep.node("receiver", "--data-dir", plain.files, *join)
    keys: dict[str, Any] = {"method": "fedavg", "min_clients": 1, "output_dir": str(dep.folder / "receiver"), **KEYS}

    def started_and_held_up() -> Process:
        """Start a run, and hold the node up in the middle of a message to train."""
        since = len(node.text())
        run = dep.run(**keys | {"model": "resnet18"})
        node.wait_for("Answered: query.describe", since=since)
        hold_up_in_training(node, proxy)
        return run

    try:
        run, since = started_and_held_up(), len(node.text())
        stop(dep, run)
        proxy.go_on()
        node.wait_for("A message was not received: its run ended meanwhile", since=since)
        finish(dep.run(rounds=1, **keys))

        # It ends, too, while parts of a message are still to come.
        run = started_and_held_up()
        node.popen.terminate()
        assert node.popen.wait(60) == 0
        stop(dep, run)
    finally:
        proxy.go_on()
        proxy.close()
    assert "Traceback" not in node.text()


def stop(deployment: Deployment, run: Process) -> None:
    """Stop a run as a user does."""
    started = re.search(r"Successfully started run (\d+)", run.text())
    assert started, run.text()
    command = [str(BIN / "flwr"), "stop", started[1], "dep"]
    subprocess.run(command, env=deployment.env, capture_output=True, check=True, timeout=PATIENCE)


def hold_up_in_training(node: Process, proxy: Proxy) -> None:
    """Return when a node has claimed its next message to train, of a large model, and got a megabyte of it."""
    proxy.pause_after(1_000_000)
    until(proxy.held_up, "a message of some megabytes")

    def receiving() -> bool:
        """Whether it has begun with a message, which may have been on its way before the pause, and not ended."""
        _, begun, rest = node.text().rpartition("Receiving: train message")
        return bool(begun) and "Received successfully" not in rest

    until(receiving, "a message to train that is being received")
    time.sleep(10 * tasks._IDLE)  # by then it has claimed it, which no log says, on a busy machine, too


@pytest.fixture
def proxy(deployment: Deployment) -> Iterator[Proxy]:
    """A proxy before the SuperLink of ``deployment``."""
    proxy = Proxy(deployment.fleet)
    try:
        yield proxy
    finally:
        proxy.go_on()
        proxy.close()


@pytest.mark.slow
def test_a_superlink_killed_while_a_node_receives_a_message(
    deployment: Deployment, proxy: Proxy, tmp_path: Path
) -> None:
    join = ("--superlink", f"127.0.0.1:{proxy.port}")
    node = deployment.node("a", "--data-dir", make_files(tmp_path / "data", 1), *join)
    keys = KEYS | {"method": "fedper", "model": "resnet18", "min_clients": 1, "rounds": 3}
    run = deployment.run(**keys)
    run.wait_for("round 1/3")
    hold_up_in_training(node, proxy)
    inside = children(deployment.superlink.popen.pid)
    deployment.superlink.kill()
    until(lambda: not commands(inside), "processes of the SuperLink are left")
    proxy.go_on()
    run.end()
    deployment.start_superlink()
    assert "Resuming" in finish(deployment.run(**keys, resume="latest"))
    assert [line["round"] for line in deployment.history()] == [1, 2, 3]
    node.popen.terminate()
    assert node.popen.wait(60) == 0


@pytest.mark.slow
def test_a_node_killed_while_it_sends_its_answer_holds_up_nobody(
    deployment: Deployment, proxy: Proxy, tmp_path: Path
) -> None:
    a = deployment.node(
        "a", "--superlink", f"127.0.0.1:{proxy.port}", "--data-dir", make_files(tmp_path / "data-of-a", 1)
    )
    deployment.node("b", "--data-dir", make_files(tmp_path / "data-of-b", 2))
    model: dict[str, Any] = KEYS | {"model": "resnet18"}
    run = deployment.run(
        method="fedavg", min_clients=2, rounds=2, return_timeout=1.0, round_timeout=PATIENCE / 2, **model
    )
    a.wait_for("Answered: query.describe")
    proxy.pause_after(1_000_000, up=True)
    until(proxy.held_up, "an answer of some megabytes")
    a.kill()
    began = time.monotonic()
    log = finish(run)
    # Flower notices after a minute that a node is gone.
    assert time.monotonic() - began < 150
    assert "Client a refused: its node went away while it sent its answer" in log
    assert [sorted(line["clients"]) for line in deployment.history()] == [["b"], ["b"]]


@pytest.mark.slow
def test_a_stock_supernode_beside_a_floret_node(fedper: Plain) -> None:
    """In the same run; it also shows that what FedDFPA keeps private, the extractor, never leaves the node."""
    dep, name = fedper.deployment, "it-s.stock_1"
    state = dep.folder / f"state-{name}"
    config = f'client-name="{name}" data-dir="{fedper.late}" state-dir="{state}"'
    stock = dep.start(
        "stock",
        [
            *(BIN / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{dep.fleet}"),
            *("--clientappio-api-address", f"127.0.0.1:{free_port()}", "--node-config", config),
        ],
    )
    stock.wait_for("SuperNode ID")
    mark = fedper.proxy.mark()
    run = dep.run(method="feddfpa", rounds=2, min_clients=2, output_dir=str(dep.folder / "feddfpa"), **KEYS)
    finish(run)
    stock.end()
    history, _ = fedper.finished("feddfpa")
    for line in history:
        assert {name: entry["trained"] for name, entry in line["clients"].items()} == {"files": True, name: True}
        assert line["refused"] == []
    assert fedper.deployment.rounds_kept(name, "feddfpa") == [1, 2]
    assert fedper.rounds("feddfpa") == 2

    content = fedper.proxy.sent(mark)
    versions = fedper.state("files", "feddfpa")
    shared = [array for key, array in versions[-1].items() if key.startswith(("model.head.", "memory.prototype."))]
    assert len(shared) == 2 + 4
    for array in shared:
        assert array.tobytes() in content
    private = [a for tensors in versions for key, a in tensors.items() if key.startswith("model.extractor.")]
    never_sent(fedper, content + fedper.proxy.raw(mark), private)


@pytest.mark.slow
def test_a_node_with_a_policy(fedper: Plain, tmp_path: Path) -> None:
    dep, policy = fedper.deployment, tmp_path / "policy.yaml"
    policy.write_text("methods: [fedrep]\naccuracies: none\n")
    strict = dep.node("strict", "--data-dir", fedper.late, "--policy", policy)
    line = "client strict: this node's policy has methods = fedrep, and method = 'fedper'"
    run = dep.run(method="fedper", rounds=1, output_dir=str(dep.folder / "without"), **KEYS)
    finish(run)
    assert line in run.text()
    assert line in strict.text()
    history, _ = fedper.finished("without")
    assert set(history[-1]["clients"]) == {"files"}
    finish(dep.run(method="fedrep", rounds=1, min_clients=2, output_dir=str(dep.folder / "with"), **KEYS))
    strict.end()
    history, _ = fedper.finished("with")
    told = {name: (entry["trained"], entry["after"], entry["loss"]) for name, entry in history[-1]["clients"].items()}
    assert told["strict"] == (True, None, None)
    assert told["files"][1]["test"] * 20 == pytest.approx(round(told["files"][1]["test"] * 20))
    folder = dep.folder / "state-strict/.audit"
    rounds, others = (
        [json.loads(line) for line in (where / "strict.jsonl").read_text().splitlines()]
        for where in (folder, folder / "uncounted")
    )
    assert (others[0]["message"], others[0]["method"]) == ("query.describe", "fedper")
    assert ("train", "fedrep", True) in [(line["message"], line["method"], bool(line["tensors"])) for line in rounds]


def test_a_node_refuses_a_run_of_other_code(fedper: Plain, tmp_path: Path) -> None:
    app = copy_app(tmp_path / "app")
    with (app / "client_app" / "client.py").open("a") as file:
        file.write("# changed\n")
    run = fedper.deployment.run(app, rounds=1, output_dir=str(tmp_path / "runs"), **KEYS)
    line = (
        "this node runs its installed Floret, and the run's app floret/floret 0.1.0 has another client_app/client.py; "
    )
    run.wait_for(re.escape(line))
    stop(fedper.deployment, run)
    node = next(process for process in fedper.deployment.processes if process.log.name == "files.log")
    assert line in node.text()
    assert node.popen.poll() is None


@pytest.mark.thorough
def test_what_describe_and_metrics_say(tmp_path: Path) -> None:
    """These fields and no others leave a client beside its tensors; docs may promise it."""
    seen: dict[str, set[tuple[str, ...]]] = {}

    def listen(message: Message, reply: Message) -> Message:
        records: dict[str, Any] = {**reply.content.config_records, **reply.content.metric_records}
        arrays = [(f"arrays: {name}",) for name in reply.content.array_records]
        fields = {*arrays, *((f"{name}: {key}",) for name, record in records.items() for key in record)}
        seen.setdefault(message.metadata.message_type, set()).update(fields)
        return reply

    for method in ("fedavg", "fedper", "ua-pdfl"):
        federate(tmp_path / method, method=method, participation=0.5, rounds=4, evaluate_every=1, tamper=listen)

    def named(record: str, *keys: str) -> set[tuple[str, ...]]:
        return {(f"{record}: {key}",) for key in keys}

    accuracies = [f"{when}.{split}" for when in ("before", "after") for split in ("test", "validation")]
    assert seen == {
        "query.describe": named(
            "client",
            *("name", "identity", "train", "validation", "test"),
            *("num-classes", "input-shape", "input-type", "class-names", "partitions", "own-data", "accuracies"),
        ),
        "query.plan": named("plan", "replace", "extractors", "heads"),
        "train": named("metrics", *accuracies, "loss", "seconds", "num-examples") | {("arrays: arrays",)},
        "evaluate": named("metrics", *accuracies, "seconds", "num-examples"),
    }


# What is wrong


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the one line with which ``floret node``, in this process, ends at once with exit code 2."""

    def fail(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["floret", "node", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("floret: ")
        return err.removeprefix("floret: ").rstrip("\n")

    return fail


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--superlink", "h"], "--superlink 'h': must be HOST:PORT, such as superlink.example.org:9092"),
        (["--superlink", "https://h:9092"], "--superlink 'https://h:9092': must be HOST:PORT"),
        (["--superlink", "h:0"], "--superlink 'h:0': must be HOST:PORT"),
        (["--superlink", "h:70000"], "--superlink 'h:70000': must be HOST:PORT"),
        (["--client-name", "../a"], "--client-name '../a': must be 1 to 100 letters, digits"),
        (["--client-name", ""], "--client-name '': must be 1 to 100 letters, digits"),
        (["--partition", "3/3"], "--partition 3/3: must be from 0 to n - 1"),
        (["--partition", "first"], "--partition 'first': must be I/N, such as 0/3 for the first of three"),
        (["--partition", f"0/{'9' * 5000}"], f"--partition '0/{'9' * 5000}': must be I/N, such as 0/3"),
        (["--data-dir", "{tmp}/none"], "--data-dir {tmp}/none: is not a directory"),
        (
            ["--data-dir", '{tmp}/a"b'],
            "--data-dir '{tmp}/a\"b': has a double quote or a sign that cannot",
        ),
        (
            ["--policy", "{tmp}/a\nb"],
            "--policy '{tmp}/a\\nb': has a double quote or a sign that cannot",
        ),
        (["--insecure", "--key", "{tmp}/text"], "--insecure: goes without --root-certificates and --key"),
        (["--key", "{tmp}/none"], "--key {tmp}/none: cannot be read (No such file or directory)"),
        (["--key", "{tmp}/text"], "--key {tmp}/text: is not a node's private key, as floret certificates makes it"),
        (["--key", "{tmp}/made/nodes/n.pub"], "--key {tmp}/made/nodes/n.pub: is not a node's private key"),
        (["--key", "{tmp}/made/ca.key"], "--key {tmp}/made/ca.key: is not a node's private key"),
        (["--root-certificates", "{tmp}/none"], "--root-certificates {tmp}/none: cannot be read (No such file"),
        (["--root-certificates", "{tmp}/text"], "--root-certificates {tmp}/text: has no PEM certificate"),
        (["--max-wait", "-1"], "Invalid value for '--max-wait': -1.0 is not in the range x>=0"),
        (["--max-wait", "nan"], "Invalid value for '--max-wait': nan is not in the range x>=0"),
        (["--keep-runs", "few"], "Invalid value for '--keep-runs': 'few' is not a valid integer."),
        (["--health-address", "foo"], "--health-address 'foo': must be HOST:PORT, such as 127.0.0.1:9095"),
        (["--state-dir", "{tmp}/text"], "--state-dir {tmp}/text: cannot be written (File exists)"),
        (["--state-dir", "/proc/none"], "--state-dir /proc/none: cannot be written (No such file or directory)"),
    ],
)
def test_options_that_cannot_be_used(said: Callable[..., str], tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "text").write_text("nothing\n")
    if "made" in line:
        command.floret.main(
            ["certificates", str(tmp_path / "made"), "--host", "h", "--node", "n"], standalone_mode=False
        )
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    usual = {"--superlink": "127.0.0.1:1", "--client-name": "a", "--state-dir": f"{tmp_path}/state"}
    if not {"--data-dir", "--partition"} & set(given):
        usual["--partition"] = "0/2"
    rest = [part for option, value in usual.items() if option not in given for part in (option, value)]
    assert said(*given, *rest).startswith(line.format(tmp=tmp_path))


def test_a_state_directory_of_another_user(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    chosen = node_options(tmp_path, 9092, state_dir=state)
    with forbidden(state, 0o500), pytest.raises(FloretError) as caught:
        chosen.claim()
    right = f"it and all in it must belong to user {os.geteuid() or NOBODY}, who runs this"
    assert str(caught.value) == f"--state-dir {state}: cannot be written (Permission denied); {right}"


def test_no_data_at_all(said: Callable[..., str]) -> None:
    line = said("--superlink", "h:1", "--client-name", "a", "--insecure")
    assert line == "a node needs --data-dir, its own data, or --partition I/N of the run's dataset"


def test_a_second_node_of_the_same_name(fedper: Plain, said: Callable[..., str]) -> None:
    state = fedper.deployment.folder / "state-files"
    where = ("--superlink", "127.0.0.1:1", "--insecure", "--data-dir", fedper.files, "--state-dir", state)
    line = said(*where, "--client-name", "files")
    assert line == f"--client-name files: another node with this name is running on {state}"


def test_a_key_that_others_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["certificates", str(tmp_path / "made"), "--host", "h", "--node", "n"]
    command.floret.main(arguments, standalone_mode=False)
    key = tmp_path / "made" / "nodes" / "n"
    node_options(tmp_path, 1, key=key)
    assert not caplog.text
    key.chmod(0o640)
    node_options(tmp_path, 1, key=key)
    assert len(caplog.records) == 1
    assert caplog.messages == [f"--key {key}: others on this machine may read or write it; chmod 600 {key}"]


def test_a_node_says_how_much_it_keeps(tmp_path: Path) -> None:
    assert not {"keep-runs", "keep-gb"} & node_options(tmp_path, 1).node_config().keys()
    config = node_options(tmp_path, 1, keep_runs=3, keep_gb=5).node_config()
    assert (config["keep-runs"], config["keep-gb"]) == (3, 5)


def refusal(tmp_path: Path, port: int, **keys: Any) -> str:
    """Return why no connection can be made, and never will be as things are."""
    with pytest.raises(FloretError) as caught:
        check_connection(node_options(tmp_path, port, **keys))
    assert not isinstance(caught.value, UnreachableError)
    return str(caught.value)


@pytest.mark.parametrize("insecure", [True, False])
def test_a_host_name_that_is_none(tmp_path: Path, insecure: bool) -> None:
    line = refusal(tmp_path, 9092, host="superlink..example.org", insecure=insecure)
    assert line.startswith("--superlink superlink..example.org:9092: has no valid host name; name ")


def test_a_health_address_that_is_in_use(tmp_path: Path, said: Callable[..., str]) -> None:
    """Flower's SuperNode would end for it again and again."""
    where = ("--superlink", "127.0.0.1:1", "--insecure", "--data-dir", tmp_path, "--state-dir", tmp_path / "states")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = said(*where, "--client-name", "a", "--max-wait", 0, "--health-address", address)
    assert line == f"--health-address {address}: is in use; name another address of this machine"
    check_health_address(address)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("a..b:9095", "has no valid host name"),
        ("192.0.2.1:9095", "cannot be listened at (Cannot assign requested address); name another address of "),
    ],
)
def test_a_health_address_that_is_not_this_machines(address: str, line: str) -> None:
    with pytest.raises(FloretError, match=f"^--health-address {re.escape(f'{address}: {line}')}"):
        check_health_address(address)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_health_address_of_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        address = f"[::1]:{taken.getsockname()[1]}"
        with pytest.raises(FloretError, match="is in use"):
            check_health_address(address)
    check_health_address(address)


def test_nobody_at_the_address(plain: Plain) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen: nobody else can
        port = deaf.getsockname()[1]
        where = ("node", "--superlink", f"127.0.0.1:{port}", "--insecure", "--data-dir", plain.files, "--max-wait", "0")
        (line,) = plain.floret.fail([*where, "--client-name", "nobody"])
    assert line == f"--superlink 127.0.0.1:{port}: nobody answers (Connection refused)"
    with pytest.raises(UnreachableError, match=r"--superlink no\.such\.host\.invalid:1: nobody answers \("):
        check_connection(node_options(plain.files, 1, host="no.such.host.invalid"))


def test_data_and_devices_that_cannot_be_used(plain: Plain, tmp_path: Path) -> None:
    """Found out before the network is asked for anything."""
    empty, half = tmp_path / "empty", tmp_path / "half"
    empty.mkdir()
    half.mkdir()
    (half / "train.npz").write_bytes((plain.files / "train.npz").read_bytes()[:-9])
    where = ("node", "--superlink", "127.0.0.1:1", "--insecure", "--max-wait", "0", "--client-name")
    said = plain.floret.fail(
        [*where, "a", "--data-dir", empty],
        [*where, "b", "--data-dir", half],
        [*where, "c", "--data-dir", plain.files, "--device", "cuda:99"],
        [*where, "d", "--data-dir", plain.files, "--policy", tmp_path / "policy.yaml"],
    )
    wanted = (
        "it must have train.npz and test.npz with the arrays x and y, or images in train/<class>/ and test/<class>/"
    )
    assert said[0] == f"--data-dir: {empty} has neither of these files nor of these folders; {wanted}"
    assert said[1].startswith(f"--data-dir: {half / 'train.npz'}: is not a complete npz file")
    assert said[2].startswith("--device: device = 'cuda:99': not available here (")
    file = tmp_path / "policy.yaml"
    assert said[3] == f"--policy: policy {file}: cannot be read (No such file or directory)"


def test_an_http_server_is_no_superlink(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        plain, tls = refusal(tmp_path, port, insecure=True), refusal(tmp_path, port)
        server.shutdown()
    where = f"--superlink 127.0.0.1:{port}"
    assert plain == f"{where}: does not speak gRPC; is it the SuperLink's Fleet API, port 9092 by default?"
    assert re.fullmatch(rf"{where}: TLS failed \(\w+\); if the SuperLink has no TLS, use --insecure", tls)


def test_tls_with_a_superlink_that_has_none(plain: Plain, tmp_path: Path) -> None:
    check_connection(node_options(tmp_path, plain.deployment.fleet, insecure=True))
    line = refusal(tmp_path, plain.deployment.fleet)
    assert line.startswith(f"--superlink 127.0.0.1:{plain.deployment.fleet}: ")
    assert line.endswith("if the SuperLink has no TLS, use --insecure")


@pytest.mark.parametrize("insecure", [True, False])
@pytest.mark.parametrize("resets", [True, False])
def test_a_proxy_whose_superlink_is_not_up_yet(tmp_path: Path, insecure: bool, resets: bool) -> None:
    """It accepts the connection and ends it; the node tries again, as if nobody had answered."""

    class HangsUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if resets:
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.request.close()
            else:
                self.request.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangsUp) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            for _ in range(5):
                with pytest.raises(UnreachableError) as caught:
                    check_connection(node_options(tmp_path, proxy.server_address[1], insecure=insecure))
                other = (
                    "wants TLS: then leave out --insecure and give --root-certificates"
                    if insecure
                    else "has no TLS: then use --insecure"
                )
                assert str(caught.value).endswith(f": hung up; the SuperLink is not up yet, or {other}")
        finally:
            proxy.shutdown()


# A process of its own: gRPC has been seen to crash when a server stops that just refused a handshake.
TLS_SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

key, certificate = (open(f"{sys.argv[1]}/superlink.{kind}", "rb").read() for kind in ("key", "crt"))
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
server.start()
print(port, flush=True)
server.wait_for_termination()
"""


def test_a_server_with_tls_hangs_up_on_who_has_none(tmp_path: Path) -> None:
    command.floret.main(["certificates", str(tmp_path / "made"), "--host", "h"], standalone_mode=False)
    started = [sys.executable, "-c", TLS_SERVER, str(tmp_path / "made")]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            port = int(server.stdout.readline())
            line = refusal(tmp_path, port, insecure=True)
        finally:
            server.kill()
    assert line == f"--superlink 127.0.0.1:{port}: wants TLS; leave out --insecure and give --root-certificates"


def test_a_greeting_is_answered_with_an_alert(tmp_path: Path) -> None:
    """As servers with TLS do that are not built on gRPC."""

    class Alerts(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"\x15\x03\x03\x00\x02\x02\x46")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Alerts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            line = refusal(tmp_path, server.server_address[1], insecure=True)
        finally:
            server.shutdown()
    assert line.endswith(": wants TLS; leave out --insecure and give --root-certificates")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Node]]:
    """Nodes for this process that skip the check of their data; what they change in the process is undone."""
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(Node, "_check", lambda self: None)
    with patch.dict(os.environ):
        yield Node
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


def test_a_node_waits_as_long_as_it_is_told_however_long_an_attempt_takes(
    unchecked: type[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who accepts and says nothing takes up all of the time in the first attempt."""
    monkeypatch.setattr(preflight, "_SECONDS", 1.0)
    attempts = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            attempts.append(self.request)
            while self.request.recv(4096):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(UnreachableError, match="nobody answers"):
                unchecked(node_options(tmp_path, server.server_address[1], insecure=True, max_wait=0.9)).run()
        finally:
            server.shutdown()
    assert len(attempts) == 1


def test_a_node_waits_as_long_again_after_it_has_been_in_the_federation(
    unchecked: type[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"\0\0\0\4\0\0\0\0\0")

    def join(node: Node) -> None:
        node._joined = time.monotonic() - 11
        time.sleep(1.6)
        server.shutdown()
        server.server_close()
        left.append(time.monotonic())
        raise UnreachableError("the SuperNode ended")

    monkeypatch.setattr(Node, "_join", join)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UnreachableError, match="nobody answers"):
            unchecked(node_options(tmp_path, server.server_address[1], insecure=True, max_wait=1.5)).run()
    assert len(left) == 1
    assert time.monotonic() - left[0] >= 1.5


@pytest.mark.parametrize("hangs", ["PullPendingTasks", "ClaimTask"])
def test_a_supernode_that_hangs_is_gone(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANGS", 0.5)
    over = threading.Event()

    def pending(*_: Any) -> bytes:
        if hangs == "PullPendingTasks":
            over.wait(PATIENCE)
        return bytes(PullPendingTasksResponse(tasks=[Task(task_id=1)]).SerializeToString())

    def claim(*_: Any) -> bytes:
        over.wait(PATIENCE)
        return bytes(ClaimTaskResponse(token="late").SerializeToString())

    answers = {"PullPendingTasks": pending, "ClaimTask": claim}
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in answers.items()}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.ClientAppIo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    # What waits for ever ends the test all the same.
    watch = threading.Timer(20.0, over.set)
    watch.start()
    try:
        with transport.Tasks(f"127.0.0.1:{port}") as tasks, pytest.raises(transport.GoneError):
            tasks.claim()
    finally:
        watch.cancel()
        over.set()
        server.stop(None).wait(10)


# TLS and node authentication


@dataclass
class Secure:
    """A SuperLink with TLS and node authentication that knows the key of ``north``."""

    deployment: Deployment
    made: Path
    data: Path
    floret: Floret

    def node(self, *arguments: str | Path) -> tuple[str | Path, ...]:
        return (
            *("node", "--superlink", f"127.0.0.1:{self.deployment.fleet}", "--data-dir", self.data),
            *("--root-certificates", self.made / "ca.crt", *arguments),
        )


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    made = folder / "made"
    nodes = ["--node", "north", "--node", "stranger"]
    command.floret.main(["certificates", str(made), "--host", "127.0.0.1", *nodes], standalone_mode=False)
    tls = {"ca-certfile": "ca.crt", "certfile": "superlink.crt", "keyfile": "superlink.key"}
    flags = [part for flag, name in tls.items() for part in (f"--ssl-{flag}", made / name)]
    deployment = Deployment(folder / "dep", [*flags, "--enable-supernode-auth"])
    try:
        registered = subprocess.run(
            [BIN / "flwr", "supernode", "register", made / "nodes" / "north.pub", "dep"],
            env=deployment.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert registered.returncode == 0, registered.stdout + registered.stderr
        yield Secure(deployment, made, make_files(folder / "data", 31), Floret(deployment.env, folder))
    finally:
        deployment.end()


def test_a_superlink_that_wants_tls(secure: Secure, tmp_path: Path) -> None:
    port = secure.deployment.fleet
    where, ca = f"--superlink 127.0.0.1:{port}", secure.made / "ca.crt"
    check_connection(node_options(tmp_path, port, root_certificates=ca))
    check_connection(node_options(tmp_path, port, root_certificates=ca, host="localhost"))
    line = refusal(tmp_path, port, insecure=True)
    assert line == f"{where}: wants TLS; leave out --insecure and give --root-certificates"

    line = refusal(tmp_path, port)
    assert line.startswith(f"{where}: its certificate is refused: ")
    assert line.endswith("it was checked with the system's certificates (see --root-certificates)")

    command.floret.main(["certificates", str(tmp_path / "other"), "--host", "h"], standalone_mode=False)
    other = tmp_path / "other" / "ca.crt"
    line = refusal(tmp_path, port, root_certificates=other)
    assert line.startswith(f"{where}: its certificate is refused: ")
    assert line.endswith(f"; it was checked with --root-certificates {other}")


def test_a_certificate_for_another_host(secure: Secure, tmp_path: Path) -> None:
    """127.1 is another way to write 127.0.0.1, and the certificate does not have it."""
    port, ca = secure.deployment.fleet, secure.made / "ca.crt"
    line = refusal(tmp_path, port, root_certificates=ca, host="127.1")
    assert line.startswith(f"--superlink 127.1:{port}: its certificate is refused: Hostname mismatch")


def test_a_superlink_of_another_version() -> None:
    """Told by what Flower logs before it ends with code 1; an error of a run is none of these."""
    reason = Reason()
    for text, code in (("Exit Code: 600\nno", None), ("an error", None), ("Exit Code: 606\nversions", WRONG_VERSION)):
        assert reason.filter(logging.LogRecord("flwr", logging.ERROR, "", 0, text, None, None))
        assert reason.code == code


def test_keys_that_the_superlink_does_not_know(secure: Secure) -> None:
    where = f"--superlink 127.0.0.1:{secure.deployment.fleet}"
    # Under the name that it has on a device with systemd or Compose, where its public key is not.
    key = secure.deployment.folder / "node.key"
    shutil.copy2(secure.made / "nodes" / "stranger", key)
    stranger, without = secure.floret.fail(
        secure.node("--client-name", "stranger", "--key", key), secure.node("--client-name", "nokey")
    )
    register = "flwr supernode register DIR/nodes/NAME.pub CONNECTION"
    assert stranger == (
        f"{where}: does not know --key {key}; where flwr is used, register its public key, as floret certificates DIR "
        f"made it: {register}"
    )
    assert without == f"{where}: accepts only nodes with a registered key; see --key"


def test_a_run_over_tls_with_a_registered_node(secure: Secure) -> None:
    """Nothing of it can be read on the way; and the key of a node that was killed is waited for."""
    dep, ca, key = secure.deployment, secure.made / "ca.crt", secure.made / "nodes" / "north"
    proxy = Proxy(dep.fleet)
    try:
        join = ("--superlink", f"127.0.0.1:{proxy.port}", "--root-certificates", ca, "--key", key)
        north = dep.node("north", "--data-dir", secure.data, *join)
        finish(dep.run(method="fedper", rounds=2, **KEYS))
        assert [list(line["clients"]) for line in dep.history()] == [["north"]] * 2
        (folder,) = (dep.folder / "state-north" / "default" / "fedper").iterdir()
        newest = load_file(max(folder.glob("*.safetensors")))
        assert len(proxy.raw()) > sum(array.nbytes for array in newest.values())
        for array in newest.values():
            assert not occurs(array, proxy.raw(), 64)
        assert b"north" not in proxy.raw()

        refused = f"a node with --key {key} is connected: .*; trying again in"
        for _ in range(3):  # one that starts for longer than the SuperLink misses the old one joins, and is killed, too
            since = len(north.text())
            supernode = next(pid for pid in children(north.popen.pid) if "client_app.node.supernode" in _command(pid))
            os.kill(supernode, signal.SIGKILL)
            north.wait_for(f"{refused}|SuperNode ID", since=since)
            if re.search(refused, north.text()[since:]):
                break
        assert re.search(refused, north.text()[since:])
        assert north.popen.poll() is None
    finally:
        proxy.close()


def _command(pid: int) -> str:
    return subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
