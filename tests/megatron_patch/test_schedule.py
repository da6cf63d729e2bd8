"""DualPipeV as Megatron's forward-backward function: its contract beyond the gradients that parity compares."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist import run_ranks
from tests.megatron_patch import megatron_case as case

pytestmark = pytest.mark.megatron

_SMALL = {"parallel__ep_size": 1, "train__seq_length": 16, "train__clip_grad": 0.0}


def _trainer(per_token: bool, **overrides: Any) -> Any:
    from examples import model as models
    from examples.parity_worker import synthetic_batch
    from examples.training import Trainer

    config = case.configure(**_SMALL, **overrides)
    models.setup_parallel(config)
    trainer = Trainer.build(config, torch.device("cpu"), lambda step, index: synthetic_batch(config, step, index))
    trainer.model.config.calculate_per_token_loss = per_token
    return trainer


def _per_token_step(data_iterator: Any, chunk: Any) -> Any:
    """A forward step with the three-part loss function: sum, number of tokens, what to log."""
    from examples import model as models

    output, _ = models.forward_step(data_iterator, chunk)

    def loss(losses: torch.Tensor) -> Any:
        total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"lm loss": total.detach() / count}

    return output, loss


def _gradients(trainer: Any, step_function: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    chunks = trainer.model.chunks
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [trainer._iterate(1, 4) for _ in chunks]
    single = len(chunks) == 1
    losses = trainer.schedule(
        forward_step_func=step_function,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else chunks,
        num_microbatches=4,
        seq_length=16,
        micro_batch_size=2,
        **{"forward_only": False, **options},
    )
    grads = {name: p.main_grad.clone() for name, p in trainer.model.parameters.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ([float(entry["lm loss"]) for entry in losses], grads))
    merged = {name: grad for _, part in gathered for name, grad in part.items()}
    return [loss for part, _ in gathered for loss in part], merged


def _contract(rank: int) -> list[str]:
    problems: list[str] = []
    case.start(case.configure(**_SMALL, parallel__schedule="1f1b", parallel__moe_layer="megatron"))
    from megatron.core import parallel_state

    from comm_core.runtime.errors import UsageError
    from examples import model as models

    parallel_state.destroy_model_parallel()
    for per_token, step_function in ((False, models.forward_step), (True, _per_token_step)):
        stock = _trainer(per_token, parallel__schedule="1f1b", parallel__moe_layer="megatron")
        wanted = _gradients(stock, step_function)
        wanted_eval = _gradients(stock, step_function, forward_only=True)[0]
        stock.close()
        ours = _trainer(per_token)
        found = _gradients(ours, step_function)
        label = "per-token loss" if per_token else "mean loss"
        if found[0] != wanted[0] or len(found[0]) != 4:
            problems.append(f"{label}: losses {found[0]}, wanted {wanted[0]}")
        problems += [f"{label}: {name}" for name in wanted[1] if not torch.equal(found[1][name], wanted[1][name])]
        if max(float(grad.abs().max()) for grad in wanted[1].values()) == 0:
            problems.append(f"{label}: nothing was computed")
        evaluated, untouched = _gradients(ours, step_function, forward_only=True)
        if evaluated != wanted_eval or len(evaluated) != 4:
            problems.append(f"{label}: forward_only gave {evaluated}, wanted {wanted_eval}")
        if any(grad.abs().max() for grad in untouched.values()):
            problems.append(f"{label}: forward_only left gradients")
        try:
            ours.forward_backward(1, 2)
            problems.append("two microbatches on two ranks were accepted")
        except UsageError as error:
            if "2" not in str(error) or "3" not in str(error):
                problems.append(f"unclear message: {error}")
        try:
            ours.schedule(
                forward_step_func=step_function,
                data_iterator=iter(()),
                model=ours.model.chunks[0],
                num_microbatches=4,
                seq_length=16,
                micro_batch_size=2,
            )
            problems.append("a single chunk was accepted")
        except UsageError:
            pass
        problems += _refused(ours)
        problems += _frees_outputs(ours)
        ours.close()
    return problems


def _frees_outputs(ours: Any) -> list[str]:
    """An output's memory is free once it is handed on: when a backward starts, nobody holds the tensor it starts at."""
    from torch.autograd.graph import GradientEdge

    from megatron_patch import schedule as ours_schedule

    refs: dict[Any, Any] = {}
    alive: list[bool] = []
    programs, free = ours_schedule._Programs, ours_schedule._Programs.after_forward

    def forward(self: Any, key: Any, microbatch: int, input: Any, run: Any = programs.forward) -> Any:
        output = run(self, key, microbatch, input)
        refs[key, microbatch] = weakref.ref(output)
        return output

    def backward(self: Any, key: Any, microbatch: int, *rest: Any, run: Any = programs.backward) -> Any:
        if key.stage < self.schedule.num_stages - 1:
            alive.append(refs[key, microbatch]() is not None or not isinstance(rest[1], GradientEdge))
        return run(self, key, microbatch, *rest)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "forward", forward)
        patch.setattr(programs, "backward", backward)
        for keep in (False, True):
            alive.clear()
            patch.setattr(programs, "after_forward", (lambda *a: a[-1]) if keep else free)
            ours.forward_backward(1, 4)
            # The turn of the V holds none either; kept outputs are what the test must be able to see.
            if len(alive) < 4 or any(alive) != keep:
                found.append(f"outputs alive with keep={keep}: {alive}")
    return found


def _refused(ours: Any) -> list[str]:
    """Model features that would train wrongly in the V must be refused."""
    from comm_core.runtime.errors import UsageError

    problems = []
    for holder, name, value in (
        (ours.model.config, "mtp_num_layers", 1),
        (ours.model.chunks[1].module, "share_embeddings_and_output_weights", True),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        try:
            ours.forward_backward(1)
            problems.append(f"{name}={value} was accepted")
        except UsageError as error:
            if f"{name}={value}" not in str(error):
                problems.append(f"unclear message: {error}")
        setattr(holder, name, before)
    return problems


def test_contract() -> None:
    assert run_ranks(2, _contract, timeout=120) == [[], []]


def test_other_schedules_are_refused() -> None:
    import megatron_patch
    from comm_core.runtime.errors import UsageError

    megatron_patch.apply("cpu", split_weight_grad=False)
    from megatron_patch.schedule import PipelineSchedule

    megatron_patch.revert()
    with pytest.raises(UsageError, match="schedule 'zbv'"):
        PipelineSchedule("zbv")
