"""Checks before a run begins: the server and ``floret run`` report an error in the same line."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import client_app.methods
import data
from cli.main import main
from common.errors import FloretError
from engine.checks import check_run
from engine.plan import Plan
from engine.supervisor import prepare
from results.engines import LocalEngine
from results.jobs import Job, run_missing
from results.runs import Runs, RunSpec
from server_app.settings import read_config
from server_app.setup import check_directory, check_setup
from tests.harness import ROOT, federate, run_config


def check(tmp_path: Path, clients: int | None = 10, **keys: Any) -> None:
    check_setup(*read_config(run_config(tmp_path, **keys)), clients)


def wrong(tmp_path: Path, clients: int | None = 10, **keys: Any) -> str:
    with pytest.raises(FloretError) as error:
        check(tmp_path, clients, **keys)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"method": "fedcpd"}, "fedcpd.distill = true: the extractor of model 'mlp' has no convolutional stage"),
        ({"method": "feddfpa", "head_layers": 2}, "head-layers = 2: feddfpa fuses the rows of one layer"),
        ({"head_layers": 3}, "head-layers = 3: must be from 1 to 2, model 'mlp' has 3 layers"),
        ({"model": "vgg11"}, "model = 'vgg11': needs images of at least 17 x 17, the data have 8 x 8 images"),
        ({"model": "fasttext"}, "model = 'fasttext': needs texts"),
        (
            {"method": "fedkd", "fedkd__student_model": "cnn3"},
            "fedkd.student-model = 'cnn3': model = 'cnn3': needs images of at least",
        ),
        ({"num_classes": 65537}, "num-classes = 65537: must be at least 0 and at most 65536"),
        (
            {"method": "fedpa", "fedpa__generator_width": 10**9},
            "model = 'mlp', method = 'fedpa': with inputs of (1, 8, 8) and 10 classes the model and what the method",
        ),
        (
            {"method": "fedcpd", "model": "resnet18", "fedcpd__fusion_width": 2 * 10**9},
            "method = 'fedcpd': what it has beside the model cannot be made",
        ),
        ({"num_classes": 9}, "dataset digits has label 9; num-classes = 9 allows 0 to 8"),
        ({"classes_per_client": 11}, "classes-per-client = 11: must be at most 10, the number of classes of digits"),
        ({"min_samples": 180}, "10 clients need 180 samples each, but digits has 1797; lower min-samples or use fewer"),
        (
            {"max_samples": 19},
            "10 clients need 2 samples each, but digits with max-samples = 19 has 19; raise max-samples or use fewer",
        ),
        (
            {"max_samples": 19, "min_samples": 3},
            "digits with max-samples = 19 has 19; raise max-samples, lower min-samples or use fewer clients",
        ),
        (
            {"partition": "iid", "max_samples": 19},
            "partition iid: client 9 of 10 has 1 samples, it needs 2; raise max-samples, use fewer clients",
        ),
        (
            {"partition": "shards", "max_samples": 19},
            "10 clients need 20 shards, but digits with max-samples = 19 has 19 samples; raise max-samples, lower",
        ),
        ({"max_samples": 2000, "min_samples": 180}, "but digits has 1797; lower min-samples or use fewer clients"),
        ({"method": "fedala", "fedala__layers": 9}, "fedala.layers = 9: must be at most 3, model 'mlp' has 3 layers"),
        (
            {"partition": "iid", "min_samples": 180},
            "partition iid: client 7 of 10 has 179 samples, it needs 180; lower",
        ),
        ({"partition": "shards", "shards_per_client": 180}, "10 clients need 1800 shards, but digits has 1797 samples"),
        ({"min_clients": 11}, "min-clients = 11: must be at most 10, the number of clients"),
        ({"min_replies": 11}, "min-replies = 11: must be at most 10, the number of clients"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    assert line in wrong(tmp_path, **keys)


HALF = "from client_app.client import FloretClient\n\n\nclass A(FloretClient):\n    pass\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "is not there; it must define one class derived from FloretClient"),
        ("class A:\n", "cannot be imported (IndentationError: expected an indented block "),
        ("import nowhere\n", "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("class A:\n    pass\n", "must define one class derived from FloretClient, it defines none"),
        (f"{HALF}\n\nclass B(A):\n    pass\n", "must define one class derived from FloretClient, it defines A, B"),
    ],
)
def test_a_client_half_that_no_client_could_use_is_told_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    content: str | None,
    line: str,
) -> None:
    methods = tmp_path / "methods"
    methods.mkdir()
    if content is not None:
        (methods / "fedper.py").write_text(content)
    monkeypatch.setattr(client_app.methods, "__path__", [str(methods)])
    monkeypatch.setattr(client_app.methods, "fedper", None, raising=False)
    monkeypatch.setitem(sys.modules, "client_app.methods.fedper", client_app.methods)
    del sys.modules["client_app.methods.fedper"]
    line = f"client_app/methods/fedper.py: {line}"
    with pytest.raises(FloretError) as error:
        check_run(run_config(tmp_path, method="fedper"), 4)
    assert str(error.value).startswith(line)
    plan = Plan.of(run_config(tmp_path, method="fedper"), ["num-supernodes=4"])
    with pytest.raises(FloretError) as error:
        prepare(plan)
    assert str(error.value).startswith(line)
    # Where Flower's folder cannot be: had the check passed, it could not start anything.
    (tmp_path / "flwr").touch()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setattr(sys, "argv", ["floret", "run", str(ROOT), "-c", 'method="fedper"'])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"floret: {line}")


def test_of_real_nodes_only_the_names_are_checked(tmp_path: Path) -> None:
    check(tmp_path, None, method="fedcpd", classes_per_client=11, min_clients=50, dataset="mnist", data_dir="/nowhere")
    assert "partition = 'idd': must be one of" in wrong(tmp_path, None, partition="idd")


def test_a_run_to_resume_must_be_there_where_the_run_would_be(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert wrong(runs, resume="latest") == f"resume = 'latest': there is no run in {runs}; see output-dir"
    assert "resume = '/nowhere': is not a run directory; it has no config.json" in wrong(runs, resume="/nowhere")
    assert not runs.exists()
    check(runs, None, resume="latest")  # of real nodes it is the server's machine that has it
    directory = runs / "20260101-000000-fedper"
    directory.mkdir(parents=True)
    (directory / "config.json").touch()
    check(runs, resume="latest")
    # Whoever has the directory is not in the way, nor is anything made in it.
    assert [path.name for path in directory.iterdir()] == ["config.json"]


def test_where_a_simulation_writes_and_what_it_resumes_are_looked_at_before_it_starts(tmp_path: Path) -> None:
    def looked_at(output: Path, **keys: Any) -> str:
        values = run_config(output, **keys)
        try:
            check_directory(read_config(values)[0], values)
        except FloretError as error:
            return str(error)
        return ""

    runs, file = tmp_path / "runs", tmp_path / "file"
    file.touch()
    assert looked_at(file / "runs").startswith(f"output-dir: {file / 'runs'} cannot be written (")
    assert looked_at(runs) == ""
    assert list(runs.iterdir()) == []  # nothing is left there
    run = federate(runs, 2, method="fedprox", rounds=2).directory
    hint = f"name another run than {run} with resume"
    keys: dict[str, Any] = {"method": "fedprox", "local_epochs": 2, "resume": "latest"}
    wrong = f"lr = 0.5: the run to resume has 0.01; give the same config again, or {hint}"
    assert looked_at(runs, **keys, rounds=3, lr=0.5) == wrong
    wrong = f"rounds = 2: the run to resume has finished round 2; give more rounds, or {hint}"
    assert looked_at(runs, **keys, rounds=2) == wrong
    assert looked_at(runs, **keys, rounds=3) == ""


def test_what_works_passes(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, 898)
    assert "899 clients need 2 samples each" in wrong(tmp_path, 899)
    check(tmp_path, method="fedcpd", fedcpd__distill=False)
    # resnet18 has convolutional stages on the 8 x 8 images of digits.
    check(tmp_path, method="fedcpd", model="resnet18")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """24 grey images of 20 x 20, 3 classes, in the layout that to_inputs turns."""
    y = np.arange(24) % 3
    x = np.zeros((24, 20, 20, 1), np.uint8)
    file = tmp_path / "data.npz"
    np.savez_compressed(file, x_train=x[:18], y_train=y[:18], x_test=x[18:], y_test=y[18:])
    return file


def test_own_pool_is_known_by_its_headers(tmp_path: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"dataset": "npz", "data_dir": str(pool)}
    config, _, _ = read_config(run_config(tmp_path, **keys))
    with monkeypatch.context() as patch:
        patch.setattr("data.datasets.read_samples", None)  # no inputs are read
        found = data.outline(config, 2)
    described = data.describe(config, 2)
    assert (found.input_shape, found.num_classes) == (described.input_shape, described.num_classes) == ((1, 20, 20), 3)
    assert (found.classes, found.samples) == (3, 24)
    check(tmp_path, 2, **keys, model="vgg11")
    assert "classes-per-client = 4: must be at most 3" in wrong(tmp_path, 2, **keys, classes_per_client=4)
    assert "13 clients need 2 samples each, but npz has 24" in wrong(tmp_path, 13, **keys)
    np.savez(pool, x_train=np.zeros((5, 4, 4, 4, 4)), y_train=np.zeros(5, int), x_test=np.zeros(1), y_test=[0])
    data.datasets.outline_pool.cache_clear()
    assert f"{pool}: array x_train has shape (5, 4, 4, 4, 4); it must be" in wrong(tmp_path, 2, **keys)


def doubts(tmp_path: Path, **keys: Any) -> list[str]:
    return check_setup(*read_config(run_config(tmp_path, **keys)), 2)


def test_labels_that_do_not_begin_at_0_are_told(tmp_path: Path, pool: Path) -> None:
    keys: dict[str, Any] = {"dataset": "npz", "data_dir": str(pool)}
    assert doubts(tmp_path, **keys) == []
    y = np.array([1, 3] * 12)
    x = np.zeros((24, 20, 20, 1), np.uint8)
    np.savez(pool, x_train=x[:18], y_train=y[:18], x_test=x[18:], y_test=y[18:])
    data.datasets.outline_pool.cache_clear()
    (line,) = doubts(tmp_path, **keys)
    assert line == (
        f"data-dir = {pool}: no training sample has label 0 (2 such labels); labels are class numbers from 0, with 3 "
        "the largest of 4 classes; if so many are meant, set num-classes"
    )
    assert doubts(tmp_path, **keys, num_classes=4) == doubts(tmp_path, **keys, class_names="a,b,c,d") == []


def test_a_label_that_only_test_files_have_is_told(tmp_path: Path) -> None:
    for part, labels in (("train", [0, 1, 2]), ("test", [0, 1, 3])):
        (tmp_path / part).mkdir()
        for i in range(2):
            np.savez(tmp_path / part / f"{i}.npz", x=np.zeros((3, 6), np.float32), y=np.array(labels))
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path)}
    (line,) = doubts(tmp_path, **keys)
    assert line.startswith(f"data-dir = {tmp_path}: no training sample has label 3; labels are class numbers from 0")
    assert doubts(tmp_path, **keys, num_classes=4) == []


def test_a_key_that_does_nothing_is_told(tmp_path: Path) -> None:
    (line,) = doubts(tmp_path, data_dir="/my/data")
    assert line.startswith("data-dir = /my/data: is not read, since dataset = 'digits' has no files of yours;")
    (line,) = doubts(tmp_path, method="fedbn")
    assert line.startswith("method = 'fedbn': model = 'mlp' has no batch normalisation to keep")
    assert doubts(tmp_path) == doubts(tmp_path, method="fedbn", model="resnet18") == []


def test_one_class_is_none_to_learn(tmp_path: Path, pool: Path) -> None:
    x, y = np.zeros((8, 6), np.float32), np.zeros(8, int)
    np.savez(pool, x_train=x, y_train=y, x_test=x, y_test=y)
    line = wrong(tmp_path, 2, dataset="npz", data_dir=str(pool), classes_per_client=1)
    assert line.startswith("num-classes = 1: all samples have label 0")
    folder = tmp_path / "above"
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (12, 12)).save(folder / "images" / name / f"{i}.png")
    assert wrong(tmp_path, 2, dataset="image-folder", data_dir=str(folder), partition="iid") == (
        f"{folder} has one class folder, images, so that all 8 images have one label; data-dir must be the folder that "
        f"has the class folders, at least two: {folder}/images, with cat, dog?"
    )
    check(tmp_path, 2, dataset="image-folder", data_dir=str(folder), partition="iid", num_classes=2)


def test_files_of_each_client_must_be_as_many_as_clients(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        for i in range(2):
            np.savez(tmp_path / part / f"{i}.npz", x=np.zeros((4, 6), np.float32), y=np.array([0, 1, 2, 2]))
    keys: dict[str, Any] = {"dataset": "npz-clients", "data_dir": str(tmp_path)}
    check(tmp_path, 2, **keys)
    assert "3 clients" in wrong(tmp_path, 3, **keys)
    assert "model = 'cnn2': needs images of at least" in wrong(tmp_path, 2, **keys, model="cnn2")
    assert "num-classes = 2 allows 0 to 1" in wrong(tmp_path, 2, **keys, num_classes=2)


def test_a_folder_of_images_is_known_by_its_first(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (12, 12)).save(tmp_path / "images" / name / f"{i}.png")
    keys: dict[str, Any] = {"dataset": "image-folder", "data_dir": str(tmp_path / "images"), "partition": "iid"}
    check(tmp_path, 4, **keys)
    assert "the data have 12 x 12 images" in wrong(tmp_path, 4, **keys, model="vgg11")
    check(tmp_path, 4, **keys, model="vgg11", image_size=24)
    assert "client 3 of 5 has 1 samples, it needs 2" in wrong(tmp_path, 5, **keys)


@pytest.mark.parametrize(
    ("dataset", "shape", "classes"),
    [("mnist", (1, 28, 28), 10), ("cifar100", (3, 32, 32), 100), ("svhn", (3, 32, 32), 10), ("ag-news", (200,), 4)],
)
def test_of_official_files_nothing_is_read(tmp_path: Path, dataset: str, shape: tuple[int, ...], classes: int) -> None:
    config, _, _ = read_config(run_config(tmp_path, dataset=dataset, data_dir="/nowhere"))
    found = data.outline(config, 10)
    assert (found.input_shape, found.num_classes) == (shape, classes)


def test_the_server_builds_the_strategy_that_was_checked(tmp_path: Path) -> None:
    """In the tests' grid the nodes are real ones to the server, so it is the strategy that says it, at its start."""
    line = wrong(tmp_path, method="fedcpd")
    with pytest.raises(FloretError) as error:
        federate(tmp_path / "runs", method="fedcpd", fedcpd__distill=True)
    assert str(error.value) == line


def test_runs_that_cannot_start_say_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    runs = Runs(ROOT, tmp_path, check_run, LocalEngine(ROOT))
    fine, broken = ({"method": method, "rounds": 1} for method in ("fedper", "fedcpd"))
    jobs = [Job(RunSpec(keys, "num-supernodes=3"), str(keys["method"]), lambda run: "") for keys in (fine, broken)]
    assert runs.check(jobs[0].spec) == ""
    begun: list[Any] = []

    def start(self: Runs, spec: RunSpec, *rest: Any) -> None:
        begun.append(spec.keys["method"])

    monkeypatch.setattr(Runs, "_start", start)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    failed = run_missing(runs, jobs, keep_models=False)
    assert list(failed) == [runs.folder(job.spec).name for job in reversed(jobs)]
    assert failed[runs.folder(jobs[1].spec).name].startswith("fedcpd.distill = true: ")
    assert begun == ["fedper"]
