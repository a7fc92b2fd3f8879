"""Networks that split into an extractor and a head, and the names of their tensors."""

from models.attention import CBAM, CrossLayerFusion
from models.build import MODELS, Head, build_model, count_values, gain_of, head_layers, initialise, last_layers
from models.examples import check_examples
from models.layers import check_inputs
from models.names import Part, batch_norm_names, tensor_names
from models.split import SplitModel, Stack, output_widths

__all__ = [
    "CBAM",
    "MODELS",
    "CrossLayerFusion",
    "Head",
    "Part",
    "SplitModel",
    "Stack",
    "batch_norm_names",
    "build_model",
    "check_examples",
    "check_inputs",
    "count_values",
    "gain_of",
    "head_layers",
    "initialise",
    "last_layers",
    "output_widths",
    "tensor_names",
]
