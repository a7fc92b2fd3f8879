"""Formulas against numbers worked out by hand."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from client_app.batches import epoch, normalise
from client_app.methods.fedproto import VALUES, NearestPrototype
from client_app.methods.fedprox import proximal_term
from client_app.methods.pfakd import attention_loss, attention_map, distillation_loss
from client_app.state import ClientState, ContextStore
from common.names import natural_key
from common.prototypes import alignment_loss, class_means, stack
from common.seeds import derive_seed, numpy_generator, torch_generator
from common.tensors import TensorSpec
from common.wire import from_record, pack, payload_bytes, to_record
from data import Split
from models import SplitModel
from results.history import Spread
from strategies.core import Client, Roster, WeightedMean
from strategies.core.post_office import PostOffice


def test_fedprox_half_the_squared_distance_over_all_parameters() -> None:
    own = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    anchor = [torch.tensor([0.0, 4.0]), torch.tensor([[6.0]])]
    # differences 1, -2, -3: squares 1 + 4 + 9 = 14; 0.5 / 2 * 14
    assert proximal_term(own, anchor, 0.5).item() == pytest.approx(3.5)


def test_the_gradient_of_the_proximal_term_is_autograds_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    own = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((7, 5), (11,), ())]
    anchor = [torch.randn(w.shape, generator=generator) for w in own]

    def of(term: Tensor) -> list[Tensor]:
        # Beside another loss, as in training.
        loss = torch.stack([(1.1 * w).sin().sum() for w in own]).sum() + term
        return [loss.detach(), *torch.autograd.grad(loss, own)]

    plain = 0.3 / 2 * torch.stack([(w - g).square().sum() for w, g in zip(own, anchor, strict=True)]).sum()
    assert all(map(torch.equal, of(proximal_term(own, anchor, 0.3)), of(plain)))


def test_pfakd_distillation_sum_and_mean() -> None:
    own = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    received = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    # squared norms per sample 5 and 9; their mean 7; divided by 2 features 3.5
    assert distillation_loss(own, received, "sum").item() == pytest.approx(7.0)
    assert distillation_loss(own, received, "mean").item() == pytest.approx(3.5)


def test_attention_map_and_transfer() -> None:
    one = torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]])  # 1 sample, 2 channels, 1 x 2 pixels: sums of squares 1 and 4
    assert attention_map(one)[0].tolist() == pytest.approx([1 / math.sqrt(17), 4 / math.sqrt(17)])
    other = attention_map(torch.tensor([[[[3.0, 0.0]]]]))  # all attention on the first pixel: (1, 0)
    # |(1, 4)/sqrt(17) - (1, 0)|^2 = 2 - 2/sqrt(17), once for each of two stages
    assert attention_loss([one, one], [other, other]).item() == pytest.approx(2 * (2 - 2 / math.sqrt(17)))


def test_attention_transfer_has_a_gradient_where_both_extractors_are_equal() -> None:
    feature_map = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    attention_loss([feature_map], [attention_map(feature_map.detach())]).backward()
    assert feature_map.grad is not None
    assert torch.isfinite(feature_map.grad).all()


def test_alignment_leaves_out_unknown_classes() -> None:
    features = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    prototypes = torch.tensor([[0.0, 3.0], [0.0, 0.0]])
    known = torch.tensor([True, False])
    # the first sample, of class 0: squares 1 and 4; the second, of the unknown class 1, adds 0; mean over 4 entries
    labels = torch.tensor([0, 1])
    assert alignment_loss(features, labels, prototypes, known, "mean").item() == pytest.approx(1.25)
    assert alignment_loss(features, labels, prototypes, known, "sum").item() == pytest.approx(2.5)


def test_the_nearest_of_ten_thousand_prototypes_takes_no_value_for_each_sample_class_and_feature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Features(torch.nn.Module):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return x

    norm, sizes = torch.linalg.vector_norm, []

    def measured(differences: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(differences.numel())
        result: torch.Tensor = norm(differences, dim=dim)
        return result

    x, prototypes = torch.randn(4, 300), torch.randn(10_000, 300)
    known = torch.ones(10_000, dtype=torch.bool)
    known[7] = False
    whole = -norm(x.unsqueeze(1) - prototypes, dim=2)
    monkeypatch.setattr(torch.linalg, "vector_norm", measured)
    scores = NearestPrototype(cast(SplitModel, Features()), prototypes, known)(x)
    assert max(sizes) <= len(x) * VALUES < whole.numel() * 300
    assert torch.equal(scores[:, known], whole[:, known])
    assert torch.all(scores[:, 7] == -torch.inf)


def test_prototypes_are_class_means() -> None:
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 7.0]])
    means = class_means(features, torch.tensor([2, 2, 0]))
    assert {name: mean.tolist() for name, mean in means.items()} == {
        "prototype.2": [2.0, 2.0],
        "prototype.0": [7.0, 7.0],
    }
    rows, known = stack(means, 4, 2, torch.device("cpu"))
    assert known.tolist() == [True, False, True, False]
    assert rows.tolist() == [[7.0, 7.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


def test_weighted_mean_counts_each_tensor_over_those_who_sent_it() -> None:
    mean = WeightedMean()
    mean.add({"a": np.array([1.0, 2.0], np.float32), "b": np.array([5.0], np.float32)}, 1)
    mean.add({"a": np.array([4.0, 8.0], np.float32)}, 2)
    result = mean.result()
    assert result["a"].tolist() == [3.0, 6.0]
    assert result["b"].tolist() == [5.0]
    assert result["a"].dtype == np.float32
    assert WeightedMean().result() == {}


def test_the_running_mean_is_the_mean_of_many_to_a_few_units_in_the_last_place() -> None:
    rng = np.random.default_rng(0)
    tensors, weights = rng.standard_normal((200, 40_001)).astype(np.float32), rng.integers(1, 1000, 200)
    mean = WeightedMean()
    for tensor, weight in zip(tensors, weights, strict=True):
        mean.add({"a": tensor}, float(weight))
    exact = np.average(tensors.astype(float), axis=0, weights=weights)
    error = np.abs(mean.result()["a"] - exact)
    # The tensors are of the order of one, whose last place is 1e-7.
    assert error.max() < 3e-7
    assert error.mean() < 3e-8


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False), st.lists(st.integers(1, 10**6), min_size=1, max_size=9)
)
def test_the_mean_of_equal_tensors_is_that_tensor(value: float, weights: list[int]) -> None:
    mean = WeightedMean()
    for weight in weights:
        mean.add({"a": np.array([value], np.float32)}, weight)
    assert mean.result()["a"][0] == np.float32(value)


def test_spread_over_clients() -> None:
    got = Spread.over([0.5, 1.0, 0.0, 0.5], [1, 1, 2, 4])
    assert got.mean == pytest.approx(0.5)
    assert got.weighted_mean == pytest.approx(3.5 / 8)
    assert got.std == pytest.approx(math.sqrt(0.125))
    assert got.worst_decile == 0.0  # one client of four
    assert Spread.over([i / 100 for i in range(20)], [1] * 20).worst_decile == pytest.approx(0.005)  # two of twenty
    assert Spread.over([i / 100 for i in range(11)], [1] * 11).worst_decile == pytest.approx(0.005)  # two of eleven


def test_images_from_minus_one_to_one() -> None:
    x = normalise(torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8))
    assert x.flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])
    features = torch.tensor([[0.25, -3.0]])
    assert torch.equal(normalise(features), features)


@given(n=st.integers(1, 40), batch_size=st.integers(2, 12), least=st.integers(1, 12))
def test_an_epoch_takes_every_sample_once(n: int, batch_size: int, least: int) -> None:
    split = Split(torch.arange(n, dtype=torch.float32).unsqueeze(1), torch.arange(n))
    least = min(least, batch_size)  # a node refuses a smaller batch-size
    batches = list(epoch(split, batch_size, torch.Generator().manual_seed(n), least=least))
    assert sorted(torch.cat([batch.y for batch in batches]).tolist()) == list(range(n))
    for batch in batches:
        assert torch.equal(batch.x[:, 0].long(), batch.y)
        assert torch.equal(batch.index, batch.y)
    sizes = [len(batch.y) for batch in batches]
    joined = n > batch_size and 0 < n % batch_size < least
    assert len(sizes) == math.ceil(n / batch_size) - joined
    assert min(sizes) >= min(least, n)


def test_seeds_depend_on_every_part_of_their_purpose() -> None:
    seeds = [
        derive_seed(0, "batches", "1", 2),
        derive_seed(1, "batches", "1", 2),
        derive_seed(0, "batches", "12"),
        derive_seed(0, "batches", "1", "2"),
        derive_seed(0, "sampling", 1, 2),
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "batches", "1", 2) == seeds[0]
    assert torch.equal(
        torch.rand(3, generator=torch_generator(0, "a")), torch.rand(3, generator=torch_generator(0, "a"))
    )
    assert numpy_generator(0, "a").random() != numpy_generator(0, "b").random()


def test_arrays_come_through_the_wire_unchanged_and_are_counted() -> None:
    arrays: dict[str, Any] = {
        "w": np.array([[1.5, -2.0, np.inf]], np.float32),
        "n": np.array(7, np.int64),
        "none": np.zeros((0, 3), np.float32),
    }
    record = to_record(arrays)
    back = from_record(record)
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert np.array_equal(back[name], array)
    assert payload_bytes(record) == 3 * 4 + 8


def test_client_state_keeps_the_last_commit() -> None:
    record = RecordDict()
    state = ClientState(ContextStore(record))
    assert (state.round, state.load()) == (0, {})
    state.commit(1, {"a": torch.ones(2)})
    state.commit(4, {"b": torch.tensor(3)})
    again = ClientState(ContextStore(record))
    assert again.round == 4
    (kept,) = again.load().items()
    assert (kept[0], kept[1].item()) == ("b", 3)


def test_mail_is_given_out_from_the_next_round_on() -> None:
    specs = {"w": TensorSpec((2,))}
    post = PostOffice(specs, "float32")

    def put(server_round: int) -> None:
        post.put("a", server_round, pack({"w": np.full(2, server_round, np.float32)}, specs, "float32"))

    put(1)
    assert "a" not in post
    post.end_round()
    put(2)
    assert post.rounds() == {"a": 1}
    assert post["a"]["w"].tolist() == [1, 1]
    post.forget_round()  # too few replies: the round changed nothing
    post.end_round()
    assert post.rounds() == {"a": 1}
    put(3)
    post.end_round()
    assert post["a"]["w"].tolist() == [3, 3]
    assert set(post.forward({0: ("a", ["w"])})) == {"0.w"}


def test_the_roster_goes_by_name_whatever_the_node() -> None:
    roster = Roster()
    for name, node in (("10", 5), ("2", 9), ("site-b", 1), ("site-a", 7)):
        roster.add(Client(name, node, 1, 1, 1))
    assert [client.name for client in roster] == ["2", "10", "site-a", "site-b"]
    roster.add(Client("2", 77, 1, 1, 1))
    assert len(roster) == 4
    assert roster["2"].node_id == 77
    assert roster.at(77).name == "2"
    assert roster.known(77)
    assert not roster.known(78)


def test_names_are_ordered_by_the_numbers_in_them() -> None:
    names = ["site-10", "site-2", "10", "9", "5²", "5", "05", "1" * 5000, "ward"]
    ordered = ["05", "5", "5²", "9", "10", "1" * 5000, "site-2", "site-10", "ward"]
    for joined in (names, names[::-1]):
        assert sorted(joined, key=natural_key) == ordered
        roster = Roster()
        for node, name in enumerate(joined):
            roster.add(Client(name, node, 1, 1, 1))
        assert [client.name for client in roster] == ordered
