"""Which methods of a sweep are better than which, beyond what seeds explain."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

from common.durable import read_plain
from common.errors import FloretError, printable
from results.history import is_number
from results.measured import LARGEST
from results.sweep import markdown, unread
from results.text import percent_over_runs

# Two-sided 95 % quantiles of Student's t distribution by degrees of freedom, from 1 on.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# Up to so many degrees of freedom those of the fewest, and beyond.
_T95_UP_TO, _T95_BEYOND = {60: 2.042, 120: 2.000}, 1.980

# What rounding makes of accuracies that are the same: with every seed as much, it would be beyond all noise.
_ROUNDING = 1e-11

# Of so many methods or fewer all pairs are in the table of pairs; of more those with the best method.
_FEW = 5

Values = Mapping[str, Sequence[float]]
Places = tuple[int, int]


@dataclass(frozen=True)
class Ranking:
    """Methods that were run with the same seeds.

    Attributes:
        seeds: in order.
        measures: by name, what each method measured with each seed; larger is better. A method that lacks a number
            for one of the seeds is not there.
        megabytes: up and down together, of all clients and rounds, mean over seeds.
        without: methods that are left out, since a run of theirs did not finish.
        digests: of the data that the runs read, as far as they tell.
    """

    seeds: tuple[int, ...]
    measures: Mapping[str, Values]
    megabytes: Mapping[str, float]
    without: tuple[str, ...]
    digests: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the ranking of a sweep over ``method`` and ``seed`` from its sweep.json.

        Raises:
            FloretError: it cannot be read, varies another key, or fewer than two methods finished with two seeds.
        """
        try:
            runs = json.loads(read_plain(file, LARGEST))["runs"]
            found: dict[str, dict[int, Any]] = {}
            digests: dict[str, set[str]] = {}
            for run in runs:
                keys = dict(run["keys"])
                lacking = [key for key in ("method", "seed") if key not in keys]
                if lacking:
                    lacks = " and no ".join(lacking)
                    raise FloretError(f"{file}: a ranking is of a sweep over method and seed, its grid has no {lacks}")
                method, seed = printable(keys.pop("method")), int(keys.pop("seed"))
                if keys:
                    raise FloretError(f"{file}: a ranking is of a sweep over method and seed, not over {min(keys)}")
                found.setdefault(method, {})[seed] = run["summary"]
                digests.setdefault(method, set()).update(str(d) for d in [run.get("about", {}).get("digest")] if d)
            seeds = tuple(sorted({seed for each in found.values() for seed in each}))
            whole = {name: each for name, each in found.items() if all(each.get(seed) for seed in seeds)}
            values = [v for each in whole.values() for summary in each.values() for v in summary.values()]
            if not all(value is None or is_number(value) for value in values):
                raise ValueError("what a run measured is no number")
            if len(whole) < 2 or len(seeds) < 2:
                raise FloretError(f"{file}: a ranking needs two methods that finished with the same two seeds or more")
            names = {"before": "before", "worst decile": "worst_decile"}
            measures = {"after": {m: [float(each[s]["test"]) for s in seeds] for m, each in whole.items()}}
            measures |= {
                shown: {
                    m: [float(each[s][name]) for s in seeds]
                    for m, each in whole.items()
                    if all(each[s][name] is not None for s in seeds)
                }
                for shown, name in names.items()
            }
            sent = {m: mean((each[s]["up"] + each[s]["down"]) / 1e6 for s in seeds) for m, each in whole.items()}
        except OSError as error:
            raise FloretError(unread(file, error)) from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise FloretError(f"{file}: is not the sweep.json of a sweep over method and seed ({error})") from error
        read = tuple(sorted(set[str]().union(*(digests[method] for method in whole))))
        return cls(seeds, measures, sent, tuple(sorted(found.keys() - whole.keys())), read)

    def table(self) -> str:
        """Return a Markdown table: mean ± standard deviation over seeds, and places; the best mean *after* first."""
        ranges = {name: places(values) for name, values in self.measures.items()}
        # Bytes have no noise: who sends the same has the same place.
        cost = {
            m: 1 + sum(other < own * (1 - 1e-3) for other in self.megabytes.values())
            for m, own in self.megabytes.items()
        }
        texts = [
            [
                f"`{method}`",
                *(
                    text
                    for name, values in self.measures.items()
                    for text in (
                        percent_over_runs(values.get(method, ())),
                        between(ranges[name][method]) if method in values else "-",
                    )
                ),
                f"{self.megabytes[method]:.1f}",
                str(cost[method]),
            ]
            for method in self.methods
        ]
        head = ["method", *(part for name in self.measures for part in (name, "place")), "MB", "place"]
        return markdown(head, texts)

    @property
    def methods(self) -> list[str]:
        """The methods, the best mean *after* first."""
        after = self.measures["after"]
        return sorted(after, key=lambda m: (-mean(after[m]), m))

    def pairs(self) -> str:
        """Return a Markdown table of pairs of methods, the better mean *after* first, and a line on each measure.

        A cell is the mean difference over seeds in points, with half of its 95 % interval where there are three seeds
        or more, and whether it is beyond noise. Of many methods the pairs are those with the best one; the lines name
        of all pairs those that differ beyond noise.
        """
        pairs = list(combinations(self.methods, 2))
        shown = pairs if len(self.methods) <= _FEW else [pair for pair in pairs if pair[0] == self.methods[0]]
        texts = [
            [
                f"`{one}` - `{other}`",
                *(
                    text
                    for values in self.measures.values()
                    for text in _difference(values.get(one), values.get(other))
                ),
            ]
            for one, other in shown
        ]
        head = ["pair", *(part for name in self.measures for part in (name, "beyond noise"))]
        lines = []
        for name, values in self.measures.items():
            better = {
                one: [f"`{other}`" for other in self.methods if _is_better(values, one, other)] for one in self.methods
            }
            said = "; ".join(f"`{one}` above {', '.join(others)}" for one, others in better.items() if others)
            lines.append(f"* beyond noise, {name}: {said or 'no pair'}")
        return markdown(head, texts) + "\n\n" + "\n".join(lines)

    def apart(self, measure: str) -> tuple[int, int]:
        """Return how many pairs of methods differ beyond noise, and how many pairs there are."""
        pairs = list(combinations(self.measures[measure].values(), 2))
        return sum(beyond_noise(one, other) != 0 for one, other in pairs), len(pairs)


def _difference(one: Sequence[float] | None, other: Sequence[float] | None) -> tuple[str, str]:
    """Return the mean difference of accuracies in [0, 1] in points, and whether it is beyond noise, as texts."""
    if one is None or other is None:
        return "-", "-"
    differences = [100 * (a - b) for a, b in zip(one, other, strict=True)]
    half = f" ± {half_interval(differences):.2f}" if len(differences) > 2 else ""
    return f"{mean(differences):+.2f}{half}", "yes" if beyond_noise(one, other) else "no"


def _is_better(values: Values, one: str, other: str) -> bool:
    return one != other and {one, other} <= values.keys() and beyond_noise(values[one], values[other]) > 0


def beyond_noise(one: Sequence[float], other: Sequence[float]) -> int:
    """Return 1 if ``one`` is larger beyond noise, -1 if it is smaller, else 0.

    A paired t test over seeds, two-sided at 95 %, without a correction for how many pairs are compared: with the same
    seed, methods have the same clients, splits and initial weights, so their differences vary less than their values.
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    middle = mean(differences)
    return 0 if abs(middle) <= max(half_interval(differences), _ROUNDING) else int(math.copysign(1, middle))


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean of two values or more, by Student's t."""
    return t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with so many degrees of freedom, or a little more than it."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return next((quantile for most, quantile in _T95_UP_TO.items() if freedom <= most), _T95_BEYOND)


def places(values: Values) -> dict[str, Places]:
    """Return for each method the first and the last place that it may have: better are those beyond noise alone."""
    found = {}
    for method, own in values.items():
        signs = [beyond_noise(other, own) for name, other in values.items() if name != method]
        found[method] = (1 + signs.count(1), len(values) - signs.count(-1))
    return found


def between(range_: Places) -> str:
    """Return places as text: ``3`` or ``3-9``."""
    first, last = range_
    return str(first) if first == last else f"{first}-{last}"


def page(rankings: Mapping[str, Ranking]) -> str:
    """Return a Markdown page with a section for each ranking, by name."""
    parts = []
    for name, ranking in rankings.items():
        pairs = [
            f"{measure} {differ} of {total}"
            for measure in ranking.measures
            for differ, total in (ranking.apart(measure),)
        ]
        seeds = ", ".join(map(str, ranking.seeds))
        over = f"mean ± standard deviation (population) over seeds {seeds}"
        about = f"{len(ranking.megabytes)} methods, {over}. Pairs that differ beyond noise: {', '.join(pairs)}."
        if ranking.without:
            about += f" Left out, since not all of their runs finished: {', '.join(ranking.without)}."
        if len(ranking.digests) > 1:
            said = printable(" and ".join(ranking.digests))
            about += f" Ranked though runs read different data (SHA-256 {said})."
        few = len(ranking.methods) <= _FEW
        interval = ", ± half of the 95 % interval by Student's t" if len(ranking.seeds) > 2 else ""
        differences = (
            f"{'Pairs' if few else 'Pairs with the best method after local training'}: mean difference over the seeds, "
            f"in points{interval}. Beyond noise is a paired t test at 95 %; no correction is made for the number of "
            "pairs, so of 20 pairs that do not differ one is expected to be beyond noise."
        )
        parts.append(f"## {name}\n\n{about}\n\n{ranking.table()}\n\n{differences}\n\n{ranking.pairs()}")
    return "\n\n".join(parts) + "\n"
