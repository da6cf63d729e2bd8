"""Checks that our layer and DualPipeV compute what stock Megatron computes, gradient by gradient.

    python examples/parity.py            # exit 0: equal; 1: not; 2: a mistake in the settings
    python examples/parity.py --fault    # the routing weights of our layer are off by 1 %: must exit 1

Two comparisons, all in fp32 from weights seeded by global layer and expert:

1. Three steps of stock Megatron on one process against our layer and DualPipeV under EP2 x PP2, over the same
   samples (one process sees ep_size times the microbatches). Sums run in another order there, so gradients are
   compared by ||a - b|| / ||b||: 2e-6 at step 1, then 1e-4, since Adam divides by a root of rounded squares.
2. Stock 1F1B with the stock layer against ours on the same EP2 x PP2 ranks, clipping off. The order of every sum is the
   same there, so every gradient must be equal bit by bit, whatever the number of microbatches.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import MissingPackageError, UsageError
from examples.config import DEFAULT_CONFIG, Config, load

STEPS = 3
FIRST_STEP_LIMIT, LATER_LIMIT, SCALAR_LIMIT = 2e-6, 1e-4, 1e-5
BITWISE_MICROBATCHES = [(3, 3), (4, 4), (5, 5), (8, 8), (4, 6, 5)]
_ALWAYS = {
    "train.dtype": "fp32",
    "train.lr": 1e-3,
    "train.warmup_steps": 0,
    "train.seq_length": 32,
    "model.init_std": 0.05,
}


_STOCK = {"parallel.schedule": "1f1b", "parallel.moe_layer": "megatron"}
_OURS = {"parallel.schedule": "dualpipev", "parallel.moe_layer": "mt_moe", "parallel.split_weight_grad": True}
_NO_CLIPPING = {"train.clip_grad": 0.0}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared where: configuration file, layout, kind of device, planted fault or not."""

    path: str
    ep_size: int
    pp_size: int
    device: str
    fault: bool
    microbatches: tuple[tuple[int, ...], ...]

    def _load(self, overrides: dict[str, Any]) -> Config:
        layout = {"parallel.ep_size": self.ep_size, "parallel.pp_size": self.pp_size}
        return load(self.path, {**_ALWAYS, **layout, **overrides})

    def reference(self) -> Config:
        """Stock Megatron on one process, with the microbatches of all data-parallel ranks of the parallel run."""
        count = self._load({}).train.num_microbatches * self.ep_size
        single = {"parallel.ep_size": 1, "parallel.pp_size": 1, "train.num_microbatches": count}
        return self._load({**_STOCK, **single})

    def ours(self, *, clip: bool, num_microbatches: int | None = None) -> Config:
        """Our layer and DualPipeV."""
        count = {} if num_microbatches is None else {"train.num_microbatches": num_microbatches}
        return self._load({**_OURS, **({} if clip else _NO_CLIPPING), **count})

    def stock(self) -> Config:
        """Stock layer and stock 1F1B on the same ranks, clipping off."""
        return self._load({**_STOCK, **_NO_CLIPPING})


@dataclass(slots=True)
class Record:
    """What one run left: per step the loss, the gradient norm and every gradient by global name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    peaks: list[int]


def merge(records: list[Record]) -> Record:
    """One record of all ranks; replicated parameters are equal on every rank that has them."""
    first = records[0]
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in first.gradients]
    for record in records:
        for into, part in zip(gradients, record.gradients, strict=True):
            into.update(part)
    return Record(first.losses, first.norms, gradients, [peak for record in records for peak in record.peaks])


def relative_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """||a - b|| / ||b|| by parameter; a parameter whose reference is zero must be exactly zero (else infinity)."""
    if ours.keys() != reference.keys():
        raise AssertionError(f"different parameters: {sorted(ours.keys() ^ reference.keys())[:5]}")
    errors = {}
    for name, b in reference.items():
        a, norm = ours[name].double(), float(b.double().norm())
        distance = float((a - b.double()).norm())
        error = distance / norm if norm else (0.0 if distance == 0 else math.inf)
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def compare_with_one_process(ours: Record, reference: Record) -> bool:
    """Prints the worst parameter of each step; True where all limits hold."""
    good = True
    for step in range(STEPS):
        errors = relative_errors(ours.gradients[step], reference.gradients[step])
        name = max(errors, key=lambda key: errors[key])
        limit = FIRST_STEP_LIMIT if step == 0 else LATER_LIMIT
        loss = abs(ours.losses[step] / reference.losses[step] - 1)
        norm = abs(ours.norms[step] / reference.norms[step] - 1)
        holds = errors[name] <= limit and loss <= SCALAR_LIMIT and norm <= SCALAR_LIMIT
        good &= holds
        print(
            f"step {step + 1}: {len(errors)} gradients, worst {errors[name]:.1e} (limit {limit:.0e}) {name}; "
            f"loss {ours.losses[step]:.6f} off by {loss:.1e}, gradient norm {ours.norms[step]:.6f} off by {norm:.1e} "
            f"(limit {SCALAR_LIMIT:.0e}): {'ok' if holds else 'FAILED'}"
        )
    return good


def compare_bitwise(ours: Record, stock: Record, microbatches: tuple[int, ...], pp_size: int) -> bool:
    """True where every gradient is equal bit by bit and the peak of live activations is that of the schedule."""
    different = []
    for step, (a, b) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
        errors = relative_errors(a, b)
        different += [(errors[name], step + 1, name) for name in errors if not torch.equal(a[name], b[name])]
    limit = 2 * pp_size + 1
    # With 2P-1 microbatches, one less than the schedule's full size, the first rank never fills up.
    lowest = limit if min(microbatches) >= 2 * pp_size else limit - 1
    peaks_hold = bool(ours.peaks) and all(lowest <= peak <= limit for peak in ours.peaks) and limit in ours.peaks
    total = sum(len(step) for step in stock.gradients)
    text = ", ".join(map(str, microbatches))
    worst = f", worst {max(different)[0]:.1e} at step {max(different)[1]} {max(different)[2]}" if different else ""
    print(
        f"against stock 1F1B, microbatches {text}: {total - len(different)} of {total} gradients bitwise equal{worst}; "
        f"peak of live activations {sorted(set(ours.peaks))} (2P+1 = {limit}): "
        f"{'ok' if not different and peaks_hold else 'FAILED'}"
    )
    return not different and peaks_hold


def _launch(num_ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).resolve()), *arguments], env=env.for_child(OMP_NUM_THREADS="1"), check=False
    )
    if done.returncode:
        raise SystemExit(
            f"a worker of the parity check failed (exit status {done.returncode}); see its traceback above"
        )


def _read(folder: Path, name: str) -> Record:
    return merge([torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{name}.*.pt"))])


def check(setting: Setting) -> bool:
    """Runs both comparisons; True where they hold."""
    ranks = setting.ep_size * setting.pp_size
    setting.ours(clip=True).validate_layout(ranks)
    for count in {count for counts in setting.microbatches for count in counts}:
        setting.ours(clip=False, num_microbatches=count).validate_layout(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(setting, folder / "setting.pt")
        _launch(1, "--worker", "reference", "--folder", name)
        _launch(ranks, "--worker", "ours", "--folder", name)
        print(f"stock Megatron on 1 process against ours on {ranks} (EP{setting.ep_size} x PP{setting.pp_size})")
        good = compare_with_one_process(_read(folder, "ours"), _read(folder, "reference"))
        for counts in setting.microbatches:
            key = "-".join(map(str, counts))
            ours, stock = _read(folder, f"v-{key}"), _read(folder, f"stock-{key}")
            good &= compare_bitwise(ours, stock, counts, setting.pp_size)
    print("parity holds" if good else "parity FAILED")
    return good


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Parses the command line; a worker process runs its share, the parent starts workers and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="model and layout (default: %(default)s)")
    parser.add_argument("--ep-size", type=int, default=2, help="expert-parallel ranks (default: %(default)s)")
    parser.add_argument("--pp-size", type=int, default=2, help="pipeline ranks (default: %(default)s)")
    parser.add_argument("--device", default="cpu", choices=("auto", *devices.KINDS), help="default: %(default)s")
    parser.add_argument("--fault", action="store_true", help="plant a fault of 1 %% in our layer; the check must fail")
    parser.add_argument(
        "--microbatches",
        action="append",
        type=_counts,
        metavar="M,M,...",
        help="microbatches of each step of a bitwise comparison; repeatable (default: 3,3 4,4 5,5 8,8 4,6,5)",
    )
    parser.add_argument("--worker", choices=("reference", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.worker:
            from examples import parity_worker

            setting = torch.load(arguments.folder / "setting.pt", weights_only=False)
            parity_worker.run(arguments.worker, setting, arguments.folder)
            return 0
        counts = tuple(arguments.microbatches or BITWISE_MICROBATCHES)
        layout = {"ep_size": arguments.ep_size, "pp_size": arguments.pp_size, "device": arguments.device}
        return 0 if check(Setting(arguments.config, **layout, fault=arguments.fault, microbatches=counts)) else 1
    except (UsageError, MissingPackageError) as error:
        if env.rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
