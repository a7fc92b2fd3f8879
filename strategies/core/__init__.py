"""What every server half is built on: the base strategy, the roster of clients, the aggregate."""

from strategies.core.aggregate import WeightedMean
from strategies.core.base import FloretStrategy, Report, StrategySetting, TensorSpec
from strategies.core.exchange import exchange, in_flight
from strategies.core.roster import Client, Roster
from strategies.core.session import Session

__all__ = [
    "Client",
    "FloretStrategy",
    "Report",
    "Roster",
    "Session",
    "StrategySetting",
    "TensorSpec",
    "WeightedMean",
    "exchange",
    "in_flight",
]
