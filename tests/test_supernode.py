"""The SuperNode of a node: what ours does where Flower's own hangs, stays offline or restarts for ever."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common.constant import HEARTBEAT_CALL_TIMEOUT
from flwr.common.typing import Fab, Run, RunNotRunningException
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, RegisterNodeFleetResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PullObjectResponse
from flwr.supercore import heartbeat
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectIdNotPreregisteredError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from client_app.node import transport
from client_app.node.preflight import UnreachableError
from client_app.node.supervisor import Node
from common.errors import FloretError
from tests.conftest import PATIENCE, free_port
from tests.deployment import container_health, node_options, until
from tests.harness import ROOT
from tests.test_replies import bomb


@pytest.mark.parametrize("ends", ["the run", "another way", "the run, at the end", "not at all"])
@pytest.mark.parametrize("claimed", ["", "claimed", "answered"])
def test_nothing_is_left_of_a_message_that_broke_off(ends: str, claimed: str) -> None:
    """Flower's own function, on its own state and store, between a SuperLink and a ClientApp that are not there."""
    message = Message(RecordDict({"weights": ArrayRecord([np.ones(3)])}), dst_node_id=1, message_type="train")
    # As the SuperLink sends it: its name is that of what it says, the name left out.
    message.metadata.__dict__.update(_run_id=7)
    tree = get_object_tree(message)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    name_of_message = tree.object_id
    message.metadata.__dict__.update(_message_id=name_of_message)
    store_of = ObjectStoreFactory()
    state, store = NodeStateFactory(objectstore_factory=store_of).state(), store_of.store()
    state.store_run(Run.create_empty(7))

    def pull_object(run_id: int, name: str) -> bytes:
        for task in state.get_tasks() if claimed else ():
            # Done while parts of the message are on their way.
            if state.claim_task(task.task_id):
                assert state.activate_task(task.task_id)
        if ends == "another way":
            raise ObjectIdNotPreregisteredError(name)
        if ends == "the run" and name != name_of_message:
            raise RunNotRunningException
        return parts[name]

    def confirm(run_id: int, name: str) -> None:
        if claimed == "answered" and ends == "the run, at the end":
            reply = Message(RecordDict(), reply_to=message)
            reply.metadata.__dict__.update(_message_id="reply")
            state.store_message(reply)
            (task,) = state.get_tasks()
            assert state.finish_task(task.task_id, sub_status="completed", details="")
        if ends.startswith("the run"):
            raise RunNotRunningException

    run = transport.dropping(start_client_internal._pull_and_store_message)(
        state=state,
        object_store=store,
        node_config={},
        receive=lambda: (message, tree),
        get_run=None,
        get_fab=None,
        pull_object=pull_object,
        confirm_message_received=confirm,
        trusted_entities=None,
    )
    (task,) = state.get_tasks()
    left = [one.metadata.message_id for one in state.get_messages()]
    found = (run, task.status.status, left, len(store))
    if ends == "the run, at the end" and claimed == "answered":
        # The SuperNode sends the reply, which the SuperLink refuses; it takes it for no other one.
        assert found == (7, "finished", [name_of_message, "reply"], len(parts))
    elif ends == "not at all" or (ends == "the run, at the end" and claimed):
        # Whoever has claimed it answers it, and the SuperNode waits for that.
        assert found == (7, "running" if claimed else "pending", [name_of_message], len(parts))
    else:
        # None, or the SuperNode would wait for a reply.
        assert found == (None, "running" if claimed and ends == "the run" else "finished", [], 0)


def test_a_message_that_the_supernode_has_given_up_does_not_end_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a device slept: without a heartbeat the SuperNode answers with an error, and takes no reply."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT_CALL_TIMEOUT + 0.1)
    beats, beat = list[bool](), transport._beat

    def counted(stub: Any) -> bool:
        try:
            beats.append(beat(stub))
        except Exception:
            beats.append(False)
            raise
        return beats[-1]

    monkeypatch.setattr(transport, "_beat", counted)
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__.update(_run_id=7)
    message.metadata.__dict__.update(_message_id=message.object_id)
    store_of = ObjectStoreFactory()
    states = NodeStateFactory(objectstore_factory=store_of)
    state, store = states.state(), store_of.store()
    state.store_run(replace(Run.create_empty(7), fab_hash=hashlib.sha256(b"app").hexdigest()))
    state.store_fab(Fab(hashlib.sha256(b"app").hexdigest(), b"app", {}))
    state.set_run_series_context(0, Context(7, 1, {}, RecordDict(), {}))
    store.preregister(7, get_object_tree(message))
    for name, part in get_all_nested_objects(message).items():
        store.put(name, part.deflate())
    state.store_message(message)
    task_id = state.create_task(task_type="flwr-clientapp", run_id=7, fab_hash=None)
    assert task_id
    server: Any = start_client_internal.run_clientappio_api_grpc("127.0.0.1:0", states, store_of, None, None)
    try:
        with transport.Tasks(f"127.0.0.1:{server.bound_address.rpartition(':')[2]}") as offered:
            token = offered.claim()
            with offered.task(token, lambda: True) as task:
                assert task.message.metadata.message_id == message.metadata.message_id
                assert state.finish_task(task_id, sub_status="failed", details="no heartbeat")
                done = len(beats)
                until(lambda: len(beats) > done, "no heartbeat")
                assert all(beats)
                assert not task.answer(Message(RecordDict(), reply_to=task.message))
    finally:
        server.stop(None).wait(10)


def test_a_node_makes_no_message_that_takes_far_more_than_what_came() -> None:
    def pull(request: PullObjectRequest) -> PullObjectResponse:
        return PullObjectResponse(object_found=True, object_available=True, object_content=parts[request.object_id])

    for times, fits in ((1000, True), (1100, False)):
        parts, confirmed = bomb(times), list[Any]()
        stub: Any = SimpleNamespace(
            PullTaskInput=None, PullMessage=None, PullObject=pull, ConfirmMessageReceived=confirmed.append
        )
        calls = transport._waiting(stub, lambda: True)
        for part in parts:
            calls.PullObject(PullObjectRequest(object_id=part))
        if fits:
            calls.ConfirmMessageReceived(ConfirmMessageReceivedRequest())
        else:
            # Of the kind for which ``serve`` goes on.
            with pytest.raises(ValueError, match=r"^\d+ bytes would become \d+$"):
                calls.ConfirmMessageReceived(ConfirmMessageReceivedRequest())
        assert bool(confirmed) == fits


@contextmanager
def superlink(answers: dict[str, Callable[[grpc.ServicerContext], Any]]) -> Iterator[int]:
    """Serve a SuperLink's Fleet API with these answers, by call; yield its port."""

    def handler(answer: Callable[[grpc.ServicerContext], Any]) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda _, context: answer(context).SerializeToString())

    handlers = {name: handler(answer) for name, answer in answers.items()}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.Fleet", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(10)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Node]]:
    """Nodes for this process that skip the check of their data; what they change in the process is undone."""
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(Node, "_check", lambda self: None)
    for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield Node
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


@pytest.mark.thorough
def test_a_device_whose_clock_is_wrong_is_told(unchecked: type[Node], tmp_path: Path) -> None:
    def refuse(context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")

    with superlink({"RegisterNode": refuse}) as port, pytest.raises(UnreachableError) as error:
        unchecked(node_options(tmp_path, port, insecure=True)).run()
    line = rf"--superlink 127.0.0.1:{port}: its clock differs from this device's, which says 20[-0-9]+ [:0-9]+ UTC; set"
    assert error.match(line)


@pytest.mark.thorough
@pytest.mark.parametrize("api", ["control", "serverappio"])
def test_another_api_of_the_superlink_is_told(
    unchecked: type[Node], tmp_path: Path, capfd: pytest.CaptureFixture[str], api: str
) -> None:
    """As a SuperLink of Flower's answers at 9093, which has no such calls, and at 9091, which wants a token first."""

    def refuse(context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "Authentication failed.")

    answers: dict[str, Callable[..., Any]] = {} if api == "control" else {"RegisterNode": refuse}
    with superlink(answers) as port, pytest.raises(UnreachableError) as error:
        unchecked(node_options(tmp_path, port, insecure=True)).run()
    assert error.match(rf"^--superlink 127.0.0.1:{port}: is not a SuperLink's Fleet API; that is where nodes join, at")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_supernode_without_heartbeats_is_started_again(
    unchecked: type[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The SuperLink counts it as gone after a minute, and nothing that it does later makes it come back."""
    begun = []

    def activate(context: grpc.ServicerContext) -> ActivateNodeResponse:
        begun.append(1)
        if len(begun) > 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "enough")
        return ActivateNodeResponse(node_id=5)

    def fail(context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNKNOWN, "the disk is full")

    answers = {
        "RegisterNode": lambda _: RegisterNodeFleetResponse(),
        "ActivateNode": activate,
        "SendNodeHeartbeat": fail,
        "PullMessages": lambda _: PullMessagesResponse(),
    }
    with superlink(answers) as port, pytest.raises(FloretError, match="accepts only nodes with a registered key"):
        unchecked(node_options(tmp_path, port, insecure=True, max_wait=30.0)).run()
    assert len(begun) == 2
    assert f"the SuperNode ended with code {transport.THREAD_ENDED}; trying again in" in caplog.text
    said = capfd.readouterr().err
    assert "A thread of the SuperNode ended (_InactiveRpcError: the disk is full)" in said
    assert "Traceback" not in said


def test_a_connection_that_the_network_forgot_counts_as_broken() -> None:
    """Other than by these options Linux gives up after some 15 minutes."""
    with superlink({}) as port, transport.open_channel(f"127.0.0.1:{port}", insecure=True) as channel:
        grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    if opened.getpeername()[1] == port:
                        found.append(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            except OSError:
                continue  # no socket, or one that is connected to nobody
    assert found == [1000 * transport.BROKEN]


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_a_container_is_healthy_when_what_it_needs_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    health = container_health()
    monkeypatch.setattr(health, "SECONDS", PATIENCE)
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    served = f"127.0.0.1:{free_port()}"
    server = run_health_server_grpc_no_tls(served)
    try:
        with socket.create_server((address.strip("[]"), 0), family=family) as needed:
            there = f"{address}:{needed.getsockname()[1]}"
            assert health.main(served, there) == ""
        assert health.main(served, there).startswith(f"{there}: ")
    finally:
        server.stop(None)


_OPENED = """
import sys
from client_app.node import transport

def opened(*_, **__):
    raise SystemExit(END)

transport.open_channel = opened
sys.argv = ["", "--insecure", "--superlink", "127.0.0.1:9", "--isolation", "process"]
sys.argv += ["--clientappio-api-address", "127.0.0.1:" + PORT]
transport.run_supernode()
"""


@pytest.mark.parametrize(("end", "code"), [(9, 9), ("Port 9095 is in use.", 1)])
def test_the_supernode_opens_such_a_connection_and_says_why_it_ends(tmp_path: Path, end: int | str, code: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path), transport.PARENT: str(os.getpid())}
    script = _OPENED.replace("PORT", repr(str(free_port()))).replace("END", repr(end))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code
    assert ("The SuperNode ended: Port 9095 is in use." in done.stdout + done.stderr) == isinstance(end, str)
