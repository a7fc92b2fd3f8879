"""The server's side of the local engine: messages to the workers, and their answers."""

import logging
import os
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from client_app.state import ClientState, ContextStore, FileStore, RoundContext
from common.flower import given_id, unreadable
from common.simulation import KeptState, LocalGrid
from common.starts import Start
from engine.parcels import Answer, Batch, Line, Parts, Shared, Task, content_of, from_bytes, to_bytes
from engine.plan import Plan
from engine.worker import FIRST_NODE

log = logging.getLogger("flwr")

# How often a message is given to a worker that ends before it has answered.
_ATTEMPTS = 3
# Records of arrays that are kept by workers because another client may get the same.
_SHARED = 4
# The most tasks that a worker is given at a time, and the seconds that they may take together.
_MOST, _LONGEST = 16, 0.02


@dataclass
class _Open:
    """A message without an answer.

    Attributes:
        message: as it was sent.
        deadline: until when it is good.
        attempts: how often it was given to a worker in vain.
        wanted: its answer is still waited for.
    """

    message: Message
    deadline: float
    attempts: int = 0
    wanted: bool = True


@dataclass
class _Worker:
    """A worker: its process, its connection, the messages that it has not answered, and the shared arrays it has.

    ``began`` is when it began with the first of the messages, ``killed`` that it took too long for one.
    """

    pid: int
    connection: Connection
    began: float = 0.0
    killed: bool = False
    tasks: deque[int] = field(default_factory=deque)
    shared: OrderedDict[int, None] = field(default_factory=OrderedDict)


class EngineGrid(LocalGrid):
    """Hands messages to workers as they are free and keeps the answers; one thread does it all, whenever it is asked.

    A worker that ends is replaced by the supervisor, and what it had not answered is given to another one.

    Args:
        plan: the run.
        control: from the supervisor; brings a number, a process id and a connection for each worker, and why the one
            before it ended.
        progress: called with the round and how many of the messages that were sent in it are answered.
    """

    def __init__(self, plan: Plan, control: Connection, progress: Callable[[str, int, int], None]) -> None:
        self._plan = plan
        self._control = control
        self._progress = progress
        self._selector = DefaultSelector()
        self._selector.register(control, EVENT_READ, None)
        self._workers: dict[int, _Worker] = {}
        self._numbers = 0
        self._open: dict[int, _Open] = {}
        self._queue: deque[int] = deque()
        self._busy: set[int] = set()  # clients with a worker: what they keep may change
        self._answers: dict[str, Message] = {}
        self._states: dict[int, KeptState] = {}
        self._records: OrderedDict[int, tuple[int, ArrayRecord]] = OrderedDict()  # by id: number and record
        self._longest = float(plan.values["round-timeout"])  # seconds after which no answer is waited for
        self._pace = 0.0  # seconds that a task took of late
        self._round = ("", 0, 0)

    @property
    def began(self) -> bool:
        """Whether a client was asked to train."""
        return self._round[1] > 0

    # Flower's Grid

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Nothing: no app asks for it."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message, as Flower's grids do."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all clients."""
        return range(FIRST_NODE, FIRST_NODE + self._plan.resources.clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages and return their ids."""
        ids = []
        for message in messages:
            self._numbers += 1
            number, kind, group = self._numbers, message.metadata.message_type, message.metadata.group_id
            given_id(message, str(number))
            self._open[number] = _Open(message, time.monotonic() + message.metadata.ttl)
            self._queue.append(number)
            if kind == "train":
                last, sent, answered = self._round
                self._round = (group, sent + 1, answered) if group == last else (group, 1, 0)
            ids.append(str(number))
        self._turn(0.0)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that have arrived."""
        self._turn(0.0)
        return [self._answers.pop(key) for key in message_ids if key in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return all answers together."""
        waiting = list(self.push_messages(messages))
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        found: list[Message] = []
        while len(found) < len(waiting) and time.monotonic() < deadline:
            self.wait(0.1)
            found += self.pull_messages(waiting)
        return found

    # The local engine

    def wait(self, seconds: float) -> None:
        """Return when there is an answer that was not there before; see ``LocalGrid``."""
        self._turn(seconds)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Wait no longer for the answers to these messages; see ``LocalGrid``."""
        for number in map(int, message_ids):
            self._answers.pop(str(number), None)
            item = self._open.get(number)
            if item is not None:
                # What a worker has it finishes: what its client keeps may change until then.
                item.wanted = False
        given = {number for worker in self._workers.values() for number in worker.tasks}
        self._open = {number: item for number, item in self._open.items() if item.wanted or number in given}
        self._queue = deque(number for number in self._queue if number in self._open)

    def states(self) -> Mapping[str, KeptState]:
        """Return what each client keeps; see ``LocalGrid``."""
        return {str(client): state for client, state in self._states.items()}

    def restore(self, states: Mapping[str, KeptState]) -> None:
        """Bring clients to what they kept; see ``LocalGrid``."""
        self._states |= {int(name): state for name, state in states.items()}

    def adopt(self, folder: Path, lineage: str, last: int, resumed: tuple[int, ...], starts: tuple[Start, ...]) -> None:
        """Bring the clients to what a simulation on Ray left in ``folder``; see ``LocalGrid``."""
        at = RoundContext(lineage=lineage, round=last, over=True, resumed=resumed, starts=starts)
        federation, method = (str(self._plan.values[key]) for key in ("federation", "method"))
        for client in range(self._plan.resources.clients):
            store = FileStore.at(folder, federation, method, str(client), sync=False)
            if not store.numbers():
                continue
            found = ClientState(store, at)
            for note in found.notes:
                log.warning("Client %d: %s", client, note)
            context = ContextStore(RecordDict())
            if found.version is not None:
                context.write(found.version, found.load())
            if context.kept is not None:
                self._states[client] = context.kept

    # Within

    def _turn(self, seconds: float) -> None:
        """Take what workers and supervisor have sent, waiting so long for the first of it, and hand out what waits."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._attach()
            elif key.fileobj is self._workers[key.data].connection:  # else it was replaced just now
                self._take(key.data)
        self._expire()
        self._hand_out()

    def _attach(self) -> None:
        """Take a new worker from the supervisor.

        Raises:
            EOFError: the supervisor has ended.
        """
        slot, pid, why = self._control.recv()
        connection = Connection(recv_handle(self._control))
        if slot in self._workers:
            self._drop(slot, why)
        self._workers[slot] = _Worker(pid, connection)
        self._selector.register(connection, EVENT_READ, slot)

    def _take(self, slot: int) -> None:
        """Take all that a worker has sent."""
        worker = self._workers[slot]
        try:
            while True:
                thing = from_bytes(worker.connection.recv_bytes())
                if isinstance(thing, Line):
                    log.log(thing.level, "%s", thing.text)
                else:
                    self._answered(worker, thing)
                if not worker.connection.poll():
                    return
        except (EOFError, OSError):
            # It has ended; the supervisor says how when it sends another one.
            self._selector.unregister(worker.connection)
            worker.connection.close()

    def _answered(self, worker: _Worker, answer: Answer) -> None:
        if answer.number not in worker.tasks:  # its time had run out just before
            return
        worker.tasks.remove(answer.number)
        worker.began = time.monotonic()
        item = self._open.pop(answer.number, None)
        self._pace = answer.seconds if not self._pace else 0.8 * self._pace + 0.2 * answer.seconds
        if item is None:
            return
        client = item.message.metadata.dst_node_id - FIRST_NODE
        self._busy.discard(client)
        if not item.wanted:
            return
        if answer.state is not None:
            self._states[client] = answer.state
        self._reply(item, Message(content_of(answer.parts, {}), reply_to=item.message))

    def _reply(self, item: _Open, reply: Message) -> None:
        self._answers[item.message.metadata.message_id] = reply
        if item.message.metadata.message_type == "train":
            group, sent, answered = self._round
            self._round = (group, sent, answered + 1)
            self._progress(*self._round)

    def _drop(self, slot: int, why: str) -> None:
        """Take back what a worker that has ended did not answer."""
        worker = self._workers.pop(slot)
        if not worker.connection.closed:
            self._take_rest(worker)
        for place, number in enumerate(worker.tasks):
            item = self._open.get(number)
            if item is None:
                continue
            client = item.message.metadata.dst_node_id - FIRST_NODE
            self._busy.discard(client)
            begun = place == 0 and not worker.killed  # the others it had not begun
            item.attempts += begun
            if not item.wanted:
                del self._open[number]
            elif item.attempts < _ATTEMPTS:
                self._queue.appendleft(number)
                if begun:
                    log.warning("Client %d is asked again: its process ended (%s)", client, why)
            else:
                del self._open[number]
                self._reply(item, unreadable(item.message, f"its process ended {_ATTEMPTS} times ({why})"))

    def _take_rest(self, worker: _Worker) -> None:
        """Take what a worker sent before it ended."""
        self._selector.unregister(worker.connection)
        with suppress(EOFError, OSError):
            while worker.connection.poll():
                thing = from_bytes(worker.connection.recv_bytes())
                if isinstance(thing, Answer):
                    self._answered(worker, thing)
        worker.connection.close()

    def _expire(self) -> None:
        """End workers that take too long for one client, and so have them replaced; forget what is out of time."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.tasks and not worker.killed and now - worker.began > self._longest:
                item = self._open.pop(worker.tasks.popleft(), None)
                if item is not None:
                    self._busy.discard(item.message.metadata.dst_node_id - FIRST_NODE)
                worker.killed = True
                with suppress(ProcessLookupError):  # it has ended, and the supervisor has seen it first
                    os.kill(worker.pid, signal.SIGKILL)
        while self._queue and self._open[self._queue[0]].deadline <= now:
            del self._open[self._queue.popleft()]

    def _hand_out(self) -> None:
        """Give messages that wait to the workers that have none."""
        if not self._queue:
            return
        for worker in self._workers.values():
            if not worker.tasks and not worker.killed and not worker.connection.closed:
                self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """Give a worker so many messages that they keep it busy for a while, and no other waits for them."""
        wanted = min(_MOST, len(self._queue) // (2 * len(self._workers)), int(_LONGEST / (self._pace or _LONGEST)))
        given: list[int] = []
        later: list[int] = []
        while self._queue and len(given) < max(1, wanted):
            number = self._queue.popleft()
            client = self._open[number].message.metadata.dst_node_id - FIRST_NODE
            if client in self._busy:
                later.append(number)
                continue
            self._busy.add(client)
            given.append(number)
        self._queue.extendleft(reversed(later))
        if not given:
            return
        batch = self._batch(worker, given)
        worker.tasks.extend(given)
        worker.began = time.monotonic()
        # If it has ended, what it was given is taken back when the supervisor sends another one.
        with suppress(OSError):
            worker.connection.send_bytes(to_bytes(batch))

    def _batch(self, worker: _Worker, numbers: list[int]) -> Batch:
        tasks: list[Task] = []
        new: dict[int, ArrayRecord] = {}
        used: set[int] = set()
        for number in numbers:
            message = self._open[number].message
            parts: Parts = {}
            for name, record in message.content.items():
                if not isinstance(record, ArrayRecord) or not record:
                    parts[name] = record
                    continue
                token = self._token(record)
                if token not in worker.shared:
                    new[token] = record
                parts[name] = Shared(token)
                used.add(token)
                worker.shared[token] = None
                worker.shared.move_to_end(token)
            about = message.metadata
            client = about.dst_node_id - FIRST_NODE
            state = self._states.get(client)
            tasks.append(Task(number, client, about.message_type, about.group_id, about.ttl, parts, state))
        # Those that were used last stay, and all that this batch needs.
        forget = [worker.shared.popitem(last=False)[0] for _ in range(len(worker.shared) - max(_SHARED, len(used)))]
        return Batch(tasks, new, tuple(forget))

    def _token(self, record: ArrayRecord) -> int:
        """Return the number of a record that several clients may get."""
        found = self._records.get(id(record))
        if found is None:
            self._numbers += 1
            found = self._records[id(record)] = (self._numbers, record)
            while len(self._records) > _SHARED:
                self._records.popitem(last=False)
        else:
            self._records.move_to_end(id(record))
        return found[0]
