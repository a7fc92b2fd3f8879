"""Datasets, their partition among clients, and each client's training, validation and test split."""

from data.clients import (
    ClientData,
    Cut,
    Description,
    Split,
    check,
    check_own,
    describe,
    digest,
    forget_altered,
    load_client,
    load_own,
    outline,
)
from data.datasets import DATASETS, Outline
from data.inputs import read_inputs
from data.partition import PARTITIONS

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ClientData",
    "Cut",
    "Description",
    "Outline",
    "Split",
    "check",
    "check_own",
    "describe",
    "digest",
    "forget_altered",
    "load_client",
    "load_own",
    "outline",
    "read_inputs",
]
