"""Pipelines of small stages, serial execution of the same, and how far one is from the other."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.pipeline import Pipeline, stages_of_rank
from dualpipe.schedule import build
from dualpipe.simulate import simulate

HIDDEN, ROWS = 6, 2
TOLERANCE = 1e-12


def groups_of_four(rank: int) -> dict[int, Any]:
    """The pipelines this rank is in: two of 2 ranks, one of 3 (ranks 1 to 3), one of 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    three = dist.new_group([1, 2, 3])
    return {2: pairs[rank // 2], 4: dist.group.WORLD, **({3: three} if rank else {})}


class Stage(nn.Module):
    """Uses one linear twice and remembers whether gradients of a backward may be reduced (`syncing`)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.syncing = True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(torch.tanh(self.up(self.norm(x))))))

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        self.syncing = False
        yield
        self.syncing = True


class Alive:
    """Stands for what autograd keeps of one forward; counted from the forward until the graph is freed."""

    now = peak = 0

    def __init__(self) -> None:
        Alive.now += 1
        Alive.peak = max(Alive.peak, Alive.now)

    def __del__(self) -> None:
        Alive.now -= 1


class Mark(torch.autograd.Function):
    """The identity; its node holds one `Alive`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.alive = Alive()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Counted(Stage):
    """A stage whose graphs are counted."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Mark.apply(super().forward(x))
        return y


def criterion(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).square().mean()


def make_stages(num_stages: int, seed: int) -> list[Stage]:
    torch.manual_seed(seed)
    return [Stage().double() for _ in range(num_stages)]


def serial(stages: list[Stage], x: Tensor, y: Tensor, num_microbatches: int) -> Tensor:
    """Losses by microbatch; gradients are summed in the stages."""
    losses = []
    for rows, labels in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
        for stage in stages:
            rows = stage(rows)
        loss = criterion(rows, labels)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def share_of(name: str, tensor: Tensor, rank: int, last: int, *, of_stage: str) -> list[Tensor]:
    """The part of a batch that `rank` passes to `step` for its first or its last stage."""
    half = len(tensor) // 2
    if name == "dualpipe":
        parts = (
            {0: tensor[:half], last: tensor[half:]} if of_stage == "first" else {last: tensor[:half], 0: tensor[half:]}
        )
        return [parts[rank]] if rank in parts else []
    owner = 0 if of_stage == "first" or name in ("dualpipev", "zbv") else last
    return [tensor] if rank == owner else []


def watch_hooks(module: Stage) -> dict[str, list[bool]]:
    """For each parameter, one entry a firing of its gradient hook: whether it may be reduced then."""
    fired: dict[str, list[bool]] = {name: [] for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired[name].append(module.syncing))
    return fired


CPU = torch.device("cpu")


def run_pipeline(
    group: Any,
    name: str,
    counts: list[int],
    seed: int,
    backward_split: bool = True,
    device: torch.device = CPU,
    stages_per_rank: int | None = None,
) -> list[dict[str, Any]]:
    """Steps with the given microbatch counts; for each what this rank saw and its distance from serial execution."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    num_stages = build(name, ranks, 2 * ranks, stages_per_rank=stages_per_rank).num_stages
    reference = [stage.to(device) for stage in make_stages(num_stages, seed)]
    keys = stages_of_rank(name, ranks, rank, stages_per_rank)
    mine = [copy.deepcopy(reference[key.stage]) for key in keys]
    for stage in mine:
        stage.__class__ = Counted
    fired = [watch_hooks(stage) for stage in mine]
    results, sizes = [], {"stages_per_rank": stages_per_rank, "allow_few": True}
    options = {"schedule": name, "group": group, "edge_shape": (ROWS, HIDDEN), "edge_dtype": torch.float64}
    with Pipeline(mine, backward_split=backward_split, stages_per_rank=stages_per_rank, **options) as pipeline:
        for count in counts:
            x, y = torch.randn(2, count * ROWS, HIDDEN, dtype=torch.float64).to(device)
            for stage in [*reference, *mine]:
                stage.zero_grad()
            for hooks in fired:
                for record in hooks.values():
                    record.clear()
            expected = serial(reference, x, y, count)
            inputs = share_of(name, x, rank, ranks - 1, of_stage="first")
            labels = share_of(name, y, rank, ranks - 1, of_stage="last")
            Alive.peak = Alive.now
            loss, outputs = pipeline.step(*inputs, num_microbatches=count, criterion=criterion, labels=labels)
            planned = build(name, ranks, count, backward_split=backward_split, **sizes)
            wanted = share_of(name, expected, rank, ranks - 1, of_stage="last")
            assert outputs is None
            apart = worst_error(group, name, keys, mine, reference)
            pipeline.add_mirrored_gradients()
            results.append(
                {
                    "loss": loss is None if not wanted else torch.equal(loss, wanted[0]),
                    "grads": max(apart, worst_error(group, "added", keys, mine, reference)),
                    "peak": pipeline.stats.peak_live,
                    "held": Alive.peak,
                    "left": Alive.now,
                    "planned peak": simulate(planned).peak_live[rank],
                    "hooks": [list(record) for hooks in fired for record in hooks.values()],
                }
            )
    return results


def worst_error(group: Any, name: str, keys: Any, mine: list[Stage], reference: list[Stage]) -> float:
    """Largest ||a-b|| / ||b|| over this rank's gradients; the two copies of dualpipe are added first."""
    grads = {key.stage: [p.grad.cpu() for p in stage.parameters()] for key, stage in zip(keys, mine, strict=True)}
    if name == "dualpipe":
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, grads, group=group)
        holders = {stage: [found[stage] for found in everyone if stage in found] for stage in grads}
        grads = {stage: [a + b for a, b in zip(*copies, strict=True)] for stage, copies in holders.items()}
    return max(
        float((grad - parameter.grad.cpu()).norm() / parameter.grad.norm())
        for stage, list_ in grads.items()
        for grad, parameter in zip(list_, reference[stage].parameters(), strict=True)
    )


def check_memory(results: list[dict[str, Any]]) -> None:
    """Graphs that were really alive at once, the executor's own count, and the simulator's: one number."""
    assert [result["held"] for result in results] == [result["planned peak"] for result in results]
    assert [result["peak"] for result in results] == [result["planned peak"] for result in results]
    assert [result["left"] for result in results] == [0] * len(results)


def check_hooks(results: list[dict[str, Any]], counts: list[int], name: str) -> None:
    """Every hook fires once a microbatch, and only the last firing may reduce, also after the count changed."""
    for result, count in zip(results, counts, strict=True):
        mine = count // 2 if name == "dualpipe" else count
        for record in result["hooks"]:
            assert record == [False] * (mine - 1) + [True]
