"""A client's training, validation and test samples, from a pool or from files of its own."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from common.config import RunConfig, one_of, split_names
from common.errors import ConfigError, DataError
from common.partitioners import Indices
from common.seeds import numpy_generator
from data.datasets import (
    DATASETS,
    ONLY_MODEL,
    Outline,
    Pool,
    Source,
    absent_labels,
    check_files,
    class_lists,
    data_directory,
    load_pool,
    outline_pool,
    pool_files,
)
from data.files import check_distinct, entries, is_dir, is_file, sha256_of, status
from data.images import (
    Form,
    ImageFiles,
    check_images,
    check_named,
    class_folders,
    class_name,
    class_names,
    decoded,
    find_images,
    given_names,
    listed_names,
    read_images,
)
from data.npz import Samples, check_alike, check_header, class_count, read_input_shape, read_labels, read_samples
from data.partition import PARTITIONS, Scheme, check_counts, partition

# Of a SHA-256, as many as tell files apart.
DIGITS = 16
_OWN = "files per client, train/<i>.npz and test/<i>.npz with the arrays x and y, i from 0"
_NODE = "train.npz and test.npz with the arrays x and y, or images in train/<class>/ and test/<class>/"


@dataclass(frozen=True, eq=False)
class Split:
    """Samples x and labels y, int64 (n,).

    x is uint8 (n, channels, height, width) in 0..255, float32 (n, ...), or word ids, int32 (n, length).
    """

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples; ``input_shape`` is that of one sample. The tensors may be shared: do not write into them.

    ``train`` and ``test`` have at least one sample, unless what the run does not have was left out of them;
    ``validation`` may be empty. ``class_names[c]`` is the name of label c; it is empty if the data have no names, and
    may be shorter than ``num_classes``.
    """

    train: Split
    validation: Split
    test: Split
    num_classes: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Description:
    """A simulation's data in numbers; ``label_counts``, int64 (clients, classes), is of the training splits."""

    input_shape: tuple[int, ...]
    num_classes: int
    label_counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """What determines how a client's own training part is divided, at random.

    ``max_samples`` > 0 keeps at most that many samples; ``validation_fraction`` of those kept are for validation.
    """

    validation_fraction: float
    seed: int
    name: str
    max_samples: int

    @classmethod
    def of(cls, config: RunConfig, name: str) -> Self:
        """Return that of the run config, for the client ``name``."""
        return cls(config.validation_fraction, config.seed_of_data, name, config.max_samples)

    def of_training(self, n: int) -> tuple[Indices, Indices]:
        """Return the positions for training and those for validation in a training part of ``n`` samples."""
        order = numpy_generator(self.seed, "split", self.name).permutation(n)[: self.max_samples or n]
        validation = min(round(len(order) * self.validation_fraction), len(order) - 1)
        return order[validation:], order[:validation]


def check(config: RunConfig, *, files: bool = True) -> None:
    """Check the names, and (with ``files``) that the dataset is where ``data-dir`` says, without reading samples.

    A missing dataset is downloaded here if ``download`` is true. A server whose clients have their own data passes
    ``files=False``.

    Raises:
        ConfigError: the dataset or the partition is unknown, or the model cannot read the dataset.
        DataError: names the file that was looked for, and what to put where.
    """
    for key, name, known in (
        ("dataset", config.dataset, DATASETS),
        ("partition", config.partition, PARTITIONS),
    ):
        wrong = one_of(name, known)
        if wrong:
            raise ConfigError(f"{key} = {name!r}: {wrong}")
    model = ONLY_MODEL.get(config.dataset, config.model)
    if config.model != model:
        raise ConfigError(f"model = {config.model!r}: dataset {config.dataset} has texts, which only {model!r} reads")
    if not files:
        return
    if config.dataset == "npz-clients":
        _check_own_files(_own_directory(config), None)
    else:
        check_files(config)


def forget_altered(config: RunConfig) -> None:
    """Have a dataset's files read anew if they are others, or others' contents, than when this was last called for it.

    A process that makes several runs calls it as each begins; within a run what was read first stays.
    """
    try:
        files = _files_read(config)
        now = tuple(zip(files, _stamps(files), strict=True))
    except DataError:  # raised again by who reads them
        now = ()
    place = config.dataset, config.data_dir
    if _seen.setdefault(place, now) != now:
        _seen[place] = now
        for once_a_process in (load_pool, outline_pool, _client_indices, _own_labels):
            once_a_process.cache_clear()


# By dataset and data-dir: the files with their stamps, as they were when a run last began.
_seen: dict[tuple[str, str], tuple[tuple[Path, tuple[int, int]], ...]] = {}


def digest(config: RunConfig) -> str | None:
    """Return the first 16 digits of the SHA-256 of the user's own files that a simulation reads; None if it reads none.

    Of one file it is that of its content; of several that of the lines that ``sha256sum`` writes of them, sorted by
    their paths below the folder that they have in common.

    Raises:
        DataError: as ``load_client``, for a file that is missing.
    """
    files = _files_read(config)
    return _digest(tuple(files), _stamps(files)) if files else None


@lru_cache(maxsize=4)
def _digest(files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> str:
    if len(files) == 1:
        return sha256_of(files[0])[:DIGITS]
    root = Path(os.path.commonpath(files))
    named = sorted((path.relative_to(root).as_posix(), path) for path in files)
    lines = "".join(f"{sha256_of(path)}  {name}\n" for name, path in named)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:DIGITS]


def _files_read(config: RunConfig) -> list[Path]:
    """Return the user's own files that a simulation reads; raises as ``digest``."""
    if config.dataset != "npz-clients":
        return pool_files(config)
    folder = _own_directory(config)
    return [*class_lists(config, folder), *_numbered(folder / "train"), *_numbered(folder / "test")]


def outline(config: RunConfig, num_clients: int) -> Outline:
    """Return shape and numbers of the data of a simulation, after checking that they suffice for ``num_clients``.

    Inputs are not read; errors in them, or in a partition that is drawn at random, appear in the run.

    Raises:
        ConfigError: ``classes-per-client`` is larger than the number of classes.
        DataError: there are too few samples, or not the files of so many clients; or as ``load_client``.
    """
    if config.dataset == "npz-clients":
        folder = _own_directory(config)
        labels, largest = _own_labels(folder, num_clients)
        names = _own_names(config, folder)
        num_classes = class_count(largest, config.num_classes, f"data-dir = {folder}", names)
        shape = read_input_shape(_own_files(folder, 0)[0])
        trained = np.concatenate(labels)
        absent = () if config.num_classes or names else absent_labels(trained, num_classes)
        return Outline(shape, num_classes, len(np.unique(trained)), len(trained), absent)
    found = outline_pool(Source.of(config))
    check_counts(Scheme.of(config), num_clients, found.classes, found.samples, config.dataset, config.max_samples)
    return found


def load_client(config: RunConfig, partition_id: int, num_partitions: int) -> ClientData:
    """Return the data of client ``partition_id``, from 0, of ``num_partitions``.

    A pool is partitioned as a whole; then each client's samples are permuted and split: ``test-fraction`` and
    ``validation-fraction`` of all its samples, the rest for training, at least one each for training and test.
    With ``npz-clients`` the test file is taken whole, and ``validation-fraction`` is of the training file, of which
    ``max-samples`` > 0 keeps at most that many samples.

    The pool and its partition are made once per process; a further call only copies the client's samples.

    Raises:
        ConfigError: ``classes-per-client`` is larger than the number of classes.
        DataError: a file or the partition cannot be used; for ``npz-clients`` also if the number of files is not
            ``num_partitions`` or the samples of this client are not shaped like those of client 0.
    """
    if config.dataset == "npz-clients":
        folder = _own_directory(config)
        data = _load_numbered(folder, partition_id, num_partitions, config)
        if partition_id:
            first = _load_numbered(folder, 0, num_partitions, config)
            names = (f"{folder}: train/{partition_id}.npz", "train/0.npz")
            check_alike(data.train.x.numpy(), first.train.x.numpy(), names)
        return data
    pool = load_pool(Source.of(config))
    own = _client_indices(Source.of(config), Scheme.of(config), num_partitions)[partition_id]
    train, validation, test = (_take(pool, rows) for rows in _split(own, partition_id, config))
    return ClientData(train, validation, test, pool.num_classes, pool.x.shape[1:], pool.class_names)


def load_own(
    directory: Path,
    config: RunConfig,
    name: str,
    cache: Path | None = None,
    cut: Cut | None = None,
    *,
    silent: bool = False,
) -> ClientData:
    """Return the data of a node that has its own in ``directory``: two npz files, or folders of images.

    The files are ``train.npz`` and ``test.npz`` with the arrays x and y; the folders ``train/<class>/`` and
    ``test/<class>/``, whose images are decoded to uint8 (n, channels, height, width) as ``image-size`` and
    ``image-channels`` say. The labels of folders are as in ``data.images.class_names``; the class names of npz files,
    if there are any, as in ``listed_names``.

    The test part is taken whole; ``cut`` divides the training part, by default as the run config says for the client
    ``name``. ``num-classes`` 0 counts the classes: of images those in the list, of npz files those up to the largest
    label. Kept in memory until a file changes; decoded images also as a file in ``cache``, for later processes.

    With ``silent`` nothing but the samples depends on which classes there are: what a label means is said by the run or
    by ``classes.txt``, never by the folders, and the form of images by the run. Either part may be empty; folders of
    other names are left out, and labels beyond ``num-classes`` are for the caller to leave out.

    Raises:
        ConfigError: with ``silent``, there are folders and nobody says what their labels are or what form images have,
            or ``class-names`` has more classes than ``num-classes``.
        DataError: there are neither or both, a file is missing or cannot be used, images differ in size or kind, a
            folder is not in the list of classes, or a label does not fit into ``num-classes``.
    """
    files, parts = _own_files_or_parts(directory)
    cut = cut or Cut.of(config, name)
    said = split_names(config.class_names)
    if silent and len(said) > config.num_classes:
        raise ConfigError(
            f"class-names has {len(said)} classes; num-classes = {config.num_classes} must be at least that"
        )
    if files:
        listed = listed_names(directory, said)[0] if silent else _own_names(config, directory)
        return _load_files(files, _stamps(files), cut, config.num_classes, listed, silent=silent)
    form = Form(config.image_size, config.image_channels)
    if silent:
        names = given_names(directory, parts, said)
        for key, value in (("image-size", form.size), ("image-channels", form.channels)):
            if not value:
                raise ConfigError(
                    f"{key} = 0: where data are protected, no image may decide whether the others fit; set {key}"
                )
        train, test = (find_images(part, names, silent=True) for part in parts)
        return _load_images(train, test, form, cut, names, len(names), cache)
    names = class_names(directory, parts, said, config.num_classes)
    train, test = (find_images(part, names) for part in parts)
    return _load_images(train, test, form, cut, names, config.num_classes or len(names), cache)


def check_own(directory: Path) -> None:
    """Check what needs no run config: that ``load_own`` would find its files or folders, and what headers tell.

    Raises:
        DataError: there are neither or both, an array or the class folders are missing, or no run could use an array
            or an image.
    """
    files, parts = _own_files_or_parts(directory)
    if files:
        train, test = map(check_header, files)
        check_alike(train, test, (f"{files[0]}", f"{files[1]}"))
    for part in parts:
        check_images(find_images(part, [class_name(folder) for folder in class_folders(part)]).files)


def _own_files_or_parts(directory: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the two npz files of a node, or its two folders of images; the other is empty."""
    if not is_dir(directory):
        raise DataError(f"{directory} is not a directory; it must have {_NODE}")
    files = (directory / "train.npz", directory / "test.npz")
    parts = (directory / "train", directory / "test")
    has_files, has_images = any(map(is_file, files)), any(map(is_dir, parts))
    if has_files == has_images:
        found = (
            "npz files and folders, of which one kind must go"
            if has_files
            else "neither of these files nor of these folders"
        )
        raise DataError(f"{directory} has {found}; it must have {_NODE}")
    for part in parts if has_images else ():
        if not is_dir(part):
            raise DataError(f"{part} is not there; it must have the class folders of the {part.name} images")
    check_distinct(*(files if has_files else parts))
    return (files, ()) if has_files else ((), parts)


def describe(config: RunConfig, num_clients: int) -> Description:
    """Return shape, classes and label counts of a simulation with ``num_clients`` clients.

    Raises:
        ConfigError, DataError: as ``load_client``; of ``npz-clients`` all labels are read, but only client 0's inputs.
    """
    if config.dataset == "npz-clients":
        folder = _own_directory(config)
        labels, largest = _own_labels(folder, num_clients)
        names = _own_names(config, folder)
        num_classes = class_count(largest, config.num_classes, f"data-dir = {folder}", names)
        shape = load_client(config, 0, num_clients).input_shape
        train = [y[Cut.of(config, str(i)).of_training(len(y))[0]] for i, y in enumerate(labels)]
    else:
        pool = load_pool(Source.of(config))
        shape, num_classes = pool.x.shape[1:], pool.num_classes
        clients = _client_indices(Source.of(config), Scheme.of(config), num_clients)
        train = [pool.y[_split(own, i, config)[0]] for i, own in enumerate(clients)]
    return Description(shape, num_classes, np.stack([np.bincount(y, minlength=num_classes) for y in train]))


@lru_cache(maxsize=8)
def _client_indices(source: Source, scheme: Scheme, num_clients: int) -> tuple[Indices, ...]:
    return partition(load_pool(source).y, scheme, num_clients, source.dataset, source.max_samples)


def _split(own: Indices, partition_id: int, config: RunConfig) -> tuple[Indices, Indices, Indices]:
    """Return the training, validation and test part of a client's two or more samples ``own``."""
    n = len(own)
    own = own[numpy_generator(config.seed_of_data, "split", str(partition_id)).permutation(n)]
    test = min(max(round(n * config.test_fraction), 1), n - 1)
    validation = min(round(n * config.validation_fraction), n - test - 1)
    return own[test + validation :], own[test : test + validation], own[:test]


def _own_directory(config: RunConfig) -> Path:
    return data_directory(config.dataset, config.data_dir, _OWN)


def _own_names(config: RunConfig, folder: Path) -> tuple[str, ...]:
    """Return what ``class-names``, or ``classes.txt`` in a folder of own files, calls the classes."""
    names, source = listed_names(folder, split_names(config.class_names))
    check_named(names, source, config.num_classes)
    return names


def _own_files(folder: Path, i: int) -> tuple[Path, Path]:
    return folder / "train" / f"{i}.npz", folder / "test" / f"{i}.npz"


def _numbered(part: Path) -> list[Path]:
    """Return the files of clients in ``train/`` or ``test/``; what else is there is nobody's."""
    return [path for path in entries(part) if path.suffix == ".npz" and path.stem.isdecimal() and is_file(path)]


def _check_own_files(folder: Path, num_clients: int | None) -> None:
    train = folder / "train"
    present = _numbered(train) if is_dir(train) else []
    if num_clients is None and not present:
        raise DataError(f"{folder} has none of the {_OWN}")
    clients = num_clients if num_clients is not None else len(present)
    for i in range(clients):
        for path in _own_files(folder, i):
            if not is_file(path):
                whose = "the federation has" if num_clients is not None else f"{train} has files of"
                raise DataError(
                    f"{path} is missing: {whose} {clients} clients, so {folder} must have {_OWN} to {clients - 1}"
                )
        check_distinct(*_own_files(folder, i))
    if len(present) > clients:
        raise DataError(
            f"{train} has files of {len(present)} clients, the federation has {clients}: "
            f"start it with {len(present)} clients, or move the other files away"
        )


@lru_cache(maxsize=2)
def _own_labels(folder: Path, num_clients: int) -> tuple[tuple[npt.NDArray[np.int64], ...], int]:
    """Return the labels of every client's training file, and the largest label of all files."""
    _check_own_files(folder, num_clients)
    files = [_own_files(folder, i) for i in range(num_clients)]
    train = tuple(read_labels(path) for path, _ in files)
    return train, max(int(y.max()) for y in (*train, *(read_labels(path) for _, path in files)))


def _load_numbered(folder: Path, i: int, num_clients: int, config: RunConfig) -> ClientData:
    _, largest = _own_labels(folder, num_clients)
    files = _own_files(folder, i)
    names = _own_names(config, folder)
    # Where the number of classes is said, the file that has a label beyond it is named when it is read.
    counted = 0 if config.num_classes or names else class_count(largest, 0, f"data-dir = {folder}")
    return _load_files(files, _stamps(files), Cut.of(config, str(i)), config.num_classes or counted, names)


def _stamps(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    stamps = []
    for path in files:
        found = status(path)
        if found is None:
            raise DataError(f"{path} is not there; it must be an npz file with the arrays x and y")
        stamps.append((found.st_mtime_ns, found.st_size))
    return tuple(stamps)


# A process of a simulation serves many clients in turn; a node has one. An altered file has other stamps: a new entry.
@lru_cache(maxsize=32)
def _load_files(
    files: tuple[Path, Path],
    stamps: tuple[tuple[int, int], ...],
    cut: Cut,
    num_classes: int,
    names: tuple[str, ...] = (),
    *,
    silent: bool = False,
) -> ClientData:
    train, test = (read_samples(path, empty=silent, strays=silent) for path in files)
    check_alike(train.x, test.x, (f"{files[0]}", f"{files[1]}"))
    own, validation = cut.of_training(len(train.y))
    if silent:
        own, validation = (rows[_fits(train.y[rows], num_classes)] for rows in (own, validation))
        parts = _take(train, own), _take(train, validation), _take(test, np.flatnonzero(_fits(test.y, num_classes)))
        return ClientData(*parts, num_classes, train.x.shape[1:], names)
    classes = [
        class_count(int(samples.y.max()), num_classes, f"{path}: array y", names)
        for path, samples in zip(files, (train, test), strict=True)
    ]
    return ClientData(
        _take(train, own),
        _take(train, validation),
        Split(torch.from_numpy(test.x), torch.from_numpy(test.y)),
        num_classes=max(classes),
        input_shape=train.x.shape[1:],
        class_names=names,
    )


# Images are large and a node has one directory: images decoded before a change are not kept.
@lru_cache(maxsize=1)
def _load_images(
    train: ImageFiles,
    test: ImageFiles,
    form: Form,
    cut: Cut,
    names: tuple[str, ...],
    num_classes: int,
    cache: Path | None,
) -> ClientData:
    own, validation = cut.of_training(len(train.files))
    kept = np.sort(np.concatenate([own, validation]))
    # All at once, so that the parts are checked against each other.
    files = [*(train.files[i] for i in kept), *test.files]
    stamps = [*(train.stamps[i] for i in kept), *test.stamps]
    x = decoded(cache, (files, stamps, form), lambda: read_images(files, form, mixed=False))
    training = Samples(x[: len(kept)], np.asarray(train.labels, dtype=np.int64)[kept])
    return ClientData(
        _take(training, np.searchsorted(kept, own)),
        _take(training, np.searchsorted(kept, validation)),
        Split(torch.from_numpy(x[len(kept) :]), torch.tensor(test.labels, dtype=torch.int64)),
        num_classes,
        x.shape[1:],
        names,
    )


def _fits(y: npt.NDArray[np.int64], num_classes: int) -> npt.NDArray[np.bool_]:
    """Return which labels are those of a run with ``num_classes``."""
    return (y >= 0) & (y < num_classes)


def _take(samples: Samples | Pool, rows: Indices) -> Split:
    return Split(torch.from_numpy(samples.x[rows]), torch.from_numpy(samples.y[rows]))
