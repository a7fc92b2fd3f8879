"""The run config, read once at the start and checked as a whole."""

from collections.abc import Mapping
from typing import Any

from common.config import RunConfig, one_of, read_keys
from common.errors import ConfigError
from common.registry import load_class
from models import MODELS
from strategies import METHODS
from strategies.core import FloretStrategy


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, type[FloretStrategy], Any]:
    """Return the run config, the strategy of its method, and the method's own parameters (None if it has none).

    Raises:
        ConfigError: a key has a value that cannot be used; one line names key, value and choices.
    """
    config = read_keys(RunConfig, values)
    for key, value, names in (("method", config.method, METHODS), ("model", config.model, MODELS)):
        wrong = one_of(value, names)
        if wrong:
            raise ConfigError(f"{key} = {value!r}: {wrong}")
    strategy = load_class("strategies", config.method, FloretStrategy)
    parameters = read_keys(strategy.Parameters, values, f"{config.method}.") if strategy.Parameters else None
    return config, strategy, parameters
