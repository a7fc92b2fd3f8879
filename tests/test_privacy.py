"""Differential privacy: formulas by hand, gradients against autograd, what leaves a node, and attacks on the ledger."""

import json
import logging
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from click.testing import CliRunner
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image
from scipy.optimize import brentq
from scipy.stats import norm

from cli.main import floret
from client_app.app import Request
from client_app.batches import Batch
from client_app.client import FEEDS, MEMORY, MODEL, FloretClient
from client_app.clipping import clipping
from client_app.protection import COUNT, Plan
from client_app.protection import Protection as ClientProtection
from client_app.state import ClientState, FileStore
from common.config import RunConfig, read_keys
from common.durable import DamagedError
from common.errors import ConfigError, FloretError
from common.privacy.accounting import (
    Release,
    _grid_values,
    calibrated,
    check_accountant,
    composed,
    epsilon_of,
    epsilon_of_example,
)
from common.privacy.ledger import Ledger, Line
from common.privacy.noise import Noise, clipped
from common.registry import load_class
from common.seeds import torch_generator
from common.wire import from_record, to_record
from data import ClientData, Split
from engine.checks import check_run
from models import batch_norm_names, build_model
from models.examples import check_examples
from results.follow import CLIENT as CLIENT_COLUMNS
from results.follow import Follower
from results.run import read_run
from results.text import MISSING
from server_app.checkpoint import Checkpoints
from server_app.rounds import PRIVACY
from server_app.settings import read_config
from server_app.setup import build_strategy
from strategies import METHODS
from strategies.core import Client, FloretStrategy, Roster, Session
from strategies.core.protection import PrivateMean, Protection
from tests.harness import checkpointed, federate, kept, run_config, timeless, uploads
from tests.local import Local
from tests.test_losses import Halted
from tests.test_policy import CLASSES, SIDE, Site, arrays_of, described, initial, metrics_of, shared
from tests.test_report import Page

EXAMPLE: dict[str, Any] = {"privacy__unit": "example", "num_classes": 10}
CLIENT: dict[str, Any] = {"privacy__unit": "client", "num_classes": 10}
# Of a site, whose data have 30 features.
PROTECTED: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "example", "local_epochs": 1}


PROTECTING = [m for m in METHODS if "example" in load_class("strategies", m, FloretStrategy).protects]

# What releases cost


def exact_delta(noise: float, epsilon: float) -> float:
    """Return the delta of one Gaussian release (Balle and Wang 2018, theorem 8)."""
    a = 1 / (2 * noise)
    return float(norm.cdf(a - epsilon * noise) - math.exp(epsilon) * norm.cdf(-a - epsilon * noise))


@pytest.mark.parametrize(("noise", "delta"), [(1.0, 1e-5), (2.0, 1e-6), (5.0, 1e-5)])
def test_one_release_costs_what_the_exact_formula_says(noise: float, delta: float) -> None:
    exact = brentq(lambda epsilon: exact_delta(noise, epsilon) - delta, 1e-3, 50)
    assert epsilon_of([Release(noise, 1.0, 1)], delta, "prv") == pytest.approx(exact, rel=0.02)
    assert exact <= epsilon_of([Release(noise, 1.0, 1)], delta, "rdp") <= 1.2 * exact


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_what_delta_alone_allows_costs_nothing(accountant: str) -> None:
    assert epsilon_of([Release(100.0, 1.0, 1)], 0.1, accountant) == 0.0


def test_several_examples_of_a_person_cost_more_than_as_many_times_one() -> None:
    """The figures of docs/privacy.md: of one release, ten examples move the sum ten times as far."""
    for one, ten in ((1, 14.4), (2, 33.3), (4, 81)):
        noise = brentq(lambda noise, one=one: exact_delta(noise, one) - 1e-5, 0.1, 50)
        assert brentq(lambda epsilon, noise=noise: exact_delta(noise / 10, epsilon) - 1e-5, 1, 500) == pytest.approx(
            ten, rel=0.005
        )


def test_accountants_against_published_values() -> None:
    # The documentation of Opacus's analysis: two kinds of steps cost 0.336.
    found = epsilon_of([Release(1.0, 1e-5, 10), Release(3.0, 1e-4, 4)], 1e-5)
    assert found == pytest.approx(0.336, abs=0.0005)
    # TensorFlow Privacy's table for MNIST, 60,000 examples, batches of 256, delta 1e-5: noise 1.3 and 15 epochs 1.19,
    # 1.1 and 60 epochs 3.01, 0.7 and 45 epochs 7.10; a later conversion of Renyi divergences gives somewhat less.
    for noise, epochs, published in ((1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)):
        releases = [Release(noise, 256 / 60_000, epochs * 60_000 // 256)]
        assert 0.8 * published < epsilon_of(releases, 1e-5) <= published
        assert epsilon_of(releases, 1e-5, "prv") < epsilon_of(releases, 1e-5)


def test_releases_add_up() -> None:
    # k releases of noise s tell as much as one of noise s / sqrt(k).
    assert epsilon_of([Release(6.0, 1.0, 9)], 1e-5) == pytest.approx(epsilon_of([Release(2.0, 1.0, 1)], 1e-5))
    mixed = [Release(2.0, 0.1, 3), Release(1.0, 1.0, 1), Release(2.0, 0.1, 4), Release(5.0, 1.0, 0)]
    assert composed(mixed) == (Release(1.0, 1.0, 1), Release(2.0, 0.1, 7))
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([Release(0.0, 1.0, 1)], 1e-5) == math.inf


def test_an_example_of_a_protected_client_can_turn_its_update_around() -> None:
    """Two updates within the bound are up to two bounds apart: one release of noise s costs what s / 2 does."""
    noise, delta = 4.0, 1e-5
    exact = brentq(lambda epsilon: exact_delta(noise / 2, epsilon) - delta, 1e-3, 50)
    found = epsilon_of_example([], [Release(noise, 1.0, 1)], delta)
    assert exact <= found == epsilon_of([Release(noise / 2, 1.0, 1)], delta)
    # Of many rounds with few clients drawn less is known to be enough: two steps, by way of a client that sends none.
    drawn = [Release(1.0, 0.01, 200)]
    first = epsilon_of(drawn, delta / 2)
    twice = first + epsilon_of(drawn, delta / 2 * math.exp(-first))
    assert epsilon_of_example([], drawn, delta) == twice < epsilon_of([Release(0.5, 1.0, 200)], delta)
    # Beside releases of examples, which count as they are.
    assert epsilon_of_example([COUNT], [], delta) == epsilon_of([COUNT], delta)
    both = epsilon_of_example([Release(3.0, 1.0, 1)], [Release(noise, 1.0, 1)], delta)
    assert both == epsilon_of([Release(3.0, 1.0, 1), Release(noise / 2, 1.0, 1)], delta)
    assert epsilon_of_example([], [Release(1e-9, 1.0, 1)], delta) == epsilon_of([Release(5e-10, 1.0, 1)], delta)


@pytest.fixture
def no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grid of the accountant ``prv`` is made: those that these tests ask for would take the machine's memory."""

    def made(*sides: float) -> None:
        raise AssertionError(f"a grid over {sides}")

    monkeypatch.setattr("opacus.accountants.prv.Domain.create_aligned", made)


TOO_LARGE = [
    ([Release(0.01, 1.0, 100)], "100 steps with a noise of 0.01 need grids of 3.56e+09 values"),
    ([Release(0.003, 1.0, 1000), COUNT], "1001 steps with a noise of 0.003 need grids of "),
    ([Release(0.37, 0.01, 100_000)], "100000 steps with a noise of 0.37 need grids of 1.9e+08 values"),
    ([Release(1.0, 1.0, 400 + i) for i in range(2)] + [Release(1.1, 1.0, 400)], "1201 steps with a noise of 1 need "),
    ([Release(1e-300, 1.0, 1)], "1 steps with a noise of 1e-300 need grids of inf values"),
]


@pytest.mark.usefixtures("no_grid")
@pytest.mark.parametrize(("releases", "said"), TOO_LARGE)
def test_a_grid_that_is_too_large_is_refused_before_it_is_made(releases: list[Release], said: str) -> None:
    for refused in (epsilon_of, check_accountant):
        with pytest.raises(ConfigError) as error:
            refused(releases, 1e-5, "prv")
        line = str(error.value)
        assert line.startswith(f"privacy.accountant = 'prv': {said}")
        assert "at most 16777216 are permitted; take privacy.accountant = 'rdp', or more privacy.noise" in line
    check_accountant(releases, 1e-5, "rdp")
    check_accountant([Release(0.0, 1.0, 1), *releases], 1e-5, "prv")


def test_a_grid_has_as_many_values_as_are_counted() -> None:
    from opacus.accountants.analysis.prv import Domain

    sizes: list[int] = []
    create = Domain.create_aligned

    def noted(*sides: float) -> Domain:
        domain = create(*sides)
        sizes.append(domain.size)
        return domain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opacus.accountants.prv.Domain.create_aligned", noted)
        for releases in ([Release(3.0, 1.0, 7)], [Release(2.0, 0.01, 10), Release(20.0, 1.0, 1)]):
            epsilon_of(releases, 1e-6, "prv")
            assert _grid_values(releases, 1e-6) == pytest.approx(sizes.pop() * len(releases), rel=1e-3)


@pytest.mark.usefixtures("no_grid")
def test_a_server_cannot_ask_a_node_for_a_grid_that_is_too_large(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "client", "rounds": 100, "local_epochs": 2}
    for epsilon, noise in ((0.0, 0.01), (8.0, 0.001)):
        site = Site(tmp_path / f"{epsilon}", "min-noise: 0\n")
        line = site.refusal(
            arrays=shared(initial()), **keys, privacy__accountant="prv", privacy__noise=noise, privacy__epsilon=epsilon
        )
        assert line.startswith("privacy.accountant = 'prv': ")
        assert "\n" not in line
        assert not list((tmp_path / f"{epsilon}" / "state" / "default").rglob("*.safetensors"))


def test_noise_is_calibrated_past_grids_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = calibrated(3.0, 1e-5, 1.0, 50, "prv")
    calibrated.cache_clear()
    # Now all are too large that have less noise than half of that.
    monkeypatch.setattr("common.privacy.accounting._MOST_VALUES", _grid_values([Release(noise / 2, 1.0, 50)], 1e-5))
    assert calibrated(3.0, 1e-5, 1.0, 50, "prv") == pytest.approx(noise, rel=1e-3)
    calibrated.cache_clear()
    monkeypatch.setattr("common.privacy.accounting._MOST_VALUES", 1000)
    with pytest.raises(ConfigError, match="need grids of"):
        calibrated(3.0, 1e-5, 1.0, 50, "prv")


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_noise_is_calibrated_to_just_below_the_target(accountant: str) -> None:
    noise = calibrated(2.0, 1e-5, 0.1, 200, accountant, (COUNT,))
    cost = epsilon_of([Release(noise, 0.1, 200), COUNT], 1e-5, accountant)
    assert 1.98 < cost <= 2.0
    assert calibrated(1e-4, 1e-5, 1.0, 10**9) == math.inf


def test_noise_by_its_moments_and_its_secret() -> None:
    noise = Noise.of(0, "a", 1)
    for drawn in (noise.normal((200_000,), 3.0), noise.once((200_000,), 3.0)):
        assert abs(drawn.mean()) < 0.03
        assert drawn.std() == pytest.approx(3.0, rel=0.01)
        assert np.mean(np.abs(drawn) < 3.0) == pytest.approx(0.6827, abs=0.005)
    assert np.array_equal(Noise.of(0, "a", 1).normal((4,), 1), Noise.of(0, "a", 1).normal((4,), 1))
    assert not np.array_equal(Noise.of(0, "a", 1).normal((4,), 1), Noise.of(0, "a", 2).normal((4,), 1))
    assert not np.array_equal(Noise.secret().normal((4,), 1), Noise.secret().normal((4,), 1))


def test_clipping_of_a_whole_update_by_hand() -> None:
    update = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    assert {name: array.tolist() for name, array in clipped(update, 1.0).items()} == {
        "a": [pytest.approx(0.6), 0.0],
        "b": [[pytest.approx(0.8)]],
    }
    assert clipped(update, 7.0)["a"].tolist() == [3.0, 0.0]
    assert clipped({"a": np.array([math.inf, 1.0]), "b": np.ones(1)}, 1.0)["b"].tolist() == [0.0]
    assert clipped({"a": np.zeros(2)}, 1.0)["a"].tolist() == [0.0, 0.0]


# Gradients of single examples


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (1, 12, 12)),
        ("cnn2", (1, 20, 20)),
        ("cnn2-small", (1, 20, 20)),
        ("cnn3", (3, 26, 26)),
        ("cnn5", (3, 20, 20)),
        ("cnn5-wide", (3, 20, 20)),
        ("vgg11", (3, 20, 20)),
    ],
)
def test_the_sum_of_clipped_gradients_is_that_of_autograd(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, shape, 5, 1, torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, *shape, generator=generator).contiguous(memory_format=torch.channels_last)
    x[0] *= 50  # of one example the gradient is far above the bound, of the others on both sides of it
    batch = Batch(x, torch.tensor([0, 1, 2, 3, 4, 0]), torch.arange(6))
    parameters = list(model.parameters())

    def losses(of: Batch) -> torch.Tensor:
        return F.cross_entropy(model(of.x), of.y, reduction="none")

    norms, gradients = [], []
    for i in range(6):
        one = torch.autograd.grad(losses(batch.at(torch.arange(6) == i)).sum(), parameters)
        norms.append(math.sqrt(sum(float(part.square().sum()) for part in one)))
        gradients.append(one)
    bound = sorted(norms)[2]
    wanted = [
        sum(part * min(1, bound / size) for part, size in zip(parts, norms, strict=True))
        for parts in zip(*gradients, strict=True)
    ]
    model.train()
    for _ in range(2):  # nothing of the first is left for the second
        model.zero_grad()
        with clipping(model, bound) as clipper:
            total = clipper.sum_gradients(parameters, losses, batch)
        assert total == pytest.approx(float(losses(batch).sum().detach()), rel=1e-5)
        for parameter, expected in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * bound)


@pytest.mark.parametrize("frozen", ["extractor", "head"])
def test_frozen_parts_take_no_share_of_the_bound(frozen: str) -> None:
    model = build_model("cnn2", (1, 20, 20), 5, 1, torch.Generator().manual_seed(0)).train()
    getattr(model, frozen).requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    x, y = torch.randn(5, 1, 20, 20, generator=torch.Generator().manual_seed(1)), torch.arange(5)

    def losses(of: Batch) -> torch.Tensor:
        return F.cross_entropy(model(of.x), of.y, reduction="none")

    bound, wanted = 0.5, [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(5):
        one = torch.autograd.grad(losses(Batch(x[i : i + 1], y[i : i + 1], y[i : i + 1])).sum(), parameters)
        factor = min(1.0, bound / math.sqrt(sum(float(part.square().sum()) for part in one)))
        wanted = [total + part * factor for total, part in zip(wanted, one, strict=True)]
    with clipping(model, bound) as clipper:
        clipper.sum_gradients(parameters, losses, Batch(x, y, y))
    for parameter, expected in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in getattr(model, frozen).parameters())


def size_of_one(layer: torch.nn.Module, x: torch.Tensor, slopes: torch.Tensor, bound: float) -> float:
    """Return the norm of what an example adds to the sum, in units of the bound."""
    none = torch.zeros(1, dtype=torch.long)
    with clipping(layer, bound) as clipper:
        clipper.sum_gradients(
            list(layer.parameters()), lambda of: (layer(of.x) * slopes).flatten(1).sum(1), Batch(x, none, none)
        )
    sizes = [float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None]
    return math.sqrt(sum(sizes)) / bound


def test_what_cancels_over_places_is_bounded_with_its_rounding() -> None:
    layer = torch.nn.Conv2d(16, 64, 1)  # fewer pairs of places than weights
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    # Sums to nothing, but only in exact arithmetic.
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    slopes = torch.cat([values, -values], 1)[:, order].view(1, 64, 4, 4)
    assert size_of_one(layer, torch.full((1, 16, 4, 4), 2.0**30), slopes, 1.0) <= 1.0001


def test_an_example_of_a_whole_model_whose_gradients_cancel_stays_within_the_bound() -> None:
    model = build_model("cnn2", (3, 32, 32), 10, 1, torch.Generator().manual_seed(0)).train()
    small = 2.0**-24
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        parts = dict(model.named_parameters())
        parts["extractor.conv1.bias"].fill_(1024)
        parts["extractor.conv2.bias"].fill_(1e-12)
        channels = len(parts["extractor.conv2.bias"])
        places = parts["extractor.fc1.weight"].shape[1] // channels
        generator = torch.Generator().manual_seed(0)
        pattern = torch.zeros(channels, places)
        for channel in range(channels):
            where = torch.randperm(places, generator=generator)[:14]
            pattern[channel, where] = torch.tensor([1.0, *[small] * 6, -1.0, *[-small] * 6]) * 800
        parts["extractor.fc1.weight"][0] = pattern.flatten()
        parts["extractor.fc1.bias"][0] = 1e-6
        parts["head.weight"][1:, 0] = 20
        parts["head.weight"][0, 0] = -20
        parts["head.bias"][0] = 6
    none = torch.zeros(1, dtype=torch.long)
    with clipping(model, 1.0) as clipper:
        clipper.sum_gradients(
            list(model.parameters()),
            lambda of: F.cross_entropy(model(of.x), of.y, reduction="none"),
            Batch(torch.rand(1, 3, 32, 32, generator=generator) * 2 - 1, none, none),
        )
    size = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert size <= 1.0001


@pytest.mark.parametrize(
    ("layer", "x", "slope", "bound"),
    [
        (torch.nn.Linear(1, 1, bias=False), torch.full((1, 1), 1e20), 1.34e25, 1.0),
        (torch.nn.Conv2d(4, 4, 1, bias=False), torch.full((1, 4, 1, 1), 0.25e20), 1.34e25, 1.0),
        (torch.nn.Linear(2000, 50, bias=False), torch.full((1, 2000), 3e38), 1e-20, 1e-4),
    ],
)
def test_what_is_too_large_to_be_clipped_counts_as_zero(
    layer: torch.nn.Module, x: torch.Tensor, slope: float, bound: float
) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert size_of_one(layer, x, torch.tensor(slope), bound) == 0


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_a_small_batch_is_computed_as_one_of_sixteen(count: int) -> None:
    layer, rows = torch.nn.Linear(2, 2), []
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))

    def losses(of: Batch) -> torch.Tensor:
        rows.append(len(of.y))
        out: torch.Tensor = layer(of.x)
        return out.square().sum(1)

    none = torch.zeros(count, dtype=torch.long)
    with clipping(layer, 1e6) as clipper:
        total = clipper.sum_gradients(list(layer.parameters()), losses, Batch(x, none, none))
    assert rows == [max(16, count)]
    assert total == pytest.approx(float(losses(Batch(x, none, none)).sum().detach()), rel=1e-6)
    wanted = torch.autograd.grad(losses(Batch(x, none, none)).sum(), list(layer.parameters()))
    for parameter, expected in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("count", [64, 67])
def test_with_one_example_more_the_sum_moves_by_its_bound_whatever_pfakd_beta_is(tmp_path: Path, count: int) -> None:
    x, y = torch.randn(count + 1, SIDE, generator=torch.Generator().manual_seed(5)).numpy(), np.arange(count + 1)
    sums = []
    for samples in (count, count + 1):
        site = Site(tmp_path / str(samples), "min-noise: 0\nmax-batch-size: 100000")
        np.savez(site.folder / "data" / "train.npz", x=x[:samples], y=y[:samples] % CLASSES)
        before = shared(initial())
        # One step with next to no noise: what leaves is the sum of clipped gradients over the counted examples.
        keys = {"privacy__epsilon": 0.0, "privacy__noise": 1e-9, "batch_size": 100_000, "momentum": 0.0}
        more = {"method": "pfakd", "pfakd__beta": 1e12, "privacy__head_epochs": 0, "weight_decay": 0.0}
        sent = arrays_of(site.ask("train", before, lr=1.0, **{**PROTECTED, **keys, **more}))
        (found,) = [line.count for line in Ledger.of(site.folder / "state", "site").lines() if line.count is not None]
        # A node divides it by the noised number of examples, of which it plans with no fewer than that noise.
        sums.append({name: (before[name].astype(float) - sent[name]) * max(found, COUNT.noise) for name in before})
    moved = math.sqrt(sum(float(np.square(sums[0][name] - sums[1][name]).sum()) for name in sums[0]))
    assert 0.1 < moved < 1.001


def test_where_examples_are_protected_a_teacher_is_asked_about_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)

    def all_of_them(_: Split) -> Iterator[Batch]:
        pytest.fail("it was asked about all examples in order")

    monkeypatch.setattr("client_app.training.passes", all_of_them)
    keys = {"method": "pfakd", "local_epochs": 2, "privacy__head_epochs": 0, "pfakd__attention_transfer": True}
    assert arrays_of(site.ask("train", shared(initial()), **{**PROTECTED, **keys})).keys() == shared(initial()).keys()


def test_what_is_trained_on_protected_examples_has_one_thread(tmp_path: Path) -> None:
    config_of(tmp_path, **PROTECTED, threads=1)
    config_of(tmp_path, **CLIENT, threads=2)
    with pytest.raises(ConfigError, match=r"threads = 2: privacy.unit = 'example' needs 1, with which the rounding"):
        config_of(tmp_path, **PROTECTED, threads=2)


# FedRep makes one step of the head and one of the extractor: of each tensor it is a single one.
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
@pytest.mark.parametrize(("batch_size", "draws"), [(100_000, 4), (32, 1)])
def test_a_single_step_has_the_noise_of_what_is_released_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, batch_size: int, draws: int
) -> None:
    asked = Counter[str]()
    for name in ("once", "normal"):
        was = getattr(Noise, name)
        monkeypatch.setattr(Noise, name, lambda *given, n=name, f=was: asked.update([n]) or f(*given))
    keys = {"method": method, "batch_size": batch_size, "privacy__epsilon": 0.0, "privacy__noise": 1.0}
    keys |= {"fedrep__head_epochs": 1}
    site = Site(tmp_path, "max-batch-size: 100000")
    # So many that the noise of their count, of a deviation of 20, makes no single step of several.
    x, y = np.zeros((600, SIDE), np.float32), np.arange(600) % CLASSES
    np.savez(site.folder / "data" / "train.npz", x=x, y=y)
    site.ask("train", shared(initial()) if method == "fedrep" else initial(), **{**PROTECTED, **keys})
    # The noisy count is released at once, too.
    assert (asked["once"] > 1) == (draws == 4)
    assert (asked["normal"] > 1) == (draws == 1)


def test_a_noised_count_below_its_deviation_makes_no_batch_of_one_example(tmp_path: Path) -> None:
    config = config_of(tmp_path, privacy__unit="example", privacy__epsilon=0.0, privacy__noise=1.0, batch_size=32)
    assert {Plan.of(config, count, 1) for count in (-16.4, 0.1, 20.0)} == {Plan(noise=1.0, steps=1, batch=20.0)}
    assert Plan.of(config, 64.0, 1) == Plan(noise=1.0, steps=2, batch=32.0)


def test_a_layer_that_is_used_twice_has_no_gradients_of_examples() -> None:
    layer, none = torch.nn.Linear(2, 2), torch.zeros(1, dtype=torch.long)

    def losses(of: Batch) -> torch.Tensor:
        out: torch.Tensor = layer(layer(of.x))
        return out.sum(1)

    with clipping(layer, 1.0) as clipper, pytest.raises(RuntimeError, match="is used twice for one batch"):
        clipper.sum_gradients(list(layer.parameters()), losses, Batch(torch.ones(1, 2), none, none))
    assert not layer._forward_hooks


@pytest.mark.parametrize(
    "how",
    [{"groups": 2}, {"padding": 1, "padding_mode": "circular"}, {"padding": "same"}],
    ids=["groups", "mode", "same"],
)
def test_a_convolution_that_is_not_computed_is_refused(how: dict[str, Any]) -> None:
    check_examples(torch.nn.Conv2d(2, 2, 3, padding=1, stride=2, dilation=2), "own")
    with pytest.raises(ConfigError, match=r"model = 'own': .* its Conv2d has none that Floret computes"):
        check_examples(torch.nn.Conv2d(2, 2, 3, **how), "own")


@pytest.mark.parametrize(("name", "shape"), [("mlp", (4,)), ("cnn2", (1, 20, 20))])
def test_an_example_without_a_finite_gradient_counts_as_zero(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, shape, 3, 1, torch.Generator().manual_seed(0)).train()
    parameters = list(model.parameters())
    x = torch.ones(3, *shape)
    x[1] = math.inf

    def losses(of: Batch) -> torch.Tensor:
        return F.cross_entropy(model(of.x), of.y, reduction="none")

    found = []
    for rows in ([0, 1, 2], [0, 2], []):
        index = torch.tensor(rows, dtype=torch.long)
        with clipping(model, 0.5) as clipper:
            clipper.sum_gradients(parameters, losses, Batch(x[index], torch.zeros(len(rows), dtype=torch.long), index))
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
    for with_it, without, empty in zip(*found, strict=True):
        assert torch.equal(with_it, without)
        assert not empty.any()
    assert found[0][0].any()


# What a round does


def with_head_of(site: Site, change: float) -> None:
    """Add ``change`` to the personal head in the state of a site."""
    store = FileStore.at(site.folder / "state", "default", "fedper", "site", sync=False)
    version = store.versions([])[0]
    tensors = store.read(version)
    tensors[f"{MODEL}head.weight"] += change
    store.write(version, tensors)


def test_what_leaves_does_not_depend_on_the_head_that_is_trained_without_noise(tmp_path: Path) -> None:
    sent = []
    for change in (0.0, 100.0):
        site = Site(tmp_path / str(change))
        # The same training split.
        (site.folder / "state").mkdir()
        (site.folder / "state" / "seed").write_text("0" * 32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Noise, "secret", lambda: Noise(7))
            first = site.ask("train", shared(initial()), **PROTECTED)
            with_head_of(site, change)
            sent.append(arrays_of(site.ask("train", shared(arrays_of(first)), **PROTECTED)))
        tensors = FileStore.at(site.folder / "state", "default", "fedper", "site", sync=False)
        state = tensors.read(tensors.versions([])[0])
        assert not torch.equal(state[f"{MODEL}head.weight"], state[f"{MEMORY}{FEEDS}head.weight"])
    assert all(np.array_equal(sent[0][name], sent[1][name]) for name in sent[0])


def test_a_personal_head_is_trained_without_noise_beside_the_other(tmp_path: Path) -> None:
    heads = []
    for epochs in (0, 1):
        outcome = federate(tmp_path / "runs", 1, method="fedper", rounds=1, privacy__head_epochs=epochs, **EXAMPLE)
        state = kept(outcome.grid.contexts[1000]).load()
        heads.append([state[name] for name in (f"{MODEL}head.weight", f"{MEMORY}{FEEDS}head.weight")])
    assert torch.equal(*heads[0])
    assert not torch.equal(*heads[1])


def test_the_delta_and_the_accountant_of_the_keys_are_those_of_the_figures(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__noise": 3.0, "privacy__epsilon": 0.0, "rounds": 1}
    others: list[dict[str, Any]] = [{}, {"privacy__delta": 1e-3}, {"privacy__accountant": "prv"}]
    for more in others:
        spent = federate(tmp_path / "runs", 1, **keys, **more).summary["epsilon"]
        said = [more.get(f"privacy__{key}", usual) for key, usual in (("delta", 1e-5), ("accountant", "rdp"))]
        assert spent == epsilon_of([Release(3.0, 1.0, 1)], *said)


def test_a_phase_does_something_after_each_protected_step_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[torch.Tensor] = []

    def masked(
        self: FloretClient, epochs: int, phases: Any, *rest: Any, real: Any = FloretClient._run_protected
    ) -> float:
        def mask() -> None:
            weight = self.model.state_dict()["head.weight"]
            weight[0] = 0.0
            heads.append(weight.clone())

        return float(real(self, epochs, [replace(phase, after_step=mask) for phase in phases], *rest))

    monkeypatch.setattr(FloretClient, "_run_protected", masked)
    federate(tmp_path / "runs", 1, method="fedavg", rounds=1, **EXAMPLE)
    assert len(heads) > 1
    assert not torch.equal(heads[0], heads[-1])
    assert not any(head[0].any() for head in heads)


def test_a_protected_run_begins_with_nothing_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epsilon of a run does not count what another one made of the examples."""
    heads: list[torch.Tensor] = []

    def begun(self: FloretClient, *args: Any, real: Any = FloretClient._run_protected) -> float:
        heads.append(self.model.state_dict()["head.weight"].clone())
        return float(real(self, *args))

    monkeypatch.setattr(FloretClient, "_run_protected", begun)
    site, first = Site(tmp_path, "min-noise: 0\n"), torch.from_numpy(initial()["head.weight"])

    def train(lineage: str, server_round: int, **keys: Any) -> dict[str, Any]:
        scalars = {"session.lineage": lineage, "round": server_round}
        return metrics_of(site.ask("train", shared(initial()), scalars, **({**PROTECTED, "rounds": 3} | keys)))

    loose: dict[str, Any] = {"privacy__noise": 0.01, "privacy__epsilon": 0.0}
    train("a", 1, **loose)
    spent = train("b", 1, privacy__epsilon=1.0)["epsilon"]
    assert spent < 1
    train("a", 2, **loose)
    assert torch.equal(heads[0], first)
    assert torch.equal(heads[1], first)
    # A run goes on from its own.
    assert not torch.equal(heads[2], first)
    # Nor by way of a round without privacy, which goes on from whatever is there.
    train("c", 1, privacy__unit="none")
    train("c", 2, privacy__epsilon=1.0)
    assert torch.equal(heads[3], first)


def test_a_message_that_comes_twice_has_other_noise(tmp_path: Path) -> None:
    site = Site(tmp_path)
    first = arrays_of(site.ask("train", shared(initial()), **PROTECTED))
    site.round -= 1
    again = arrays_of(site.ask("train", shared(initial()), **PROTECTED))
    assert not np.array_equal(first["extractor.fc1.weight"], again["extractor.fc1.weight"])
    ledger = Ledger.of(tmp_path / "state", "site").lines()
    assert [line.round for line in ledger if line.release != COUNT] == [1, 1]


@pytest.mark.parametrize("unit", ["example", "client"])
def test_what_a_protected_client_measures_stays_with_it(tmp_path: Path, unit: str) -> None:
    site = Site(tmp_path, "accuracies: exact\nhidden-below: 0\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": unit}
    said = described(site)
    assert (said["train"], said["test"]) != (1, 1)
    said = {**site.ask("query.describe", **keys)["client"]}
    assert (said["train"], said["validation"], said["test"], said["num-classes"]) == (1, 0, 1, CLASSES)
    assert said["class-names"] == []
    assert metrics_of(site.ask("train", shared(initial()), **keys)).keys() == {
        "num-examples",
        "epsilon",
        "epsilon-next",
    }
    assert metrics_of(site.ask("evaluate", {}, **keys)) == {"num-examples": 1}
    # Without protection they leave as the policy says.
    assert {"after.test", "loss", "seconds"} <= metrics_of(site.ask("train", shared(initial()))).keys()


@pytest.mark.parametrize("unit", ["client", "example"])
def test_numbers_of_samples_that_were_not_told_are_not_made_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unit: str
) -> None:
    keys: dict[str, Any] = {"method": "fedper", "rounds": 1, "num_classes": 10}
    with caplog.at_level(logging.INFO, "flwr"):
        outcome = federate(tmp_path / "runs", 2, report=True, privacy__unit=unit, **keys)
    assert "Client 0 joined (it does not tell its samples)" in caplog.messages
    about = json.loads((outcome.directory / "config.json").read_text())
    assert about["clients"]["0"]["samples"] == {"train": None, "validation": None, "test": None}
    run = read_run(outcome.directory)
    assert run.samples == 0
    page = Page(outcome.directory / "report.html")
    assert not page.says("Samples of each client")
    assert [row[3:6] for row in page.body("clients")] == [[MISSING] * 3] * 2
    follower = Follower(outcome.directory)
    follower.look()
    assert [row[CLIENT_COLUMNS.index("samples")] for row in follower.news(0, 0)["clients"]] == [None, None]
    # Those of a simulation are the user's own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server_app.federation.is_simulated", lambda _: True)
        patch.setattr("client_app.app.in_simulation", lambda: True)
        simulated = federate(tmp_path / "simulated", 2, privacy__unit=unit, **keys)
    about = json.loads((simulated.directory / "config.json").read_text())
    assert all(count > 1 for client in about["clients"].values() for count in client["samples"].values())


def test_a_protected_run_says_everything_once(local: Local, tmp_path: Path) -> None:
    result = local.run(tmp_path / "runs", method="fedper", rounds=1, **CLIENT, privacy__where="server")
    assert result.log.count("round 1/1 |") == 1


def test_a_client_that_protects_itself_checks_what_the_server_should_have_checked(tmp_path: Path) -> None:
    site = Site(tmp_path)
    line = site.refusal(arrays=shared(initial()), **{**PROTECTED, "num_classes": 0})
    assert line.startswith("num-classes = 0: with privacy.unit = 'example' no client tells its classes;")
    line = site.refusal(arrays=initial(), **PROTECTED, method="fedproto")
    assert line.startswith("privacy.unit = 'example': fedproto sends what has no mechanism for it")
    line = site.refusal(arrays=shared(initial()), **{**PROTECTED, "precision": "bfloat16"})
    assert line.startswith("precision = 'bfloat16': privacy.unit = 'example' clips gradients")
    assert not Ledger.of(tmp_path / "state", "site").lines()


def test_a_whole_update_is_clipped_and_noised(tmp_path: Path) -> None:
    site, before = Site(tmp_path, "noise-by-server: true\nmin-noise: 0\n"), shared(initial())
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__epsilon": 0.0, "privacy__clip": 0.001}

    def size(**more: Any) -> float:
        sent = arrays_of(site.ask("train", before, **keys, **more))
        return math.sqrt(sum(float(np.square(sent[n].astype(float) - before[n]).sum()) for n in sent))

    assert size(privacy__noise=1e-6) == pytest.approx(0.001, rel=1e-3)
    values = sum(array.size for array in before.values())
    assert size(privacy__noise=5.0) == pytest.approx(5.0 * 0.001 * math.sqrt(values), rel=0.05)
    # Where the server adds the noise there is none yet.
    assert size(privacy__noise=5.0, privacy__where="server") == pytest.approx(0.001, rel=1e-3)


def test_a_protected_client_that_cannot_learn_sends_noise_and_not_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's batch normalisation fails where a batch has one value per channel, which tells how many examples are
    left over.
    """

    def train(_: FloretClient) -> float:
        raise ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 8])")

    monkeypatch.setattr(FloretClient, "train", train)
    site, before = Site(tmp_path), shared(initial())
    said = site.refusal(arrays=before)
    assert said.startswith("batch-size = 32, 54 training samples: batch normalisation of model 'mlp' cannot learn from")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__epsilon": 0.0, "privacy__noise": 1.0}
    caplog.clear()
    sent = arrays_of(site.ask("train", before, **keys))
    assert all(np.isfinite(sent[name]).all() and not np.array_equal(sent[name], before[name]) for name in before)
    assert "Client site: batch-size = 32, 60 training samples" in caplog.text


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("method", PROTECTING)
def test_a_client_that_is_protected_as_a_whole_never_says_that_it_failed(
    tmp_path: Path, method: str, call: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails, and in whichever part of the training: what leaves is noise, and the personal model stays."""
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__epsilon": 0.0, "method": method}
    keys |= {"privacy__noise": 3.0, "privacy__clip": 0.5, "local_epochs": 2}
    site = Site(tmp_path)
    whole = load_class("strategies", method, FloretStrategy).shares == "model"
    before = initial() if whole else shared(initial())
    store = FileStore.at(site.folder / "state", "default", method, "site", sync=False)
    assert arrays_of(site.ask("train", before, **keys)).keys() == before.keys()
    first = newest(store)
    calls, run_steps = [0], FloretClient.run_steps

    def failing(client: FloretClient, *asked: Any) -> float:
        calls[0] += 1
        if calls[0] == call:
            with torch.no_grad():
                next(client.model.parameters()).add_(1.0)
            raise IndexError("index out of range in self")
        return run_steps(client, *asked)

    monkeypatch.setattr(FloretClient, "run_steps", failing)
    caplog.clear()
    sent = arrays_of(site.ask("train", before, **keys))
    monkeypatch.undo()
    if calls[0] < call:  # this method trains once
        assert method not in ("ditto", "fedbabu", "fedrep")
        return
    assert "Client site: index out of range in self; it sends noise alone" in caplog.text
    noise = np.concatenate([(sent[name] - before[name]).ravel() for name in before])
    assert np.std(noise) == pytest.approx(1.5, rel=0.1)
    assert abs(noise.mean()) < 0.2
    common = {"ditto": set(), "fedbabu": {*initial()}}.get(method, set(before))
    for name, tensor in newest(store).items():
        model = name.removeprefix(MODEL)
        np.testing.assert_array_equal(tensor, initial()[model] if model in common else first[name])


def newest(store: FileStore) -> dict[str, np.ndarray]:
    """Return the tensors of a client's last version."""
    return {name: tensor.numpy() for name, tensor in ClientState(store).load().items()}


@pytest.mark.parametrize("method", ["ditto", "fedbabu"])
def test_one_image_with_batch_normalisation_is_like_two_from_outside(tmp_path: Path, method: str) -> None:
    model = build_model("resnet18", (1, 8, 8), CLASSES, 1, torch_generator(0, "model"))
    for images in (1, 2):
        site = Site(tmp_path / str(images))
        x = np.random.default_rng(1).random((CLASSES, 1, 8, 8), dtype=np.float32)
        for part, count in (("train", images), ("test", CLASSES)):
            np.savez(site.folder / "data" / f"{part}.npz", x=x[:count], y=np.arange(count))
        keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__epsilon": 0.0, "privacy__noise": 1.0}
        keys |= {"method": method, "model": "resnet18", "batch_norm": "local"}
        own = batch_norm_names(model, buffers_only=True)
        before = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name not in own}
        before = before if method == "ditto" else shared(before)
        assert arrays_of(site.ask("train", before, **keys)).keys() == before.keys()


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_protected_client_measures_nothing(tmp_path: Path, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is paid for an evaluation, and that it failed would tell of the test data."""

    def accuracy(*_: Any) -> float:
        pytest.fail("it was measured")

    site = Site(tmp_path)
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": unit}
    site.ask("train", shared(initial()), **keys)
    monkeypatch.setattr(FloretClient, "accuracy", accuracy)
    assert "error" not in site.ask("train", shared(initial()), **keys)
    assert metrics_of(site.ask("evaluate", shared(initial()), **keys)) == {"num-examples": 1}


@pytest.mark.parametrize("stray", [-1.0, 0.5, 32768.0, 1e30])
def test_a_number_that_is_no_word_id_shows_in_no_protected_run(tmp_path: Path, stray: float) -> None:
    """A server may choose ``fasttext`` for any rows."""
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__epsilon": 0.0, "privacy__noise": 1.0}
    keys |= {"model": "fasttext"}
    model = build_model("fasttext", (SIDE,), CLASSES, 1, torch_generator(0, "model"))
    before = shared({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    site = Site(tmp_path)
    x = np.ones((60, SIDE), np.float32)
    x[7, 3] = stray
    for part in ("train", "test"):
        np.savez(site.folder / "data" / f"{part}.npz", x=x, y=np.arange(60) % CLASSES)
    assert arrays_of(site.ask("train", before, **keys)).keys() == before.keys()
    assert "error" not in site.ask("evaluate", before, **keys)
    # Without protection it is said when the client joins.
    said = site.refusal("query.describe", model="fasttext")
    wrong = "the train inputs of client site are not all such"
    assert said == f"model = 'fasttext': needs word ids, whole numbers from 0 to 32767; {wrong}"


def test_a_refusal_that_tells_how_many_examples_there_are_is_noted(tmp_path: Path) -> None:
    site = Site(tmp_path, "min-steps: 4")
    noted = site.folder / "state" / ".privacy" / "unprotected" / "site.json"
    assert site.refusal(model="mlp", num_classes=CLASSES, method="local", privacy__unit="example", privacy__noise=1.0)
    assert not noted.exists()
    assert "a round would have 1 steps" in site.refusal(batch_size=60, local_epochs=1)
    assert noted.exists()


def test_a_run_with_next_to_no_noise_is_refused(tmp_path: Path) -> None:
    """Else one sample of a class of its own leaves exactly, and ``min-samples`` would not count."""
    site, few = Site(tmp_path), {**PROTECTED, "num_classes": 2, "local_epochs": 1, "batch_size": 1000}
    before = shared(initial())
    for unit in ("example", "client"):
        for noise, epsilon in ((1e-9, 0.0), (0.0999, 0.0), (0.0, 1e4)):
            keys = {**few, "privacy__unit": unit, "privacy__noise": noise, "privacy__epsilon": epsilon}
            line = site.refusal(arrays=before, scalars={"num-classes": 2}, **keys)
            assert line.startswith("this node's policy has min-noise = 0.1, and this run adds ")
            assert line.endswith("; it needs more privacy.noise, or with privacy.noise = 0 a smaller privacy.epsilon")
        keys |= {"privacy__noise": 0.1, "privacy__epsilon": 0.0}
        assert "error" not in site.ask("train", before, {"num-classes": 2}, **keys)


def test_the_number_of_examples_is_noised_once_a_run_and_paid_for(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**EXAMPLE, "privacy__noise": 1.0, "privacy__epsilon": 0.0, "method": "fedavg"}
    outcome = federate(tmp_path / "runs", 3, rounds=2, batch_size=1, **keys)
    noises = []
    for i, context in enumerate(outcome.grid.contexts.values()):
        lines = Ledger.of(Path(str(context.node_config["state-dir"])), str(i)).lines()
        assert [line.round for line in lines if line.release == COUNT] == [1]
        (steps,) = {line.steps / 2 for line in lines if line.release != COUNT}
        noises.append(steps - (outcome.history[0]["clients"][str(i)] and len(Request(context).data.train)))
    assert any(noises)  # one of them is 0 now and then, since numbers are rounded
    assert max(map(abs, noises)) < 5 * COUNT.noise


def test_a_step_on_protected_examples_by_hand(tmp_path: Path) -> None:
    """One step of FedProx on all examples, without noise and clipping, is that of gradient descent; then the noise."""
    site, before = Site(tmp_path, "max-decay: 10\nmin-noise: 0\n"), initial()
    keys: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "example", "local_epochs": 1, "batch_size": 1000}
    keys |= {"privacy__epsilon": 0.0, "momentum": 0.0, "weight_decay": 0.0, "method": "fedprox", "fedprox__mu": 3.0}
    sent = arrays_of(site.ask("train", before, lr=0.5, privacy__noise=1e-9, privacy__clip=1e5, **keys))
    model = build_model("mlp", (30,), CLASSES, 1, torch.Generator().manual_seed(0))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in before.items()})
    loss = F.cross_entropy(model(torch.from_numpy(site.train_x)), torch.from_numpy(site.train_y))
    gradients = dict(zip(before, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    moved = {name: (before[name] - sent[name]) / 0.5 for name in before}
    # The expected size of a batch is the noised number of examples.
    scale = float(np.median(moved["head.bias"] / gradients["head.bias"].numpy()))
    assert 60 / (60 + 5 * COUNT.noise) < scale < 60 / max(60 - 5 * COUNT.noise, 0.1)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(moved[name], scale * gradient.numpy(), rtol=0.02, atol=1e-4)
    # Of two steps the second one feels the proximal term.
    keys |= {"batch_size": 30, "local_epochs": 40}
    far, near = (
        arrays_of(site.ask("train", before, lr=0.1, privacy__noise=1e-9, privacy__clip=1e5, **(keys | more)))
        for more in ({"fedprox__mu": 0.0}, {"fedprox__mu": 5.0})
    )
    sizes = [math.sqrt(sum(float(np.square(a[n] - before[n]).sum()) for n in before)) for a in (far, near)]
    assert sizes[1] < 0.5 * sizes[0]
    # Noise alone: with a tiny bound the gradient is nothing.
    keys |= {"batch_size": 1000, "local_epochs": 1}
    sent = arrays_of(site.ask("train", before, lr=1.0, privacy__noise=1e4, privacy__clip=1e-3, **keys))
    noise = np.concatenate([(sent[name] - before[name]).ravel() for name in before])
    assert 10 / (60 + 5 * COUNT.noise) < noise.std() < 10 / max(60 - 5 * COUNT.noise, 0.5)


def test_a_step_of_convolutions_on_protected_examples_by_hand(tmp_path: Path) -> None:
    """Their weights are not laid out in memory as the noise is that is added to their gradients."""
    site = Site(tmp_path, "min-noise: 0\n")
    x = np.random.default_rng(1).random((60, 3, 16, 16), dtype=np.float32)
    for part in ("train", "test"):
        np.savez(tmp_path / "data" / f"{part}.npz", x=x, y=np.arange(60) % CLASSES)
    model = build_model("cnn2", (3, 16, 16), CLASSES, 1, torch.Generator().manual_seed(0))
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    keys: dict[str, Any] = {"num_classes": CLASSES, "privacy__unit": "example", "local_epochs": 1, "batch_size": 1000}
    keys |= {"privacy__epsilon": 0.0, "momentum": 0.0, "weight_decay": 0.0, "method": "fedavg", "model": "cnn2"}
    sent = arrays_of(site.ask("train", before, lr=0.5, privacy__noise=1e-9, privacy__clip=1e5, **keys))
    loss = F.cross_entropy(model(torch.from_numpy(x)), torch.arange(60) % CLASSES)
    for name, gradient in zip(before, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        moved, along = (before[name] - sent[name]).ravel(), gradient.numpy().ravel()
        cosine = moved @ along / (np.linalg.norm(moved) * np.linalg.norm(along))
        assert cosine > 0.999, name


def test_examples_are_drawn_each_with_the_same_probability(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**EXAMPLE, "privacy__noise": 1.0, "privacy__epsilon": 0.0}
    outcome = federate(tmp_path / "runs", 1, method="fedavg", rounds=1, batch_size=100, **keys)
    client = Request(outcome.grid.contexts[1000]).client()
    client.begin({**outcome.grid.messages[-1].content["config"], "round": 2, "session.resumed": []})
    protection = client.protection
    assert protection is not None
    samples = len(client.data.train)
    protection.pay(samples)
    plan = protection._plan
    assert plan is not None
    assert abs(plan.steps * plan.batch - samples) < 5 * COUNT.noise
    times, sizes = Counter[int](), []
    for _ in range(client.config.local_epochs):
        for drawn in protection.batches(samples):
            times.update(drawn.tolist())
            sizes.append(len(drawn))
    assert np.mean(sizes) == pytest.approx(samples / plan.steps, rel=0.1)
    assert len(set(sizes)) > 1
    with pytest.raises(FloretError, match="more passes than the 2 that it declares"):
        protection.batches(samples)


@pytest.mark.parametrize("method", PROTECTING)
def test_the_passes_that_a_method_declares_are_those_that_it_makes(tmp_path: Path, method: str) -> None:
    made: list[int] = []

    def batches(self: Any, samples: int, real: Any = ClientProtection.batches) -> Any:
        made.append(self._passes)
        return real(self, samples)

    others: list[dict[str, Any]] = [{}, {"fedrep__every_batch": True}]
    for more in others if method == "fedrep" else others[:1]:
        made.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClientProtection, "batches", batches)
            federate(tmp_path / "runs", 1, method=method, rounds=1, **EXAMPLE, **more)
        assert made == [made[0]] * made[0]


@pytest.mark.parametrize("method", PROTECTING)
def test_losses_of_examples_are_those_of_the_batch(tmp_path: Path, method: str) -> None:
    halted = Halted(federate(tmp_path / "runs", method=method))
    halted.shift()
    client, batch = halted.client, halted.batch()
    whole = (FloretClient.loss if method == "ditto" else type(client).loss)(client, batch)
    losses = (FloretClient.losses if method == "ditto" else type(client).losses)(client, batch)
    penalty = client.penalty()
    assert losses.shape == (5,)
    torch.testing.assert_close(losses.mean() + (0 if penalty is None else penalty), whole)


# On the server


def clients_of(count: int) -> list[Client]:
    return [Client(str(i), 1000 + i, 10, 1, 5) for i in range(count)]


def config_of(tmp_path: Path, **keys: Any) -> RunConfig:
    return read_keys(RunConfig, run_config(tmp_path, **keys))


def test_the_noised_mean_by_hand() -> None:
    before = {"w": np.array([1.0, 2.0], np.float32)}
    mean = PrivateMean(before, 5.0, 0.0, 4.0, Noise(0))
    mean.add({"w": np.array([4.0, 6.0], np.float32)}, 100.0)  # an update of norm 5
    mean.add({"w": np.array([61.0, 82.0], np.float32)}, 1.0)  # of norm 100: clipped to (3, 4)
    mean.add({"w": np.array([math.nan, 0.0], np.float32)}, 1.0)
    assert mean.balance == 0.5 - 0.5 - 0.5
    mean.add(before, 1.0)  # one that sends back what it received, in the place of any other, moves neither by more
    assert mean.balance == 0.5 - 0.5 - 0.5
    assert mean.result()["w"].tolist() == [1.0 + 6 / 4, 2.0 + 8 / 4]
    # Nobody was drawn, and the noise is there.
    alone = PrivateMean({"w": np.zeros(100_000, np.float32)}, 5.0, 10.0, 4.0, Noise(0)).result()["w"]
    assert alone.std() == pytest.approx(10 / 4, rel=0.02)


def test_all_clients_weigh_the_same_where_something_is_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedavg", "privacy__epsilon": 0.0, "privacy__noise": 1e-9}
    # In a simulation clients say how many samples they have.
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    sent: list[dict[str, np.ndarray]] = []

    def note(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.content["config"]["round"] == 1:
            sent.append({name: a.copy() for name, a in from_record(reply.content.array_records["arrays"]).items()})
        return reply

    keys |= {"privacy__clip": 1e6, "partition": "dirichlet", "alpha": 0.3}
    outcome = federate(tmp_path / "runs", 3, rounds=2, tamper=note, **keys)
    message = next(m for m in outcome.grid.messages if m.content["config"].get("round") == 2)
    for name, array in from_record(message.content.array_records["arrays"]).items():
        np.testing.assert_allclose(array, np.mean([one[name] for one in sent], axis=0), atol=1e-5)


@pytest.mark.parametrize(("participation", "least", "drawn"), [(0.25, 1, 2), (0.2, 5, 5), (1.0, 1, 6)])
def test_the_noised_mean_of_so_many_as_are_drawn_is_over_them(
    tmp_path: Path, participation: float, least: int, drawn: int
) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedavg", "privacy__epsilon": 0.0, "privacy__noise": 1e-9}
    keys |= {"privacy__where": "server", "privacy__sampling": "fixed", "privacy__clip": 1e3, "checkpoint_every": 1}
    outcome, sent = uploads(tmp_path / "runs", 6, rounds=1, participation=participation, min_replies=least, **keys)
    assert len(sent) == drawn
    every = [from_record(record) for record in sent]
    for name, array in checkpointed(outcome).items():
        np.testing.assert_allclose(array, np.mean([one[name] for one in every], axis=0), atol=1e-5)


def test_in_a_round_in_which_nobody_is_drawn_noise_is_released(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__where": "server", "privacy__noise": 1.0}
    keys |= {"privacy__epsilon": 0.0, "participation": 1e-6, "rounds": 2, "checkpoint_every": 1}
    outcome = federate(tmp_path / "runs", 2, **keys)
    assert not any(one["trained"] for line in outcome.history for one in line["clients"].values())
    checkpoint, _ = Checkpoints(outcome.directory / "checkpoints").read()
    assert checkpoint.round == 2
    start = build_model("mlp", (64,), 10, 1, torch_generator(0, "model")).state_dict()["extractor.fc1.weight"]
    assert (checkpoint.arrays["extractor.fc1.weight"] - start.numpy()).std() > 0.5
    assert len(Ledger(outcome.directory / "privacy.jsonl").lines()) == 2


def test_no_client_is_refused_for_what_others_sent(tmp_path: Path) -> None:
    def enlarged(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            arrays = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: 1e4 * array for name, array in arrays.items()})
        return reply

    keys: dict[str, Any] = {"method": "fedper", "num_classes": 10, "rounds": 1}
    assert federate(tmp_path / "a", 5, tamper=enlarged, **keys).history[0]["refused"]
    keys |= {**CLIENT, "privacy__where": "server", "privacy__noise": 1.0, "privacy__epsilon": 0.0}
    outcome = federate(tmp_path / "b", 5, tamper=enlarged, **keys)
    assert not outcome.history[0]["refused"]
    assert sum(one["trained"] for one in outcome.history[0]["clients"].values()) == 5


@pytest.mark.parametrize("unit", ["example", "client"])
def test_an_absurd_update_is_refused_also_where_nodes_add_the_noise(tmp_path: Path, unit: str) -> None:
    """What comes from them is noised: to judge it by its size tells nothing more."""

    def absurd(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1000:
            arrays = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record({name: np.float32(1e15) * array for name, array in arrays.items()})
        return reply

    keys: dict[str, Any] = {"method": "fedper", "num_classes": 10, "rounds": 3, "privacy__unit": unit}
    keys |= {"privacy__noise": 1.0, "privacy__epsilon": 0.0, "checkpoint_every": 1}
    outcome = federate(tmp_path / "runs", 5, tamper=absurd, **keys)
    for line in outcome.history:
        (refusal,) = line["refused"]
        assert refusal["client"] == "0"
        assert "times as large as usual" in refusal["reason"]
        # What it has spent is spent.
        assert line["epsilon"] > 0
    checkpoint, _ = Checkpoints(outcome.directory / "checkpoints").read()
    assert max(np.abs(array).max() for array in checkpoint.arrays.values()) < 1e3
    assert PRIVACY + "told.0" in checkpoint.strategy


@pytest.mark.parametrize("noise", [0.01, 1.0, 10.0])
def test_honest_clients_that_add_noise_are_not_refused_for_its_size(tmp_path: Path, noise: float) -> None:
    keys: dict[str, Any] = {"num_classes": 10, "rounds": 6, "privacy__noise": noise, "privacy__epsilon": 0.0}
    keys |= {"partition": "dirichlet", "alpha": 0.3, "participation": 0.7}
    for unit, method in (("example", "fedper"), ("example", "fedavg"), ("client", "fedper")):
        outcome = federate(tmp_path / f"{unit}-{method}", 6, method=method, privacy__unit=unit, **keys)
        assert outcome.summary["refused"] == 0
        assert len(outcome.history) == 6


def test_each_client_is_drawn_with_the_probability_that_is_accounted_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, **CLIENT, privacy__where="server", participation=0.3)
    protection = Protection(config, simulated=True)
    drawn = [len(protection.draw(clients_of(50), i)) for i in range(1, 201)]
    assert np.mean(drawn) == pytest.approx(15, abs=1)
    assert np.std(drawn) == pytest.approx(math.sqrt(50 * 0.3 * 0.7), rel=0.2)
    assert protection.draw(clients_of(50), 1) == protection.draw(clients_of(50), 1)
    real = Protection(config, simulated=False)
    assert len({tuple(real.draw(clients_of(50), 1)) for _ in range(5)}) > 1


def test_the_bound_follows_the_quantile(tmp_path: Path) -> None:
    keys = {**CLIENT, "privacy__where": "server", "privacy__clip": 10.0, "privacy__noise": 1.0, "participation": 1.0}
    config = config_of(tmp_path, **keys, privacy__clip_quantile=0.5, privacy__epsilon=0.0)
    protection = Protection(config, simulated=True)
    before = {"w": np.zeros(1, np.float32)}
    for i in range(1, 120):
        mean = protection.mean(before, 200, i)
        for size in np.linspace(0.5, 1.5, 200):
            mean.add({"w": np.array([size], np.float32)}, 1.0)
        protection.pay(i)
    assert protection._bound == pytest.approx(1.0, rel=0.1)
    assert protection.epsilon == pytest.approx(epsilon_of([Release(1.0, 1.0, 119)], 1e-5))
    # Together, the noised sum and the noised share cost what a sum of noise 1 alone would.
    share = 2 * max(200 / 20, 1.0)
    assert mean._deviation / mean._bound == pytest.approx((1 - share**-2) ** -0.5)


def test_an_update_is_to_what_clients_received(tmp_path: Path) -> None:
    """Tensors that travel in half precision are not those that the server has; who sends them back has no update."""
    keys = {**CLIENT, "method": "fedavg", "model": "mlp", "privacy__where": "server", "privacy__noise": 1.0}
    config, kind, parameters = read_config(run_config(tmp_path, **keys, wire="float16"))
    roster = Roster()
    for client in clients_of(4):
        roster.add(client)
    strategy = build_strategy(config, kind, parameters, (2,), 10, roster=roster, session=Session("a"))
    sent = strategy.initial_arrays()
    list(strategy.configure_train(1, to_record(sent), ConfigRecord(), None))  # type: ignore[arg-type]
    strategy.begin_round()
    mean = strategy._aggregate
    assert isinstance(mean, PrivateMean)
    mean.add({name: array.astype(np.float16).astype(np.float32) for name, array in sent.items()}, 1.0)
    assert mean.balance == 0
    assert not any(total.any() for total in mean._sums.values())
    mean.add({name: array.astype(np.float32) for name, array in sent.items()}, 1.0)
    assert any(total.any() for total in mean._sums.values())


def test_the_share_of_a_round_is_of_the_clients_that_its_sum_is_of(tmp_path: Path) -> None:
    """Of 1,000 clients that are there when a round begins most are gone when it ends."""
    asked: list[float] = []

    class Once:
        def once(self, shape: tuple[int, ...], deviation: float) -> np.ndarray:
            asked.append(deviation)
            return np.zeros(shape)

    keys = {**CLIENT, "method": "fedavg", "model": "mlp", "privacy__where": "server", "privacy__noise": 1.0}
    keys |= {"participation": 0.5, "privacy__clip_quantile": 0.5, "privacy__epsilon": 0.0}
    config, kind, parameters = read_config(run_config(tmp_path, **keys))
    roster = Roster()
    for client in clients_of(1000):
        roster.add(client)
    strategy = build_strategy(config, kind, parameters, (2,), 10, roster=roster, session=Session("a"))
    protection = strategy.protection
    assert protection is not None

    def replies() -> Iterator[Message]:
        assert isinstance(strategy._aggregate, PrivateMean)
        strategy._aggregate.balance = -250.0  # 500 were drawn, and all of their updates are above the bound
        roster.see([])
        yield from ()

    list(strategy.configure_train(1, to_record(strategy.initial_arrays()), ConfigRecord(), None))  # type: ignore[arg-type]
    protection._source = lambda purpose, server_round: Once()  # type: ignore[method-assign, assignment, return-value]
    strategy.aggregate_train(1, replies())
    share, noise = asked[0], asked[1] / config.privacy.clip
    assert share == 500 / 20
    # Together they cost what is paid for: a release of noise 1.
    assert (noise**-2 + (2 * share) ** -2) ** -0.5 == pytest.approx(1.0)
    # Nobody is below the bound.
    assert protection._bound == pytest.approx(config.privacy.clip * math.exp(0.2 * 0.5))


def test_a_server_that_resumes_pays_for_its_rounds_again(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__where": "server", "privacy__epsilon": 0.0}
    keys |= {"privacy__noise": 2.0, "participation": 0.5}
    federate(tmp_path / "runs", rounds=2, **keys)
    states = tmp_path / "states"
    first = federate(tmp_path / "again", rounds=2, states=states, **keys)
    assert [line["epsilon"] for line in first.history] == [
        epsilon_of([Release(2.0, 0.5, rounds)], 1e-5) for rounds in (1, 2)
    ]
    # As if the server had been killed after the round, and before its checkpoint.
    for path in first.directory.glob("checkpoints/*2*"):
        path.unlink()
    ledger = Ledger(first.directory / "privacy.jsonl")
    assert [line.round for line in ledger.lines()] == [1, 2]
    again = federate(tmp_path / "again", rounds=3, states=states, resume=str(first.directory), **keys)
    lines = ledger.lines()
    assert [(line.attempt, line.round) for line in lines[2:]] == [(1, r) for r in range(4 - len(lines[2:]), 4)]
    assert again.history[-1]["epsilon"] == epsilon_of([Release(2.0, 0.5, len(lines))], 1e-5)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_server_whose_account_lacks_rounds_does_not_go_on(tmp_path: Path, kept: int) -> None:
    """Both files gone, or of an older copy: it would count for less than the run has spent."""
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__where": "server", "privacy__epsilon": 0.0}
    keys |= {"privacy__noise": 2.0, "states": tmp_path / "states"}
    older = federate(tmp_path / "runs", rounds=1, **keys).directory
    files = {name: (older / name).read_bytes() for name in ("privacy.jsonl", "privacy.json")}
    first = federate(tmp_path / "runs", rounds=3, resume=str(older), **keys).directory
    for name, content in files.items():
        (first / name).unlink()
        if kept:
            (first / name).write_bytes(content)
    line = rf"privacy\.jsonl: does not have round {kept + 1}, and the checkpoint is of round 3"
    federate(tmp_path / "runs", rounds=4, resume=str(first), fails=line, **keys)


def test_more_noise_may_be_demanded_than_the_number_of_examples_gets(tmp_path: Path) -> None:
    site = Site(tmp_path, "min-noise: 25")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "example", "privacy__epsilon": 0.0}
    assert "arrays" in site.ask("train", shared(initial()), privacy__noise=30.0, **keys)
    assert "min-noise = 25, and this run adds 24 times" in site.refusal(privacy__noise=24.0, **keys)


@pytest.mark.parametrize("where", ["node", "server"])
def test_a_budget_that_is_less_than_a_round_is_refused_before_the_first(tmp_path: Path, where: str) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__noise": 4.0, "privacy__where": where}
    keys["round_timeout"] = 20.0  # nobody joins such a run
    one = epsilon_of([Release(4.0, 1.0, 1)], 1e-5)
    wrong = rf"^privacy\.epsilon = {one - 0.1:g}: with privacy\.noise = 4 a round costs {one:.4g}; take a larger one"
    with pytest.raises(ConfigError, match=wrong):
        federate(tmp_path, rounds=6, **keys, privacy__epsilon=one - 0.1)
    with pytest.raises(ConfigError, match=r"^privacy\.epsilon = 1e-05: no noise is enough for it in 6 rounds"):
        federate(tmp_path, rounds=6, **(keys | {"privacy__noise": 0.0}), privacy__epsilon=1e-5)
    assert not list(tmp_path.glob("*/history.jsonl"))
    assert len(federate(tmp_path, rounds=6, **keys, privacy__epsilon=one + 1e-6).history) == 1


def test_a_run_ends_at_its_budget_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__noise": 4.0}
    three = epsilon_of([Release(4.0, 1.0, 3)], 1e-5)
    for where in ("node", "server"):
        caplog.clear()
        outcome = federate(tmp_path / where, rounds=6, **keys, privacy__epsilon=three + 1e-6, privacy__where=where)
        assert len(outcome.history) == 3
        assert outcome.history[-1]["epsilon"] == pytest.approx(three)
        assert outcome.summary["epsilon"] == pytest.approx(three)
        assert f"privacy.epsilon = {three + 1e-6:g} is spent after round 3 of 6; the run ends here" in caplog.text
        assert not any(line["refused"] for line in outcome.history)


def test_a_run_whose_last_client_with_a_budget_goes_away_keeps_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, False, False, True])  # before and after rounds 1 and 2, and before round 3
    monkeypatch.setattr("server_app.rounds._spent", lambda _: next(answers))
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "rounds": 6, "checkpoint_every": 5}
    outcome = federate(tmp_path / "runs", **keys)
    assert [line["round"] for line in outcome.history] == [1, 2]
    assert Checkpoints(outcome.directory / "checkpoints").read()[0].round == 2


def test_the_round_that_spends_what_all_have_is_the_last_though_all_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, gone = Roster.present, list[Message]()

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.group_id == "3":
            gone.append(message)
        return reply

    monkeypatch.setattr(Roster, "present", lambda roster: [] if gone else present(roster))
    keys: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__noise": 4.0, "rounds": 6, "round_timeout": 5.0}
    keys |= {"privacy__epsilon": epsilon_of([Release(4.0, 1.0, 3)], 1e-5) + 1e-6}
    outcome = federate(tmp_path, tamper=tamper, **keys)
    assert [line["round"] for line in outcome.history] == [1, 2, 3]


@pytest.mark.thorough
def test_a_calibrated_run_spends_its_target(tmp_path: Path, local: Local) -> None:
    result = local.run(tmp_path / "runs", method="fedper", rounds=3, **EXAMPLE, privacy__epsilon=3.0)
    spent = [line["epsilon"] for line in result.history]
    assert spent == sorted(spent)
    assert 2.98 < spent[-1] <= 3.0
    assert all(2.98 < one["epsilon"] <= 3.0 for one in result.history[-1]["clients"].values())
    # In a simulation all data are the user's own, and accuracies are there.
    assert result.summary["accuracy"]["after"]["mean"] > 0.3
    assert "| epsilon 3 " in result.log or "| epsilon 3\n" in result.log
    assert "Privacy spent" in (result.directory / "report.html").read_text()
    again = local.run(tmp_path / "again", method="fedper", rounds=3, **EXAMPLE, privacy__epsilon=3.0)
    assert timeless(again.history) == timeless(result.history)


def test_a_resumed_run_goes_on_from_what_its_clients_have_spent(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**EXAMPLE, "method": "fedper", "privacy__noise": 2.0, "privacy__epsilon": 0.0}
    states = tmp_path / "states"
    part = federate(tmp_path / "runs", rounds=2, states=states, **keys)
    more = federate(tmp_path / "runs", rounds=3, states=states, resume=str(part.directory), **keys)
    lines = Ledger.of(states, "0").lines()
    assert [line.round for line in lines if line.release != COUNT] == [1, 2, 3]
    assert more.history[-1]["clients"]["0"]["epsilon"] == epsilon_of([line.release for line in lines], 1e-5)


# Mistakes


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"privacy__unit": "sample"}, "privacy.unit = 'sample': must be one of none, client, example"),
        ({**EXAMPLE, "privacy__epsilon": 0.0}, "privacy.unit = 'example': needs privacy.epsilon"),
        (
            {**EXAMPLE, "privacy__where": "server"},
            "privacy.where = 'server': with privacy.unit = 'example' each client",
        ),
        (
            {**CLIENT, "privacy__clip_quantile": 0.5},
            "privacy.clip-quantile = 0.5: the clipping adapts where the server",
        ),
        ({**CLIENT, "privacy__noise": math.inf}, "privacy.noise = inf: must be at least 0 and at most 10000"),
        ({**EXAMPLE, "privacy__delta": 0.0}, "privacy.delta = 0.0: must be above 0"),
        ({**EXAMPLE, "method": "fedproto"}, "privacy.unit = 'example': fedproto sends what has no mechanism for it"),
        ({**EXAMPLE, "method": "local"}, "privacy.unit = 'example': local sends nothing of the data; leave it out"),
        ({**CLIENT, "aggregation": "median"}, "aggregation = 'median': with privacy.unit = 'client' only the mean has"),
        ({**EXAMPLE, "precision": "bfloat16"}, "precision = 'bfloat16': privacy.unit = 'example' clips gradients"),
        (
            {**EXAMPLE, "model": "resnet18", "dataset": "digits", "image_size": 32},
            "model = 'resnet18': privacy.unit = 'example' needs the gradient of each example, and its BatchNorm2d",
        ),
        (
            {**CLIENT, "model": "resnet18", "dataset": "digits", "image_size": 32},
            "batch-norm = 'shared': with privacy.unit = 'client' running statistics would be noised",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(run_config(tmp_path, **({"method": "fedper"} | keys)), 4)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_real_clients_do_not_tell_their_classes_so_the_run_has_to(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"num-classes = 0: with privacy.unit = 'example' no client tells its classes"
    ):
        check_run(run_config(tmp_path, method="fedper", privacy__unit="example"), None)


def test_privacy_cannot_be_switched_while_a_run_is_resumed(tmp_path: Path) -> None:
    first = federate(tmp_path / "runs", rounds=1, method="fedper", num_classes=10)
    with pytest.raises(ConfigError, match=r"privacy.unit = 'client': the run to resume has 'none'"):
        federate(tmp_path / "runs", rounds=2, method="fedper", resume=str(first.directory), **CLIENT)


# The ledger


LINE = Line("run", 0, "default", "fedper", 1, "example", by_server=False, noise=1.0, rate=0.1, steps=10)


def spend(path: Path, rounds: int) -> None:
    ledger = Ledger(path)
    for i in range(rounds):
        with ledger.open() as opened:
            opened.add(replace(LINE, round=i + 1))


def test_a_ledger_grows_and_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert Ledger(path).lines() == []
    spend(path, 3)
    assert [line.round for line in Ledger(path).lines()] == [1, 2, 3]
    assert path.stat().st_mode & 0o077 == 0


def cut(text: bytes) -> bytes:
    return b"".join(text.splitlines(keepends=True)[:-2])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut, "it has 3 lines, a.json beside it says 5"),
        (lambda text: text.replace(b'"steps": 10', b'"steps": 1', 1), "line 2 is not what was written"),
        (lambda text: b"".join(text.splitlines(keepends=True)[1:]), "line 1 is not what was written"),
        (lambda text: b"[1]\n" + text, "line 1 cannot be read"),
        (lambda text: b"", "it has 0 lines, a.json beside it says 5"),
        (lambda text: text.replace(b'"noise": 1.0', b'"noise": NaN', 5), "line 1 is not what was written"),
    ],
)
def test_a_ledger_that_was_changed_is_found_out(tmp_path: Path, change: Any, why: str) -> None:
    path = tmp_path / "a.jsonl"
    spend(path, 5)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedError) as error:
        Ledger(path).lines()
    assert why in str(error.value)
    with pytest.raises(DamagedError), Ledger(path).open():
        pass


def test_a_ledger_without_its_head_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    spend(path, 2)
    path.with_suffix(".json").unlink()
    with pytest.raises(DamagedError, match=r"a.json beside it is gone"):
        Ledger(path).lines()


def test_what_a_crash_left_of_a_line_is_cut_off_and_a_whole_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    spend(path, 2)
    head = path.with_suffix(".json").read_bytes()
    with path.open("ab") as file:
        file.write(b'{"run": "ru')
    assert len(Ledger(path).lines()) == 2
    spend(path, 1)
    assert len(Ledger(path).lines()) == 3
    # The line was flushed, its head was not written.
    path.with_suffix(".json").write_bytes(head)
    assert len(Ledger(path).lines()) == 3
    spend(path, 1)
    assert len(Ledger(path).lines()) == 4


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_head_that_could_not_be_written_is_written_before_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    spend(path, 2)
    head = path.with_suffix(".json").read_bytes()
    spend(path, 1)
    path.with_suffix(".json").write_bytes(head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.privacy.ledger.write_manifest", full_disk)
        with pytest.raises(FloretError, match="nothing is released"):
            spend(path, 1)
    assert len(Ledger(path).lines()) == 3
    spend(path, 1)
    assert len(Ledger(path).lines()) == 4


def test_two_processes_with_one_ledger_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    workers = [get_context("fork").Process(target=spend, args=(path, 20)) for _ in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        Ledger(path).lines()  # whoever reads meanwhile finds it whole
        time.sleep(0.01)  # who waits for the file is woken late where the machine is busy, and a reader had it again
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(Ledger(path).lines()) == 60


def test_a_node_stops_at_its_own_budget_whatever_the_server_says(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-epsilon: 5\ndelta: 1e-5\nleaves: [extractor]\n")
    assert site.refusal(arrays=shared(initial())) == (
        "this node's policy has max-epsilon = 5, and privacy.unit = 'none'"
    )
    keys = {**PROTECTED, "privacy__noise": 1.5, "privacy__epsilon": 0.0, "rounds": 100}
    # Another run each time, another method, another federation, another delta: it is one ledger.
    others: tuple[dict[str, Any], ...] = ({}, {"method": "pfakd"}, {"federation": "b"}, {"privacy__delta": 0.1})
    refused = 0
    for asked in range(20):
        scalars = {"session.lineage": f"run{asked}"}
        reply = site.ask("train", shared(initial()), scalars, **keys, **others[asked % 4])
        refused += "error" in reply
    assert 0 < refused < 20
    lines = Ledger.of(tmp_path / "state", "site").lines()
    assert 3 < epsilon_of([line.release for line in lines], 1e-5) <= 5
    # A round that would cost too much has not been paid for; but its number of examples has, which told what it costs.
    assert {line.run for line in lines if line.release != COUNT} < {line.run for line in lines}
    reason = str(dict(site.ask("train", shared(initial()), **{**keys, "privacy__noise": 0.5})["error"])["reason"])
    assert reason.startswith("this node's policy has max-epsilon = 5 with delta = 1e-05; it has spent ")


def test_a_refusal_tells_no_number_of_examples_that_is_not_paid_for(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-epsilon: 1\ndelta: 1e-5\nleaves: [extractor]\n")
    keys = {**PROTECTED, "privacy__noise": 0.4, "privacy__epsilon": 0.0, "rounds": 100}

    def asked(run: str) -> tuple[str, int]:
        reply = site.ask("train", shared(initial()), {"session.lineage": run}, **keys)
        return str(dict(reply["error"])["reason"]), len(Ledger.of(tmp_path / "state", "site").lines())

    first = asked("a")
    assert "this round would make it" in first[0]
    # The same run is told the same again, and pays once.
    assert first[1] == 1
    assert asked("a") == first
    # Others draw their own, until that alone is too much: then the reason is the same for all, whatever the data are.
    answers = [asked(f"run{i}") for i in range(60)]
    told = {reason for reason, lines in answers if lines == answers[-1][1]}
    assert answers[-1][1] < 60
    assert len(told) <= 2  # one of the last that was paid for
    spent = [line.release for line in Ledger.of(tmp_path / "state", "site").lines()]
    assert set(spent) == {COUNT}
    assert epsilon_of(spent, 1e-5) <= 1 < epsilon_of([*spent, COUNT], 1e-5)


def test_a_clock_that_is_set_back_gives_nothing_back(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-epsilon: 5\ndelta: 1e-5\nleaves: [extractor]\n")
    keys, refused = {**PROTECTED, "privacy__noise": 1.5, "privacy__epsilon": 0.0}, []
    for asked in range(12):
        now = 1.7e9 - 1e8 * asked
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            refused.append("error" in site.ask("train", shared(initial()), **keys))
        for file in (tmp_path / "state" / ".privacy").iterdir():
            os.utime(file, (now, now))
    assert refused == sorted(refused)  # at the budget it ends, for good
    assert 0 < sum(refused) < 12
    spent = [line.release for line in Ledger.of(tmp_path / "state", "site").lines()]
    assert 3 < epsilon_of(spent, 1e-5) <= 5


def test_a_damaged_ledger_lets_nothing_leave(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ask("train", shared(initial()), **PROTECTED)
    path = tmp_path / "state" / ".privacy" / "site.jsonl"
    path.write_bytes(b"")
    assert "site.jsonl is damaged: it has 0 lines" in site.refusal(arrays=shared(initial()), **PROTECTED)


def test_a_run_with_noise_by_the_server_is_paid_in_advance(tmp_path: Path) -> None:
    site = Site(tmp_path, "noise-by-server: true\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__where": "server", "rounds": 20}
    keys |= {"privacy__noise": 2.0, "participation": 0.25}

    def ask(resumed: list[int], round_: int, **more: Any) -> list[tuple[int, Release]]:
        scalars = {"session.resumed": resumed, "round": round_, "session.lineage": more.pop("lineage", "run")}
        reply = site.ask("train", shared(initial()), scalars, **(keys | more))
        assert "arrays" in reply, reply
        return [(line.attempt, line.release) for line in Ledger.of(tmp_path / "state", "site").lines()]

    none: list[int] = [0][:0]
    first = [(0, Release(2.0, 0.25, 20))]
    assert ask(none, 3) == ask(none, 7) == first
    # Rounds that a resumed server makes again are paid again, once.
    resumed = [*first, (1, Release(2.0, 0.25, 4))]
    assert ask([16], 17) == ask([16], 18) == resumed
    # Who is drawn for the first time after a resume pays for what came before it, too.
    late = [*resumed, (0, Release(2.0, 0.25, 20)), (1, Release(2.0, 0.25, 4))]
    assert ask([16], 17, lineage="late") == late
    # Another noise than was paid for, or more rounds, is paid for.
    assert ask(none, 8, lineage="other") == [*late, first[0]]
    assert ask(none, 9, lineage="other", privacy__noise=1.0)[-1] == (0, Release(1.0, 0.25, 20))
    assert ask(none, 10, lineage="other", rounds=30)[-1] == (0, Release(2.0, 0.25, 10))
    # Always the same number of clients: no amplification, and each message is paid for itself.
    for round_ in (1, 2):
        lines = ask(none, round_, lineage="fixed", privacy__sampling="fixed")
    assert lines[-2:] == [(0, Release(2.0, 1.0, 1))] * 2


def test_whoever_joins_a_run_with_secret_draws_pays_for_all_of_it(tmp_path: Path) -> None:
    """Whether it is drawn or not: that it was in no round of 20 has a probability that depends on its data, too."""
    site = Site(tmp_path, "noise-by-server: true\nmax-epsilon: 4\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__where": "server", "rounds": 20}
    keys |= {"privacy__noise": 2.0, "participation": 0.25}

    def lines() -> list[tuple[str, int, Release]]:
        return [(line.run, line.attempt, line.release) for line in Ledger.of(tmp_path / "state", "site").lines()]

    # Of which run it is has to be said before it joins.
    for wrong, line in (
        ({"session.lineage": 7}, "session.lineage = 7: must be a name"),
        ({"session.starts": ["a", "b"]}, "session.started = [0]: must be a round for each"),
    ):
        assert site.refusal("query.describe", scalars=wrong, **keys).startswith(line)
    assert lines() == []
    paid = [("run", 0, Release(2.0, 0.25, 20))]
    for _ in range(2):  # a node that is started again is asked again
        assert "client" in site.ask("query.describe", **keys)
        assert lines() == paid
    assert "arrays" in site.ask("train", shared(initial()), **keys)
    assert lines() == paid
    resumed = {"session.resumed": [16]}
    assert "client" in site.ask("query.describe", scalars=resumed, **keys)
    assert lines() == [*paid, ("run", 1, Release(2.0, 0.25, 4))]
    # What it has left is not enough for another run, so it does not join.
    said = site.refusal("query.describe", scalars={"session.lineage": "another"}, **keys)
    assert said.startswith("this node's policy has max-epsilon = 4 with delta = 1e-05; it has spent 3.")
    assert len(lines()) == 2
    # A server that always draws as many says who it draws: who is in no round tells nothing, and pays nothing.
    assert "client" in site.ask("query.describe", scalars={"session.lineage": "x"}, **keys, privacy__sampling="fixed")
    assert len(lines()) == 2


def test_joining_a_run_that_is_paid_for_counts_as_a_round_and_has_a_bound(tmp_path: Path) -> None:
    site = Site(tmp_path, "noise-by-server: true\nmax-rounds-a-day: 1\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__where": "server", "rounds": 200}
    keys |= {"privacy__noise": 2.0, "participation": 0.25}
    # 101 starts, each of which made rounds that have to be paid for.
    many = {"session.lineage": "many", "session.resumed": list(range(1, 101))}
    line = site.refusal("query.describe", scalars=many, **keys)
    assert line.startswith(
        "the server was started 101 times for which this client has not paid; it pays for at most 100"
    )
    assert Ledger.of(tmp_path / "state", "site").lines() == []
    for _ in range(2):  # the second time there is nothing to pay
        assert "client" in site.ask("query.describe", scalars={"session.lineage": "a"}, **keys)
    line = site.refusal("query.describe", scalars={"session.lineage": "b"}, **keys)
    assert line.startswith("this node's policy has max-rounds-a-day = 1")
    assert len(Ledger.of(tmp_path / "state", "site").lines()) == 1


def test_who_joins_is_told_of_the_run_where_it_pays_for_it(tmp_path: Path) -> None:
    def told(folder: str, **keys: Any) -> list[dict[str, Any]]:
        same: dict[str, Any] = {**CLIENT, "method": "fedper", "privacy__noise": 1.0, "round_timeout": 20.0, **keys}
        states = tmp_path / f"{folder} states"
        outcome = federate(tmp_path / folder, 3, rounds=1, states=states, **same)
        again = federate(tmp_path / folder, 3, rounds=2, resume=str(outcome.directory), states=states, **same)
        found = []
        for messages in (outcome.grid.messages, again.grid.messages):
            describe, train = (
                next(m for m in messages if m.metadata.message_type == kind) for kind in ("query.describe", "train")
            )
            said, of_run = (dict(m.content.config_records["config"]) for m in (describe, train))
            assert said == ({key: of_run[key] for key in said} if said else {})
            found.append(said)
        return found

    first, again = told("server", privacy__where="server")
    assert (first["session.resumed"], again["session.resumed"]) == ([], [1])
    assert again["session.started"] == [0, 1]
    assert told("node") == [{}, {}]


def test_each_start_of_a_server_is_paid_for_also_after_the_same_round(tmp_path: Path) -> None:
    """With noise by the server; a copy of its directory begins with the same checkpoint, too."""
    site = Site(tmp_path, "noise-by-server: true\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__where": "server", "rounds": 20}
    keys |= {"privacy__noise": 2.0, "participation": 0.25}

    def paid(lineage: str, starts: list[str], started: list[int], resumed: list[int]) -> list[tuple[str, int]]:
        scalars: dict[str, Any] = {"session.lineage": lineage, "session.starts": starts, "session.started": started}
        reply = site.ask("train", shared(initial()), {**scalars, "session.resumed": resumed, "round": 17}, **keys)
        assert "arrays" in reply, reply
        lines = Ledger.of(tmp_path / "state", "site").lines()
        return [(line.start, line.steps) for line in lines if line.run == lineage]

    first = [("a", 20)]
    assert paid("run", ["a"], [0], [0][:0]) == first
    assert paid("run", ["a", "b"], [0, 16], [16]) == [*first, ("b", 4)]
    assert paid("run", ["a", "b", "c"], [0, 16, 16], [16]) == [*first, ("b", 4), ("c", 4)]
    # A copy of the directory knows nothing of b and c.
    assert paid("run", ["a", "d"], [0, 16], [16]) == [*first, ("b", 4), ("c", 4), ("d", 4)]
    assert paid("run", ["a", "b", "c"], [0, 16, 16], [16]) == [*first, ("b", 4), ("c", 4), ("d", 4)]
    # Who is drawn for the first time pays for the starts that got no further, too.
    assert paid("late", ["a", "b", "c"], [0, 16, 16], [16]) == [("a", 20), ("b", 4), ("c", 4)]
    # Starts and lines from before starts had names: what was paid then counts once.
    with Ledger.of(tmp_path / "state", "site").open() as ledger:
        line = replace(ledger.lines[0], run="old", start="")
        ledger.add(line)
        ledger.add(replace(line, attempt=1, steps=4))
    old = [("", 20), ("", 4)]
    assert paid("old", ["", "", "c"], [0, 16, 16], [16]) == [*old, ("c", 4)]
    assert paid("old", ["", "", "", "c"], [0, 16, 16, 16], [16]) == [*old, ("c", 4), ("", 4)]


def test_a_line_from_before_starts_had_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    spend(path, 1)
    said = json.loads(path.read_bytes())
    del said["start"]
    path.write_bytes(json.dumps(said).encode() + b"\n")
    path.with_suffix(".json").unlink()  # of a ledger of one line it need not be there
    assert Ledger(path).lines() == [replace(LINE, round=1)]
    spend(path, 1)
    assert len(Ledger(path).lines()) == 2


@pytest.mark.parametrize(
    ("scalars", "why"),
    [
        ({"session.starts": ["a b"]}, "session.starts = ['a b']: must be a list of names"),
        ({"session.starts": "a"}, "session.starts = 'a': must be a list of names"),
        ({"session.starts": ["a", "b"]}, "session.started = [0]: must be a round for each of session.starts"),
        ({"session.started": [1]}, "session.started = [1]: must be a round for each of session.starts, from 0 to 0"),
        ({"session.starts": ["a"], "session.started": [0], "session.resumed": [0]}, ""),
    ],
)
def test_starts_that_say_something_else_are_refused(tmp_path: Path, scalars: dict[str, Any], why: str) -> None:
    site = Site(tmp_path, "noise-by-server: true\n")
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__where": "server", "participation": 0.5}
    if not why:
        assert "arrays" in site.ask("train", shared(initial()), scalars, **keys)
        return
    assert site.refusal(arrays=shared(initial()), scalars=scalars, **keys).startswith(why)
    assert not Ledger.of(tmp_path / "state", "site").lines()


def test_two_resumes_after_the_same_round_are_two_starts(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "fedper", "num_classes": 10}
    states = tmp_path / "states"
    first = federate(tmp_path / "runs", rounds=1, states=states, **keys)
    copy = tmp_path / "copy"
    shutil.copytree(first.directory, copy)

    def told(directory: Path) -> tuple[list[str], list[int]]:
        again = federate(directory.parent, rounds=2, states=states, resume=str(directory), **keys)
        message = next(m for m in again.grid.messages if m.metadata.message_type == "train")
        said: dict[str, Any] = dict(message.content.config_records["config"])
        assert said["session.resumed"] == [1]
        for path in directory.glob("checkpoints/*2*"):
            path.unlink()
        (directory / "summary.json").unlink()
        return said["session.starts"], said["session.started"]

    one, two, other = told(first.directory), told(first.directory), told(copy)
    assert (one[1], two[1], other[1]) == ([0, 1], [0, 1, 1], [0, 1])
    assert two[0][:2] == one[0]
    assert other[0][0] == one[0][0]
    names = {*two[0], *other[0]}
    assert len(names) == 4
    assert "" not in names


@pytest.mark.parametrize(
    ("scalars", "why"),
    [
        ({"round": 21}, "the server's message has round = 21; it must be from 1 to 20"),
        ({"round": 4, "session.resumed": [4]}, "the server's message has round = 4; it must be from 5 to 20"),
        ({"num-classes": CLASSES - 1}, f"the server's message has num-classes = {CLASSES - 1}, the run {CLASSES}"),
    ],
)
def test_odd_values_of_a_message_are_refused_and_cost_nothing(tmp_path: Path, scalars: Any, why: str) -> None:
    site = Site(tmp_path)
    assert site.refusal(arrays=shared(initial()), scalars=scalars, **PROTECTED) == why
    assert not Ledger.of(tmp_path / "state", "site").lines()


def test_whether_a_message_is_refused_does_not_tell_of_the_personal_model(tmp_path: Path) -> None:
    """The bound on what the server sends is that of the initial model, before and after training."""
    keys: dict[str, Any] = {**PROTECTED, "method": "fedbabu", "fedbabu__fine_tune_epochs": 30}
    site, large = Site(tmp_path), {name: 3e5 * array for name, array in shared(initial()).items()}
    first = site.refusal(arrays=large, **keys)
    assert "is refused" in first
    site.ask("train", shared(initial()), lr=0.5, **keys)
    assert site.refusal(arrays=large, **keys) == first
    assert site.refusal("evaluate", arrays=large, **keys) == first


def test_that_training_diverged_is_not_told(tmp_path: Path) -> None:
    for method, unit in (("fedbabu", "example"), ("ditto", "example"), ("fedper", "client")):
        site, whole = Site(tmp_path / method), initial() if method == "ditto" else shared(initial())
        keys: dict[str, Any] = {**PROTECTED, "method": method, "privacy__unit": unit, "weight_decay": 0.0}
        for lr in (1e30, 1e5, 1e30):
            assert "arrays" in site.ask("train", whole, lr=lr, **keys), method
        assert "diverged" in site.refusal(arrays=whole, lr=1e30, method=method, weight_decay=0.0)


def test_examples_of_other_classes_are_passed_over_in_silence(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**PROTECTED, "num_classes": 4}
    site = Site(tmp_path)
    said = {**site.ask("query.describe", **keys)["client"]}
    assert (said["name"], said["num-classes"]) == ("site", 4)
    small = build_model("mlp", (30,), 4, 1, torch_generator(0, "model")).state_dict()
    arrays = {name: tensor.numpy() for name, tensor in small.items() if name.startswith("extractor")}
    assert "arrays" in site.ask("train", arrays, {"num-classes": 4}, **keys)


@pytest.mark.parametrize("method", PROTECTING)
def test_that_no_example_is_left_is_not_told(tmp_path: Path, method: str) -> None:
    """Of one example, and of none, the same leaves: noise, in every round."""
    model = build_model("mlp", (30,), 2, 1, torch_generator(0, "model")).state_dict()
    whole = load_class("strategies", method, FloretStrategy).shares == "model"
    arrays = {n: t.numpy() for n, t in model.items() if whole or n.startswith("extractor")}
    keys: dict[str, Any] = {**PROTECTED, "num_classes": 2, "local_epochs": 2, "method": method}
    for of_the_run, rows in ((1, 60), (0, 60), (0, 0)):
        site = Site(tmp_path / f"{of_the_run}-{rows}")
        y = np.full(60, 5)
        y[:of_the_run] = 0
        np.savez(site.folder / "data" / "train.npz", x=site.train_x[:rows], y=y[:rows])
        np.savez(site.folder / "data" / "test.npz", x=site.train_x, y=y)
        for _ in range(2):
            reply = site.ask("train", arrays, {"num-classes": 2}, **keys)
            assert metrics_of(reply).keys() == {"num-examples", "epsilon", "epsilon-next"}
            sent = arrays_of(reply)
            assert all(np.isfinite(array).all() for array in sent.values())
            assert any(not np.array_equal(sent[name], arrays[name]) for name in arrays)
        assert metrics_of(site.ask("evaluate", {}, {"num-classes": 2}, **keys)) == {"num-examples": 1}


def folders_of(site: Site, train: dict[str, int]) -> None:
    """Give a site images, so many of each class in training and two of cold in test."""
    shutil.rmtree(site.folder / "data")
    for part, images in (("train", train), ("test", {"cold": 2})):
        for name, count in images.items():
            folder = site.folder / "data" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(np.full((8, 8), 50 + i, np.uint8)).save(folder / f"{i}.png")


def data_of(site: Site, **keys: Any) -> ClientData:
    values = run_config(site.folder, method="fedper", model="mlp", image_size=8, **keys)
    return Request(Context(run_id=1, node_id=7, node_config=site.node, state=RecordDict(), run_config=values)).data


@pytest.mark.parametrize("unit", ["example", "client"])
def test_labels_of_images_do_not_follow_from_the_folders_that_there_are(
    tmp_path: Path, unit: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    keys: dict[str, Any] = {"num_classes": 3, "privacy__unit": unit, "image_channels": 1}

    def labels(train: dict[str, int], **more: Any) -> list[int]:
        folders_of(site, train)
        data = data_of(site, **keys, **more)
        assert data.class_names == ("asthma", "cold", "flu")
        counts: list[int] = data.train.y.bincount(minlength=3).tolist()
        return counts

    names = "asthma,cold,flu"
    # One example, with its folder, changes no other's label.
    assert labels({"asthma": 1, "cold": 4, "flu": 5}, class_names=names) == [1, 4, 5]
    assert labels({"cold": 4, "flu": 5}, class_names=names) == [0, 4, 5]
    # A class that the run does not have is passed over, and the owner alone reads of it.
    assert labels({"Flu": 1, "cold": 4}, class_names=names) == [0, 4, 0]
    line = (
        f"{tmp_path}/data/train/Flu is passed over: it is not one of the classes of class-names (did you mean 'flu'?)"
    )
    assert line in caplog.text
    # Nothing is left to train on, which is not told, whatever folders there are.
    for train in ({"other": 3}, {"flu": 0}):
        folders_of(site, train)
        assert "client" in site.ask("query.describe", model="mlp", image_size=8, class_names=names, **keys)
        assert labels(train, class_names=names) == [0, 0, 0]
    # Without names nobody knows which class is which.
    why = "class-names = '': where data are protected, labels of images must not follow from which folders a client has"
    assert site.refusal("query.describe", model="mlp", image_size=8, **keys).startswith(why)
    more = {"class_names": f"{names},measles"}
    assert site.refusal("query.describe", model="mlp", image_size=8, **keys, **more) == (
        "class-names has 4 classes; num-classes = 3 must be at least that"
    )
    # A file of the owner says it, too.
    folders_of(site, {"cold": 4, "flu": 5})
    (tmp_path / "data" / "classes.txt").write_text("asthma\ncold\nflu\n")
    assert data_of(site, **keys).train.y.bincount(minlength=3).tolist() == [0, 4, 5]
    # Nobody asks class by class what there is in the test part, or, by an image of another form, whether one is there.
    folders_of(site, {"asthma": 4})
    Image.new("RGB", (9, 9)).save(tmp_path / "data" / "train" / "asthma" / "another.png")
    data = data_of(site, class_names="asthma", **keys)
    assert (len(data.train), len(data.test), data.input_shape) == (5, 0, (1, 8, 8))
    described = site.ask("query.describe", model="mlp", image_size=8, class_names="measles", **keys)
    assert "client" in described
    for key in ("image_size", "image_channels"):
        own = {"image_size": 8, **keys, key: 0}
        why = f"{key.replace('_', '-')} = 0: where data are protected, no image may decide whether the others fit; set "
        assert site.refusal("query.describe", model="mlp", class_names="asthma", **own).startswith(why)
    # Without privacy folders may say it.
    folders_of(site, {"cold": 4, "flu": 5})
    assert data_of(site).class_names == ("cold", "flu")


def test_the_command_tells_of_runs_without_privacy_and_of_several_clients(tmp_path: Path) -> None:
    def told() -> list[str]:
        done = CliRunner().invoke(floret, ["privacy", "--state-dir", str(tmp_path / "state")], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output.splitlines()

    site = Site(tmp_path)
    # A client that joins tells how many examples it has, whether it is drawn or not.
    for message in ("query.describe", "train", "train"):
        site.ask(message, initial() if message == "train" else None, method="fedavg", model="mlp")
        assert told() == ["client site: answered runs without privacy alone; nothing is promised of its data"]
    site.ask("train", initial(), **{**PROTECTED, "method": "fedavg"})
    line, _ = told()
    assert line.startswith("client site: an example has spent epsilon ")
    assert line.endswith(" 1 run; it answered runs without privacy, too, which nothing bounds")
    site.node["client-name"] = "again"
    site.ask("train", initial(), **{**PROTECTED, "method": "fedavg"})
    again, _, first, _, both = told()
    assert again.endswith(" 1 run")
    assert (first, both) == (line, "What clients with the same data have spent adds up.")


def test_a_protected_clients_arrays_have_the_runs_names(tmp_path: Path) -> None:
    site, names = Site(tmp_path), "a,b"
    data = data_of(site, class_names=names, **{**PROTECTED, "num_classes": 4})
    assert (data.num_classes, data.class_names) == (4, ("a", "b"))
    assert int(data.train.y.max()) == 3


def test_what_fails_on_a_clients_own_data_is_told_to_the_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    np.savez(tmp_path / "data" / "train.npz", x=site.train_x, y=site.train_y + 0.5)
    for keys in (PROTECTED, {}):
        caplog.clear()
        assert site.refusal("query.describe", **keys) == "the client failed; its own log says why"
        assert "train.npz: array y" in caplog.text


@pytest.mark.parametrize(
    ("layer", "shape", "slope"),
    [
        (torch.nn.Linear(2, 2), (2,), 1e-23),
        (torch.nn.Conv2d(2, 4, 1), (2, 1, 1), 1e-23),  # fewer pairs of places than weights
        (torch.nn.Conv2d(2, 4, 1), (2, 4, 4), 1.0),  # more, and squares are too large instead of too small
    ],
)
def test_a_norm_is_right_where_squares_are_not(layer: torch.nn.Module, shape: tuple[int, ...], slope: float) -> None:
    x = torch.full((1, *shape), 1e19)

    def losses(of: Batch) -> torch.Tensor:
        out: torch.Tensor = layer(of.x) * slope
        return out.flatten(1).sum(1)

    with clipping(layer, 1e-4) as clipper:
        one = torch.zeros(1, dtype=torch.long)
        clipper.sum_gradients(list(layer.parameters()), losses, Batch(x, one, one))
    size = math.sqrt(sum(float(p.grad.double().square().sum()) for p in layer.parameters() if p.grad is not None))
    assert size == pytest.approx(1e-4, rel=0.02)


def test_examples_of_a_client_that_was_protected_as_a_whole_have_spent_more(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-epsilon: 8\n")
    keys = {**PROTECTED, "privacy__epsilon": 0.0, "privacy__noise": 1.0, "local_epochs": 1}
    assert (
        epsilon_of([Release(1.0, 1.0, 1), COUNT], 1e-5) < 8 < epsilon_of_example([COUNT], [Release(1.0, 1.0, 1)], 1e-5)
    )
    assert "error" not in site.ask("train", shared(initial()), **{**keys, "privacy__unit": "client"})
    line = site.refusal(arrays=shared(initial()), **keys)
    assert line.startswith("this node's policy has max-epsilon = 8 with delta = 1e-05; it has spent 10")


def test_who_was_protected_as_examples_only_cannot_be_protected_as_a_client(tmp_path: Path) -> None:
    site = Site(tmp_path, "max-epsilon: 50\n")
    site.ask("train", shared(initial()), **PROTECTED)
    line = site.refusal(arrays=shared(initial()), **{**PROTECTED, "privacy__unit": "client"})
    assert "it has taken part in runs with privacy.unit = 'example', which do not protect it as a client" in line


def test_the_command_shows_what_was_spent(tmp_path: Path) -> None:
    site, runner = Site(tmp_path), CliRunner()
    asked = ["privacy", "--state-dir", str(tmp_path / "state")]
    line = (
        f"--state-dir {tmp_path / 'state'}: is not there, so no node has kept anything in it; name that of floret node"
    )
    assert str(runner.invoke(floret, asked).exception) == line
    (tmp_path / "state").mkdir()
    assert "no client has spent anything yet" in str(runner.invoke(floret, asked).exception)
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__noise": 3.0}
    site.ask("train", shared(initial()), **keys)
    site.ask("train", shared(initial()), **PROTECTED, privacy__noise=3.0)
    ledger = [line.release for line in Ledger.of(tmp_path / "state", "site").lines()]
    done = runner.invoke(floret, [*asked, "--lines"])
    example = epsilon_of_example(ledger[1:], ledger[:1], 1e-5)
    assert epsilon_of(ledger, 1e-5) < example
    assert f"an example has spent epsilon {example:.4g}, of runs that protect the client " in done.output
    assert f"{epsilon_of(ledger[:1], 1e-5):.4g} at delta 1e-05; 3 lines, 1 run" in done.output
    assert "fedper: client, noise 3 by the node, rate 1, 1 steps\n" in done.output
    assert "fedper: example, noise 20 by the node, rate 1, 1 steps, the count of examples\n" in done.output
    assert "no ledger in" in str(runner.invoke(floret, [*asked, "--client-name", "other"]).exception)
    home = runner.invoke(floret, ["privacy", "--state-dir=~/state", "--lines"], env={"HOME": str(tmp_path)})
    assert home.output == done.output


def test_the_command_says_what_each_run_has_spent_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for run, noise in (("one", 2.0), ("two", 5.0)):
        site.ask("train", shared(initial()), {"session.lineage": run}, **PROTECTED, privacy__noise=noise)
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__noise": 4.0}
    site.ask("train", shared(initial()), {"session.lineage": "two"}, **keys)
    done = CliRunner().invoke(floret, ["privacy", "--state-dir", str(tmp_path / "state")], catch_exceptions=False)
    lines = Ledger.of(tmp_path / "state", "site").lines()
    one, two = ([line.release for line in lines if line.run == run] for run in ("one", "two"))
    assert len(one) == 2
    assert len(two) == 3
    example, client = epsilon_of_example(two[:2], two[2:], 1e-5), epsilon_of(two[2:], 1e-5)
    assert done.output.splitlines()[1:] == [
        f"  run one, federation default, fedper: 2 lines, epsilon {epsilon_of(one, 1e-5):.4g} alone",
        f"  run two, federation default, fedper: 3 lines, epsilon {example:.4g}, of runs that protect the client "
        f"{client:.4g} alone",
    ]


def test_the_command_says_what_a_policy_has_left(tmp_path: Path) -> None:
    site, runner = Site(tmp_path, "max-epsilon: 50\ndelta: 1.0e-6\n"), CliRunner()
    asked = ["privacy", "--state-dir", str(tmp_path / "state"), "--policy", str(tmp_path / "policy.yaml")]
    keys: dict[str, Any] = {**PROTECTED, "privacy__unit": "client", "privacy__noise": 3.0}
    site.ask("train", shared(initial()), **keys)
    release = Release(3.0, 1.0, 1)

    def told(policy: str = "", *options: str) -> str:
        if policy:
            (tmp_path / "policy.yaml").write_text(policy)
        done = runner.invoke(floret, [*asked, *options], catch_exceptions=False)
        return str(done.output.splitlines()[0])

    example, client = epsilon_of_example([], [release], 1e-6), epsilon_of([release], 1e-6)
    assert told() == (
        f"client site: an example has spent epsilon {example:.4g} (of max-epsilon = 50, {50 - example:.4g} left), of "
        f"runs that protect the client {client:.4g} (of max-epsilon = 50, {50 - client:.4g} left) at delta 1e-06; "
        "1 line, 1 run"
    )
    assert told("", "--delta", "1e-6") == told()
    between = (example + client) / 2
    assert f"{example:.4g} (of max-epsilon = {between:g}, nothing left), of runs" in told(
        f"max-epsilon: {between:g}\ndelta: 1.0e-6\n"
    )
    assert "(max-epsilon = 0, no limit), of runs" in told("delta: 1.0e-6\n")
    # After a run that protects examples the node takes part in none that protects the client.
    (tmp_path / "policy.yaml").write_text("max-epsilon: 50\n")
    site.ask("train", shared(initial()), **PROTECTED, privacy__noise=3.0)
    lost = "(of max-epsilon = 50, nothing left: runs that protect examples do not protect the client) at delta 1e-05;"
    assert lost in told()
    wrong = runner.invoke(floret, [*asked, "--delta", "1e-6"]).exception
    assert isinstance(wrong, FloretError)
    assert str(wrong) == (
        f"--delta 1e-06: policy {tmp_path / 'policy.yaml'} has delta = 1e-05; leave out --delta or --policy"
    )


@pytest.mark.parametrize("options", [[], ["--client-name", "site"]])
def test_the_command_says_that_the_lines_of_a_ledger_are_gone(tmp_path: Path, options: list[str]) -> None:
    site, runner = Site(tmp_path), CliRunner()
    site.ask("train", shared(initial()), **PROTECTED, privacy__noise=3.0)
    ledger = Ledger.of(tmp_path / "state", "site")
    ledger.path.unlink()
    wrong = (
        f"{ledger.path} is damaged: it has 0 lines, site.json beside it says 2; what this client has spent is not known"
    )
    with pytest.raises(DamagedError, match=re.escape(wrong)), ledger.open():
        pass
    done = runner.invoke(floret, ["privacy", "--state-dir", str(tmp_path / "state"), *options])
    assert isinstance(done.exception, DamagedError)
    assert str(done.exception).startswith(wrong)
    assert "spent epsilon" not in done.output
    # The first line was never written: a crash, or a full disk, before anything was paid.
    ledger.path.with_suffix(".json").unlink()
    with ledger.open() as opened:
        opened._write_head()
    done = runner.invoke(floret, ["privacy", "--state-dir", str(tmp_path / "state"), *options])
    assert done.output == "client site: an example has spent epsilon 0 at delta 1e-05; 0 lines, 0 runs\n"


@pytest.mark.parametrize(
    ("policy", "keys", "line"),
    [
        ("privacy: [client]\n", PROTECTED, "this node's policy has privacy = client, and privacy.unit = 'example'"),
        ("privacy: [example]\n", {}, "this node's policy has privacy = example, and privacy.unit = 'none'"),
        (
            "noise-by-server: false\n",
            {**PROTECTED, "privacy__unit": "client", "privacy__where": "server"},
            "this node's policy has noise-by-server = false, and privacy.where = 'server'",
        ),
    ],
)
def test_a_policy_can_demand_privacy(tmp_path: Path, policy: str, keys: dict[str, Any], line: str) -> None:
    site = Site(tmp_path, policy)
    assert site.refusal("query.describe", **keys).endswith(line)
    assert site.refusal(arrays=shared(initial()), **keys) == line
