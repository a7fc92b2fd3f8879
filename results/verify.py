"""Runs of a file of results, made again: are all numbers the same, bit for bit, and if not, what else is not?"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError, FloretError
from common.resources import count_gpus
from results.experiment import Data, PlannedRun
from results.history import Json
from results.measured import ENVIRONMENT, Accuracies, MeasuredRun, loaded
from results.runs import Outcome, RunSpec, clients_alone, without_places

_WHENS = ("before", "after")
_WANTED = "a JSON file that floret reproduce or floret fit wrote, such as docs/results/pfakd-table1.json"


@dataclass(frozen=True)
class Recorded:
    """A run of a file of results.

    Attributes:
        place: its row, column and seed, and the run to make; before ``at``, with the data where they were then.
        run: what the file says of it.
        window: number of rounds that were averaged.
    """

    place: PlannedRun
    run: MeasuredRun
    window: int

    @property
    def kernels(self) -> str:
        """The kernels that it was made with, one of ``common.kernels.KERNELS``."""
        return self.run.kernels

    @classmethod
    def read(cls, file: Path) -> list[Self]:
        """Return the runs of a file that are done, in its order.

        Args:
            file: of results, as ``floret reproduce`` and ``floret fit`` write them.

        Raises:
            FloretError: the file has no runs, or is something else.
        """
        content, runs = loaded(file, advice=f"name {_WANTED}")
        if not content:
            raise FloretError(f"{file}: no such file; name {_WANTED}")
        if not runs:
            raise FloretError(f"{file}: has no run that is done")
        return [
            cls(
                PlannedRun(
                    about["row"],
                    about["column"],
                    about["seed"],
                    RunSpec(run.about["config"], run.about["federation-config"]),
                ),
                run,
                content["window"],
            )
            for about, run in runs
        ]

    def at(self, data: Data) -> Self:
        """Return the same with a run to make here: where its data are, and without GPUs if there are none.

        Raises:
            ConfigError: it read an npz file, and not exactly one is given; or it did not, and one is given in its
                place.
        """
        config = self.run.about["config"]
        name = config["dataset"]
        if name == "npz":
            files = [place for place in data.single.values() if place.endswith(".npz")]
            if len(files) != 1:
                read = self.run.about["file"] or "cifar10.npz"
                raise ConfigError(
                    f"--data: the run {self.place.label} read an npz file; give one, such as cifar10={read}, or choose "
                    "other runs with --only"
                )
            where = {"data-dir": files[0]}
        else:
            where = data.added_to({"dataset": name})
            if where["dataset"] != name:
                raise ConfigError(
                    f"--data {name}={where['data-dir']}: the run {self.place.label} read {name} itself; give its folder"
                )
        federation, device = self.place.spec.federation, {}
        if not count_gpus():
            federation = clients_alone(federation)
            device = {"device": "cpu"} if str(config.get("device", "")).startswith("cuda") else {}
        # Where a run was does not count: a file may come from anywhere, and what is there is the user's.
        spec = RunSpec({**without_places(config), **where, **device, "download": data.download}, federation)
        return replace(self, place=replace(self.place, spec=spec))


@dataclass(frozen=True)
class Comparison:
    """A run beside the same run made again.

    Attributes:
        compared: how many numbers the file has.
        first: the first round that differs, with the old and the new accuracies, a text; empty if none does.
        differences: a text for each number that differs over rounds: its name, old and new.
        elsewhere: what of data file, device, commit, machine and versions is not the same, a text each.
        same_data: whether both tell which content their data had, and had the same.
    """

    compared: int
    first: str
    differences: tuple[str, ...]
    elsewhere: tuple[str, ...]
    same_data: bool

    @classmethod
    def of(cls, recorded: Recorded, outcome: Outcome) -> Self:
        """Compare every number of a run that the file has, but its seconds: curve, accuracies, counts and bytes."""
        old, history = recorded.run, outcome.run.history
        lines = {line.round: line for line in history.rounds}
        first, compared = "", 0
        for number, *values in old.curve:
            line = lines.get(number)
            again = [line.accuracy(when).mean if line else None for when in _WHENS]
            rounded = [None if value is None else round(value, 4) for value in again]
            compared += sum(value is not None for value in values)
            different = any(value is not None and value != new for value, new in zip(values, rounded, strict=True))
            if different and not first:
                first = f"round {number}: {_percents(values)} then, {_percents(rounded)} now, before and after training"
        pairs = [
            (f"{name}, {when} training", value, asdict(Accuracies.of(history, when, recorded.window))[name])
            for when in _WHENS
            for name, value in asdict(old.accuracies[when]).items()
        ]
        pairs += [("clients", old.clients, len(outcome.run.client_names()))]
        pairs += [("samples", old.samples, outcome.run.samples)]
        pairs += [("refused replies", old.refused, outcome.run.figures.refused)]
        sent = outcome.run.figures.bytes
        pairs += [("bytes up", old.bytes.up, sent.up), ("bytes down", old.bytes.down, sent.down)]
        known = [(name, value, new) for name, value, new in pairs if value is not None]
        return cls(
            compared=compared + len(known),
            first=first,
            differences=tuple(f"{name}: {value} then, {new} now" for name, value, new in known if value != new),
            elsewhere=tuple(_elsewhere(old.about, outcome.about)),
            same_data=old.about["digest"] is not None and old.about["digest"] == outcome.about["digest"],
        )

    @property
    def same(self) -> bool:
        """Whether all numbers are the same, bit for bit."""
        return not self.first and not self.differences

    def __str__(self) -> str:
        """Return the outcome, and what is not the same, a line each."""
        if self.same:
            head = f"agrees: {self.compared} numbers are the same, bit for bit"
        else:
            head = f"differs: {self.first or 'not in any round that the file has'}"
        alike = "commit, machine and versions are the same" + (
            ", and the data" if self.same_data else ": compare the data"
        )
        why = self.elsewhere or (alike,)
        return "\n".join([head, *self.differences, *(self.elsewhere if self.same else why)])


def picked(recorded: Sequence[Recorded], count: int, seed: int) -> list[Recorded]:
    """Return ``count`` runs at random, or all if there are no more; the same ones for the same seed."""
    return random.Random(seed).sample(list(recorded), min(count, len(recorded)))


def _elsewhere(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    says: dict[str, Callable[[Any], Json]] = {"commit": lambda value: {"commit": value}}
    what, key = ("SHA-256 of the data", "digest") if old["digest"] and new["digest"] else ("data", "file")
    found = [f"{what}: {old[key]} then, {new[key]} now"] if old[key] and old[key] != new[key] else []
    then, now = (about["config"].get("device") for about in (old, new))
    found += [f"device: {then} then, {now} now"] if then and then != now else []
    for key in ENVIRONMENT:
        had, has = (says.get(key, dict)(about[key]) for about in (old, new))
        found += [
            f"{name}: {had.get(name, 'not known')} then, {has.get(name, 'not known')} now"
            for name in dict.fromkeys([*had, *has])
            if had.get(name) != has.get(name)
        ]
    return found


def _percents(values: Sequence[float | None]) -> str:
    return " / ".join("-" if value is None else f"{100 * value:.2f}" for value in values)
