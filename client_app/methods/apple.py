"""APPLE (Luo and Wu 2022), client half: a model that is a mixture of core models, trained with its coefficients."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.client import FloretClient
from common.config import folder_name
from common.errors import FloretError
from common.names import without_prefix
from common.seeds import numpy_generator
from strategies.apple import APPLEParameters

CORE, RELATIONSHIP, PEER, DOWNLOADED = "core", "relationship.", "peer.", "downloaded"
# The exponential scheduler ends here.
_LAST = 0.001
# What the probability of a core model to be downloaded grows with, at least.
_LEAST_BASE = 1.5


def scheduled(parameters: APPLEParameters, server_round: int, rounds: int) -> float:
    """Return ``lambda(r) * mu``, the weight of the proximal term in a round (from 1); 0 after the scheduled ones."""
    part = parameters.scheduled_part
    passed, last = server_round - 1, max(int(part * rounds), 1 if part else 0)
    if passed >= last:
        return 0.0
    if parameters.scheduler == "exponential":
        return parameters.mu * float(_LAST ** (passed / last))
    return parameters.mu * (1 + math.cos(math.pi * passed / last)) / 2


def probabilities(relationships: list[float], downloaded: float) -> list[float]:
    """Return how likely each core model is downloaded: in proportion to ``b^|p|``, ``b = max(1.5, downloaded)``.

    Args:
        relationships: to the clients whose models these are.
        downloaded: how often a model was downloaded up to now, in the mean.
    """
    # Of the largest, so that no power overflows.
    most = max(abs(p) for p in relationships)
    powers = [max(_LEAST_BASE, downloaded) ** (abs(p) - most) for p in relationships]
    return [power / sum(powers) for power in powers]


class Mixture:
    """Models as rows of a matrix, and a mixture of them.

    Args:
        rows: (models, parameters); the first one is the client's own core model.
        places: the row of each client's core model.
    """

    def __init__(self, rows: Tensor, places: list[int]) -> None:
        self.rows = rows
        # Not index_add, whose sums on a GPU are in no order.
        self._whose = torch.zeros(len(rows), len(places))
        self._whose[places, list(range(len(places)))] = 1.0
        self._whose = self._whose.to(rows.device)

    def mixed(self, relationships: Tensor) -> Tensor:
        """Return ``sum_j p_j w_j``, (parameters,), with relationships p, (clients,)."""
        return (self._whose @ relationships) @ self.rows

    def products(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the relationships, ``<dL/dw, w_j>`` for each client, (clients,)."""
        return (self.rows @ gradient) @ self._whose


class APPLE(FloretClient):
    """Keeps its core model and its relationship to each client, by name; receives core models, sends its own.

    Where it may not download all of them, it keeps what it downloaded last of each, and how many it has downloaded.
    """

    goes_on = True
    parameters: APPLEParameters

    def begin(self, config: dict[str, Any]) -> None:
        """Forget the core models that others had in an earlier run."""
        super().begin(config)
        if not self.is_of_this_run():
            of_others = (PEER, DOWNLOADED)
            self.memory = {name: tensor for name, tensor in self.memory.items() if not name.startswith(of_others)}

    def plan(self) -> dict[str, Any]:
        """Return which core models to download: those that never were, then by how much they count."""
        published, most = self.message["published"], self.parameters.downloads
        generator = numpy_generator(self.config.seed, "downloads", self.setting.name, self.message["round"])
        others = [place for place, name in enumerate(published) if name != self.setting.name]
        new = [place for place in others if PEER + published[place] not in self.memory]
        wanted = [new[i] for i in generator.permutation(len(new))[:most]]
        known = [place for place in others if place not in new]
        if len(wanted) < most and known:
            relationships = [float(self.memory[RELATIONSHIP + published[place]]) for place in known]
            downloaded = float(self.memory[DOWNLOADED]) / len(others)
            chances = probabilities(relationships, downloaded)
            count = min(most - len(wanted), len(known))
            wanted += [known[i] for i in generator.choice(len(known), size=count, replace=False, p=chances)]
        return {"wanted": sorted(int(place) for place in wanted)}

    def receive(self) -> None:
        """Mix the model from the core models that arrived, and those that are known from before."""
        names, samples = self.message["clients"], self.message["samples"]
        fit = len(samples) == len(names) == len(set(names)) and self.setting.name in names
        fit = fit and all(type(count) is int and count > 0 for count in samples)
        # Their relationships are kept under their names.
        fit = fit and not any(map(folder_name, names))
        if not fit:
            raise FloretError("the server's list of clients and samples is none, or this client is not in it")
        self._names: list[str] = names
        total = sum(samples)
        self._first = torch.tensor([count / total for count in samples], device=self.device)
        known = zip(names, self._first, strict=True)
        self._relationships = nn.Parameter(torch.stack([self.memory.get(RELATIONSHIP + n, p) for n, p in known]))
        first = CORE not in self.memory
        core = self._flat(dict(self.model.named_parameters())) if first else self.memory[CORE].clone()
        self._core = nn.Parameter(core)
        peers = without_prefix(self.memory, PEER)
        for place, tensors in self.peers().items():
            if place >= len(names) or tensors.keys() != self.uplink().keys():
                raise FloretError(f"the server sent a core model of client {place} that is none")
            peers[names[place]] = self._flat(tensors)
        if self.parameters.downloads:
            self.memory |= {PEER + name: tensor for name, tensor in peers.items()}
            downloaded = self.memory.get(DOWNLOADED, torch.zeros((), device=self.device))
            self.memory[DOWNLOADED] = downloaded + len(self.peers())
        rows = {self.setting.name: self._core.detach(), **{name: peers[name] for name in names if name in peers}}
        if len(rows) < len(names):
            # Of a client that has published nothing yet, everybody knows the core model: it is the initial one.
            rows[""] = self._flat(dict(self.initial_model().named_parameters())).to(self.device)
        row_of = {name: row for row, name in enumerate(rows)}
        self._mixture = Mixture(torch.stack([*rows.values()]), [row_of.get(name, len(rows) - 1) for name in names])
        self._mix()

    def train(self) -> float:
        """Train the own core model and the relationships, by the gradient of the mixed model."""
        own = self._names.index(self.setting.name)
        core, relationships, mixture = self._core, self._relationships, self._mixture
        rate = self.config.decayed(self.parameters.relationship_lr, self.message["round"])
        optimizers = [self.optimizer([core]), self.optimizer([relationships], lr=rate, weight_decay=0.0)]
        weight = scheduled(self.parameters, self.message["round"], self.config.rounds)
        parameters = dict(self.model.named_parameters())

        def step(batch: Batch) -> Tensor:
            for parameter in parameters.values():
                parameter.grad = None
            with self.autocast():
                loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                gradient = self._flat({name: p.grad for name, p in parameters.items() if p.grad is not None})
                apart = relationships - self._first
                core.grad = relationships[own] * gradient
                relationships.grad = mixture.products(gradient) + 2 * weight * apart
                loss = loss + weight * apart.square().sum()
            for optimizer in optimizers:
                optimizer.step()
            mixture.rows[0] = core.detach()
            self._mix()
            return loss

        return self.run_steps(self.config.local_epochs, step)

    def upload(self) -> dict[str, Tensor]:
        """Return the own core model; keep it and what is known of the clients that the server lists."""
        core = self._core.detach().clone()
        known = zip(self._names, self._relationships.detach().clone(), strict=True)
        peers = {PEER + name for name in self._names} | {DOWNLOADED}
        kept = {name: tensor for name, tensor in self.memory.items() if name in peers}
        self.memory = kept | {CORE: core} | {RELATIONSHIP + name: relationship for name, relationship in known}
        return self._tensors(core)

    def _mix(self) -> None:
        """Let the model be the mixture."""
        mixed = self._tensors(self._mixture.mixed(self._relationships.detach()))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(mixed[name])

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the values of the model's parameters in one row."""
        return torch.cat([tensors[name].detach().reshape(-1) for name, _ in self.model.named_parameters()])

    def _tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters in a row by name; views of it."""
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
