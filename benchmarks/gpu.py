"""Training on a CUDA device: Floret's and the same by hand, and rounds with several clients at once on one GPU."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import Row, image_pool, pair
from benchmarks.training import EPOCHS, Case, Ours, Theirs, check
from tests.harness import ROOT

# In more steps of resnet18 rounding grows to what is seen.
CASES = (
    Case("fedper", "cnn3", 128, 5120),
    Case("pfakd", "cnn3", 128, 5120),
    Case("fedper", "resnet18", 64, 256),
    Case("pfakd", "resnet18", 64, 256),
)
AT_ONCE = (4, 16)
CLIENTS, SAMPLES, ROUNDS = 32, 2000, 2


def run(repeats: int) -> list[Row]:
    """Return the rows of this benchmark; without a GPU none, and print one line."""
    if not torch.cuda.is_available():
        print("gpu: PyTorch sees no CUDA device here; nothing is measured", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [_by_hand(case, folder, max(repeats, 5)) for case in CASES]
        images = image_pool(folder, CLIENTS * SAMPLES)
        alone = [_round(images, folder / f"1-{i}", 1) for i in range(repeats)]
        for several in AT_ONCE:
            together = [_round(images, folder / f"{several}-{i}", several) for i in range(repeats)]
            what = f"gpu: a round of {CLIENTS} clients, {several} at once, one at a time"
            samples = list(zip(together, alone, strict=True))
            rows.append(pair(what, "s", samples, "times faster", inverse=True))
    return rows


def _by_hand(case: Case, folder: Path, repeats: int) -> Row:
    """Compare the training of one client in turns, in samples a second."""
    ours = Ours(case, folder, "cuda")
    theirs = Theirs(ours)
    check(ours, theirs, tolerance=0.01)
    samples = []
    for _ in range(repeats):
        speeds = []
        sides: tuple[Ours | Theirs, ...] = (ours, theirs)
        for what in sides:
            what.prepare()
            torch.cuda.synchronize()
            started = time.perf_counter()
            what.train()
            torch.cuda.synchronize()
            speeds.append(EPOCHS * case.samples / (time.perf_counter() - started))
        samples.append((speeds[0], speeds[1]))
    row = pair(f"gpu: {case}; by hand", "samples/s", samples, "times by hand")
    print(f"  {row.name}: {row.ours:.0f} samples/s, {row.ratio:.3f}", file=sys.stderr, flush=True)
    return row


def _round(images: Path, folder: Path, at_once: int) -> float:
    """Return the seconds of a round of the local engine on one GPU."""
    keys: dict[str, Any] = {"dataset": "npz", "data-dir": str(images), "partition": "iid", "method": "pfakd"}
    keys |= {"model": "cnn3", "batch-size": 128, "local-epochs": 5, "rounds": ROUNDS, "output-dir": str(folder)}
    federation = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 client-resources-num-gpus={1 / at_once} "
    federation += f"init-args-num-cpus={at_once} init-args-num-gpus=1"
    said = " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
    command = [sys.executable, "-m", "cli.main", "run", str(ROOT), "--engine", "local", "--run-config", said]
    done = subprocess.run([*command, "--federation-config", federation], cwd=ROOT, capture_output=True, text=True)
    files = list(folder.glob("*/history.jsonl"))
    if done.returncode or not files:
        raise RuntimeError(done.stdout + done.stderr)
    # In the first round every process starts CUDA.
    seconds = median(float(json.loads(line)["seconds"]) for line in files[0].read_text().splitlines()[1:])
    print(f"  {at_once} at once: {seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds
