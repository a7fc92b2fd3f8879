"""The report of a run, read back: its numbers are those of the run's files, and it loads no other file."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import floret as command
from common.errors import FloretError
from data import PARTITIONS
from results.history import Round, Traffic
from results.report import client_table, labels, table, write_report
from results.run import read_run
from results.status import FILE
from results.sweep import summary_of, table_row
from results.text import MISSING, cut, megabytes, percent, short

ROOT = Path(__file__).parent.parent
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page as its tags, its text, and what stands under each id: values of <data>, rows of a table."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: dict[str, list[float]] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.text: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open, "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        inside = attributes.get("id") or (self._open[-1][1] if self._open else "")
        if tag not in VOID:
            self._open.append((tag, inside))
        if tag == "data":
            self.values.setdefault(inside, []).append(float(attributes["value"] or ""))
        if tag == "tr":
            self.rows.setdefault(inside, []).append([])
        if tag in ("td", "th"):
            self.rows[inside][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1][0] == "style":
            return
        self.text.append(data)
        if any(tag in ("td", "th") for tag, _ in self._open):
            self.rows[self._open[-1][1]][-1][-1] += data

    def body(self, name: str) -> list[list[str]]:
        return [[" ".join(cell.split()) for cell in row] for row in self.rows[name][1:]]

    def says(self, text: str) -> bool:
        return text in " ".join(" ".join(self.text).split())


def scores(values: list[float], weights: list[int]) -> dict[str, float]:
    worst = sorted(values)[: max(1, -(-len(values) // 10))]
    return {
        "mean": fmean(values),
        "weighted_mean": fmean(values, weights),
        "std": pstdev(values),
        "worst_decile": fmean(worst),
    }


def make_run(
    directory: Path,
    *,
    names: list[str] | None = None,
    method: str = "pfakd",
    rounds: int = 6,
    done: int | None = None,
    classes: int = 4,
    labels_known: bool = True,
    validation: bool = True,
    level: float = 0.9,
    part: int | None = None,
    refused: Mapping[int, tuple[str, str]] | None = None,
    **config: Any,
) -> Path:
    """Write a run's files: no summary if killed after ``done`` rounds; odd rounds have only ``part`` clients."""
    names = names or [str(place) for place in range(5)]
    refused = refused or {}
    done = rounds if done is None else done
    directory.mkdir()
    counts = {name: [(place + 3 * label) % 7 * 10 for label in range(classes)] for place, name in enumerate(names)}
    sizes = {name: 20 + 3 * place for place, name in enumerate(names)}
    about = {
        "config": {
            "method": method,
            "dataset": "digits",
            "model": "mlp",
            "partition": "pathological",
            "classes-per-client": 2,
            "alpha": 0.1,
            "seed": 0,
            "rounds": rounds,
            "evaluate-every": 1 if part is None else 2,
            "lr": 0.01,
            **config,
        },
        "parameters": {"beta": 1.0},
        "run_id": "77",
        "started": "2026-11-20T18:00:00Z",
        "versions": {"floret": "0.1.0", "torch": "2.9.1"},
        "num_classes": classes,
        "clients": {
            name: {
                "samples": {"train": sum(counts[name]), "validation": 7, "test": sizes[name]},
                "labels": counts[name] if labels_known else None,
            }
            for name in names
        },
    }
    (directory / "config.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = []
    for number in range(1, done + 1):
        here = names if part is None or number % 2 == 0 else names[:part]
        entries: dict[str, dict[str, Any]] = {}
        for place, name in enumerate(here):
            after = max(0.0, min(1.0, level - 0.4 / number - 0.01 * (place % 9)))
            entries[name] = {
                "trained": True,
                "before": {"test": after / 2, "validation": None},
                "after": {"test": after, "validation": after - 0.02 * (number == done) if validation else None},
                "loss": 1 / number,
                "bytes": {"up": 1000 + place, "down": 2000},
                "seconds": 0.1,
            }
        weights = [sizes[name] for name in here]
        after_test = scores([entries[name]["after"]["test"] for name in here], weights)
        accuracy = {
            "before": {"test": scores([entries[name]["before"]["test"] for name in here], weights), "validation": None},
            "after": {
                "test": after_test,
                "validation": scores([entries[name]["after"]["validation"] for name in here], weights)
                if validation
                else None,
            },
        }
        lines.append(
            {
                "round": number,
                "clients": entries,
                "accuracy": accuracy,
                "loss": 1 / number,
                "bytes": {way: sum(entry["bytes"][way] for entry in entries.values()) for way in ("up", "down")},
                "refused": [dict(zip(("client", "reason"), refused[number], strict=True))] if number in refused else [],
                "seconds": 1.0 + number,
            }
        )
    (directory / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == rounds:
        judged = [line for line in lines if validation and len(line["clients"]) == len(names)]
        best = max(judged, key=lambda line: line["accuracy"]["after"]["validation"]["mean"], default=None)
        summary = {
            "accuracy": {when: lines[-1]["accuracy"][when]["test"] for when in ("after", "before")},
            "best_validation": best
            and {"round": best["round"], "test_mean": best["accuracy"]["after"]["test"]["mean"]},
            "bytes": {way: sum(line["bytes"][way] for line in lines) for way in ("up", "down")},
            "seconds": {
                "total": sum(line["seconds"] for line in lines),
                "per_round_median": median(line["seconds"] for line in lines),
            },
            "refused": len(refused),
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def load(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return (
        json.loads((directory / "config.json").read_text()),
        lines,
        json.loads((directory / "summary.json").read_text()),
    )


def report(*directories: Path) -> Page:
    path = directories[0] / "report.html"
    write_report([read_run(directory) for directory in directories], path)
    return Page(path)


def stands_alone(page: Page) -> None:
    """No tag of the page makes a browser run or fetch anything."""
    assert not {"script", "iframe", "object", "embed", "link", "img", "base"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert (value or "").startswith(("#", "data:image/png;base64,"))
            assert "url(http" not in (value or "")


def test_figures_of_the_page_are_those_of_the_files(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", refused={3: ("4", "tensor head.bias is not finite")})
    config, lines, summary = load(directory)
    page = report(directory)
    after, before = summary["accuracy"]["after"], summary["accuracy"]["before"]
    assert page.values["after"] == [after["mean"], after["std"]]
    assert page.values["before"] == [before["mean"], before["std"]]
    assert page.values["worst"] == [after["worst_decile"], before["worst_decile"]]
    assert page.values["weighted"] == [after["weighted_mean"], before["weighted_mean"]]
    assert page.values["best"] == [summary["best_validation"]["test_mean"]]
    assert page.values["bytes"] == [summary["bytes"]["up"], summary["bytes"]["down"]]
    assert page.values["refused"] == [1]
    assert page.body("refusals") == [["3", "4", "tensor head.bias is not finite"]]
    for name, row in zip(config["clients"], page.body("clients"), strict=True):
        entry, client = lines[-1]["clients"][name], config["clients"][name]
        assert row[:7] == [
            name,
            f"{100 * entry['before']['test']:.1f} %",
            f"{100 * entry['after']['test']:.1f} %",
            *(str(client["samples"][split]) for split in ("train", "validation", "test")),
            str(sum(count > 0 for count in client["labels"])),
        ]
        assert row[7] == str(len(lines))
    assert page.says("pathological, 2 classes per client")
    assert page.says(f"{100 * after['mean']:.1f} %")
    assert not page.says("unfinished")
    stands_alone(page)


def test_the_headline_says_how_many_of_the_clients_it_is_of(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    assert report(directory).says("mean ± std, round 6")
    config, _, _ = load(directory)
    about = config["clients"] | {"gone": {"samples": {}, "labels": None}}
    (directory / "config.json").write_text(json.dumps(config | {"clients": about}))
    assert report(directory).says("mean ± std over 5 of 6 clients, round 6")
    assert client_table(read_run(directory)).splitlines()[0].endswith("round 6; the mean is over 5 of 6 clients")


def test_samples_that_were_not_told_are_a_dash(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", labels_known=False)
    assert report(directory).says("Samples of each client")
    config, _, _ = load(directory)
    untold = dict.fromkeys(("train", "validation", "test"))
    clients = {name: {"samples": untold, "labels": None} for name in config["clients"]}
    (directory / "config.json").write_text(json.dumps(config | {"clients": clients}))
    page = report(directory)
    assert not page.says("Samples of each client")
    dash = "\N{EN DASH}"
    assert [row[3:6] for row in page.body("clients")] == [[dash] * 3] * 5
    assert client_table(read_run(directory)).splitlines()[4].split()[-2:] == [dash] * 2


def test_rounds_to_quote_are_told_apart(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")  # validation accuracy falls in the last round, test accuracy does not
    _, lines, _ = load(directory)
    rows = report(directory).body("milestones")
    assert [row[1] for row in rows] == ["6", "5", "6"]
    assert rows[0][0] == "Last round"
    assert "papers" in rows[2][0]
    quoted = lines[4]["accuracy"]["after"]
    assert rows[1][3] == f"{100 * quoted['test']['mean']:.1f} % ± {100 * quoted['test']['std']:.1f}"
    assert rows[1][5].startswith(f"{100 * quoted['validation']['mean']:.1f} %")
    assert rows[1][6] == "\N{EN DASH}"


def test_rounds_of_few_clients_are_not_compared_with_rounds_of_all(tmp_path: Path) -> None:
    names = [str(place) for place in range(12)]
    run = read_run(make_run(tmp_path / "run", names=names, rounds=8, done=7, part=2))
    last = run.history.last_complete()
    assert last is not None
    assert last.round == 6
    # The two clients of round 7 do best of all; that is no reason to quote them.
    assert run.rounds[-1].after["test"].mean > last.after["test"].mean  # type: ignore[operator]
    assert run.figures.after == last.after["test"]
    assert [milestone.round.round for milestone in run.milestones()] == [6, 6, 6]


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_has_words(tmp_path: Path, name: str) -> None:
    run = read_run(make_run(tmp_path / "run", rounds=1, partition=name))
    assert run.partition != name
    assert run.partition.lower().startswith(name)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    reason = '<img src="http://example.org/x" onerror="alert(1)">\x1b[2J'
    directory = make_run(tmp_path / "run", names=[name, "$x^2$ & <b>"], refused={2: (name, reason)}, model='"><script>')
    page = report(directory)
    stands_alone(page)
    assert page.body("clients")[1][0] == name
    assert page.says("$x^2$ & <b>")
    assert "&lt;script&gt;alert(1)" in (directory / "report.html").read_text()
    assert "\x1b" not in short(reason)


def test_killed_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", rounds=20, done=7)
    whole = (directory / "history.jsonl").read_text()
    (directory / "history.jsonl").write_text(whole + whole.splitlines()[-1].replace('"round": 7', '"round": 8')[:150])
    run = read_run(directory)
    last = json.loads(whole.splitlines()[-1])
    assert len(run.rounds) == 7
    assert run.figures.after.mean == last["accuracy"]["after"]["test"]["mean"]
    assert run.figures.best_validation is not None
    assert run.figures.best_validation.round == 6
    assert run.figures.bytes.up == 7 * last["bytes"]["up"]
    page = report(directory)
    assert page.says("unfinished: 7 of 20 rounds")
    assert page.values["after"][0] == run.figures.after.mean
    assert "unfinished: 7 of 20 rounds" in client_table(run)
    assert "7 of 20" in table([run])


@pytest.mark.parametrize("history", [None, "", '{"round": 1, "cli'])
def test_run_killed_in_its_first_round(tmp_path: Path, history: str | None) -> None:
    directory = make_run(tmp_path / "run", done=0)
    (directory / "history.jsonl").unlink()
    if history is not None:
        (directory / "history.jsonl").write_text(history)
    page = report(directory)
    assert page.says("unfinished: 0 of 6 rounds")
    assert "no round measured one" in client_table(read_run(directory))


def test_rounds_written_again_after_a_resume_replace_the_old(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", rounds=20, done=7)
    lines = (directory / "history.jsonl").read_text().splitlines()
    again = lines[4].replace('"seconds": 6.0', '"seconds": 99.0')
    assert again != lines[4]
    (directory / "history.jsonl").write_text("\n".join([*lines, again]) + "\n")
    run = read_run(directory)
    assert [line.round for line in run.rounds] == [1, 2, 3, 4, 5]
    assert run.rounds[-1].seconds == 99.0


def test_values_that_may_be_null(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", labels_known=False, validation=False)
    _, lines, summary = load(directory)
    for line in lines:
        line["accuracy"]["before"] = {"test": None, "validation": None}
        line["loss"] = None
        for entry in line["clients"].values():
            entry["before"] = None
    summary["accuracy"]["before"] = None
    summary["seconds"] = None
    (directory / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "summary.json").write_text(json.dumps(summary))
    page = report(directory)
    assert "before" not in page.values
    assert page.values["after"][0] == summary["accuracy"]["after"]["mean"]
    assert page.says("Labels never leave a client")
    assert not page.says("Training loss")
    assert [row[0] for row in page.body("milestones")] == [
        "Last round",
        "Best on test, only to compare with papers that report it",
    ]


@pytest.mark.parametrize("clients", [1, 300])
def test_few_and_many_clients(tmp_path: Path, clients: int) -> None:
    names = [f"site-{place}" for place in range(clients)]
    directory = make_run(tmp_path / "run", names=names, classes=30, rounds=2)
    page = report(directory)
    assert [row[0] for row in page.body("clients")] == names
    assert [tag for tag, _ in page.tags].count("figure") == 5
    assert (directory / "report.html").stat().st_size < 1_000_000
    text = client_table(read_run(directory))
    assert max(map(len, text.splitlines())) <= 100
    assert ("10 worst" in text) == (clients == 300)
    assert sum(line.startswith("site-") for line in text.splitlines()) == min(clients, 20)


def test_client_table_shows_the_worst_and_the_best(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", names=[str(place) for place in range(50)])
    _, lines, _ = load(directory)
    after = {name: entry["after"]["test"] for name, entry in lines[-1]["clients"].items()}
    shown = [line.split()[0] for line in client_table(read_run(directory)).splitlines() if line[:1].isdigit()]
    shown.remove("50")  # of the heading, "50 clients: ..."
    assert sorted(after[name] for name in shown[:10]) == sorted(after.values())[:10]
    assert sorted(after[name] for name in shown[10:]) == sorted(after.values())[-10:]


def test_comparison(tmp_path: Path) -> None:
    drawn: dict[str, Any] = {"data-seed": 3}
    directories = [
        make_run(tmp_path / "a", level=0.8, **drawn),
        make_run(tmp_path / "b", level=0.95, seed=1, **drawn),
        make_run(tmp_path / "c", method="fedavg", rounds=9, done=4, level=0.7, **drawn),
    ]
    runs = [read_run(directory) for directory in directories]
    assert labels(runs) == ["pfakd, seed 0", "pfakd, seed 1", "fedavg"]
    page = report(*directories)
    rows = page.body("figures")
    assert [row[0] for row in rows] == labels(runs)
    for run, row in zip(runs, rows, strict=True):
        spread = run.figures.after
        assert row[1] == f"{100 * spread.mean:.1f} % ± {100 * spread.std:.1f}"  # type: ignore[operator]
        assert row[6] == megabytes(run.figures.bytes.up)
    assert rows[2][9] == "4 of 9"
    best = [attributes for tag, attributes in page.tags if tag == "td" and "best" in (attributes.get("class") or "")]
    assert len(best) == 1
    assert {row[0]: row[1:] for row in page.body("differing")} == {"seed": ["0", "1", "0"], "rounds": ["6", "6", "9"]}
    assert page.says("fedavg: unfinished: 4 of 9 rounds")
    assert page.says("digits · mlp · pathological, 2 classes per client · 5 clients")
    assert [tag for tag, _ in page.tags].count("figure") == 4
    stands_alone(page)
    lines = table(runs).splitlines()
    assert len(lines) == 5
    assert percent(runs[1].figures.before.mean).replace("\u00a0", " ") in lines[3]


def test_a_mean_over_some_clients_stands_beside_none_over_all(tmp_path: Path) -> None:
    """Before training it is measured for those that took part alone, after it for all."""
    some, every = make_run(tmp_path / "some", method="fedper"), make_run(tmp_path / "every", method="fedavg")
    file = some / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for name in ("3", "4"):
        lines[-1]["clients"][name]["before"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [read_run(directory) for directory in (some, every)]
    assert runs[0].figures.before.mean == runs[1].figures.before.mean is not None
    shown = percent(runs[1].figures.before.mean).replace("\u00a0", " ")
    page, missing = report(some, every), "\N{EN DASH}"
    assert [row[2].partition(" ±")[0] for row in page.body("figures")] == [missing, shown]
    assert page.says("A dash before local training: only some of the clients were measured then.")
    assert not report(every, every).says("A dash before local training")
    assert [re.split("  +", line)[2] for line in table(runs).splitlines()[2:]] == [missing, shown]
    assert [re.split("  +", client_table(run).splitlines()[-1])[1] for run in runs] == [missing, shown]
    summaries = [summary_of(run) for run in runs]
    assert [summary and summary["before"] for summary in summaries] == [None, runs[1].figures.before.mean]
    # The page of that run alone says over how many it is; a row of a sweep has no mean of one seed beside that of two.
    assert report(some).says("over the 3 clients that trained")
    assert table_row({}, [summary for summary in summaries if summary])[3] == "-"


def test_a_last_round_that_measured_nobody_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=4)
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    assert report(run).says("Last round")
    nobody = Round(4, {}, {}, {}, None, Traffic(), (), (), 0.1)
    (run / "history.jsonl").write_text("".join(lines[:-1]) + json.dumps(nobody.to_json()) + "\n")
    (run / "summary.json").unlink()
    page = report(run)
    assert page.says("nobody was measured in round 4")
    assert page.says("Last complete round")


def test_numbers_and_names_that_no_run_writes_are_shown(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", method="fed\ud800", refused={2: ("site\udfff", "why\ud800")})
    file = directory / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["loss"] = 10**400
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(directory).rounds[0].loss is None
    assert report(directory).says("fed?")
    assert report(directory, make_run(tmp_path / "other")).says("fed?")


def test_run_that_sends_nothing(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", method="local")
    text = (directory / "history.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        for one in (line, *line["clients"].values()):
            one["bytes"] = {"up": 0, "down": 0}
    (directory / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not report(directory).says("Sent in each round")
    page = report(directory, make_run(tmp_path / "other"))
    assert page.says("A run that sends nothing is not drawn.")
    assert not report(directory, directory).says("Accuracy for the bytes sent")


def test_long_names_keep_the_end_that_tells_them_apart() -> None:
    assert short("hospital-of-the-city-12", 12) == "hospit…ty-12"
    assert short("site\n1") == "site 1"


def test_a_comparison_tells_of_privacy_and_of_the_number_of_clients(tmp_path: Path) -> None:
    private: dict[str, Any] = {"privacy.unit": "example", "privacy.epsilon": 4.0}
    none: dict[str, Any] = {"privacy.unit": "none"}
    few, many = [str(place) for place in range(5)], [str(place) for place in range(7)]
    directories = [
        make_run(tmp_path / "a", names=few, **private),
        make_run(tmp_path / "b", names=few, **none),
        make_run(tmp_path / "c", names=many),
    ]
    for line in (lines := (tmp_path / "a" / "history.jsonl").read_text().splitlines()):
        assert "epsilon" not in line
    changed = [json.dumps(json.loads(line) | {"epsilon": 1.5}) for line in lines]
    (tmp_path / "a" / "history.jsonl").write_text("\n".join(changed) + "\n")
    (tmp_path / "a" / "summary.json").unlink()
    runs = [read_run(directory) for directory in directories]
    assert labels(runs) == [
        "pfakd, privacy.unit example, clients 5",
        "pfakd, privacy.unit none, clients 5",
        "pfakd, privacy.unit none, clients 7",
    ]
    page = report(*directories)
    differing = {row[0]: row[1:] for row in page.body("differing")}
    assert differing == {"privacy.unit": ["example", "none", "none"], "clients": ["5", "5", "7"]}
    assert [row[11] for row in page.body("figures")] == ["1.5", MISSING, MISSING]
    assert table(runs).splitlines()[-2:] == [
        "pfakd, privacy.unit example, …: privacy spent, epsilon 1.5",
        "these runs differ in their data: clients",
    ]


def test_a_comparison_tells_of_other_files_and_of_own_data(tmp_path: Path) -> None:
    def run(name: str, **about: Any) -> Path:
        directory = make_run(tmp_path / name, dataset=about.pop("dataset", "npz"))
        config = json.loads((directory / "config.json").read_text()) | about
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    one, other = run("one", digest="7ffa44aa" + 56 * "0"), run("other", digest="debb79cc" + 56 * "0")
    page = report(one, other)
    assert {row[0]: row[1:] for row in page.body("differing")} == {"data": ["files 7ffa44aa", "files debb79cc"]}
    assert page.says("These runs differ in their data (data): none is better than another by these figures.")
    assert page.says("The same in all: mlp")
    runs = [read_run(directory) for directory in (one, other)]
    assert labels(runs) == ["pfakd, data files 7ffa44aa", "pfakd, data files debb79cc"]
    assert table(runs).endswith("these runs differ in their data: data")
    # The same files are named once, and of another dataset their digest does not matter.
    again = report(one, run("again", digest="7ffa44aa" + 56 * "0"))
    assert again.says("The same in all: npz files 7ffa44aa · mlp")
    assert again.says("The highest mean is in bold.")
    assert [("td", {"class": "best"}) in one.tags for one in (again, page)] == [True, False]
    runs = [read_run(directory) for directory in (one, run("digits", dataset="digits"))]
    assert table(runs).endswith("these runs differ in their data: dataset")
    node = run("node", dataset="digits")
    config = json.loads((node / "config.json").read_text())
    for client in config["clients"].values():
        client["own"] = True
    (node / "config.json").write_text(json.dumps(config))
    differing = report(run("more", dataset="digits"), node).body("differing")
    own = "each client's own data"
    assert {row[0]: row[1:] for row in differing} == {"dataset": ["digits", own], "partition": ["pathological", own]}


@pytest.mark.parametrize(
    ("config", "key", "other", "apart"),
    [
        ({"partition": "dirichlet"}, "alpha", 100.0, True),
        ({"partition": "pathological"}, "alpha", 100.0, False),  # which does not use it
        ({"partition": "pathological"}, "classes-per-client", 10, True),
        ({"partition": "shards", "shards-per-client": 2}, "shards-per-client", 3, True),
        ({"max-samples": 200}, "max-samples", 60000, True),
        ({"min-samples": 2}, "min-samples", 10, True),
        ({"test-fraction": 0.1}, "test-fraction", 0.5, True),
        ({"validation-fraction": 0.1}, "validation-fraction", 0.2, True),
        ({"data-seed": 1}, "data-seed", 2, True),
        ({"data-seed": -1}, "seed", 1, True),
        ({"data-seed": 1}, "seed", 1, False),
        ({"dataset": "npz-clients"}, "seed", 1, False),
        ({}, "lr", 0.5, False),
    ],
)
def test_no_run_is_best_among_those_with_other_clients(
    tmp_path: Path, config: dict[str, Any], key: str, other: Any, apart: bool
) -> None:
    directories = make_run(tmp_path / "a", **config), make_run(tmp_path / "b", level=0.5, **config | {key: other})
    bold = ("td", {"class": "best"}) in report(*directories).tags
    said = f"these runs differ in their data: {key}" in table([read_run(each) for each in directories])
    assert (bold, said) == (not apart, apart)


def test_methods_with_the_same_seeds_are_compared(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{method}{seed}", method=method, seed=seed)
        for method in ("fedavg", "fedper")
        for seed in (0, 1)
    ]
    assert report(*runs).says("The highest mean is in bold.")
    said = "These runs differ in their data (seed): none is better than another by these figures."
    assert report(*runs[:-1]).says(said)
    assert report(*runs[:2]).says(said)


def test_a_comparison_says_which_history_lacks_its_end(tmp_path: Path) -> None:
    whole, lacking = make_run(tmp_path / "whole"), make_run(tmp_path / "lacking", seed=1)
    (lacking / "history.jsonl").unlink()
    lines = table([read_run(whole), read_run(lacking)]).splitlines()
    assert "pfakd, seed 1: its history lacks its end: 0 of 6 rounds" in lines


def test_a_history_that_lacks_rounds_in_the_middle_is_not_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert not read_run(run).cut_short
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text("".join(lines[:2] + lines[4:]))
    lacking = read_run(run)
    assert [line.round for line in lacking.rounds] == [1, 2, 5, 6]
    assert lacking.cut_short
    assert lacking.fewer_rounds == "its history lacks rounds: it has 4 of 6 rounds"


def never_used(directory: Path) -> Path:
    """Rewrite a run's history as if every reply had been refused."""
    lines = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    for line in lines:
        line["refused"] = [{"client": name, "reason": "training diverged"} for name in line["clients"]]
        line["clients"] = {name: client | {"trained": False} for name, client in line["clients"].items()}
    (directory / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_a_run_of_which_no_reply_was_used_says_so(tmp_path: Path) -> None:
    used, unused = make_run(tmp_path / "a"), never_used(make_run(tmp_path / "b"))
    said = "no reply was used in any round; the first is refused: client 0: training diverged"
    assert read_run(unused).nothing_used == said
    assert read_run(used).nothing_used is None
    assert report(unused).says(said)
    assert not report(used).says("no reply was used")
    runs = [read_run(used), read_run(unused)]
    assert report(used, unused).says(f"{labels(runs)[1]}: {said}")
    assert any(line.endswith(f": {said}") for line in table(runs).splitlines())
    assert client_table(runs[1]).splitlines()[-1] == said


def test_what_a_client_said_is_printable(tmp_path: Path) -> None:
    names, code = [f"{place}\x1b]0;x\x07" for place in range(3)], "\x1b]52;c;AAAA\x07"
    run = read_run(never_used(make_run(tmp_path / "run", names=names, method=code, model=code)))
    other = read_run(make_run(tmp_path / "other", method=code, model="mlp"))
    text = "\n".join([table([run, other]), client_table(run)])
    assert "".join(text.split()).isprintable()
    assert "client 0?]0;x?: training diverged" in text


def test_names_that_a_cut_would_make_the_same_are_not_cut() -> None:
    names = [f"fedper, seed 0, participation 1, rounds {rounds}" for rounds in (3, 20)]
    assert cut(names, 36) == names
    assert cut([names[0], "fedavg, seed 0", "x" * 40], 36) == [
        "fedper, seed 0, participation 1, …",
        "fedavg, seed 0",
        "x" * 18 + "…" + "x" * 17,
    ]
    # A part that does not fit goes whole, with its value.
    assert cut(["fedper, num-classes 0, rounds 20, min-clients 2"], 36) == ["fedper, num-classes 0, rounds 20, …"]
    assert cut(["fedper, num-classes 0, rounds 200, min-clients 2"], 36) == ["fedper, num-classes 0, rounds 200, …"]
    assert cut(["fedper, num-classes 0, rounds 2000, min-clients 2"], 36) == ["fedper, num-classes 0, …"]


def test_runs_that_differ_in_nothing_are_named_by_directory(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("a", "b")]
    assert labels(runs) == ["pfakd, a", "pfakd, b"]


def test_same_run_same_bytes_whatever_the_settings_of_matplotlib(tmp_path: Path) -> None:
    import matplotlib

    directory = make_run(tmp_path / "run", classes=30)  # 30 classes: a heat map, the chart with an image in it
    report(directory)
    first = (directory / "report.html").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "axes.grid": False, "lines.marker": "x"}):
        report(directory)
    assert (directory / "report.html").read_bytes() == first
    assert not list(directory.glob(".*"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("history.jsonl", '{"round": 1}\n{"rou\n{"round": 3}\n'),
        ("history.jsonl", '{"no round": 1}\n'),
        ("history.jsonl", '{"round": 1, "loss": "low"}\n'),
        ("history.jsonl", '{"round": 1, "clients": {"0": []}}\n'),
        ("summary.json", "nothing"),
        # JSON of Python has numbers that no count can be, and texts that no page can have.
        ("config.json", '{"config": {}, "clients": {"0": {"samples": {"train": Infinity}}}}'),
        ("config.json", '{"config": {}, "clients": {"0": {"labels": [-Infinity]}}}'),
        ("history.jsonl", '{"round": Infinity}\n'),
        ("history.jsonl", '{"round": 1, "bytes": {"up": 1e999}}\n'),
        ("history.jsonl", f'{{"round": 1, "bytes": {{"up": 1{"0" * 400}}}}}\n'),
        ("summary.json", '{"refused": Infinity}'),
    ],
)
def test_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    directory = make_run(tmp_path / "run")
    (directory / name).write_text(content)
    with pytest.raises(FloretError) as caught:
        read_run(directory)
    assert str(directory / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "attribute" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "0.0010"), (4_560, "0.0046"), (83_250, "0.0833"), (7_920_000, "7.92")]
)
def test_megabytes_keep_what_matters(count: int, text: str) -> None:
    assert megabytes(count) == text


def floret(*arguments: str, cwd: Path, hash_seed: str = "0", **variables: str) -> subprocess.CompletedProcess[str]:
    home = {"FLORET_HOME": str(cwd / "floret")}
    environment = {
        **os.environ,
        **home,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": hash_seed,
        "PYTHONIOENCODING": "utf-8",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.thorough
def test_command_reports_a_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    # Also where matplotlib can keep nothing.
    result = floret("report", "run", cwd=tmp_path, HOME="/proc/none", MPLCONFIGDIR="/proc/none")
    assert (result.returncode, result.stderr) == (0, "")
    assert str(directory / "report.html") in result.stdout
    assert client_table(read_run(directory)) in result.stdout
    other = floret("report", "run", "--output", "other.html", cwd=tmp_path, hash_seed="1")
    assert other.returncode == 0
    assert (tmp_path / "other.html").read_bytes() == (directory / "report.html").read_bytes()
    # By its name alone, where runs are.
    (tmp_path / "floret" / "runs").mkdir(parents=True)
    made = make_run(tmp_path / "floret" / "runs" / "named")
    assert floret("report", "named", cwd=tmp_path).returncode == 0
    assert (made / "report.html").is_file()


@pytest.mark.thorough
def test_command_compares_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", method="fedper")
    result = floret("report", "a", "b", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert [row[0] for row in Page(tmp_path / "compare.html").body("figures")] == ["pfakd", "fedper"]
    assert not (tmp_path / "a" / "report.html").exists()


def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cell, name, lr in (
        ("a", "20260102-run", 0.3),
        ("b", "20260101-old", 0.1),
        ("b", "20260103-run", 0.2),
        ("c", "20260101-run", 0.1),
    ):
        (tmp_path / "sweep" / "cells" / cell).mkdir(parents=True, exist_ok=True)
        make_run(tmp_path / "sweep" / "cells" / cell / name, rounds=1, lr=lr)
    begun = tmp_path / "sweep" / "cells" / "d" / "20260104-run"
    begun.mkdir(parents=True)
    (begun / FILE).write_text("{}")
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    said = CliRunner().invoke(command, ["report", "sweep"], catch_exceptions=False).output
    # The newest of each cell, in the order in which they began.
    assert [line.split()[2] for line in said.splitlines() if line.startswith("pfakd")] == ["0.1", "0.3", "0.2"]
    assert Page(tmp_path / "compare.html").body("figures")
    for folder, line in (
        (
            "sweep/cells",
            "sweep/cells is neither a run directory, which has a config.json, nor a sweep's folder, whose runs are in "
            "cells/*/2*/",
        ),
        ("empty", "empty has no run yet; the runs of a sweep are in empty/cells/*/2*/"),
        ("nowhere", "nowhere is not there; it must be a run directory"),
    ):
        wrong = CliRunner().invoke(command, ["report", folder]).exception
        assert isinstance(wrong, FloretError)
        assert str(wrong) == line
    # A damaged run is told, and the others are shown.
    (tmp_path / "sweep" / "cells" / "a" / "20260102-run" / "config.json").write_text("{")
    done = CliRunner().invoke(command, ["report", "sweep"], catch_exceptions=False)
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("pfakd")] == ["0.1", "0.2"]
    assert re.fullmatch(
        r"floret: sweep/cells/a/20260102-run/config.json is not a run.s config: .+; it is left out\n", done.stderr
    )
    assert isinstance(CliRunner().invoke(command, ["report", "sweep/cells/a/20260102-run"]).exception, FloretError)
    for name in ("b", "c"):
        shutil.rmtree(tmp_path / "sweep" / "cells" / name)
    nothing = CliRunner().invoke(command, ["report", "sweep"]).exception
    assert str(nothing) == "no run is left to report"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("report", "nowhere"), "floret: nowhere is not there; it must be a run directory\n"),
        (("report", "run", "-o", "no/such/place.html"), "floret: cannot write no/such/place.html: "),
        (("report",), "floret: Missing argument 'RUN...'"),
        (("bloom",), "floret: No such command 'bloom'"),
    ],
)
def test_command_errors_are_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    make_run(tmp_path / "run", rounds=1)
    result = floret(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1


def test_command_starts_without_heavy_imports(tmp_path: Path) -> None:
    code = "import cli.main, sys; print([m for m in ('torch', 'flwr', 'matplotlib', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert "report" in floret("--help", cwd=tmp_path).stdout
    assert floret("--version", cwd=tmp_path).stdout.startswith("floret")


def test_command_lists_names(tmp_path: Path) -> None:
    result = floret("list", "methods", cwd=tmp_path)
    assert result.returncode == 0
    assert any(line.split()[0] == "pfakd" for line in result.stdout.splitlines())


def test_a_history_that_is_nested_too_deeply_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(FloretError, match="nested too deeply"):
        read_run(tmp_path)
    (tmp_path / "history.jsonl").write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(FloretError, match="line 1: not a line of a history: it is nested too deeply"):
        read_run(tmp_path)
