"""More of the gpu backend over the double of torch_musa: what is beside plain calls, and a process full of patches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends.gpu_channel import GpuChannel
from comm_core.legacy import Buffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, UsageError
from tests.comm_core import cases, legacy_cases, random_calls, test_kernels_gpu
from tests.comm_core.cases import Case
from tests.comm_core.legacy_cases import World
from tests.pool import Pool, RankFailure
from tests.twin.tensors import PlayedTensor
from tests.twin.torch_musa import played, why_not

FORMATS: dict[str, dict[str, bool]] = {
    "plain": {"use_fp8": False},
    "scales": {},
    "powers": {"round_scale": True},
    "exponents": {"round_scale": True, "use_ue8m0": True},
}
BASE = Case(2, (5, 6), 16, 3, 2, torch.bfloat16)
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def _buffer(rank: int, **options: Any) -> ElasticBuffer:
    settings: dict[str, Any] = {"backend": "gpu", "device": devices.of("musa", rank), "num_cpu_timeout_secs": 20}
    return ElasticBuffer(dist.group.WORLD, **settings | options)


def _low_latency(rank: int, seed: int) -> list[str]:
    with played(), mock.patch.object(test_kernels_gpu, "KIND", "musa"):
        return test_kernels_gpu._low_latency(rank, seed, turns=4)


def test_low_latency_calls(ranks: Pool, fresh_random_data: int) -> None:
    """The calls that a device makes in test_kernels_gpu."""
    assert ranks.run(2, _low_latency, fresh_random_data, timeout=200.0) == [[], []]


def _hooks(rank: int) -> list[Any]:
    """Hooks called twice, a third result, and another shape while one is outstanding; then all goes on."""
    with played():
        here = devices.of("musa", rank)
        torch.manual_seed(rank)
        x, ids = torch.randn(6, 128).bfloat16().to(here), torch.rand(6, 4).topk(2).indices.to(here)
        stats = torch.zeros(2, dtype=torch.int32).to(here)
        buffer = Buffer(dist.group.WORLD, backend="gpu", device=here, num_cpu_timeout_secs=20)

        def send(bound: int = 8, *counted: torch.Tensor) -> Any:
            return buffer.low_latency_dispatch(x, ids, bound, 4, *counted, use_fp8=False, return_recv_hook=True)

        _, counts, _, _, hook = send(8, stats)
        hook()
        hook()
        said: list[Any] = [torch.equal(stats.cpu(), counts.cpu())]
        hooks = [send()[4], send()[4]]
        for bound in (8, 16):
            try:
                send(bound)
                said.append("no error")
            except (UsageError, CommError) as error:
                said.append(str(error))
        for hook in hooks:
            hook()
        send(16)[4]()
        buffer.destroy()
    return said


def test_hooks_may_be_called_again_and_results_outstanding_are_bounded(ranks: Pool) -> None:
    for counted, third, shape in ranks.run(2, _hooks, timeout=60.0):
        assert counted is True
        assert "2 results outstanding" in third and "call the hook of the oldest first" in third
        assert "another shape with 2 results outstanding" in shape


def _counted(rank: int) -> list[bool]:
    """Counts are added to a caller's sums without the host: it learns of none until it asks."""
    with played():
        here, found = devices.of("musa", rank), []
        stats = torch.full((3,), 5, dtype=torch.int32).to(here)
        with _buffer(rank, num_max_tokens_per_rank=8) as buffer:
            for turn in range(2):
                torch.manual_seed(2 * turn + rank)
                x, ids = torch.randn(6 + rank, 16).to(here), torch.rand(6 + rank, 6).topk(2).indices.to(here)
                before, options = stats.cpu(), {"num_experts": 6, "do_cpu_sync": False}
                with mock.patch.object(GpuChannel, "wait", side_effect=AssertionError("the host waits for counts")):
                    handle = buffer.dispatch(x, ids, cumulative_local_expert_recv_stats=stats, **options)[3]
                    added = stats.cpu() - before
                found += [added.tolist() == handle.num_unaligned_recv_tokens_per_expert_list, int(added.sum()) > 0]
    return found


def test_received_rows_are_counted_without_the_host(ranks: Pool) -> None:
    assert ranks.run(2, _counted) == [[True] * 4] * 2


def _v1(buffer: Buffer, world: World) -> dict[str, torch.Tensor]:
    """Calls of the V1 interface on the buffer's device; every tensor that comes back and is defined."""
    here, rank, got = buffer.device, buffer.rank, dict[str, torch.Tensor]()
    x, ids, weights = (item[rank].to(here) for item in (world.x, world.ids, world.weights))
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(ids, world.num_experts)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": inside, "num_tokens_per_expert": per_expert}
    for on_comm in (False, True):
        early: dict[str, Any] = {"previous_event": Buffer.capture(), "allocate_on_comm_stream": on_comm}
        early["async_finish"] = True
        recv, idx, recv_weights, _, handle, event = buffer.dispatch(
            x, **counts, topk_idx=ids, topk_weights=weights, **early
        )
        event.current_stream_wait()
        answer = recv * 2
        early["previous_event"] = Buffer.capture()
        back, back_weights, event = buffer.combine(answer, handle, topk_weights=recv_weights, **early)
        event.current_stream_wait()
        now = {"recv": recv, "idx": idx, "weights": recv_weights, "back": back, "back_weights": back_weights}
        got |= {f"{name} {on_comm}": item for name, item in now.items()} | counts
    stats = torch.zeros(world.num_local, dtype=torch.int32, device=here)
    for name, form in FORMATS.items():
        hooked = name != "exponents"
        parts, rows, blocks, event, hook = buffer.low_latency_dispatch(
            x, ids, 8, world.num_experts, stats, return_recv_hook=hooked, async_finish=not hooked, **form
        )
        hook() if hooked else event.current_stream_wait()
        real = torch.arange(8 * len(world.x)) < rows.cpu()[:, None]
        received = parts if isinstance(parts, tuple) else (parts,)
        for part, item in enumerate(received):
            got[f"{name} {part}"] = legacy_cases.raw(item.cpu())[real]
        answers = torch.arange(real.numel() * 128).view(*real.shape, 128).remainder(17).to(x.dtype).to(here)
        home, event, _ = buffer.low_latency_combine(answers, ids, weights, blocks, async_finish=True)
        event.current_stream_wait()
        got |= {f"{name} rows": rows, f"{name} home": home, f"{name} source": blocks[0], f"{name} ranges": blocks[1]}
    return {name: item.cpu() for name, item in (got | {"stats": stats}).items()}


def _v1_on_both(rank: int, seed: int) -> list[str]:
    """What differs between the CPU's backend and this one."""
    world = legacy_cases.draw(seed, (6, 7), 128, 3, 2, torch.bfloat16, 0.2)
    answers = []
    with played() as musa:
        for backend, device in (("collective", torch.device("cpu")), ("gpu", devices.of("musa", rank))):
            buffer = Buffer(dist.group.WORLD, backend=backend, device=device, num_cpu_timeout_secs=20)
            answers.append(_v1(buffer, world))
            buffer.destroy()
        halves = {"dispatch send", "dispatch recv", "combine whole"}
        assert {"layout", "dispatch", "combine"} | halves <= set(musa.library.launched)
    cpu, gpu = answers
    assert cpu.keys() == gpu.keys()
    return [name for name in cpu if not legacy_cases.same(gpu[name], cpu[name])]


def _handed_over(rank: int, recorded: bool) -> list[int]:
    """Outputs on the comm stream are read and dropped by the caller's, with nothing to keep them but their streams."""
    early: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
    keep = devices.keep_for_current_stream if recorded else lambda *tensors: None
    with mock.patch.object(devices, "keep_for_current_stream", keep), played() as musa, _buffer(rank) as buffer:
        here = buffer.device
        x, ids = torch.randn(4, 16).bfloat16().to(here), torch.tensor([[0, 1], [2, 3]] * 2).to(here)
        parts = (x.view(torch.uint8).view(torch.float8_e4m3fn), torch.ones(4, 1).to(here))
        given: dict[str, Any] = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
        got = buffer.dispatch(parts, ids, num_experts=4, previous_event=buffer.capture(), **given)
        got[4].current_stream_wait()
        seen = [got[0][0].view(torch.uint8) + 1, got[0][1] + 1, got[1] + 1]
        rows = torch.zeros(got[3].num_recv_tokens, 16).bfloat16().to(here)
        back, _, event = buffer.combine(rows, got[3], previous_event=buffer.capture(), **given)
        event.current_stream_wait()
        seen.append(back + 1)
        del got, back
        one = Buffer(dist.group.WORLD, backend="gpu", device=here, num_cpu_timeout_secs=20)
        counts = one.get_dispatch_layout(ids, 4)
        layout = {"num_tokens_per_rank": counts[0], "num_tokens_per_expert": counts[2], "is_token_in_rank": counts[3]}
        old = one.dispatch(x, **layout, previous_event=Buffer.capture(), **early)
        old[5].current_stream_wait()
        seen += [old[0] + 1, *(item.int() + 1 for item in old[4][:3])]
        answer = old[0] * 2
        home, _, event = one.combine(answer, old[4], previous_event=Buffer.capture(), **early)
        event.current_stream_wait()
        seen.append(home + 1)
        del old, home, event
        gc.collect()
        assert not musa.failures, musa.failures
        one.destroy()
    return [item.shape[0] for item in seen]


def test_outputs_on_the_comm_stream_are_handed_over(ranks: Pool) -> None:
    assert ranks.run(2, _handed_over, True)[0][:4] == [4, 4, 4, 4]
    with pytest.raises(RankFailure, match="is freed, not recorded on another"):
        ranks.run(2, _handed_over, False)


def test_v1_calls_are_those_of_the_cpu(ranks: Pool, fresh_random_data: int) -> None:
    assert ranks.run(2, _v1_on_both, fresh_random_data) == [[], []]


def _lent(rank: int, seed: int) -> list[str]:
    """Rows made in symmetric memory give what rows of ordinary memory give; where there is no room, they are copied."""
    bad: list[str] = []
    torch.manual_seed(seed + rank)
    with played(), _buffer(rank) as buffer:
        assert buffer.reserve_symmetric(2 << 20)
        pool: Any = buffer._backend._channel.pool  # type: ignore[attr-defined]
        for num_tokens, fits in ((9, True), (0, False), (7, True), (70_000, False)):
            ids = torch.rand(min(num_tokens, 20), 6).topk(3, -1)[1].to(buffer.device)
            ordinary = torch.randn(num_tokens, 24).bfloat16().to(buffer.device)
            with buffer.symmetric_memory():
                lent = ordinary.clone()
            bad += [] if (pool.place_of(lent) is not None) == fits else [f"{num_tokens} tokens: place {fits}"]
            wanted, _, _, handle, _ = buffer.dispatch(ordinary[: len(ids)], ids, num_experts=6)
            got = buffer.dispatch(lent[: len(ids)], handle=handle)[0]
            lent.fill_(float("nan"))  # the call is done: nobody reads the rows any more
            with buffer.symmetric_memory():
                rows = wanted * 2
            one, other = (buffer.combine(item, handle)[0] for item in (wanted * 2, rows))
            rows.fill_(float("nan"))
            bad += [] if torch.equal(got, wanted) and torch.equal(one, other) else [f"{num_tokens} tokens: differs"]
            del lent, rows
    return bad


def test_symmetric_tensors(ranks: Pool, fresh_random_data: int) -> None:
    assert ranks.run(2, _lent, fresh_random_data) == [[], []]


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """What ports for MUSA do to a process: torch.cuda answers for torch.musa, tensors say that they are there."""
    musa: Any = torch.musa  # type: ignore[attr-defined]
    cuda = {name: getattr(musa, name) for name in ("is_available", "device_count", "is_initialized", "synchronize")}
    cuda |= {"current_device": lambda: f"musa:{musa.current_device()}", "current_stream": musa.current_stream}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(PlayedTensor, "is_cuda", True, create=True):
        yield


def _settings(rank: int, seed: int) -> dict[str, list[str]]:
    case, found = replace(BASE, seed=seed, asynchronous=True, num_bias=1, do_expand=True, alignment=2), {}
    with played(), _buffer(rank) as buffer:
        with torch.inference_mode():
            found["inference"] = cases.run(buffer, case)
        with mock.patch.dict("os.environ", {"EP_AVOID_RECORD_STREAM": "1"}):
            found["by reference"] = cases.run(buffer, replace(case, previous=True))
        side = devices.new_stream(buffer.device)
        with devices.use_stream(buffer.device, side):
            found["on another stream"] = cases.run(buffer, replace(case, do_expand=False))
    with played(), _patched(), _buffer(rank) as buffer:
        assert torch.zeros(1, device=buffer.device).is_cuda and str(devices.current()) == str(buffer.device)
        found["patched"] = cases.run(buffer, case)
    return found


def test_modes_streams_and_patches(ranks: Pool, fresh_random_data: int) -> None:
    for found in ranks.run(2, _settings, fresh_random_data):
        assert {name: bad for name, bad in found.items() if bad} == {} and len(found) == 4


def _talk(rank: int, seed: int) -> tuple[list[str], dict[str, int]]:
    with played():
        return random_calls.talk(rank, "gpu", seed, 50, "musa")


def test_a_conversation_on_two_buffers(ranks: Pool, fresh_random_data: int) -> None:
    answers = ranks.run(2, _talk, fresh_random_data)
    assert [bad for bad, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1] and sum(answers[0][1].values()) == 50
