"""The structure of every model: an extractor, then a head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Stack(nn.Sequential):
    """Named modules in sequence, some of which end a convolutional stage.

    Args:
        modules: pairs of name and module, in order.
        stage_ends: names of the modules whose output is a stage's feature map, in order.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], stage_ends: Sequence[str] = ()) -> None:
        super().__init__()
        for name, module in modules:
            self.add_module(name, module)
        self.stage_ends = tuple(stage_ends)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``; float32 under autocast, too."""
        return super().forward(x).float()  # type: ignore[no-any-return, no-untyped-call]

    def stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output for ``x`` and the feature maps, each (batch, channels, height, width), of the stages.

        Under autocast the output is float32, the maps are of the type that the modules compute in.
        """
        maps: list[Tensor] = []
        for name, module in self.named_children():
            x = module(x)
            if name in self.stage_ends:
                maps.append(x)
        return x.float(), maps


class SplitModel(nn.Module):
    """An extractor and a head; tensors are named ``extractor.<layer>.weight`` and ``head.weight`` (a head of one
    linear layer) or ``head.<layer>.weight`` (a head of several layers).
    """

    def __init__(self, extractor: Stack, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (batch, classes), of a batch of normalised inputs."""
        return self.head(self.extractor(x))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        """Return the features z = f(x), (batch, features): the extractor's output, flattened."""
        return self.extractor(x).flatten(1)  # type: ignore[no-any-return]

    @property
    def classifier(self) -> nn.Linear:
        """The last linear layer: its row c holds the weights of class c."""
        return [module for module in self.head.modules() if isinstance(module, nn.Linear)][-1]


def output_widths(model: SplitModel, input_shape: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the number of features that the extractor gives for one input, and of channels of each of its stages."""
    # Without numbers: the first client to join says how large inputs are.
    tensors = {f"extractor.{name}": tensor.to("meta") for name, tensor in model.extractor.state_dict().items()}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output, maps = functional_call(_Stages(model.extractor), tensors, torch.zeros(1, *input_shape, device="meta"))
    model.train(was_training)
    return output.numel(), [stage.shape[1] for stage in maps]


class _Stages(nn.Module):
    def __init__(self, extractor: Stack) -> None:
        super().__init__()
        self.extractor = extractor

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.extractor.stages(x)
