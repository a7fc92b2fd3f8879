"""Networks that split into an extractor and a head, and the names of their tensors."""

from models.build import MODELS, build_model
from models.names import PARTS, Part, batch_norm_names, tensor_names
from models.split import SplitModel, Stack, feature_width

__all__ = [
    "MODELS",
    "PARTS",
    "Part",
    "SplitModel",
    "Stack",
    "batch_norm_names",
    "build_model",
    "feature_width",
    "tensor_names",
]
