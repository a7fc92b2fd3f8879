"""Local training as an expert writes it by hand for one method and one model: the baseline for Floret's training.

Only the attention blocks of FedCPD are Floret's. Everything that can be prepared is: images stay uint8 in memory and
are normalised by the batch, batches are index slices, convolutions run channels last, SGD is fused, and the outputs of
a frozen network on the training data are computed once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from models import CBAM, CrossLayerFusion


class SmallNet(nn.Module):
    """Convolutions with ReLU and 2 x 2 max pooling, hidden linear layers with ReLU, one linear layer as the head."""

    def __init__(self, channels: Sequence[int], kernels: Sequence[int], linear: Sequence[int]) -> None:
        super().__init__()
        pairs = zip(channels, channels[1:], kernels, strict=False)
        self.convs = nn.ModuleList([nn.Conv2d(i, o, k) for i, o, k in pairs])
        self.hidden = nn.ModuleList([nn.Linear(i, o) for i, o in itertools.pairwise(linear)])
        self.head = nn.Linear(linear[-1], 10)

    def stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features and the feature map of each convolutional stage."""
        maps = []
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
            maps.append(x)
        x = x.flatten(1)
        for linear in self.hidden:
            x = F.relu(linear(x))
        return x, maps


class ResNet(nn.Module):
    """torchvision's ResNet-18 with the stem for small images."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        net = resnet18(num_classes=10)
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn = net.bn1
        self.layers = nn.ModuleList([net.layer1, net.layer2, net.layer3, net.layer4])
        self.head = net.fc

    def stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features and the feature map of each convolutional stage."""
        maps = [F.relu(self.bn(self.stem(x)), inplace=True)]
        for layer in self.layers:
            maps.append(layer(maps[-1]))
        return maps[-1].mean((2, 3)), maps


NETWORKS: dict[str, Callable[[], SmallNet | ResNet]] = {
    "cnn2": lambda: SmallNet((1, 32, 64), (5, 5), (1024, 512)),
    "cnn3": lambda: SmallNet((3, 16, 32, 64), (3, 4, 3), (256, 64)),
    "resnet18": ResNet,
}


class Blocks(nn.Module):
    """FedCPD's attention and fusion blocks, in Floret's order, so that weights can be copied over."""

    def __init__(self, channels: list[int], width: int) -> None:
        super().__init__()
        self.cbam = nn.ModuleList([CBAM(n) for n in channels])
        self.features = CrossLayerFusion(channels, width)
        self.attention = CrossLayerFusion(channels, width)

    def attended(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the attended maps."""
        return [block(x) for block, x in zip(self.cbam, maps, strict=True)]

    def target(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the teacher's maps, which the student's maps are trained to match."""
        return self.features.unify(maps) + self.attention.unify(self.attended(maps))


@dataclass
class Task:
    """The local training of one client: networks with their weights, data, hyperparameters.

    ``x`` is uint8 (n, channels, height, width), ``y`` int64 (n,); ``order`` draws a permutation for each epoch.
    ``received`` are the global prototypes, (10, d), and whether a class has one, (10,); ``kept`` are the client's own
    of the round before.
    """

    net: SmallNet | ResNet
    x: Tensor
    y: Tensor
    order: torch.Generator
    batch_size: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    layout: torch.memory_format = torch.channels_last
    teacher: SmallNet | ResNet | None = None
    blocks: Blocks | None = None
    teacher_blocks: Blocks | None = None
    received: tuple[Tensor, Tensor] | None = None
    kept: tuple[Tensor, Tensor] | None = None
    features: Tensor = field(init=False)

    def images(self, index: Tensor | slice) -> Tensor:
        """Return normalised images."""
        return self.x[index].float().div_(127.5).sub_(1.0).contiguous(memory_format=self.layout)

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return the images, labels and positions of each batch of all epochs."""
        for _ in range(self.epochs):
            order = torch.randperm(len(self.y), generator=self.order)
            for index in torch.split(order.to(self.y.device), self.batch_size):
                yield self.images(index), self.y[index], index

    def parts(self) -> Iterator[Tensor]:
        """Return the images in their order, as many at a time as the device likes best where nothing is trained."""
        size = 512 if self.x.is_cuda else 64
        return (self.images(slice(i, i + size)) for i in range(0, len(self.y), size))

    def sgd(self, *modules: nn.Module) -> torch.optim.SGD:
        """Return an optimizer over the parameters of ``modules``."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True
        )

    @torch.no_grad()
    def said_by(self, net: SmallNet | ResNet) -> Tensor:
        """Return the features of all training data, (n, d)."""
        net.eval()
        parts = [net.stages(x)[0] for x in self.parts()]
        net.train()
        return torch.cat(parts)


def fedper(task: Task) -> float:
    """Cross entropy over the whole model; return the mean loss."""
    return _whole(task, lambda z, y, index: F.cross_entropy(task.net.head(z), y))


def pfakd(task: Task) -> float:
    """Cross entropy and the squared distance to the features of the received extractor."""
    target = task.said_by(task.net)
    return _whole(task, lambda z, y, index: F.cross_entropy(task.net.head(z), y) + F.mse_loss(z, target[index]))


def feddfpa(task: Task) -> float:
    """Cross entropy and alignment to received and own prototypes; the new own ones are computed before training."""
    features = task.said_by(task.net)
    _means = [features[task.y == label].mean(0) for label in range(10)]
    assert task.received
    assert task.kept
    (received, known), (kept, had) = task.received, task.kept

    def loss(z: Tensor, y: Tensor, index: Tensor) -> Tensor:
        near = ((z - received[y]) * known[y, None]).square().mean()
        same = ((1 - F.cosine_similarity(z, kept[y])) * had[y]).mean()
        return F.cross_entropy(task.net.head(z), y) + near + 0.5 * same

    return _whole(task, loss)


def fedcpd(task: Task) -> float:
    """Step the head, then extractor and blocks, on each batch; one forward pass of the extractor serves both steps."""
    net, blocks, teacher, frozen = task.net.train(), task.blocks, task.teacher, task.teacher_blocks
    assert blocks
    assert teacher
    assert frozen
    assert task.received
    (prototypes, known), teacher = task.received, teacher.eval()
    body = [module for name, module in net.named_children() if name != "head"]
    head_sgd, sgd = task.sgd(net.head), task.sgd(*body, blocks)
    # The teacher's maps of the training data, in their order.
    computed: list[list[Tensor]] = []
    with torch.no_grad():
        for x in task.parts():
            computed.append(frozen.target(teacher.stages(x)[1]))
    targets = [torch.cat(parts) for parts in zip(*computed, strict=True)]
    total, steps = torch.zeros((), device=task.y.device), 0
    for x, y, index in task.batches():
        z, maps = net.stages(x)
        head_sgd.zero_grad()
        F.cross_entropy(net.head(z.detach()), y).backward()  # type: ignore[no-untyped-call]
        head_sgd.step()
        sgd.zero_grad()
        loss = F.cross_entropy(F.linear(z, net.head.weight.detach(), net.head.bias.detach()), y)
        loss = loss + 0.001 * ((z - prototypes[y]) * known[y, None]).square().sum(1).mean()
        logits = F.normalize(z, dim=1) @ F.normalize(prototypes, dim=1).T / 0.1
        logits = logits.masked_fill(~known, -torch.inf)
        own = logits.gather(1, y[:, None]).squeeze(1)
        loss = loss + torch.where(known[y], torch.logsumexp(logits, 1) - own, 0.0).mean()
        student = blocks.features(maps) + blocks.attention(blocks.attended(maps))
        loss = loss + torch.stack([F.mse_loss(s, t[index]) for s, t in zip(student, targets, strict=True)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        total += loss.detach()
        steps += 1
    return float(total) / steps


def _whole(task: Task, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Train the whole network; return the mean loss."""
    net, sgd = task.net.train(), task.sgd(task.net)
    total, steps = torch.zeros((), device=task.y.device), 0
    for x, y, index in task.batches():
        sgd.zero_grad()
        value = loss(net.stages(x)[0], y, index)
        value.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        total += value.detach()
        steps += 1
    return float(total) / steps


METHODS = {"fedper": fedper, "pfakd": pfakd, "fedcpd": fedcpd, "feddfpa": feddfpa}
