"""APPLE (Luo and Wu 2022): a client learns how much of each other client's core model its own model is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array
from flwr.serverapp import Grid

from common.config import between, choice
from common.tensors import Specs
from strategies.core import Client, RefusedError, Relay, Setup


@dataclass(frozen=True, kw_only=True)
class APPLEParameters:
    """``relationship_lr`` is the learning rate of the relationships; ``mu`` weighs their squared distance to the first
    ones, by a ``scheduler`` over the ``scheduled_part`` of the rounds, after which it is 0; a client downloads at most
    ``downloads`` core models a round, 0 for all.
    """

    relationship_lr: float = between(0)
    mu: float = between(0)
    scheduler: str = choice("exponential", "cosine")
    scheduled_part: float = between(0, 1)
    downloads: int = between(0)


def read_choice(answer: Mapping[str, Any], there: int, most: int) -> list[int]:
    """Return the places of the core models that a client asks for, among those that are ``there``.

    Raises:
        RefusedError: it is not a list of that, or they are more than ``most``.
    """
    wanted = answer.get("wanted")
    if not isinstance(wanted, list) or len(wanted) > most or len(set(wanted)) < len(wanted):
        raise RefusedError(f"the client's plan must have a list of at most {most} different peers, wanted")
    if not all(type(place) is int and 0 <= place < there for place in wanted):
        raise RefusedError(f"the client asked for a peer that is not among the {there}")
    return wanted


class APPLE(Relay):
    """Keeps each client's last core model and forwards it; it never averages.

    Up: the parameters of the core model. Down: those of the other clients that have published, or of those that the
    client chose, as ``i.<name>``; beside them the names and numbers of training samples of all clients, of which
    ``i`` is the place. All core models are from earlier rounds.
    """

    Parameters = APPLEParameters
    parameters: APPLEParameters

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the parameters; running statistics stay with the client."""
        parameters = dict(setup.model.named_parameters())
        return {name: spec for name, spec in setup.tensors(cls.shares).items() if name in parameters}

    def prepare(self, server_round: int, clients: list[Client], grid: Grid) -> list[Client]:
        """Note whose core models each client is sent; ask it which ones if they are more than ``downloads``."""
        published, most = list(self.post), self.parameters.downloads
        others = {client.name: [name for name in published if name != client.name] for client in clients}
        asked: dict[str, dict[str, Array]] = {name: {} for name, peers in others.items() if 0 < most < len(peers)}
        chosen = {name: peers for name, peers in others.items() if name not in asked}
        for client, answer in self.ask(asked, server_round, grid, {"published": published}):
            try:
                wanted = [published[place] for place in read_choice(answer, len(published), most)]
                chosen[client.name] = [name for name in wanted if name != client.name]
            except RefusedError as reason:
                self.refuse(client, str(reason))
        self.peers = {name: tuple(peers) for name, peers in chosen.items()}
        return [client for client in clients if client.name in chosen]

    def payload(self, client: Client, server_round: int) -> Mapping[str, Array]:
        """Return the core models, by the place of their client among all."""
        places = {other.name: place for place, other in enumerate(self.roster)}
        return self.post.forward({places[name]: (name, self._uplink) for name in self.peers[client.name]})

    def instructions(self, client: Client, server_round: int) -> dict[str, Any]:
        """Return the names of all clients and their numbers of training samples."""
        return {
            "clients": [other.name for other in self.roster],
            "samples": [self.roster.counted(other.train) for other in self.roster],
        }
