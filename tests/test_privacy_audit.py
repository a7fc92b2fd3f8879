"""The audit of privacy: its bounds by hand, and that it finds what it is there for."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.privacy import (
    DELTA,
    ERROR,
    Errors,
    any_epsilon,
    audit,
    bounded,
    cases,
    errors,
    gaussian_epsilon,
    statistic,
    upper,
)

NAMES = [
    "example",
    "example, head without noise",
    "example, no clipping",
    "client, noise by the node",
    "client, noise by the node, training diverges",
    "client, noise by the node, no clipping",
    "client, noise by the node, one in the place of another",
    "client, noise by the server",
    "client, noise by the server, no clipping",
]


def test_rates_are_bounded_as_by_hand() -> None:
    # Nothing of n was seen: (1 - p)^n = 1 - confidence.
    assert upper(0, 100, 0.975) == pytest.approx(1 - 0.025 ** (1 / 100))
    assert upper(100, 100, 0.975) == 1
    # Clopper and Pearson for 1 of 10 at 95 % two-sided, from the tables: 0.0025 to 0.4450.
    assert upper(1, 10, 0.975) == pytest.approx(0.4450, abs=5e-5)
    without, having = np.array([0.0, 1.0, 5.0, 2.0]), np.array([4.0, 5.0, 6.0, 3.0])
    assert errors(without, having, 3.0) == Errors(upper(1, 4, 0.975), upper(1, 4, 0.975))


def test_the_bound_without_assumptions_by_hand() -> None:
    # Sees 80 % of the canaries, and one in 10 of the runs without.
    assert any_epsilon(Errors(0.1, 0.2), 0.0) == pytest.approx(math.log(8))
    assert any_epsilon(Errors(0.2, 0.1), 0.0) == pytest.approx(math.log(8))
    assert any_epsilon(Errors(0.1, 0.2), 0.3) == pytest.approx(math.log(5))
    assert any_epsilon(Errors(0.5, 0.5), 0.0) == any_epsilon(Errors(0.9, 0.8), 0.0) == 0
    assert any_epsilon(Errors(1.0, 1.0), 1e-5) == 0


def test_the_bound_of_normal_noise_by_hand() -> None:
    # Phi(-1/2) = 0.308538: a shift of one; at epsilon 1 delta is Phi(-0.5) - e Phi(-1.5) = 0.126937.
    rate = 0.3085375
    assert gaussian_epsilon(Errors(rate, rate), 0.126937) == pytest.approx(1.0, abs=1e-4)
    # Phi(0) - Phi(-1) = 1 as well.
    assert gaussian_epsilon(Errors(0.5, 0.1586553), 0.126937) == pytest.approx(1.0, abs=1e-4)
    # At epsilon 0 it is Phi(0.5) - Phi(-0.5) = 0.382925.
    assert gaussian_epsilon(Errors(rate, rate), 0.383) == 0
    assert gaussian_epsilon(Errors(0.5, 0.5), 1e-5) == gaussian_epsilon(Errors(1.0, 0.1), 1e-5) == 0


def test_bounds_of_a_known_mechanism_stay_below_the_truth() -> None:
    rng = np.random.default_rng(0)
    without, having = rng.standard_normal(4000), rng.standard_normal(4000) + 1
    truth = 4.377  # of a shift of one at delta 1e-5
    assert 0.75 * truth < bounded(without, having, 1e-5, gaussian_epsilon) < truth
    assert 0.6 < bounded(without, having, 1e-5, any_epsilon) < truth
    assert bounded(without, without, 1e-5, gaussian_epsilon) == 0


def test_the_statistic_by_hand() -> None:
    direction = np.array([1.0, 0.0, 0.0, 0.0])
    assert statistic(np.array([3.0, 2.0, 0.0, 0.0]), direction) == pytest.approx(3.0)
    assert statistic(np.array([30.0, 20.0, 0.0, 0.0]), direction) == pytest.approx(3.0)
    assert statistic(np.full(4, math.inf), direction) == ERROR


def check(tmp_path: Path, name: str, scale: float) -> None:
    case = next(case for case in cases(tmp_path, scale) if case.name == name)
    found = audit(case, DELTA)
    assert 2.7 < found.claim < 2.9
    assert (found.bound > found.claim) == case.above, found


@pytest.mark.parametrize("name", ["client, noise by the server", "client, noise by the server, no clipping"])
def test_a_quick_audit(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES[:6])
def test_an_audit_of_rounds_of_a_client(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 0.3)


def test_the_audits_are_those(tmp_path: Path) -> None:
    assert [case.name for case in cases(tmp_path)] == NAMES
