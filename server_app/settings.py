"""The run config, read once at the start and checked as a whole."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.config import RunConfig, check_known, key_of, one_of, own_keys, read_keys
from common.errors import ConfigError
from common.registry import load_class
from models import MODELS
from results.rundir import read_about
from results.trackers import TRACKERS
from strategies import METHODS
from strategies.core import FloretStrategy


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, type[FloretStrategy], Any]:
    """Return the run config, the strategy of its method, and the method's own parameters (None if it has none).

    Raises:
        ConfigError: a key has a value that cannot be used, or one of the method's table is none of its parameters; one
            line names key, value and choices.
    """
    config = read_keys(RunConfig, values)
    for key, value, names in (("method", config.method, METHODS), ("model", config.model, MODELS)):
        wrong = one_of(value, names)
        if wrong:
            raise ConfigError(f"{key} = {value!r}: {wrong}")
    wrong = one_of(config.tracker, TRACKERS) if config.tracker else None
    if wrong:
        raise ConfigError(f"tracker = {config.tracker!r}: {wrong}, or empty")
    strategy = load_class("strategies", config.method, FloretStrategy)
    table, kind = f"{config.method}.", strategy.Parameters
    own = {key: value for key, value in values.items() if key.startswith(table)}
    known = [table + key_of(item.name) for item in fields(kind)] if kind else []
    check_known(own, known, f"the Parameters of {config.method}", "docs/methods.md")
    return config, strategy, strategy.read_parameters(config.method, own)


# Keys that may differ when a run is resumed: none changes the rounds that are made, but as docs/configuration.md says
# of rounds and min-replies.
_FREE = (
    *("rounds", "evaluate-every", "min-clients", "min-replies", "round-timeout", "return-timeout"),
    *("checkpoint-every", "resume", "device", "data-dir", "download", "output-dir", "client-state"),
    "new-owners",
    *("tensorboard", "tracker"),
)


def check_resumable(run: Path, values: Mapping[str, Any]) -> None:
    """Refuse to resume a run under a config that computes something else.

    Args:
        run: the directory of the run to resume.
        values: the run config now.

    Raises:
        ConfigError: names the first key that differs.
        FloretError: the directory has no ``config.json`` that can be read.
    """
    before, hint = read_about(run), f"give the same config again, or name another run than {run} with resume"
    method = str(values["method"])
    was = before["config"] | {f"{method}.{key}": value for key, value in before["parameters"].items()}
    unit, before_unit = values.get("privacy.unit", "none"), was.get("privacy.unit", "none")
    if unit != before_unit:
        raise ConfigError(f"privacy.unit = {unit!r}: the run to resume has {before_unit!r}; {hint}")
    for key, value in own_keys(values).items():
        if key not in _FREE and key in was and was[key] != value:
            raise ConfigError(f"{key} = {value!r}: the run to resume has {was[key]!r}; {hint}")


def check_rounds_left(run: Path, rounds: int, done: int) -> None:
    """Refuse to resume a run that has made the rounds that are wanted.

    Args:
        run: its directory.
        rounds: that are wanted in all.
        done: that its last checkpoint is after.

    Raises:
        ConfigError: nothing is left to run.
    """
    if done > rounds or (done == rounds and (run / "summary.json").is_file()):
        raise ConfigError(
            f"rounds = {rounds}: the run to resume has finished round {done}; give more rounds, or name another run "
            f"than {run} with resume"
        )
