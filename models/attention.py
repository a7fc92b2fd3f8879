"""Attention and fusion blocks for the distillation of feature maps."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class CBAM(nn.Module):
    """Convolutional block attention: channel attention, then spatial attention (Woo et al. 2018, equations 1-3).

    Channel: ``sigmoid(MLP(avg) + MLP(max))`` over pixels, one hidden layer of ``channels / 16`` units, at least one.
    Spatial: ``sigmoid(conv7x7([avg; max]))`` over channels. Each multiplies the map.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // 16)
        self.squeeze = nn.Linear(channels, hidden)
        self.excite = nn.Linear(hidden, channels)
        self.spatial = nn.Conv2d(2, 1, kernel_size=7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended map, (batch, channels, height, width) as ``x``."""
        pooled = torch.stack([x.mean((2, 3)), x.amax((2, 3))])
        channel = self.excite(F.relu(self.squeeze(pooled))).sum(0)
        x = x * torch.sigmoid(channel)[:, :, None, None]
        pixels = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)
        return x * torch.sigmoid(self.spatial(pixels))


class CrossLayerFusion(nn.Module):
    """Fuse the maps of successive stages from the top down (FedCPD section 3.3).

    ``X^{l,*} = Cv2(upsample(Cv1(X^{l+1})) + Cv1(X^l) + Cv3(X^l))``; the top stage has no stage above it. Cv1 is 1 x 1,
    Cv2 and Cv3 are 3 x 3; Cv1 and Cv3 bring a stage to the same ``width``; upsampling is bilinear.

    Args:
        channels: channels of each stage, from the bottom up.
        width: channels in which stages are added.
        outputs: channels of each stage's output, ``width`` for all if None.
    """

    def __init__(self, channels: list[int], width: int, outputs: list[int] | None = None) -> None:
        super().__init__()
        outputs = outputs or [width] * len(channels)
        self.lateral = nn.ModuleList([nn.Conv2d(n, width, kernel_size=1) for n in channels])
        self.smooth = nn.ModuleList([nn.Conv2d(width, n, kernel_size=3, padding=1) for n in outputs])
        self.enhance = nn.ModuleList([nn.Conv2d(n, width, kernel_size=3, padding=1) for n in channels])

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return a fused map, (batch, output channels, height, width of the stage), for each stage."""
        lateral = self.unify(maps)
        fused = []
        for level, x in enumerate(maps):
            total = lateral[level] + self.enhance[level](x)
            if level + 1 < len(maps):
                above = F.interpolate(lateral[level + 1], size=x.shape[2:], mode="bilinear", align_corners=False)
                total = total + above
            fused.append(self.smooth[level](total))
        return fused

    def unify(self, maps: list[Tensor]) -> list[Tensor]:
        """Return ``Cv1`` of each map, (batch, width, height, width of the stage)."""
        return [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
