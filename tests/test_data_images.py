"""Images in class folders: which files are found, their labels and class names, and the decoded arrays."""

import io
import os
import struct
import subprocess
import sys
import unicodedata
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import data
from common.errors import ConfigError, DataError
from data.datasets import Source, load_pool
from data.images import EXTENSIONS, Form, class_folders, read_images
from tests.harness import federate
from tests.test_data import ROOT, config, message

RNG = np.random.default_rng(0)


def grey(height=6, width=5):
    return RNG.integers(0, 256, (height, width), dtype=np.uint8)


def colour(height=6, width=5):
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def save_classes(part, counts, make=grey):
    """Save so many images a class, and return them by label in order of names."""
    return [[save(part / name / f"{i:02}.png", make()) for i in range(count)] for name, count in sorted(counts.items())]


def folder_config(folder, **keys):
    return config(dataset="image-folder", data_dir=str(folder), partition="iid", **keys)


def pool_of(folder, **keys):
    cfg = folder_config(folder, **keys)
    data.check(cfg)
    return load_pool(Source.of(cfg))


def node(folder, name="a", **keys):
    return data.load_own(folder, config(**{"validation_fraction": 0.0, **keys}), name)


def save_node(folder, train=None, test=None, make=grey):
    return (
        save_classes(folder / "train", train or {"cat": 6, "dog": 4}, make),
        save_classes(folder / "test", test or {"cat": 2, "dog": 3}, make),
    )


# --- a pool in simulation ---------------------------------------------------------------------------------------------


def test_a_pool_of_train_and_test(tmp_path):
    train, test = save_node(tmp_path, make=colour)
    pool = pool_of(tmp_path)
    expected = [image for classes in (*train, *test) for image in classes]
    assert pool.x.dtype == np.uint8
    assert pool.x.flags.c_contiguous
    assert np.array_equal(pool.x, np.stack(expected).transpose(0, 3, 1, 2))
    assert pool.y.dtype == np.int64
    assert pool.y.tolist() == [0] * 6 + [1] * 4 + [0] * 2 + [1] * 3
    assert pool.num_classes == 2
    assert pool.class_names == ("cat", "dog")
    own = data.load_client(folder_config(tmp_path), 1, 2)
    assert own.class_names == ("cat", "dog")
    assert own.num_classes == 2
    assert own.input_shape == (3, 6, 5)
    assert data.describe(folder_config(tmp_path), 2).label_counts.shape == (2, 2)


def test_a_pool_without_train_and_test(tmp_path):
    images = save_classes(tmp_path, {"dog": 3, "cat": 2, "train": 4})  # the vehicle
    pool = pool_of(tmp_path)
    assert pool.class_names == ("cat", "dog", "train")
    assert np.array_equal(pool.x[:, 0], np.concatenate(images))
    assert pool.y.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_half_a_pool(tmp_path):
    save_classes(tmp_path / "train", {"cat": 3})
    for half, other in (("train", "test"), ("test", "train")):
        assert message(data.check, folder_config(tmp_path)) == (
            f"{tmp_path} has {half}/ with class folders, but no {other}/: put class folders into both, "
            f"or all of them into {tmp_path} itself"
        )
        (tmp_path / half).rename(tmp_path / other)


@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "val", "Test")])
def test_parts_of_other_names_are_not_taken_for_classes(tmp_path, names):
    for name in names:
        save_classes(tmp_path / name, {"cat": 3, "dog": 2})
    text = message(data.check, folder_config(tmp_path))
    assert text.startswith(f"{tmp_path} has ")
    assert all(f"{name}/" in text for name in names)
    assert text.endswith("with folders in them, which would be taken for classes: name the parts train/ and test/")


def test_a_folder_without_images_is_no_class_unless_somebody_says_so(tmp_path):
    save_classes(tmp_path, {"cat": 3, "dog": 2})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    for look in (pool_of, lambda folder: data.outline(folder_config(folder), 2)):
        text = message(look, tmp_path)
        assert text.startswith(f"{tmp_path}: the folder notes has no images, whose names end in .bmp")
        assert text.endswith("remove the folder, or list the classes in class-names or classes.txt")
    assert pool_of(tmp_path, class_names="cat,dog,notes").num_classes == 3


def test_images_that_would_not_fit_are_refused_before_the_first_is_decoded(tmp_path, monkeypatch):
    save_classes(tmp_path, {"cat": 3, "dog": 2})
    monkeypatch.setattr("data.images._decode", None)
    monkeypatch.setattr("data.images.available_memory", lambda: 5 * 10**10 - 1)
    cfg = folder_config(tmp_path, image_size=100_000, image_channels=1)
    text = message(data.outline, cfg, 2)
    assert text.startswith(
        "image-size = 100000, and 5 such images have 50.0 GB when they are decoded; this machine has"
    )


def test_what_is_found_before_anything_is_read(tmp_path):
    text = message(data.check, folder_config(""))
    assert text == (
        "dataset image-folder needs data-dir, the directory that has class folders with images, in train/ and test/ or "
        "in itself"
    )
    assert "is not a directory; it must have class folders" in message(data.check, folder_config(tmp_path / "no"))
    expected = f"{tmp_path} has no class folders; an image goes into {tmp_path}/<class>/"
    save(tmp_path / "1.png", grey())
    assert message(data.check, folder_config(tmp_path)) == expected
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    expected = f"{tmp_path}/test has no class folders; an image goes into {tmp_path}/test/<class>/"
    assert message(data.check, folder_config(tmp_path)) == expected
    (tmp_path / "test" / "cat").mkdir()
    data.check(folder_config(tmp_path))  # fast: it opens no class folder
    text = message(data.load_client, folder_config(tmp_path), 0, 2)
    assert text == (
        f"{tmp_path}/train has no images: put files ending in .bmp, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp "
        "into its class folders"
    )


def test_what_is_an_image_goes_by_its_name(tmp_path):
    kept = [save(tmp_path / "a" / f"{i}{end}", grey(8, 8)) for i, end in enumerate((".png", ".PNG", ".Bmp", ".tiff"))]
    kept.append(save(tmp_path / "a" / "below" / "it" / "1.pgm", grey(8, 8)))
    kept.append(save(tmp_path / "a" / "lossless.webp", np.tile(grey(8, 8)[..., None], 3), lossless=True)[..., 0])
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini", "notes.txt", "._1.png", ".3.png", "png", "1.png.part"):
        (tmp_path / "a" / name).write_bytes(b"no image")
    save(tmp_path / "a" / ".thumbnails" / "1.png", grey(3, 3))
    save(tmp_path / ".cache" / "1.png", grey(3, 3))
    pool = pool_of(tmp_path, image_channels=1)
    assert pool.class_names == ("a",)
    order = [0, 1, 2, 3, 5, 4]  # a folder's own files come before those of the folders in it
    assert np.array_equal(pool.x[:, 0], np.stack([kept[i] for i in order]))


@pytest.mark.parametrize("end", EXTENSIONS)
def test_every_extension_is_a_format_that_is_read(tmp_path, end):
    pixels = np.full((8, 8, 3), 200, np.uint8)
    save(tmp_path / f"a{end}", pixels[..., 0] if end == ".pgm" else pixels)
    array = read_images([str(tmp_path / f"a{end}")], Form(0, 3), mixed=False)
    assert array.shape == (1, 3, 8, 8)
    assert np.abs(array.astype(int) - 200).max() <= 2  # JPEG and WebP lose a little


def test_links_are_followed_and_lead_nowhere_twice(tmp_path):
    save_classes(tmp_path / "store", {"far": 2})
    images = tmp_path / "images"
    save_classes(images, {"a": 1, "b": 1})
    (images / "a" / "more").symlink_to(tmp_path / "store" / "far")
    (images / "a" / "again").symlink_to(tmp_path / "store" / "far")
    (images / "a" / "up").symlink_to(images)
    (images / "c").symlink_to(tmp_path / "store")
    (images / "b" / "one.png").symlink_to(tmp_path / "store" / "far" / "00.png")
    assert pool_of(images).y.tolist() == [0, 0, 0, 1, 1, 2, 2]
    (images / "b" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    text = message(data.load_client, folder_config(images, seed=1, max_samples=3), 0, 1)
    assert text == f"{images}/b/lost.png is not a file (a link to nothing, or a device)"


def test_a_pipe_is_not_waited_for(tmp_path):
    save_classes(tmp_path, {"a": 1})
    os.mkfifo(tmp_path / "a" / "1.png")
    text = message(data.load_client, folder_config(tmp_path), 0, 1)
    assert text == f"{tmp_path}/a/1.png is not a file (a link to nothing, or a device)"


def test_max_samples_of_a_pool_are_the_same_images_and_the_others_are_not_decoded(tmp_path):
    images = np.concatenate(save_classes(tmp_path, {"a": 10, "b": 10, "c": 1}))
    pool = pool_of(tmp_path, max_samples=8)
    positions = [next(i for i, image in enumerate(images) if np.array_equal(image, one[0])) for one in pool.x]
    assert positions == sorted(set(positions))
    assert pool.y.tolist() == [i // 10 for i in positions]
    assert pool.num_classes == 3
    left = next(i for i in range(20) if i not in positions)
    (tmp_path / "ab"[left // 10] / f"{left % 10:02}.png").write_bytes(b"broken")
    load_pool.cache_clear()
    assert np.array_equal(pool_of(tmp_path, max_samples=8).x, pool.x)
    assert "cannot be decoded" in message(load_pool, Source.of(folder_config(tmp_path)))


def test_an_image_that_was_altered_is_read_anew_by_the_next_run(tmp_path):
    save_classes(tmp_path, {"a": 2, "b": 2})
    cfg = folder_config(tmp_path)
    data.forget_altered(cfg)
    before = pool_of(tmp_path)
    other = save(tmp_path / "b" / "01.png", grey())
    assert pool_of(tmp_path) is before  # to the end of the run
    data.forget_altered(cfg)
    assert np.array_equal(pool_of(tmp_path).x[3, 0], other)


def test_names_of_classes_that_were_altered_are_read_anew_by_the_next_run(tmp_path):
    save_classes(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "classes.txt").write_text("a\nb\n")
    cfg = folder_config(tmp_path)
    data.forget_altered(cfg)
    assert pool_of(tmp_path).y.tolist() == [0, 0, 1, 1]
    before = data.digest(cfg)
    (tmp_path / "classes.txt").write_text("b\na\n\n")
    assert data.digest(cfg) != before
    data.forget_altered(cfg)
    assert pool_of(tmp_path).y.tolist() == [1, 1, 0, 0]
    # Where the run itself names them, nobody reads the file.
    said = data.digest(folder_config(tmp_path, class_names="a,b"))
    (tmp_path / "classes.txt").unlink()
    assert data.digest(folder_config(tmp_path, class_names="a,b")) == said


def test_parts_that_are_one_folder(tmp_path):
    save_classes(tmp_path / "train", {"a": 3, "b": 3})
    (tmp_path / "test").symlink_to("train")
    expected = f"{tmp_path}/test is {tmp_path}/train under another name; test samples must be others than those for"
    assert message(data.check, folder_config(tmp_path)).startswith(expected)
    assert message(node, tmp_path).startswith(expected)


def test_a_federation_learns_from_folders(tmp_path):
    for name, level in (("bright", 180), ("dark", 60)):
        for i in range(20):
            save(tmp_path / "data" / name / f"{i}.png", (grey(8, 8) % 40 + level).astype(np.uint8))
    folder = str(tmp_path / "data")
    outcome = federate(
        tmp_path / "runs", 2, method="fedavg", dataset="image-folder", data_dir=folder, partition="iid", local_epochs=5
    )
    assert outcome.summary["accuracy"]["after"]["mean"] > 0.95


# --- a node's own -----------------------------------------------------------------------------------------------------


def test_a_nodes_own_images(tmp_path):
    train, test = save_node(tmp_path, make=colour)
    own = node(tmp_path, "ward 7", validation_fraction=0.2)
    assert (len(own.train), len(own.validation), len(own.test)) == (8, 2, 5)
    assert (own.train.x.dtype, own.train.y.dtype, own.test.y.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert own.input_shape == (3, 6, 5)
    assert (own.num_classes, own.class_names) == (2, ("cat", "dog"))
    assert np.array_equal(own.test.x.numpy(), np.concatenate(test).transpose(0, 3, 1, 2))
    assert own.test.y.tolist() == [0, 0, 1, 1, 1]
    # Every training image is there once, with its label.
    saved = {image.transpose(2, 0, 1).tobytes(): label for label, images in enumerate(train) for image in images}
    for split in (own.train, own.validation):
        for x, y in zip(split.x, split.y, strict=True):
            assert saved.pop(x.numpy().tobytes()) == y
    assert not saved
    assert not torch.equal(node(tmp_path, "ward 8", validation_fraction=0.2).train.x, own.train.x)
    assert not torch.equal(node(tmp_path, "ward 7", validation_fraction=0.2, seed=1).train.x, own.train.x)


def test_max_samples_of_a_nodes_images(tmp_path):
    train, _ = save_node(tmp_path)
    own = node(tmp_path, max_samples=5, validation_fraction=0.4)
    assert (len(own.train), len(own.validation), len(own.test)) == (3, 2, 5)
    saved = {image.tobytes(): label for label, images in enumerate(train) for image in images}
    for split in (own.train, own.validation):
        assert [saved[x.numpy().tobytes()] for x in split.x] == split.y.tolist()


def test_a_nodes_images_are_decoded_again_only_if_one_changed(tmp_path):
    save_node(tmp_path)
    own = node(tmp_path)
    assert node(tmp_path, lr=0.5) is own
    path = tmp_path / "train" / "dog" / "01.png"
    status = path.stat()
    for change in (
        lambda: save(tmp_path / "train" / "dog" / "new.png", grey()),
        lambda: (tmp_path / "test" / "cat" / "00.png").unlink(),
        lambda: path.rename(path.with_name("zz.png")),
        lambda: (tmp_path / "train" / "dog" / "00.png").rename(tmp_path / "train" / "cat" / "99.png"),
        lambda: os.utime(path.with_name("zz.png"), ns=(status.st_atime_ns, status.st_mtime_ns + 1)),
        lambda: (tmp_path / "classes.txt").write_text("dog\ncat\n"),
    ):
        change()
        anew = node(tmp_path)
        assert anew is not own
        assert node(tmp_path) is anew
        own = anew
    assert node(tmp_path, image_size=4).input_shape == (1, 4, 4)
    assert node(tmp_path, image_channels=3).input_shape == (3, 6, 5)
    assert node(tmp_path, num_classes=7).num_classes == 7


def cached(folder):
    """Return a node's images, read as by a new process, and whether they were decoded, which writes the cache anew."""
    data.clients._load_images.cache_clear()
    for path in (folder / "cache").glob("*.npy"):
        os.utime(path, (0, 0))  # a file written anew within a tick of the clock has the time of the old one
    before = [path.stat().st_mtime_ns for path in (folder / "cache").glob("*.npy")]
    own = data.load_own(folder, config(validation_fraction=0.0), "a", folder / "cache")
    return own, [path.stat().st_mtime_ns for path in (folder / "cache").glob("*.npy")] != before


def damages():
    """Yield what may become of the two files of a cache, by name."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (90000000000000, 1, 6, 5), }".ljust(117) + b"\n"
    yield "pixels", lambda npy, _: (npy[:-30] + bytes(30), None)
    yield "huge", lambda npy, _: (npy[:10] + header + npy[128:], None)
    yield "short", lambda npy, _: (npy[:-1], None)
    yield "empty", lambda npy, _: (b"", None)
    yield "zeros", lambda npy, _: (bytes(len(npy)), None)
    yield "fewer", lambda npy, _: (npy.replace(b"(15, 1, 6, 5)", b"(14, 1, 6, 5)"), None)
    yield "turned", lambda npy, _: (npy.replace(b"(15, 1, 6, 5)", b"(15, 1, 5, 6)"), None)
    yield "signed", lambda npy, _: (npy.replace(b"|u1", b"|i1"), None)
    yield "bool", lambda npy, _: (npy.replace(b"|u1", b"|b1"), None)
    yield "pickled", lambda npy, _: (npy.replace(b"'|u1'", b"'|O' "), None)
    yield "no header", lambda npy, _: (npy[:10] + b"(" * 117 + b"\n" + npy[128:], None)
    yield "zip", lambda npy, _: (b"PK\3\4" + npy, None)
    yield "no manifest", lambda npy, _: (npy, b"")
    yield "manifest", lambda npy, said: (npy, said.replace(b"uint8", b"uint9"))


DAMAGES = dict(damages())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_of_decoded_images_is_decoded_anew(tmp_path, damage, caplog):
    save_node(tmp_path)
    first, decoded = cached(tmp_path)
    assert decoded
    again, decoded = cached(tmp_path)
    assert not decoded
    pixels, manifest = (next((tmp_path / "cache").glob(f"images-*.{end}")) for end in ("npy", "json"))
    contents = pixels.read_bytes(), manifest.read_bytes()
    found = DAMAGES[damage](*contents)
    assert found != contents
    for path, content in zip((pixels, manifest), found, strict=True):
        if content is not None:
            path.write_bytes(content)
    anew, decoded = cached(tmp_path)
    assert decoded
    assert f"{pixels}: is decoded anew (" in caplog.text
    for own in (again, anew):
        assert torch.equal(own.train.x, first.train.x)
        assert own.train.x.dtype == torch.uint8
        assert torch.equal(own.test.x, first.test.x)
    # What was there is replaced.
    assert (pixels.read_bytes(), manifest.read_bytes()) == contents
    assert not cached(tmp_path)[1]


def test_a_cache_has_the_images_of_one_state_of_the_files(tmp_path):
    save_node(tmp_path)
    cached(tmp_path)
    save(tmp_path / "test" / "cat" / "new.png", grey())
    assert cached(tmp_path)[1]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".npy"]


def test_half_of_a_nodes_images(tmp_path):
    save_classes(tmp_path / "train", {"cat": 3})
    text = message(node, tmp_path)
    assert text == f"{tmp_path}/test is not there; it must have the class folders of the test images"
    (tmp_path / "test").mkdir()
    assert (
        message(node, tmp_path) == f"{tmp_path}/test has no class folders; an image goes into {tmp_path}/test/<class>/"
    )
    (tmp_path / "test" / "cat").mkdir()
    assert message(node, tmp_path).startswith(f"{tmp_path}/test has no images: put files ending in .bmp, ")


# --- what labels mean -------------------------------------------------------------------------------------------------


def test_classes_are_the_folders_of_both_parts(tmp_path):
    save_node(tmp_path, {"dog": 2, "emu": 2}, {"ant": 1, "dog": 1})
    own = node(tmp_path)
    assert own.class_names == ("ant", "dog", "emu")
    assert sorted(own.train.y.tolist()) == [1, 1, 2, 2]
    assert own.test.y.tolist() == [0, 1]


def test_the_key_says_what_labels_mean_also_of_a_client_that_lacks_classes(tmp_path):
    save_node(tmp_path, {"dog": 2}, {"dog": 1})
    (tmp_path / "classes.txt").write_text("dog\n")
    own = node(tmp_path, class_names=" emu, dog ,big cat")
    assert own.class_names == ("emu", "dog", "big cat")
    assert own.num_classes == 3
    assert own.train.y.tolist() == [1, 1]
    assert pool_of(tmp_path, class_names="emu,dog,big cat").y.tolist() == [1, 1, 1]
    text = message(node, tmp_path, class_names="emu,dogs")
    assert text == f"{tmp_path}/train/dog is not one of the classes of class-names (did you mean 'dogs'?)"
    text = message(data.check, folder_config(tmp_path, class_names="emu,cat"))
    assert text == f"{tmp_path}/train/dog is not one of the classes of class-names; they are emu, cat"


def test_a_file_says_what_labels_mean(tmp_path):
    save_node(tmp_path, {"dog": 2}, {"dog": 1})
    path = tmp_path / "classes.txt"
    path.write_bytes(b"\xef\xbb\xbfgo, kart\r\n\r\n  dog \r\n")  # as Windows' editor saves it
    own = node(tmp_path)
    assert own.class_names == ("go, kart", "dog")
    assert own.test.y.tolist() == [1]
    assert pool_of(tmp_path).class_names == ("go, kart", "dog")
    path.write_text("cat\n")
    text = message(node, tmp_path)
    assert text == f"{tmp_path}/train/dog is not one of the classes of {path}; they are cat"
    path.write_text("cat\ndog\ncat\n")
    assert message(data.check, folder_config(tmp_path)) == f"{path}: has 'cat' twice; each class has one line"
    path.write_text("\n \n")
    assert message(node, tmp_path) == f"{path}: is empty; it must have the name of a class on each line"
    path.write_bytes(b"caf\xe9\n")
    assert message(node, tmp_path).startswith(f"{path}: cannot be read as text in UTF-8 (")


def test_an_accent_of_its_own_is_the_same_name(tmp_path):
    composed, apart = unicodedata.normalize("NFC", "blé"), unicodedata.normalize("NFD", "blé")
    assert composed != apart
    save_classes(tmp_path, {apart: 2, "a": 1})
    assert pool_of(tmp_path, class_names=f"a,{composed}").y.tolist() == [0, 1, 1]
    assert pool_of(tmp_path, class_names=f"a,{apart}").class_names == ("a", composed)
    assert pool_of(tmp_path).class_names == ("a", composed)
    (tmp_path / "classes.txt").write_text(f"a\n{apart}\n", encoding="utf-8")
    assert pool_of(tmp_path, seed=1, max_samples=2).class_names == ("a", composed)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [("cat,,dog", "has an empty name"), ("cat,", "has an empty name"), ("cat, dog ,cat", "has 'cat' twice")],
)
def test_a_list_of_classes_that_cannot_be(names, wrong):
    text = message(config, class_names=names, kind=ConfigError)
    assert text == f"class-names = {names!r}: {wrong}; must be distinct names, as in 'cat,dog'"


def test_num_classes_may_be_more_but_not_less(tmp_path):
    save_node(tmp_path)
    own = node(tmp_path, num_classes=5)
    assert (own.num_classes, own.class_names) == (5, ("cat", "dog"))
    assert pool_of(tmp_path, num_classes=5).num_classes == 5
    assert pool_of(tmp_path, num_classes=2).num_classes == 2
    text = message(node, tmp_path, class_names="cat,dog,emu", num_classes=2)
    assert text == "class-names has 3 classes; num-classes = 2 must be at least that, or 0"
    assert message(data.check, folder_config(tmp_path, num_classes=1)) == (
        f"{tmp_path} has 2 classes; num-classes = 1 must be at least that, or 0"
    )


# --- what images become -----------------------------------------------------------------------------------------------


def read(*paths, size=0, channels=0, mixed=False):
    return read_images([str(path) for path in paths], Form(size, channels), mixed=mixed)


def test_grey_has_one_channel_and_colour_three(tmp_path):
    save(tmp_path / "l.png", np.array([[0, 200], [10, 255]], np.uint8))
    Image.fromarray(np.array([[False, True], [True, False]])).save(tmp_path / "1.png")
    save(tmp_path / "la.png", np.array([[[0, 0], [200, 9]], [[10, 255], [255, 0]]], np.uint8))
    array = read(tmp_path / "l.png", tmp_path / "1.png", tmp_path / "la.png")
    assert array.dtype == np.uint8
    assert array[:, 0].tolist() == [[[0, 200], [10, 255]], [[0, 255], [255, 0]], [[0, 200], [10, 255]]]
    rgb = colour(2, 2)
    save(tmp_path / "rgb.png", rgb)
    save(tmp_path / "rgba.png", np.dstack([rgb, grey(2, 2)]))
    palette = Image.fromarray(np.array([[0, 1], [1, 2]], np.uint8), mode="P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette.save(tmp_path / "p.png")
    array = read(tmp_path / "rgb.png", tmp_path / "rgba.png", tmp_path / "p.png")
    assert np.array_equal(array[0], rgb.transpose(2, 0, 1))
    assert np.array_equal(array[1], array[0])
    assert array[2].transpose(1, 2, 0).tolist() == [[[10, 20, 30], [40, 50, 60]], [[40, 50, 60], [70, 80, 90]]]


def test_channels_are_converted(tmp_path):
    first, second = save(tmp_path / "0.png", grey()), save(tmp_path / "1.png", colour())
    three = read(tmp_path / "0.png", tmp_path / "1.png", channels=3)
    assert np.array_equal(three[0], np.stack([first] * 3))
    assert np.array_equal(three[1], second.transpose(2, 0, 1))
    one = read(tmp_path / "0.png", tmp_path / "1.png", channels=1)
    assert np.array_equal(one[0, 0], first)
    luma = second @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
    assert np.abs(one[1, 0] - luma).max() <= 1


def test_a_mixture_becomes_rgb_in_a_pool_and_is_refused_on_a_node(tmp_path):
    greys = [save(tmp_path / part / "a" / "0.png", grey()) for part in ("train", "test")]
    colours = [save(tmp_path / part / "a" / "1.png", colour()) for part in ("train", "test")]
    pool = pool_of(tmp_path)
    for i, image in enumerate(greys):
        assert np.array_equal(pool.x[2 * i], np.stack([image] * 3))
    for i, image in enumerate(colours):
        assert np.array_equal(pool.x[2 * i + 1], image.transpose(2, 0, 1))
    expected = f"{tmp_path}/train/a/1.png is in colour, {tmp_path}/train/a/0.png is grey; set image-channels to 1 or 3"
    assert message(node, tmp_path) == expected
    assert node(tmp_path, image_channels=1).input_shape == (1, 6, 5)
    for name in ("train/a/1.png", "test/a/0.png"):
        (tmp_path / name).unlink()
    expected = f"{tmp_path}/test/a/1.png is in colour, {tmp_path}/train/a/0.png is grey; set image-channels to 1 or 3"
    assert message(node, tmp_path) == expected
    (tmp_path / "test/a/1.png").rename(tmp_path / "train/a/1.png")
    (tmp_path / "train/a/0.png").rename(tmp_path / "test/a/0.png")
    expected = f"{tmp_path}/test/a/0.png is grey, {tmp_path}/train/a/1.png is in colour; set image-channels to 1 or 3"
    assert message(node, tmp_path) == expected


def test_another_size_is_refused_or_resized(tmp_path):
    save(tmp_path / "train" / "a" / "0.png", grey(6, 5))
    save(tmp_path / "test" / "a" / "0.png", grey(6, 5))
    save(tmp_path / "test" / "a" / "1.png", grey(5, 6))
    expected = (
        f"{tmp_path}/test/a/1.png is 6 x 5 pixels, {tmp_path}/train/a/0.png is 5 x 6; make them the same size, "
        "or set image-size, to which all are resized"
    )
    assert message(node, tmp_path) == expected
    assert message(data.load_client, folder_config(tmp_path), 0, 1) == expected
    assert node(tmp_path, image_size=16).input_shape == (1, 16, 16)
    assert pool_of(tmp_path, image_size=16).x.shape == (3, 1, 16, 16)


def test_resizing_is_antialiased(tmp_path):
    # Of every 8 columns the two in the middle are white: without antialiasing only those would be seen.
    stripes = np.tile(np.array([0, 0, 0, 255, 255, 0, 0, 0], np.uint8), (64, 8))
    save(tmp_path / "l.png", stripes)
    # In these two modes Pillow takes nearest pixels.
    Image.fromarray(stripes > 0).save(tmp_path / "1.png")
    Image.fromarray(stripes).convert("P").save(tmp_path / "p.png")
    for name in ("l", "1", "p"):
        array = read(tmp_path / f"{name}.png", size=8)
        assert array.shape[2:] == (8, 8)
        assert np.abs(array[..., 1:-1].astype(int) - 255 * 2 / 8).max() <= 1  # at the edges the mean is of fewer
    flat = np.full((3, 9, 3), (7, 80, 200), np.uint8)
    save(tmp_path / "flat.png", flat)
    assert np.array_equal(read(tmp_path / "flat.png", size=6), np.tile(flat[:1, :1].transpose(2, 0, 1), (1, 1, 6, 6)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path, orientation):
    upright = grey(6, 5)
    # EXIF says where the stored row 0 and column 0 are to be seen; 6: at the right and at the top.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read(tmp_path / "a.png")[0, 0], upright)


def test_of_several_frames_the_first_is_taken(tmp_path):
    frames = [Image.fromarray(grey()) for _ in range(3)]
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    assert np.array_equal(read(tmp_path / "a.tif")[0, 0], np.asarray(frames[0]))
    flat = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (50, 200)]
    flat[0].save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=flat[1:])  # as telephones do
    assert np.abs(read(tmp_path / "a.jpg").astype(int) - 50).max() <= 2


def png(width, height, depth=8, kind=0, pixels=bytes(1000)):
    """Return a PNG that says to have that many pixels, bits a channel and kind of colour, and has these."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def rows(image):
    """Return the rows of a PNG of 16 bits, each of them unfiltered."""
    return b"".join(b"\0" + row.astype(">u2").tobytes() for row in image)


def tiff(image):
    """Return an uncompressed TIFF of colours (height, width, 3)."""
    height, width, _ = image.shape
    pixels = image.astype(image.dtype.newbyteorder("<")).tobytes()
    bits = struct.pack("<HHH", *[8 * image.itemsize] * 3)
    tags = (
        *((256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8 + len(pixels)), (259, 3, 1, 1), (262, 3, 1, 2)),
        *((273, 4, 1, 8), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(pixels))),
    )
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels) + len(bits)) + pixels + bits + directory


def whole(end):
    file = io.BytesIO()
    Image.fromarray(grey(32, 32)).save(file, {".png": "PNG", ".jpg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}[end])
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.png", b"", "it is no image, or not complete"),
        ("text.jpg", b"not an image", "it is no image, or not complete"),
        ("half.png", whole(".png")[:500], "truncated"),
        ("half.jpg", whole(".jpg")[:600], "truncated"),
        ("half.bmp", whole(".bmp")[:1200], "truncated"),
        ("half.webp", whole(".webp")[:200], ""),
        ("header.png", whole(".png")[:20], ""),
        ("bomb.png", png(20000, 20000), "exceeds limit of"),
        ("large.png", png(10000, 10000), "exceeds limit of"),  # of this Pillow itself would only warn
        ("program.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "it is no image"),
    ],
)
def test_what_cannot_be_decoded_is_named(tmp_path, name, content, reason):
    save(tmp_path / "a" / "0.png", grey(32, 32))
    path = tmp_path / "a" / name
    path.write_bytes(content)
    text = message(data.load_client, folder_config(tmp_path), 0, 1)
    assert text.startswith(f"{path}: cannot be decoded (")
    assert reason in text


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("empty.png", b"", "cannot be decoded (it is no image, or not complete)"),
        ("half.png", whole(".png")[:500], "cannot be decoded (it is truncated: the end of a PNG is missing)"),
        ("deep.png", png(5, 4, 16, 2, bytes(4 * 31)), "has more than 8 bits a channel (16 bits)"),
        ("large.png", png(10000, 10000), "cannot be decoded (Image size (100000000 pixels) exceeds limit of"),
    ],
)
def test_a_node_does_not_wait_with_an_image_that_no_run_could_use(tmp_path, name, content, wrong):
    save_node(tmp_path, {unicodedata.normalize("NFD", "blé"): 2, "a": 2})
    data.check_own(tmp_path)
    path = tmp_path / "test" / "dog" / name
    path.write_bytes(content)
    assert message(data.check_own, tmp_path).startswith(f"{path}: {wrong}")


def test_of_very_many_images_a_node_looks_at_some(tmp_path, monkeypatch):
    monkeypatch.setattr("data.images._MOST_CHECKED", 2)
    save_node(tmp_path, {"cat": 2, "dog": 2}, {"cat": 1, "dog": 1})
    (tmp_path / "train" / "cat" / "01.png").write_bytes(b"")
    data.check_own(tmp_path)
    (tmp_path / "train" / "dog" / "00.png").write_bytes(b"")
    assert message(data.check_own, tmp_path).startswith(f"{tmp_path}/train/dog/00.png: cannot be decoded")


def test_a_model_of_grey_images_answers_no_image_in_colour_unless_the_run_converted_them(tmp_path):
    def read_for(channels, **keys):
        return data.read_inputs(tmp_path, config(**keys), (channels, 6, 5), "uint8")[1]

    first = save(tmp_path / "0.png", grey())
    assert np.array_equal(read_for(1), first[None, None])
    assert np.array_equal(read_for(3), np.stack([first] * 3)[None])
    save(tmp_path / "1.png", colour())
    with pytest.raises(
        DataError, match=f"^{tmp_path}: has images in colour, and the model was trained on grey ones; c"
    ):
        read_for(1)
    assert read_for(1, image_channels=1).shape == (2, 1, 6, 5)
    assert read_for(3).shape == (2, 3, 6, 5)


def test_more_than_eight_bits_are_not_cut_off(tmp_path):
    for dtype, name, mode in ((np.uint16, "a.png", "I;16"), (np.int32, "b.tif", "I"), (np.float32, "c.tif", "F")):
        save(tmp_path / name, np.full((4, 4), 4000, dtype))
        assert message(read, tmp_path / name) == (
            f"{tmp_path}/{name}: has more than 8 bits a channel (mode {mode}); save it with the range that counts "
            "as 0 to 255"
        )


def test_more_images_than_there_is_memory_for_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.new("RGB", (3000, 2000)).save(path)
    text = message(read_images, [str(path)] * 1_000_000, Form(0, 0), mixed=False)
    assert text.startswith(
        f"{path} is 3000 x 2000 pixels, and 1000000 such images have 18000.0 GB when they are decoded; this machine "
    )
    assert text.endswith(" GB left; set image-size to fewer pixels a side")
    # Resized they fit; where one in colour comes, grey ones must fit as such.
    monkeypatch.setattr("data.images.available_memory", lambda: 4 * 30 * 20 * 3)
    assert read_images([str(path)] * 4, Form(20, 0), mixed=False).shape == (4, 3, 20, 20)
    save(tmp_path / "grey.png", grey(20, 30))
    save(tmp_path / "rgb.png", colour(20, 30))
    files = [str(tmp_path / f"{name}.png") for name in ("grey", "rgb", "grey", "grey")]
    assert read_images(files, Form(0, 0), mixed=True).shape == (4, 3, 20, 30)
    monkeypatch.setattr("data.images.available_memory", lambda: 4 * 30 * 20 * 3 - 1)
    text = message(read_images, files, Form(0, 0), mixed=True)
    assert text.startswith(f"{tmp_path}/rgb.png is 30 x 20 pixels, and 4 such images have ")


DEEP = np.random.default_rng(0).integers(256, 4096, (4, 5, 4), dtype=np.uint16)
SHALLOW = (DEEP >> 4).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "bits"),
    [
        ("rgb.png", png(5, 4, 16, 2, rows(DEEP[..., :3])), 16),
        ("rgba.png", png(5, 4, 16, 6, rows(DEEP)), 16),
        ("la.png", png(5, 4, 16, 4, rows(DEEP[..., :2])), 16),
        ("rgb.tif", tiff(DEEP[..., :3]), 16),
        ("rgb.ppm", b"P6\n5 4\n4095\n" + DEEP[..., :3].astype(">u2").tobytes(), 12),
        ("plain.ppm", b"P3\n5 4\n4095\n" + " ".join(map(str, DEEP[..., :3].flat)).encode(), 12),
    ],
)
def test_more_than_eight_bits_of_a_colour_are_not_cut_off(tmp_path, name, content, bits):
    (tmp_path / name).write_bytes(content)
    with Image.open(tmp_path / name) as opened:
        assert opened.mode in ("RGB", "RGBA")  # of 8 bits
    assert message(read, tmp_path / name) == (
        f"{tmp_path}/{name}: has more than 8 bits a channel ({bits} bits); save it with the range that counts "
        "as 0 to 255"
    )


def test_eight_bits_of_a_colour_and_fewer_are_read(tmp_path):
    colours = SHALLOW[..., :3]
    save(tmp_path / "rgb.png", colours)
    (tmp_path / "rgb.tif").write_bytes(tiff(colours))
    (tmp_path / "rgb.ppm").write_bytes(b"P6\n5 4\n255\n" + colours.tobytes())
    for name in ("rgb.png", "rgb.tif", "rgb.ppm"):
        assert np.array_equal(read(tmp_path / name)[0], colours.transpose(2, 0, 1))
    (tmp_path / "few.ppm").write_bytes(b"P6\n5 4\n15\n" + (colours >> 4).tobytes())
    assert np.array_equal(read(tmp_path / "few.ppm")[0], (colours >> 4).transpose(2, 0, 1) * 17)


@pytest.mark.thorough
def test_nothing_is_said_and_no_warning_filter_stays(tmp_path):
    palette = Image.fromarray(grey(), mode="P")
    palette.putpalette(list(range(256)) * 3)
    palette.save(tmp_path / "a.png", transparency=bytes(256))
    code = f"""
import warnings
from data.images import Form, read_images
before = list(warnings.filters)
read_images([{str(tmp_path / "a.png")!r}], Form(0, 0), mixed=False)
assert warnings.filters == before
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_keys_that_cannot_be_used():
    assert message(config, image_channels=2, kind=ConfigError) == "image-channels = 2: must be one of 0, 1, 3"
    assert message(config, image_size=-1, kind=ConfigError) == "image-size = -1: must be at least 0"


@pytest.mark.parametrize("size", [8, 28])
def test_a_small_png_that_is_cut_anywhere_is_refused(tmp_path, size):
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    Image.new("L", (size, size), 7).save(folder / "whole.png")
    content = (folder / "whole.png").read_bytes()
    assert read_images([str(folder / "whole.png")], Form(0, 0), mixed=False).shape == (1, 1, size, size)
    for end in range(len(content)):
        (folder / "cut.png").write_bytes(content[:end])
        with pytest.raises(DataError, match="cannot be decoded"):
            read_images([str(folder / "cut.png")], Form(0, 0), mixed=False)
    (folder / "more.png").write_bytes(content + b"what some cameras write behind it")
    assert len(read_images([str(folder / "more.png")], Form(0, 0), mixed=False)) == 1


def test_a_class_folder_that_is_not_utf8_is_refused(tmp_path):
    name = os.fsencode(tmp_path) + b"/train/caf\xe9"
    os.makedirs(name)
    with pytest.raises(DataError, match=r"has a folder whose name is not UTF-8: b'caf\\xe9'; rename it") as caught:
        class_folders(tmp_path / "train")
    str(caught.value).encode()
