"""The gradients of the two copies of a stage, added: what `dualpipe` leaves to do before the optimizer's step.

In `dualpipe` stage s lies on rank s for one direction and on rank P-1-s for the other, and each copy sees half of the
microbatches. The gradient of the whole batch is the sum of the two:

    pipeline.step(...)
    add_mirrored_gradients(modules)  # or pipeline.add_mirrored_gradients()
    optimizer.step()

Ranks r and P-1-r hold the same two stages, so each sends its gradients to the other and adds what it gets: half the
traffic of an all-reduce over the pipeline. Both compute a + b of the same a and b, which gives the same bits in either
order: copies that begin equal stay equal bit by bit, under any optimizer that does the same on both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_core.runtime import env
from comm_core.runtime.errors import CommError, CommTimeoutError, UsageError
from comm_core.runtime.groups import meet

_BUCKET = 32 << 20  # bytes a message; a second copy of this much is held at once
_WHAT = "adding mirrored gradients"
_Named = list[tuple[str, nn.Parameter]]


def add_mirrored_gradients(
    modules: Sequence[nn.Module],
    *,
    group: dist.ProcessGroup | None = None,
    rank_mapping: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Adds to each `parameter.grad` that of the stage's copy on the mirrored rank. Collective over the group.

    Args:
        modules: this rank's stages as `stages_of_rank("dualpipe", ...)` orders them: stage r, then stage P-1-r. A
            parameter that both share counts once.
        group: the pipeline's ranks; the default group by default.
        rank_mapping: place in the pipeline of each rank of the group; their own order by default.
        timeout: bound of every wait; `comm_core.runtime.env.timeout_seconds` by default. With NCCL that of the group
            holds once messages are under way.

    A parameter without gradient on both copies keeps none; one that has it on one copy gets it on both.

    Raises:
        UsageError: no group; on every rank: an odd number of ranks, not two modules somewhere, copies whose parameters
            differ in name, shape, dtype or requires_grad, a gradient that is not dense.
        CommTimeoutError, CommError: a rank did not come, or is gone.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError(f"{_WHAT} without torch.distributed", allowed="a group", fix="call init_process_group first")
    num_ranks, places = dist.get_world_size(group), list(rank_mapping or range(dist.get_world_size(group)))
    if num_ranks % 2 or sorted(places) != list(range(num_ranks)):
        raise UsageError(
            f"{num_ranks} ranks, rank_mapping {rank_mapping}",
            allowed="an even number of ranks, each with a place of its own",
            fix="call it on the group and with the rank_mapping of the dualpipe schedule",
        )
    limit = timedelta(seconds=env.timeout_seconds()) if timeout is None else timeout
    rank = places[dist.get_rank(group)]
    peer = places.index(num_ranks - 1 - rank)
    # Both ranks take the lower stage first, so that a parameter of two stages has one name and one turn.
    stages = sorted(zip((rank, num_ranks - 1 - rank), modules, strict=False), key=lambda item: item[0])
    parameters = list(nn.ModuleDict({f"stage {stage}": module for stage, module in stages}).named_parameters())
    problem = _problem(modules, parameters)
    theirs = _agree(group, places, peer, parameters, problem, limit)
    try:
        for bucket in _buckets(parameters, theirs):
            _exchange(bucket, dist.get_process_group_ranks(group)[peer], group, limit)
    except RuntimeError as error:
        kind = CommTimeoutError if "timed out" in str(error).lower() or "timeout" in str(error).lower() else CommError
        raise kind(
            f"{_WHAT} on pipeline rank {rank} failed with pipeline rank {num_ranks - 1 - rank}; look at the output of "
            f"that rank for its first error ({error})"
        ) from error


def _problem(modules: Sequence[nn.Module], parameters: _Named) -> str:
    """What this rank alone can see to be wrong; empty if nothing is."""
    if len(modules) != 2:
        return f"{len(modules)} modules; allowed: two, stage r and stage P-1-r"
    odd = [name for name, p in parameters if p.grad is not None and p.grad.layout is not torch.strided]
    return f"a gradient of {odd[0]} that is not dense" if odd else ""


def _form(parameters: _Named) -> list[str]:
    """A line a parameter: equal lines on both copies, or their gradients can not be added."""
    return [
        f"{name} {tuple(p.shape)} {p.dtype if p.grad is None else p.grad.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in parameters
    ]


def _agree(
    group: dist.ProcessGroup,
    places: Sequence[int],
    peer: int,
    parameters: _Named,
    problem: str,
    limit: timedelta,
) -> list[bool]:
    """Which parameters have a gradient on the other copy. Every rank hears of every pair, so all raise or none."""
    seconds, form = limit.total_seconds(), _form(parameters)
    digest = hashlib.sha256("\n".join(form).encode()).hexdigest()
    mine = json.dumps([digest, problem, "".join("1" if p.grad is not None else "0" for _, p in parameters)])
    heard = [json.loads(text) for text in meet(group, mine, what=_WHAT, timeout=seconds)]
    found = {place: heard[i] for i, place in enumerate(places)}
    last = len(places) - 1
    for place in range(len(places)):
        if found[place][1]:
            raise UsageError(
                f"{_WHAT}: pipeline rank {place} has {found[place][1]}", allowed="equal copies", fix="correct it there"
            )
    unequal = next((place for place in range(len(places) // 2) if found[place][0] != found[last - place][0]), None)
    if unequal is not None:
        forms = [json.loads(text) for text in meet(group, json.dumps(form), what=_WHAT, timeout=seconds)]
        one, other = (forms[places.index(place)] for place in (unequal, last - unequal))
        a, b = next((a, b) for a, b in zip([*one, "none"], [*other, "none"], strict=False) if a != b)
        raise UsageError(
            f"{_WHAT}: {a} on pipeline rank {unequal}, {b} on pipeline rank {last - unequal}",
            allowed="the same parameters on both copies of a stage",
            fix="build the modules of both ranks alike: stage r, then stage P-1-r",
        )
    return [bit == "1" for bit in heard[peer][2]]


def _buckets(parameters: _Named, theirs: Sequence[bool]) -> Iterator[list[nn.Parameter]]:
    """Parameters whose gradients go in one message: those that either copy has, of one dtype and device."""
    bucket: list[nn.Parameter] = []
    size, kind = 0, None
    for (_, parameter), there in zip(parameters, theirs, strict=True):
        if parameter.grad is None and not there:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        now = parameter.grad.dtype, parameter.grad.device
        if bucket and (now != kind or size >= _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size, kind = size + parameter.grad.nbytes, now
    if bucket:
        yield bucket


@torch.no_grad()
def _exchange(bucket: Sequence[nn.Parameter], peer: int, group: dist.ProcessGroup, limit: timedelta) -> None:
    """Sends the gradients of a bucket to global rank `peer` and adds those that come from there."""
    grads: list[Tensor] = [parameter.grad for parameter in bucket if parameter.grad is not None]
    mine = torch.cat([grad.reshape(-1) for grad in grads])
    other = torch.empty_like(mine)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer, group=group), dist.P2POp(dist.irecv, other, peer, group=group)]
    )
    for work in works:
        # A bounded wait of NCCL would stop the host; its watchdog ends the process when the group's timeout has passed.
        work.wait(limit) if dist.get_backend(group) == "gloo" else work.wait()
    for grad, part in zip(grads, other.split([grad.numel() for grad in grads]), strict=True):
        grad.add_(part.view_as(grad))
