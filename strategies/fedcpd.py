"""FedCPD (Jin et al. 2025): FedRep, distilled from the client's own last extractor, with prototype contrast."""

from dataclasses import dataclass

from torch import Tensor, nn

from common.config import between, choice
from common.tensors import Specs
from models import CBAM, CrossLayerFusion
from strategies.core import FloretStrategy, Network, Setup

# The name of the distillation blocks among a client's networks.
BLOCKS = "distillation"


@dataclass(frozen=True, kw_only=True)
class FedCPDParameters:
    """``every_batch``: head and extractor take turns on every batch; else the head is trained for ``local-epochs``, and
    then the extractor. ``distill``, ``align`` and ``contrast`` are switches; ``alpha`` weighs the alignment, ``beta``
    the contrast, ``gamma`` the distillation; ``tau`` is the temperature of the contrast, ``fusion_width`` the channels
    in which maps are fused. ``teacher_maps``: the teacher's maps go through its Cv1 (``"unified"``), or are taken as
    they are (``"raw"``), and the student's Cv2 gives as many channels.
    """

    every_batch: bool
    distill: bool
    align: bool
    contrast: bool
    alpha: float = between(0)
    beta: float = between(0)
    gamma: float = between(0)
    tau: float = between(0, above=True)
    fusion_width: int = between(1)
    teacher_maps: str = choice("unified", "raw")


class Distillation(nn.Module):
    """The client's own blocks: CBAM for each stage, cross-layer fusion of feature and of attention maps.

    With ``raw`` the teacher's maps are taken as they are, and the student's are fused to as many channels.
    """

    def __init__(self, channels: list[int], width: int, raw: bool) -> None:
        super().__init__()
        self.raw = raw
        outputs = channels if raw else None
        self.attention = nn.ModuleList([CBAM(n) for n in channels])
        self.fuse_features = CrossLayerFusion(channels, width, outputs)
        self.fuse_attention = CrossLayerFusion(channels, width, outputs)

    def student(self, maps: list[Tensor]) -> list[Tensor]:
        """Return ``F^{l,*}`` and ``A^{l,*}`` of all stages, each (batch, channels, height, width of the stage)."""
        return self.fuse_features(maps) + self.fuse_attention(self._attended(maps))  # type: ignore[no-any-return]

    def teacher(self, maps: list[Tensor]) -> list[Tensor]:
        """Return ``F^l`` and ``A^l`` of all stages, shaped as the student's: through Cv1 alone, or as they are."""
        if self.raw:
            return maps + self._attended(maps)
        return self.fuse_features.unify(maps) + self.fuse_attention.unify(self._attended(maps))

    def _attended(self, maps: list[Tensor]) -> list[Tensor]:
        return [block(x) for block, x in zip(self.attention, maps, strict=True)]


class FedCPD(FloretStrategy):
    """Down: the extractor and the global prototypes that exist. Up: the extractor and ``prototype.<class>`` of own
    classes, (features,) float32.

    Aggregate: plain mean of extractors; ``P_c`` = plain mean over the sampled clients that have class c (Algorithm 1,
    line 2).
    """

    shares = "extractor"
    weighted = False
    Parameters = FedCPDParameters
    parameters: FedCPDParameters

    def check(self) -> None:
        """Refuse distillation for an extractor that has no convolutional stage."""
        if self.parameters.distill:
            self.need_stages("fedcpd.distill")

    @classmethod
    def networks(cls, setup: Setup) -> dict[str, Network]:
        """Return the distillation blocks, which stay private, if there is distillation."""
        own: FedCPDParameters = setup.parameters
        if not own.distill:
            return {}
        raw = own.teacher_maps == "raw"
        blocks = Network(lambda: Distillation(setup.stage_channels, own.fusion_width, raw), shared=False)
        return {BLOCKS: blocks}

    @classmethod
    def uplink(cls, setup: Setup) -> Specs:
        """Return the extractor and a prototype for each class, the latter optional."""
        return {**super().uplink(setup), **setup.prototypes()}
