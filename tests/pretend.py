"""A GPU that is not there: tensors that say they are on ``cuda`` and compute on the CPU.

Inside ``Gpu()`` whatever is moved to or made on ``cuda`` is a ``Far`` tensor. It has real values, so a client's whole
round runs on it, through every branch, and its numbers can be compared with those of the CPU. What a real device
forbids is an error here, too: tensors of the device and of the CPU in one operation. What makes the host wait for the
device is counted.

FakeTensorMode would not do: its tensors have no values, so that what depends on one ends the rehearsal, and its
backward pass on ``cuda`` needs a driver. For PyTorch's C++ the tensors here are on ``meta``, for Python on ``cuda``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
CUDA, STAND_IN, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
# The host waits for them: it needs a number, or the size of a result.
WAITS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.nonzero_numpy, aten.masked_select, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave, aten.is_nonzero,
}  # fmt: skip
# An index of booleans is looked for its true elements first.
INDEXED = {aten.index: 1, aten.index_put: 1, aten.index_put_: 1, aten._unsafe_index: 1}
# They may have one tensor here and one there.
MOVES = {aten._to_copy, aten.copy_, aten.copy}


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the device and of the CPU."""


class Far(torch.Tensor):
    """A tensor on the device that is not there; ``near`` is the one that has its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=STAND_IN,
        )
        made.near = near
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        Gpu.now.counts["waits"] += 1
        return self.near.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update({key: value for key, value in self.__dict__.items() if key != "near"})
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Gpu.now.compute(func, args, kwargs or {})


class _Named(TorchFunctionMode):
    """Calls of Python that name ``cuda`` reach C++ with the stand-in's name, so that no driver is looked for."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def named(value: Any) -> Any:
            if isinstance(value, torch.device) or value in ("cuda", "cuda:0"):
                return STAND_IN if torch.device(value).type == "cuda" else value
            return value

        kwargs = {key: named(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == STAND_IN:
            # C++ would make a tensor without values; on a real device, too, the values come from the CPU.
            return func(*args, **{**kwargs, "device": CPU}).to(STAND_IN)
        if func is torch.Tensor.to:
            args = (args[0], *(named(value) if isinstance(value, str | torch.device) else value for value in args[1:]))
        if func == SET_DATA and isinstance(args[1], Far):
            args[0].near = args[1].near
        return func(*args, **kwargs)


class Gpu(TorchDispatchMode):
    """The device, and what happened on it: ``counts`` has ``waits`` (the host waited for the device), ``sent`` (tensors
    that went there from the CPU) and ``computed`` (operations).
    """

    now: "Gpu"

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._named = _Named()

    def __enter__(self) -> Self:
        Gpu.now = self
        self._named.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._named.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what an operation gives: on the device if one of its tensors is there, or if it says so."""
        packet = func.overloadpacket
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, Far)]
        assert all(tensor.stride() == tensor.near.stride() for tensor in far)
        device = kwargs.get("device")
        there = bool(far) if device is None else torch.device(device).type in ("meta", "cuda")
        if packet in MOVES:
            there = isinstance(args[0], Far) if packet is not aten._to_copy else there
            source = args[0] if packet is aten._to_copy else args[1]
            self.counts["sent"] += there and not isinstance(source, Far) and source.dim() > 0
            self.counts["waits"] += not there and isinstance(source, Far)
        elif far:
            self._check_places(func, args, tensors)
        self.counts["waits"] += bool(far) and self._waits(packet, args)
        self.counts["computed"] += there
        near = {key: value for key, value in kwargs.items() if key != "device"}
        if device is not None:
            near["device"] = CPU
        out = func(*tree_map_only(Far, _near, args), **tree_map_only(Far, _near, near))
        if there:
            out = tree_map_only(Tensor, lambda t: t if isinstance(t, Far) else Far(t), out)
        return return_and_correct_aliasing(func, args, kwargs, out) if far else out

    def _check_places(self, func: Any, args: Sequence[Any], tensors: list[Tensor]) -> None:
        """Refuse a tensor of the CPU beside one of the device, but for a single number, as a real device does.

        Of what is put together none may be, whatever its size.
        """
        least = 0 if func.overloadpacket in (aten.stack, aten.cat) else 1
        mixed = [tensor for tensor in tensors if not isinstance(tensor, Far) and tensor.dim() >= least]
        if mixed or (func.overloadpacket in INDEXED and not isinstance(args[0], Far)):
            raise MixedDevicesError(f"{func}: expected all tensors to be on the same device, {CUDA} and {CPU} came")

    def _waits(self, packet: Any, args: Sequence[Any]) -> bool:
        if packet in INDEXED:
            indices = [index for index in args[INDEXED[packet]] if index is not None]
            return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        return packet in WAITS


def _near(tensor: Far) -> Tensor:
    return tensor.near
