"""``floret predict`` and ``floret export``: the personal model is the one that was evaluated in its federation."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cli import main as command
from client_app.client import FloretClient
from client_app.serving import find_personal, load_personal
from client_app.state import ClientState, FileStore
from common.durable import read_manifest, write_manifest
from common.errors import FloretError
from common.registry import load_class
from data import load_client
from data.text import tokens
from server_app.settings import read_config
from strategies import METHODS
from tests.conftest import PATIENCE
from tests.harness import ON_MLP, Outcome, federate, run_config

CLIENTS = 2
BATCHES = (1, 2, 7)


def pooled(folder: Path, make: Callable[[np.random.Generator, np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Write a pool of four classes that can be told apart; return the keys for it."""
    folder.mkdir()
    generator = np.random.default_rng(5)
    y = {"train": np.arange(120) % 4, "test": np.arange(40) % 4}
    arrays: dict[str, Any] = {f"x_{part}": make(generator, labels) for part, labels in y.items()}
    np.savez(folder / "data.npz", **arrays, **{f"y_{part}": labels for part, labels in y.items()})  # type: ignore[arg-type]
    return {"dataset": "npz", "data_dir": str(folder), "partition": "iid", "lr": 0.05}


def images(generator: np.random.Generator, y: np.ndarray) -> np.ndarray:
    """RGB images, channels last, whose brightness is the class."""
    noise = generator.integers(0, 120, (len(y), 28, 28, 3))
    pixels: np.ndarray = (noise + 30 * y[:, None, None, None]).astype(np.uint8)
    return pixels


def floating_images(generator: np.random.Generator, y: np.ndarray) -> np.ndarray:
    pixels: np.ndarray = (images(generator, y)[..., :1] / 127.5 - 1).astype(np.float32)
    return pixels


def features(generator: np.random.Generator, y: np.ndarray) -> np.ndarray:
    rows: np.ndarray = (generator.normal(size=(len(y), 12)) + y[:, None]).astype(np.float32)
    return rows


def news(folder: Path) -> dict[str, Any]:
    """Write texts of four classes as AG News has them; return the keys for it."""
    files = folder / "ag_news_csv"
    files.mkdir(parents=True)
    words = ("goal match team", "bank stock trade", "chip phone code", "vote law peace")
    for part, n in (("train", 120), ("test", 40)):
        lines = [f'"{i % 4 + 1}","{words[i % 4]}","number {i} of the day, {"word " * (i % 9)}"\n' for i in range(n)]
        (files / f"{part}.csv").write_text("".join(lines))
    return {"dataset": "ag-news", "data_dir": str(folder), "partition": "iid", "model": "fasttext", "lr": 0.5}


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of this file by name: every method on digits, and every kind of network and of data."""
    found: dict[str, dict[str, Any]] = {name: {"method": name, **ON_MLP.get(name, {})} for name in METHODS}
    # With two classes a client UA-PDFL's clients never agree, so here they do: one takes the other's model.
    found["ua-pdfl of a peer"] = {"method": "ua-pdfl", "ua_pdfl__th": 10.0}
    found["fedproto by head"] = {"method": "fedproto", "fedproto__inference": "head"}
    found["one of two takes part"] = {"method": "pfakd", "participation": 0.5, "rounds": 4}
    colour = pooled(folder / "colour", images)
    found["fedcpd with distillation, cnn2"] = colour | {"method": "fedcpd", "model": "cnn2", "fedcpd__distill": True}
    found["fedproto, cnn5"] = colour | {"method": "fedproto", "model": "cnn5"}
    found["batch normalisation, resnet18"] = colour | {
        "method": "fedbn",
        "model": "resnet18",
        "rounds": 1,
        "local_epochs": 1,
        "max_samples": 60,
    }
    found["head of three layers, vgg11"] = colour | {
        "method": "pfps-lwc",
        "model": "vgg11",
        "head_layers": 3,
        "rounds": 1,
        "local_epochs": 1,
        "max_samples": 60,
    }
    found["floats, cnn3"] = pooled(folder / "floating", floating_images) | {"method": "pfakd", "model": "cnn3"}
    found["features"] = pooled(folder / "features", features) | {"method": "feddfpa", "model": "mlp"}
    found["texts"] = news(folder / "news") | {"method": "fedper"}
    found["texts, fedproto"] = found["texts"] | {"method": "fedproto"}
    return found


CASES = [
    *METHODS,
    *(
        "ua-pdfl of a peer",
        "fedproto by head",
        "one of two takes part",
        "fedcpd with distillation, cnn2",
        "fedproto, cnn5",
    ),
    *("batch normalisation, resnet18", "head of three layers, vgg11", "floats, cnn3", "features", "texts"),
    "texts, fedproto",
]


def answering() -> list[str]:
    """Return a method of each way to answer (``FloretClient.serving``): the others' files are made alike."""
    found: dict[object, str] = {}
    for method in ("fedavg", *METHODS):
        found.setdefault(load_class("client_app.methods", method, FloretClient).serving, method)
    return list(found.values())


# What is exported: every way to answer, network and kind of data.
FILES = [*answering(), *(name for name in CASES if name not in METHODS)]


@dataclass(frozen=True)
class Federated:
    """A run, where its clients' states are, and its keys."""

    outcome: Outcome
    states: Path
    keys: dict[str, Any]

    def test_split(self, client: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Write a client's test split as the user would have it, an npz with x and y; return both."""
        config = read_config(run_config(path.parent, **self.keys))[0]
        split = load_client(config, client, CLIENTS).test
        x, y = split.x.numpy(), split.y.numpy()
        np.savez(path, x=x, y=y)
        return x, y


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Federated]:
    """Return the run of a case, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("serving")
    keys = cases(folder)
    assert list(keys) == CASES
    made: dict[str, Federated] = {}

    def get(name: str) -> Federated:
        if name not in made:
            place = folder / f"run{len(made)}"
            outcome = federate(place / "runs", CLIENTS, states=place / "states", **keys[name])
            made[name] = Federated(outcome, place / "states", keys[name])
        return made[name]

    return get


@dataclass
class Floret:
    """The command line in this process."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object, code: int = 0) -> tuple[str, str]:
        """Return what it prints on stdout and on stderr."""
        self.monkeypatch.setattr(sys, "argv", ["floret", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.main()
        said = self.capsys.readouterr()
        assert (ended.value.code or 0) == code, said
        return said.out, said.err

    def fail(self, *arguments: object) -> str:
        """Return the one line of an error; exit code 2, nothing on stdout."""
        out, err = self(*arguments, code=2)
        assert not out
        assert err.startswith("floret: ")
        assert err.count("\n") == 1
        return err.removeprefix("floret: ").rstrip("\n")


@pytest.fixture
def floret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Floret:
    return Floret(monkeypatch, capsys)


@pytest.mark.thorough
def test_a_client_can_be_absent_in_the_last_round_of_these_runs(federated: Callable[[str], Federated]) -> None:
    clients = federated("one of two takes part").outcome.history[-1]["clients"]
    assert sorted(entry["trained"] for entry in clients.values()) == [False, True]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_predict_is_as_accurate_as_the_run_reported(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path, name: str
) -> None:
    run = federated(name)
    reported = {i: entry["after"]["test"] for i, entry in run.outcome.history[-1]["clients"].items()}
    assert list(reported) == ["0", "1"]
    for client, accuracy in reported.items():
        x, y = run.test_split(int(client), tmp_path / "test.npz")
        which = ("--state-dir", run.states, "--client-name", client)
        out, err = floret("predict", *which, "--input", tmp_path / "test.npz")
        said = re.fullmatch(r"accuracy [\d.]+: (\d+) of (\d+)\n", err)
        assert said, err
        assert int(said[1]) / int(said[2]) == accuracy

        rows = list(csv.reader(io.StringIO(out)))
        scores = np.array([row[2:] for row in rows[1:]], dtype=float)
        assert rows[0][:2] == ["input", "class"]
        assert [row[0] for row in rows[1:]] == [str(i) for i in range(len(x))]
        assert scores.shape == (len(x), len(rows[0]) - 2)
        assert np.mean([int(row[1]) for row in rows[1:]] == y) == accuracy
        assert (scores.argmax(1) == [int(row[1]) for row in rows[1:]]).mean() > 0.98  # six digits may make a tie


def test_fedproto_answers_by_its_prototypes_or_its_head(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path
) -> None:
    highest = {}
    for name in ("fedproto", "fedproto by head"):
        run = federated(name)
        run.test_split(0, tmp_path / "test.npz")
        which = ("--state-dir", run.states, "--client-name", "0")
        rows = list(csv.reader(io.StringIO(floret("predict", *which, "--input", tmp_path / "test.npz")[0])))
        highest[name] = np.array([row[2:] for row in rows[1:]], dtype=float).max()
    assert highest["fedproto"] < 0  # minus a distance
    assert highest["fedproto by head"] > 0


# Runs without Floret: -S leaves out whatever makes an installed checkout importable.
_OUTSIDE = """
import json, sys
sys.path[:0] = sys.argv[2:]
import numpy as np, onnxruntime, torch
from pathlib import Path

told = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    inputs = np.load(folder / "inputs.npz")
    about = {"floret.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=about).module()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    scores = {}
    for name in inputs.files:
        with torch.no_grad():
            scores["pt2 " + name] = program(torch.from_numpy(inputs[name])).numpy()
        scores["onnx " + name] = session.run(["scores"], {"x": inputs[name]})[0]
    np.savez(folder / "outside.npz", **scores)
    meta = session.get_modelmeta().custom_metadata_map
    told[folder.name] = [json.loads(about["floret.json"]), json.loads(meta["floret"])]
assert not {"client_app", "cli", "models", "data", "common", "flwr"} & {name.split(".")[0] for name in sys.modules}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Exported:
    """What a program without Floret gets from the files, and what Floret itself says of the same inputs."""

    outside: dict[str, np.ndarray]
    own: dict[str, np.ndarray]
    about: list[dict[str, Any]]


@pytest.fixture(scope="module")
def exported(federated: Callable[[str], Federated], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Export ``FILES`` by the command line, and load all files in one process that has no Floret."""
    folder = tmp_path_factory.mktemp("exported")
    own: dict[str, dict[str, np.ndarray]] = {}
    for place, name in enumerate(FILES):
        run, there = federated(name), folder / f"{place:02d}"
        there.mkdir()
        client = next(iter(run.outcome.history[-1]["clients"]))
        for file in ("model.pt2", "model.onnx"):
            arguments = ["--state-dir", str(run.states), "--client-name", client, "--output", str(there / file)]
            command.floret.main(["export", *arguments], standalone_mode=False)
        x, _ = run.test_split(int(client), there / "test.npz")
        if name.startswith("texts"):
            x[0] = 0  # a text without words
        inputs: dict[str, Any] = {str(n): x[:n] for n in BATCHES}
        np.savez(there / "inputs.npz", **inputs)
        personal = load_personal(find_personal(run.states, "default", None, client))
        own[name] = {str(n): personal.scores(torch.from_numpy(x[:n])).numpy() for n in BATCHES}
    script = folder.with_suffix(".py")
    script.write_text(_OUTSIDE)
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, folder, *packages], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    return {
        name: Exported(dict(np.load(folder / f"{i:02d}" / "outside.npz")), own[name], about[f"{i:02d}"])
        for i, name in enumerate(FILES)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
@pytest.mark.parametrize("name", FILES)
def test_an_exported_model_gives_the_same_scores_without_floret(
    exported: dict[str, Exported], name: str, kind: str
) -> None:
    """For any number of inputs; sums of floats may be in another order, which makes 1e-4 of a score at most."""
    for n in BATCHES:
        own, outside = exported[name].own[str(n)], exported[name].outside[f"{kind} {n}"]
        assert own.shape[0] == n
        assert outside.dtype == np.float32
        np.testing.assert_allclose(outside, own, rtol=1e-4, atol=1e-5)
        assert not np.allclose(own[0], 0)


def test_an_exported_model_says_what_it_is(exported: dict[str, Exported]) -> None:
    assert {"fedavg", "fedproto", "gpfl"} <= set(answering())
    for about in exported["fedavg"].about:
        assert about == {
            "client": "0",
            "federation": "default",
            "method": "fedavg",
            "round": 2,
            "input": {"shape": ["batch", 1, 8, 8], "dtype": "uint8"},
            "output": {"shape": ["batch", 10], "meaning": "scores; the class with the highest is the answer"},
            "classes": [],
        }
    kinds = {name: exported[name].about[0]["input"] for name in ("texts", "features", "floats, cnn3")}
    assert kinds == {
        "texts": {"shape": ["batch", 200], "dtype": "int32"},
        "features": {"shape": ["batch", 12], "dtype": "float32"},
        "floats, cnn3": {"shape": ["batch", 1, 28, 28], "dtype": "float32"},
    }


@pytest.mark.thorough
def test_export_says_one_line_about_the_file(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path
) -> None:
    states = federated("texts").states
    for kind in ("pt2", "onnx"):
        path = tmp_path / f"m.{kind}"
        out, err = floret("export", "--state-dir", states, "--client-name", "1", "--output", path)
        assert out == f"{path}: client 1, fedper, round 2; input int32 ('batch', 200), 4 classes\n"
        assert err == ""


@pytest.mark.thorough
def test_texts_and_their_word_ids_get_the_same_scores(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path
) -> None:
    which = ("--state-dir", federated("texts").states, "--client-name", "0", "--input")
    lines = ["goal match team", "the bank's stock, a trade", ""]
    (tmp_path / "texts.txt").write_text("".join(f"{line}\n" for line in lines))
    np.savez(tmp_path / "ids.npz", x=tokens(lines).astype(np.int64))
    out, err = floret("predict", *which, tmp_path / "texts.txt")
    assert err == ""
    assert out == floret("predict", *which, tmp_path / "ids.npz")[0]
    assert [row["class"] for row in csv.DictReader(io.StringIO(out))][:2] == ["0", "1"]


def test_predict_writes_the_csv_where_it_is_told_to(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path
) -> None:
    run = federated("fedper")
    run.test_split(1, tmp_path / "test.npz")
    arguments = ("predict", "--state-dir", run.states, "--client-name", "1", "--input", tmp_path / "test.npz")
    shown, _ = floret(*arguments)
    (tmp_path / "out.csv").write_text("of yesterday")
    with (tmp_path / "out.csv").open() as before:
        out, err = floret(*arguments, "--output", tmp_path / "out.csv")
        # A crash at any moment leaves one or the other.
        assert before.read() == "of yesterday"
    assert (out, err[:9]) == ("", "accuracy ")
    assert (tmp_path / "out.csv").read_text() == shown


def test_a_class_name_with_a_comma_is_one_field_of_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cat, small", 'dog "big"')
    model = SimpleNamespace(dtype=torch.float32, config=None, input_shape=(1,), classes=2, class_names=names, notes=())
    model.scores = lambda x: torch.cat([x, -x], 1)
    monkeypatch.setattr("cli.serve._personal", lambda **_: model)
    monkeypatch.setattr("data.read_inputs", lambda *_: (["a", "b"], np.array([[1], [-1]], np.float32), None))
    output = tmp_path / "out.csv"
    command.floret.main(["predict", "--input", "x", "--output", str(output)], standalone_mode=False)
    assert list(csv.reader(output.open(newline=""))) == [
        ["input", "class", "score cat, small", 'score dog "big"'],
        ["a", "cat, small", "1", "-1"],
        ["b", 'dog "big"', "-1", "1"],
    ]


def test_images_one_by_one_and_as_a_folder(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path
) -> None:
    from PIL import Image

    run = federated("fedproto, cnn5")
    x, _ = run.test_split(0, tmp_path / "test.npz")
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(3):
        Image.fromarray(x[i].transpose(1, 2, 0)).save(folder / f"{i}.png")
    which = ("predict", "--state-dir", run.states, "--client-name", "0", "--input")
    expected = [line.split(",")[1:] for line in floret(*which, tmp_path / "test.npz")[0].splitlines()]
    for source, rows in ((folder, (0, 1, 2, 3)), (folder / "1.png", (0, 2))):
        said = [line.split(",") for line in floret(*which, source)[0].splitlines()]
        assert [row[1:] for row in said] == [expected[row] for row in rows]
    assert said[1][0] == str(folder / "1.png")
    # A name of bytes that are no text.
    name = os.fsencode(folder) + b"/\xff.png"
    os.rename(folder / "1.png", name)
    floret(*which, folder, "--output", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes().splitlines()[3].startswith(name + b",")


# What is wrong


@pytest.fixture
def there(federated: Callable[[str], Federated], tmp_path: Path) -> Federated:
    """A run's states of its own to break, and an npz of inputs beside them."""
    keys: dict[str, Any] = {"method": "fedper", "rounds": 2, "local_epochs": 1, "max_samples": 60, "seed": 3}
    outcome = federate(tmp_path / "runs", CLIENTS, states=tmp_path / "states", **keys)
    run = Federated(outcome, tmp_path / "states", keys)
    run.test_split(0, tmp_path / "x.npz")
    return run


def test_no_state_yet(floret: Floret, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 8, 8), np.uint8))
    which = ("predict", "--input", tmp_path / "x.npz", "--state-dir")
    missing, empty = tmp_path / "nowhere", tmp_path / "empty"
    assert floret.fail(*which, missing).startswith(f"--state-dir {missing}: is not there, so no node has kept anything")
    empty.mkdir()
    assert floret.fail(*which, empty) == f"{empty}: no client has a state here yet; see --state-dir"
    (empty / "default" / "fedper" / "a").mkdir(parents=True)
    assert floret.fail(*which, empty) == f"{empty}: no client has a state here yet; see --state-dir"


def test_several_clients_and_methods(there: Federated, floret: Floret, tmp_path: Path) -> None:
    which = ("predict", "--input", tmp_path / "x.npz", "--state-dir", there.states)
    fedper = there.states / "default" / "fedper"
    assert floret.fail(*which) == f"--client-name is needed: {fedper} has 0, 1"
    assert floret.fail(*which, "--client-name", "7") == "--client-name '7': must be one of 0, 1"
    line = "--federation 'defaults': must be one of default (did you mean 'default'?)"
    assert floret.fail(*which, "--federation", "defaults") == line
    shutil.copytree(fedper / "0", fedper.parent / "pfakd" / "0")
    assert floret.fail(*which) == f"--method is needed: {fedper.parent} has fedper, pfakd"
    line = floret.fail(*which, "--method", "fedpr")
    assert line == "--method 'fedpr': must be one of fedper, pfakd (did you mean 'fedper'?)"
    out, _ = floret(*which, "--method", "fedper", "--client-name", "0")
    assert out.startswith("input,class,score 0,")


def test_a_method_that_has_kept_nothing_is_not_asked_about(there: Federated, floret: Floret, tmp_path: Path) -> None:
    """A message that was refused leaves the folder of a client, with its lock and nothing else."""
    which = ("predict", "--input", tmp_path / "x.npz", "--state-dir", there.states, "--client-name", "0")
    first, _ = floret(*which)
    refused = there.states / "default" / "fedavg" / "0"
    refused.mkdir(parents=True)
    (refused / "lock").touch()
    assert floret(*which)[0] == first


def test_a_state_from_before_a_key_existed_is_used(there: Federated, floret: Floret, tmp_path: Path) -> None:
    which = ("predict", "--input", tmp_path / "x.npz", "--state-dir", there.states, "--client-name", "0")
    first, _ = floret(*which)
    folder = there.states / "default" / "fedper" / "0"
    newest = max(folder.glob("*.json"))
    state = ClientState(FileStore(folder, sync=True))
    assert state.version is not None
    tensors, about = state.load(), state.about
    # As of every key that there was not when the first state could be used.
    later = {"aggregation", "class-names", "data-seed", "image-channels", "image-size", "new-owners", "precision"}
    later |= {"return-timeout", "tensorboard", "tracker", "trim", "wire"} | {k for k in about["config"] if "." in k}
    assert later < about["config"].keys()
    with_all = about["config"]
    about["config"] = {key: value for key, value in with_all.items() if key not in later}
    state.commit(state.round + 1, tensors, about)
    assert max(folder.glob("*.json")) != newest
    assert floret(*which)[0] == first
    about["config"] = {key: value for key, value in with_all.items() if key != "model"}
    state.commit(state.round + 1, tensors, about)
    line = f"{folder}: was written by another version of Floret, which had no model, or others"
    assert floret.fail(*which) == line


def test_a_state_from_before_a_parameter_existed_says_so(tmp_path: Path) -> None:
    federate(tmp_path / "runs", 1, states=tmp_path / "states", method="fedrep", rounds=1, local_epochs=1)
    folder = tmp_path / "states" / "default" / "fedrep" / "0"
    state = ClientState(FileStore(folder, sync=True))
    about = state.about
    assert about["parameters"].pop("head-epochs")
    state.commit(state.round + 1, state.load(), about)
    with pytest.raises(FloretError) as error:
        load_personal(FileStore(folder, sync=True))
    assert str(error.value) == f"{folder}: was written by another version of Floret, with other parameters of fedrep"


def test_one_federation_of_another_name_and_several(there: Federated, floret: Floret, tmp_path: Path) -> None:
    states = tmp_path / "clinics"
    shutil.copytree(there.states / "default", states / "clinic")
    which = ("predict", "--input", tmp_path / "x.npz", "--state-dir", states, "--client-name", "0")
    first, _ = floret(*which)
    shutil.copytree(there.states / "default", states / "ward")
    assert floret.fail(*which) == f"--federation is needed: {states} has clinic, ward"
    assert floret(*which, "--federation", "clinic")[0] == first
    shutil.rmtree(states / "ward" / "fedper" / "0")
    assert floret(*which)[0] == first


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        (
            {"x": np.zeros((2, 9, 9), np.uint8)},
            "--input {path}: the inputs are uint8 (1, 9, 9) each, the model takes uint8 (1, 8, 8) each",
        ),
        (
            {"x": np.zeros((2, 8, 8), np.float32)},
            "--input {path}: the inputs are float32 (1, 8, 8) each, the model takes uint8 (1, 8, 8) each",
        ),
        ({"z": np.zeros(3)}, "{path}: array x is missing; the file has z"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.zeros(3, int)}, "{path}: x has 2 samples, y has 3 labels"),
        ({"x": np.array(["a"], object)}, "{path}: array x cannot be read (it is made of Python objects)"),
    ],
)
def test_inputs_that_the_model_cannot_take(
    there: Federated, floret: Floret, tmp_path: Path, arrays: dict[str, np.ndarray], line: str
) -> None:
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    said = floret.fail("predict", "--input", path, "--state-dir", there.states, "--client-name", "0")
    assert said.startswith(line.format(path=path))


def test_inputs_that_are_not_there_or_nothing_that_is_known(there: Federated, floret: Floret, tmp_path: Path) -> None:
    which = ("predict", "--state-dir", there.states, "--client-name", "0", "--input")
    assert floret.fail(*which, tmp_path / "none.npz").startswith(f"{tmp_path / 'none.npz'} is not there; it must be")
    (tmp_path / "none").mkdir()
    assert floret.fail(*which, tmp_path / "none").startswith(f"{tmp_path / 'none'} has no images")
    (tmp_path / "none" / "cat").mkdir()
    said = floret.fail(*which, tmp_path / "none")
    assert said.rstrip().endswith("its folders are not read, give one of them, such as cat")
    for name in ("x.txt", "x.png", "x.npz", "x.dcm"):
        (tmp_path / name).write_text("a text")
        line = floret.fail(*which, tmp_path / name)
        assert line.startswith(f"{tmp_path / name}: ")
        wrong = {".txt": "this model takes no texts; its inputs are uint8 of shape", ".png": "cannot be decoded"}
        wrong[".dcm"] = "must be an npz with the array x, or an image, whose name ends in .bmp"
        assert wrong.get(Path(name).suffix, "is not a complete npz file") in line


def test_labels_that_the_model_does_not_have_are_no_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(dtype=torch.float32, config=None, input_shape=(1,), classes=2, class_names=(), notes=())
    model.scores = lambda x: torch.cat([x, -x], 1)
    monkeypatch.setattr("cli.serve._personal", lambda **_: model)
    read = (["a", "b"], np.array([[1], [-1]], np.float32), np.array([1, 2]))
    monkeypatch.setattr("data.read_inputs", lambda *_: read)
    output = tmp_path / "out.csv"
    with pytest.raises(FloretError, match="--input x: array y has label 2; the model has 2 classes, 0 to 1"):
        command.floret.main(["predict", "--input", "x", "--output", str(output)], standalone_mode=False)
    assert not output.exists()


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (np.full((1, 200), -1), "{path}: array x has type int64 and shape (1, 200); it must be word ids (n, words), "),
        (np.full((1, 200), 2**15), "{path}: array x has type int64 and shape (1, 200); it must be word ids"),
        (np.zeros((1, 200), np.float32), "{path}: array x has type float32 and shape (1, 200); it must be word ids"),
        (
            np.zeros((1, 199), int),
            "--input {path}: the inputs are int32 (199,) each, the model takes int32 (200,) each",
        ),
    ],
)
def test_words_that_the_model_cannot_take(
    federated: Callable[[str], Federated], floret: Floret, tmp_path: Path, x: np.ndarray, line: str
) -> None:
    path = tmp_path / "words.npz"
    np.savez(path, x=x)
    states = federated("texts").states
    said = floret.fail("predict", "--input", path, "--state-dir", states, "--client-name", "0")
    assert said.startswith(line.format(path=path))


def test_a_suffix_that_is_none_of_the_two(floret: Floret, there: Federated, tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    line = floret.fail("export", "--state-dir", there.states, "--client-name", "0", "--output", path)
    assert line == f"--output {path}: must end in .pt2 (torch.export) or .onnx"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["model.pt2", "model.onnx", "out.csv"])
def test_an_output_that_cannot_be_written(there: Federated, floret: Floret, tmp_path: Path, name: str) -> None:
    which = ("--state-dir", there.states, "--client-name", "0")
    kind = ("predict", "--input", tmp_path / "x.npz") if name == "out.csv" else ("export",)
    path = tmp_path / "nowhere" / name
    line = f"--output {path}: cannot be written (No such file or directory)"
    assert floret.fail(*kind, *which, "--output", path) == line
    (tmp_path / name).mkdir()
    line = f"--output {tmp_path / name}: cannot be written (Is a directory)"
    assert floret.fail(*kind, *which, "--output", tmp_path / name) == line
    assert not list(tmp_path.glob(".*"))


def test_a_device_that_computes_no_numbers(there: Federated, floret: Floret, tmp_path: Path) -> None:
    for device in ("meta", "abacus"):
        which = ("--state-dir", there.states, "--client-name", "0", "--device", device)
        line = floret.fail("predict", *which, "--input", tmp_path / "x.npz")
        assert line == f"device = {device!r}: must be auto, cpu, or an accelerator like cuda or cuda:1"


def test_an_output_that_is_the_input(there: Federated, floret: Floret, tmp_path: Path) -> None:
    there.test_split(0, tmp_path / "x.npz")
    before = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "link.npz").symlink_to(tmp_path / "x.npz")
    which = ("--state-dir", there.states, "--client-name", "0", "--input", tmp_path / "x.npz")
    line = floret.fail("predict", *which, "--output", tmp_path / "link.npz")
    assert line == f"--output {tmp_path / 'link.npz'}: is the --input, which would be overwritten"
    assert (tmp_path / "x.npz").read_bytes() == before


def test_a_device_that_is_not_there(there: Federated, floret: Floret, tmp_path: Path) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    which = ("--state-dir", there.states, "--client-name", "0", "--device", device)
    line = floret.fail("predict", *which, "--input", tmp_path / "x.npz")
    assert line.startswith(f"device = {device!r}: not available here (")


def test_a_damaged_version_is_told_and_the_one_before_it_is_used(
    there: Federated, floret: Floret, tmp_path: Path
) -> None:
    which = ("--state-dir", there.states, "--client-name", "0")
    folder = there.states / "default" / "fedper" / "0"
    older, newer = sorted(folder.glob("*.safetensors"))
    before, _ = floret("predict", *which, "--input", tmp_path / "x.npz")

    content = bytearray(newer.read_bytes())
    content[-1] ^= 1
    newer.write_bytes(content)
    out, err = floret("predict", *which, "--input", tmp_path / "x.npz")
    assert out != before
    lines = err.splitlines()
    assert lines[:2] == [
        f"floret: {newer} is damaged: its checksum is wrong",
        "floret: went on from the client's state after round 1",
    ]
    right = int(lines[2].split()[2])
    first_round = there.outcome.history[0]["clients"]["0"]["after"]["test"]
    assert right / int(lines[2].split()[4]) == first_round

    out, err = floret("export", *which, "--output", tmp_path / "model.pt2")
    assert "round 1;" in out
    assert err.splitlines() == lines[:2]

    older.write_bytes(older.read_bytes()[:-1])
    line = floret.fail("predict", *which, "--input", tmp_path / "x.npz")
    assert line.startswith("no intact version of the client's state is left (")


def test_a_state_of_another_version_of_floret(there: Federated, floret: Floret, tmp_path: Path) -> None:
    folder = there.states / "default" / "fedper" / "0"
    wrongs: list[Callable[[dict[str, Any]], object]] = [
        lambda about: about.pop("inputs"),
        lambda about: about["inputs"].pop("classes"),
        lambda about: about["inputs"].update(shape=["x"]),
        lambda about: about["message"].pop("head-layers"),
        lambda about: about["message"].update({"num-classes": -1}),
    ]
    before = {path: read_manifest(path) for path in folder.glob("*.json")}
    for wrong in wrongs:
        for path, content in before.items():
            changed = json.loads(json.dumps(content))
            wrong(changed["about"])
            write_manifest(path, changed)
        line = floret.fail("export", "--state-dir", there.states, "--client-name", "0", "--output", tmp_path / "m.onnx")
        assert line == f"{folder}: was written by another version of Floret"
