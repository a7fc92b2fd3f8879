"""Runs of a file of results made again, with real runs; and what is said where they cannot be."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from cli.main import floret
from common.errors import ConfigError, FloretError
from common.run_config import default_config
from data.files import sha256_of
from results.experiment import Data
from results.jobs import Job, run_missing
from results.measured import other_files
from results.runs import PLACES, Runs, RunSpec
from results.verify import Recorded, _elsewhere, picked
from tests.conftest import PATIENCE
from tests.harness import ROOT
from tests.writing import WritingEngine

NOWHERE = Data("", {}, False)


def results(path: Path, datasets: dict[str, str]) -> Path:
    """Write results with a run for each row, of the dataset that stands beside it."""
    accuracy = {"window": 0.5, "last": 0.5, "best": 0.5, "weighted": None, "std": 0.0}
    about = {"column": "A", "seed": 0, "environment": 0, "started": "", "resumed": 0}
    measured = {
        "accuracy": {"before": accuracy, "after": accuracy},
        "curve": [[1, 0.5, 0.5]],
        "clients": 2,
        "refused": 0,
    }
    runs = [
        about
        | measured
        | {"row": row, "bytes": {}, "seconds": 1, "federation-config": "", "config": {"dataset": dataset}}
        for row, dataset in datasets.items()
    ]
    content: dict[str, Any] = {"format": 2, "window": 1, "config": {"method": "fedavg", "seed": 0}, "runs": runs}
    content["environments"] = [{"commit": "c", "machine": {}, "versions": {}}]
    path.write_text(json.dumps(content))
    return path


def test_the_data_of_a_run(tmp_path: Path) -> None:
    (one,) = Recorded.read(results(tmp_path / "a.json", {"One": "digits"}))
    assert (one.place.key, one.window) == (("One", "A", 0), 1)
    assert one.at(NOWHERE).place.spec.keys == {"method": "fedavg", "seed": 0, "dataset": "digits", "download": False}
    # A file of somebody else may say to go on with a run that is here, or to write into it.
    content = json.loads((tmp_path / "a.json").read_text())
    content["config"] |= dict.fromkeys(PLACES, "mine")
    (tmp_path / "a.json").write_text(json.dumps(content))
    (one,) = Recorded.read(tmp_path / "a.json")
    assert one.at(NOWHERE).place.spec.keys == {"method": "fedavg", "seed": 0, "dataset": "digits", "download": False}
    (one,) = Recorded.read(results(tmp_path / "a.json", {"One": "npz"}))
    npz = str(tmp_path / "mine.npz")
    here = one.at(Data.of([f"cifar10={npz}"], False))
    assert (here.place.spec.keys["dataset"], here.place.spec.keys["data-dir"]) == ("npz", npz)
    asked = (
        r"--data: the run One \| A \| seed 0 read an npz file; give one, such as cifar10=cifar10\.npz, or choose other "
    )
    with pytest.raises(ConfigError, match=asked):
        one.at(NOWHERE)
    (one,) = Recorded.read(results(tmp_path / "a.json", {"One": "cifar10"}))
    with pytest.raises(ConfigError, match=r"--data cifar10=.*mine\.npz: the run One .* read cifar10 itself; give its"):
        one.at(Data.of([f"cifar10={npz}"], False))


def test_a_run_of_a_gpu_is_made_again_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = results(tmp_path / "a.json", {"One": "digits"})
    content = json.loads(file.read_text())
    shared = "num-supernodes=4 client-resources-num-gpus=0.5 init-args-num-cpus=2"
    content["runs"][0]["federation-config"] = shared
    content["config"]["device"] = "cuda:0"
    file.write_text(json.dumps(content))
    (one,) = Recorded.read(file)
    for gpus, federation, device in ((1, shared, "cuda:0"), (0, "num-supernodes=4", "cpu")):
        monkeypatch.setattr("results.verify.count_gpus", lambda gpus=gpus: gpus)
        spec = one.at(NOWHERE).place.spec
        assert (spec.federation, spec.keys["device"]) == (federation, device)
    # That is a difference, which is told.
    now = {**one.run.about, "config": {**one.run.about["config"], "device": "cpu"}}
    assert _elsewhere(one.run.about, now) == ["device: cuda:0 then, cpu now"]


def told(file: Path, *places: str) -> list[str]:
    data = Data.of(places, False)
    kept = ((one.run, one.at(data).place.spec) for one in Recorded.read(file))
    return other_files(kept, default_config(ROOT))


def test_another_file_than_runs_read_is_told(tmp_path: Path) -> None:
    file = results(tmp_path / "a.json", {"One": "npz", "Two": "npz", "Three": "npz", "Four": "digits"})
    assert told(file, "cifar10=mine.npz") == []  # older results do not say
    content = json.loads(file.read_text())
    for run, name in zip(content["runs"], ("filled.npz", "mine.npz", "filled.npz", None), strict=True):
        run["file"] = name
    file.write_text(json.dumps(content))
    assert told(file, "cifar10=a/mine.npz") == ["2 of these runs read filled.npz, and mine.npz is given"]
    assert told(file, "cifar10=a/filled.npz") == ["1 of these runs read mine.npz, and filled.npz is given"]
    content["runs"][0]["file"] = ["filled.npz"]
    file.write_text(json.dumps(content))
    line = r"a\.json: is no file of results \(TypeError: the (file|digest) of a run is no text\)"
    with pytest.raises(FloretError, match=line):
        told(file, "cifar10=mine.npz")
    content["runs"][0] |= {"file": "filled.npz", "digest": 5}
    file.write_text(json.dumps(content))
    with pytest.raises(FloretError, match=line):
        told(file, "cifar10=mine.npz")


def test_files_without_runs(tmp_path: Path) -> None:
    with pytest.raises(FloretError, match=r"none\.json: no such file"):
        Recorded.read(tmp_path / "none.json")
    with pytest.raises(FloretError, match=r"a\.json: has no run that is done"):
        Recorded.read(results(tmp_path / "a.json", {}))


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "is no file of results (Is a directory)"),
        ("# Floret", "is no file of results (JSONDecodeError: Expecting value: line 1 column 1 (char 0))"),
        ("{}", "is not of this version's format"),
        ('{"grid": ["seed=[0]"], "runs": []}', "is of a sweep"),
    ],
)
def test_of_another_file_it_is_told_which_is_wanted(tmp_path: Path, content: str | None, wrong: str) -> None:
    file = tmp_path / "other"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with pytest.raises(FloretError) as error:
        Recorded.read(file)
    wanted = "name a JSON file that floret reproduce or floret fit wrote, such as docs/results/pfakd-table1.json"
    assert str(error.value) == f"{file}: {wrong}; {wanted}"


@pytest.mark.parametrize("dataset", [None, 7])
def test_a_run_without_a_dataset_is_told(tmp_path: Path, dataset: int | None) -> None:
    file = results(tmp_path / "a.json", {"One": "digits"})
    content = json.loads(file.read_text())
    content["runs"][0]["config"]["dataset"] = dataset
    file.write_text(json.dumps(content))
    with pytest.raises(FloretError, match=r"a\.json: is no file .*the config of a run has no method or no dataset"):
        Recorded.read(file)


def test_runs_are_picked_by_their_seed(tmp_path: Path) -> None:
    every = Recorded.read(results(tmp_path / "a.json", dict.fromkeys("abcdefgh", "digits")))
    assert picked(every, 3, 1) == picked(every, 3, 1)
    assert {one.place.row for seed in range(40) for one in picked(every, 1, seed)} == set("abcdefgh")
    assert len(picked(every, 99, 0)) == 8


def made_again(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Job]:
    """Return the runs that ``floret verify`` would make."""
    made: list[Job] = []

    def note(_: object, jobs: list[Job], **__: object) -> list[str]:
        made.extend(jobs)
        return []

    monkeypatch.setattr("results.jobs.run_missing", note)
    done = CliRunner().invoke(floret, ["verify", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return made


def test_data_of_runs_that_were_not_chosen_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = results(tmp_path / "a.json", {"One": "npz", "Two": "fashion-mnist"})
    out = ("-o", str(tmp_path / "out"))
    (job,) = made_again(monkeypatch, str(file), "--only", "Two", "--data", str(tmp_path), *out)
    assert (job.label, job.spec.keys["data-dir"]) == ("Two | A | seed 0", str(tmp_path))
    seeds = {picked(Recorded.read(file), 1, seed)[0].place.row: str(seed) for seed in range(9)}
    (job,) = made_again(monkeypatch, str(file), "--pick", seeds["Two"], "--data", str(tmp_path), *out)
    assert job.label == "Two | A | seed 0"
    with pytest.raises(ConfigError, match=r"the run One \| A \| seed 0 read an npz file"):
        made_again(monkeypatch, str(file), "--pick", seeds["One"], "--data", str(tmp_path), *out)


PAGES = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
DOCUMENTED = [line for page in PAGES for line in re.findall(r"^floret verify (docs/.*)$", page, re.MULTILINE)]


@pytest.mark.parametrize("line", DOCUMENTED)
@pytest.mark.parametrize("pick", range(3))
def test_commands_of_the_docs_choose_runs_whose_data_they_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, pick: int
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    more = [] if "--pick" in words else ["--pick", str(pick)]
    assert made_again(monkeypatch, *words, *more, "-o", str(tmp_path / "out"))


class Commands:
    """``floret`` in processes, with a table of one run that it can make.

    Args:
        folder: for all files; the table is ``real.yaml`` in it.
        keys: of the run, besides those here.
    """

    def __init__(self, folder: Path, **keys: Any) -> None:
        table = {
            "title": "T",
            "paper": "P",
            "table": 1,
            "measure": {"when": "after", "last-rounds": 2},
            "clients": 2,
            "config": {"dataset": "digits", "rounds": 3, "partition": "iid", "max-samples": 300} | keys,
            "columns": [{"name": "IID", "config": {}}],
            "rows": [{"name": "One", "config": {"method": "fedper"}, "reported": [50]}],
            "claims": [],
        }
        (folder / "real.yaml").write_text(yaml.safe_dump(table))
        self._env = os.environ | {"FLORET_HOME": str(folder / "floret"), "FLWR_HOME": str(folder / "flwr")}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        command = [sys.executable, "-m", "cli.main", *words]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)


@pytest.mark.thorough
def test_the_npz_file_that_a_run_read_is_kept(tmp_path: Path) -> None:
    floret = Commands(tmp_path, dataset="cifar10", model="mlp")
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (300, 8, 8, 3), np.uint8), np.arange(300) % 3
    mine, other = tmp_path / "mine.npz", tmp_path / "other.npz"
    np.savez(mine, x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    np.savez_compressed(other, **np.load(mine))
    digests = [sha256_of(file)[:16] for file in (mine, other)]
    out = tmp_path / "out"
    made = floret("reproduce", str(tmp_path / "real.yaml"), "-o", str(out), "--data", f"cifar10={mine}")
    assert made.returncode == 0, made.stderr
    (run,) = json.loads((out / "real.json").read_text())["runs"]
    assert (run["file"], run["digest"]) == ("mine.npz", digests[0])
    page = (out / "real.md").read_text().splitlines()
    assert "- Read from: mine.npz." in page
    assert f"- The SHA-256 of what was read begins with {digests[0]}, where runs tell it." in page
    moved = tmp_path / "moved.npz"
    shutil.copy(mine, moved)
    same = floret("reproduce", str(tmp_path / "real.yaml"), "-o", str(out), "--data", f"cifar10={moved}")
    assert (same.returncode, same.stderr) == (0, "")
    # With another file the run is still that of the first one, and so it is told.
    given = ("--data", f"cifar10={other}")
    again = floret("reproduce", str(tmp_path / "real.yaml"), "-o", str(out), *given)
    assert again.returncode == 0, again.stderr
    told = f"1 of these runs read mine.npz (SHA-256 {digests[0]}...), and other.npz ({digests[1]}...) is given"
    assert again.stderr.strip() == f"floret: {out}: {told}"
    assert json.loads((out / "real.json").read_text())["runs"] == [run]
    verified = floret("verify", str(out / "real.json"), "-o", str(tmp_path / "again"), *given)
    assert verified.returncode == 0, verified.stderr
    assert f"floret: {out / 'real.json'}: {told}" in verified.stderr.splitlines()
    *_, agrees, elsewhere = verified.stdout.splitlines()
    assert agrees == "One | IID | seed 0: agrees: 21 numbers are the same, bit for bit"
    assert elsewhere == f"  SHA-256 of the data: {digests[0]} then, {digests[1]} now"


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", ["native", "portable"])
def test_a_run_made_again_agrees_or_says_why(tmp_path: Path, kernels: str) -> None:
    floret = Commands(tmp_path)
    made = floret("reproduce", str(tmp_path / "real.yaml"), "-o", str(tmp_path / "out"), "--kernels", kernels)
    assert made.returncode == 0, made.stderr
    file = tmp_path / "out" / "real.json"
    verify = ("verify", str(file), "-o", str(tmp_path / "again"))
    agrees = floret(*verify)
    assert agrees.returncode == 0, agrees.stderr
    # Three rounds before and after; window, last, best, weighted, spread before and after; clients, samples, refused,
    # bytes both ways.
    assert agrees.stdout.splitlines()[-1] == "One | IID | seed 0: agrees: 21 numbers are the same, bit for bit"
    (again,) = (tmp_path / "again").rglob("config.json")
    assert json.loads(again.read_text()).get("kernels", "native") == kernels
    content = json.loads(file.read_text())
    assert content["environments"][0]["machine"].get("kernels", "native") == kernels
    (run,) = content["runs"]
    assert run["samples"] == 300
    run["samples"] = 360
    sent = run["bytes"]["up"]
    run["bytes"]["up"] = sent + 1
    shown = run["curve"][1][1]
    run["curve"][1][1] = 0.0001
    real = run["accuracy"]["after"]["best"]
    run["accuracy"]["after"]["best"] = real + 1e-12
    content["environments"][0]["commit"] = "0123456789ab"
    content["environments"][0]["versions"]["torch"] = "0.1\x1b]0;x"
    now = run["curve"][1][2]
    file.write_text(json.dumps(content))
    differs = floret(*verify)
    assert differs.returncode == 2
    lines = differs.stdout.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("One | IID | seed 0: differs")))
    assert lines[head] == (
        f"One | IID | seed 0: differs: round 2: 0.01 / {100 * now:.2f} then, {100 * shown:.2f} / {100 * now:.2f} now, "
        "before and after training"
    )
    assert lines[head + 1] == f"  best, after training: {real + 1e-12} then, {real} now"
    assert lines[head + 2] == "  samples: 360 then, 300 now"
    assert lines[head + 3] == f"  bytes up: {sent + 1} then, {sent} now"
    assert lines[head + 4].startswith("  commit: 0123456789ab then, ")
    assert lines[head + 5].startswith("  torch: 0.1?]0;x then, ")
    assert len(lines) == head + 6
    assert differs.stderr.strip() == f"floret: {file}: 1 of 1 runs differ; see above"


def test_what_a_file_contains_counts_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    first, moved = tmp_path / "a.npz", tmp_path / "b.npz"
    first.write_bytes(b"one content")
    moved.write_bytes(b"one content")
    digest = sha256_of(first)[:16]

    def made(place: Path, *, exact: bool = False) -> tuple[int, list[str]]:
        """Return how many runs were made, and what was said of those that were done."""
        engine = WritingEngine(digest=sha256_of(place)[:16])
        spec = RunSpec({"method": "fedper", "rounds": 1, "dataset": "npz", "data-dir": str(place)}, "num-supernodes=2")
        runs = Runs(ROOT, tmp_path / "out", lambda *_: None, engine, exact=exact)
        assert not run_missing(runs, [Job(spec, "One", lambda _: "")], keep_models=False)
        outcome = runs.outcome(spec)
        assert outcome is not None
        assert outcome.about["digest"] == (sha256_of(place)[:16] if exact else digest)
        return len(engine.made), [line for line in capsys.readouterr().out.splitlines() if "of these" in line]

    assert made(first) == (1, [])
    assert made(moved) == (0, [])
    assert made(moved, exact=True) == (0, [])
    moved.write_bytes(b"another content")
    has = sha256_of(moved)[:16]
    assert made(moved) == (0, [f"1 of these runs read {first} (SHA-256 {digest}...), and {moved} ({has}...) is given"])
    assert made(moved, exact=True) == (1, [])


def test_of_other_data_their_digests_are_told() -> None:
    about = {"commit": "c", "machine": {}, "versions": {}, "file": "a.npz", "digest": "1" * 16, "config": {}}
    assert _elsewhere(about, about | {"file": "b.npz"}) == []
    assert _elsewhere(about, about | {"digest": "2" * 16}) == [f"SHA-256 of the data: {'1' * 16} then, {'2' * 16} now"]
    assert _elsewhere(about | {"digest": None}, about | {"file": "b.npz"}) == ["data: a.npz then, b.npz now"]


@pytest.mark.parametrize(
    ("dataset", "own"), [("npz", True), ("npz-clients", True), ("image-folder", True), ("cifar10", False)]
)
def test_a_run_that_read_other_data_is_told_and_made_again_to_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dataset: str, own: bool
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def made(place: str, *, exact: bool = False) -> tuple[int, list[str]]:
        """Return how many runs were made, and what was said of those that were done."""
        engine = WritingEngine()
        spec = RunSpec({"method": "fedper", "rounds": 1, "dataset": dataset, "data-dir": place}, "num-supernodes=2")
        runs = Runs(ROOT, tmp_path, lambda *_: None, engine, exact=exact)
        assert not run_missing(runs, [Job(spec, "One", lambda _: "")], keep_models=False)
        outcome = runs.outcome(spec)
        assert outcome is not None
        assert not exact or outcome.run.config["data-dir"] == place
        return len(engine.made), [line for line in capsys.readouterr().out.splitlines() if "of these" in line]

    assert made("/a/mine.npz") == (1, [])
    assert made("/b/../a/mine.npz") == (0, [])
    said = "1 of these runs read /a/mine.npz, and /b/mine.npz is given"
    assert made("/b/mine.npz") == (0, [said] if own else [])
    assert made("/b/mine.npz", exact=True) == (1, [])
    assert made("/b/mine.npz", exact=True) == (0, [])
