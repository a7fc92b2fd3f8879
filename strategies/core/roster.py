"""The clients of a federation by name: Flower's node ids change when a node reconnects, names do not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from common.errors import FloretError
from common.names import natural_key


@dataclass(frozen=True)
class Client:
    """A client as it described itself: its name, the node it is reached at, its numbers of samples; ``identity`` is the
    random text stored with its state.
    """

    name: str
    node_id: int
    train: int
    validation: int
    test: int
    identity: str = ""


class Roster:
    """The known clients, in the order of their names (numbers by value)."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._names: dict[int, str] = {}
        self._online: set[int] | None = None  # None: before the first ``see``
        self._ordered: list[Client] = []  # cached, because sorting is slow; emptied by ``_put``

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        if not self._ordered:
            self._ordered = sorted(self._clients.values(), key=lambda client: natural_key(client.name))
        return iter(self._ordered)

    def __getitem__(self, name: str) -> Client:
        return self._clients[name]

    def __contains__(self, name: str) -> bool:
        return name in self._clients

    def see(self, nodes: Iterable[int]) -> None:
        """Note which nodes are connected now."""
        self._online = set(nodes)

    def present(self) -> list[Client]:
        """Return the clients whose nodes are connected, in order; before the first ``see`` all of them."""
        return [client for client in self if self._online is None or client.node_id in self._online]

    def add(self, client: Client) -> None:
        """Add a client, or update the node of a known one.

        Raises:
            FloretError: another node that is connected has this name.
        """
        known = self._clients.get(client.name)
        elsewhere = known and known.node_id != client.node_id and known.node_id in (self._online or ())
        if known and elsewhere and known.identity != client.identity:
            raise FloretError(f"client-name {client.name} is taken: a node with another state directory has it")
        self._put(client)
        self._names[client.node_id] = client.name

    def restore(self, client: Client) -> None:
        """Add a client of an earlier run; its present node is not known."""
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
        self._clients[client.name] = client
        self._ordered = []
