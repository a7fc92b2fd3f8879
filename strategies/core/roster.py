"""The clients of a federation by name: Flower's node ids change when a node reconnects, names do not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

from common.accuracies import EXACT
from common.bounds import MOST_TIMES
from common.errors import FloretError
from common.names import NaturalKey, natural_key


@dataclass(frozen=True)
class Client:
    """A client as it described itself.

    Attributes:
        name: of the client.
        node_id: where it is reached; 0 for nowhere.
        train, validation, test: numbers of its samples.
        identity: the random text stored with its state.
        key: the fingerprint of its node's key, as ``common.proof`` checked it; empty if the node has none.
        own: its data are its own, not a partition of the run's dataset.
        accuracies: how it tells them, one of ``common.accuracies.TELLING``.
    """

    name: str
    node_id: int
    train: int
    validation: int
    test: int
    identity: str = ""
    key: str = ""
    own: bool = False
    accuracies: str = EXACT


class Roster:
    """The known clients, in the order of their names (numbers by value).

    A name belongs to the node key that first used it, or, if that node had none, to the ``identity`` of its state
    directory; it does so while its owner is away, and in a run that goes on from a checkpoint. A node without a key
    that was started again has another id and the same identity; it may get a key. A node with a key that lost its state
    directory has another identity and the same key. A key owns one name: what a client published stays with its name,
    and nobody is to fill a run with names.

    Args:
        trusted: the numbers of samples are known to be true, as in a simulation.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self.trusted = trusted
        self._median = 0.0  # cached until clients or connections change
        self._clients: dict[str, Client] = {}
        self._names: dict[int, str] = {}
        self._of_keys: dict[str, str] = {}  # the name that a key owns
        self._online: set[int] | None = None  # None: before the first ``see``
        self._unsure: set[int] = set()
        self._ordered: list[Client] = []  # cached, because sorting is slow; emptied by ``_put``
        self._keys: dict[str, NaturalKey] = {}  # what clients are sorted by, which takes longer

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        if not self._ordered:
            self._ordered = sorted(self._clients.values(), key=lambda client: self._keys[client.name])
        return iter(self._ordered)

    def __getitem__(self, name: str) -> Client:
        return self._clients[name]

    def __contains__(self, name: str) -> bool:
        return name in self._clients

    def counted(self, samples: int, most: int = MOST_TIMES) -> int:
        """Return what a client's number of training samples counts for: ``most`` times the median at most.

        The median is over those that are connected: under how many names a node was known before does not count.
        """
        if self.trusted:
            return samples
        if not self._median:
            self._median = median(client.train for client in self.present() or self)
        return min(samples, int(most * self._median))

    def see(self, nodes: Iterable[int]) -> None:
        """Note which nodes are connected now; one that has come back may have other data, or another name."""
        now = set(nodes)
        if self._online is not None:
            self._unsure |= {node for node in now - self._online if node in self._names}
        self._unsure &= now
        self._online, self._median = now, 0.0

    def present(self) -> list[Client]:
        """Return the clients whose nodes are connected, in order; before the first ``see`` all of them."""
        return [client for client in self if self._online is None or client.node_id in self._online]

    def away(self) -> list[Client]:
        """Return the known clients that are not ``present``, in order."""
        here = {client.name for client in self.present()}
        return [client for client in self if client.name not in here]

    def add(self, client: Client) -> None:
        """Add a client, or update a known one.

        A node that went by another name before is that client no longer, which is then away.

        Raises:
            FloretError: the name belongs to another node, or the node's key has another name.
        """
        known = self._clients.get(client.name)
        if known:
            _check_owner(known, client)
        own = self._of_keys.get(client.key)
        if own and own != client.name and not (known and known.key):
            raise FloretError(
                f"client-name {client.name}: the node key {client.key} has the name {own} in this run: give node "
                f"{client.node_id} that --client-name; to give the device another name, resume the run with "
                f"new-owners={own!r}"
            )
        if self._names.get(client.node_id, client.name) != client.name:
            self.part(client.node_id)
        self._put(client)
        self._names[client.node_id] = client.name
        self._unsure.discard(client.node_id)

    def part(self, node_id: int) -> None:
        """Note that the client which was reached at ``node_id`` is not there, as far as is known.

        What it was sent there may still be answered, so ``at`` knows it.
        """
        client = self._clients.get(self._names.get(node_id, ""))
        if client and client.node_id == node_id:
            self._put(replace(client, node_id=0))

    def doubt(self, name: str) -> None:
        """Note that what a client said of itself is not true any more."""
        if self._clients[name].node_id:
            self._unsure.add(self._clients[name].node_id)

    @property
    def unsure(self) -> frozenset[int]:
        """The nodes that have to be asked again who they are."""
        return frozenset(self._unsure)

    def restore(self, client: Client) -> None:
        """Add a client of a checkpoint, which keeps its name; its present node is not known."""
        self._put(replace(client, node_id=0))

    def at(self, node_id: int) -> Client:
        """Return the client that is reached, or was reached, at ``node_id``.

        Raises:
            KeyError: no client described itself from there.
        """
        return self._clients[self._names[node_id]]

    def known(self, node_id: int) -> bool:
        """Return whether a client described itself from ``node_id``."""
        return node_id in self._names

    def _put(self, client: Client) -> None:
        if client.name not in self._clients:
            self._keys[client.name] = natural_key(client.name)
        if client.key:
            self._of_keys.setdefault(client.key, client.name)
        self._clients[client.name] = client
        self._ordered, self._median = [], 0.0


def _check_owner(known: Client, client: Client) -> None:
    """Refuse a client whose name belongs to another node.

    Raises:
        FloretError: it does; says to which, and what would be right.
    """
    if known.key:
        if client.key != known.key:
            raise FloretError(
                f"client-name {client.name} belongs to the node key {known.key}, node {client.node_id} "
                f"{f'has {client.key}' if client.key else 'shows none'}: give it the right --key, or another "
                f"--client-name; for a new key of the same device, resume the run with new-owners={client.name!r}"
            )
    elif client.node_id != known.node_id and known.identity and client.identity != known.identity:
        raise FloretError(
            f"client-name {client.name} is taken: a node with another state directory has it, and node "
            f"{client.node_id} is not it: give it that --state-dir, or another --client-name; for a new state "
            f"directory of the same device, resume the run with new-owners={client.name!r}"
        )
