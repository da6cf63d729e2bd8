"""What the two ends of a hop tell each other, and when messages are posted, by the log of a transport in memory."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Kind, Payload, StageKey
from dualpipe.edges import Edge, Form
from dualpipe.module_stages import ModuleStages
from dualpipe.schedule import build
from tests.dualpipe.pipelines import HIDDEN, TOLERANCE
from tests.dualpipe.ragged import One, Several, loss_of, make, ragged_steps
from tests.dualpipe.threads import run_threads

CPU = torch.device("cpu")
EDGE = Edge((2, HIDDEN), torch.float64, CPU)


def fixed(*_: Any) -> Edge:
    return EDGE


def log_of_steps(name: str, kind: Any, sizes: list[list[int]], seed: int, edge: Any = None) -> list[list[Any]]:
    """For each rank and step what happened; gradients are compared with serial ones on the way."""

    def work(rank: int, executor: Any, p2p: Any) -> list[Any]:
        logs = []
        run = executor.run

        def logged(*arguments: Any) -> None:
            p2p.log = []
            run(*arguments)
            logs.append(p2p.log)

        executor.run = logged
        results = ragged_steps(executor, None, name, kind, sizes, seed, edge)
        assert all(same and error <= TOLERANCE for same, error in results), results
        return logs

    answers = run_threads(2, work)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def count_of(log: list[Any], what: str) -> int:
    return sum(entry[0] == what for entry in log)


@pytest.mark.parametrize("kind", [One, Several])
def test_shapes_are_told_once_and_again_when_they_change(kind, fresh_random_data):
    same, other = [2, 3, 1, 2, 4], [2, 3, 4, 2, 4]  # microbatch 2 changes
    steps = [same, same, other, other, other, same]
    for rank, logs in enumerate(log_of_steps("dualpipev", kind, steps, fresh_random_data)):
        hops = 5  # activations this rank sends: one stage's of a V of two ranks, in five microbatches
        told = [[entry[2] for entry in log if entry[0] == "tell" and "SEND" in entry[1].split()[0]] for log in logs]
        headers = [[words for words in step if len(words) == 5] for step in told]
        assert [len(step) for step in headers] == [hops] * 6
        # Shapes follow their header the first time, and for microbatch 2 when it changes.
        assert [[words[2] for words in step if words[4]] for step in headers] == [[0, 1, 2, 3, 4], [], [2], [], [], [2]]
        # Wrong expectations: what the receiver had posted for is sent, too, and only then.
        sends = [count_of(log, "send") for log in logs]
        assert sends == [2 * hops, 2 * hops, 2 * hops + 1, 2 * hops, 2 * hops, 2 * hops + 1], rank


def test_known_shapes_are_posted_before_their_header_is_heard(fresh_random_data):
    first, second, changed, after = log_of_steps("1f1b", One, [[2] * 5, [2] * 5, [3] * 5, [4] * 5], fresh_random_data)[
        1
    ]

    def heard_before_posted(log: list[Any]) -> list[bool]:
        return [
            log.index(("hear", name)) < log.index(("post", name)) for name in (f"1RECV_F{i}" for i in range(1, 5))
        ]  # fmt: skip

    assert heard_before_posted(first) == [True] * 4
    assert heard_before_posted(second) == [False] * 4
    assert heard_before_posted(changed) == [False] * 4
    assert count_of(changed, "post") == 2 * count_of(second, "post")
    assert heard_before_posted(after) == [True] * 4  # just changed: nothing is expected


def test_fixed_shapes_are_agreed_on_once(fresh_random_data):
    for first, second, fewer in log_of_steps("dualpipev", One, [[2] * 4, [2] * 4, [2] * 3], fresh_random_data, fixed):
        assert [count_of(log, "tell") for log in (first, second, fewer)] == [2, 1, 2]
        assert [len(entry[2]) for entry in second if entry[0] == "tell"] == [1]


def test_fixed_shapes_of_several_tensors(fresh_random_data):
    """The same edges say what of it comes back: not the whole numbers, and not what is said to have no gradient."""
    several = (
        EDGE,
        Edge((2,), torch.int64, CPU),
        Edge((2, 1), torch.float64, CPU),
        Edge((HIDDEN,), torch.float32, CPU, grad=False),
    )
    logs = log_of_steps("zbv", Several, [[2] * 4], fresh_random_data, lambda *_: several)
    for (log,) in logs:
        shapes = {entry[1][1:7]: entry[2] for entry in log if entry[0] == "send"}
        assert shapes == {"SEND_F": [(2, HIDDEN), (2,), (2, 1), (HIDDEN,)], "SEND_B": [(2, HIDDEN), (2, 1)]}


class Watched(ModuleStages):
    """Writes its computations into the log of the messages."""

    log: list[Any]

    def forward(self, key: StageKey, microbatch: int, input: Any) -> Any:
        self.log.append(("F", key.stage, microbatch))
        return super().forward(key, microbatch, input)

    def backward(self, key: StageKey, microbatch: int, *rest: Any) -> Any:
        self.log.append(("B", key.stage, microbatch))
        return super().backward(key, microbatch, *rest)


class PairsItself(Watched):
    """Runs pairs itself and hands the output on before the backward."""

    def forward_backward(self, forward: Any, backward: Any, results: Any) -> Any:
        output = self.forward(*forward)
        results.output(output)
        grad = self.backward(*backward)
        results.input_grad(grad)
        self.log.append(("pair ends",))
        return output, grad


class PairsLate(Watched):
    """Runs pairs itself and returns the results."""

    def forward_backward(self, forward: Any, backward: Any) -> Any:
        return self.forward(*forward), self.backward(*backward)


def watched_logs(name: str, count: int, cls: type[Watched] = Watched) -> list[list[Any]]:
    """What both ranks did, in order; the stages differ by rank only."""
    schedule = build(name, 2, count)
    stages = make(One, schedule.num_stages, 3)
    data = {i: [torch.randn(2, HIDDEN, dtype=torch.float64)] for i in range(count)}

    def work(rank: int, executor: Any, p2p: Any) -> list[Any]:
        modules = {key: copy.deepcopy(stages[key.stage]) for key in schedule.stages_of(rank)}
        programs = cls(
            modules,
            num_stages=schedule.num_stages,
            edge=fixed,
            inputs=data,
            labels=data,
            criterion=loss_of,
        )
        programs.log = p2p.log
        executor.run(schedule, programs)
        return p2p.log

    answers = run_threads(2, work)
    assert all(isinstance(answer, list) for answer in answers), answers
    return answers


def test_a_receive_is_posted_before_the_computation_in_front_of_it():
    """In 1F1B the input of F m+1 is posted before B m on the last rank, and awaited after it."""
    log = watched_logs("1f1b", 6)[1]
    for m in range(5):
        places = [log.index(entry) for entry in [("post", f"1RECV_F{m + 1}"), ("B", 1, m), ("wait", f"1RECV_F{m + 1}")]]
        assert places == sorted(places), m


@pytest.mark.parametrize("cls", [Watched, PairsItself])
def test_messages_are_hidden_inside_pairs(cls):
    """Receives of a pair are posted before the pair in front of it; the F of a pair is sent before its B runs."""
    schedule = build("dualpipev", 2, 8)
    for rank, log in enumerate(watched_logs("dualpipev", 8, cls)):
        actions = schedule.ranks[rank]
        seen = 0
        for before, action in itertools.pairwise(actions):
            if before.kind is not Kind.FB or action.kind is not Kind.FB:
                continue
            for part, payload in zip(action.parts, Payload, strict=True):
                post = ("post", f"{part.stage}RECV_{payload}{part.microbatch}")
                if post in log:  # the rest is at the turn of the V, or the loss
                    seen += 1
                    assert log.index(post) < log.index(("F", before.stage, before.microbatch))
            sent = next(
                (i for i, e in enumerate(log) if e[:2] == ("send", f"{action.stage}SEND_F{action.microbatch}")), None
            )
            if sent is not None:
                assert sent < log.index(("B", action.parts[1].stage, action.parts[1].microbatch))
        assert seen >= 6


def test_pairs_without_a_say_send_at_their_end():
    log = watched_logs("dualpipev", 8, PairsLate)[0]
    pair = next(action for action in build("dualpipev", 2, 8).ranks[0] if action.kind is Kind.FB and action.stage == 0)
    sent = next(i for i, e in enumerate(log) if e[:2] == ("send", f"{pair.stage}SEND_F{pair.microbatch}"))
    assert sent > log.index(("B", pair.parts[1].stage, pair.parts[1].microbatch))


class Keeps(ModuleStages):
    """The memory of outputs, and how much of it is alive when a forward starts."""

    def forward(self, key: StageKey, microbatch: int, input: Any) -> Any:
        alive = sum(not ref.expired() for ref in self.__dict__.setdefault("refs", []))
        self.__dict__.setdefault("alive", []).append(alive)
        output = super().forward(key, microbatch, input)
        self.refs.append(StorageWeakRef(output.untyped_storage()))  # type: ignore[attr-defined]
        return output


class KeepsAll(Keeps):
    """Wants the outputs themselves back."""

    def after_forward(self, key: StageKey, microbatch: int, output: Any) -> Any:
        super().after_forward(key, microbatch, output)
        return [output]


class Doubled(One):
    """Saves nothing of its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


@pytest.mark.parametrize(("cls", "most"), [(Keeps, 0), (KeepsAll, 2)])
def test_memory_of_sent_outputs_is_free_before_the_backward(cls, most):
    """The first rank of zbh2 on two ranks runs three forwards before a backward; all outputs but none are kept."""
    schedule, count = build("zbh2", 2, 6), 6
    stages = make(Doubled, 2, 3)
    data = {i: [torch.randn(2, HIDDEN, dtype=torch.float64)] for i in range(count)}
    received = threading.Semaphore(0)

    def work(rank: int, executor: Any, p2p: Any) -> list[int]:
        programs = cls({key: stages[key.stage] for key in schedule.stages_of(rank)}, num_stages=2,
                       inputs=data, labels=data, criterion=loss_of, edge=fixed)  # fmt: skip
        if rank == 0:
            forward = programs.forward

            def after_receipt(key: StageKey, microbatch: int, input: Any) -> Any:
                if microbatch in (1, 2):
                    assert received.acquire(timeout=10)  # the message before has arrived
                return forward(key, microbatch, input)

            programs.forward = after_receipt
        else:
            take = p2p.post

            def post(*arguments: Any) -> Any:
                posted = take(*arguments)
                posted.tensors = posted.wait()
                posted.wait = lambda: posted.tensors
                received.release()
                return posted

            p2p.post = post
        executor.run(schedule, programs)
        return programs.__dict__["alive"]

    first, second = run_threads(2, work)
    assert not isinstance(first, Exception) and not isinstance(second, Exception), (first, second)
    assert max(first[:3]) == most


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": (3, HIDDEN)}, ["waits for 1RECV_F0 (the input of stage 1, microbatch 0): (2, 6) torch.float64",
                                  "where pipeline rank 0 sends 1RECV_F0 (the input of stage 1, microbatch 0): (3, 6)"]),
        ({"dtype": torch.float32}, ["(2, 6) torch.float64", "(2, 6) torch.float32"]),
        ({"none": True}, ["(2, 6) torch.float64", "shapes that its header tells"]),
        ({"count": 5}, ["1RECV_F4 (the input of stage 1, microbatch 4)", "nothing more"]),
    ],
)  # fmt: skip
def test_ranks_that_do_not_agree(other, words):
    """The first rank has another shape, dtype, form or number of microbatches than the second one."""

    def work(rank: int, executor: Any, p2p: Any) -> None:
        count = other.get("count", 4) if rank == 1 else 4
        schedule = build("1f1b", 2, count)
        edge = EDGE if rank else None if "none" in other else Edge(
            other.get("shape", EDGE.shape), other.get("dtype", EDGE.dtype), CPU)  # fmt: skip
        rows, dtype = (edge.shape[0], edge.dtype) if edge else (2, torch.float64)
        data = {i: [torch.randn(rows, HIDDEN, dtype=dtype)] for i in range(5)}
        programs = ModuleStages({StageKey(rank): make(One, 1, 3)[0].to(dtype)}, num_stages=2, inputs=data, labels=data,
                                criterion=loss_of, edge=lambda *_: edge)  # fmt: skip
        executor.run(schedule, programs)

    first, second = run_threads(2, work)
    # Of the gradients, before the first one is asked for.
    assert isinstance(first, UsageError) and first.__notes__[0].startswith("in 0RECV_B0 on pipeline rank 0 (RECV_B of ")
    assert isinstance(second, UsageError) and all(word in str(second) for word in words), second
    assert second.__notes__[0].startswith("in 1RECV_F0 on pipeline rank 1 (RECV_F of stage 1, microbatch 0)")


def test_words_of_a_form():
    form = Form((EDGE, Edge((), torch.bool, CPU), Edge((0, 3), torch.bfloat16, CPU)), False)
    assert Form.of_words(form.words(), CPU) == form
    assert form.mask == 0b101 and form.with_mask(0b001).mask == 0b001
    with pytest.raises(UsageError, match=r"between stages; allowed: torch\.float32"):
        Form((Edge((1,), torch.quint8, CPU),), True).words()
    with pytest.raises(UsageError, match="2 dtypes for 1 tensors"):
        Form.fixed((2, 3), [torch.float32, torch.float64], CPU)
    assert Form.fixed([(2, 3), (1,)], torch.float64, CPU).bare is False
