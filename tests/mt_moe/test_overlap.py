"""Overlapped pairs on CPU ranks: equal to plain autograd to the bit, in the golden order, and only with every wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_core import ElasticBuffer, event
from comm_core.runtime.errors import UsageError
from mt_moe import DataPath, MoEConfig, MoELayer, OverlapLayer, OverlapStage, functional, overlap, overlap_order
from mt_moe.overlap_layer import MoERun
from tests.mt_moe.overlap_cases import (
    CONFIGS,
    HIDDEN,
    PLAIN,
    STAGES,
    Attention,
    Pair,
    buffer_of,
    differing,
    recorded,
    stage,
)  # fmt: skip
from tests.pool import run_ranks

GOLDEN = [str(part) for part in overlap_order.GOLDEN]


def every_pair(rank: int, backend: str, seed: int) -> dict[Any, Any]:
    """What differs in each case, and the order of the parts in some."""
    found: dict[Any, Any] = {}
    with buffer_of(backend) as buffer:
        for kinds in STAGES:
            for name, config in CONFIGS.items():
                if name == "plain" or kinds == ("mmm", "m"):
                    pair = Pair.make(buffer, kinds, config, seed)
                    found[kinds, name] = differing(pair.serial(), pair.overlapped())
        for kinds in (("mm", "mm"), ("dm", "md")):
            found["order", kinds] = recorded(Pair.make(buffer, kinds, PLAIN, seed))
    return found


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "collective"), (2, "collective"), (2, "posix")])
def test_a_pair_equals_forward_and_backward_one_after_the_other(fresh_random_data, num_ranks, backend) -> None:
    for found in run_ranks(num_ranks, every_pair, backend, fresh_random_data):
        orders = {key: found.pop(key) for key in list(found) if key[0] == "order"}
        assert len(found) == len(STAGES) + 2 and not any(found.values()), found
        layers = {"F": (0, 1), "B": (1, 0), "W": (1, 0)}
        assert orders["order", ("mm", "mm")] == [
            f"{part} {layers[part.kind][step]}" for step in range(2) for part in overlap_order.GOLDEN
        ]
        # A dense layer forward beside one backward, then two with experts.
        assert [part for part in orders["order", ("dm", "md")] if "dispatch" in part or "combine" in part] == [
            "combine(B) 0", "dispatch(F) 1", "dispatch(B) 0", "combine(F) 1",
        ]  # fmt: skip


def late(buffer: ElasticBuffer, seed: int, dropped: int | None) -> list[str]:
    """What differs from serial execution where all communication is late and one wait of a pair is left out."""
    run, wait = event._Job.run, functional._Exchange.wait
    waits: list[int] = []

    def slow(self: Any) -> None:
        time.sleep(0.01)
        run(self)

    def counted(self: Any) -> None:
        waits.append(0)
        if len(waits) - 1 == dropped:
            self.event = self.sent = None
        else:
            wait(self)

    pair = Pair.make(buffer, ("m", "m"), PLAIN, seed)
    serial = pair.serial()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN: what was not waited for is seen
    try:
        with mock.patch.object(event._Job, "run", slow), mock.patch.object(functional._Exchange, "wait", counted):
            found = differing(serial, pair.overlapped())
    except RuntimeError as error:  # autograd sees that a saved tensor was written after it was read
        assert "modified" in str(error), error
        found = [str(error)]
    finally:
        torch.use_deterministic_algorithms(False)
        buffer.barrier()
    assert found or len(waits) == 8, "two microbatches, dispatch and combine, forward and backward"
    return found


def test_every_wait_is_needed_and_enough(alone, fresh_random_data) -> None:
    assert not late(alone, fresh_random_data, None)
    for dropped in range(8):
        assert late(alone, fresh_random_data, dropped), f"wait {dropped} left out changed nothing"


def starts(pair: Pair) -> list[tuple[str, str]]:
    """Each communication of a pair: its part, and the last part that was done at the event it starts behind."""
    done, found, events = ["begin"], [], {}
    perform, now, beside = overlap._StageRun.perform, MoERun._event, functional._Exchange.beside
    under_way = [""]

    def performing(self: Any, place: Any) -> None:
        under_way[0] = str(place.part)
        perform(self, place)
        done.append(str(place.part))

    def noting(self: Any) -> Any:
        made = now(self)
        # An event in a part is made at its end, where nothing of the part is left to do on the stream.
        events[id(made)] = made, under_way[0]
        return made

    def starting(self: Any) -> Any:
        found.append((under_way[0], "everything before" if self.after is None else events[id(self.after)][1]))
        return beside(self)

    behind = pair.behind(pair.inputs[1])
    with (
        mock.patch.object(overlap._StageRun, "perform", performing),
        mock.patch.object(MoERun, "_event", noting),
        mock.patch.object(functional._Exchange, "beside", starting),
    ):
        pair.ahead.overlapped_forward_backward(
            pair.ahead, [pair.inputs[0]], None, [], pair.behind, None, [behind], [pair.grads[1]]
        )
    return found


# Which part makes what is sent. The gradient that combine(B) sends is handed down by the layer above, or by the caller.
STARTS = [
    ("combine(B)", ""),
    ("dispatch(F)", "attention(F)"),
    ("dispatch(B)", "mlp(B)"),
    ("combine(F)", "mlp(F)"),
    ("combine(B)", "attention(B)"),
    ("dispatch(F)", "attention(F)"),
    ("dispatch(B)", "mlp(B)"),
    ("combine(F)", "mlp(F)"),
]


def test_communication_starts_behind_what_it_sends_and_nothing_else(alone, fresh_random_data) -> None:
    assert starts(Pair.make(alone, ("mm", "mm"), PLAIN, fresh_random_data)) == STARTS


def test_an_event_left_out_is_seen(alone, fresh_random_data, monkeypatch) -> None:
    monkeypatch.setattr(functional.CombineTicket, "start_after", lambda self, event: None)
    found = starts(Pair.make(alone, ("mm", "mm"), PLAIN, fresh_random_data))
    assert found != STARTS and found[4] == ("combine(B)", "everything before")


def test_parts_in_a_wrong_order_are_seen(alone, fresh_random_data, monkeypatch) -> None:
    pair = Pair.make(alone, ("m", "m"), PLAIN, fresh_random_data)
    assert [part.split()[0] for part in recorded(pair)] == GOLDEN
    swapped = list(overlap_order.GOLDEN)
    swapped[2], swapped[3] = swapped[3], swapped[2]  # harmless to the results, not to the overlap
    monkeypatch.setattr(overlap_order, "GOLDEN", tuple(swapped))
    assert [part.split()[0] for part in recorded(pair)] != GOLDEN
    swapped[0], swapped[3] = swapped[3], swapped[0]  # mlp(B) before the gradients that it needs
    monkeypatch.setattr(overlap_order, "GOLDEN", tuple(swapped))
    with pytest.raises(AttributeError, match="_returned_grads"):
        pair.overlapped()


def test_weight_gradients_go_where_they_are_sent(alone, fresh_random_data) -> None:
    pair = Pair.make(alone, ("m", "dm"), PLAIN, fresh_random_data)
    serial = pair.serial()
    held: list[tuple[Any, Any]] = []
    pair.behind.defer_weight_grads(lambda weights, compute: held.append((weights, compute)))
    torch.manual_seed(fresh_random_data)
    y = pair.behind(pair.inputs[1])
    y.backward(pair.grads[1])
    linear = {name for name, module in pair.behind.named_modules() if type(module) is nn.Linear}
    for name, parameter in pair.behind.named_parameters():
        later = name.rpartition(".")[0] in linear and name.endswith("weight")
        later = later or "experts" in name or "shared" in name
        assert (parameter.grad is None) == later, name
    for weights, compute in held:
        torch.autograd.backward(list(weights), list(compute()))
    for name, parameter in pair.behind.named_parameters():
        assert torch.equal(parameter.grad, serial[f"1 {name}"]), name


def test_a_loss_a_head_and_an_embedding(alone, fresh_random_data) -> None:
    generator = torch.Generator().manual_seed(fresh_random_data)
    ids, labels = torch.randint(0, 11, (2, 2, 7), generator=generator)
    torch.manual_seed(fresh_random_data)
    module = stage("m", alone, PLAIN, 0)
    whole = OverlapStage(list(module.layers), before=nn.Embedding(11, HIDDEN), after=nn.Linear(HIDDEN, 11))
    whole.double().eval()

    def criterion(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).clone()

    losses = []
    for rows, wanted in zip(ids, labels, strict=True):
        y = whole.after(whole.layers[0](whole.before(rows[None])))
        losses.append(criterion(y, wanted))
    sum(losses).backward()
    wanted_grads = {name: p.grad for name, p in whole.named_parameters()}
    whole.zero_grad()
    first = criterion(whole(ids[:1]), labels[0])
    outputs, second = whole.overlapped_forward_backward(
        whole, [ids[1:]], criterion, [labels[1]], whole, first, None, None
    )
    assert not first.requires_grad and len(outputs) == 1
    assert torch.equal(first, losses[0].detach()) and torch.equal(second, losses[1])
    second.backward()
    for name, parameter in whole.named_parameters():
        assert torch.allclose(parameter.grad, wanted_grads[name], rtol=1e-12, atol=1e-15), name
    with torch.no_grad():
        assert torch.equal(criterion(whole(ids[1:]), labels[1]), second)


def test_mistakes(alone) -> None:
    with pytest.raises(UsageError, match="num_chunks=2"):
        chunks = MoEConfig(hidden=HIDDEN, ffn=8, num_experts=2, num_topk=1, data_path=DataPath(num_chunks=2))
        OverlapLayer(Attention(False), MoELayer(chunks, buffer=alone))
    with pytest.raises(UsageError, match="one or more OverlapLayer"):
        OverlapStage([])
    one, other = stage("d", alone, PLAIN, 0), stage("d", alone, PLAIN, 1)
    x = torch.randn(1, 3, HIDDEN)
    with pytest.raises(UsageError, match="neither of loss1 and outputs1"):
        one.overlapped_forward_backward(one, [x], None, [], other, None, None, None)
    with pytest.raises(UsageError, match="of 0 forwards of module1"):
        one.overlapped_forward_backward(one, [x], None, [], other, one(x).sum(), None, None)
    with pytest.raises(UsageError, match="2 inputs"):
        one(x, x)
    routed = stage("m", alone, PLAIN, 0)
    with pytest.raises(UsageError, match="under autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        routed(x)
    wide = OverlapLayer(Attention(False), MoELayer(PLAIN, buffer=alone, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"x of torch\.float32 and weights of torch\.float64"):
        OverlapStage([wide])(x)
    y = one(x)
    y.sum().backward(retain_graph=True)
    with pytest.raises(UsageError, match="a second backward"):
        y.sum().backward()


@pytest.fixture(scope="module")
def alone() -> Iterator[ElasticBuffer]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with buffer_of("collective") as buffer:
        yield buffer
    dist.destroy_process_group()
