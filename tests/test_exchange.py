"""Messages of a simulation through Flower's own state: all answered, in order, few in flight at a time."""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.typing import Run
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from common.errors import FloretError
from common.flower import find_by_node, notice_stop
from strategies.core import in_flight, send_and_receive

CLIENTS = 150


class Engine:
    """Flower's simulation without Ray: hands out what waits, node by node, and answers with nothing in it.

    Attributes:
        most: the largest number of messages that were on their way.
        deaf: nodes that do not answer.
        broken: nodes for which Ray raises instead.
        looked: how often the state went through its messages.
    """

    def __init__(self) -> None:
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state = cast(Any, factory.state())
        run = Run.create_empty(run_id=1)
        run.primary_task_id, run.federation = 2, NOOP_FEDERATION
        self.state.run_ids[1] = RunRecord(run=run)
        self.state.task_store[2] = Task(task_id=2, run_id=1)
        self.grid = InMemoryGrid(state_factory=factory)
        self.grid.set_run(run)
        self.nodes = list(_register_nodes(CLIENTS, factory))
        self.most, self.looked = 0, 0
        self.deaf: set[int] = set()
        self.broken: set[int] = set()
        take = self.state.get_message_ins

        def counted(*args: Any, **kwargs: Any) -> list[Message]:
            self.looked += 1
            found: list[Message] = take(*args, **kwargs)
            return found

        self.state.get_message_ins = counted
        find_by_node(self.grid)

    def hand_out(self) -> list[Message]:
        """Return a message of each node that has one."""
        self.most = max(self.most, self.state.num_message_ins())
        # Backwards: it is not the engine that puts replies in order.
        found = [self.state.get_message_ins(node_id=node, limit=1) for node in reversed(self.nodes)]
        return list(itertools.chain.from_iterable(found))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer in a thread of its own."""
        over = threading.Event()

        def loop() -> None:
            while not over.wait(0.01):
                for message in self.hand_out():
                    node = message.metadata.dst_node_id
                    if node not in self.deaf:
                        error = Error(ErrorCode.UNKNOWN, f"<class 'ray.E'>:<'The actor died.\n\tclass_name: {node}'>")
                        reply = Message(error if node in self.broken else RecordDict(), reply_to=message)
                        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
                        assert self.state.store_message_res(reply)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def messages(self) -> list[Message]:
        """Return a message to each node."""
        return [Message(RecordDict(), node, "train", ttl=60.0) for node in self.nodes]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_all_are_answered_in_order_and_few_are_on_their_way(engine: Engine) -> None:
    with engine.running():
        replies = list(send_and_receive(engine.grid, engine.messages(), 30))
    assert [reply.metadata.src_node_id for reply in replies] == engine.nodes
    assert engine.most <= in_flight() < CLIENTS
    # A node is looked for when it has a message, not in each turn.
    assert engine.looked == CLIENTS
    assert not engine.state.num_message_ins()


def test_a_lost_actor_is_no_fault_of_a_client(engine: Engine) -> None:
    engine.broken = {engine.nodes[3]}
    with engine.running():
        replies = send_and_receive(engine.grid, engine.messages(), 30)
        assert [next(replies).metadata.src_node_id for _ in range(3)] == engine.nodes[:3]
        with pytest.raises(
            FloretError, match=r"^a process of the simulation is lost \(<class 'ray.E'>:<'The actor died"
        ) as e:
            next(replies)
    assert "class_name" not in str(e.value)
    assert "\n" not in str(e.value)


def test_a_round_is_not_finished_when_the_run_was_stopped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr("flwr.common.exit.add_exit_handler", handlers.append)
    monkeypatch.setattr("common.flower._STOPPED", threading.Event())
    notice_stop()
    engine.deaf = {engine.nodes[3]}
    with engine.running():
        replies = send_and_receive(engine.grid, engine.messages(), 30)
        assert len(list(itertools.islice(replies, 3))) == 3
        for handler in handlers:
            handler()
        with pytest.raises(FloretError, match=r"^the run was stopped$"):
            next(replies)


def test_one_node_gets_as_many_messages_as_were_sent(engine: Engine) -> None:
    node = engine.nodes[0]
    engine.grid.push_messages([Message(RecordDict(), node, "train") for _ in range(3)])
    assert [len(engine.hand_out()) for _ in range(4)] == [1, 1, 1, 0]
    engine.grid.push_messages([Message(RecordDict(), node, "train")])
    assert len(engine.hand_out()) == 1


def test_a_message_that_expired_is_looked_for_once(engine: Engine) -> None:
    engine.grid.push_messages([Message(RecordDict(), engine.nodes[0], "train", ttl=1.0)])
    time.sleep(1.1)
    assert [len(engine.hand_out()) for _ in range(3)] == [0, 0, 0]
    assert engine.looked == 1


def test_when_time_is_up_those_that_wait_are_not_sent_any_more(engine: Engine) -> None:
    engine.deaf = {engine.nodes[3]}
    with engine.running():
        replies = list(send_and_receive(engine.grid, engine.messages(), 5.0))
    there = [reply.metadata.src_node_id for reply in replies]
    assert there == [node for node in engine.nodes[: 3 + in_flight()] if node != engine.nodes[3]]
