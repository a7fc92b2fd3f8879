"""DisPFL (Dai et al. 2022), client half: a sparse model, averaged where masks meet, and a mask that moves."""

import math

import torch
from torch import Tensor

from client_app.client import FloretClient
from client_app.training import Phase
from common.seeds import torch_generator
from common.tensors import MASK
from strategies.dispfl import DisPFLParameters, masked

# The mask that the client trains with after its next aggregation; that of its last training is ``mask.<name>``.
NEXT = "next."


def masked_mean(weights: list[Tensor], masks: list[Tensor]) -> Tensor:
    """Return ``sum_j w_j / sum_j m_j`` by element, 0 where no mask is; each ``w_j`` is 0 outside its mask ``m_j``."""
    total, count = weights[0].clone(), masks[0].to(weights[0].dtype, copy=True)
    for weight, mask in zip(weights[1:], masks[1:], strict=True):
        total += weight
        count += mask
    return total / count.clamp(min=1)


def annealed(rate: float, done: int, rounds: int) -> float:
    """Return ``rate / 2 * (1 + cos(pi * done / rounds))``: all of ``rate`` at first, nothing at the end."""
    return rate / 2 * (1 + math.cos(math.pi * done / rounds))


def moved(mask: Tensor, weights: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return ``mask`` without its ``count`` elements of the smallest weights, and with the ``count`` of the largest
    scores among those that are then outside; one that was taken away may come back. All of one shape.
    """
    flat = mask.flatten().clone()
    flat[torch.where(flat, weights.flatten().abs(), math.inf).argsort(stable=True)[:count]] = False
    flat[torch.where(flat, -math.inf, scores.flatten()).argsort(descending=True, stable=True)[:count]] = True
    return flat.reshape(mask.shape)


class DisPFL(FloretClient):
    """Keeps its sparse model, the mask that it was trained with, and the mask for its next round."""

    goes_on = True
    parameters: DisPFLParameters

    def receive(self) -> None:
        """Average with the neighbours, and put on the new mask."""
        sparse, own = masked(self.setup), self.model.state_dict()
        peers = self.peers([*self.shared_names(), *(MASK + name for name in sparse)]).values()
        for name in self.shared_names():
            models = [own[name], *(tensors[name] for tensors in peers)]
            if name not in sparse:
                own[name].copy_(masked_mean(models, [torch.ones_like(own[name])] * len(models)))
                continue
            # What an earlier run of another density left is no mask of this one.
            if NEXT + name not in self.memory or int(self.memory[NEXT + name].sum()) != sparse[name]:
                first = self.memory[NEXT + name] = self._first_mask(name, own[name], sparse[name])
                self.memory.setdefault(MASK + name, first)
            masks = [self.memory[MASK + name], *(tensors[MASK + name] for tensors in peers)]
            new = self.memory[MASK + name] = self.memory[NEXT + name]
            own[name].copy_(new * masked_mean([models[0] * masks[0], *models[1:]], masks))

    def train(self) -> float:
        """Train under the mask, which is put on after each step, then choose the mask for the next round."""
        parameters = dict(self.model.named_parameters())
        masks = [(parameters[name], self.memory[MASK + name]) for name in masked(self.setup)]

        def put_on() -> None:
            with torch.no_grad():
                for parameter, mask in masks:
                    parameter.mul_(mask)

        phase = Phase(list(parameters.values()), self.loss, after_step=put_on)
        loss = self.run_alternating(self.config.local_epochs, [phase])
        self._choose_masks()
        return loss

    def upload(self) -> dict[str, Tensor]:
        """Return the model and the masks that it was trained with."""
        return super().upload() | {MASK + name: self.memory[MASK + name] for name in masked(self.setup)}

    def _first_mask(self, name: str, like: Tensor, count: int) -> Tensor:
        """Return a mask of ``count`` elements, drawn by the tensor's name, and for each client anew if so is asked."""
        own = [self.setting.name] if self.parameters.own_masks else []
        order = torch.randperm(like.numel(), generator=torch_generator(self.config.seed, "mask", name, *own))
        mask = torch.zeros(like.numel(), dtype=torch.bool)
        mask[order[:count]] = True
        return mask.reshape(like.shape).to(self.device)

    def _choose_masks(self) -> None:
        """Move the smallest weights of each mask to where the gradient of one batch is largest, or at random."""
        done, sparse = self.message["round"] - 1, masked(self.setup)
        rate = annealed(self.parameters.prune_rate, done, self.config.rounds)
        parameters = {name: parameter for name, parameter in self.model.named_parameters() if name in sparse}
        scores = self._scores(parameters)
        for name, parameter in parameters.items():
            count = math.ceil(rate * sparse[name])
            self.memory[NEXT + name] = moved(self.memory[MASK + name], parameter.detach(), scores[name], count)

    def _scores(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
        """Return for each element how much it asks to be in the mask."""
        if self.parameters.regrow == "random" or not parameters:
            client, number = self.setting.name, self.message["round"]
            draws = {name: torch_generator(self.config.seed, "regrow", name, client, number) for name in parameters}
            return {n: torch.rand(p.shape, generator=draws[n]).to(self.device) for n, p in parameters.items()}
        self.model.eval()
        batch = next(iter(self.training_batches()))
        with self.autocast():
            loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return {name: gradient.abs() for name, gradient in zip(parameters, gradients, strict=True)}
