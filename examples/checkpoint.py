"""Checkpoints in Megatron's distributed format: keyed by global layer and expert, so any placement can read them.

A checkpoint is written beside its final place and renamed when every rank has finished, so that a folder named
`step_N` is complete or does not exist.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from comm_core.runtime.errors import UsageError
from examples.model import Model

_NAME = re.compile(r"step_(\d{8})")
_SETTINGS = "settings.json"


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


def clear(folder: Path) -> None:
    """Deletes the checkpoints of an earlier run, so that a new one can not be resumed from them. Called by rank 0."""
    for step in steps(folder):
        shutil.rmtree(_path(folder, step))


def save(folder: Path, step: int, model: Model, optimizer: Any, *, keep: int, settings: dict[str, Any]) -> Path:
    """Writes the state after `step` steps and deletes all but the newest `keep` checkpoints. Called by all ranks.

    `settings` are what a run must share with this one to continue it; plain values.
    """
    target = _path(folder, step)
    partial = folder / f"partial_{step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({**_state(model, optimizer, loading=False), "step": step}, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / _SETTINGS).write_text(json.dumps(settings, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(_path(folder, old))
    dist.barrier()
    return target


def newest(folder: Path, settings: dict[str, Any], last_step: int) -> int:
    """The newest complete checkpoint's step, after a check that the run may continue from it. Called by rank 0.

    Raises:
        UsageError: there is none, it belongs to other settings, or it has all the steps that are asked for.
    """
    found = steps(folder)
    if not found:
        raise UsageError(
            f"--resume without a checkpoint in {folder}", allowed="a run that saved one", fix="start without --resume"
        )
    path = _path(folder, found[-1])
    try:
        saved = json.loads((path / _SETTINGS).read_text())
    except (OSError, ValueError):
        saved = {}
    for name, value in settings.items():
        if saved.get(name) != value:
            raise UsageError(
                f"--resume from {path} with {name}={value!r}",
                allowed=f"{saved.get(name)!r}, as it was saved",
                fix="resume with that value, or start anew under another --name",
            )
    if found[-1] >= last_step:
        raise UsageError(
            f"--resume from {path} with train.steps={last_step}",
            allowed=f"more than {found[-1]} steps",
            fix="give a larger --steps",
        )
    return found[-1]


def load(folder: Path, step: int, model: Model, optimizer: Any) -> None:
    """Restores the checkpoint of a step. Called by all ranks.

    Raises:
        UsageError: it can not be read.
    """
    path = _path(folder, step)
    try:
        state = dist_checkpointing.load(_state(model, optimizer, loading=True), str(path))
    except Exception as error:
        raise UsageError(
            f"checkpoint {path}: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}",
            allowed="a complete checkpoint of this model",
            fix="delete this folder to continue from the one before it",
        ) from error
    for index, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])
