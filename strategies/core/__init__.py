"""What every server half is built on: the base strategy, what both halves share, the roster, the aggregate."""

from strategies.core.aggregate import AGGREGATIONS, Aggregate, Median, TrimmedMean, WeightedMean, aggregate_of
from strategies.core.base import LEEWAY, ClientResult, FloretStrategy, StrategySetting
from strategies.core.decentralised import Decentralised, Relay
from strategies.core.exchange import in_flight, send_and_receive
from strategies.core.graph import GraphParameters, draw_graph, metropolis_weights
from strategies.core.method import Method, Network, Setup
from strategies.core.post_office import PostOffice
from strategies.core.replies import Description, ExportReply, RefusedError
from strategies.core.roster import Client, Roster
from strategies.core.session import Session
from strategies.core.spool import SpoolError
from strategies.core.update_norms import UpdateNorms

__all__ = [
    "AGGREGATIONS",
    "LEEWAY",
    "Aggregate",
    "Client",
    "ClientResult",
    "Decentralised",
    "Description",
    "ExportReply",
    "FloretStrategy",
    "GraphParameters",
    "Median",
    "Method",
    "Network",
    "PostOffice",
    "RefusedError",
    "Relay",
    "Roster",
    "Session",
    "Setup",
    "SpoolError",
    "StrategySetting",
    "TrimmedMean",
    "UpdateNorms",
    "WeightedMean",
    "aggregate_of",
    "draw_graph",
    "in_flight",
    "metropolis_weights",
    "send_and_receive",
]
