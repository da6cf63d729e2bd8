"""Failures of one rank reach its neighbours with names, and soon; afterwards new pipelines can be made."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_core.runtime.errors import ClosedError, CommError, CommTimeoutError
from dualpipe.actions import Payload, StageKey, recv, send
from dualpipe.edges import Edge
from dualpipe.p2p import PeerToPeer
from dualpipe.pipeline import Pipeline
from tests.pool import run_ranks

EDGE = Edge((2, 3), torch.float32, torch.device("cpu"))


class Breaks(nn.Module):
    """A linear stage that fails or stalls at its second forward."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.linear, self.fault, self.calls = nn.Linear(3, 3), fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2 and self.fault == "raise":
            raise ZeroDivisionError("planted")
        if self.calls == 2 and self.fault == "stall":
            time.sleep(4.0)
        y: torch.Tensor = self.linear(x)
        return y


def one_step(rank: int, fault: str | None, timeout: float) -> tuple[str, str, float]:
    """One step in which rank 1 has the fault; returns what came of it on this rank and how long it took."""
    modules = [Breaks(fault if rank == 1 else None), Breaks(None)]
    start = time.monotonic()
    data: dict[str, Any] = {"criterion": lambda output, label: (output - label).square().mean()}
    inputs = [torch.randn(8, 3)] if rank == 0 else []
    try:
        with Pipeline(modules, edge_shape=(2, 3), timeout=timedelta(seconds=timeout)) as pipeline:
            start = time.monotonic()
            pipeline.step(*inputs, num_microbatches=4, labels=[torch.randn(8, 3)] if inputs else [], **data)
        return "fine", "", time.monotonic() - start
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


def messages_out_of_step(rank: int) -> list[float]:
    """Four queues between two ranks: messages of different kinds may be received in another order than sent."""
    p2p = PeerToPeer(dist.group.WORLD, timeout=timedelta(seconds=20))
    kinds = [(payload, number) for payload in Payload for number in (0, 1)]
    got = []
    if rank == 0:
        for payload, number in kinds:
            p2p.send(send(payload, StageKey(1), number), 1, [torch.full((2, 3), 10.0 * number + (payload == "B"))])
        p2p.finish()
    else:
        for payload, number in [kinds[2], kinds[0], kinds[3], kinds[1]]:
            (tensor,) = p2p.post(recv(payload, StageKey(2), number), 0, [EDGE]).wait()
            assert tensor.unique().numel() == 1
            got.append(float(tensor[0, 0]))
    p2p.close()
    with pytest.raises(ClosedError, match="was closed"):
        p2p.send(send(Payload.ACTIVATION, StageKey(1), 0), 1 - rank, [torch.zeros(2, 3)])
    return got


def story(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"order": messages_out_of_step(rank)}
    found["raise"] = one_step(rank, "raise", 20.0)
    dist.barrier()
    found["stall"] = one_step(rank, "stall", 1.0)
    dist.barrier()
    found["after"] = one_step(rank, None, 20.0)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, story, timeout=240)


def test_payloads_do_not_wait_for_each_other(found):
    assert found[1]["order"] == [1.0, 0.0, 11.0, 10.0]


def test_an_error_in_one_rank_ends_its_neighbour_at_once(found):
    assert found[1]["raise"][:2] == ("ZeroDivisionError", "planted")
    name, text, seconds = found[0]["raise"]
    assert name == CommError.__name__ and seconds < 10.0
    assert "on pipeline rank 0 failed with pipeline rank 1; look at the output of rank 1" in text


def test_a_stalled_rank_is_named_after_the_timeout(found):
    name, text, seconds = found[0]["stall"]
    assert name == CommTimeoutError.__name__ and 0.9 <= seconds < 3.9
    assert "RECV_F" in text and "pipeline rank 0: no answer from pipeline rank 1 within 1 s" in text
    assert found[1]["stall"][0] in (CommError.__name__, CommTimeoutError.__name__)


def test_new_pipelines_work_after_failures(found):
    assert [answer["after"][0] for answer in found] == ["fine", "fine"]


def test_one_process_needs_no_group():
    p2p = PeerToPeer(None, timeout=timedelta(seconds=1))
    assert (p2p.rank, p2p.num_ranks) == (0, 1)
    p2p.finish()
    p2p.close()
