"""Inputs for prediction: an npz, an image, a folder of images, or a file of texts."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import RunConfig
from common.errors import DataError, one_line
from data.files import entries, is_dir, is_file
from data.images import EXTENSIONS, Form, read_images
from data.npz import has_array, read_arrays, to_inputs, to_labels
from data.text import BUCKETS, LENGTH, tokens


def read_inputs(
    source: Path, config: RunConfig, shape: tuple[int, ...], dtype: str
) -> tuple[list[str], npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    """Return a name for each input, the inputs as in ``data.npz.Samples``, and the labels if there are any.

    Args:
        source: an npz with the array x and perhaps y, an image, a folder that has images, or for a model of word ids a
            ``.txt`` with a text on each line.
        config: the run config that the model was trained under; images are resized to its ``image-size``.
        shape, dtype: what the model takes; images are converted to its channels, but colour to grey only if the run
            config says so.

    Raises:
        DataError: there is nothing of that kind, or it cannot be read.
    """
    words = dtype == "int32"
    if is_dir(source):
        files = [str(path) for path in entries(source) if path.suffix.lower() in EXTENSIONS and is_file(path)]
        if not files:
            folders = [path.name for path in entries(source) if is_dir(path)]
            below = f"; its folders are not read, give one of them, such as {folders[0]}" if folders else ""
            raise DataError(f"{source} has no images, whose names end in {', '.join(EXTENSIONS)}{below}")
    elif not is_file(source):
        others = (
            "a .txt with a text on each line" if words and shape == (LENGTH,) else "an image, or a folder of images"
        )
        raise DataError(f"{source} is not there; it must be an npz with the array x, or {others}")
    elif source.suffix.lower() in EXTENSIONS:
        files = [str(source)]
    elif words and shape == (LENGTH,) and source.suffix.lower() == ".txt":
        texts = _lines(source)
        return [str(i) for i in range(len(texts))], tokens(texts), None
    elif source.suffix.lower() == ".txt":
        raise DataError(f"{source}: this model takes no texts; its inputs are {dtype} of shape {shape}")
    elif source.suffix.lower() != ".npz" and not zipfile.is_zipfile(source):
        raise DataError(
            f"{source}: must be an npz with the array x, or an image, whose name ends in {', '.join(EXTENSIONS)}"
        )
    else:
        x, y = _arrays(source, words)
        return [str(i) for i in range(len(x))], x, y
    # Converted to grey only if that was done in training, too; to colour nothing is lost.
    channels = 0 if shape[0] == 1 and not config.image_channels else shape[0]
    images = read_images(files, Form(config.image_size, channels), mixed=True)
    if not channels and len(images[0]) > 1:
        raise DataError(f"{source}: has images in colour, and the model was trained on grey ones; convert them")
    return files, images, None


def _arrays(source: Path, words: bool) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    x = read_arrays(source, ["x"])[0]
    where = f"{source}: array x"
    if not words:
        x = to_inputs(x, where)
    elif x.ndim != 2 or x.dtype.kind not in "iu" or x.min() < 0 or x.max() > BUCKETS:
        raise DataError(
            f"{where} has type {x.dtype} and shape {x.shape}; it must be word ids (n, words), 0 to {BUCKETS}"
        )
    else:
        x = x.astype(np.int32)
    if not has_array(source, "y"):
        return x, None
    y = to_labels(read_arrays(source, ["y"])[0], f"{source}: array y")
    if len(x) != len(y):
        raise DataError(f"{source}: x has {len(x)} samples, y has {len(y)} labels")
    return x, y


def _lines(source: Path) -> list[str]:
    try:
        # Not ``splitlines``: that also ends lines where only a typesetter would, and labels would not match.
        texts = source.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source}: cannot be read as text in UTF-8 ({one_line(error)})") from error
    if texts == [""]:
        raise DataError(f"{source}: has no texts; there must be one on each line")
    return texts
