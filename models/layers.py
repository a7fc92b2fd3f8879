"""The layers of each network, as a list from input to output; ``build.py`` cuts the list into extractor and head.

A layer is what a paper counts as one: a convolution with its activation and pooling, a residual stage, a linear layer
with its activation. Its modules carry the names that the tensors have.
"""

import math
from dataclasses import dataclass

from torch import nn

from common.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """Modules that the split keeps together; ``stage_end`` names the one whose output is a stage's feature map."""

    modules: tuple[tuple[str, nn.Module], ...]
    stage_end: str | None = None


def mlp(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Two hidden layers of 128 and 64 units on the flattened input."""
    first = Layer((("flatten", nn.Flatten()), ("fc1", nn.Linear(math.prod(shape), 128)), ("relu1", nn.ReLU())))
    second = Layer((("fc2", nn.Linear(128, 64)), ("relu2", nn.ReLU())))
    return [first, second, _last(64, classes)]


def cnn2(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Two 5 x 5 convolutions (32, 64), each with 2 x 2 max pooling, then linear layers of 512 and the classes.

    FedDFPA section 5.1; the same network in FedCPD and, with other names, in UA-PDFL.
    """
    return _convolutional("cnn2", shape, channels=(32, 64), kernels=(5, 5), linear=(512,), classes=classes)


def cnn3(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Three convolutions (16, 32, 64) with 2 x 2 max pooling, then linear layers of 64 and the classes.

    PFAKD section 4.1; kernels of 3, 4 and 3 and the widths are those of the authors' published code (256 features
    before the linear layers on 32 x 32 images).
    """
    return _convolutional("cnn3", shape, channels=(16, 32, 64), kernels=(3, 4, 3), linear=(64,), classes=classes)


def cnn5(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Two 5 x 5 convolutions (6, 16), each with 2 x 2 max pooling, then linear layers of 120, 84 and the classes.

    PFPS-LWC section 4.1 names a five-layer CNN whose last layer is the head and prints no widths; these are the
    classical ones of LeNet-5.
    """
    return _convolutional("cnn5", shape, channels=(6, 16), kernels=(5, 5), linear=(120, 84), classes=classes)


def resnet18(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """ResNet-18 with the stem for small images: a 3 x 3 convolution of stride 1 and no max pooling."""
    from torchvision.models import resnet18 as torchvision_resnet18

    channels, _, _ = _image("resnet18", shape, smallest=8)
    net = torchvision_resnet18(num_classes=classes)
    stem = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    layers = [Layer((("conv1", stem), ("bn1", net.bn1), ("relu", nn.ReLU(inplace=True))), "relu")]
    layers += [Layer(((name, getattr(net, name)),), name) for name in ("layer1", "layer2", "layer3")]
    layers.append(Layer((("layer4", net.layer4), ("avgpool", net.avgpool), ("flatten", nn.Flatten())), "layer4"))
    return [*layers, _last(512, classes)]


def _convolutional(
    name: str,
    shape: tuple[int, ...],
    *,
    channels: tuple[int, ...],
    kernels: tuple[int, ...],
    linear: tuple[int, ...],
    classes: int,
) -> list[Layer]:
    """Convolutions without padding, each with ReLU and 2 x 2 max pooling; linear layers with ReLU; the last layer."""
    smallest = 1
    for kernel in reversed(kernels):
        smallest = 2 * smallest + kernel - 1
    width, *size = _image(name, shape, smallest)
    layers: list[Layer] = []
    for i, (out, kernel) in enumerate(zip(channels, kernels, strict=True), 1):
        modules = ((f"conv{i}", nn.Conv2d(width, out, kernel)), (f"relu{i}", nn.ReLU()), (f"pool{i}", nn.MaxPool2d(2)))
        layers.append(Layer(modules, f"pool{i}"))
        width, size = out, [(side - kernel + 1) // 2 for side in size]
    width *= math.prod(size)
    for i, out in enumerate(linear, 1):
        flatten = (("flatten", nn.Flatten()),) if i == 1 else ()
        layers.append(Layer((*flatten, (f"fc{i}", nn.Linear(width, out)), (f"relu_fc{i}", nn.ReLU()))))
        width = out
    return [*layers, _last(width, classes)]


def _last(width: int, classes: int) -> Layer:
    return Layer((("fc", nn.Linear(width, classes)),))


def _image(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        have = " x ".join(map(str, shape[1:])) + " images" if len(shape) == 3 else f"{shape[0]} features"
        raise ConfigError(f"model = {name!r}: needs images of at least {smallest} x {smallest}, the data have {have}")
    return shape[0], shape[1], shape[2]
