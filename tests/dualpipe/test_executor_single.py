"""The executor in one process without torch.distributed: P = 1, and the rules that need no second rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comm_core.runtime.errors import ClosedError, UsageError
from dualpipe import executor as executor_module
from dualpipe.actions import Kind, StageKey
from dualpipe.executor import Executor, PipelineStateError
from dualpipe.module_stages import ModuleStages
from dualpipe.pipeline import Pipeline
from dualpipe.schedule import SCHEDULES, dualpipev, from_csv, merge_backward
from dualpipe.split_modules import split_weight_grads
from tests.dualpipe.pipelines import HIDDEN, ROWS, TOLERANCE, Stage, check_hooks, criterion, make_stages, run_pipeline
from tests.dualpipe.ragged import Several, loss_of, make


def single(count: int, cls: type[ModuleStages] = ModuleStages, **changes: Any) -> tuple[Any, list[Stage]]:
    """Programs for a V of one rank (two stages) over fresh data, and its modules."""
    stages = make_stages(2, 7)
    x, y = torch.randn(2, count * ROWS, HIDDEN, dtype=torch.float64)
    arguments: dict[str, Any] = {
        "num_stages": 2,
        "edge": lambda payload, key, microbatch: pytest.fail("nothing crosses ranks"),
        "inputs": {i: [rows] for i, rows in enumerate(x.chunk(count))},
        "labels": {i: [rows] for i, rows in enumerate(y.chunk(count))},
        "criterion": criterion,
        **changes,
    }
    return cls({StageKey(i): stage for i, stage in enumerate(stages)}, **arguments), stages


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe"}))
def test_one_rank_without_a_group(name, fresh_random_data):
    counts = [1, 2, 5, 4]
    results = run_pipeline(None, name, counts, fresh_random_data)
    assert all(result["loss"] and result["grads"] <= TOLERANCE for result in results)
    check_hooks(results, counts, name)
    assert [result["peak"] for result in results] == [result["planned peak"] for result in results]
    if name in ("dualpipev", "1f1b"):
        assert [result["peak"] for result in results] == ([2, 3, 3, 3] if name == "dualpipev" else [1, 1, 1, 1])


def test_dx_is_passed_on_before_dw_runs(monkeypatch):
    """In a full backward at the turn of the V the next stage has its gradient before any weight has one."""
    programs, stages = single(1)
    order: list[str] = []
    stages[1].down.weight.register_post_accumulate_grad_hook(lambda _: order.append("dW of stage 1"))
    original = executor_module._Run.deliver

    def deliver(self: Any, payload: Any, action: Any, value: Any, **more: Any) -> None:
        order.append(f"{action} delivered")
        original(self, payload, action, value, **more)

    monkeypatch.setattr(executor_module._Run, "deliver", deliver)
    with Executor(None) as executor, split_weight_grads(stages[1], executor.store):
        executor.run(merge_backward(dualpipev(1, 1)), programs)
    assert order == ["0F0 delivered", "1F0 delivered", "1B0 delivered", "dW of stage 1", "0B0 delivered"]


def test_several_outputs_of_the_model(fresh_random_data):
    stages = make(Several, 2, fresh_random_data)
    x, y = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    with Pipeline(stages, edge_shape=[(2, HIDDEN), (2,), (2, 1), (HIDDEN,)], edge_dtype=torch.float64) as pipeline:
        loss, outputs = pipeline.step(x, num_microbatches=3, criterion=loss_of, labels=[y], return_outputs=True)
    wanted = [stages[1](*stages[0](part)) for part in x.chunk(3)]
    assert isinstance(outputs, tuple) and len(outputs) == 4 and loss is not None and loss.shape == (3,)
    for output, parts in zip(outputs, zip(*wanted, strict=True), strict=True):
        assert not output.requires_grad
        torch.testing.assert_close(output, torch.cat(parts).detach(), rtol=1e-12, atol=1e-12)


def test_what_is_no_tensor_is_refused():
    class Wrong(Stage):
        def forward(self, x: Tensor) -> Any:
            return [x, "words"]

    x = torch.zeros(2, HIDDEN, dtype=torch.float64)
    with Pipeline([Wrong(), Wrong()]) as pipeline, pytest.raises(UsageError, match=r"'str'.* stage 0"):
        pipeline.step(x, num_microbatches=1, criterion=criterion, labels=[x])


class Paired(ModuleStages):
    """Runs pairs itself."""

    pairs = 0

    def forward_backward(self, forward: Any, backward: Any) -> Any:
        self.pairs += 1
        return self.forward(*forward), self.backward(*backward)


def test_a_pair_goes_to_the_programs_where_they_want_it():
    plain, stages = single(5)
    paired = Paired(
        {StageKey(i): stage for i, stage in enumerate(stages)},
        num_stages=2,
        edge=plain.edge,
        inputs=plain._inputs,
        labels=plain._labels,
        criterion=criterion,
    )
    grads = []
    with Executor(None) as executor:
        for programs in (plain, paired):
            executor.run(dualpipev(1, 5), programs)
            grads.append([parameter.grad for stage in stages for parameter in stage.parameters()])
            for stage in stages:
                stage.zero_grad()
    assert paired.pairs == sum(action.kind is Kind.FB for action in dualpipev(1, 5).ranks[0]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


class Silent(ModuleStages):
    """Returns no output."""

    def forward(self, key: StageKey, microbatch: int, input: Tensor | None) -> Tensor | None:
        super().forward(key, microbatch, input)
        return None


def test_a_program_that_returns_nothing_is_named_and_the_executor_is_closed():
    executor = Executor(None)
    with pytest.raises(PipelineStateError, match="0F0 on rank 0 returned None, but stage 1 waits for its output"):
        executor.run(dualpipev(1, 2), single(2, Silent)[0])
    with pytest.raises(ClosedError, match="make a new one"):
        executor.run(dualpipev(1, 2), single(2)[0])


def test_weights_left_in_a_foreign_queue_are_an_error():
    executor = Executor(None)

    class Leaking(ModuleStages):
        def forward(self, key: StageKey, microbatch: int, input: Tensor | None) -> Tensor | None:
            if key.stage == 0:
                with executor.store.collect():
                    executor.store.put(self._modules[key].down.weight, lambda: pytest.fail("never run"))
            return super().forward(key, microbatch, input)

    with pytest.raises(PipelineStateError, match="weight-gradient queues: 2"):
        executor.run(dualpipev(1, 2), single(2, Leaking)[0])


def test_weights_out_of_order_are_refused():
    """The last microbatch may reduce gradients at its I and at its W, so both must be the last."""
    text = "0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,{},0W0,0W1\n"
    for weights, good in (("1W0,1W1", True), ("1W1,1W0", False)):
        schedule = from_csv(text.format(weights), like=dualpipev(1, 2))
        with Executor(None) as executor:
            if good:
                executor.run(schedule, single(2)[0])
            else:
                with pytest.raises(UsageError, match="last W of a stage on rank 0"):
                    executor.run(schedule, single(2)[0])


def test_a_schedule_for_other_ranks_and_missing_modules_are_refused():
    programs, stages = single(4)
    with pytest.raises(UsageError, match="dualpipev schedule for 2 ranks; allowed: 1 ranks"):
        Executor(None).run(dualpipev(2, 4), programs)
    with pytest.raises(UsageError, match="1 modules on rank 0; allowed: 2 for dualpipev"):
        Pipeline(stages[:1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"criterion": None}, "criterion None"),
        ({"num_microbatches": 0}, "a whole number from 1"),
        ({"num_microbatches": 5}, "4 samples for 5 microbatches"),
    ],
)
def test_arguments_of_a_step_that_do_not_fit(changes, words):
    batch = torch.zeros(4, HIDDEN, dtype=torch.float64)
    arguments = {"num_microbatches": 2, "criterion": criterion, "labels": [batch], **changes}
    with Pipeline(make_stages(2, 7)) as pipeline, pytest.raises(UsageError, match=words):
        pipeline.step(batch, **arguments)
    with Pipeline(make_stages(2, 7)) as pipeline, pytest.raises(UsageError, match="no inputs"):
        pipeline.step(num_microbatches=2, criterion=criterion)


def test_closing_gives_the_modules_their_own_forward_back():
    stages = make_stages(2, 7)
    pipeline = Pipeline(stages)
    assert "forward" in stages[0].up.__dict__
    pipeline.close()
    pipeline.close()
    assert "forward" not in stages[0].up.__dict__
    with pytest.raises(ClosedError):
        pipeline.step(torch.zeros(2, HIDDEN, dtype=torch.float64), num_microbatches=1, criterion=criterion,
                      labels=[torch.zeros(2, HIDDEN)])  # fmt: skip
