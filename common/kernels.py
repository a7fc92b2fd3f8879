"""Kernels that add in the same order on every x86-64 CPU with AVX2.

PyTorch, oneDNN, MKL, OpenBLAS and NumPy choose their kernels by the processor, so the last digits of a sum are those of
a machine. Each can be held to what all these processors have by a variable that it reads once, as its process starts.
"""

import os
import platform
from collections.abc import Mapping

from common.errors import FloretError

NATIVE, PORTABLE = KERNELS = ("native", "portable")

_HELD: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    # On CPUs that are not Intel's MKL promises equal results in this mode alone.
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
}
_NUMPY = "NPY_DISABLE_CPU_FEATURES"


def variables(kernels: str) -> dict[str, str]:
    """Return the environment variables that a process with these ``kernels``, one of ``KERNELS``, is started with.

    Raises:
        FloretError: the kernels are portable, and this CPU lacks what they need.
    """
    if kernels == NATIVE:
        return {}
    import numpy  # most commands need neither

    found = numpy.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if platform.machine().lower() not in ("x86_64", "amd64") or not {"X86_V3", "AVX2"}.intersection(found):
        raise FloretError(f"--kernels portable: needs an x86-64 CPU with AVX2; this is {platform.machine()}")
    wider = " ".join(name for name in found if name == "X86_V4" or name.startswith("AVX512"))
    return {**_HELD, **({_NUMPY: wider} if wider else {})}


def kernels_in_use() -> str:
    """Return the kernels that this process was started with."""
    return PORTABLE if all(os.environ.get(name) == value for name, value in _HELD.items()) else NATIVE
