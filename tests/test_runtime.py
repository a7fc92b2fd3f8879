"""Where a client computes: what it was given, and a line when the config asks for more."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from client_app.runtime import device_of, given_cpus, in_simulation, use_threads
from common.config import RunConfig, read_keys
from common.errors import ConfigError
from tests.harness import run_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return read_keys(RunConfig, run_config(tmp_path))


def test_threads_are_those_of_the_config(config: RunConfig) -> None:
    before = torch.get_num_threads()
    try:
        use_threads(config)
        assert torch.get_num_threads() == config.threads == 1
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_cpus_is_refused(config: RunConfig) -> None:
    assert not in_simulation()
    cpus = given_cpus()
    assert 1 <= cpus <= (os.cpu_count() or 1)
    with pytest.raises(ConfigError, match=rf"threads = {cpus + 1}: this client was given {cpus} CPU\(s\)"):
        use_threads(dataclasses.replace(config, threads=cpus + 1))


def test_devices(config: RunConfig) -> None:
    assert device_of(config.device).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_of("cpu").type == "cpu"
    for name in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device = '{name}': not available here"):
            device_of(name)
