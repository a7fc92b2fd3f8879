"""The layers of each network, as a list from input to output; ``build.py`` cuts the list into extractor and head.

A layer is what a paper counts as one: a convolution with its activation and pooling, a residual stage, a linear layer
with its activation. The names of its modules are part of the tensors' names.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from common.errors import ConfigError

# Ids of words; 0 is padding. data/text.py hashes words into the others.
VOCABULARY = 2**15

# VGG's configuration A: channels of each convolution, and whether a max pooling follows it.
_VGG11 = ((64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False), (512, True))


@dataclass(frozen=True)
class Layer:
    """Modules that the split keeps together; ``stage_end`` names the one whose output is a stage's feature map."""

    modules: tuple[tuple[str, nn.Module], ...]
    stage_end: str | None = None

    @property
    def linear(self) -> bool:
        """Whether this is a fully connected layer."""
        return any(isinstance(module, nn.Linear) for _, module in self.modules)


def mlp(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Two hidden layers of 128 and 64 units on the flattened input."""
    first = Layer((("flatten", nn.Flatten()), ("fc1", nn.Linear(math.prod(shape), 128)), ("relu1", nn.ReLU())))
    second = Layer((("fc2", nn.Linear(128, 64)), ("relu2", nn.ReLU())))
    return [first, second, _last(64, classes)]


def cnn2(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """Two 5 x 5 convolutions (32, 64), each with 2 x 2 max pooling, then linear layers of 512 and the classes.

    FedDFPA section 5.2; the same network in FedCPD and, with other names, in UA-PDFL.
    """
    return _convolutional("cnn2", shape, channels=(32, 64), kernels=(5, 5), linear=(512,), classes=classes)


def cnn2_small(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """As cnn2, with 16 and 32 channels and linear layers of 128 and the classes; the second convolution pads by 1.

    The network of PFAKD's published code for Fashion-MNIST; the paper's text names that of cnn3 (800 features before
    the linear layers on 28 x 28 images, where cnn3 has 64).
    """
    widths, kernels, padding = (16, 32), (5, 5), (0, 1)
    return _convolutional(
        "cnn2-small", shape, channels=widths, kernels=kernels, padding=padding, linear=(128,), classes=classes
    )


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
    return _lenet("cnn5", shape, classes, batch_norm=False)


def cnn5_bn(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """As cnn5, with batch normalisation between each convolution and its ReLU."""
    return _lenet("cnn5-bn", shape, classes, batch_norm=True)


def cnn5_wide(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """As cnn5, with 16 and 32 channels and linear layers of 2000, 500 and the classes.

    The widths are those of the five-layer network in FedGH's published code (its model for equal clients).
    """
    return _wide("cnn5-wide", shape, classes, batch_norm=False)


def cnn5_wide_bn(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """As cnn5-wide, with batch normalisation between each convolution and its ReLU."""
    return _wide("cnn5-wide-bn", shape, classes, batch_norm=True)


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


def vgg11(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """VGG-11 for small images: eight 3 x 3 convolutions, then linear layers of 512, 512 and the classes.

    Configuration A of Simonyan and Zisserman (2015), without batch normalisation and dropout, with the narrow linear
    layers that are usual for 32 x 32 images. Max pooling rounds up, which matters for 28 x 28 images only: they end as
    one pixel. UA-PDFL section 5.1.1 names the network and takes its first 28 layers for the extractor, which fits no
    VGG-11 without batch normalisation; it prints no more.
    """
    # From 17 pixels a side on, each of the five poolings has an input of more than one pixel.
    width, *size = _image("vgg11", shape, smallest=17)
    layers: list[Layer] = []
    for i, (out, pooled) in enumerate(_VGG11, 1):
        convolution = ((f"conv{i}", nn.Conv2d(width, out, 3, padding=1)), (f"relu{i}", nn.ReLU()))
        if pooled:
            layers.append(Layer((*convolution, (f"pool{i}", nn.MaxPool2d(2, ceil_mode=True))), f"pool{i}"))
            size = [(side + 1) // 2 for side in size]
        else:
            layers.append(Layer(convolution))
        width = out
    return [*layers, *_linear(width * math.prod(size), (512, 512), classes)]


class MeanEmbedding(nn.EmbeddingBag):
    """The mean of the vectors of a text's words, zero for a text without words.

    Padding (id 0) is left out. So are numbers that are no ids: a server may choose such a network for any rows, and on
    a GPU a wrong id ends the process.
    """

    def __init__(self, ids: int, width: int) -> None:
        super().__init__(ids, width, mode="mean", padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the means, (batch, width), for ids (batch, length) of any type, floating point too."""
        ids = x.long()
        return super().forward(ids.where((ids > 0) & (ids < self.num_embeddings), 0))


def fasttext(shape: tuple[int, ...], classes: int) -> list[Layer]:
    """For texts as word ids: the mean of their words' vectors of 32, then linear layers of 32 and the classes.

    FedDFPA section 5.2 names fastText (Joulin et al. 2017) and prints no widths; these, and no activation between the
    two linear layers, are PFLlib's, with whose baselines it compares. Inputs are rows of ids from 0 (padding) to
    2**15 - 1. Rows of other numbers have the same shape and are not detected here, but by ``check_inputs``.

    Raises:
        ConfigError: the inputs are not rows.
    """
    if len(shape) != 1:
        images = " x ".join(map(str, shape[1:]))
        raise ConfigError(f"model = 'fasttext': needs texts, a row of word ids each; the data have {images} images")
    first = Layer((("embedding", MeanEmbedding(VOCABULARY, 32)),))
    return [first, Layer((("fc1", nn.Linear(32, 32)),)), _last(32, classes)]


def check_inputs(model: str, x: Tensor, where: str) -> None:
    """Check that inputs of the right shape are such as a model of this name can learn from.

    Raises:
        ConfigError: they are no word ids, and it needs some; ``where`` says which inputs they are.
    """
    whole = not x.is_floating_point() or bool((x == x.floor()).all())
    if model == "fasttext" and len(x) and not (whole and x.min() >= 0 and x.max() < VOCABULARY):
        raise ConfigError(
            f"model = 'fasttext': needs word ids, whole numbers from 0 to {VOCABULARY - 1}; {where} are not all such"
        )


def _lenet(name: str, shape: tuple[int, ...], classes: int, *, batch_norm: bool) -> list[Layer]:
    widths, kernels, linear = (6, 16), (5, 5), (120, 84)
    return _convolutional(
        name, shape, channels=widths, kernels=kernels, linear=linear, classes=classes, batch_norm=batch_norm
    )


def _wide(name: str, shape: tuple[int, ...], classes: int, *, batch_norm: bool) -> list[Layer]:
    widths, kernels, linear = (16, 32), (5, 5), (2000, 500)
    return _convolutional(
        name, shape, channels=widths, kernels=kernels, linear=linear, classes=classes, batch_norm=batch_norm
    )


def _convolutional(
    name: str,
    shape: tuple[int, ...],
    *,
    channels: tuple[int, ...],
    kernels: tuple[int, ...],
    linear: tuple[int, ...],
    classes: int,
    padding: tuple[int, ...] = (),
    batch_norm: bool = False,
) -> list[Layer]:
    """Convolutions, each with ReLU and 2 x 2 max pooling; linear layers with ReLU; the last layer.

    Without ``padding``, the pixels that are added at each side for each convolution, none are.
    """
    padding = padding or (0,) * len(kernels)
    smallest = 1
    for kernel, pad in zip(reversed(kernels), reversed(padding), strict=True):
        smallest = 2 * smallest + kernel - 1 - 2 * pad
    width, *size = _image(name, shape, smallest)
    layers: list[Layer] = []
    for i, (out, kernel, pad) in enumerate(zip(channels, kernels, padding, strict=True), 1):
        normalised = ((f"bn{i}", nn.BatchNorm2d(out)),) if batch_norm else ()
        after = ((f"relu{i}", nn.ReLU()), (f"pool{i}", nn.MaxPool2d(2)))
        convolution = nn.Conv2d(width, out, kernel, padding=pad)
        layers.append(Layer(((f"conv{i}", convolution), *normalised, *after), f"pool{i}"))
        width, size = out, [(side + 2 * pad - kernel + 1) // 2 for side in size]
    return [*layers, *_linear(width * math.prod(size), linear, classes)]


def _linear(width: int, hidden: tuple[int, ...], classes: int) -> list[Layer]:
    """Linear layers with ReLU on flattened maps of ``width`` numbers, then the last layer."""
    layers: list[Layer] = []
    for i, out in enumerate(hidden, 1):
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
