"""The ranking of a sweep's methods: what is beyond noise, the places, the page, and files that are none."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scipy import stats

from cli.main import floret, main
from common.errors import FloretError
from results.ranking import Ranking, between, beyond_noise, page, places, t95

AFTER = {"a": [0.90, 0.91, 0.92], "b": [0.80, 0.81, 0.82], "c": [0.85, 0.95, 0.90]}


def test_noise_is_judged_by_the_differences_of_each_seed() -> None:
    # c - a = -0.05, 0.04, -0.02: mean -0.01, standard deviation 0.0458; 4.303 * 0.0458 / sqrt(3) = 0.114.
    assert beyond_noise(AFTER["a"], AFTER["c"]) == 0
    # c - b has a mean of 0.09 and the same deviation: not beyond 0.114 either; with five such seeds it would be.
    assert beyond_noise(AFTER["c"], AFTER["b"]) == 0
    assert beyond_noise([*AFTER["c"], 0.85, 0.95], [*AFTER["b"], 0.80, 0.81]) == 1
    # a - b is 0.1 with every seed, far less than either varies in a sweep of many seeds.
    assert beyond_noise(AFTER["a"], AFTER["b"]) == 1
    assert beyond_noise(AFTER["b"], AFTER["a"]) == -1
    assert beyond_noise(AFTER["a"], AFTER["a"]) == 0
    # What rounding makes of the same accuracies is the same with every seed, too.
    assert 0.1 + 0.2 != 0.3
    assert beyond_noise([0.1 + 0.2] * 3, [0.3] * 3) == beyond_noise([0.3] * 3, [0.1 + 0.2] * 3) == 0
    assert beyond_noise([0.3 + 1e-6] * 3, [0.3] * 3) == 1


def test_a_place_is_a_range_that_noise_leaves_open() -> None:
    found = places(AFTER)
    assert found == {"a": (1, 2), "b": (2, 3), "c": (1, 3)}
    assert [between(found[name]) for name in "abc"] == ["1-2", "2-3", "1-3"]
    assert between((4, 4)) == "4"


SUMMARY = {"test": 0.5, "before": 0.5, "worst_decile": 0.5, "up": 10**6, "down": 0}


def write_sweep(folder: Path, **more: Any) -> Path:
    runs = [
        {
            "keys": {"method": name, "seed": seed},
            "summary": {"test": value, "before": value / 2, "worst_decile": 0.5, "up": size * 10**6, "down": 10**6},
        }
        for size, (name, values) in enumerate(AFTER.items())
        for seed, value in enumerate(values)
    ]
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"runs": runs} | more))
    return folder


def test_that_runs_read_different_data_is_said(tmp_path: Path) -> None:
    file = write_sweep(tmp_path / "sweep") / "sweep.json"
    runs = json.loads(file.read_text())["runs"]

    def told(*digests: str | None) -> str:
        each = zip(runs, digests, strict=True)
        file.write_text(json.dumps({"runs": [run | {"about": {"digest": digest}} for run, digest in each]}))
        return page({"X": Ranking.read(file)})

    assert "different data" not in told(*"a" * 9)
    assert "different data" not in told("a", *[None] * 8)
    assert "worst decile 0 of 3. Ranked though runs read different data (SHA-256 a and b)." in told(*"a" * 8, "b")


def test_the_page(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep")
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    lacking = [*runs, {"keys": {"method": "d", "seed": 0}, "summary": None}]
    (folder / "sweep.json").write_text(json.dumps({"runs": lacking}))
    output = tmp_path / "ranking.md"
    done = CliRunner().invoke(floret, ["rank", f"Digits={folder}", "-o", str(output)], catch_exceptions=False)
    assert output.read_text() == done.output
    lines = done.output.splitlines()
    assert lines[0] == "## Digits"
    noise, left_out = lines[2].split(". ")[1:]
    assert noise == "Pairs that differ beyond noise: after 1 of 3, before 1 of 3, worst decile 0 of 3"
    assert left_out == "Left out, since not all of their runs finished: d."
    assert lines[4] == "| method | after | place | before | place | worst decile | place | MB | place |"
    assert lines[6:9] == [
        "| `a` | 91.0 ± 0.8 | 1-2 | 45.5 ± 0.4 | 1-2 | 50.0 ± 0.0 | 1-3 | 1.0 | 1 |",
        "| `c` | 90.0 ± 4.1 | 1-3 | 45.0 ± 2.0 | 1-3 | 50.0 ± 0.0 | 1-3 | 3.0 | 3 |",
        "| `b` | 81.0 ± 0.8 | 2-3 | 40.5 ± 0.4 | 2-3 | 50.0 ± 0.0 | 1-3 | 2.0 | 2 |",
    ]
    assert lines[10:] == [
        "Pairs: mean difference over the seeds, in points, ± half of the 95 % interval by Student's t. Beyond noise is "
        "a paired t test at 95 %; no correction is made for the number of pairs, so of 20 pairs that do not differ one "
        "is expected to be beyond noise.",
        "",
        "| pair | after | beyond noise | before | beyond noise | worst decile | beyond noise |",
        "|---|---|---|---|---|---|---|",
        # The differences of a and c are 5, -4 and 2 points: 4.303 * 4.583 / sqrt(3) = 11.38.
        "| `a` - `c` | +1.00 ± 11.38 | no | +0.50 ± 5.69 | no | +0.00 ± 0.00 | no |",
        "| `a` - `b` | +10.00 ± 0.00 | yes | +5.00 ± 0.00 | yes | +0.00 ± 0.00 | no |",
        "| `c` - `b` | +9.00 ± 11.38 | no | +4.50 ± 5.69 | no | +0.00 ± 0.00 | no |",
        "",
        "* beyond noise, after: `a` above `b`",
        "* beyond noise, before: `a` above `b`",
        "* beyond noise, worst decile: no pair",
    ]


def test_of_many_methods_the_pairs_with_the_best_one_are_shown() -> None:
    after = {name: [0.9 - place / 10, 0.91 - place / 10] for place, name in enumerate("fedcba")}
    for few in (5, 6):
        names = [*after][:few]
        ranking = Ranking((0, 1), {"after": {name: after[name] for name in names}}, dict.fromkeys(names, 1.0), ())
        rows = ranking.pairs().splitlines()
        assert [row.split(" | ")[0] for row in rows if row.startswith("| `")] == (
            [f"| `f` - `{other}`" for other in "edcba"]
            if few == 6
            else [f"| `{one}` - `{other}`" for one, other in combinations("fedcb", 2)]
        )
    # With two seeds there is no interval, and all pairs are named that differ.
    assert rows[2] == "| `f` - `e` | +10.00 | yes |"
    assert rows[-1].startswith(
        "* beyond noise, after: `f` above `e`, `d`, `c`, `b`, `a`; `e` above `d`, `c`, `b`, `a`;"
    )
    said = page({"D": ranking})
    assert "\n\nPairs with the best method after local training: mean difference over the seeds, in points. Bey" in said


def test_a_method_without_a_number_is_not_ranked_by_it(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep")
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    for run in runs:
        if run["keys"] == {"method": "b", "seed": 1}:
            run["summary"]["before"] = None
    (folder / "sweep.json").write_text(json.dumps({"runs": runs}))
    ranking = Ranking.read(folder / "sweep.json")
    assert {name: sorted(values) for name, values in ranking.measures.items()} == {
        "after": ["a", "b", "c"],
        "before": ["a", "c"],
        "worst decile": ["a", "b", "c"],
    }
    assert ranking.table().splitlines()[2:] == [
        "| `a` | 91.0 ± 0.8 | 1-2 | 45.5 ± 0.4 | 1-2 | 50.0 ± 0.0 | 1-3 | 1.0 | 1 |",
        "| `c` | 90.0 ± 4.1 | 1-3 | 45.0 ± 2.0 | 1-2 | 50.0 ± 0.0 | 1-3 | 3.0 | 3 |",
        "| `b` | 81.0 ± 0.8 | 2-3 | - | - | 50.0 ± 0.0 | 1-3 | 2.0 | 2 |",
    ]
    assert ranking.apart("before") == (0, 1)
    assert "| `a` - `b` | +10.00 ± 0.00 | yes | - | - | +0.00 ± 0.00 | no |" in ranking.pairs().splitlines()


def test_the_quantiles_are_those_of_the_t_distribution_or_a_little_more() -> None:
    for freedom in range(1, 400):
        exact = float(stats.t.ppf(0.975, freedom))
        assert -0.0006 < t95(freedom) - exact < (0.0006 if freedom <= 30 else 0.05), freedom


def test_who_sends_a_thousandth_more_has_the_same_place(tmp_path: Path) -> None:
    sent = {"a": 10**6, "b": 1_000_500, "c": 1_100_000}
    runs = [
        {"keys": {"method": name, "seed": seed}, "summary": SUMMARY | {"up": up}}
        for name, up in sent.items()
        for seed in (0, 1)
    ]
    table = Ranking.read(write_sweep(tmp_path / "sweep", runs=runs) / "sweep.json").table()
    places = {line.split("`")[1]: line.split("|")[-2].strip() for line in table.splitlines() if "`" in line}
    assert places == {"a": "1", "b": "1", "c": "3"}


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (None, "is not the sweep.json of a sweep over method and seed"),
        ([{"keys": {"method": "a", "seed": 0, "lr": 0.1}, "summary": None}], "not over lr"),
        ([{"keys": {"method": "a"}, "summary": None}], "over method and seed, its grid has no seed$"),
        ([{"keys": {"seed": 0}, "summary": None}], "over method and seed, its grid has no method$"),
        ([{"keys": {"lr": 0.1}, "summary": None}], "over method and seed, its grid has no method and no seed$"),
        ([{"keys": {"method": "a", "seed": 0}, "summary": {}}], "needs two methods"),
        (
            [{"keys": {"method": m, "seed": s}, "summary": {"test": None}} for m in "ab" for s in (0, 1)],
            "is not the sweep.json of a sweep over method and seed",
        ),
        (
            [{"keys": {"method": m, "seed": s}, "summary": SUMMARY | {"test": math.nan}} for m in "ab" for s in (0, 1)],
            "is not the sweep.json of a sweep over method and seed",
        ),
    ],
)
def test_what_is_no_sweep_over_methods_is_refused_in_a_line(tmp_path: Path, runs: Any, reason: str) -> None:
    folder = write_sweep(tmp_path / "sweep", **({} if runs is None else {"runs": runs}))
    if runs is None:
        (folder / "sweep.json").write_text("{")
    with pytest.raises(FloretError, match=reason) as caught:
        Ranking.read(folder / "sweep.json")
    assert "\n" not in str(caught.value)


def test_names_of_somebody_elses_sweep_are_printable(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep")
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    for run in runs:
        run["keys"]["method"] += "|\x1b]0;owned\x07\ud800"
    runs.append({"keys": {"method": "\x1bd", "seed": 0}, "summary": None})
    (folder / "sweep.json").write_text(json.dumps({"runs": runs}))
    output = tmp_path / "page.md"
    done = CliRunner().invoke(floret, ["rank", f"D={folder}", "-o", str(output)], catch_exceptions=False)
    assert "".join(done.output.split()).isprintable()
    assert done.output == output.read_text()
    assert r"| `a\|?]0;owned??` |" in done.output
    assert "not all of their runs finished: ?d." in done.output


def test_a_folder_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    line = f"{tmp_path}/none/sweep.json: No such file or directory; name the folder that floret sweep wrote"
    for command in (["rank"], ["curve", "lr", "-o", str(tmp_path / "x")]):
        result = CliRunner().invoke(floret, [*command, f"D={tmp_path / 'none'}"])
        assert str(result.exception) == line


def test_an_argument_without_a_name_or_with_that_of_another_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(floret, ["rank", "sweeps/fashion"])
    assert "must be like Fashion-MNIST=sweeps/fashion" in str(result.exception)
    result = CliRunner().invoke(floret, ["rank", f"D={write_sweep(tmp_path / 'sweep')}", "D=sweeps/other"])
    assert "D=sweeps/other: D is given twice" in str(result.exception)


@pytest.mark.parametrize("name", ["no/such/folder.md", "sweep/sweep.json/below.md"])
def test_an_output_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    output = tmp_path / name
    arguments = ["rank", f"D={write_sweep(tmp_path / 'sweep')}", "-o", str(output)]
    monkeypatch.setattr("sys.argv", ["floret", *arguments])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert said.startswith(f"floret: {output}: No")
    assert said.count("\n") == 1
