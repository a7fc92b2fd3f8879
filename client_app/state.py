"""What a client keeps between rounds: its personal model and whatever else its method remembers."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from common.wire import from_record, to_record

TENSORS = "floret.tensors"
MANIFEST = "floret.manifest"


class ClientState:
    """The client's tensors in ``context.state``, which Flower hands back with the next message.

    ``round`` is the last round that this client took part in; 0 before its first.
    """

    def __init__(self, record: RecordDict) -> None:
        self._record = record

    @property
    def round(self) -> int:
        """The round of the last commit, 0 if there was none."""
        manifest = self._record.config_records.get(MANIFEST)
        return int(manifest["round"]) if manifest else 0  # type: ignore[arg-type]

    def load(self) -> dict[str, Tensor]:
        """Return the tensors of the last commit by name; empty before the first."""
        record = self._record.array_records.get(TENSORS)
        return {name: torch.from_numpy(array) for name, array in from_record(record).items()} if record else {}

    def commit(self, server_round: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is kept by ``tensors``, as the outcome of ``server_round``."""
        arrays: dict[str, np.ndarray] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        self._record[TENSORS] = to_record(arrays)
        self._record[MANIFEST] = ConfigRecord({"round": server_round})
