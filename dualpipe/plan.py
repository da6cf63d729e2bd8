"""Chooses a schedule, the number of microbatches and the layers of each stage for given costs and a memory limit.

What is weighed up: more microbatches make the bubble smaller but each action has a fixed cost; schedules with more
stages have smaller bubbles but need more layers, and the embedding and the head make stages uneven; schedules with a
shorter bubble hold more activations, or two copies of the parameters.

Every candidate is simulated with the split that makes the ranks' work as even as possible. In the best of them, layers
then move between stages as long as that shortens the step. Where all splits are few, all of them are tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import comb

from comm_core.runtime.errors import UsageError
from dualpipe.costs import Durations
from dualpipe.lists import Schedule
from dualpipe.schedule import SCHEDULES, STAGES_PER_RANK, build
from dualpipe.simulate import simulate

_ALL_SPLITS = 60  # try every split up to this number of them
_REFINED = 8  # the best candidates, whose splits are improved
_NOTHING = Durations(F=0.0, I=0.0, W=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step of one pipeline has to do. Costs are for one sample and one layer, in any one unit of time.

    Attributes:
        layers: layers of the model, without embedding and head.
        samples: samples a step, over all microbatches.
        layer: durations of a layer. `hop` is for one sample, too.
        embedding: durations of the embedding, on the first stage.
        head: durations of the head and the loss, on the last stage.
        overhead: fixed time of every action, whatever its size.
        activation: memory that a layer keeps for one sample from F until its I is done.
        layer_memory: memory of a layer's parameters, gradients and optimizer state.
        embedding_memory: the same of the embedding.
        head_memory: the same of the head.
    """

    layers: int
    samples: int
    layer: Durations = field(default_factory=Durations)
    embedding: Durations = _NOTHING
    head: Durations = _NOTHING
    overhead: float = 0.0
    activation: float = 1.0
    layer_memory: float = 0.0
    embedding_memory: float = 0.0
    head_memory: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}", allowed="a whole number from 1", fix="correct it")
        for name in ("overhead", "activation", "layer_memory", "embedding_memory", "head_memory"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} {getattr(self, name)}", allowed="a finite number from 0", fix="correct it")


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice and its figures.

    Attributes:
        schedule: name of the schedule.
        stages_per_rank: stages a rank, or None where the schedule says it.
        microbatches: microbatches a step.
        layers: layers of each stage.
        makespan: time of the step.
        bubble_ratio: idle time over ranks times makespan.
        memory: per rank, parameters and the peak of activations.
    """

    schedule: str
    stages_per_rank: int | None
    microbatches: int
    layers: tuple[int, ...]
    makespan: float
    bubble_ratio: float
    memory: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)


def stage_durations(work: Workload, layers: Sequence[int], microbatches: int) -> list[Durations]:
    """Durations of each stage with these numbers of layers. What is no layer is not hidden by a pair."""
    size, last = work.samples / microbatches, len(layers) - 1
    result = []
    for stage, number in enumerate(layers):
        base, more = work.layer.scaled(number), [_NOTHING]
        more += [work.embedding] * (stage == 0) + [work.head] * (stage == last)
        forward, inputs, weights = (sum(getattr(item, kind) for item in more) for kind in ("F", "I", "W"))
        backward = sum(item.full_backward for item in more)
        total = Durations(
            F=base.F + forward,
            I=base.I + inputs,
            W=base.W + weights,
            B=base.full_backward + backward,
            FB=base.whole_pair + forward + backward,
            a2a=base.a2a,
        ).scaled(size)
        fixed = work.overhead
        result.append(
            replace(
                total,
                F=total.F + fixed,
                I=total.I + fixed,
                W=total.W + fixed,
                B=total.full_backward + fixed,
                FB=total.whole_pair + fixed,
                hop=work.layer.hop * size,
            )
        )
    return result


def memory_of(work: Workload, schedule: Schedule, layers: Sequence[int]) -> tuple[float, ...]:
    """Parameters and the peak of activations of each rank; a pair's F counts before its B frees."""
    sample, result = work.samples / schedule.num_microbatches, []
    for rank, actions in enumerate(schedule.ranks):
        held = [key.stage for key in schedule.stages_of(rank)]
        fixed = sum(work.layer_memory * layers[stage] for stage in held)
        fixed += work.embedding_memory * held.count(0) + work.head_memory * held.count(schedule.num_stages - 1)
        live = peak = 0.0
        for action in actions:
            if action.forward is not None:
                live += layers[action.forward.stage]
            peak = max(peak, live)
            if action.backward is not None:
                live -= layers[action.backward.stage]
        result.append(fixed + peak * work.activation * sample)
    return tuple(result)


def plan(
    ranks: int,
    work: Workload,
    *,
    memory: float = float("inf"),
    schedules: Sequence[str] | None = None,
    max_stages_per_rank: int = 2,
) -> list[Plan]:
    """The best choice of each schedule and number of microbatches that fits, fastest first.

    Args:
        ranks: pipeline ranks.
        work: the model, the batch and their costs.
        memory: most memory a rank may use, in the unit of `work`.
        schedules: names to choose from; all by default.
        max_stages_per_rank: the interleaved schedules are tried with 2 up to this number of stages a rank.

    Raises:
        UsageError: nothing fits; says the least memory that would do.
    """
    searches = [
        _Search(work, schedule, stages, memory)
        for schedule, stages in _candidates(ranks, work, schedules, max_stages_per_rank)
    ]
    if not searches:
        raise UsageError(
            f"{work.layers} layers and {work.samples} samples on {ranks} ranks",
            allowed="a layer a stage and a sample a microbatch at least, for one of the schedules",
            fix="use fewer ranks, more layers or more samples",
        )
    for search in searches:
        search.start()
    fitting = sorted((search for search in searches if search.best is not None), key=_Search.makespan)
    if not fitting:
        least = min(search.least_memory for search in searches)
        raise UsageError(
            f"a memory limit of {memory:g}", allowed=f"at least {least:g}", fix="raise it, or use more pipeline ranks"
        )
    for search in fitting[:_REFINED]:
        search.refine()
    plans = [search.best for search in fitting if search.best is not None]
    return sorted(plans, key=lambda item: (item.makespan, max(item.memory)))


def _candidates(
    ranks: int, work: Workload, schedules: Sequence[str] | None, max_stages: int
) -> Iterator[tuple[Schedule, int | None]]:
    """Every schedule in every size in which it can run."""
    counts = [count for count in range(1, work.samples + 1) if work.samples % count == 0]
    for name in SCHEDULES if schedules is None else schedules:
        sizes = range(2, max_stages + 1) if name in STAGES_PER_RANK else [None]
        for stages, count in itertools.product(sizes, counts):
            try:
                schedule = build(name, ranks, count, stages_per_rank=stages, allow_few=True)
            except UsageError:
                if name not in SCHEDULES:
                    raise
                continue
            if schedule.num_stages <= work.layers:
                yield schedule, stages


class _Search:
    """The search for the best split of one schedule.

    Attributes:
        best: the fastest split so far that fits.
        least_memory: least memory of all splits that were tried.
    """

    def __init__(self, work: Workload, schedule: Schedule, stages_per_rank: int | None, limit: float) -> None:
        self.best: Plan | None = None
        self.least_memory = float("inf")
        self._work, self._schedule, self._stages_per_rank, self._limit = work, schedule, stages_per_rank, limit
        self._slowest = 0
        self._all = comb(work.layers - 1, schedule.num_stages - 1) <= _ALL_SPLITS

    def makespan(self) -> float:
        """Of the best split."""
        assert self.best is not None
        return self.best.makespan

    def start(self) -> None:
        """Tries every split where they are few; else the one of even work, or of least memory if that does not fit."""
        work, schedule = self._work, self._schedule
        if self._all:
            for layers in _splits(work.layers, schedule.num_stages):
                self._try(layers)
        elif not self._try(_even_work(work, schedule)):
            self._try(_least_memory(work, schedule))

    def refine(self) -> None:
        """Takes single layers from the busiest rank as long as the step gets shorter."""
        while not self._all and self.best is not None:
            sources = [key.stage for key in self._schedule.stages_of(self._slowest)]
            if not any(self._try(layers) for layers in _moves(self.best.layers, sources)):
                return

    def _try(self, layers: tuple[int, ...]) -> bool:
        """True if the split is the best so far."""
        work, schedule = self._work, self._schedule
        memory = memory_of(work, schedule, layers)
        self.least_memory = min(self.least_memory, max(memory))
        if max(memory) > self._limit:
            return False
        result = simulate(schedule, stage_durations(work, layers, schedule.num_microbatches))
        if self.best is not None and result.makespan >= self.best.makespan * (1 - 1e-9):
            return False
        count, stages = schedule.num_microbatches, self._stages_per_rank
        self.best = Plan(schedule.name, stages, count, layers, result.makespan, result.bubble_ratio, memory)
        self._slowest = result.busy.index(max(result.busy))
        return True


def _splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage at least one layer."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def _moves(layers: tuple[int, ...], sources: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every split with one layer of a stage of `sources` in another stage."""
    for source, target in itertools.product(sources, range(len(layers))):
        if source != target and layers[source] > 1:
            moved = list(layers)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def _greedy(work: Workload, schedule: Schedule, fixed: Sequence[float], each: float) -> tuple[int, ...]:
    """One layer a stage, then each further one where the rank, then the stage, has least to bear."""
    layers = [1] * schedule.num_stages
    owners = [[ranks[stage] for ranks in schedule.placement] for stage in range(schedule.num_stages)]

    def load(rank: int) -> float:
        return sum(fixed[key.stage] + each * layers[key.stage] for key in schedule.stages_of(rank))

    for _ in range(work.layers - schedule.num_stages):
        stage = min(
            range(schedule.num_stages),
            key=lambda s: (max(load(rank) for rank in owners[s]), fixed[s] + each * layers[s]),
        )
        layers[stage] += 1
    return tuple(layers)


def _even_work(work: Workload, schedule: Schedule) -> tuple[int, ...]:
    fixed = [0.0] * schedule.num_stages
    fixed[0] += work.embedding.F + work.embedding.full_backward
    fixed[-1] += work.head.F + work.head.full_backward
    return _greedy(work, schedule, fixed, work.layer.F + work.layer.full_backward)


def _least_memory(work: Workload, schedule: Schedule) -> tuple[int, ...]:
    """One layer after the other to the stage where the fullest rank stays emptiest."""
    layers = [1] * schedule.num_stages
    for _ in range(work.layers - schedule.num_stages):
        options = [[n + (i == stage) for i, n in enumerate(layers)] for stage in range(schedule.num_stages)]
        layers = min(options, key=lambda option: max(memory_of(work, schedule, option)))
    return tuple(layers)
