"""An inaccessible or impossible path is a one-line DataError, never a traceback."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

import data
from common.config import absolute_path
from common.errors import ConfigError
from data.files import entries, is_dir, is_file
from data.npz import read_samples
from tests.test_data import config, message, save_node, save_own, save_pool

DATASETS = ("mnist", "pathmnist", "ag-news", "npz", "npz-clients", "image-folder")
NOBODY = 65534


def for_dataset(dataset, data_dir):
    return config(dataset=dataset, data_dir=str(data_dir), model="fasttext" if dataset == "ag-news" else "mlp")


@contextlib.contextmanager
def forbidden(directory, mode=0):
    """Leave this process the rights of ``mode`` in ``directory``; root, who has all, is somebody else meanwhile.

    To whom, in that case, pytest's own directories above are closed as well.
    """
    before, user = directory.stat().st_mode, os.geteuid()
    directory.chmod(mode)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        directory.chmod(before)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_directory_that_may_not_be_entered(tmp_path, dataset):
    inside = tmp_path / "inside"
    inside.mkdir()
    cfg = for_dataset(dataset, inside)
    with forbidden(tmp_path):
        texts = [message(data.check, cfg), message(data.load_client, cfg, 0, 2), message(data.describe, cfg, 2)]
    for text in texts:
        assert text.startswith(f"{inside}")
        assert text.endswith(": cannot be looked at (Permission denied)")


def test_a_directory_that_may_not_be_listed(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with forbidden(tmp_path / "inside", 0o311):
        assert is_dir("inside")
        assert message(entries, Path("inside")) == "inside: cannot be listed (Permission denied)"


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_name_that_is_too_long(tmp_path, dataset):
    cfg = for_dataset(dataset, tmp_path / ("x" * 300))
    for text in (message(data.check, cfg), message(data.load_client, cfg, 0, 2)):
        assert text.endswith(": cannot be looked at (File name too long)")


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_path_below_a_file(tmp_path, dataset):
    save_pool(tmp_path / "a.npz")
    cfg = for_dataset(dataset, tmp_path / "a.npz" / "below")
    for text in (message(data.check, cfg), message(data.load_client, cfg, 0, 2)):
        assert any(reason in text for reason in ("is not there", "is not a directory", "is missing"))


def test_a_nodes_directory(tmp_path):
    save_node(tmp_path)
    with forbidden(tmp_path):
        text = message(data.load_own, tmp_path, config(), "a")
    assert text.startswith(f"{tmp_path}")
    assert text.endswith(": cannot be looked at (Permission denied)")
    assert "is not a directory; it must have" in message(data.load_own, tmp_path / "train.npz" / "x", config(), "a")
    text = message(data.load_own, tmp_path / ("x" * 300), config(), "a")
    assert text.endswith("cannot be looked at (File name too long)")


def test_files_per_client_that_may_not_be_entered(tmp_path):
    save_own(tmp_path, 0)
    cfg = for_dataset("npz-clients", tmp_path)
    with forbidden(tmp_path / "test"):
        texts = [message(data.check, cfg), message(data.load_client, cfg, 0, 1)]
    for text in texts:
        assert text.endswith(": cannot be looked at (Permission denied)")


def test_links_in_a_circle_and_null_characters(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert message(is_file, tmp_path / "a").startswith(f"{tmp_path}/a: cannot be looked at (Too many levels")
    assert "cannot be looked at (embedded null" in message(is_dir, f"{tmp_path}/\0")


def test_what_is_where(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").touch()
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=np.arange(2))
    (tmp_path / "link").symlink_to(tmp_path / "a.npz")
    assert [path.name for path in entries(tmp_path)] == ["a.npz", "folder", "link"]
    assert [path.name for path in entries(tmp_path) if is_file(path)] == ["a.npz", "link"]
    assert [path.name for path in entries(tmp_path) if is_dir(path)] == ["folder"]
    assert message(entries, tmp_path / "a.npz") == f"{tmp_path}/a.npz: cannot be listed (Not a directory)"
    assert message(read_samples, tmp_path / "folder").startswith(f"{tmp_path}/folder is not a file; it must be an npz")


def test_the_home_of_a_user_that_is_not_there():
    wrong = "~nobody-of-this-name is not the home of a user of this machine; name the absolute path"
    assert absolute_path("~nobody-of-this-name/data") == wrong
    text = message(config, data_dir="~nobody-of-this-name/data", kind=ConfigError)
    assert text == f"data-dir = '~nobody-of-this-name/data': {wrong}"
    assert absolute_path("~/data") is None
