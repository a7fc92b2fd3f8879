"""UA-PDFL (Zhu et al. 2024), client half: unit representations, client-wise dropout, layer-wise personalization."""

import math
from typing import Any

import torch
from torch import Tensor

from client_app.batches import Batch
from client_app.client import FloretClient
from common.errors import FloretError
from common.seeds import numpy_generator
from strategies.ua_pdfl import AUXILIARY, UNIT, UAPDFLParameters

# The least probability that a divergence knows.
LEAST = 1e-30


def divergence(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """Return the divergence of two distributions over classes, (classes,), in nats.

    ``"symmetric-kl"``: ``(KL(p||q) + KL(q||p)) / 2``, UA-PDFL equation 6 as printed. ``"jensen-shannon"``:
    ``(KL(p||m) + KL(q||m)) / 2`` with ``m = (p + q) / 2``, the divergence that its text names.
    """
    p, q = p.double().clamp_min(LEAST), q.double().clamp_min(LEAST)
    if kind == "jensen-shannon":
        m = (p + q) / 2
        return ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
    return ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2


def probabilities(unit: Tensor) -> Tensor:
    """Return the distribution over classes, float64, whose logarithm ``unit`` is, both (classes,)."""
    return unit.double().softmax(0)


def auxiliary_term(own: Tensor, average: Tensor, reduction: str) -> Tensor:
    """Return ``||I_aux - I_aux_avg||^2``, both (features,): equation 12 with ``"sum"``, or its mean over features."""
    squared = (own - average).square()
    return squared.sum() if reduction == "sum" else squared.mean()


def weighted_mean(tensors: list[Tensor], samples: list[int]) -> Tensor:
    """Return the mean of tensors weighted by numbers of samples (Algorithm 1, lines 14 and 15)."""
    weights = torch.tensor(samples, dtype=torch.float64, device=tensors[0].device)
    weights = (weights / weights.sum()).reshape(-1, *[1] * tensors[0].dim())
    return (weights * torch.stack(tensors)).sum(0).to(tensors[0].dtype)


class UAPDFL(FloretClient):
    """Keeps its whole model; publishes it with its unit and auxiliary representation after every training.

    Receives ``i.unit`` of each peer ``i`` and answers with its request (``plan``), then receives ``i.auxiliary`` and
    the requested tensors, ``i.<name>``.
    """

    goes_on = True
    parameters: UAPDFLParameters

    def plan(self) -> dict[str, Any]:
        """Return the request to the peers (Algorithm 2, lines 9-19).

        Returns:
            ``replace``: the peer whose model takes the place of the own one, or -1; else ``extractors`` and ``heads``:
            the peers whose extractor and whose head are averaged with the own ones.
        """
        own, _ = self.representations()
        peers, th = self.peers(), self.parameters.th
        values = [
            float(divergence(probabilities(own), probabilities(peers[i][UNIT]), self.parameters.divergence))
            for i in range(len(peers))
        ]
        if self.parameters.client_dropout and all(value <= th for value in values):
            generator = numpy_generator(self.config.seed, "dropout", self.setting.name, self.message["round"])
            return {"replace": int(generator.integers(len(values))), "extractors": [], "heads": []}
        if not self.parameters.layer_personalization:
            return {"replace": -1, "extractors": [], "heads": []}
        near = [i for i, value in enumerate(values) if value < th]
        return {"replace": -1, "extractors": list(range(len(values))), "heads": near}

    def receive(self) -> None:
        """Take one peer's model, or average extractors and heads with the received ones."""
        peers = self.peers()
        auxiliaries = [tensors[AUXILIARY] for tensors in peers.values() if AUXILIARY in tensors]
        _, own = self.representations()
        self._average = torch.stack([own, *auxiliaries]).mean(0) if auxiliaries else None
        replace, samples = self.message["replace"], self.message["samples"]
        if max(peers, default=-1) >= len(samples) or not all(type(count) is int and count > 0 for count in samples):
            raise FloretError("the server's message must have a number of samples, above 0, of each peer")
        mine = self.model.state_dict()
        for name in self.shared_names():
            theirs = {i: tensors[name] for i, tensors in peers.items() if name in tensors}
            if replace >= 0:
                mine[name].copy_(theirs[replace])
            elif theirs:
                weights = [len(self.data.train), *(samples[i] for i in theirs)]
                mine[name].copy_(weighted_mean([mine[name], *theirs.values()], weights))

    def loss(self, batch: Batch) -> Tensor:
        """Return cross entropy plus ``mu`` times the auxiliary term (equation 12), the latter under current weights."""
        loss = super().loss(batch)
        mu = self.parameters.mu
        if mu and self._average is not None:
            self.model.extractor.eval()
            own = self.model.features(self._unit_tensor())[0]
            self.model.extractor.train()
            loss = loss + mu * auxiliary_term(own, self._average, self.parameters.aux_reduction)
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the whole model and its two representations (Algorithm 1, lines 19 and 20)."""
        unit, auxiliary = self.representations()
        return super().upload() | {UNIT: unit, AUXILIARY: auxiliary}

    def representations(self) -> tuple[Tensor, Tensor]:
        """Return ``log I``, (classes,), of ``I = softmax(f(ones))``, and ``I_aux = g(ones)``, (features,).

        Equations 5 and 11. As logarithms small probabilities survive a wire of float16.
        """
        self.model.eval()
        with torch.no_grad():
            output = self.model.extractor(self._unit_tensor())
            return self.model.head(output).log_softmax(1)[0].clamp_min(math.log(LEAST)), output.flatten(1)[0]

    def _unit_tensor(self) -> Tensor:
        return torch.ones(1, *self.data.input_shape, device=self.device)
