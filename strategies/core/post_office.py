"""What each client sent last, kept by the server for others to be sent: nothing of the present round is in it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord

from common.names import natural_key
from common.tensors import NamedArrays, Specs
from common.wire import pack, unpack


@dataclass(frozen=True)
class Mail:
    """What a client sent in ``round``, as it travelled."""

    round: int
    arrays: Mapping[str, Array]


class PostOffice:
    """Keeps what was accepted, packed as it came, and gives it out from the next round on.

    So what a client is sent depends on earlier rounds alone, not on the order in which clients answer. To go through it
    gives the clients in the order of their names.

    Args:
        specs: what a client sends.
        wire: in which type tensors of float32 travel.
    """

    def __init__(self, specs: Specs, wire: str) -> None:
        self._specs, self._wire = specs, wire
        self._kept: dict[str, Mail] = {}
        self._new: dict[str, Mail] = {}

    def __contains__(self, client: str) -> bool:
        return client in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._kept, key=natural_key))

    def __getitem__(self, client: str) -> NamedArrays:
        """Return the tensors that a client sent last.

        Raises:
            KeyError: it never sent any.
        """
        return unpack(ArrayRecord(dict(self._kept[client].arrays)), self._specs, self._wire)

    def tensors(self, client: str, names: Iterable[str]) -> NamedArrays:
        """Return some of the tensors that a client sent last; the others are not unpacked.

        Raises:
            KeyError: it never sent such a tensor.
        """
        arrays = self._kept[client].arrays
        return unpack(ArrayRecord({name: arrays[name] for name in names}), self._specs, self._wire, whole=False)

    def items(self) -> Iterator[tuple[str, NamedArrays]]:
        """Yield each client with the tensors that it sent last."""
        for client in self:
            yield client, self[client]

    def put(self, client: str, server_round: int, arrays: Mapping[str, Array]) -> None:
        """Take what a client sends in this round."""
        self._new[client] = Mail(server_round, dict(arrays))

    def end_round(self) -> None:
        """Let what was sent in this round take the place of what was sent before."""
        self._kept |= self._new
        self._new = {}

    def forget_round(self) -> None:
        """Drop what was sent in this round."""
        self._new = {}

    def forward(self, wanted: Mapping[int, tuple[str, Iterable[str]]]) -> dict[str, Array]:
        """Return tensors of peers as one client is sent them: the i-th peer's ``<name>`` as ``<i>.<name>``.

        Args:
            wanted: by i, the peer and the names of the tensors.

        Raises:
            KeyError: a peer never sent such a tensor.
        """
        return {f"{i}.{name}": self._kept[peer].arrays[name] for i, (peer, names) in wanted.items() for name in names}

    def rounds(self) -> dict[str, int]:
        """Return in which round each client sent what is kept of it."""
        return {client: self._kept[client].round for client in self}

    def load(self, client: str, server_round: int, tensors: NamedArrays) -> None:
        """Take back what ``[client]`` and ``rounds`` returned."""
        self._kept[client] = Mail(server_round, dict(pack(tensors, self._specs, self._wire)))
