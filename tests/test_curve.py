"""Curves over a key's values: what is a line and a panel, tables, the picture, and files that are none."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from cli.main import floret
from common.errors import FloretError
from results.curve import Study
from results.run import read_run
from tests.test_report import make_run

KEY = "privacy.epsilon"
SAME = 'data-dir="/a folder" model="mlp"'


def write_sweep(
    folder: Path, *keys: dict[str, Any], offset: float = 0.0, file: str | None = None, digest: str | None = None
) -> Path:
    """Write a sweep whose accuracies follow from its keys: 0.5 + epsilon / 100 + seed / 1000 + offset.

    Without ``file`` its runs do not say which npz file they read, as those of older sweeps.
    """
    read = {"file": file, "digest": digest} if file else {}
    runs = [
        {
            "keys": each,
            "about": read
            | {"commit": "c0ffee", "machine": {"cpus": 2, "cpu": "x", "gpus": []}, "versions": {"python": "3"}},
            "summary": {
                "test": 0.5 + each.get(KEY, 20) / 100 + each["seed"] / 1000 + offset,
                "before": 0.4,
                "worst_decile": None,
            },
        }
        for each in keys
    ]
    folder.mkdir()
    (folder / "sweep.json").write_text(
        json.dumps({"grid": ["seed=[0, 2]"], "run-config": SAME, "federation-config": "num-supernodes=2", "runs": runs})
    )
    return folder


@pytest.fixture
def sweeps(tmp_path: Path) -> list[str]:
    private = [{"method": m, KEY: e, "seed": s} for m in ("fedavg", "fedper") for e in (8.0, 1.0) for s in (0, 2)]
    plain = [{"method": m, "seed": s} for m in ("fedavg", "fedper") for s in (0, 2)]
    folders = {
        "10 clients": [write_sweep(tmp_path / "a", *private), write_sweep(tmp_path / "b", *plain)],
        "100 clients": [
            write_sweep(tmp_path / "c", {"method": "fedavg", KEY: 1.0, "seed": 0}, offset=-0.1, file="x.npz")
        ],
    }
    return [f"{name}={folder}" for name, each in folders.items() for folder in each]


def test_the_tables(tmp_path: Path, sweeps: list[str]) -> None:
    output = tmp_path / "found"
    done = CliRunner().invoke(floret, ["curve", KEY, *sweeps, "-o", str(output)], catch_exceptions=False)
    written = [f"written: {output}{suffix}" for suffix in (".svg", ".md", ".json")]
    assert done.output.splitlines()[:4] == [*written, ""]
    page = (tmp_path / "found.md").read_text()
    assert done.output.endswith(page)
    lines = page.splitlines()
    assert lines[:18] == [
        "# Accuracy over privacy.epsilon",
        "",
        "- Read from: x.npz.",
        "- Commit: c0ffee.",
        "- Machine: 2 CPUs, x.",
        "- Versions: python 3.",
        "",
        "## 10 clients",
        "",
        "Accuracy on the test split in percent, mean ± standard deviation (population) over seeds 0, 2.",
        "",
        *['- `seed=[0, 2] model="mlp" num-supernodes=2`'] * 2,
        "",
        "| after; privacy.epsilon | 1 | 8 | none |",
        "|---|---|---|---|",
        "| `fedavg` | 51.1 ± 0.1 | 58.1 ± 0.1 | 70.1 ± 0.1 |",
        "| `fedper` | 51.1 ± 0.1 | 58.1 ± 0.1 | 70.1 ± 0.1 |",
    ]
    assert "| `fedavg` | 40.0 ± 0.0 | 40.0 ± 0.0 | 40.0 ± 0.0 |" in lines
    assert "| `fedavg` | - | - | - |" in lines  # no worst decile was measured
    assert lines[lines.index("## 100 clients") + 6 :][:3] == [
        "| after; privacy.epsilon | 1 |",
        "|---|---|",
        "| `fedavg` | 41.0 |",
    ]


def test_the_picture_says_its_numbers_and_comes_again(tmp_path: Path, sweeps: list[str]) -> None:
    folders = [(name, Path(folder)) for name, folder in (text.split("=") for text in sweeps)]
    pictures = [Study.read(KEY, "no privacy", folders).picture() for _ in range(2)]
    assert pictures[0] == pictures[1]
    root = ElementTree.fromstring(pictures[0])
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    for shown in ("10 clients", "100 clients", "fedavg", "fedper", "1", "8", "no privacy", KEY):
        assert shown in texts
    says = next("".join(node.itertext()) for node in root.iter() if node.tag.endswith("desc"))
    assert says.splitlines()[0] == (
        "10 clients, privacy.epsilon: fedavg: 1 51.1 ± 0.1, 8 58.1 ± 0.1, no privacy 70.1 ± 0.1; "
        "fedper: 1 51.1 ± 0.1, 8 58.1 ± 0.1, no privacy 70.1 ± 0.1."
    )


def test_a_seed_that_all_runs_share_is_theirs(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "a", *({"method": "fedavg", KEY: e, "seed": 7} for e in (1.0, 8.0)))
    sweep = json.loads((folder / "sweep.json").read_text())
    for run in sweep["runs"]:
        del run["keys"]["seed"]
        run["about"]["config"] = {"seed": 7, "method": "fedavg"}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    study = Study.read(KEY, "none", [("10 clients", folder)])
    assert study.panels[0].seeds(str) == "over seeds 7"
    assert study.panels[0].accuracies("fedavg", 8.0, "test") == [sweep["runs"][1]["summary"]["test"]]
    # What was swept is kept as it was.
    assert [run["keys"] for run in study.sweeps["10 clients"][0]["runs"]] == [run["keys"] for run in sweep["runs"]]


def test_lines_of_other_seeds_say_theirs(tmp_path: Path) -> None:
    """Another seed draws other clients: such lines must not look like those of the same."""
    runs = [{"method": "fedper", KEY: e, "seed": s} for e in (1.0, 8.0) for s in (0, 1, 2)]
    one = write_sweep(tmp_path / "a", *runs, file="x.npz", digest="aa11")
    other = write_sweep(
        tmp_path / "b",
        *({"method": "fedavg", KEY: 1.0, "seed": s} for s in (2, 3)),
        {"method": "fedavg", "seed": 3},
        file="x.npz",
        digest="bb22",
    )
    page = Study.read(KEY, "none", [("P", one), ("P", other)]).page()
    assert (
        "in percent, mean ± standard deviation (population) over seeds, not the same ones for all points: "
        "`fedper` 0, 1, 2; `fedavg` (1: 2, 3; none: 3).\n"
    ) in page
    assert "- Read from: x.npz.\n- The SHA-256 of what was read begins with aa11 or bb22, where runs tell it." in page


def test_names_of_somebody_elses_sweep_are_printable(tmp_path: Path) -> None:
    code = "\x1b]0;owned\x07"
    each = [{"method": code, code: code, KEY: e, "seed": 0} for e in (1.0, 8.0)]
    folder = write_sweep(tmp_path / "a", *each, file=code, digest=code)
    sweep = json.loads((folder / "sweep.json").read_text())
    sweep["runs"].append({"keys": each[0] | {"seed": 1, KEY: 2.0}, "summary": None})
    sweep |= {"grid": [code], "run-config": code, "federation-config": code}
    for run in sweep["runs"][:2]:
        run["about"] |= {"commit": code, "versions": {code: code}}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    study = Study.read(KEY, "none", [("P", folder)])
    assert "".join(study.page().split()).isprintable()
    assert "| `?]0;owned?, ?]0;owned?=?]0;owned?` | 51.0 | 58.0 |" in study.page()
    ElementTree.fromstring(study.picture())


def test_a_mean_over_some_of_the_seeds_is_none(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "a", *({KEY: e, "seed": s} for e in (1.0, 8.0) for s in (0, 1)))
    sweep = json.loads((folder / "sweep.json").read_text())
    sweep["runs"][0]["summary"]["before"] = None
    (folder / "sweep.json").write_text(json.dumps(sweep))
    page = Study.read(KEY, "none", [("P", folder)]).page()
    assert "| before; privacy.epsilon | 1 | 8 |\n|---|---|---|\n| `all` | - | 40.0 ± 0.0 |" in page


def test_what_both_are_made_of_is_kept(tmp_path: Path, sweeps: list[str]) -> None:
    folders = [(name, Path(folder)) for name, folder in (text.split("=") for text in sweeps)]
    Study.read(KEY, "none", folders).write(tmp_path / "v1.5")
    kept = json.loads((tmp_path / "v1.5.json").read_text())
    assert [len(sweep["runs"]) for sweep in kept["sweeps"]["10 clients"]] == [8, 4]
    assert kept["environment"][:2] == ["Read from: x.npz.", "Commit: c0ffee."]
    assert "a folder" not in (tmp_path / "v1.5.json").read_text()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            [{"seed": 0, "method": "fedavg"}],
            "10 clients: no finished run of its sweeps has privacy.epsilon in the grid",
        ),
        ([{"seed": 0, KEY: 1.0}, {"seed": 0, KEY: 1.0}], "two runs of all have privacy.epsilon = 1.0 and seed 0"),
        ([{"seed": 0, KEY: True}], "privacy.epsilon = True: a curve is over the values of a number"),
        ([{"seed": 1.5, KEY: 1.0}], "seed = 1.5: must be a whole number"),
    ],
)
def test_what_makes_no_curve_is_refused(tmp_path: Path, keys: list[dict[str, Any]], reason: str) -> None:
    folder = write_sweep(tmp_path / "sweep", *keys)
    with pytest.raises(FloretError, match=re.escape(reason)):
        Study.read(KEY, "none", [("10 clients", folder)])


def test_a_key_that_the_grid_lacks_is_told_with_those_that_it_has(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", {"method": "fedper", "lr": 0.1, "seed": 0})
    line = "A: no finished run of its sweeps has l in the grid; KEY must be one of lr (did you mean 'lr'?)"
    with pytest.raises(FloretError) as error:
        Study.read("l", "none", [("A", folder)])
    assert str(error.value) == line
    (folder / "sweep.json").write_text('{"runs": []}')
    with pytest.raises(FloretError, match=r"^A: no finished run of its sweeps has sed in the grid$"):
        Study.read("sed", "none", [("A", folder)])


def test_runs_that_are_not_finished_are_named(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "a", *({"lr": 0.1, KEY: e, "seed": s} for e in (1.0, 9.0) for s in (0, 1)))
    file = folder / "sweep.json"
    content = json.loads(file.read_text())
    for i in (1, 2, 3):
        content["runs"][i]["summary"] = None
    file.write_text(json.dumps(content))
    page = Study.read(KEY, "none", [("x", folder)]).page()
    named = (
        "lr=0.1 privacy.epsilon=1.0 seed=1",
        "lr=0.1 privacy.epsilon=9.0 seed=0",
        "lr=0.1 privacy.epsilon=9.0 seed=1",
    )
    assert f"Not finished, so not in the tables: {'; '.join(f'`{each}`' for each in named)}." in page
    # What another sweep of the same panel has is not missing.
    more = write_sweep(tmp_path / "b", *({"lr": 0.1, KEY: 9.0, "seed": s} for s in (0, 1)))
    page = Study.read(KEY, "none", [("x", folder), ("x", more)]).page()
    assert f"Not finished, so not in the tables: `{named[0]}`." in page
    whole = write_sweep(tmp_path / "c", *({KEY: e, "seed": s} for e in (1.0, 9.0) for s in range(30)))
    assert "Not finished" not in Study.read(KEY, "none", [("x", whole)]).page()
    content = json.loads((whole / "sweep.json").read_text())
    for run in content["runs"][:30]:
        run["summary"] = None
    (whole / "sweep.json").write_text(json.dumps(content))
    assert "seed=19`; and 10 more." in Study.read(KEY, "none", [("x", whole)]).page()


def test_a_curve_over_seeds_is_refused(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", {"method": "fedper", "seed": 0}, {"method": "fedper", "seed": 1})
    with pytest.raises(FloretError, match=r"^KEY seed: a point is the mean over seeds; name another key of the grid$"):
        Study.read("seed", "none", [("A", folder)])


SUMMARY = '{"keys": {}, "summary": {"test": %s, "before": null, "worst_decile": null}, "about": %s}'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"runs": [{"keys": {}, "summary": {"test": "much"}}]}',
        '{"runs": [' + SUMMARY % ("NaN", "{}") + "]}",
        '{"runs": [' + SUMMARY % ("0.5", "null") + "]}",
        '{"runs": [' + SUMMARY % ("0.5", '{"commit": "x", "machine": 1, "versions": 2}') + "]}",
        '{"grid": 3, "runs": []}',
        '{"federation-config": ["x"], "runs": []}',
        "[" * 100_000,
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(FloretError, match=r"sweep\.json: is not the sweep\.json of a sweep"):
        Study.read(KEY, "none", [("10 clients", tmp_path)])
    result = CliRunner().invoke(floret, ["curve", KEY, "sweeps/ten", "-o", str(tmp_path / "x")])
    assert "must be like '10 clients=sweeps/ten'" in str(result.exception)
    result = CliRunner().invoke(floret, ["curve", KEY, f"10 clients={tmp_path}", "-o", str(tmp_path)])
    assert "must be the name of files without their endings" in str(result.exception)
    result = CliRunner().invoke(floret, ["curve", KEY, f"10 clients={tmp_path}", "-o", str(tmp_path / "fig.pdf")])
    assert "fig.pdf: ends in .pdf; three files are written, fig.svg, .md and .json" in str(result.exception)


# Over rounds


def write_curves(folder: Path, *runs: tuple[dict[str, Any], list[Any]]) -> Path:
    """Write a sweep whose runs have these keys and curves."""
    write_sweep(folder, *(keys for keys, _ in runs))
    sweep = json.loads((folder / "sweep.json").read_text())
    for run, (_, curve) in zip(sweep["runs"], runs, strict=True):
        run["curve"] = curve
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def test_accuracy_over_rounds_is_of_those_that_all_seeds_have(tmp_path: Path) -> None:
    folder = write_curves(
        tmp_path / "a",
        ({"method": "fedper", "seed": 0}, [[2, 0.1, 0.2], [4, 0.2, 0.4], [6, 0.3, 0.6]]),
        ({"method": "fedper", "seed": 1}, [[4, 0.3, 0.6], [6, 0.3, 0.7]]),
        ({"method": "local", "seed": 0}, [[2, None, 0.5]]),
        ({"method": "local", "seed": 1}, [[2, None, 0.5]]),
    )
    command = ["curve", "round", f"Wards={folder}", "-o", str(tmp_path / "found")]
    page = CliRunner().invoke(floret, command, catch_exceptions=False).output
    assert page.splitlines()[4] == "# Accuracy over rounds"
    assert "(population) over seeds 0, 1. A line begins with the first round by which every client, in all" in page
    assert (
        "| after; round | 2 | 4 | 6 |\n|---|---|---|---|\n"
        "| `fedper` | - | 50.0 ± 10.0 | 65.0 ± 5.0 |\n| `local` | 50.0 ± 0.0 | - | - |"
    ) in page
    assert "| `fedper` | - | 25.0 ± 5.0 | 30.0 ± 0.0 |\n| `local` | - | - | - |" in page
    assert "worst decile" not in page
    kept = json.loads((tmp_path / "found.json").read_text())["sweeps"]["Wards"][0]["runs"]
    assert [run["curve"] for run in kept][1] == [[4, 0.3, 0.6], [6, 0.3, 0.7]]
    picture = (tmp_path / "found.svg").read_text()
    assert "accuracy after local training" in picture
    assert "Wards, round: fedper: 2 -, 4 50.0 ± 10.0, 6 65.0 ± 5.0; local: 2 50.0 ± 0.0, 4 -, 6 -." in picture
    assert picture == Study.read("round", "none", [("Wards", folder)]).picture()
    CliRunner().invoke(floret, [*command, "--when", "before"], catch_exceptions=False)
    picture = (tmp_path / "found.svg").read_text()
    assert "accuracy before local training" in picture
    assert "fedper: 2 -, 4 25.0 ± 5.0, 6 30.0 ± 0.0" in picture


def test_runs_of_their_own_are_lines_by_method_and_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLORET_HOME", str(tmp_path))
    folder = tmp_path / "runs"
    folder.mkdir()
    for name, method, level, keys in (
        ("a", "fedper", 0.9, {"seed": 0}),
        ("b", "fedper", 0.8, {"seed": 1}),
        ("c", "fedper", 0.7, {"seed": 0, "lr": 0.1}),
        ("d", "pfakd", 0.6, {"seed": 0}),
    ):
        make_run(folder / name, method=method, rounds=4, level=level, **keys)
    places = [f"Mine={folder / 'a'}", "Mine=b", "Mine=c", f"Mine={folder / 'd'}"]
    output = ["-o", str(tmp_path / "found")]
    page = CliRunner().invoke(floret, ["curve", "round", *places, *output], catch_exceptions=False).output
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert rows[:3] == ["| `fedper, lr=0.01`", "| `fedper, lr=0.1`", "| `pfakd, lr=0.01`"]
    assert "over seeds, not the same ones for all points: `fedper, lr=0.01` 0, 1; `fedper, lr=0.1` 0; `pfakd" in page
    assert "- `a, b, c, d`" in page
    last = [read_run(folder / name).figures.after.mean or 0.0 for name in ("a", "b")]
    shown = page[page.index("| `fedper, lr=0.01`") :].splitlines()[0]
    assert shown.endswith(f"| {50 * sum(last):.1f} ± {50 * (last[0] - last[1]):.1f} |")
    twice = CliRunner().invoke(floret, ["curve", "round", "Mine=a", "Mine=a", *output])
    assert str(twice.exception).endswith("runs/a: Mine: two runs of fedper have round = 1 and seed 0")


def test_a_table_of_many_rounds_has_every_so_many_and_the_last(tmp_path: Path) -> None:
    folder = write_curves(tmp_path / "a", ({"seed": 0}, [[i, 0.1, 0.2] for i in range(1, 21)]))
    assert "| after; round | 2 | 5 | 8 | 11 | 14 | 17 | 20 |" in Study.read("round", "", [("A", folder)]).page()


TABLE = Path(__file__).parents[1] / "docs" / "results" / "pfps-lwc-table2.json"


def test_a_table_has_a_panel_for_each_of_its_columns(tmp_path: Path) -> None:
    """The table is one of docs/results."""
    content = json.loads(TABLE.read_text())
    chosen = ["--only", "fedper", "--only", "PFPS*", "--only", "β=0.5*", "--only", "β=0.1, P=0.3"]
    command = ["curve", "round", str(TABLE), f"Again={TABLE}", *chosen, "-o", str(tmp_path / "found")]
    page = CliRunner().invoke(floret, command, catch_exceptions=False).output
    columns = ["β=0.1, P=0.3", "β=0.5, P=0.3", "β=0.5, P=0.5", "β=0.5, P=0.7"]
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert headings == [*columns, *(f"Again: {column}" for column in columns)]
    last = [
        100 * run["curve"][-1][2]
        for run in content["runs"]
        if (run["row"], run["column"], run["status"]) == ("FedPer", "β=0.5, P=0.7", "done")
    ]
    assert len(last) == 3
    of_column = page[page.index("## β=0.5, P=0.7") :]
    assert f"| {sum(last) / 3:.1f} ± " in next(line for line in of_column.splitlines() if line.startswith("| `FedPer`"))
    assert "- `pfps-lwc-table2.json, β=0.5, P=0.7`" in of_column
    svg = (tmp_path / "found.svg").read_text()
    assert 'viewBox="0 0 1200 1020"' in svg
    ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["A={sweep}"], "{sweep}/sweep.json: has no curves; give its floret sweep again, which makes no run again"),
        (["{table}", "--only", "FedPre"], "--only 'FedPre': no row or column with runs has this name (did you mean 'F"),
        (["A={sweep}", "--only", "x"], "--only 'x': chooses rows and columns of tables; there is none"),
        (["A={none}"], "{none}: has no run that is done, or is not there; name a file that floret reproduce wrote"),
        (["A={no_table}"], "{no_table}: is not of this version's format; name a file that floret reproduce wrote"),
        (["A={no_curve}"], "{no_curve}/sweep.json: is not the sweep.json of a sweep (an accuracy is no number)"),
        (["{none}"], "{none}: must be like '10 clients=sweeps/ten'"),
        (["A={apart}"], "A: has no round in which all seeds of a line measured every client"),
    ],
)
def test_what_has_no_curves_is_refused(tmp_path: Path, arguments: list[str], wrong: str) -> None:
    places = {
        "sweep": write_sweep(tmp_path / "sweep", {"seed": 0}),
        "table": TABLE,
        "none": tmp_path / "none.json",
        "no_table": tmp_path / "no.json",
        "apart": write_curves(tmp_path / "d", ({"seed": 0}, [[1, 0.1, 0.2]]), ({"seed": 1}, [[2, 0.1, 0.2]])),
        "no_curve": write_curves(tmp_path / "c", ({"seed": 0}, [[1, "x", 0.5]])),
    }
    places["no_table"].write_text("{}")
    command = ["curve", "round", *(text.format(**places) for text in arguments), "-o", str(tmp_path / "x")]
    result = CliRunner().invoke(floret, command)
    assert isinstance(result.exception, FloretError)
    assert str(result.exception).startswith(wrong.format(**places))


def test_the_picture_in_the_docs_is_of_its_table() -> None:
    """Of the picture its numbers are compared: what matplotlib makes of them differs from version to version."""
    name = "{http://www.w3.org/2000/svg}desc"
    kept = ElementTree.parse(TABLE.with_name("pfps-lwc-table2-curves.svg")).getroot().findtext(name)
    now = Study.read("round", "none", [("", TABLE)]).picture()
    assert kept == ElementTree.fromstring(now).findtext(name)
