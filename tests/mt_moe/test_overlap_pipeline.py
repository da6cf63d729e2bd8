"""DualPipeV over overlapped stages: two pipeline ranks, alone and with experts over two ranks each, against serial."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe import DualPipeV, Pipeline, WeightGradStore, set_p2p_tensor_dtype, set_p2p_tensor_shapes
from mt_moe import OverlapStage
from tests.mt_moe.overlap_cases import HIDDEN, PLAIN, buffer_of, stage
from tests.pool import run_ranks

CHUNKS, SHAPE = 5, (2, 3, HIDDEN)


def criterion(output: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, wanted).clone()


def deferred(weights: Any, compute: Any) -> None:
    """Weight gradients in the way of the upstream package: at once, or as a closure for W."""

    def add() -> None:
        torch.autograd.backward(list(weights), list(compute()))

    WeightGradStore.put(add) if WeightGradStore.enabled else add()


class Counted(OverlapStage):
    """Counts the pairs that it runs."""

    pairs = 0

    @staticmethod
    def overlapped_forward_backward(*arguments: Any) -> Any:
        Counted.pairs += 1
        return OverlapStage.overlapped_forward_backward(*arguments)


def trained(rank: int, ep_size: int, seed: int) -> tuple[bool, list[str], int, float]:
    """Whether losses are equal, gradients that are not to the bit, pairs run, and the largest relative distance."""
    experts = [dist.new_group([base * ep_size + i for i in range(ep_size)]) for base in range(2)]
    pipes = [dist.new_group([i, ep_size + i]) for i in range(ep_size)]
    place, lane = divmod(rank, ep_size)
    with buffer_of("collective", experts[place]) as buffer:
        torch.manual_seed(seed)
        # One layer with experts a stage, a second one, dense, on the first and the third.
        full = [Counted(list(stage("dm"[n % 2 :], buffer, PLAIN, 10 * n).layers), defer=deferred) for n in range(4)]
        for module in full:
            module.double().eval()
        mine = [copy_of(full[n]) for n in (place, 3 - place)]
        torch.manual_seed(seed + 1 + lane)
        x, wanted = torch.randn(2, CHUNKS * SHAPE[0], *SHAPE[1:], dtype=torch.float64)
        losses = []
        for rows, labels in zip(x.chunk(CHUNKS), wanted.chunk(CHUNKS), strict=True):
            for module in full:
                for layer in module.layers:
                    rows = layer(rows)
            losses.append(criterion(rows, labels))
            losses[-1].backward()
        set_p2p_tensor_shapes([SHAPE])
        set_p2p_tensor_dtype(torch.float64)
        pipe = DualPipeV(tuple(mine), process_group=pipes[lane])
        Counted.pairs = 0
        given = ((x,), (wanted,)) if place == 0 else ((), ())
        loss, _ = pipe.step(*given[0], num_chunks=CHUNKS, criterion=criterion, labels=given[1])
        same = loss is None if place else torch.equal(loss, torch.stack(losses).detach())
        different, worst = [], 0.0
        for n, module in zip((place, 3 - place), mine, strict=True):
            for (name, p), q in zip(module.named_parameters(), full[n].parameters(), strict=True):
                if not torch.equal(p.grad, q.grad):
                    different.append(f"{n} {name}")
                    worst = max(worst, float((p.grad - q.grad).norm() / q.grad.norm()))
        pipe.close()
        pairs = Counted.pairs
        if ep_size == 1:
            different += by_pipeline(mine, pipes[lane], place, (x, wanted), torch.stack(losses).detach())
        return same, different, pairs, worst


def by_pipeline(mine: list[Any], group: Any, place: int, data: tuple[Tensor, Tensor], wanted: Tensor) -> list[str]:
    """What differs where `dualpipe.Pipeline` trains the same stages once more, which splits their backward itself."""
    before = [[parameter.grad for parameter in module.parameters()] for module in mine]
    for module in mine:
        module.zero_grad()
    Counted.pairs = 0
    given = data if place == 0 else ()
    with Pipeline(mine, schedule="dualpipev", group=group) as pipeline:
        loss, _ = pipeline.step(*given[:1], num_microbatches=CHUNKS, criterion=criterion, labels=list(given[1:]))
    found = [] if place or torch.equal(loss, wanted) else ["loss"]
    found += [] if Counted.pairs >= 3 else ["no pairs"]
    for module, grads in zip(mine, before, strict=True):
        for (name, parameter), grad in zip(module.named_parameters(), grads, strict=True):
            found += [] if torch.equal(parameter.grad, grad) else [f"by Pipeline: {name}"]
    return found


def copy_of(module: OverlapStage) -> OverlapStage:
    """A copy that shares the buffer."""
    buffers = [layer.mlp.buffer for layer in module.layers if layer.communicates]
    return copy.deepcopy(module, {id(buffer): buffer for buffer in buffers})


def test_dualpipev_trains_as_serial_execution_does(fresh_random_data) -> None:
    answers = [*run_ranks(2, trained, 1, fresh_random_data), *run_ranks(4, trained, 2, fresh_random_data)]
    for same, different, pairs, worst in answers:
        assert same, "losses"
        assert pairs >= 3
        assert not different, (worst, different)
