"""Checkpoints in Megatron's distributed format: keyed by global layer and expert, so any placement can read them.

A checkpoint is written beside its final place and renamed when every rank has finished, so that a folder named
`step_N` is complete or does not exist.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from comm_core.runtime.errors import UsageError
from examples.model import Model

_NAME = re.compile(r"step_(\d{8})")


def steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)))


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def _state(model: Model, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(model.chunks)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading)
    return state


def save(folder: Path, step: int, model: Model, optimizer: Any, *, keep: int) -> Path:
    """Writes the state after `step` steps and deletes all but the newest `keep` checkpoints. Called by all ranks."""
    target = _path(folder, step)
    partial = folder / f"partial_{step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({**_state(model, optimizer, loading=False), "step": step}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(_path(folder, old))
    dist.barrier()
    return target


def load_newest(folder: Path, model: Model, optimizer: Any) -> int:
    """Restores the newest complete checkpoint and returns its step. Called by all ranks.

    Raises:
        UsageError: there is none.
    """
    found = steps(folder)
    if not found:
        raise UsageError(
            f"--resume without a checkpoint in {folder}", allowed="a run that saved one", fix="start without --resume"
        )
    state = dist_checkpointing.load(_state(model, optimizer, loading=True), str(_path(folder, found[-1])))
    for index, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])
    return found[-1]
