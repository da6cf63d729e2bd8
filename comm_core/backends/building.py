"""Building a buffer with the other ranks: a wrong option on one rank raises on every rank, and nobody waits for it.

The ranks meet before anything is built. Each says what its buffer is to be, or why it can not be; they go on together
or raise together, and who does not come is named when the timeout is over.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from comm_core import sizes, validate
from comm_core.backends import registry
from comm_core.backends.base import Backend
from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import CommError, MTMoEError, UnavailableError, UsageError
from comm_core.runtime.groups import meet

_LOG = logging.getLogger(__name__)


def build(
    group: dist.ProcessGroup | None,
    backend: str,
    device: torch.device | str | None,
    timeout: float | None,
    settings: Mapping[str, Any],
    check: Callable[[], object],
) -> tuple[dist.ProcessGroup, Backend]:
    """The group and the backend of a new buffer. Collective.

    Args:
        group: as given, None for the default group.
        backend: name as given.
        device: as given, None for the device of the group's torch.distributed backend.
        timeout: as given, None for the default.
        settings: what must be equal on all ranks.
        check: raises the mistakes of this rank's other options.

    Raises:
        MTMoEError: an option of this rank can not be.
        CommError: one of another rank can not be, or the ranks differ.
        PeerTimeout: a rank did not come; names it.
    """
    problem: Exception | None = validate.problem_of(check)
    try:
        group = validate.member_of(group)
    except UsageError as outside:
        raise problem or outside from None
    seconds = env.timeout_seconds()
    try:
        seconds = _seconds(seconds if timeout is None else timeout)
        place = _place(group, device)
        usable = registry.candidates(backend, place)
    except MTMoEError as error:
        problem = problem or error
    said: dict[str, Any] = {"problem": f"{problem}"}
    if problem is None:
        said = {**settings, "backend": backend, "device": place.type, "num_cpu_timeout_secs": seconds}
        said["usable"] = usable
    what = "building a buffer"
    answers = [json.loads(text) for text in meet(group, json.dumps(said, default=repr), what=what, timeout=seconds)]
    if problem is not None:
        raise problem
    _compare(what, dist.get_process_group_ranks(group), answers)
    common = [name for name in usable if all(name in said["usable"] for said in answers)]
    return group, _first_possible(common, group, place, seconds)


def _first_possible(names: list[str], group: dist.ProcessGroup, place: torch.device, seconds: float) -> Backend:
    """The first backend that can be used between these ranks; says why one before it could not."""
    for name in names[:-1]:
        try:
            return registry.create(name, group, place, seconds)
        except UnavailableError as error:
            if dist.get_rank(group) == 0:
                _LOG.warning("backend %r is not used: %s", name, error)
    return registry.create(names[-1], group, place, seconds)


def check_sizes(num_bytes: Any, num_cpu_bytes: Any, numbers: Mapping[str, Any]) -> None:
    """Sizes given to a buffer: bytes, and numbers that may be 0."""
    for name, value in numbers.items():
        validate.whole(name, value, least=0)
    _check_bytes(num_bytes, num_cpu_bytes)


def _check_bytes(num_bytes: Any, num_cpu_bytes: Any) -> None:
    if num_bytes is not None:
        validate.whole("num_bytes", num_bytes)
        if num_bytes % sizes.STEP:
            raise UsageError(f"num_bytes={num_bytes}", allowed=f"a multiple of {sizes.STEP}", fix="round it up")
    validate.whole("num_cpu_bytes", num_cpu_bytes, least=0)
    if num_cpu_bytes % sizes.STEP or num_cpu_bytes > (num_bytes or 0):
        given, allowed = (
            f"num_cpu_bytes={num_cpu_bytes}",
            f"a multiple of {sizes.STEP}, a part of num_bytes={num_bytes}",
        )
        raise UsageError(given, allowed=allowed, fix="see get_engram_storage_size_hint; num_bytes is the sum")


def _place(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    if device is None:
        return devices.of_collective_backend(str(dist.get_backend(group)))
    try:
        return devices.indexed(device)
    except (RuntimeError, TypeError, AssertionError) as error:
        text = f"a device of this torch ({str(error).splitlines()[0]})"
        raise UsageError(f"device={device!r}", allowed=text, fix="pass one, or none for that of the group") from error


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UsageError(f"num_cpu_timeout_secs={value!r}", allowed="seconds, above 0", fix="pass a number")
    return float(value)


def _compare(what: str, ranks: list[int], answers: list[dict[str, Any]]) -> None:
    reasons = "; ".join(f"rank {rank}: {said['problem']}" for rank, said in enumerate(answers) if "problem" in said)
    if reasons:
        raise CommError(f"{what} was refused on every rank of group {ranks} because of {reasons}")
    for name in answers[0].keys() - {"usable"}:
        if any(said[name] != answers[0][name] for said in answers):
            shown = ", ".join(f"rank {rank} {said[name]}" for rank, said in enumerate(answers))
            raise CommError(
                f"{what}: the ranks of group {ranks} disagree on {name}: {shown}; build it with the same options on "
                "every rank"
            )
