"""SVHN, PathMNIST and AG News, on small files in the format of the official ones; texts as word ids."""

import csv
import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import data
from client_app.batches import normalise
from data.datasets import Source, load_pool, read_torchvision
from data.text import BUCKETS, LENGTH, tokens
from models.layers import VOCABULARY
from tests.test_data import QUICK, ROOT, config, message


def read(dataset, data_dir):
    keys = {"model": "fasttext"} if dataset == "ag-news" else {}
    cfg = config(dataset=dataset, data_dir=str(data_dir), partition="iid", **keys)
    data.check(cfg)
    return load_pool(Source.of(cfg))


# --- SVHN -------------------------------------------------------------------------------------------------------------


def save_svhn(path, images, labels):
    import scipy.io

    # MATLAB's layout: height, width, channels, samples; labels are a column, and the digit 0 is 10.
    scipy.io.savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels)[:, None]})
    return ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]


def test_svhn(tmp_path):
    import torchvision.datasets

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (25, 3, 32, 32), dtype=np.uint8)
    labels = (np.arange(25) % 10).astype(np.uint8)
    files = {
        part: save_svhn(tmp_path / f"{part}_32x32.mat", images[rows], labels[rows])
        for part, rows in (("train", slice(20)), ("test", slice(20, 25)))
    }

    class Small(torchvision.datasets.SVHN):  # type: ignore[misc]
        split_list = files

    train, test = read_torchvision(Small, tmp_path)
    assert np.array_equal(np.concatenate([train.x, test.x]), images)
    assert train.x.flags.c_contiguous
    assert np.concatenate([train.y, test.y]).tolist() == labels.tolist()
    assert train.y.dtype == np.int64
    assert len(test.y) == 5
    # These are not the official files, and that is seen before they are read.
    text = message(read, "svhn", tmp_path)
    assert text.startswith(f"torchvision cannot read SVHN in {tmp_path}: Dataset not found or corrupted")


def test_svhn_that_is_not_there(tmp_path):
    expected = (
        "dataset svhn needs data-dir (--data for tables), the directory that has train_32x32.mat and test_32x32.mat; "
        "with download=true (--download for tables) it is fetched into it"
    )
    assert message(data.check, config(dataset="svhn")).startswith(expected)
    (tmp_path / "train_32x32.mat").touch()
    assert message(read, "svhn", tmp_path) == (
        f"dataset svhn is not in data-dir = {tmp_path}: {tmp_path}/test_32x32.mat is missing; put the official files "
        f"train_32x32.mat, test_32x32.mat (unpacked) into {tmp_path}, or set download=true (--download for tables)"
    )


# --- PathMNIST --------------------------------------------------------------------------------------------------------


def save_path_mnist(folder, **replace):
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 18), ("val", 9), ("test", 9)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (n, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(n, dtype=np.uint8) % 9)[:, None]
    arrays |= replace
    np.savez_compressed(folder / "pathmnist.npz", **{name: a for name, a in arrays.items() if a is not None})
    return arrays


def test_path_mnist_pools_its_three_parts(tmp_path):
    arrays = save_path_mnist(tmp_path)
    pool = read("pathmnist", tmp_path)
    images = np.concatenate([arrays[f"{part}_images"] for part in ("train", "val", "test")])
    assert np.array_equal(pool.x, images.transpose(0, 3, 1, 2))
    assert pool.x.dtype == np.uint8
    assert pool.y.tolist() == [*range(9), *range(9), *range(9), *range(9)]
    assert pool.num_classes == 9


def test_path_mnist_that_is_not_there(tmp_path):
    cfg = config(dataset="pathmnist", data_dir=str(tmp_path), download=True)
    text = message(data.check, cfg)
    assert text == (
        f"dataset pathmnist is not in data-dir = {tmp_path}: {tmp_path}/pathmnist.npz is missing; put the official "
        f"files pathmnist.npz (unpacked) into {tmp_path}, Floret cannot download it"
    )
    assert message(data.load_client, cfg, 0, 2) == text
    text = message(data.check, config(dataset="pathmnist"))
    assert text == "dataset pathmnist needs data-dir (--data for tables), the directory that has pathmnist.npz"
    save_path_mnist(tmp_path, val_images=None)
    assert f"{tmp_path}/pathmnist.npz: array val_images is missing" in message(data.check, cfg)


@pytest.mark.parametrize(
    ("replace", "expected"),
    [
        ({"val_labels": np.zeros(9, np.uint8)}, "val_images has shape (9, 28, 28, 3) and val_labels (9,); there must"),
        (
            {"val_labels": np.zeros((9, 2), np.uint8)},
            "val_images has shape (9, 28, 28, 3) and val_labels (9, 2); there",
        ),
        ({"test_labels": np.zeros((8, 1), np.uint8)}, "test_images has shape (9, 28, 28, 3) and test_labels (8, 1); t"),
        ({"train_labels": np.zeros((18, 1))}, "array train_labels has type float64; labels must be integers"),
        ({"test_images": np.zeros((9, 64, 64, 3), np.uint8)}, "train_images has samples of shape (3, 28, 28) and type"),
    ],
)
def test_what_path_mnist_may_not_have(tmp_path, replace, expected):
    save_path_mnist(tmp_path, **replace)
    assert message(read, "pathmnist", tmp_path).startswith(f"{tmp_path}/pathmnist.npz: {expected}")


# --- texts as word ids ------------------------------------------------------------------------------------------------


def crc32_bit_by_bit(content: bytes) -> int:
    """CRC-32 as IEEE 802.3 defines it: the remainder by the polynomial 0x04C11DB7, least significant bit first."""
    register = 0xFFFFFFFF
    for byte in content:
        for bit in range(8):
            carry = (register ^ (byte >> bit)) & 1
            register = (register >> 1) ^ (0xEDB88320 if carry else 0)
    return register ^ 0xFFFFFFFF


def word_id(word: str) -> int:
    return 1 + crc32_bit_by_bit(word.encode("utf-8")) % 32767


def test_the_id_of_a_word_is_its_crc32():
    # The check value that every description of CRC-32 prints: 0xCBF43926 for "123456789".
    assert tokens(["123456789"])[0, 0] == 0xCBF43926 % 32767 + 1
    row = tokens(["Fed's  rates: 1.5%\\up"])[0]
    assert row[:7].tolist() == [word_id(word) for word in ("fed", "s", "rates", "1", "5", "up")] + [0]


def test_lengths_of_texts():
    ids = tokens(["", " - \\ ...", "a", " ".join(f"w{i}" for i in range(200)), " ".join(f"w{i}" for i in range(203))])
    assert ids.shape == (5, LENGTH) == (5, 200)
    assert ids.dtype == np.int32
    assert not ids[:2].any()
    assert np.flatnonzero(ids[2]).tolist() == [0]
    assert (ids[3] > 0).all()
    assert np.array_equal(ids[3], ids[4])  # the first 200 words count
    assert tokens([]).shape == (0, 200)


def test_words_of_other_scripts():
    row = tokens(["ÉLAN Straße 東京 naïve"])[0]
    assert row[:5].tolist() == [word_id(word) for word in ("élan", "straße", "東京", "naïve")] + [0]


@QUICK
@given(st.lists(st.text(), min_size=1, max_size=5))
def test_ids_fit_the_model_and_padding_comes_last(texts):
    ids = tokens(texts)
    assert ids.min() >= 0
    assert ids.max() <= BUCKETS < VOCABULARY
    assert (np.diff((ids == 0).astype(int), axis=1) >= 0).all()
    # A text's ids are its own: the others beside it make no difference.
    assert np.array_equal(ids, np.concatenate([tokens([text]) for text in texts]))


@pytest.mark.thorough
def test_ids_are_the_same_in_another_process():
    code = "from data.text import tokens; print(tokens(['Oil prices soar'])[0, :4].tolist())"
    env = {**os.environ, "PYTHONHASHSEED": "99"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([word_id(word) for word in ("oil", "prices", "soar")] + [0])


def test_word_ids_are_not_taken_for_pixels():
    ids = torch.from_numpy(tokens(["oil prices"]))
    assert torch.equal(normalise(ids), ids)
    assert normalise(ids).dtype == torch.int32


# --- AG News ----------------------------------------------------------------------------------------------------------

NEWS = (
    ("3", "Oil prices soar", "Reuters - Crude\\rose on Monday."),
    ("1", 'He said "no"', "AFP - A line that ends in a break.\\"),
    ("4", "", "An old chip, faster"),
    ("2", "Mets win, 4-2", 'AP - "It is\\\\""over"", they said."'),
)


def save_news(folder, part, rows):
    folder.mkdir(exist_ok=True)
    with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)


def test_ag_news(tmp_path):
    save_news(tmp_path / "ag_news_csv", "train", NEWS[:3])
    # As in the official file: a quote is doubled, a backslash stands for a line break and escapes nothing.
    line = '"1","He said ""no""","AFP - A line that ends in a break.\\"\n'
    assert line in (tmp_path / "ag_news_csv" / "train.csv").read_text()
    save_news(tmp_path / "ag_news_csv", "test", NEWS[3:])
    pool = read("ag-news", tmp_path)
    assert pool.x.dtype == np.int32
    assert pool.y.tolist() == [2, 0, 3, 1]
    assert pool.num_classes == 4
    expected = (
        "oil prices soar reuters crude rose on monday",
        "he said no afp a line that ends in a break",
        "an old chip faster",
        "mets win 4 2 ap it is over they said",
    )
    for row, words in zip(pool.x, expected, strict=True):
        assert row[row > 0].tolist() == [word_id(word) for word in words.split()]
    own = data.load_client(config(dataset="ag-news", data_dir=str(tmp_path), partition="iid"), 0, 2)
    assert own.input_shape == (200,)
    assert own.train.x.dtype == torch.int32


def test_ag_news_that_is_not_there(tmp_path):
    cfg = config(dataset="ag-news", data_dir=str(tmp_path), download=True, model="fasttext")
    folder = tmp_path / "ag_news_csv"
    save_news(folder, "train", NEWS)
    assert message(data.check, cfg) == (
        f"dataset ag-news is not in data-dir = {tmp_path}: {folder}/test.csv is missing; put the official files "
        f"train.csv, test.csv (unpacked) into {folder}, Floret cannot download it"
    )
    save_news(folder, "test", NEWS)
    data.check(cfg)
    assert len(data.load_client(cfg, 0, 2).train) > 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('"3","a","b"\n"5","a","b"\n', "line 2 is not a class (1 to 4), a title, a description"),
        ('"3","a"\n', "line 1 is not a class"),
        ('"3","a","b"\n\n', "line 2 is not a class"),
        ('"Class Index","Title","Description"\n"3","a","b"\n', "line 1 is not a class"),
        ('"3","a","b" c\n', "cannot be read as CSV ("),
        ('"3","a","b\n', "cannot be read as CSV ("),
        (b'"3","a","\xff"\n', "cannot be read as CSV ("),
        ("", "has no texts"),
    ],
)
def test_what_ag_news_may_not_have(tmp_path, content, expected):
    save_news(tmp_path / "ag_news_csv", "train", NEWS)
    path = tmp_path / "ag_news_csv" / "test.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message(read, "ag-news", tmp_path).startswith(f"{path}: {expected}")
