"""The user's own images, a folder for each class as for torchvision's ImageFolder, decoded once to arrays."""

import hashlib
import io
import logging
import os
import stat
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from common.config import nearest
from common.durable import digest, make_folder, read_manifest, write_manifest, write_whole
from common.errors import ConfigError, DataError, one_line
from common.memory import available_memory
from data.files import check_distinct, entries, is_dir, is_file, status

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("flwr")

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
CLASS_FILE = "classes.txt"

# Only these are tried, whatever the file's name: some of Pillow's other formats run external programs.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY = ("1", "L", "LA")
_MOST_CHECKED = 10_000
# What a part of a pool is called elsewhere; none of these is a class if it has class folders.
_PARTS = ("train", "training", "test", "testing", "val", "valid", "validation")


@dataclass(frozen=True)
class Form:
    """The format to convert images to: ``size``, pixels a side, and ``channels``, 1 (grey) or 3 (RGB); 0 keeps it."""

    size: int
    channels: int


@dataclass(frozen=True)
class ImageFiles:
    """The images of one part, sorted by class name, then by path; after a change to a file it compares unequal.

    ``files`` are the paths, ``labels`` the classes, ``stamps`` the times of change in nanoseconds and sizes in bytes.
    """

    files: tuple[str, ...]
    labels: tuple[int, ...]
    stamps: tuple[tuple[int, int], ...]


def pool_parts(directory: Path) -> list[Path]:
    """Return the directories of a pool that have class folders: ``train/`` and ``test/``, or the directory itself.

    Raises:
        DataError: only one of ``train/`` and ``test/`` exists, with class folders, or parts have other names.
    """
    parts = [directory / "train", directory / "test"]
    present = [part for part in parts if is_dir(part)]
    if len(present) == 2:
        check_distinct(*parts)
        return parts
    # Either alone may be a class. If it has folders, it is a part, and folders beside it would be ignored.
    if present and class_folders(present[0]):
        missing = "test" if present[0].name == "train" else "train"
        raise DataError(
            f"{directory} has {present[0].name}/ with class folders, but no {missing}/: put class folders into both, "
            f"or all of them into {directory} itself"
        )
    named = [folder for folder in class_folders(directory) if folder.name.lower() in _PARTS]
    if len(named) > 1 and all(map(class_folders, named)):
        raise DataError(
            f"{directory} has {' and '.join(f'{folder.name}/' for folder in named)} with folders in them, which would "
            "be taken for classes: name the parts train/ and test/"
        )
    return [directory]


def class_folders(part: Path) -> list[Path]:
    """Return the folders in ``part``, sorted by name; hidden ones are left out.

    Raises:
        DataError: one has a name that is not UTF-8, which no message could carry.
    """
    folders = [path for path in entries(part) if is_dir(path)]
    for folder in folders:
        if not _is_text(folder.name):
            raise DataError(f"{part} has a folder whose name is not UTF-8: {os.fsencode(folder.name)!r}; rename it")
    return folders


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def class_names(directory: Path, parts: Sequence[Path], names: tuple[str, ...], num_classes: int) -> tuple[str, ...]:
    """Return the classes in the order of their labels.

    They are ``names``, those of the key ``class-names``; if it is empty, those of the file ``classes.txt`` in
    ``directory``; without it, the names of all class folders of ``parts``, sorted. ``num_classes`` is the key, or 0.

    Raises:
        DataError: a part has no class folders, a folder is not in the list, the file cannot be read or names a class
            twice, or the list is longer than ``num-classes`` allows.
    """
    folders = [folder for part in parts for folder in _some_folders(part)]
    names, source = listed_names(directory, names)
    if not names:
        names, source = tuple(sorted({class_name(folder) for folder in folders})), str(directory)
    for folder in folders:
        if class_name(folder) not in names:
            hint = nearest(class_name(folder), names) or f"; they are {', '.join(names)}"
            raise DataError(f"{folder} is not one of the classes of {source}{hint}")
    check_named(names, source, num_classes)
    return names


def check_named(names: Sequence[str], source: str, num_classes: int) -> None:
    """Check that ``num_classes``, the key, or 0, is enough for the ``names`` of classes that ``source`` has.

    Raises:
        DataError: it is not.
    """
    if 0 < num_classes < len(names):
        raise DataError(f"{source} has {len(names)} classes; num-classes = {num_classes} must be at least that, or 0")


def given_names(directory: Path, parts: Sequence[Path], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes in the order of their labels, whatever folders there are.

    They are ``names``, those of the key ``class-names``; if it is empty, those of the file ``classes.txt`` in
    ``directory``. Folders of other names are passed over; only the log of this machine names them.

    Raises:
        ConfigError: there is neither the key nor the file.
        DataError: the file cannot be read or names a class twice.
    """
    names, source = listed_names(directory, names)
    if not names:
        raise ConfigError(
            "class-names = '': where data are protected, labels of images must not follow from which folders a client "
            f"has; set class-names, or write {CLASS_FILE} beside its train/ and test/"
        )
    for folder in (folder for part in parts for folder in class_folders(part)):
        if class_name(folder) not in names:
            hint = nearest(class_name(folder), names) or f"; they are {', '.join(names)}"
            log.warning("%s is passed over: it is not one of the classes of %s%s", folder, source, hint)
    return names


def listed_names(directory: Path, names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return ``names``, those of the key ``class-names``, or, without any, those of ``classes.txt`` in ``directory``.

    Returns:
        The names, none if there is neither, and where they are from.

    Raises:
        DataError: the file cannot be read or names a class twice.
    """
    if not names and is_file(directory / CLASS_FILE):
        return _listed(directory / CLASS_FILE), str(directory / CLASS_FILE)
    return names, "class-names"


def find_images(part: Path, names: Sequence[str], *, silent: bool = False) -> ImageFiles:
    """Return the images in the class folders of ``part`` and in the folders below them, links followed.

    An image is what ``EXTENSIONS`` names, in capitals or not; hidden and other files and hidden folders are left out;
    with ``silent`` also class folders that are not among ``names``.

    Raises:
        DataError: there is none, without ``silent``, or one is not a regular file, or a folder cannot be read.
    """
    files, labels, stamps = [], [], []
    for folder in class_folders(part) if silent else _some_folders(part):
        if silent and class_name(folder) not in names:
            continue
        label = names.index(class_name(folder))
        for path in _walk(folder):
            found = status(path)
            if found is None or not stat.S_ISREG(found.st_mode):
                raise DataError(f"{path} is not a file (a link to nothing, or a device)")
            files.append(path)
            labels.append(label)
            stamps.append((found.st_mtime_ns, found.st_size))
    if not files and not silent:
        raise DataError(f"{part} has no images: put files ending in {', '.join(EXTENSIONS)} into its class folders")
    return ImageFiles(tuple(files), tuple(labels), tuple(stamps))


def read_images(files: Sequence[str], form: Form, *, mixed: bool) -> npt.NDArray[np.uint8]:
    """Decode images, rotated by their EXIF orientation, to uint8 (n, channels, height, width).

    Modes 1 and L, with or without alpha, are grey, all others colour; alpha is dropped, and of several frames the first
    is taken. With ``channels`` 0 the result has one channel if all images are grey, three if all are in colour or, with
    ``mixed``, if some are. Resizing is bilinear with antialiasing and does not keep proportions.

    Raises:
        DataError: names the first image that cannot be decoded, has more than 8 bits a channel, or differs from the
            first in size, or in kind if not ``mixed``; or this machine has no memory for all of them.
    """
    pixels = np.empty((0, form.channels or 1, form.size, form.size), dtype=np.uint8)
    with _strict():
        for i, file in enumerate(files):
            if i == 0 and form.size:
                check_size(len(files), form)
            image = _decode(file, form)
            if i == 0:
                _check_room(len(files), image.nbytes, f"{file} is {_size(image)} pixels")
                pixels = np.empty((len(files), *image.shape), dtype=np.uint8)
            if image.shape[1:] != pixels.shape[2:]:
                raise DataError(
                    f"{file} is {_size(image)} pixels, {files[0]} is {_size(pixels[0])}; make them the same size, "
                    "or set image-size, to which all are resized"
                )
            if len(image) != pixels.shape[1]:
                if not mixed:
                    kinds = ("grey", "in colour") if len(image) == 1 else ("in colour", "grey")
                    raise DataError(f"{file} is {kinds[0]}, {files[0]} is {kinds[1]}; set image-channels to 1 or 3")
                if pixels.shape[1] == 1:
                    _check_room(len(files), image.nbytes, f"{file} is {_size(image)} pixels")
                    pixels = np.repeat(pixels, 3, axis=1)
            pixels[i] = image
    return pixels


def check_images(files: Sequence[str]) -> None:
    """Check what the headers of images tell: that they can be opened, and have at most 8 bits a channel.

    Of very many files those at equal distances are looked at: on a slow disk each takes some milliseconds.

    Raises:
        DataError: names the first that cannot be used.
    """
    with _strict():
        for file in files[:: -(-len(files) // _MOST_CHECKED)]:
            with _opened(file):
                pass


@contextmanager
def _strict() -> Iterator[None]:
    """Let an image of very many pixels raise an error, and pass over warnings about metadata."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decoded(cache: Path | None, key: object, decode: Callable[[], npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Return ``decode()``, from a file in ``cache`` if it was called for this ``key`` last time.

    If the file is not what was written, or ``cache`` cannot be written, the images are decoded again.
    """
    if cache is None:
        return decode()
    name = f"images-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"
    path, manifest = cache / f"{name}.npy", cache / f"{name}.json"
    try:
        with path.open("rb") as file:
            return _read_decoded(file, read_manifest(manifest))
    except FileNotFoundError:
        pass
    except Exception as error:  # on a damaged file numpy raises errors of many types
        log.warning("%s: is decoded anew (%s)", path, one_line(error) or type(error).__name__)
    pixels = decode()
    try:
        if pixels.nbytes > available_memory():
            raise MemoryError("this machine has no memory left for a copy")
        make_folder(cache, private=True)
        for old in cache.glob("images-*"):
            old.unlink()
        content = io.BytesIO()
        np.save(content, pixels, allow_pickle=False)
        write_whole(path, content.getbuffer(), sync=False, private=True)
        write_manifest(manifest, _about(pixels), sync=False, private=True)
    except (OSError, MemoryError) as error:
        log.warning("%s: decoded images are not kept (%s)", cache, getattr(error, "strerror", None) or one_line(error))
    return pixels


def _read_decoded(file: IO[bytes], about: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """Return the images in ``file``, which its manifest is ``about``; raise any error if they are not those."""
    if os.fstat(file.fileno()).st_size > available_memory():
        raise MemoryError("this machine has no memory left for it")
    pixels: npt.NDArray[np.uint8] = npy.read_array(file, allow_pickle=False)
    if _about(pixels) != about:
        raise ValueError("it is damaged: its checksum is wrong")
    return pixels


def _about(pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Return the manifest of decoded images."""
    return {"type": str(pixels.dtype), "shape": list(pixels.shape), "checksum-of-pixels": digest(pixels.data)}


def check_size(n: int, form: Form) -> None:
    """Check that this machine has memory for ``n`` images of the size that they are converted to, if one is said.

    Raises:
        DataError: it has not.
    """
    if form.size:
        _check_room(n, form.size**2 * (form.channels or 1), f"image-size = {form.size}")


def _check_room(n: int, bytes_each: int, said: str) -> None:
    """Refuse ``n`` images of that size, which is ``said``, if this machine has no memory for them."""
    size, room = n * bytes_each, available_memory()
    if size > room:
        raise DataError(
            f"{said}, and {n} such images have {size / 1e9:.1f} GB when they are decoded; "
            f"this machine has {room / 1e9:.1f} GB left; set image-size to fewer pixels a side"
        )


def _some_folders(part: Path) -> list[Path]:
    folders = class_folders(part)
    if not folders:
        raise DataError(f"{part} has no class folders; an image goes into {part}/<class>/")
    return folders


def class_name(folder: Path) -> str:
    """Return the name of the class whose images a folder has."""
    # NFC, because macOS may store accents decomposed.
    return unicodedata.normalize("NFC", folder.name)


def _listed(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text in UTF-8 ({one_line(error)})") from error
    names = tuple(unicodedata.normalize("NFC", line.strip()) for line in lines if line.strip())
    if not names:
        raise DataError(f"{path}: is empty; it must have the name of a class on each line")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"{path}: has {name!r} twice; each class has one line")
    return names


def _walk(folder: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error

    seen = {str(above) for above in Path(os.path.realpath(folder)).parents}
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        # A link may lead to a folder that was visited, or above it, where the other classes are.
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (
                os.path.join(place, name)
                for name in sorted(files)
                if not name.startswith(".") and name.lower().endswith(EXTENSIONS)
            )
        seen.add(real)


@contextmanager
def _opened(file: str) -> "Iterator[Image]":
    """Open one image, whose pixels the block decodes.

    Raises:
        DataError: it cannot be opened, or decoded by the block, or has more than 8 bits a channel.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file, formats=_FORMATS) as opened:
            if deep := _more_than_8_bits(opened, file):
                raise DataError(
                    f"{file}: has more than 8 bits a channel ({deep}); save it with the range that counts as 0 to 255"
                )
            if opened.format == "PNG" and not _has_end(file):
                raise DataError(f"{file}: cannot be decoded (it is truncated: the end of a PNG is missing)")
            yield opened
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{file}: cannot be decoded (it is no image, or not complete)") from error
    except Exception as error:  # on corrupt files Pillow's decoders raise errors of many types
        raise DataError(f"{file}: cannot be decoded ({one_line(error) or type(error).__name__})") from error


def _decode(file: str, form: Form) -> npt.NDArray[np.uint8]:
    """Return one image, uint8 (channels, height, width)."""
    from PIL import Image, ImageOps

    with _opened(file) as opened:
        channels = form.channels or (1 if opened.mode in _GREY else 3)
        image = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
        if form.size:
            image = image.resize((form.size, form.size), Image.Resampling.BILINEAR)
        pixels: npt.NDArray[np.uint8] = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _more_than_8_bits(image: Any, file: str) -> str:
    """Return what an image, opened from ``file``, has beyond 8 bits a channel, or an empty text."""
    if image.mode.startswith(("I", "F")):
        return f"mode {image.mode}"
    # Pillow opens many such images in a mode of 8 bits and cuts off the lower ones.
    depth = 8
    if image.format == "PNG":
        with open(file, "rb") as content:
            depth = content.read(25)[24]  # in its first chunk, IHDR
    elif image.format == "TIFF":
        depth = max(image.tag_v2.get(258, (1,)))  # BitsPerSample
    elif image.format == "PPM" and isinstance(image.tile[0][3], tuple):
        depth = image.tile[0][3][1].bit_length()  # the largest value
    return f"{depth} bits" if depth > 8 else ""


def _has_end(file: str) -> bool:
    """Return whether a PNG is whole: of a small one all pixels may be in its first half, and Pillow takes it."""
    with open(file, "rb") as content:
        content.seek(8)
        while len(head := content.read(8)) == 8:
            if head[4:] == b"IEND":
                return len(content.read(4)) == 4
            content.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
    return False


def _size(image: npt.NDArray[Any]) -> str:
    """Return ``"width x height"`` of an image (channels, height, width)."""
    return f"{image.shape[2]} x {image.shape[1]}"
