import hashlib
import math
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from common.config import RunConfig, read_keys
from common.errors import ConfigError, DataError
from common.partitioners import DrawingProcess
from common.run_config import default_config
from common.seeds import derive_seed, numpy_generator
from data.datasets import Source, load_pool, outline_pool, read_torchvision
from data.npz import class_count, read_samples
from data.partition import PARTITIONS, Scheme, _draw, partition
from data.text import LENGTH, tokens

ROOT = Path(__file__).parent.parent
DEFAULTS = default_config(ROOT)
QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def config(**keys) -> RunConfig:
    return read_keys(RunConfig, {**DEFAULTS, **{key.replace("_", "-"): value for key, value in keys.items()}})


def scheme(name, *, alpha=0.5, k=2, shards=2, min_samples=1, seed=0) -> Scheme:
    return Scheme(name, alpha, k, shards, min_samples, seed)


def message(call, *args, kind=DataError, **kwargs) -> str:
    """Return the text of the error that the call must raise: one line."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def assert_disjoint(parts, total) -> np.ndarray:
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < total
    return together


# --- partitions -------------------------------------------------------------------------------------------------------


@QUICK
@given(n=st.integers(40, 300), clients=st.integers(1, 15), seed=st.integers(0, 2**40))
def test_iid_deals_out_all_samples_in_equal_numbers(n, clients, seed):
    parts = partition(np.arange(n) % 3, scheme("iid", seed=seed), clients, "toy")
    assert len(assert_disjoint(parts, n)) == n
    assert {len(part) for part in parts} <= {n // clients, math.ceil(n / clients)}


def test_iid_mixes_a_pool_that_is_sorted_by_label():
    labels = np.repeat(np.arange(10), 100)
    for part in partition(labels, scheme("iid"), 5, "toy"):
        assert np.bincount(labels[part], minlength=10).min() >= 8  # 20 expected of each class


@QUICK
@given(
    clients=st.integers(2, 8),
    alpha=st.sampled_from([0.3, 1.0, 100.0]),
    seed=st.integers(0, 2**40),
    classes=st.integers(1, 6),
)
def test_dirichlet_deals_out_all_samples(clients, alpha, seed, classes):
    labels = np.random.default_rng(seed).integers(0, classes, 400)
    parts = partition(labels, scheme("dirichlet", alpha=alpha, seed=seed, min_samples=2), clients, "toy")
    assert len(assert_disjoint(parts, 400)) == 400
    assert min(map(len, parts)) >= 2


def test_dirichlet_alpha_sets_how_much_clients_differ():
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha):
        parts = partition(labels, scheme("dirichlet", alpha=alpha, min_samples=20), 10, "toy")
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert largest_share(100.0) < 0.2 < 0.4 < largest_share(0.1)


def given_to_those_above_the_mean(parts, labels):
    """Return how many samples of one class a client got that had more than the mean before it, classes ascending."""
    counts = np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    before = np.cumsum(counts, axis=1) - counts
    return max(counts[before > len(labels) / len(parts)], default=0)


@QUICK
@given(clients=st.integers(2, 8), alpha=st.sampled_from([0.3, 1.0, 100.0]), seed=st.integers(0, 2**40))
def test_balanced_dirichlet_gives_no_more_to_a_client_above_the_mean(clients, alpha, seed):
    labels = np.random.default_rng(seed).integers(0, 6, 400)
    parts = partition(labels, scheme("dirichlet-balanced", alpha=alpha, seed=seed, min_samples=2), clients, "toy")
    assert len(assert_disjoint(parts, 400)) == 400
    assert min(map(len, parts)) >= 2
    assert given_to_those_above_the_mean(parts, labels) <= 1  # where the library's bounds are rounded


def test_balanced_dirichlet_divides_the_first_class_as_dirichlet_does():
    labels = np.repeat(np.arange(10), 200)
    plain, balanced = (
        partition(labels, scheme(name, alpha=0.5, min_samples=1), 10, "toy")
        for name in ("dirichlet", "dirichlet-balanced")
    )
    assert given_to_those_above_the_mean(plain, labels) > 1
    for part, other in zip(plain, balanced, strict=True):
        assert np.array_equal(part[labels[part] == 0], other[labels[other] == 0])
    assert np.std([len(part) for part in balanced]) < np.std([len(part) for part in plain])
    text = message(partition, labels[:60], scheme("dirichlet-balanced", alpha=0.01), 10, "toy")
    assert text.startswith("partition dirichlet-balanced with alpha = 0.01: client ")
    assert "raise alpha" in text


@QUICK
@given(clients=st.integers(1, 15), k=st.integers(1, 6), seed=st.integers(0, 2**40))
def test_pathological_gives_each_client_exactly_k_classes(clients, k, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(6), 50))
    parts = partition(labels, scheme("pathological", k=k, seed=seed, min_samples=2), clients, "toy")
    together = assert_disjoint(parts, 300)
    held = [set(labels[part].tolist()) for part in parts]
    assert all(len(classes) == k for classes in held)
    assert all(i % 6 in classes for i, classes in enumerate(held))
    # Of a class that any client holds, all samples are dealt out; the others stay unused.
    assert len(together) == 50 * len(set.union(*held))


@QUICK
@given(classes=st.integers(1, 9), k=st.integers(1, 9), clients=st.integers(1, 15), seed=st.integers(0, 2**40))
def test_extreme_gives_clients_the_same_k_classes_or_none_in_common(classes, k, clients, seed):
    k = min(k, classes)
    sizes = np.random.default_rng(seed).integers(30, 60, classes)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes) * 3, sizes))  # numbers may have gaps
    parts = partition(labels, scheme("extreme", k=k, seed=seed), clients, "toy")
    together = assert_disjoint(parts, len(labels))
    held = [frozenset(labels[part].tolist()) for part in parts]
    assert all(len(own) == k for own in held)
    assert all(a == b or not a & b for a in held for b in held)
    groups = classes // k
    assert len(set(held)) == min(groups, clients)
    assert all(held[i] == held[i % groups] for i in range(clients))
    # All samples of the classes that anyone has are dealt out, as evenly as can be among those who have the class.
    assert sorted(together) == sorted(np.flatnonzero(np.isin(labels, list(frozenset.union(*held)))))
    for own in set(held):
        members = [labels[part] for part, theirs in zip(parts, held, strict=True) if theirs == own]
        for c in own:
            counts = [int((member == c).sum()) for member in members]
            assert max(counts) - min(counts) <= 1
        assert max(map(len, members)) - min(map(len, members)) <= 1


def test_extreme_pairs_classes_anew_with_every_seed():
    labels = np.tile(np.arange(10), 20)
    pairs = {frozenset(labels[partition(labels, scheme("extreme", seed=seed), 5, "toy")[0]]) for seed in range(20)}
    assert len(pairs) > 5


@QUICK
@given(clients=st.integers(1, 10), shards=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_shards_are_equal_and_cover_few_classes(clients, shards, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), 40))
    parts = partition(labels, scheme("shards", shards=shards, seed=seed), clients, "toy")
    assert_disjoint(parts, 200)
    size = 200 // (clients * shards)
    assert all(len(part) == shards * size for part in parts)
    spans = math.ceil(size / 40) + 1  # a shard of the sorted pool touches this many classes at most
    assert all(len(np.unique(labels[part])) <= shards * spans for part in parts)


# Samples of each class that PFLlib's repository says its clients of MNIST have (dataset/mnist/config.json: 20 clients,
# alpha 0.1; its generator's seed is 1): the first and the last of them.
PFLLIB_MNIST = {
    0: {0: 140, 1: 890, 4: 1, 5: 319, 7: 29, 8: 1067, 9: 184},
    1: {0: 5, 2: 27, 5: 19, 6: 335, 8: 6, 9: 107},
    2: {0: 3, 3: 143, 6: 1461, 9: 23},
    16: {0: 3628},
    17: {1: 26, 2: 1463, 3: 1379, 4: 335, 5: 60, 7: 17, 8: 2373},
    18: {0: 998, 5: 8, 6: 4260},
    19: {0: 310, 1: 1, 2: 1, 3: 1, 4: 5789, 9: 1},
}
MNIST = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)  # samples of each class, training and test part


def test_pfllib_makes_the_clients_that_pfllib_publishes():
    labels = np.repeat(np.arange(10), MNIST)
    parts = partition(labels, scheme("pfllib", alpha=0.1, seed=1), 20, "toy")
    assert len(assert_disjoint(parts, 70_000)) == 70_000
    for i, counts in PFLLIB_MNIST.items():
        found = np.bincount(labels[parts[i]], minlength=10)
        assert {label: n for label, n in enumerate(found.tolist()) if n} == counts


def test_pfllib_draws_again_from_the_same_generator():
    labels = np.repeat(np.arange(3), 40)
    # By seed 1 the first draw leaves a client with fewer than 10 samples; the second has the generator's next numbers.
    few, enough = (partition(labels, scheme("pfllib", seed=1, min_samples=n), 4, "toy") for n in (2, 10))
    assert min(map(len, few)) < 10 <= min(map(len, enough))
    random = np.random.RandomState(1)
    for wanted in (few, enough):
        drawn: list[list[int]] = [[] for _ in range(4)]
        for label in range(3):
            own = np.where(labels == label)[0]
            random.shuffle(own)
            shares = random.dirichlet([0.5] * 4) * [len(part) < 30 for part in drawn]
            ends = [int(end * 40) for end in np.cumsum(shares / shares.sum())[:-1]]
            for part, start, end in zip(drawn, [0, *ends], [*ends, 40], strict=True):
                part.extend(own[start:end])
        assert [sorted(part) for part in drawn] == [part.tolist() for part in wanted]
    text = message(partition, labels, scheme("pfllib", alpha=1e-5, seed=0, min_samples=2), 4, "toy")
    assert text.startswith("partition pfllib with alpha = 1e-05")


def test_shards_of_one_class_each():
    labels = np.tile(np.arange(10), 60)
    parts = partition(labels, scheme("shards", shards=2), 10, "toy")  # 20 shards of 30: half a class each
    assert all(1 <= len(np.unique(labels[part])) <= 2 for part in parts)


def test_partition_depends_on_the_seed_alone():
    labels = np.tile(np.arange(10), 60)
    for name in PARTITIONS:
        first, again, other = (
            partition(labels, scheme(name, alpha=5.0, seed=seed, min_samples=2), 6, "toy") for seed in (1, 1, 2)
        )
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_global_random_state_plays_no_part_and_stays_as_it_was():
    labels = np.tile(np.arange(10), 60)
    np.random.seed(5)
    first = partition(labels, scheme("dirichlet", alpha=5.0), 6, "toy")
    drawn = np.random.random()
    np.random.seed(5)
    assert drawn == np.random.random()
    again = partition(labels, scheme("dirichlet", alpha=5.0), 6, "toy")
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_too_small_a_client_is_an_error_that_names_the_remedy():
    labels = np.repeat(np.arange(3), 20)
    text = message(partition, labels, scheme("dirichlet", alpha=0.01), 10, "toy")
    assert text.startswith("partition dirichlet with alpha = 0.01: client ")
    assert "has 0 samples, it needs 2" in text
    assert "set min-samples to 2" in text
    assert "raise alpha" in text


def test_min_samples_redraws_until_every_client_has_that_many():
    labels = np.repeat(np.arange(10), 60)

    def smallest(seed, min_samples):
        parts = partition(labels, scheme("dirichlet", seed=seed, min_samples=min_samples), 10, "toy")
        assert len(assert_disjoint(parts, 600)) == 600
        return min(map(len, parts))

    seed = next(seed for seed in range(100) if smallest(seed, 1) < 12)
    assert smallest(seed, 15) >= 15


def test_min_samples_that_no_draw_can_meet():
    labels = np.repeat(np.arange(3), 20)
    text = message(partition, labels, scheme("dirichlet", min_samples=6), 10, "toy")
    assert "in the last of 100 draws, it needs 6; raise alpha, lower min-samples, use fewer clients" in text
    text = message(partition, labels, scheme("dirichlet", min_samples=7), 10, "toy")
    enough = "10 clients need 7 samples each, but toy has 60; lower min-samples or use fewer clients"
    assert text == f"partition dirichlet with alpha = 0.5: {enough}"
    text = message(partition, labels, scheme("dirichlet", min_samples=6), 10, "toy", 60)
    assert text.endswith("it needs 6; raise max-samples, raise alpha, lower min-samples, use fewer clients")
    text = message(partition, labels, scheme("iid", min_samples=7), 10, "toy")
    assert text == "partition iid: client 0 of 10 has 6 samples, it needs 7; lower min-samples, use fewer clients"
    # The last draw is made in full: its smallest client is named, not the first that is too small.

    def last_sizes(seed):
        order = numpy_generator(seed, "partition", "order").permutation(60)
        last = _draw(labels[order], scheme("dirichlet"), 10, derive_seed(seed, "partition", 99) % 2**32, 0)
        return [len(part) for part in last]

    seed = next(s for s in range(20) if next(n for n in last_sizes(s) if n < 6) > min(last_sizes(s)))
    sizes = last_sizes(seed)
    text = message(partition, labels, scheme("dirichlet", min_samples=6, seed=seed), 10, "toy")
    assert f"client {np.argmin(sizes)} of 10 has {min(sizes)} samples in the last" in text
    text = message(partition, np.zeros(3, dtype=int), scheme("iid"), 2, "toy")
    assert text == "partition iid: client 1 of 2 has 1 samples, it needs 2; use fewer clients"


def test_what_the_library_refuses_is_one_line_of_data_error():
    labels = np.array([0] * 30 + [1])
    text = message(partition, labels, scheme("pathological"), 4, "toy")
    assert text == (
        "partition pathological with classes-per-client = 2, 4 clients, 31 samples of toy: a class has fewer samples "
        "than clients that need it; change classes-per-client or use fewer clients"
    )
    assert sorted(map(len, partition(np.arange(8) % 2, scheme("shards"), 4, "toy"))) == [2] * 4
    text = message(partition, labels, scheme("shards", shards=10), 4, "toy")
    assert "4 clients need 40 shards, but toy has 31 samples" in text


def test_a_process_of_its_own_draws_the_same_and_its_errors_are_told(monkeypatch):
    labels = np.arange(300) % 5
    schemes = [scheme(name, min_samples=5) for name in PARTITIONS]
    here = [partition(labels, each, 6, "d") for each in schemes]
    refusal = message(partition, np.array([0] * 30 + [1]), scheme("pathological"), 4, "d")
    with DrawingProcess() as process:
        for each, parts in zip(schemes, here, strict=True):
            assert all(map(np.array_equal, partition(labels, each, 6, "d"), parts))
        assert message(partition, np.array([0] * 30 + [1]), scheme("pathological"), 4, "d") == refusal
        monkeypatch.setattr("common.partitioners._library", lambda: pytest.fail("it was drawn here"))
        partition(labels, schemes[0], 6, "d")
        monkeypatch.undo()
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    assert all(map(np.array_equal, partition(labels, schemes[0], 6, "d"), here[0]))


def test_extreme_needs_a_sample_of_each_class_for_each_client():
    labels = np.array([0] * 30 + [1] * 3)
    text = message(partition, labels, scheme("extreme"), 4, "toy")
    expected = (
        "partition extreme with classes-per-client = 2, 4 clients, 33 samples of toy: a class has 3 samples for 4"
    )
    assert text == f"{expected} clients"
    assert len(partition(labels, scheme("extreme"), 3, "toy")) == 3
    labels = np.array([0, 1, 2, *[3] * 9])
    text = message(partition, labels, scheme("extreme", k=1), 4, "toy")
    assert "has 1 samples, it needs 2; " in text
    assert text.endswith("change classes-per-client, use fewer clients")


def test_more_classes_per_client_than_there_are():
    text = message(data.describe, config(classes_per_client=12), 4, kind=ConfigError)
    assert text == "classes-per-client = 12: must be at most 10, the number of classes of digits"
    assert message(data.describe, config(classes_per_client=12, partition="extreme"), 4, kind=ConfigError) == text


# --- the embedded dataset, splits, description ------------------------------------------------------------------------


def test_digits_are_uint8_images():
    pool = load_pool(Source.of(config()))
    assert pool.x.dtype == np.uint8
    assert pool.x.shape == (1797, 1, 8, 8)
    assert pool.num_classes == 10
    # The first row of the first digit is 0 0 5 13 9 1 0 0 of 16: times 255/16, rounded.
    assert pool.x[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert pool.x.max() == 255
    assert pool.y[:5].tolist() == [0, 1, 2, 3, 4]
    import sklearn.datasets

    theirs = sklearn.datasets.load_digits()
    assert np.array_equal(pool.x[:, 0], np.round(theirs.images * (255 / 16)))
    assert np.array_equal(pool.y, theirs.target)


@pytest.mark.parametrize(
    ("samples", "validation", "test", "expected"),
    [
        (100, 0.1, 0.25, (65, 10, 25)),
        (100, 0.1, 0.1, (80, 10, 10)),  # the 8:1:1 of FedDFPA
        (100, 0.0, 0.25, (75, 0, 25)),
        (11, 0.1, 0.25, (7, 1, 3)),  # 1.1 and 2.75
        (2, 0.1, 0.25, (1, 0, 1)),
        (2, 0.5, 0.4, (1, 0, 1)),
        (3, 0.3, 0.6, (1, 0, 2)),  # 0.9 and 1.8: the one left after test is for training
        (4, 0.0, 0.9, (1, 0, 3)),  # 3.6 would leave nothing to train on
    ],
)
def test_split_sizes(samples, validation, test, expected, tmp_path):
    save_pool(tmp_path / "a.npz", n=samples - 1, n_test=1)
    keys = {"dataset": "npz", "data_dir": str(tmp_path / "a.npz"), "partition": "iid"}
    own = data.load_client(config(**keys, validation_fraction=validation, test_fraction=test), 0, 1)
    assert (len(own.train), len(own.validation), len(own.test)) == expected


def test_splits_of_all_clients_are_disjoint_and_make_up_the_pool(tmp_path):
    x = np.arange(240, dtype=np.float32).reshape(120, 2)
    y = np.arange(120) % 4
    np.savez(tmp_path / "data.npz", x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:])
    clients = [data.load_client(config(dataset="npz", data_dir=str(tmp_path), partition="iid"), i, 4) for i in range(4)]
    splits = [split for own in clients for split in (own.train, own.validation, own.test)]
    seen = torch.cat([split.x for split in splits])
    assert sorted(seen[:, 0].tolist()) == x[:, 0].tolist()
    for split in splits:  # labels stay with their samples
        assert torch.equal(split.y, (split.x[:, 0].long() // 2) % 4)


def test_each_split_is_a_random_choice_of_a_clients_samples(tmp_path):
    """Of a pool that is sorted by class the test part has all classes, and another seed draws another one."""
    x = np.arange(240, dtype=np.float32).reshape(120, 2)
    np.savez(tmp_path / "a.npz", x_train=x[:90], y_train=np.arange(90) // 30, x_test=x[90:], y_test=np.full(30, 3))
    keys = {"dataset": "npz", "data_dir": str(tmp_path / "a.npz"), "partition": "iid", "test_fraction": 0.25}
    first, again, other = (data.load_client(config(**keys, seed=seed), 0, 1).test for seed in (0, 0, 1))
    assert len(torch.unique(first.y)) == 4
    assert torch.equal(first.x, again.x)
    assert set(first.x[:, 0].tolist()) != set(other.x[:, 0].tolist())


def test_types_and_shapes():
    own = data.load_client(config(), 3, 20)
    assert own.train.x.dtype == torch.uint8
    assert own.train.y.dtype == torch.int64
    assert own.train.x.is_contiguous()
    assert own.input_shape == tuple(own.train.x.shape[1:]) == (1, 8, 8)
    assert own.num_classes == 10
    assert len(torch.unique(torch.cat([own.train.y, own.validation.y, own.test.y]))) == 2


def test_description_counts_what_clients_train_on():
    cfg = config(partition="dirichlet", alpha=1.0)
    told = data.describe(cfg, 5)
    assert told.input_shape == (1, 8, 8)
    assert told.label_counts.shape == (5, 10)
    for i in range(5):
        assert np.bincount(data.load_client(cfg, i, 5).train.y.numpy(), minlength=10).tolist() == list(
            told.label_counts[i]
        )


def test_max_samples_keeps_a_seeded_choice_of_the_pool():
    whole = load_pool(Source.of(config()))
    some, again, other = (load_pool(Source.of(config(max_samples=300, seed=seed))) for seed in (1, 1, 2))
    assert len(some.y) == len(some.x) == 300
    assert some.num_classes == 10
    assert np.array_equal(some.x, again.x)
    assert not np.array_equal(some.x, other.x)
    images = {image.tobytes() for image in whole.x}
    assert all(image.tobytes() in images for image in some.x)
    assert len(load_pool(Source.of(config(max_samples=5000))).y) == 1797


@pytest.mark.parametrize("dataset", ["npz", "pathmnist", "npz-clients"])
def test_a_file_that_was_altered_is_read_anew_by_the_next_run(dataset, tmp_path):
    y = np.arange(20) % 2

    def save(y):
        if dataset == "npz":
            np.savez(tmp_path / "data.npz", x_train=np.zeros((20, 8)), y_train=y, x_test=np.zeros((2, 8)), y_test=y[:2])
        elif dataset == "pathmnist":
            of = {"train": y, "val": y[:2], "test": y[:2]}
            arrays: dict[str, Any] = {f"{part}_labels": y[:, None] for part, y in of.items()}
            arrays |= {f"{part}_images": np.zeros((len(y), 28, 28, 3), np.uint8) for part, y in of.items()}
            np.savez(tmp_path / "pathmnist.npz", **arrays)
        else:
            for part in ("train", "test"):
                (tmp_path / part).mkdir(exist_ok=True)
                np.savez(tmp_path / part / "0.npz", x=np.zeros((20, 8)), y=y)

    cfg = config(dataset=dataset, data_dir=str(tmp_path), partition="iid", num_classes=9)

    def classes():
        return np.flatnonzero(data.describe(cfg, 1).label_counts[0]).tolist()

    save(y)
    data.forget_altered(cfg)
    assert classes() == [0, 1]
    read = load_pool(Source.of(cfg)) if dataset != "npz-clients" else None
    data.forget_altered(cfg)
    assert read is None or load_pool(Source.of(cfg)) is read
    save(y + 3)
    assert classes() == [0, 1]  # to the end of the run
    data.forget_altered(cfg)
    assert classes() == [3, 4]
    assert data.outline(cfg, 1).classes == 2


def test_a_text_ends_where_its_line_does(tmp_path):
    file = tmp_path / "x.txt"
    file.write_bytes("one\x0ctext\u2028here\r\n\nthird\n".encode())
    names, ids, labels = data.read_inputs(file, config(dataset="ag-news"), (LENGTH,), "int32")
    assert (names, labels) == (["0", "1", "2"], None)
    assert np.array_equal(ids, tokens(["one text here", "", "third"]))
    file.write_bytes(b"")
    assert "has no texts" in message(data.read_inputs, file, config(dataset="ag-news"), (LENGTH,), "int32")


def test_a_digest_is_that_of_what_the_files_contain(tmp_path):
    assert data.digest(config()) is None
    one = tmp_path / "one.npz"
    one.write_bytes(b"abc")
    whole = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    pooled = config(dataset="npz", data_dir=str(one))
    assert data.digest(pooled) == whole[:16]
    (tmp_path / "moved.npz").write_bytes(b"abc")
    assert data.digest(config(dataset="npz", data_dir=str(tmp_path / "moved.npz"))) == whole[:16]
    one.write_bytes(b"abd")
    assert data.digest(pooled) != whole[:16]
    for part in ("train", "test"):
        (tmp_path / "clients" / part).mkdir(parents=True)
        for i in (10, 9):
            (tmp_path / "clients" / part / f"{i}.npz").write_bytes(b"abc")
    names = ("test/10.npz", "test/9.npz", "train/10.npz", "train/9.npz")
    lines = "".join(f"{whole}  {name}\n" for name in names)
    # What else lies there is read by nobody.
    (tmp_path / "clients" / "train" / "old").mkdir()
    (tmp_path / "clients" / "train" / "notes.txt").write_text("moved 11.npz away")
    (tmp_path / "clients" / "test" / "11.npz").symlink_to("moved.npz")
    several = config(dataset="npz-clients", data_dir=str(tmp_path / "clients"))
    assert data.digest(several) == hashlib.sha256(lines.encode()).hexdigest()[:16]
    assert message(data.digest, config(dataset="npz", data_dir=str(tmp_path / "none.npz"))).startswith("data-dir = ")


def test_num_classes_is_taken_or_refused():
    assert data.describe(config(num_classes=12), 5).label_counts.shape == (5, 12)
    text = message(data.describe, config(num_classes=9), 5)
    assert text == "dataset digits has label 9; num-classes = 9 allows 0 to 8"


def fingerprint() -> str:
    digest = hashlib.sha256()
    for name in PARTITIONS:
        for i in range(8):
            own = data.load_client(config(partition=name, min_samples=10, max_samples=1500, seed=7), i, 8)
            for split in (own.train, own.validation, own.test):
                digest.update(split.x.numpy().tobytes() + split.y.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.thorough
def test_another_process_draws_the_same_bit_for_bit_and_in_silence():
    run = subprocess.run(
        [sys.executable, "-c", "import test_data; print(test_data.fingerprint())"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == fingerprint()
    # flwr-datasets imports matplotlib, which on a new machine may tell of its font cache.
    assert [line for line in run.stderr.splitlines() if "atplotlib" not in line] == []


# --- names ------------------------------------------------------------------------------------------------------------


def test_unknown_names():
    text = message(data.check, config(dataset="digit"), kind=ConfigError)
    assert text.startswith("dataset = 'digit': must be one of digits, mnist, ")
    assert text.endswith("(did you mean 'digits'?)")
    text = message(data.check, config(partition="dirichelet"), kind=ConfigError)
    assert text.endswith("(did you mean 'dirichlet'?)")
    data.check(config())


def test_texts_and_a_model_of_images():
    for files in (True, False):
        text = message(data.check, config(dataset="ag-news", model="mlp"), kind=ConfigError, files=files)
        assert text == "model = 'mlp': dataset ag-news has texts, which only 'fasttext' reads"


@pytest.mark.thorough
def test_import_is_light():
    code = (
        "import data, sys; "
        "print(sorted({'torchvision', 'PIL', 'sklearn', 'datasets', 'flwr_datasets', 'pandas'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- npz, pooled ------------------------------------------------------------------------------------------------------


def save_pool(path, n=12, n_test=4, **replace):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (n, 5, 6, 3), dtype=np.uint8),
        "y_train": np.arange(n) % 3,
        "x_test": rng.integers(0, 256, (n_test, 5, 6, 3), dtype=np.uint8),
        "y_test": np.arange(n_test) % 3,
        **replace,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def read_pool(path):
    return load_pool(Source.of(config(dataset="npz", data_dir=str(path))))


def test_pooled_file_training_part_first_channels_first(tmp_path):
    arrays = save_pool(tmp_path / "mine.npz")
    for data_dir in (tmp_path, tmp_path / "mine.npz"):
        data.check(config(dataset="npz", data_dir=str(data_dir)))
        pool = read_pool(data_dir)
        assert np.array_equal(pool.x, np.concatenate([arrays["x_train"], arrays["x_test"]]).transpose(0, 3, 1, 2))
        assert pool.y.tolist() == [0, 1, 2] * 4 + [0, 1, 2, 0]
        assert pool.num_classes == 3


def test_pooled_file_is_looked_for(tmp_path):
    def problem(path):
        cfg = config(dataset="npz", data_dir=str(path))
        texts = {message(data.check, cfg), message(data.load_client, cfg, 0, 2)}
        assert len(texts) == 1
        return texts.pop()

    assert problem("").startswith("dataset npz needs data-dir, an npz file with the arrays x_train, y_train, x_test")
    assert problem(tmp_path / "nowhere.npz").startswith(f"data-dir = {tmp_path}/nowhere.npz is not there")
    assert "has no npz file and no data.npz" in problem(tmp_path)
    save_pool(tmp_path / "a.npz")
    save_pool(tmp_path / "b.npz", y_train=np.full(12, 7))
    assert "has 2 other npz files and no data.npz" in problem(tmp_path)
    (tmp_path / "b.npz").rename(tmp_path / "data.npz")
    assert read_pool(tmp_path).num_classes == 8
    save_pool(tmp_path / "short.npz", x_test=None)
    expected = f"{tmp_path}/short.npz: array x_test is missing; the file has x_train, y_train, y_test"
    assert problem(tmp_path / "short.npz") == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((12, 7), np.uint8, (7,)),
        ((12, 7), np.int64, (7,)),
        ((12, 7), np.float64, (7,)),
        ((12, 5, 6), np.uint8, (1, 5, 6)),
        ((12, 5, 6), np.float16, (1, 5, 6)),
        ((12, 5, 6, 4), np.uint8, (4, 5, 6)),
        ((12, 3, 5, 6), np.uint8, (3, 5, 6)),
        ((12, 1, 5, 6), np.dtype(">f8"), (1, 5, 6)),
        ((12, 3, 5, 1), np.float32, (1, 3, 5)),  # both fit: the last dimension is the channels
    ],
)
def test_layouts(tmp_path, shape, dtype, expected):
    x = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    save_pool(tmp_path / "a.npz", x_train=x, x_test=x[:4])
    pool = read_pool(tmp_path)
    assert pool.x.shape == (16, *expected)
    assert pool.x.dtype == (np.uint8 if dtype is np.uint8 and len(shape) > 2 else np.float32)
    assert pool.x.flags.c_contiguous
    last = x[11].transpose(2, 0, 1) if len(shape) == 4 and shape[3] in (1, 3, 4) else x[11]
    assert np.array_equal(pool.x[11].ravel(), last.ravel())


IMAGES = np.zeros((12, 5, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("replace", "expected"),
    [
        ({"x_train": np.zeros((12, 5, 6, 7), np.uint8)}, "array x_train has shape (12, 5, 6, 7); it must be"),
        ({"x_train": np.zeros(12, np.uint8)}, "array x_train has shape (12,); it must be"),
        ({"x_train": IMAGES.astype(np.int32)}, "array x_train has type int32; images must be uint8"),
        ({"x_train": IMAGES.astype(bool)}, "array x_train has type bool; images must be uint8"),
        ({"x_train": IMAGES.astype(complex)}, "array x_train has type complex128; images must be"),
        ({"x_train": np.full((12, 2), "a")}, "array x_train has type <U1; features must be real numbers"),
        ({"x_train": np.full((12, 2), np.nan)}, "array x_train has values that are not finite"),
        ({"x_train": np.full((12, 2), 1e300)}, "array x_train has values that are not finite"),
        ({"x_train": IMAGES[:0]}, "array x_train is empty, its shape is (0, 5, 6, 3)"),
        ({"x_train": IMAGES[:11]}, "x_train has 11 samples, y_train has 12 labels"),
        (
            {"x_train": np.zeros((12, 5, 5, 3), np.uint8)},
            "x_train has samples of shape (3, 5, 5) and type uint8, x_test",
        ),
        ({"x_train": IMAGES.astype(np.float32)}, "and type float32, x_test of shape (3, 5, 6) and type uint8"),
        ({"x_train": np.array([None] * 12)}, "array x_train cannot be read (it is made of Python objects"),
        ({"y_train": np.array([{}] * 12)}, "array y_train cannot be read (it is made of Python objects"),
        ({"y_train": np.arange(12.0)}, "array y_train has type float64; labels must be integers"),
        ({"y_train": np.zeros((12, 1), int)}, "array y_train has shape (12, 1); labels must have one dimension"),
        ({"y_train": np.arange(12) - 1}, "array y_train goes from -1 to 10; labels must be class numbers"),
        ({"y_train": np.full(12, 2**64 - 1, np.uint64)}, "array y_train goes from 18446744073709551615 to"),
        ({"y_train": None}, "array y_train is missing; the file has x_train, x_test, y_test"),
    ],
)
def test_what_a_pooled_file_may_not_have(tmp_path, replace, expected):
    save_pool(tmp_path / "a.npz", **replace)
    text = message(read_pool, tmp_path)
    assert text.startswith(f"{tmp_path}/a.npz: ")
    assert expected in text


def test_a_file_that_is_no_npz(tmp_path):
    path = tmp_path / "a.npz"
    save_pool(path)
    whole = path.read_bytes()
    with (tmp_path / "array.npy").open("wb") as file:
        np.save(file, IMAGES)
    other = [
        b"",
        b"x_train",
        whole[: len(whole) // 2],
        pickle.dumps({"x_train": [1]}),
        (tmp_path / "array.npy").read_bytes(),
    ]
    for content in other:
        path.write_bytes(content)
        assert message(read_pool, tmp_path) == (
            f"{path}: is not a complete npz file (a zip of arrays, as numpy.savez writes it)"
        )


def test_a_pickled_array_is_not_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    save_pool(tmp_path / "a.npz", x_train=np.array([Trap()] * 12))
    message(read_pool, tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.thorough
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), compress=st.booleans())
def test_an_altered_byte_is_a_data_error_or_does_no_harm(tmp_path_factory, position, value, compress):
    path = tmp_path_factory.getbasetemp() / "altered.npz"
    arrays: dict[str, Any] = {"x": np.arange(20, dtype=np.float32).reshape(10, 2), "y": np.arange(10)}
    (np.savez_compressed if compress else np.savez)(path, **arrays)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] = value
    path.write_bytes(content)
    try:
        samples = read_samples(path)
    except DataError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
    else:
        assert np.array_equal(samples.x, arrays["x"])
        assert np.array_equal(samples.y, arrays["y"])


# --- npz, a file per client -------------------------------------------------------------------------------------------


def save_own(folder, i, n=20, n_test=5, classes=3, shape=(4,)):
    for part, count in (("train", n), ("test", n_test)):
        (folder / part).mkdir(exist_ok=True, parents=True)
        x = np.arange(count)[(..., *[None] * len(shape))] + np.zeros(shape, np.float32) + 100 * i
        np.savez(folder / part / f"{i}.npz", x=x.astype(np.float32), y=np.arange(count) % classes)


def clients_config(folder, **keys):
    return config(dataset="npz-clients", data_dir=str(folder), **keys)


def test_a_file_per_client(tmp_path):
    for i in range(3):
        save_own(tmp_path, i, classes=2 + i)
    cfg = clients_config(tmp_path)
    data.check(cfg)
    own = data.load_client(cfg, 1, 3)
    assert (len(own.train), len(own.validation), len(own.test)) == (18, 2, 5)
    assert own.num_classes == 4  # of all clients
    assert own.input_shape == (4,)
    assert sorted(torch.cat([own.train.x, own.validation.x])[:, 0].tolist()) == [100.0 + i for i in range(20)]
    assert own.test.x[:, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert torch.equal(own.train.y, (own.train.x[:, 0].long() - 100) % 3)
    told = data.describe(cfg, 3)
    assert told.label_counts.shape == (3, 4)
    for i in range(3):
        counts = np.bincount(data.load_client(cfg, i, 3).train.y.numpy(), minlength=4)
        assert counts.tolist() == told.label_counts[i].tolist()


def test_max_samples_of_a_file_per_client(tmp_path):
    save_own(tmp_path, 0)
    cfg = clients_config(tmp_path, max_samples=10)
    own = data.load_client(cfg, 0, 1)
    assert (len(own.train), len(own.validation), len(own.test)) == (9, 1, 5)
    assert data.describe(cfg, 1).label_counts.sum() == 9
    assert len(data.load_client(clients_config(tmp_path, max_samples=50), 0, 1).train) == 18


def test_data_seed_cuts_a_clients_own_training_file(tmp_path):
    save_own(tmp_path, 0)

    def kept(**keys):
        own = data.load_client(clients_config(tmp_path, max_samples=10, **keys), 0, 1)
        return [part.x[:, 0].tolist() for part in (own.train, own.validation)]

    assert kept(seed=4, data_seed=3) == kept(seed=3) != kept(seed=4)


def test_the_number_of_clients_must_be_that_of_the_files(tmp_path):
    assert "needs data-dir, the directory that has files per client" in message(data.check, clients_config(""))
    assert "is not a directory" in message(data.check, clients_config(tmp_path / "no"))
    cfg = clients_config(tmp_path)
    assert message(data.check, cfg).startswith(f"{tmp_path} has none of the files per client, train/<i>.npz")
    for i in range(3):
        save_own(tmp_path, i)
    data.check(cfg)
    text = message(data.load_client, cfg, 0, 5)
    assert text.startswith(f"{tmp_path}/train/3.npz is missing: the federation has 5 clients")
    assert message(data.describe, cfg, 5) == text
    text = message(data.load_client, cfg, 0, 2)
    assert "has files of 3 clients, the federation has 2" in text
    (tmp_path / "test" / "1.npz").unlink()
    assert message(data.check, cfg).startswith(
        f"{tmp_path}/test/1.npz is missing: {tmp_path}/train has files of 3 clients"
    )


def test_clients_must_be_alike(tmp_path):
    save_own(tmp_path, 0)
    save_own(tmp_path, 1, shape=(5,))
    text = message(data.load_client, clients_config(tmp_path), 1, 2)
    assert text.startswith(
        f"{tmp_path}: train/1.npz has samples of shape (5,) and type float32, train/0.npz of shape (4,)"
    )


def test_a_file_that_is_missing_where_nobody_has_said_how_many_clients_there_are(tmp_path):
    for i in (0, 2):
        save_own(tmp_path, i)
    assert message(data.check, clients_config(tmp_path)).startswith(
        f"{tmp_path}/train/1.npz is missing: {tmp_path}/train has files of 2 clients, so {tmp_path} must have files"
    )


def test_num_classes_of_files_per_client(tmp_path):
    save_own(tmp_path, 0)
    assert data.load_client(clients_config(tmp_path, num_classes=7), 0, 1).num_classes == 7
    text = message(data.load_client, clients_config(tmp_path, num_classes=2), 0, 1)
    assert text == f"{tmp_path}/train/0.npz: array y has label 2; num-classes = 2 allows 0 to 1"
    save_own(tmp_path, 1, classes=5)
    text = message(data.describe, clients_config(tmp_path, num_classes=3), 2)
    assert text == f"data-dir = {tmp_path} has label 4; num-classes = 3 allows 0 to 2"


def test_a_class_that_only_a_test_file_has_is_counted(tmp_path):
    save_own(tmp_path, 0)
    np.savez(tmp_path / "test" / "0.npz", x=np.zeros((2, 4), np.float32), y=np.array([0, 5]))
    assert data.load_client(clients_config(tmp_path), 0, 1).num_classes == 6


def test_a_pool_that_is_cut_has_no_more_classes_than_samples():
    assert outline_pool(Source.of(config(dataset="cifar100", max_samples=50))).classes == 50
    assert outline_pool(Source.of(config(dataset="cifar100", max_samples=500))).classes == 100


def save_node(folder, n=20, classes=3):
    np.savez(folder / "train.npz", x=np.zeros((n, 5, 6), np.uint8), y=np.arange(n) % classes)
    np.savez(folder / "test.npz", x=np.zeros((4, 5, 6), np.uint8), y=np.arange(4) % classes)


def load_node(folder, name="a", **keys):
    return data.load_own(folder, config(**{"validation_fraction": 0.0, **keys}), name)


def test_a_nodes_own_files(tmp_path):
    save_node(tmp_path)
    quarter = {"validation_fraction": 0.25}
    own = load_node(tmp_path, "ward 7", **quarter)
    assert (len(own.train), len(own.validation), len(own.test)) == (15, 5, 4)
    assert own.input_shape == (1, 5, 6)
    assert own.num_classes == 3
    assert own.class_names == ()
    # No second reading, also not for another learning rate.
    assert load_node(tmp_path, "ward 7", **quarter, lr=0.5) is own
    assert not torch.equal(load_node(tmp_path, "ward 8", **quarter).train.y, own.train.y)
    assert not torch.equal(load_node(tmp_path, "ward 7", **quarter, seed=1).train.y, own.train.y)
    assert len(load_node(tmp_path).validation) == 0
    assert len(load_node(tmp_path, max_samples=6).train) == 6
    assert load_node(tmp_path, num_classes=10).num_classes == 10


def test_names_for_the_classes_of_a_nodes_own_files(tmp_path):
    save_node(tmp_path)
    own = load_node(tmp_path, class_names="cat, dog,cow,pig")
    assert own.class_names == ("cat", "dog", "cow", "pig")
    assert own.num_classes == 4
    text = message(load_node, tmp_path, class_names="cat,dog")
    wrong = "array y has label 2; class-names or classes.txt has 2 classes, whose labels are 0 to 1"
    assert text == f"{tmp_path}/train.npz: {wrong}"
    text = message(load_node, tmp_path, class_names="cat,dog,cow,pig", num_classes=3)
    assert text == "class-names has 4 classes; num-classes = 3 must be at least that, or 0"
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    assert load_node(tmp_path).class_names == ("a", "b", "c")
    assert load_node(tmp_path, class_names="x,y,z").class_names == ("x", "y", "z")


def test_names_for_the_classes_of_a_simulations_arrays(tmp_path):
    save_pool(tmp_path / "data.npz")  # labels 0, 1, 2
    (tmp_path / "clients").mkdir()
    for i in range(2):
        save_own(tmp_path / "clients", i)
    pooled = config(dataset="npz", data_dir=str(tmp_path), partition="iid")
    for cfg, listed in ((pooled, tmp_path), (clients_config(tmp_path / "clients"), tmp_path / "clients")):
        data.forget_altered(cfg)
        assert data.load_client(cfg, 0, 2).class_names == ()
        named = replace(cfg, class_names="cat, dog,cow,pig")
        assert data.outline(named, 2).num_classes == data.describe(named, 2).num_classes == 4
        own = data.load_client(named, 0, 2)
        assert (own.num_classes, own.class_names) == (4, ("cat", "dog", "cow", "pig"))
        text = message(data.outline, replace(cfg, class_names="cat,dog"), 2)
        assert text.endswith("has label 2; class-names or classes.txt has 2 classes, whose labels are 0 to 1")
        text = message(data.outline, replace(named, num_classes=3), 2)
        assert text == "class-names has 4 classes; num-classes = 3 must be at least that, or 0"
        (listed / "classes.txt").write_text("a\nb\nc\n")
        before = data.digest(cfg)
        data.forget_altered(cfg)
        assert data.load_client(cfg, 0, 2).class_names == ("a", "b", "c")
        (listed / "classes.txt").write_text("a\nb\nc\nd\n")
        data.forget_altered(cfg)
        assert data.outline(cfg, 2).num_classes == data.load_client(cfg, 0, 2).num_classes == 4
        assert data.digest(cfg) != before
    assert data.load_client(config(class_names="0,1,2,3,4,5,6,7,8,nine"), 0, 2).class_names[9] == "nine"
    text = message(data.outline, config(dataset="mnist", data_dir="/nowhere", class_names="a,b"), 2)
    assert text.startswith("dataset mnist has label 9; class-names or classes.txt has 2 classes")


def test_test_samples_that_are_the_training_samples_under_another_name(tmp_path):
    save_node(tmp_path)
    (tmp_path / "test.npz").unlink()
    for link in (os.symlink, os.link):
        link(tmp_path / "train.npz", tmp_path / "test.npz")
        text = message(load_node, tmp_path)
        assert text.startswith(f"{tmp_path}/test.npz is {tmp_path}/train.npz under another name; test samples must be")
        (tmp_path / "test.npz").unlink()
    save_own(tmp_path / "all", 0)
    (tmp_path / "all" / "test" / "0.npz").unlink()
    (tmp_path / "all" / "test" / "0.npz").symlink_to(tmp_path / "all" / "train" / "0.npz")
    assert "/test/0.npz is " in message(data.check, clients_config(tmp_path / "all"))


def test_a_nodes_altered_file_is_read_anew(tmp_path):
    save_node(tmp_path)
    assert len(load_node(tmp_path).train) == 20
    save_node(tmp_path, n=30, classes=4)
    own = load_node(tmp_path)
    assert len(own.train) == 30
    assert own.num_classes == 4


def test_a_nodes_missing_or_useless_file(tmp_path):
    wanted = "it must have train.npz and test.npz with the arrays x and y, or images in train/<class>/ and test/<class>"
    assert message(load_node, tmp_path) == f"{tmp_path} has neither of these files nor of these folders; {wanted}/"
    assert message(load_node, tmp_path / "no") == f"{tmp_path}/no is not a directory; {wanted}/"
    save_node(tmp_path)
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 5, 7), np.uint8), y=np.zeros(4, int))
    assert "test.npz of shape (1, 5, 7)" in message(load_node, tmp_path)
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 5, 6), np.uint8))
    assert message(load_node, tmp_path) == f"{tmp_path}/test.npz: array y is missing; the file has x"
    (tmp_path / "test.npz").unlink()
    assert message(load_node, tmp_path) == (
        f"{tmp_path}/test.npz is not there; it must be an npz file with the arrays x and y"
    )
    save_node(tmp_path)
    (tmp_path / "test").mkdir()
    text = message(load_node, tmp_path)
    assert text == f"{tmp_path} has npz files and folders, of which one kind must go; {wanted}/"


@pytest.mark.parametrize("stray", [4, 4095, 4096, 65535, 65536, 2**40, -1, -(2**63), 2**63, 2**64 - 1])
def test_silently_a_label_that_the_run_does_not_have_is_passed_over(tmp_path, stray):
    labels = np.array([0, 1, stray, 2, 3], np.uint64 if stray >= 2**63 else np.int64)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=np.arange(5, dtype=np.float32)[:, None], y=labels)
    cfg = config(num_classes=4, validation_fraction=0.0)
    own = data.load_own(tmp_path, cfg, "a", silent=True)
    assert own.num_classes == 4
    assert sorted(zip(own.train.x[:, 0].tolist(), own.train.y.tolist(), strict=True)) == [
        (0, 0),
        (1, 1),
        (3, 2),
        (4, 3),
    ]
    assert own.test.y.tolist() == [0, 1, 2, 3]
    # Which samples are kept for training does not depend on what the run has of them.
    few = config(num_classes=4, validation_fraction=0.0, max_samples=3)
    all_of_them = {float(x): int(y) for x, y in enumerate(labels)}
    drawn = data.clients.Cut.of(few, "a").of_training(5)[0]
    kept = data.load_own(tmp_path, few, "a", silent=True).train
    assert kept.x[:, 0].tolist() == [x for x in drawn.tolist() if 0 <= all_of_them[x] < 4]


def test_silently_a_run_may_have_more_classes_than_are_counted(tmp_path):
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=np.zeros((5000, 2), np.float32), y=np.arange(5000))
    own = data.load_own(tmp_path, config(num_classes=5000, validation_fraction=0.0), "a", silent=True)
    assert (own.num_classes, len(own.train), len(own.test)) == (5000, 5000, 5000)
    np.savez(tmp_path / "train.npz", x=np.zeros((0, 2), np.float32), y=np.zeros(0, np.int64))
    own = data.load_own(tmp_path, config(num_classes=5, validation_fraction=0.0), "a", silent=True)
    assert (own.num_classes, len(own.train), len(own.test)) == (5, 0, 5)


def test_a_single_sample_is_for_training(tmp_path):
    save_node(tmp_path, n=1)
    own = load_node(tmp_path, validation_fraction=0.7)
    assert (len(own.train), len(own.validation)) == (1, 0)


# --- torchvision's readers, on small files in the official format -----------------------------------------------------


def save_idx(folder, images, labels, part):
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">IIII", 0x803, *images.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(labels)) + labels.tobytes())


@pytest.mark.parametrize(("dataset", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files(tmp_path, dataset, folder):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    cfg = config(dataset=dataset, data_dir=str(tmp_path), partition="iid")
    text = message(data.check, cfg)
    assert text.startswith(
        f"dataset {dataset} is not in data-dir = {tmp_path}: {tmp_path}/{folder}/raw/train-images-idx3"
    )
    assert "download=true" in text
    assert message(data.load_client, cfg, 0, 2) == text
    save_idx(tmp_path / folder / "raw", images[:20], labels[:20], "train")
    assert "t10k-images-idx3-ubyte is missing" in message(data.check, cfg)
    save_idx(tmp_path / folder / "raw", images[20:], labels[20:], "t10k")
    data.check(cfg)
    pool = load_pool(Source.of(cfg))
    assert np.array_equal(pool.x, images[:, None])
    assert np.array_equal(pool.y, labels)
    assert pool.num_classes == 10
    assert data.load_client(cfg, 0, 2).input_shape == (1, 28, 28)


def test_a_dataset_that_is_added_as_contributing_says(tmp_path, monkeypatch):
    """Two routes: an entry in ``_OFFICIAL``, or a branch in ``_read``; of neither the outline is known beforehand."""
    monkeypatch.setitem(data.datasets.DATASETS, "kmnist", "a line")
    official = replace(data.datasets._OFFICIAL["mnist"], kind="KMNIST", folder="KMNIST/raw")
    monkeypatch.setitem(data.datasets._OFFICIAL, "kmnist", official)
    images, labels = np.zeros((20, 9, 9), np.uint8), (np.arange(20) % 4).astype(np.uint8)
    for part in ("train", "t10k"):
        save_idx(tmp_path / "KMNIST" / "raw", images, labels, part)
    read = data.datasets._read
    x = np.ones((30, 1, 5, 5), np.uint8)
    monkeypatch.setitem(data.datasets.DATASETS, "toy", "a line")
    monkeypatch.setattr(
        "data.datasets._read", lambda s: [data.npz.Samples(x, np.arange(30) % 3)] if s.dataset == "toy" else read(s)
    )
    for dataset, shape, classes, samples in (("kmnist", (1, 9, 9), 4, 40), ("toy", (1, 5, 5), 3, 30)):
        cfg = config(dataset=dataset, data_dir=str(tmp_path), partition="iid")
        data.check(cfg)
        outline = data.datasets.outline_pool(Source.of(cfg))
        assert outline == data.datasets.Outline(shape, classes, classes, samples)
        assert data.load_client(cfg, 0, 2).input_shape == shape


def test_idx_files_that_are_broken(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    images, labels = np.zeros((20, 28, 28), np.uint8), np.zeros(20, np.uint8)
    for part in ("train", "t10k"):
        save_idx(raw, images, labels, part)
    cfg = config(dataset="mnist", data_dir=str(tmp_path))
    for content in (b"", (raw / "train-images-idx3-ubyte").read_bytes()[:500], b"\0" * 500):
        (raw / "train-images-idx3-ubyte").write_bytes(content)
        assert message(data.load_client, cfg, 0, 2).startswith(f"torchvision cannot read MNIST in {tmp_path}: ")
    save_idx(raw, images, labels[:15], "train")
    assert message(data.load_client, cfg, 0, 2) == f"MNIST in {tmp_path}: training part has 20 images and 15 labels"


@pytest.mark.parametrize("other", ["train", "t10k"])
def test_idx_files_of_images_of_another_size(tmp_path, other):
    raw = tmp_path / "MNIST" / "raw"
    for part in ("train", "t10k"):
        side = 20 if part == other else 28
        save_idx(raw, np.zeros((20, side, side), np.uint8), np.zeros(20, np.uint8), part)
    assert message(data.load_client, config(dataset="mnist", data_dir=str(tmp_path)), 0, 2) == (
        f"{raw}/{other}-images-idx3-ubyte: has images of shape (1, 20, 20), and those of mnist are of (1, 28, 28); put "
        "the official file there"
    )


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("num_classes", [0, 200])
def test_a_bit_of_a_label_that_flipped_makes_no_classes(tmp_path, part, num_classes):
    raw = tmp_path / "FashionMNIST" / "raw"
    images, labels = np.zeros((20, 28, 28), np.uint8), (np.arange(20) % 10).astype(np.uint8)
    for each in ("train", "t10k"):
        save_idx(raw, images, labels, each)
    cfg = config(dataset="fashion-mnist", data_dir=str(tmp_path), partition="iid", num_classes=num_classes)
    assert data.load_client(cfg, 0, 2).num_classes == (num_classes or 10)
    load_pool.cache_clear()
    labels[5] |= 0x80
    save_idx(raw, images, labels, part)
    assert message(data.load_client, cfg, 0, 2) == (
        f"{raw}/{part}-labels-idx1-ubyte: has label 133, and those of fashion-mnist are 0 to 9; the file is damaged, "
        "put the official one there"
    )


def test_data_dir_of_an_official_dataset_may_not_be_empty():
    text = message(data.check, config(dataset="cifar10", download=True))
    assert text.startswith(
        "dataset cifar10 needs data-dir (--data for tables), the directory that has cifar-10-batches-py/"
    )


def test_data_dir_of_an_official_dataset_is_no_file(tmp_path):
    file = tmp_path / "cifar10.npz"
    file.touch()
    assert message(data.check, config(dataset="cifar10", data_dir=str(file), download=True)) == (
        f"data-dir = {file}: is a file; dataset cifar10 needs the directory that has cifar-10-batches-py/; for a file "
        'of your own set dataset="npz"'
    )
    assert not message(data.check, config(dataset="mnist", data_dir=str(file))).startswith("dataset")


def save_batch(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar_batches(tmp_path, name):
    import torchvision.datasets

    base = getattr(torchvision.datasets, name)
    # The files are small, so a class of the test's own declares their MD5 sums, as CIFAR10 declares the official ones.
    rng = np.random.default_rng(0)
    hundred = name == "CIFAR100"
    images = rng.integers(0, 256, (30, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 100 if hundred else 10, 30)
    names = [name for name, _ in base.train_list + base.test_list]
    folder = tmp_path / base.base_folder
    files = []
    for name, rows in zip(names, np.array_split(np.arange(30), len(names)), strict=True):
        content: dict[str, Any] = {"data": images[rows].reshape(-1, 3072)}
        content |= {"fine_labels": labels[rows].tolist(), "coarse_labels": [0] * len(rows)} if hundred else {}
        content |= {} if hundred else {"labels": labels[rows].tolist()}
        files.append(save_batch(folder / name, content))
    _, md5 = save_batch(folder / base.meta["filename"], {base.meta["key"]: ["a"]})

    class Small(base):  # type: ignore[misc, valid-type]
        train_list = files[:-1]
        test_list = files[-1:]
        meta = {**base.meta, "md5": md5}  # noqa: RUF012

    train, test = read_torchvision(Small, tmp_path)
    assert np.array_equal(np.concatenate([train.x, test.x]), images)
    assert np.array_equal(np.concatenate([train.y, test.y]), labels)
    assert len(test.y) == len(np.array_split(np.arange(30), len(names))[-1])


def test_cifar_files_that_are_not_the_official_ones_are_not_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    cfg = config(dataset="cifar10", data_dir=str(tmp_path))
    assert f"{tmp_path}/cifar-10-batches-py/data_batch_1 is missing" in message(data.check, cfg)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        save_batch(tmp_path / "cifar-10-batches-py" / name, Trap())
    data.check(cfg)
    text = message(data.load_client, cfg, 0, 2)
    assert text.startswith(f"torchvision cannot read CIFAR10 in {tmp_path}: Dataset not found or corrupted")
    assert not (tmp_path / "sprung").exists()


# --- files that are more than they seem -------------------------------------------------------------------------------


def bomb(path, shape, dtype="u1", y=None):
    """Write an npz whose x is zeros, which take next to no room in the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("x.npy", "w", force_zip64=True) as content:
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(content, header)
            left = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
            while left > 0 and left < 2**32:
                content.write(bytes(min(left, 2**20)))
                left -= 2**20
        with file.open("y.npy", "w") as content:
            np.lib.format.write_array(content, np.arange(10) % 2 if y is None else y)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((10, 2, 3, 5_000_000), "u1", "has shape"),
        ((10, 3, 2000, 5000), "i1", "has type int8"),
        ((300, 1000, 1000), "u1", "x has 300 samples, y has 10 labels"),
        ((10, 2**40), "u1", "this machine has"),
        ((10, 3, 2**30, 2**30), "u1", "this machine has"),
    ],
)
def test_a_small_file_that_unpacks_to_much_is_refused_unread(tmp_path, shape, dtype, text):
    bomb(tmp_path / "a.npz", shape, dtype)
    assert (tmp_path / "a.npz").stat().st_size < 2e6
    tracemalloc.start()
    try:
        assert text in message(read_samples, tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def save_headers(path, **arrays):
    """Write an npz of arrays that have headers, of type and shape, and nothing behind them."""
    with zipfile.ZipFile(path, "w") as file:
        for name, (dtype, shape) in arrays.items():
            with file.open(f"{name}.npy", "w") as content:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(content, header)


MANY = (1,) * 100


@pytest.mark.parametrize(
    ("x", "y", "wrong"),
    [
        (
            ("<f4", (4, 3)),
            ("<f8", (10**30,)),
            "array y has shape (1" + "0" * 30 + ",); it must be at most 8 whole numbers",
        ),
        (
            ("<f4", (4, 3)),
            ("<i8", (10**4000,)),
            "array y has shape (1" + "0" * 57 + "…; it must be at most 8 whole",
        ),
        (("<f4", (4, 3)), ("<i8", (2**62,)), "array y has 36893488147.4 GB when it is unpacked"),
        (
            ("<f4", (4, 3)),
            ("<i8", MANY),
            "array y has shape (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1…; it must",
        ),
        (("<f4", MANY), ("<i8", (1,)), "array x has shape (1, 1, 1,"),
        (
            ("<f4", (-4, 3)),
            ("<i8", (4,)),
            "array x has shape (-4, 3); it must be at most 8 whole numbers, from 0 to",
        ),
        (("<f4", (True, 3)), ("<i8", (1,)), "array x has shape (True, 3); it must be at most 8 whole numbers, from 0"),
        (
            ("<f4", (0, 10**13)),
            ("<i8", (0,)),
            "array x has 40000.0 GB when it is unpacked, its shape is (0, 100000000000",
        ),
        (("|S0", (4, 10**15)), ("<i8", (4,)), "array x has type |S0; it must be made of numbers"),
        (("|V0", (4, 10**19)), ("<i8", (4,)), "array x has type |V0; it must be made of numbers"),
        (("<f4", (4, 3)), ("(10,)<i8", (4,)), "array y has type ('<i8', (10,)); it must be made of numbers"),
    ],
)
def test_a_header_that_no_array_has_is_one_line_and_takes_no_memory(tmp_path, x, y, wrong):
    save_headers(tmp_path / "a.npz", x=x, y=y)
    tracemalloc.start()
    try:
        text = message(read_samples, tmp_path / "a.npz", empty=True)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert text.startswith(f"{tmp_path}/a.npz: {wrong}")
    assert len(text) < len(str(tmp_path)) + 200


def test_a_shape_that_python_cannot_write_is_one_line(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0x" + b"f" * 9000 + b",)}\n"
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        file.writestr("y.npy", b"")
    text = message(read_samples, tmp_path / "b.npz")
    assert text.startswith(f"{tmp_path}/b.npz: array x cannot be read (Exceeds the limit (4300 digits)")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_header_that_is_longer_than_numpy_takes_is_not_read(tmp_path, version):
    length = 60_000 if version == 1 else 50_000_000
    size = struct.pack("<H" if version == 1 else "<I", length)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", b"\x93NUMPY" + bytes([version, 0]) + size + b" " * length)
        file.writestr("y.npy", b"")
    tracemalloc.start()
    try:
        text = message(read_samples, tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert text == f"{tmp_path}/a.npz: array x cannot be read (its header is said to have {length} bytes)"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    expected = f"{tmp_path}/a.npz is not a file; it must be an npz file with the arrays x, y"
    assert message(read_samples, tmp_path / "a.npz") == expected


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["x", "x.npy"])
def test_an_array_that_is_there_twice_is_refused(tmp_path, name):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, int))
    np.save(tmp_path / "other.npy", np.ones((4, 3), np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as file:
        file.write(tmp_path / "other.npy", name)
    text = message(read_samples, tmp_path / "a.npz")
    assert text == f"{tmp_path}/a.npz: array x is there twice, as x or x.npy; there must be one"


def test_a_label_that_strayed_makes_no_classes(tmp_path):
    assert class_count(4095, 0, "here") == 4096
    assert class_count(65535, 65536, "here") == 65536
    assert "here has label 65535, which would make 65536 classes" in message(class_count, 65535, 0, "here")
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=np.zeros((4, 3), np.float32), y=np.array([0, 1, 2, 65535]))
    assert "has label 65535, which would make 65536 classes" in message(data.load_own, tmp_path, config(), "a")
    assert data.load_own(tmp_path, config(num_classes=65536), "a").num_classes == 65536


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        (
            {"x": np.zeros((4, 5, 7), np.uint8), "y": np.zeros(4, int)},
            "of shape (1, 5, 7) and type uint8; they must be",
        ),
        ({"x": np.zeros((4, 5, 6), np.uint8), "y": np.zeros(3, int)}, "test.npz: x has 4 samples, y has 3 labels"),
        ({"x": np.zeros((4, 5, 6), np.uint8), "y": np.array(["a"] * 4)}, "test.npz: array y has type <U1; labels must"),
        ({"x": np.zeros((4, 5, 6), np.int64), "y": np.zeros(4, int)}, "test.npz: array x has type int64; images must"),
        ({"x": np.zeros(4), "y": np.zeros(4, int)}, "test.npz: array x has shape (4,); it must be (n, features)"),
    ],
)
def test_a_node_does_not_wait_with_files_that_no_run_could_use(tmp_path, test, wrong):
    save_node(tmp_path)
    data.check_own(tmp_path)
    np.savez(tmp_path / "test.npz", **test)
    assert wrong in message(data.check_own, tmp_path)


def test_features_are_counted_as_they_will_be_in_memory(tmp_path, monkeypatch):
    """Bytes become float32."""
    np.savez(tmp_path / "a.npz", x=np.zeros((100, 10), np.uint8), y=np.zeros(100, int))
    monkeypatch.setattr("data.npz.available_memory", lambda: 4000)
    assert read_samples(tmp_path / "a.npz").x.nbytes == 4000
    monkeypatch.setattr("data.npz.available_memory", lambda: 3999)
    text = message(read_samples, tmp_path / "a.npz")
    assert text.startswith(
        f"{tmp_path}/a.npz: array x as float32 has 0.0 GB when it is unpacked, its shape is (100, 10)"
    )
