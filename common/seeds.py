"""Explicit randomness: every random choice has a generator of its own, derived from the run's seed."""

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that depends on ``seed`` and on every part of ``purpose``, and on nothing else.

    Two different purposes, such as ``("batches", "client 3", 7)`` and ``("model",)``, give independent streams.
    """
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU torch generator for ``purpose``."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a NumPy generator for ``purpose``."""
    return np.random.default_rng(derive_seed(seed, *purpose))
