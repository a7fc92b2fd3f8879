"""A client's CPUs, threads and device, and the error if the config needs more."""

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import load_file
from torch import nn

from client_app.app import Request
from client_app.runtime import device_of, use_threads
from client_app.state import ClientState, ContextStore, FileStore
from common.config import RunConfig, read_keys
from common.errors import ConfigError, FloretError
from common.sgd import Sgd
from common.simulation import given_cpus, in_simulation
from common.starts import Start
from results.history import Round, Traffic
from results.rundir import RunDirectory, in_use
from server_app.app import export
from server_app.federation import Federation
from strategies.core import Client, Session
from tests.harness import ROOT, DirectGrid, run_config


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


@pytest.mark.thorough
def test_a_client_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    # Each of these takes every client process a second or more, and a device the memory.
    script = (
        "import sys; from pathlib import Path; from tests.harness import federate\n"
        f"federate(Path({str(tmp_path)!r}) / 'runs', rounds=1)\n"
        "print([name for name in ('ray', 'sklearn', 'sympy', 'torch._dynamo', 'torchvision') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_pytorch(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2))]
    theirs = copy.deepcopy(ours)
    mine = Sgd(ours, lr=0.1, momentum=momentum, weight_decay=0.01)
    kept = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=0.01, fused=True)
    for x in torch.randn(4, 5, generator=generator):
        for parameters in (ours, theirs):
            for parameter in parameters:
                parameter.grad = None
            # The last one takes no part and has no gradient.
            (parameters[0].sin().sum() * parameters[1] * x).square().sum().backward()
        mine.step()
        kept.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # By hand: the first two steps on a weight of 1 with a gradient of 2.
    (w,) = parameters = [nn.Parameter(torch.tensor([1.0]))]
    optimizer = Sgd(parameters, lr=0.1, momentum=momentum, weight_decay=0.01)
    expected, buffer = 1.0, 0.0
    for _ in range(2):
        w.grad = torch.tensor([2.0])
        optimizer.step()
        buffer = momentum * buffer + 2.0 + 0.01 * expected
        expected -= 0.1 * buffer
        assert w.item() == pytest.approx(expected)
    optimizer.zero_grad()
    assert w.grad is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_steps_along_a_gradient_of_another_memory_layout(momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 5, 5, generator=generator)
    for layout in (torch.channels_last, torch.contiguous_format):
        parameter = nn.Parameter(weight.to(memory_format=layout, copy=True))
        optimizer = Sgd([parameter], lr=0.5, momentum=momentum, weight_decay=0.0)
        expected, buffer = weight.clone(), torch.zeros_like(weight)
        for other in (torch.contiguous_format, torch.channels_last):
            gradient = torch.randn(4, 3, 5, 5, generator=generator)
            parameter.grad = gradient.to(memory_format=other)
            optimizer.step()
            buffer = momentum * buffer + gradient
            expected -= 0.5 * buffer
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)


def test_devices(config: RunConfig) -> None:
    assert device_of(config.device).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_of("cpu").type == "cpu"
    for name, wrong in (("gpu", "must be auto, cpu, or"), ("cuda:99", "not available here")):
        with pytest.raises(ConfigError, match=f"device = '{name}': {wrong}"):
            device_of(name)


def test_on_a_gpu_sums_have_an_order_and_float32_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # which finds a GPU
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    kinds: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [(kind, kind.allow_tf32) for kind in kinds]
    try:
        assert device_of("cpu").type == "cpu"
        assert not torch.are_deterministic_algorithms_enabled()
        assert device_of("cuda").type == "cuda"
        assert torch.are_deterministic_algorithms_enabled()
        assert not any(kind.allow_tf32 for kind in kinds)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        for kind, allowed in before:
            kind.allow_tf32 = allowed


def test_a_run_directory_that_is_on_another_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    context = DirectGrid(run_config(tmp_path), 1, tmp_path).contexts[1000]
    directory = tmp_path / "elsewhere" / "checkpoints" / "clients"
    content = RecordDict({"config": ConfigRecord({"session.directory": str(directory)})})
    message = Message(content, 1000, "train")
    with pytest.raises(FloretError, match=r"elsewhere/checkpoints is not on .* need output-dir on a disk that all"):
        _ = Request(context, message).store
    assert not directory.parent.exists()
    directory.parent.mkdir(parents=True)
    assert isinstance(Request(context, message).store, FileStore)


def test_a_personal_model_of_another_machine_reaches_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    folder = tmp_path / "personal"

    def elsewhere(_: Message, reply: Message) -> Message:
        folder.mkdir()  # the client did not see it
        return reply

    grid = DirectGrid(run_config(tmp_path), 1, tmp_path, tamper=elsewhere)
    state = grid.contexts[1000].state
    ClientState(ContextStore(state)).commit(1, {"model.w": torch.tensor([1.0, 2.0]), "memory.m": torch.zeros(3)})
    federation = Federation(grid, read_keys(RunConfig, run_config(tmp_path)))
    federation.roster.add(Client("0", 1000, 1, 1, 1))
    export(grid, federation, folder, Session("0" * 16, starts=(Start(""),)))
    (file,) = folder.iterdir()
    assert file.name == "0.safetensors"
    assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {"w": [1.0, 2.0]}


def test_a_personal_model_that_did_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.app.in_simulation", lambda: True)
    values = run_config(tmp_path, round_timeout=1.0)
    grid = DirectGrid(values, 2, tmp_path, tamper=lambda m, reply: None if m.metadata.dst_node_id == 1000 else reply)
    federation = Federation(grid, read_keys(RunConfig, values))
    for node in grid.contexts:
        federation.roster.add(Client(str(node - 1000), node, 1, 1, 1))
    missing = export(grid, federation, tmp_path, Session("0" * 16, starts=(Start(""),)))
    assert missing == {"0": "no answer within 1 s"}


def test_a_run_of_real_nodes_is_named_after_its_federation(tmp_path: Path) -> None:
    config = read_keys(RunConfig, run_config(tmp_path, method="fedavg", federation="clinic", seed=3))
    assert RunDirectory.new(config, 1, simulated=True).path.name.endswith("-fedavg-digits-seed3-000001")
    assert RunDirectory.new(config, 2, simulated=False).path.name.endswith("-fedavg-clinic-seed3-000002")


def test_a_run_that_is_over_has_given_its_directory_back(tmp_path: Path) -> None:
    with RunDirectory.new(read_keys(RunConfig, run_config(tmp_path)), 1, simulated=True) as directory:
        (directory.path / "config.json").write_text("{}")
        assert in_use(directory.path)
    # Also while something still refers to it, as an exception with its frames does.
    assert not in_use(directory.path)
    assert directory.path.is_dir()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.new(read_keys(RunConfig, run_config(tmp_path)), 1, simulated=True)
    monkeypatch.setattr("results.rundir.open_file", lambda path, mode, private: Path("/dev/full").open(mode))  # noqa: SIM115
    with pytest.raises(FloretError, match=r"history.jsonl: cannot be written \(No space left on device\)"):
        directory.append_history(Round(1, {}, {}, {}, None, Traffic(), (), (), 0.1))
