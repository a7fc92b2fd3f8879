"""Messages of a simulation through Flower's own state: all answered, in order, few in flight at a time."""

import itertools
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from flwr.app import Message, RecordDict
from flwr.common.typing import Run
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from common.flower import find_by_node
from strategies.core import in_flight, send_and_receive

CLIENTS = 150


class Engine:
    """Flower's simulation without Ray: hands out what waits, node by node, and answers with nothing in it.

    Attributes:
        most: the largest number of messages that were on their way.
        deaf: nodes that do not answer.
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
                    if message.metadata.dst_node_id not in self.deaf:
                        reply = Message(RecordDict(), reply_to=message)
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
