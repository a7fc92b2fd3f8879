"""A client's device, threads and number type."""

import os
from pathlib import Path

import torch

from common.config import RunConfig, device_name
from common.errors import ConfigError
from common.flower import drives_simulation
from common.kernels import NATIVE, kernels_in_use
from common.simulation import given_cpus


def enter_app_folder() -> None:
    """Make the actors of a simulation import this app's code.

    Ray puts the working directory of the process that starts it first on its actors' path. For ``flwr-simulation`` that
    is where the local SuperLink daemon happened to be started, perhaps another checkout, whose code the actors would
    run. Flower loads the ClientApp in that process before it starts Ray, so going to the app's own folder then is in
    time; nothing else in the process reads the working directory.
    """
    if drives_simulation():
        os.chdir(Path(__file__).resolve().parents[1])


def use_threads(config: RunConfig) -> None:
    """Set PyTorch's number of threads in this process to ``threads``.

    It is part of the config because sums of floats, and so the results, depend on it.

    Raises:
        ConfigError: it is more than the CPUs given; processes that share CPUs slow each other down manyfold.
    """
    cpus = given_cpus()
    if config.threads > cpus:
        raise ConfigError(
            f"threads = {config.threads}: this client was given {cpus} CPU(s); "
            f"lower threads or raise client-resources-num-cpus in --federation-config"
        )
    torch.set_num_threads(config.threads)


def training_type(precision: str, device: torch.device) -> torch.dtype:
    """Return the type in which networks compute in training: what the key ``precision`` names.

    ``auto`` is bfloat16 where the device multiplies it natively (a CPU with AMX or AVX512-BF16 and native kernels, a
    GPU that can), else float32.
    """
    if precision == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = (
                device.type == "cpu"
                and kernels_in_use() == NATIVE
                and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
            )
        return torch.bfloat16 if native else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def device_of(name: str) -> torch.device:
    """Return the device that the key ``device`` names, ready; ``auto`` is a GPU where this process sees one.

    With an NVIDIA GPU PyTorch takes, from then on in this process, operations that add in a fixed order, and computes
    float32 as float32: its default for convolutions there is TF32, which has 10 bits of precision, not 23.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = device_name(name)
    if wrong:
        raise ConfigError(f"device = {name!r}: {wrong}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {name!r}: not available here ({reason}); try auto or cpu") from error
    if device.type == "cuda":
        _add_in_order()
    return device


def _add_in_order() -> None:
    # cuBLAS reads it when it first multiplies.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # That an operation fills what it has not written yet would cost a kernel for every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
