"""The datasets that Floret can read, each as one pool of samples that is then partitioned among clients."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from common.config import RunConfig, split_names
from common.errors import DataError, one_line
from common.extras import require
from common.seeds import numpy_generator
from data.files import entries, is_dir, is_file
from data.images import (
    CLASS_FILE,
    EXTENSIONS,
    Form,
    ImageFiles,
    check_named,
    check_size,
    class_folders,
    class_names,
    find_images,
    listed_names,
    pool_parts,
    read_images,
)
from data.npz import (
    Samples,
    check_alike,
    check_arrays,
    class_count,
    read_arrays,
    read_input_shape,
    read_labels,
    read_samples,
    to_inputs,
    to_labels,
)
from data.text import LENGTH, read_news

DATASETS = {
    "digits": "8x8 grey digits, 1,797 images, 10 classes; comes with scikit-learn, needs no data-dir",
    "mnist": "28x28 grey digits, 70,000 images, 10 classes; official files in data-dir, or download=true",
    "fashion-mnist": "28x28 grey clothes, 70,000 images, 10 classes; official files in data-dir, or download=true",
    "cifar10": "32x32 colour photos, 60,000 images, 10 classes; official files in data-dir, or download=true",
    "cifar100": "32x32 colour photos, 60,000 images, 100 classes; official files in data-dir, or download=true",
    "svhn": "32x32 colour house numbers, 99,289 images, 10 classes; official files in data-dir, or download=true",
    "pathmnist": "28x28 colour tissue, 107,180 images, 9 classes; MedMNIST's pathmnist.npz in data-dir",
    "ag-news": "news as 200 word ids, 127,600 texts, 4 classes; ag_news_csv/ in data-dir; only for model=fasttext",
    "npz": "your own pooled file, partitioned like the others; data-dir is the file or its directory",
    "image-folder": "your own images, partitioned like the others; data-dir/<class>/, or train/ and test/ with such",
    "npz-clients": "your own data, a file per client: data-dir/train/<i>.npz and data-dir/test/<i>.npz, arrays x and y",
}

# Datasets that only one model can read; every model of images or features reads the others.
ONLY_MODEL = {"ag-news": "fasttext"}

_FOLDERS = "class folders with images, in train/ and test/ or in itself"
_POOL_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_MED_PARTS = ("train", "val", "test")
_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class _Official:
    """A dataset as its authors distribute it: torchvision's class, and the files that are read, in ``folder``.

    A dataset that torchvision does not know (``kind`` empty) is read here, and cannot be downloaded.
    """

    kind: str
    folder: str
    files: tuple[str, ...]

    @property
    def place(self) -> str:
        """What ``data-dir`` must have, for error messages."""
        return f"{self.folder}/" if self.folder else " and ".join(self.files)


_OFFICIAL = {
    "mnist": _Official("MNIST", "MNIST/raw", _IDX),
    "fashion-mnist": _Official("FashionMNIST", "FashionMNIST/raw", _IDX),
    "cifar10": _Official(
        "CIFAR10", "cifar-10-batches-py", (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
    ),
    "cifar100": _Official("CIFAR100", "cifar-100-python", ("train", "test", "meta")),
    "svhn": _Official("SVHN", "", ("train_32x32.mat", "test_32x32.mat")),
    "pathmnist": _Official("", "", ("pathmnist.npz",)),
    "ag-news": _Official("", "ag_news_csv", ("train.csv", "test.csv")),
}


# Shape of a sample, classes and samples of the datasets that are the same everywhere.
_OUTLINES = {
    "mnist": ((1, 28, 28), 10, 70_000),
    "fashion-mnist": ((1, 28, 28), 10, 70_000),
    "cifar10": ((3, 32, 32), 10, 60_000),
    "cifar100": ((3, 32, 32), 100, 60_000),
    "svhn": ((3, 32, 32), 10, 99_289),
    "ag-news": ((LENGTH,), 4, 127_600),
}


@dataclass(frozen=True)
class Source:
    """The part of the run config that determines a pool; the key of its cache."""

    dataset: str
    data_dir: str
    download: bool
    num_classes: int
    max_samples: int
    seed: int
    image_size: int
    image_channels: int
    class_names: str

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the source of a run config; the seed is 0 unless ``max-samples`` draws samples with it."""
        return cls(
            config.dataset,
            config.data_dir,
            config.download,
            config.num_classes,
            config.max_samples,
            config.seed_of_data if config.max_samples else 0,
            config.image_size,
            config.image_channels,
            config.class_names,
        )


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples: x as in ``Samples``; y int64 (n,), in [0, num_classes); the classes' names if they are known."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]
    num_classes: int
    class_names: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def load_pool(source: Source) -> Pool:
    """Return the pool, training part first, test part last; read once per process. Do not write into its arrays.

    ``max_samples`` > 0 keeps that many samples, drawn uniformly, in their order. The number of classes is that of the
    whole pool. An ``image-folder`` with both grey and colour images becomes RGB unless ``image_channels`` says
    otherwise; only the images that are kept are decoded.

    Raises:
        DataError: a file is missing or cannot be used, or a label does not fit into ``num_classes``.
    """
    if source.dataset == "image-folder":
        return _read_folder(source)
    names = _names(source)
    parts = _read(source)
    y = np.concatenate([part.y for part in parts])
    num_classes = class_count(int(y.max()), source.num_classes, f"dataset {source.dataset}", names)
    x = np.concatenate([part.x for part in parts]) if len(parts) > 1 else parts[0].x
    keep = _kept(len(y), source)
    return Pool(x, y, num_classes, names) if keep is None else Pool(x[keep], y[keep], num_classes, names)


@dataclass(frozen=True)
class Outline:
    """Shape and size of a dataset; ``input_shape`` is that of one sample.

    ``classes`` is the number of classes that occur; it may be less than ``num_classes``, which the run config may set.
    Where nobody has said or named the classes of the user's own arrays, ``absent`` are the labels below the largest one
    that no sample has, of ``npz-clients`` no training sample.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    classes: int
    samples: int
    absent: tuple[int, ...] = ()


@lru_cache(maxsize=16)
def outline_pool(source: Source) -> Outline:
    """Return what ``load_pool`` would give, without reading inputs; once per process.

    Official files whose outline is known are not read, of ``pathmnist`` and the user's own files only the labels. The
    channels of an ``image-folder`` are those of its first image.

    Raises:
        DataError: as ``load_pool``, but for errors in the inputs.
    """
    where = f"dataset {source.dataset}"
    names = _names(source)
    absent: tuple[int, ...] = ()
    if source.dataset in _OUTLINES:
        shape, classes, samples = _OUTLINES[source.dataset]
        samples = min(samples, source.max_samples or samples)
        num_classes = class_count(classes - 1, source.num_classes, where, names)
        return Outline(shape, num_classes, min(classes, samples), samples)
    if source.dataset not in ("npz", "pathmnist", "image-folder"):
        pool = load_pool(source)
        return Outline(pool.x.shape[1:], pool.num_classes, len(np.unique(pool.y)), len(pool.y))
    if source.dataset == "image-folder":
        found, names = _images(source)
        if len(names) < 2 and not source.num_classes:
            raise DataError(_one_class(source, found))
        form = Form(source.image_size, source.image_channels)
        y = np.concatenate([np.asarray(images.labels, dtype=np.int64) for images in found])
        check_size(min(len(y), source.max_samples or len(y)), form)
        shape = read_images(found[0].files[:1], form, mixed=True).shape[1:]
        num_classes = source.num_classes or len(names)
    else:
        if source.dataset == "npz":
            path = find_pool_file(source.data_dir)
            y = np.concatenate([read_labels(path, name) for name in ("y_train", "y_test")])
            shape = read_input_shape(path, "x_train")
        else:
            path = Path(source.data_dir).expanduser() / "pathmnist.npz"
            labels = read_arrays(path, [f"{part}_labels" for part in _MED_PARTS])
            y = np.concatenate([to_labels(part.reshape(-1), f"{path}: labels") for part in labels])
            shape = read_input_shape(path, "train_images")
        num_classes = class_count(int(y.max()), source.num_classes, where, names)
        if source.dataset == "npz" and not source.num_classes and not names:
            absent = absent_labels(y, num_classes)
    keep = _kept(len(y), source)
    y = y if keep is None else y[keep]
    return Outline(shape, num_classes, len(np.unique(y)), len(y), absent)


def absent_labels(y: npt.NDArray[np.int64], num_classes: int) -> tuple[int, ...]:
    """Return the labels from 0 to below ``num_classes`` that are not in ``y``."""
    return tuple(np.setdiff1d(np.arange(num_classes), y).tolist())


def check_files(config: RunConfig) -> None:
    """Check that a pooled dataset is where ``data-dir`` says; if not and ``download`` is true, download it.

    Raises:
        DataError: names the file that was looked for, and what to put where.
    """
    if config.dataset == "npz":
        check_arrays(find_pool_file(config.data_dir), _POOL_ARRAYS)
    elif config.dataset == "image-folder":
        folder = data_directory(config.dataset, config.data_dir, _FOLDERS)
        class_names(folder, pool_parts(folder), split_names(config.class_names), config.num_classes)
    elif config.dataset in _OFFICIAL:
        if _to_fetch(config.dataset, config.data_dir, config.download):
            # Here, in one process: the clients' processes would all write the same files at the same time.
            _read_official(config.dataset, Path(config.data_dir).expanduser(), download=True)
        elif config.dataset == "pathmnist":
            check_arrays(Path(config.data_dir).expanduser() / "pathmnist.npz", _med_arrays())


def pool_files(config: RunConfig) -> list[Path]:
    """Return the user's own files that a pool is read from; none of an official dataset but ``pathmnist``.

    Raises:
        DataError: as ``check_files``.
    """
    if config.dataset == "npz":
        file = find_pool_file(config.data_dir)
        return [*class_lists(config, file.parent), file]
    if config.dataset == "image-folder":
        parts, names = _folder(Source.of(config))
        lists = class_lists(config, Path(config.data_dir).expanduser())
        return [*lists, *(Path(file) for part in parts for file in find_images(part, names).files)]
    return [Path(config.data_dir).expanduser() / "pathmnist.npz"] if config.dataset == "pathmnist" else []


def class_lists(config: RunConfig, directory: Path) -> list[Path]:
    """Return the ``classes.txt`` in ``directory`` that is read, if it is there and ``class-names`` is empty."""
    listed = directory / CLASS_FILE
    return [listed] if is_file(listed) and not config.class_names else []


def data_directory(dataset: str, data_dir: str, what: str) -> Path:
    """Return ``data_dir`` as a directory that exists; ``what`` describes its content in error messages.

    Raises:
        DataError: ``data_dir`` is empty or not a directory.
    """
    if not data_dir:
        raise DataError(f"dataset {dataset} needs data-dir, the directory that has {what}")
    path = Path(data_dir).expanduser()
    if not is_dir(path):
        raise DataError(f"data-dir = {data_dir} is not a directory; it must have {what}")
    return path


def find_pool_file(data_dir: str) -> Path:
    """Return the npz file that ``data_dir`` is, or the one in it: ``data.npz``, or else the only ``*.npz``.

    Raises:
        DataError: there is none, or more than one and none of them is ``data.npz``.
    """
    wanted = f"an npz file with the arrays {', '.join(_POOL_ARRAYS)}"
    if not data_dir:
        raise DataError(f"dataset npz needs data-dir, {wanted}, or a directory that has one")
    path = Path(data_dir).expanduser()
    if not is_dir(path):
        if not is_file(path):
            raise DataError(f"data-dir = {data_dir} is not there; it must be {wanted}, or a directory that has one")
        return path
    if is_file(path / "data.npz"):
        return path / "data.npz"
    files = [file for file in entries(path) if file.suffix == ".npz"]
    if len(files) != 1:
        found = f"{len(files)} other npz files" if files else "no npz file"
        raise DataError(
            f"data-dir = {data_dir} has {found} and no data.npz; "
            f"put {wanted} there as data.npz, or name the file itself"
        )
    return files[0]


# Characters of a library's own text on why a file cannot be read: it may quote what is in it.
_LONGEST_REASON = 300


def read_torchvision(kind: type[Any], root: Path, *, download: bool = False) -> list[Samples]:
    """Return the training and the test part of a torchvision dataset.

    CIFAR's files are pickles. torchvision unpickles them only after their MD5 sums proved to be those that ``kind``
    declares, so that no other bytes than the official ones are ever unpickled; that check is left in place.

    Raises:
        DataError: torchvision cannot read (or download) the files.
    """
    # Only SVHN has the argument "split" in place of "train" and the attribute "labels" in place of "targets".
    by_split = hasattr(kind, "split_list")
    key, values = ("split", ("train", "test")) if by_split else ("train", (True, False))
    try:
        parts = [kind(root, download=download, **{key: value}) for value in values]
    except Exception as error:  # on corrupt files torchvision's readers raise errors of many types
        reason = one_line(error)[:_LONGEST_REASON] or type(error).__name__
        verb = "download" if download else "read"
        raise DataError(f"torchvision cannot {verb} {kind.__name__} in {root}: {reason}") from error
    samples = []
    for part, name in zip(parts, ("training", "test"), strict=True):
        where = f"{kind.__name__} in {root}: {name} part"
        x, y = np.asarray(part.data), np.asarray(part.labels if by_split else part.targets)
        if not len(x) or len(x) != len(y):
            raise DataError(f"{where} has {len(x)} images and {len(y)} labels")
        samples.append(Samples(to_inputs(x, where), to_labels(y, where)))
    return samples


def read_medmnist(path: Path) -> list[Samples]:
    """Return the training, validation and test part of a dataset of MedMNIST (Yang et al. 2023).

    Its file has ``train_images`` uint8 (n, height, width, 3) or (n, height, width), ``train_labels`` (n, 1), and the
    same for ``val`` and ``test``.

    Raises:
        DataError: the file is missing, or its arrays are not so.
    """
    arrays = read_arrays(path, _med_arrays())
    samples = []
    for part, x, y in zip(_MED_PARTS, arrays[::2], arrays[1::2], strict=True):
        if y.ndim != 2 or y.shape[1] != 1 or len(x) != len(y):
            raise DataError(
                f"{path}: {part}_images has shape {x.shape} and {part}_labels {y.shape}; "
                "there must be one row with one label for each image"
            )
        images = to_inputs(x, f"{path}: array {part}_images")
        samples.append(Samples(images, to_labels(y[:, 0], f"{path}: array {part}_labels")))
    for part, other in zip(_MED_PARTS[1:], samples[1:], strict=True):
        check_alike(samples[0].x, other.x, (f"{path}: train_images", f"{part}_images"))
    return samples


def _med_arrays() -> list[str]:
    return [f"{part}_{kind}" for part in _MED_PARTS for kind in ("images", "labels")]


def _read(source: Source) -> Sequence[Samples]:
    if source.dataset == "digits":
        return [_read_digits()]
    if source.dataset == "npz":
        path = find_pool_file(source.data_dir)
        train = read_samples(path, "x_train", "y_train")
        test = read_samples(path, "x_test", "y_test")
        check_alike(train.x, test.x, (f"{path}: x_train", "x_test"))
        return [train, test]
    fetch = _to_fetch(source.dataset, source.data_dir, source.download)
    return _read_official(source.dataset, Path(source.data_dir).expanduser(), download=fetch)


def _folder(source: Source) -> tuple[list[Path], tuple[str, ...]]:
    """Return the parts of an ``image-folder``, and the names of its classes."""
    directory = data_directory(source.dataset, source.data_dir, _FOLDERS)
    parts = pool_parts(directory)
    return parts, class_names(directory, parts, split_names(source.class_names), source.num_classes)


def _images(source: Source) -> tuple[list[ImageFiles], tuple[str, ...]]:
    """Return the images of each part of an ``image-folder``, and the names of its classes.

    Raises:
        DataError: as ``find_images``, or a folder has none and nobody has said that it is a class.
    """
    parts, names = _folder(source)
    found = [find_images(part, names) for part in parts]
    empty = set(range(len(names))) - {label for images in found for label in images.labels}
    if empty and not listed_names(Path(source.data_dir).expanduser(), split_names(source.class_names))[0]:
        raise DataError(
            f"{source.data_dir}: the folder {names[min(empty)]} has no images, whose names end in "
            f"{', '.join(EXTENSIONS)}: remove the folder, or list the classes in class-names or {CLASS_FILE}"
        )
    return found, names


def _one_class(source: Source, found: Sequence[ImageFiles]) -> str:
    """Return what is wrong with an ``image-folder`` that has a single class."""
    folder = pool_parts(Path(source.data_dir).expanduser())[0]
    only, images = class_folders(folder)[0], sum(len(part.files) for part in found)
    below = ", ".join(inner.name for inner in class_folders(only))
    return (
        f"{folder} has one class folder, {only.name}, so that all {images} images have one label; data-dir must be the "
        "folder that has the class folders, at least two" + (f": {only}, with {below}?" if below else "")
    )


def _names(source: Source) -> tuple[str, ...]:
    """Return what ``class-names``, or ``classes.txt`` beside an ``npz``, calls the classes, of any dataset but images.

    Raises:
        DataError: ``num-classes`` is less than their number, or the file cannot be read.
    """
    if source.dataset == "image-folder":  # has them of its folders
        return ()
    names, where = split_names(source.class_names), "class-names"
    if source.dataset == "npz":
        names, where = listed_names(find_pool_file(source.data_dir).parent, names)
    check_named(names, where, source.num_classes)
    return names


def _read_folder(source: Source) -> Pool:
    found, names = _images(source)
    files = [file for images in found for file in images.files]
    y = np.concatenate([np.asarray(images.labels, dtype=np.int64) for images in found])
    keep = _kept(len(y), source)
    if keep is not None:
        files, y = [files[i] for i in keep], y[keep]
    x = read_images(files, Form(source.image_size, source.image_channels), mixed=True)
    return Pool(x, y, source.num_classes or len(names), names)


def _kept(n: int, source: Source) -> npt.NDArray[np.int64] | None:
    """Return the sorted positions of the samples that ``max_samples`` keeps of ``n``, or None for all."""
    if not 0 < source.max_samples < n:
        return None
    return np.sort(numpy_generator(source.seed, "max-samples").choice(n, source.max_samples, replace=False))


def _read_digits() -> Samples:
    # scikit-learn's own reader needs all of scikit-learn and scipy, two seconds of import for a small table.
    require("sklearn", "datasets", 'dataset = "digits"')
    installed = importlib.util.find_spec("sklearn")
    assert installed
    assert installed.origin
    table = np.loadtxt(Path(installed.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = np.round(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Samples(x[:, None], table[:, 64].astype(np.int64))


def _read_official(dataset: str, root: Path, *, download: bool) -> list[Samples]:
    official = _OFFICIAL[dataset]
    if not official.kind:
        paths = [root / official.folder / name for name in official.files]
        return read_medmnist(*paths) if dataset == "pathmnist" else [read_news(path) for path in paths]
    import torchvision.datasets

    parts = read_torchvision(getattr(torchvision.datasets, official.kind), root, download=download)
    if dataset not in _OUTLINES:
        return parts
    # torchvision proves the files of CIFAR and SVHN by their sums, and those of MNIST and Fashion-MNIST by nothing.
    shape, classes, _ = _OUTLINES[dataset]
    for name, part in zip([name for name in official.files if "images" in name], parts, strict=False):
        if part.x.shape[1:] != shape:
            raise DataError(
                f"{root / official.folder / name}: has images of shape {part.x.shape[1:]}, and those of {dataset} are "
                f"of {shape}; put the official file there"
            )
    paths = [root / official.folder / name for name in official.files if "labels" in name]
    for path, part in zip(paths, parts, strict=False):
        largest = part.y.max()
        if largest >= classes:
            raise DataError(
                f"{path}: has label {largest}, and those of {dataset} are 0 to {classes - 1}; the file is damaged, put "
                "the official one there"
            )
    return parts


def _to_fetch(dataset: str, data_dir: str, download: bool) -> bool:
    """Return whether the official files must be downloaded first.

    Raises:
        DataError: they must, but ``download`` is false or cannot be done.
    """
    official = _OFFICIAL[dataset]
    if not data_dir:
        fetch = "; with download=true (--download for tables) it is fetched into it" if official.kind else ""
        raise DataError(
            f"dataset {dataset} needs data-dir (--data for tables), the directory that has {official.place}{fetch}"
        )
    if is_file(Path(data_dir).expanduser()):
        raise DataError(
            f"data-dir = {data_dir}: is a file; dataset {dataset} needs the directory that has {official.place}"
            + ('; for a file of your own set dataset="npz"' if data_dir.endswith(".npz") else "")
        )
    folder = Path(data_dir).expanduser() / official.folder
    missing = next((folder / name for name in official.files if not is_file(folder / name)), None)
    if missing and not (download and official.kind):
        way_out = "or set download=true (--download for tables)" if official.kind else "Floret cannot download it"
        raise DataError(
            f"dataset {dataset} is not in data-dir = {data_dir}: {missing} is missing; put the official files "
            f"{', '.join(official.files)} (unpacked) into {missing.parent}, {way_out}"
        )
    return missing is not None
