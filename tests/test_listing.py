"""``floret list methods`` says of methods what their classes declare to share."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.sharing import groups
from client_app.policy import setup_of
from common.registry import load_class
from common.tensors import Free
from server_app.settings import read_config
from strategies import METHODS
from strategies.core import FloretStrategy
from tests.harness import run_config


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_listed_by_what_its_class_declares(tmp_path: Path, method: str) -> None:
    (title,) = [title for title, methods in groups().items() if method in methods]
    config, _, own = read_config(run_config(tmp_path, method=method))
    kind = load_class("strategies", method, FloretStrategy)
    setup = setup_of(replace(config, model="cnn2"), kind, own, (1, 28, 28), 10)
    sent, received = kind.uplink(setup), kind.downlink(setup)
    specs = [*sent.values(), *received.values()]
    part = {"model-without-batch-norm": "the model without batch normalisation"}.get(kind.shares, f"the {kind.shares}")
    assert (part in title) == (kind.shares != "nothing")
    assert ("prototypes" in title) == any(name.startswith("prototype.") for name in {*sent, *received})
    assert ("networks beside the model" in title) == any(n.shared for n in kind.networks(setup).values())
    assert ("sparse" in title) == any(spec.sparse for spec in specs)
    assert ("factors" in title) == any(isinstance(side, Free) for spec in specs for side in spec.shape)
    assert ("passed on" in title) == kind.relays
    assert (title == "nothing") == (not specs)


def test_groups_have_every_method_once() -> None:
    listed = [method for methods in groups().values() for method in methods]
    assert sorted(listed) == sorted(METHODS)
    assert "fedper" in groups()["the extractor"]
