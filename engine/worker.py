"""A worker: answers messages to clients, one at a time, with the ClientApp."""

import logging
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from flwr.app import ArrayRecord, Context, Message, RecordDict

from client_app.app import app
from client_app.state import ContextStore
from common.flower import given_id
from common.simulation import enter_simulation
from engine.parcels import Answer, Batch, Line, Task, content_of, from_bytes, to_bytes
from engine.plan import Plan

# Node ids of the clients: this, and their number.
FIRST_NODE = 1000


def work(connection: Connection, plan: Plan, slot: int) -> None:
    """Answer messages until the other end of ``connection`` is closed.

    Args:
        connection: batches come from it, answers and lines for the log go to it.
        plan: the run.
        slot: which of its workers this is.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.resources.gpus[slot]))
    enter_simulation(plan.resources.cpus)
    log = logging.getLogger("flwr")
    log.handlers = [_ToServer(connection)]
    shared: dict[int, ArrayRecord] = {}
    while True:
        try:
            batch: Batch = from_bytes(connection.recv_bytes())
        except (EOFError, ConnectionError):  # the server has ended
            return
        for number in batch.forget:
            del shared[number]
        shared |= batch.shared
        for task in batch.tasks:
            _send(connection, _answer(task, plan, shared))


def _answer(task: Task, plan: Plan, shared: dict[int, ArrayRecord]) -> Answer:
    started = time.perf_counter()
    node = FIRST_NODE + task.client
    message = Message(content_of(task.parts, shared), node, task.kind, ttl=task.ttl, group_id=task.group)
    clients = plan.resources.clients
    context = Context(
        run_id=plan.run_id,
        node_id=node,
        node_config={"partition-id": task.client, "num-partitions": clients},
        state=RecordDict(),
        run_config=dict(plan.values),
    )
    store = ContextStore(context.state)
    if task.state is not None:
        store.kept = task.state
    reply: Message = app(given_id(message, str(task.number)), context)
    # A new version is a new object.
    kept = store.kept
    new = kept if kept is not None and (task.state is None or kept.tensors is not task.state.tensors) else None
    return Answer(task.number, dict(reply.content), new, time.perf_counter() - started)


def _send(connection: Connection, what: Answer | Line) -> None:
    """Send to the server's process; if it has ended, so does the wait for the next batch."""
    with suppress(ConnectionError):
        connection.send_bytes(to_bytes(what))


class _ToServer(logging.Handler):
    """Sends lines to the server's process, which has the terminal."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line, with the traceback of an error if it has one."""
        _send(self._connection, Line(record.levelno, self.format(record)))
