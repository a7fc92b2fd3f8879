"""Who takes part: nodes are asked who they are when they connect, and again when they come back."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from common.accuracies import EXACT, NONE, ROUNDED
from common.config import RunConfig, Scalar, split_names
from common.errors import ConfigError, FloretError, printable
from common.flower import Answers, is_simulated, push
from common.simulation import LocalGrid
from models import count_values
from strategies.core import Client, Description, RefusedError, Roster, in_flight
from strategies.core.replies import INPUT_TYPES, opened

log = logging.getLogger("flwr")

# Seconds: how long a start waits for the other connected nodes once enough have answered, and after how long a node
# that was refused is asked again (its user may have put the data right and started it again under the same key).
_GRACE = 15.0
_ASK_AGAIN = 30.0
# Seconds that a round waits for clients to say again what they have, after they were refused for having something else.
RENEWAL = 10.0
# After how long a start says that it waits for clients; then again after six times as long.
_SILENCE = 10.0
# Values of the model that the clients' inputs and classes ask for: 4 GiB as float32, of which the server holds several.
LARGEST_MODEL = 2**30


def question(node: int, action: str, config: ConfigRecord, timeout: float) -> Message:
    """Return a message that asks ``node`` one thing."""
    content = RecordDict({"config": config})
    return Message(content, node, f"{MessageType.QUERY}.{action}", ttl=timeout)


@dataclass(frozen=True)
class _Question:
    """A node that was asked who it is, and when; ``again``: it is known."""

    node: int
    asked: float
    again: bool


class Federation:
    """The clients as they describe themselves, and what their data have in common.

    Attributes:
        input_shape, input_type, num_classes, class_names: of the data of all clients.
        settled: the model is built, so a client with more classes comes too late.
        run: what the question who a node is tells of the run.
        told: the clients' numbers of samples are those that they have; a node that protects its data says other ones.
    """

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self.grid = grid
        self.config = config
        self.input_shape: tuple[int, ...] = ()
        self.input_type = ""
        self.num_classes = config.num_classes
        self.class_names: tuple[str, ...] | None = None
        self.settled = False
        self.run: Mapping[str, Scalar | list[int] | list[str]] = {}
        self._simulated = is_simulated(grid)
        self.roster = Roster(trusted=self._simulated)
        self.told = self._simulated or not config.privacy.on
        self._partitions = 0
        self._pending: dict[str, _Question] = {}
        self._answers = Answers(grid)
        self._refused: dict[int, tuple[float, str]] = {}
        self._gathered = False
        self._away: set[str] = set()
        self._left: list[tuple[str, str]] = []

    def gather(self, joined: Callable[[int, int], None]) -> None:
        """Wait until ``min-clients`` have joined, in simulation all of them.

        Args:
            joined: called as they come with how many are here and how many are wanted.

        Raises:
            FloretError: they did not within ``round-timeout``; in simulation, a client cannot take part.
        """
        begun = time.monotonic()
        deadline = begun + self.config.round_timeout
        enough: float | None = None
        tell = begun + _SILENCE
        pause = 0.01
        while True:
            refused = self.refresh()
            if refused and self._simulated:
                raise FloretError(refused[0])
            wanted = max(self.config.min_clients, self._partitions if self._simulated else 1)
            here = len(self.roster.present())
            joined(here, wanted)
            # How many a simulation has, the first that answers says.
            hint = "" if self._simulated else "; see min-clients"
            now = time.monotonic()
            if here >= wanted:
                enough = enough or now
                if not self._pending or now - enough > _GRACE or now > deadline:
                    self._gathered = True
                    return
            elif now > tell:
                if self._simulated and not self._partitions:
                    log.info("Waiting for the first client of the simulation")
                else:
                    log.info("Waiting for clients: %d of %d are there%s", here, wanted, hint)
                tell = now + 6 * _SILENCE
            if now > deadline:
                why = printable("; ".join(sorted({reason for _, reason in self._refused.values()})))
                raise FloretError(
                    f"{here} of {wanted} clients joined within round-timeout = {self.config.round_timeout:g} s{hint}"
                    f"{f' ({why})' if why else ''}"
                )
            if isinstance(self.grid, LocalGrid):
                self.grid.wait(0.1)
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.02 if self._simulated else 0.2)

    def about(self) -> dict[str, Any]:
        """Return what the clients' data have in common, for a checkpoint."""
        names = None if self.class_names is None else list(self.class_names)
        return {
            "input-shape": list(self.input_shape),
            "input-type": self.input_type,
            "num-classes": self.num_classes,
            "class-names": names,
            "num-partitions": self._partitions,
        }

    def restore(self, about: dict[str, Any], clients: list[Client]) -> None:
        """Take back what ``about`` returned and who took part; whoever is there now is asked again.

        Names of ``new-owners`` belong to nobody until a node uses them.

        Raises:
            ConfigError: nobody of such a name took part.
        """
        free = split_names(self.config.new_owners)
        for name in free:
            if name not in {client.name for client in clients}:
                raise ConfigError(f"new-owners = {self.config.new_owners!r}: the run to resume has no client {name!r}")
        self.input_shape, self.num_classes = tuple(about["input-shape"]), about["num-classes"]
        self.input_type = about.get("input-type", "")
        if not self._simulated:  # how many a simulation has now is compared with what it had by its clients
            self._partitions = about.get("num-partitions", 0)
        self.class_names = None if about["class-names"] is None else tuple(about["class-names"])
        self.settled = True
        for client in clients:
            self.roster.restore(replace(client, key="", identity="") if client.name in free else client)

    def refresh(self) -> list[str]:
        """Take in who answered, ask nodes that are new or may have changed who they are, and wait for nobody.

        In simulation the very first is asked alone: what is wrong for it, such as a dataset that is not there, is wrong
        for all.

        Returns:
            Why a client cannot take part, a line each.
        """
        nodes = set(self.grid.get_node_ids())
        self.roster.see(nodes)
        refused = []
        for node, asked, reply in self._described():
            if isinstance(reply, Message) and reply.has_error() and node not in nodes:
                continue
            try:
                if isinstance(reply, FloretError):
                    raise reply
                self._add(node, asked, reply)
                self._refused.pop(node, None)
            except FloretError as error:
                # If it took part, it cannot any more: it is another client, or has other data.
                self.roster.part(node)
                if self._refused.get(node, (0, ""))[1] != str(error):
                    log.warning("A client cannot take part: %s", error)
                    refused.append(str(error))
                self._refused[node] = (time.monotonic(), str(error))
        self._pending = {key: question for key, question in self._pending.items() if question.node in nodes}
        self._answers.keep(self._pending)
        waiting = {question.node for question in self._pending.values()}
        unsure = self.roster.unsure
        unknown = [
            node for node in sorted(nodes) if (not self.roster.known(node) or node in unsure) and node not in waiting
        ]
        due = [
            node for node in unknown if time.monotonic() - self._refused.get(node, (-_ASK_AGAIN, ""))[0] >= _ASK_AGAIN
        ]
        if self._simulated:
            due = due[: in_flight() - len(self._pending) if self.roster else 1 - len(self._pending)]
        self._ask(due)
        if self._gathered and not self._simulated:
            self._note_who_left()
        return refused

    def departures(self) -> list[tuple[str, str]]:
        """Return client and line of each that went away since the last call; that it is back, the log alone says.

        In a run that goes on, those that have not come belong to the first call.
        """
        left, self._left = self._left, []
        return left

    def _note_who_left(self) -> None:
        away = [client.name for client in self.roster.away()]
        line = f"is away ({len(self.roster) - len(away)} of {len(self.roster)} clients are there)"
        for name in away:
            if name not in self._away:
                log.warning("Client %s %s", name, line)
                self._left.append((name, line))
        self._away = set(away)

    @property
    def renewing(self) -> bool:
        """Whether a client was asked again just now and has not answered yet."""
        since = time.monotonic() - RENEWAL
        return any(question.again and question.asked > since for question in self._pending.values())

    def _ask(self, nodes: list[int]) -> None:
        if nodes:
            config = ConfigRecord({**self.run})
            messages = [question(node, "describe", config, self.config.round_timeout) for node in nodes]
            for node, message_id in zip(nodes, push(self.grid, messages), strict=True):
                self._pending[message_id] = _Question(node, time.monotonic(), self.roster.known(node))

    def _described(self) -> Iterator[tuple[int, str, Message | FloretError]]:
        """Yield the answers that are there, or why one cannot be read, each with the node and its question's id."""
        if self._simulated:  # the clients are on the user's own machine, and many
            for reply in self.grid.pull_messages(list(self._pending)) if self._pending else []:
                message_id = reply.metadata.reply_to_message_id
                asked = self._pending.pop(message_id, None)
                if asked is not None:
                    yield asked.node, message_id, reply
            return
        for message_id, asked in list(self._pending.items()):
            answer: Message | FloretError | None
            try:
                answer = self._answers.pull(message_id)
            except FloretError as error:
                answer = RefusedError(f"node {asked.node}: {error}")
            if answer is not None:
                del self._pending[message_id]
                yield asked.node, message_id, answer

    def _add(self, node: int, asked: str, reply: Message) -> None:
        if self._simulated:
            opened(reply)  # its error is the user's own, and most are those of all clients: no node is named
        said = Description.read(reply, node, asked)
        name, shape, classes, names = said.name, said.input_shape, said.num_classes, said.class_names
        if self.input_shape and shape != self.input_shape:
            raise RefusedError(f"client {name}: input shape {shape}, the federation's is {self.input_shape}")
        if self.input_type and said.input_type and said.input_type != self.input_type:
            raise RefusedError(
                f"client {name}: inputs are {INPUT_TYPES[said.input_type]}, the federation's are "
                f"{INPUT_TYPES[self.input_type]}; all must be alike"
            )
        if self._partitions and said.partitions and said.partitions != self._partitions:
            raise RefusedError(
                f"client {name}: num-partitions is {said.partitions}, others of the federation have "
                f"{self._partitions}: its samples would be theirs, too"
            )
        if self.class_names is not None and names != self.class_names:
            raise RefusedError(
                f"client {name}: classes {', '.join(names) or 'without names'}, the federation's are "
                f"{', '.join(self.class_names) or 'without names'}; set class-names"
            )
        if (self.settled or self.config.num_classes) and classes > self.num_classes:
            raise RefusedError(f"client {name}: {classes} classes, the model has {self.num_classes}; set num-classes")
        self._check_model(name, shape, max(self.num_classes, classes))
        back = name in self.roster
        samples = (said.train, said.validation, said.test)
        self.roster.add(Client(name, node, *samples, said.identity, said.key, said.own, said.accuracies))
        self.input_shape, self.class_names = shape, names
        self.input_type = self.input_type or said.input_type
        self.num_classes = max(self.num_classes, classes)
        self._partitions = max(self._partitions, said.partitions)
        if not self._simulated:
            tells = f"{said.train} training samples" if self.told else "it does not tell its samples"
            tells += {EXACT: "", ROUNDED: "; it rounds accuracies", NONE: "; it tells no accuracies"}[said.accuracies]
            log.info("Client %s %s (%s)", name, "is back" if back else "joined", tells)

    def _check_model(self, name: str, shape: tuple[int, ...], classes: int) -> None:
        """Check that the model can be built for such inputs and so many classes.

        Raises:
            FloretError: it cannot take such inputs, or would be too large.
        """
        try:
            values = count_values(self.config.model, shape, classes)
        except FloretError as error:
            raise RefusedError(f"client {name}: {error}") from error
        if values > LARGEST_MODEL:
            raise RefusedError(
                f"client {name}: with inputs of {shape} and {classes} classes the model {self.config.model!r} has "
                f"{values} values, more than {LARGEST_MODEL}"
            )
