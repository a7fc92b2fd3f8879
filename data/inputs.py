"""Inputs for a model in use: an npz, an image, or a folder of images."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import RunConfig
from common.errors import DataError
from data.files import entries, is_dir, is_file
from data.images import EXTENSIONS, Form, read_images
from data.npz import has_array, read_arrays, read_samples, to_inputs


def read_inputs(
    source: Path, config: RunConfig, channels: int
) -> tuple[list[str], npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    """Return a name for each input, the inputs as in ``data.npz.Samples``, and the labels if there are any.

    Args:
        source: an npz with the array x and perhaps y, an image, or a folder that has images.
        config: the run config that the model was trained under; it says to which size images are brought.
        channels: what the model takes; images are converted to it.

    Raises:
        DataError: there is nothing of that kind, or it cannot be read.
    """
    if is_dir(source):
        files = [str(path) for path in entries(source) if path.suffix.lower() in EXTENSIONS and is_file(path)]
        if not files:
            raise DataError(f"{source} has no images; their names end in {', '.join(EXTENSIONS)}")
    elif not is_file(source):
        raise DataError(f"{source} is not there; it must be an npz with the array x, an image, or a folder of images")
    elif source.suffix.lower() in EXTENSIONS:
        files = [str(source)]
    elif has_array(source, "y"):
        samples = read_samples(source)
        return [str(i) for i in range(len(samples.y))], samples.x, samples.y
    else:
        x = to_inputs(read_arrays(source, ["x"])[0], f"{source}: array x")
        return [str(i) for i in range(len(x))], x, None
    return files, read_images(files, Form(config.image_size, channels), mixed=False), None
