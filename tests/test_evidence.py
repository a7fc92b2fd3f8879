"""The evidence: what results say of the papers' claims, as a front page's section, a picture and a page of claims."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from cli.main import floret
from common.errors import FloretError
from results.evidence import BEGIN, END, Evidence
from results.evidence_chart import picture
from results.experiment import Data, Experiment, PlannedRun
from results.history import Traffic
from results.measured import Accuracies, MeasuredRun
from results.tables import ExperimentResults
from tests.conftest import PATIENCE
from tests.harness import ROOT

Cells = dict[tuple[str, str], list[float]]

TABLE: dict[str, Any] = {
    "title": "Small, Table 1: of nothing",
    "paper": "Nobody, 2024",
    "table": 1,
    "measure": {"when": "after", "last-rounds": 1},
    "clients": 4,
    "own": "pfakd",
    "config": {"dataset": "digits", "rounds": 10},
    "columns": [{"name": "A", "config": {}}, {"name": "B", "config": {}}],
    "rows": [
        {"name": "Base", "config": {"method": "fedavg"}, "when": "before", "reported": [80, 70]},
        {"name": "Other", "config": {"method": "fedper"}, "reported": [82, 72]},
        {"name": "Mine", "config": {"method": "pfakd"}, "reported": [84, 75]},
    ],
    "claims": [
        {"text": "Mine is best", "higher": "Mine", "than": ["Base", "Other"]},
        {"text": "A: 3 above Base", "higher": "Mine", "than": ["Base"], "columns": ["A"], "by": 3},
        {"text": "B: above Other", "higher": "Mine", "than": ["Other"], "columns": ["B"]},
    ],
}
# Two seeds; Other was not run in B.
CELLS: Cells = {
    ("Base", "A"): [0.50, 0.54],
    ("Other", "A"): [0.56, 0.50],
    ("Mine", "A"): [0.57, 0.55],
    ("Base", "B"): [0.60, 0.60],
    ("Mine", "B"): [0.58, 0.60],
}
UNDECIDED = "undecided: seeds differ, held in their mean"


def tables(folder: Path, **more: dict[str, Any]) -> Path:
    """Write the table ``small``, and others with these changes; return their folder."""
    place = folder / "tables"
    place.mkdir(exist_ok=True)
    for name, changes in {"small": dict[str, Any](), **more}.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(TABLE | changes), encoding="utf-8")
    return place


def measured(place: PlannedRun, value: float, when: str) -> MeasuredRun:
    """Return a run that measured ``value`` when its row is measured, and something else at the other moment."""
    other = "before" if when == "after" else "after"
    accuracies = {when: Accuracies(value, value, value, value, 0.0), other: Accuracies(0.9, 0.9, 0.9, 0.9, 0.0)}
    about = {"commit": "c", "machine": {"cpus": 2, "cpu": "", "gpus": []}, "versions": {}, "started": "", "resumed": 0}
    curve = ((1, value, value),)
    about |= {"federation-config": "", "config": dict(place.spec.keys), "file": None, "digest": None}
    return MeasuredRun(accuracies, curve, 4, None, Traffic(1, 2), 3.0, 0, about)


def write(
    folder: Path, cells: Cells = CELLS, scale: float = 1.0, variant: str = "", keys: Mapping[str, Any] | None = None
) -> Path:
    """Write a file of results of the table ``small`` as ``floret reproduce`` does, runs with ``keys``; return it."""
    experiment = Experiment.read(folder / "tables" / "small.yaml")
    every = experiment.planned_runs([0, 1, 2], scale, Data("", {}, False), "", keys or {})
    planned = [one for one in every if one.seed < len(cells.get((one.row, one.column), []))]
    runs = {one.key: measured(one, cells[one.row, one.column][one.seed], experiment.when(one.row)) for one in planned}
    results = ExperimentResults(experiment, scale, runs, tuple(planned), {})
    results.write(folder)
    path = folder / f"{results.stem}.json"
    return path.rename(path.with_stem(f"{path.stem}-{variant}")) if variant else path


def rows(evidence: Evidence) -> list[list[str]]:
    """Return the cells of the table of claims."""
    lines = [line for line in evidence.claims().splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def test_a_folder_without_results_gets_no_page(tmp_path: Path) -> None:
    place = tables(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.json").write_text("{}")
    with pytest.raises(FloretError, match=r"mine: has no JSON file that floret reproduce wrote; name the folder of"):
        Evidence.read(tmp_path / "mine", place, ROOT)


def test_margins_are_those_of_the_numbers(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path)
    evidence = Evidence.read(tmp_path, place, ROOT)
    # A: means 52, 53, 56: 3 above Other, by seed 1 and 5; the paper has 84 - 82.
    # B: 59 against 60; the paper has 75 - 70, since Other was not run.
    assert rows(evidence) == [
        [
            *("[Small, Table 1](small.md)", "Mine is best", "full size; 2 of 2 columns; 1 to 2 of 2 rivals; 2 seeds"),
            *("+2.00 to +5.00", "-1.00 to +3.00", "**held in 1 of 2 columns**"),
        ],
        [
            *("[Small, Table 1](small.md)", "A: 3 above Base", "full size; A; 2 seeds"),
            *("+4.00", "+4.00 (+1.00 to +7.00)", f"**{UNDECIDED}**"),
        ],
    ]
    assert evidence.summary() == (
        "Of 1 tables of 1 papers, 1 have runs, 1 of them at full size. Of 3 claims, at full size 2 are judged (0 held, "
        "0 held so far, 0 not held, 1 undecided, 1 mixed); scaled down none is judged."
    )
    (group,) = evidence.groups()
    assert group.says() == (
        "Small, Table 1, full size: A: reported +2.00, ours +3.00 (+1.00 to +5.00), 2 of 2 rivals; "
        "B: reported +5.00, ours -1.00 (-2.00 to +0.00), 1 of 2 rivals."
    )


def test_a_claim_needs_its_least_margin(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path, CELLS | {("Mine", "A"): [0.54, 0.55]})
    line = rows(Evidence.read(tmp_path, place, ROOT))[1]
    assert line[1:2] + line[4:] == [
        "A: 3 above Base",
        "+2.50 (+1.00 to +4.00)",
        f"**{UNDECIDED.replace('held', 'not held')}**",
    ]


def test_three_seeds_give_an_interval(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path, {("Base", "A"): [0.5, 0.5, 0.5], ("Mine", "A"): [0.54, 0.55, 0.57]})
    # Leads 4, 5 and 7: mean 5.333, standard deviation 1.5275; 4.303 * 1.5275 / sqrt(3) = 3.795.
    assert rows(Evidence.read(tmp_path, place, ROOT))[1][4] == "+5.33 ±3.79 (+4.00 to +7.00)"


def test_a_margin_is_judged_to_a_hundredth_and_one_above_by_less_is_said(tmp_path: Path) -> None:
    place = tables(tmp_path)
    for value, outcome in (
        (0.52996, "**held**"),
        (0.52994, "**not held: above, by less**"),
        (0.5, "**not held**"),
        (0.49, "**not held**"),
    ):
        write(tmp_path, {("Base", "A"): [0.5], ("Mine", "A"): [value]})
        assert rows(Evidence.read(tmp_path, place, ROOT))[1][5] == outcome


def test_a_claim_that_a_column_refutes_is_not_undecided(tmp_path: Path) -> None:
    place = tables(tmp_path)
    # A is held with one seed of two, B with none.
    write(tmp_path, CELLS | {("Mine", "A"): [0.51, 0.56], ("Mine", "B"): [0.5, 0.5]})
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert rows(evidence)[0][5] == "**undecided in 1 of 2 columns**"
    assert "2 are judged (0 held, 0 held so far, 2 not held, 0 undecided, 0 mixed);" in evidence.summary()


def test_of_several_columns_some_are_undecided(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path, CELLS | {("Mine", "B"): [0.61, 0.58]})
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert rows(evidence)[0][5] == "**held in 1, undecided in 1 of 2 columns**"
    assert "2 are judged (0 held, 0 held so far, 0 not held, 2 undecided, 0 mixed);" in evidence.summary()


def test_a_column_that_is_held_in_the_mean_alone_is_not_counted_as_held(tmp_path: Path) -> None:
    place = tables(tmp_path)
    # B: means 60 and 61, by seed -1 and +3. A is held with both seeds.
    write(tmp_path, CELLS | {("Mine", "A"): [0.57, 0.56], ("Mine", "B"): [0.59, 0.63]})
    assert rows(Evidence.read(tmp_path, place, ROOT))[0][5] == "**held in 1, undecided in 1 of 2 columns**"


def test_a_claim_is_held_so_far_until_every_rival_was_run(tmp_path: Path) -> None:
    place = tables(tmp_path)
    one: Cells = {("Base", "A"): [0.5], ("Mine", "A"): [0.6]}
    write(tmp_path, one)
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert [line[5] for line in rows(evidence)[:2]] == ["**held so far**", "**held**"]
    said = "at full size 2 are judged (1 held, 1 held so far, 0 not held, 0 undecided, 0 mixed);"
    assert said in evidence.summary()
    # All rivals, in one of its two columns.
    write(tmp_path, one | {("Other", "A"): [0.5]})
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert rows(evidence)[0][5] == "**held so far**"
    assert said in evidence.summary()
    whole: Cells = {("Base", "B"): [0.5], ("Other", "B"): [0.5], ("Mine", "B"): [0.6]}
    write(tmp_path, one | whole)
    # It holds in every column, in one of them against some rivals.
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert rows(evidence)[0][5] == "**held so far**"
    assert "at full size 3 are judged (2 held, 1 held so far, 0 not held, 0 undecided, 0 mixed);" in evidence.summary()
    write(tmp_path, one | whole | {("Mine", "B"): [0.4]})
    assert rows(Evidence.read(tmp_path, place, ROOT))[0][5] == "**held so far in 1 of 2 columns**"
    write(tmp_path, one | whole | {("Other", "A"): [0.5]})
    assert rows(Evidence.read(tmp_path, place, ROOT))[0][5] == "**held**"


def test_a_claim_that_holds_at_one_scale_alone_is_mixed(tmp_path: Path) -> None:
    place = tables(tmp_path)
    one: Cells = {("Base", "A"): [0.5], ("Mine", "A"): [0.6]}
    write(tmp_path, one, scale=0.1)
    held = "scaled down 2 are judged (1 held, 1 held so far, 0 not held, 0 undecided, 0 mixed)."
    assert Evidence.read(tmp_path, place, ROOT).summary().endswith(held)
    write(tmp_path, one | {("Mine", "A"): [0.4]}, scale=0.5)
    mixed = "scaled down 2 are judged (0 held, 0 held so far, 0 not held, 0 undecided, 2 mixed)."
    assert Evidence.read(tmp_path, place, ROOT).summary().endswith(mixed)
    # Mixed at one scale, A held and B not, and undecided at another.
    write(tmp_path, one | {("Base", "B"): [0.5], ("Mine", "B"): [0.4]}, scale=0.1)
    write(tmp_path, {("Base", "A"): [0.5, 0.5], ("Mine", "A"): [0.4, 0.7]}, scale=0.5)
    assert "1 undecided, 1 mixed)" in Evidence.read(tmp_path, place, ROOT).summary()


def test_a_claim_that_a_scale_refutes_is_not_undecided(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path, {("Base", "A"): [0.5], ("Mine", "A"): [0.4]}, scale=0.5)
    write(tmp_path, {("Base", "A"): [0.5, 0.5], ("Mine", "A"): [0.4, 0.7]}, scale=0.1)
    not_held = "scaled down 2 are judged (0 held, 0 held so far, 2 not held, 0 undecided, 0 mixed)."
    assert Evidence.read(tmp_path, place, ROOT).summary().endswith(not_held)
    # It holds at a third scale.
    write(tmp_path, {("Base", "A"): [0.5], ("Mine", "A"): [0.6]}, scale=0.2)
    mixed = "scaled down 2 are judged (0 held, 0 held so far, 0 not held, 0 undecided, 2 mixed)."
    assert Evidence.read(tmp_path, place, ROOT).summary().endswith(mixed)


def test_a_scaled_run_is_listed_where_no_full_one_judges(tmp_path: Path) -> None:
    place = tables(tmp_path)
    everything = CELLS | {("Other", "B"): [0.1]}
    full = write(tmp_path)
    write(tmp_path, {cell: values[:1] for cell, values in CELLS.items()}, scale=0.1, variant="common-start")
    write(tmp_path, everything, scale=0.1)
    write(tmp_path, scale=0.5)
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert [line[1:3] for line in rows(evidence)] == [
        ["Mine is best", "full size; 2 of 2 columns; 1 to 2 of 2 rivals; 2 seeds"],
        ["A: 3 above Base", "full size; A; 2 seeds"],
        ["B: above Other", "scale 0.1; B; 1 seed"],
    ]
    full.unlink()
    found = [(line[0], line[2].split("; ")[0], line[5]) for line in rows(Evidence.read(tmp_path, place, ROOT))[3:6]]
    # Not in bold, since they are not at full size.
    assert found == [
        ("[Small, Table 1](small-scale0.5.md)", "scale 0.5", UNDECIDED),
        ("[Small, Table 1](small-scale0.1.md)", "scale 0.1", UNDECIDED),
        ("[Small, Table 1](small-scale0.1-common-start.md)", "scale 0.1, common start", "held"),
    ]


def test_the_picture_shows_the_largest_run_of_a_table(tmp_path: Path) -> None:
    place = tables(tmp_path, **{"tiny-table1": {"title": "Tiny, Table 1: of less"}})

    def shown() -> list[tuple[str, bool]]:
        return [(group.title, group.full) for group in Evidence.read(tmp_path, place, ROOT).groups()]

    write(tmp_path, scale=0.1, variant="own-keys")
    write(tmp_path, scale=0.5, variant="own-keys")
    assert shown() == [("Small, Table 1, scale 0.5, own keys", False)]
    # What has the table's own keys comes first, however small.
    write(tmp_path, scale=0.1)
    assert shown() == [("Small, Table 1, scale 0.1", False)]
    write(tmp_path, scale=0.5)
    write(tmp_path)
    assert shown() == [("Small, Table 1, full size", True)]


def test_runs_with_other_keys_are_not_those_of_the_table(tmp_path: Path) -> None:
    # Two rows run the paper's own method: the last one is what the picture shows.
    parts = {"name": "Other", "config": {"method": "pfakd"}, "reported": [82, 72]}
    place = tables(tmp_path, small={"rows": [TABLE["rows"][0], parts, TABLE["rows"][2]]})
    write(tmp_path, variant="own-keys")
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert [line[2].split("; ")[0] for line in rows(evidence)] == ["full size, own keys"] * 2
    assert [line[5] for line in rows(evidence)] == [
        "held in 1 of 2 columns",
        UNDECIDED,
    ]
    assert evidence.summary().startswith(
        "Of 1 tables of 1 papers, 1 have runs, 0 of them at full size. Of 3 claims, at"
    )
    assert evidence.summary().endswith("at full size none is judged; scaled down none is judged.")
    (group,) = evidence.groups()
    assert not group.full
    assert [line.ours for line in group.lines] == pytest.approx([3.0, -1.0])


def test_a_row_that_the_paper_does_not_have_is_no_rival(tmp_path: Path) -> None:
    extra = {"name": "Other", "config": {"method": "fedper"}, "reported": [None, None]}
    place = tables(tmp_path, small={"rows": [TABLE["rows"][0], extra, TABLE["rows"][2]], "claims": []})
    write(tmp_path)
    (group,) = Evidence.read(tmp_path, place, ROOT).groups()
    # In A the other row has 53 and the base 52.
    assert [line.ours for line in group.lines] == pytest.approx([4.0, -1.0])
    assert [line.rivals for line in group.lines] == ["1 of 1 rivals"] * 2


def test_a_line_for_each_paper(tmp_path: Path) -> None:
    """The largest run of its first table, margins over all rivals, and how its claims ended."""
    more: dict[str, dict[str, Any]] = {"tiny-table1": {"title": "Tiny, Table 1: of less"}, "tiny-table2": {"table": 2}}
    place = tables(tmp_path, **more)
    write(tmp_path, variant="own-keys")
    write(tmp_path)
    write(tmp_path, scale=0.5)
    (tmp_path / "small.md").write_text("")
    assert Evidence.read(tmp_path, place, ROOT).papers()[2:] == [
        "| [Small](small.md) | [Table 1](small.md); full size; 2 of 2 columns; 1 to 2 of 2 rivals; 2 seeds "
        "| +2.00 to +5.00 | -1.00 to +3.00 | 1 undecided, 1 mixed, of 3 |",
        "| Tiny | not run | - | - | none judged, of 6 |",
    ]


def test_what_is_missing_for_the_line_of_a_paper_is_told(tmp_path: Path) -> None:
    place = tables(tmp_path)

    def line(cells: Cells, **options: Any) -> str:
        path = write(tmp_path, cells, **options)
        (told,) = Evidence.read(tmp_path, place, ROOT).papers()[2:]
        path.unlink()
        return told.split(" | ")[1]

    assert line({("Base", "A"): [0.5]}) == "[Table 1](small.md); full size; Mine was not run"
    alone: Cells = {("Mine", "A"): [0.5], ("Base", "B"): [0.5]}
    said = "Mine was run in no column with a seed of a rival"
    assert line(alone) == f"[Table 1](small.md); full size; {said}"
    assert line(CELLS, variant="own-keys") == "run with other keys alone"
    nameless = TABLE.copy()
    del nameless["own"]
    (place / "small.yaml").write_text(yaml.safe_dump(nameless), encoding="utf-8")
    assert line(CELLS) == "[Table 1](small.md); full size; its file does not name the paper's own method (own)"


def test_a_scale_of_more_digits_than_a_name_has_is_read(tmp_path: Path) -> None:
    place = tables(tmp_path)
    assert write(tmp_path, scale=0.3333333).name == "small-scale0.333333.json"
    assert "scaled down 2 are judged" in Evidence.read(tmp_path, place, ROOT).summary()


def test_runs_with_other_keys_are_known_by_their_configs(tmp_path: Path) -> None:
    place = tables(tmp_path)
    path = write(tmp_path, keys={"rounds": 30, "momentum": 0.5})
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert {line[2].split("; ")[0] for line in rows(evidence)} == {"all samples, with other momentum, rounds"}
    for keys, size in (
        ({"max-samples": 500}, "all rounds, with other max-samples"),
        ({"rounds": 30, "max-samples": 500}, "another size, with other max-samples, rounds"),
        ({"momentum": 0.5}, "full size, with other momentum"),
    ):
        write(tmp_path, keys=keys)
        assert {line[2].split("; ")[0] for line in rows(Evidence.read(tmp_path, place, ROOT))} == {size}
    write(tmp_path, keys={"rounds": 30, "momentum": 0.5})
    assert evidence.summary().endswith("at full size none is judged; scaled down none is judged.")
    (result,) = evidence.results
    page = result.results.markdown().splitlines()
    assert "- With other keys than the table's: momentum = 0.5, rounds = 30." in page
    assert {line for line in page if line.startswith("## ")} >= {"## A, with other keys", "## B, with other keys"}
    # Where data are, and what came later and had its default, makes no difference.
    write(tmp_path, keys={"dataset": "npz", "data-dir": "elsewhere"})
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["config"]["download"]
    path.write_text(json.dumps(content), encoding="utf-8")
    (result,) = Evidence.read(tmp_path, place, ROOT).results
    assert (result.at_full_size, result.results.other_keys) == (True, {})


def test_runs_with_another_number_of_clients_are_not_those_of_the_table(tmp_path: Path) -> None:
    place = tables(
        tmp_path, small={"columns": [{"name": "A", "config": {}, "clients": 6}, {"name": "B", "config": {}}]}
    )
    path = write(tmp_path)

    def others(federations: dict[str, str], clients: int = 4) -> dict[str, str]:
        content = json.loads(path.read_text(encoding="utf-8"))
        for run in content["runs"]:
            if run["status"] == "done":
                run |= {"federation-config": federations[run["column"]], "clients": clients}
        path.write_text(json.dumps(content), encoding="utf-8")
        (result,) = Evidence.read(tmp_path, place, ROOT).results
        assert result.at_full_size == (not result.results.other_keys)
        return dict(result.results.other_keys)

    own = {"A": "num-supernodes=6 client-resources-num-cpus=1", "B": "num-supernodes=4"}
    assert others(own) == {}
    assert others(own | {"B": "num-supernodes=20"}) == {"num-supernodes": "20"}
    assert others(own | {"A": "client-resources-num-cpus=1 num-supernodes=4"}) == {"num-supernodes": "4"}
    assert "with other num-supernodes" in Evidence.read(tmp_path, place, ROOT).claims()
    # Where the federation config does not say it, the run does.
    assert others({"A": "num-supernodes=6", "B": ""}) == {}
    assert others({"A": "num-supernodes=6", "B": ""}, clients=7) == {"num-supernodes": "7"}


def test_a_page_says_of_which_runs_replies_were_refused(tmp_path: Path) -> None:
    tables(tmp_path)
    path = write(tmp_path)
    assert "refused" not in path.with_suffix(".md").read_text(encoding="utf-8")
    content = json.loads(path.read_text(encoding="utf-8"))
    for run in content["runs"]:
        if (run["row"], run["seed"]) == ("Mine", 0):
            run["refused"] = 7
    path.write_text(json.dumps(content), encoding="utf-8")
    (result,) = Evidence.read(tmp_path, tmp_path / "tables", ROOT).results
    said = "- Replies that were refused, and so are in no aggregate: 7 of Mine, A, seed 0; 7 of Mine, B, seed 0."
    assert said in result.results.markdown().splitlines()


def test_tables_without_runs_and_without_judged_claims(tmp_path: Path) -> None:
    place = tables(tmp_path, other={"title": "Other, Table 9: of more"}, silent={"claims": []})
    write(tmp_path, {("Base", "A"): [0.5]})
    write(tmp_path, scale=0.1).rename(tmp_path / "small-fit.json")
    (tmp_path / "notes.json").write_text("not of a table")
    evidence = Evidence.read(tmp_path, place, ROOT)
    assert rows(evidence) == [
        [
            *("[Small, Table 1](small.md), [fit](small-fit.md)", "Mine is best; and 2 more"),
            *("-", "-", "-", "run, but no claim can be judged"),
        ],
        ["[Other, Table 9](tables/other.yaml)", "Mine is best; and 2 more", "-", "-", "-", "not run"],
        ["[Small, Table 1](tables/silent.yaml)", "none that a number can judge", "-", "-", "-", "not run"],
    ]
    assert evidence.groups() == []
    evidence.write()
    assert ElementTree.parse(tmp_path / "evidence.svg").getroot().get("width") == "800"


def test_the_rest_of_the_page_is_kept(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path)
    page = tmp_path / "README.md"
    floret.main(["evidence", str(tmp_path), "--experiments", str(place)], standalone_mode=False)
    assert page.read_text(encoding="utf-8") == f"# Results\n\n{Evidence.read(tmp_path, place, ROOT).section()}\n"
    page.write_text(f"# Mine\n\nabove\n\n{BEGIN}\nwas here\n{END}\n\nbelow, β\n", encoding="utf-8")
    Evidence.read(tmp_path, place, ROOT).write()
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Mine\n\nabove\n\n{BEGIN}\n\nOf 1 tables")
    assert text.endswith(f"\n\n{END}\n\nbelow, β\n")
    assert "was here" not in text
    assert "](claims.md)" in text
    assert (tmp_path / "claims.md").read_text(encoding="utf-8") == Evidence.read(tmp_path, place, ROOT).claims()
    Evidence.read(tmp_path, place, ROOT).write()
    assert page.read_text(encoding="utf-8") == text
    for wrong in ("no comments", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{END}", f"{BEGIN}{BEGIN}{END}"):
        page.write_text(wrong, encoding="utf-8")
        with pytest.raises(FloretError, match=r"README\.md: must have each of these lines once"):
            Evidence.read(tmp_path, place, ROOT).write()
        assert page.read_text(encoding="utf-8") == wrong


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    place = tables(tmp_path)
    path = write(tmp_path)
    good = path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "cli.main", "evidence", str(tmp_path), "--experiments", str(place)]

    def told(text: str, name: str = "small.json") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(FloretError) as error:
            Evidence.read(tmp_path, place, ROOT)
        (tmp_path / name).unlink()
        line = str(error.value)
        assert line.startswith(f"{tmp_path / name}: ")
        assert "\n" not in line
        return line

    assert "is no file of results (JSONDecodeError" in told(good[:-100])
    assert "an accuracy, or one of its curve, is no number from 0 to 1" in told(
        re.sub(r'"window": 0\.\d+', '"window": "high"', good)
    )
    assert "is not of this version's format" in told(good.replace('"format": 2', '"format": 1'))
    assert "has a run of Base, Z, which is no cell of small" in told(good.replace('"column": "A"', '"column": "Z"'))
    assert "has results of small at scale 1.0; its name must begin" in told(good, "small-scale0.1.json")
    twice = json.loads(good)
    twice["runs"].append(twice["runs"][0])
    assert "has the run of Base, A, seed 0 twice" in told(json.dumps(twice))

    path.write_text(good[:100], encoding="utf-8")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"floret: {path}: is no file of results")
    with pytest.raises(FloretError, match="has no file of a table"):
        Evidence.read(tmp_path, tmp_path, ROOT)


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    place = tables(tmp_path)
    write(tmp_path)
    write(tmp_path, scale=0.1)
    Evidence.read(tmp_path, place, ROOT).write()
    first = (tmp_path / "evidence.svg").read_bytes()
    command = [sys.executable, "-m", "cli.main", "evidence", str(tmp_path), "--experiments", str(place)]
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=env, check=True)
    assert "Of 1 tables of 1 papers" in told.stdout
    assert (tmp_path / "evidence.svg").read_bytes() == first
    root = ElementTree.fromstring(first)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = root.findtext("{http://www.w3.org/2000/svg}desc") or ""
    assert [line.split(": ")[0] for line in text.splitlines()] == ["Small, Table 1, full size"]


def test_the_front_page_says_what_the_results_say() -> None:
    folder = ROOT / "docs" / "results"
    evidence = Evidence.read(folder, ROOT / "experiments", ROOT)
    assert (folder / "README.md").read_text(encoding="utf-8") == evidence.page(), "run `floret evidence`"
    assert (folder / "claims.md").read_text(encoding="utf-8") == evidence.claims(), "as above"
    # Another matplotlib may draw other bytes; the numbers are the same.
    kept, now = (folder / "evidence.svg").read_text(encoding="utf-8"), picture(evidence.groups())
    name = "{http://www.w3.org/2000/svg}desc"
    assert ElementTree.fromstring(kept).findtext(name) == ElementTree.fromstring(now).findtext(name), "as above"
