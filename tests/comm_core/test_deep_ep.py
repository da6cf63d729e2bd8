"""comm_core.deep_ep: `import deep_ep` means this package after install(), in children too; Megatron trains by it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core import deep_ep, fp8
from comm_core.deep_ep.utils import find_pkgs, gate, math, refs, semantic, testing
from comm_core.runtime.errors import MissingPackageError, UsageError
from tests import rules
from tests.dist import run_ranks

SCRIPT = """
import sys
import torch
import torch.multiprocessing as mp
import deep_ep
from deep_ep.utils.math import align, calc_diff, count_bytes, per_token_cast_back, per_token_cast_to_fp8, safe_div
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.envs import dist_print, get_global_seed, init_dist, init_seed
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate
from deep_ep.utils.testing import bench, bench_kineto
from deep_ep.utils import EventHandle, EventOverlap

TOKENS, HIDDEN, TOPK, EXPERTS = 24, 256, 4, 16


def worker(local_rank, num_ranks, port):
    rank, size, group = init_dist(local_rank, num_ranks, seed=3)
    assert (size, get_global_seed(), group.size()) == (num_ranks, 3, num_ranks)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK)
    tokens = TOKENS - rank
    scores = get_unbalanced_scores(tokens, EXPERTS, num_ranks, TOPK, 1.0, False)
    weights, ids = scores.float().topk(TOPK, dim=-1)
    ids[:, 0] = torch.where(torch.rand(tokens) < 0.2, -1, ids[:, 0])
    x = torch.randn(tokens, HIDDEN)
    want = dispatch(x, ids, weights, TOKENS, EXPERTS)
    recv, recv_idx, recv_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS)
    assert torch.equal(recv, want[0]) and torch.equal(recv_idx, want[1]) and torch.equal(recv_weights, want[2])
    index = handle.recv_src_metadata[:, 0]
    assert torch.equal(index, want[3]) and handle.psum_num_recv_tokens_per_scaleup_rank[-1] == sum(want[4])
    mine = rank * TOKENS + torch.arange(tokens)
    y = generate_pre_combine_data(mine, TOKENS, TOPK, HIDDEN)
    y[ids == -1] = 0
    bias = (torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN))
    local = generate_pre_combine_data(index, TOKENS, TOPK, HIDDEN)
    local[recv_idx == -1] = 0
    got = buffer.combine(ordered_accumulate(local), handle, bias=bias)[0]
    assert torch.equal(got, combine(y, ids, 1, num_ranks, EXPERTS, bias, True, False)), "combine"
    assert not torch.equal(got, combine(y, ids, 1, num_ranks, EXPERTS, bias, False, False)), "rounding a rank"
    buffer.destroy()
    legacy = deep_ep.Buffer(group)
    assert isinstance(deep_ep.Buffer.capture(), EventOverlap)
    legacy.destroy()
    dist_print(f"rank {rank} done")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--flag", "2"], sys.argv
    mp.spawn(worker, args=(int(sys.argv[2]), 0), nprocs=int(sys.argv[2]))
    print(deep_ep.__name__, deep_ep.__version__)
"""


def _python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # -c leaves the repository's root out of sys.path, so it is put there by hand.
    start = f"import sys; sys.path.insert(0, {str(rules.ROOT)!r})\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=240, cwd=cwd)


def test_install_gives_the_same_objects_under_both_names(tmp_path: Path) -> None:
    code = """
import comm_core.deep_ep
try:
    import deep_ep
    raise SystemExit("deep_ep without install()")
except ImportError:
    pass
comm_core.deep_ep.install()
comm_core.deep_ep.install()
import deep_ep, deep_ep.utils.math, deep_ep.utils.find_pkgs, deep_ep.buffers.legacy, deep_ep.buffers.elastic
import deep_ep._C, deep_ep.utils.event, deep_ep.utils.comm, deep_ep.utils.semantic, deep_ep.utils.testing
import comm_core.deep_ep.utils.math
from comm_core.legacy import Buffer
from deep_ep.utils import EventOverlap
assert deep_ep is comm_core.deep_ep and deep_ep.utils.math is comm_core.deep_ep.utils.math
assert deep_ep.Buffer is deep_ep.buffers.legacy.Buffer is Buffer
assert deep_ep.EventOverlap is EventOverlap is comm_core.EventOverlap
assert comm_core.deep_ep.__spec__.name == "comm_core.deep_ep", comm_core.deep_ep.__spec__
for name in ("ElasticBuffer", "EPHandle", "EventHandle", "Config", "topk_idx_t"):
    assert getattr(deep_ep, name) is not None
assert deep_ep._C.Config is deep_ep.Config
for wrong in ("from deep_ep import HybridEPBuffer", "import deep_ep.no_such_module"):
    try:
        exec(wrong)
        raise SystemExit(wrong)
    except ImportError:
        pass
comm_core.deep_ep.uninstall()
try:
    import deep_ep.utils.gate
    raise SystemExit("deep_ep after uninstall()")
except ImportError:
    pass
"""
    done = _python(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_install_refuses_what_is_bound_already(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("Buffer = object\n")
    foreign = "sys.path.insert(0, '.')\nimport deep_ep, comm_core.deep_ep\ncomm_core.deep_ep.install()\n"
    done = _python(foreign, tmp_path)
    assert done.returncode == 1 and "deep_ep is imported already, from" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.megatron
def test_install_after_megatron_says_why(tmp_path: Path) -> None:
    start = "import megatron_patch\nmegatron_patch.apply('cpu')\n"  # 0.19 asks for triton without it
    load = f"{start}import megatron.core.transformer.moe.fused_a2a as f\n"
    late = _python(load + "import comm_core.deep_ep\ncomm_core.deep_ep.install()\n", tmp_path)
    assert late.returncode == 1 and "UsageError" in late.stderr, late.stderr
    assert "fused_a2a was imported before install()" in late.stderr and "no deep_ep" in late.stderr
    check = "assert f.HAVE_DEEP_EP and not f.HAVE_HYBRIDEP and f.Buffer is comm_core.deep_ep.Buffer\n"
    early = _python(
        f"import comm_core.deep_ep\ncomm_core.deep_ep.install()\n{load}{check}comm_core.deep_ep.install()\n", tmp_path
    )
    assert early.returncode == 0, early.stderr


def test_a_script_and_its_children(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("init_dist(local_rank", f"meet({str(tmp_path)!r}, local_rank"))
    # The processes meet by a file: ports may be taken.
    meet = """
def meet(folder, local_rank, num_ranks, seed):
    import torch.distributed as dist
    started = dist.init_process_group
    dist.init_process_group = lambda backend, init_method, **kw: started(backend, f"file://{folder}/store", **kw)
    return init_dist(local_rank, num_ranks, seed)


def worker("""
    script.write_text(script.read_text().replace("\ndef worker(", meet))
    command = [sys.executable, "-m", "comm_core.deep_ep", str(script), "--flag", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=rules.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comm_core.deep_ep 2.1.0" in done.stdout and "rank 1 done" in done.stdout
    bare = subprocess.run([sys.executable, "-m", "comm_core.deep_ep"], capture_output=True, text=True, cwd=rules.ROOT)
    assert bare.returncode == 2 and "usage" in bare.stderr


def test_utils() -> None:
    assert [math.align(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16] and math.ceil_div(9, 4) == 3
    assert math.safe_div(0, 0) == 0 and math.safe_div(3, 2) == 1.5
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)
    x = torch.randn(7, 300)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12) and math.calc_diff(x, -x) > 0.1
    assert math.calc_diff(torch.empty(0), torch.empty(0)) == 0
    back = math.per_token_cast_back(*math.per_token_cast_to_fp8(x))
    assert back.dtype == torch.bfloat16 and math.calc_diff(back, x) < 1e-3
    ids = torch.tensor([[3, 3, -1, 0], [-1, -1, -1, -1], [2, 1, 0, 3]])
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 0, -1, -1], [-1, -1, -1, -1], [3, 2, 1, 0]]
    scores = math.create_grouped_scores(torch.ones(1, 6), torch.tensor([[0, 2]]), 3)
    assert scores.tolist() == [[1, 1, 0, 0, 1, 1]]
    changed = x.clone()
    changed[3, 5] += 1
    assert math.hash_tensor(x) == math.hash_tensor(x.t().contiguous().t()) != math.hash_tensor(changed)
    assert math.hash_tensor(torch.ones(3, dtype=torch.bool)) == 3
    assert math.hash_tensors(x, (changed, None)) == math.hash_tensor(x) ^ math.hash_tensor(changed)
    assert math.count_bytes(x, None, (ids, x)) == 2 * x.nbytes + ids.nbytes
    assert semantic.value_or(None, 3) == 3 and semantic.value_or(0, 3) == 0


def test_weak_lru_keeps_no_object_alive() -> None:
    calls = []

    class Owner:
        @semantic.weak_lru(maxsize=None)
        def double(self, value: int) -> int:
            calls.append(value)
            return 2 * value

    owner = Owner()
    assert [owner.double(2), owner.double(2), owner.double(3)] == [4, 4, 6] and calls == [2, 3]
    import weakref

    reference = weakref.ref(owner)
    del owner
    assert reference() is None


def test_cast_back_takes_scales_of_any_shape() -> None:
    """Programs flatten the scales of blocks, packed ones too, to a number of columns that is not theirs."""
    x = torch.randn(8, 1024).bfloat16()
    for packed in (False, True):
        data, scales = fp8.per_token_cast(x, packed=packed)
        want = fp8.per_token_cast_back(data, scales)
        assert torch.equal(math.per_token_cast_back(data, scales.view(-1, 4)), want)
    assert math.per_token_cast_back(data[:0], scales[:0]).shape == (0, 1024)


def _reached(scores: torch.Tensor, num_ranks: int, num_topk: int) -> list[int]:
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    return [int((ranks == rank).any(1).sum()) for rank in range(num_ranks)]


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0])
def test_unbalanced_scores(ratio: float) -> None:
    reached = _reached(gate.get_unbalanced_scores(4000, 64, 8, 4, ratio), 8, 4)
    assert reached[0] / (sum(reached[1:]) / 7) == pytest.approx(ratio, rel=0.15)


@pytest.mark.parametrize("num_topk", [1, 2, 6, 8])
@pytest.mark.parametrize("num_local", [1, 4, 16])
def test_precise_scores_have_the_ratio_and_no_other_difference(num_topk: int, num_local: int) -> None:
    for num_ranks in (2, 4, 8, 64):
        for ratio in (1.0, 2.0, 4.0):
            sizes = (num_ranks * num_local, num_ranks, num_topk, ratio)
            if num_topk > num_ranks * num_local:
                continue
            least, most = -(-num_topk // num_local), min(num_topk, num_ranks, int((num_ranks - 1) / ratio) + 1)
            if least > most:
                with pytest.raises(UsageError, match="lower ratio"):
                    gate.get_unbalanced_scores(9, *sizes, True)
                continue
            scores = gate.get_unbalanced_scores(2000, *sizes, True)
            reached = _reached(scores, num_ranks, num_topk)
            assert scores.shape == (2000, sizes[0]) and float(scores.min()) > 0
            assert max(reached[1:]) - min(reached[1:]) <= 1, (sizes, reached)
            assert reached[0] / min(reached[1:]) == pytest.approx(ratio, rel=0.1), (sizes, reached)
    assert gate.get_unbalanced_scores(0, 8, 4, 2, 2.0, True).shape == (0, 8)


def test_ordered_sums_by_loops() -> None:
    """refs.combine and ordered_accumulate, lane by lane in Python, rounded where the definition rounds."""
    topk, experts, domains, ranks = 5, 24, 2, 3
    ids = torch.rand(9, experts).topk(topk, dim=1).indices.masked_fill(torch.rand(9, topk) < 0.3, -1)
    y = torch.randn(9, topk, 8).mul(torch.tensor([1e3, 1.0, 1e-3, 1e2, 1e-2])[:, None]).bfloat16()
    y[ids < 0] = 0
    biases = (torch.randn(9, 8).bfloat16(), torch.randn(9, 8).bfloat16())

    def added(rows: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(8)
        for row in rows:
            total = total + row.float()
        return total.bfloat16()

    def grouped(lanes: list[tuple[int, torch.Tensor]], size: int) -> list[tuple[int, torch.Tensor]]:
        """One (lane of the last, rounded sum) for the experts of each `size` neighbours."""
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for lane, row in lanes:
            groups.setdefault(owner[lane] // size, []).append((lane, row))
        return sorted(((max(at for at, _ in g), added([row for _, row in sorted(g, key=by)])) for g in groups.values()),
                      key=by)  # fmt: skip

    def by(item: tuple[int, torch.Tensor]) -> int:
        return item[0]

    for in_rank, in_domain, bias in itertools.product((False, True), (False, True), (None, biases[0], biases)):
        want = []
        for token, line in enumerate(ids.tolist()):
            owner = dict(enumerate(line))
            lanes = [(lane, y[token, lane]) for lane, expert in enumerate(line) if expert >= 0]
            lanes = grouped(lanes, experts // domains // ranks) if in_rank else lanes
            lanes = grouped(lanes, experts // domains) if in_domain else lanes
            first = (
                [] if bias is None else [bias[token]] if isinstance(bias, torch.Tensor) else [b[token] for b in bias]
            )
            want.append(added([*first, *(row for _, row in lanes)]))
        got = refs.combine(y, ids, domains, ranks, experts, bias, in_rank, in_domain)
        assert torch.equal(got, torch.stack(want)), (in_rank, in_domain)
    assert torch.equal(refs.ordered_accumulate(y), torch.stack([added(list(rows)) for rows in y]))


def test_packages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [Path("nvidia/nccl/__init__.py"), Path("nvidia/nccl/lib/libnccl.so.2")]
    found = SimpleNamespace(
        metadata={"Name": "nvidia-nccl-cu13"}, files=files, locate_file=lambda file: tmp_path / file
    )
    monkeypatch.setattr(find_pkgs.importlib.metadata, "distributions", lambda: [found])
    assert find_pkgs.find_nccl_root() == str(tmp_path / "nvidia/nccl") == find_pkgs.find_pkg_root("nccl")
    assert find_pkgs.find_nvshmem_root(optional=True) is None
    with pytest.raises(MissingPackageError, match="nvidia-nvshmem"):
        find_pkgs.find_nvshmem_root()


def test_timing() -> None:
    import time

    mean, least, most = testing.bench(lambda: time.sleep(0.002), num_warmups=0, num_tests=3)
    assert 0.002 <= least <= mean <= most < 1
    one, two = testing.bench_kineto(lambda: time.sleep(0.002), ("dispatch_impl", "combine_impl"), num_tests=2)
    assert one == two >= 0.002
    assert len(testing.bench_kineto(lambda: None, "dispatch", num_tests=1, num_kernels_per_period=2)) == 2


def test_domains() -> None:
    with pytest.raises(UsageError, match="pass the group to a buffer"):
        deep_ep.utils.comm.get_nccl_comm_handle(None)  # type: ignore[arg-type]


def _train(rank: int, dispatcher: str) -> list[float]:
    """Losses of a few steps of the tiny model on two ranks, bf16."""
    import comm_core.deep_ep

    comm_core.deep_ep.install()
    from tests.megatron_patch import megatron_case as case

    config = case.configure(
        parallel__pp_size=1, parallel__schedule="1f1b", parallel__moe_layer="megatron",
        parallel__split_weight_grad=False, train__dtype="bf16",
        train__num_microbatches=2, train__seq_length=32, train__lr=2e-3,
    )  # fmt: skip
    case.start(config, split=False)
    from examples import model, training

    original = model.transformer_config

    def with_dispatcher(given: Any) -> Any:
        found = original(given)
        found.moe_token_dispatcher_type = dispatcher
        if dispatcher == "flex":
            found.moe_flex_dispatcher_backend = "deepep"
        return found

    model.transformer_config = with_dispatcher
    length, rows, vocabulary = config.train.seq_length, config.train.micro_batch_size, config.model.vocab_size

    def batches(step: int, microbatch: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
        tokens = torch.randint(0, vocabulary // 8, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, -1)
        return tokens[:, :-1], tokens[:, 1:], torch.ones(rows, length), positions

    trainer = training.Trainer.build(config, torch.device("cpu"), batches)
    names = {type(layer.mlp.token_dispatcher).__name__ for chunk in trainer.model.chunks
             for layer in chunk.module.decoder.layers if hasattr(layer.mlp, "token_dispatcher")}  # fmt: skip
    assert names == {"MoEFlexTokenDispatcher" if dispatcher == "flex" else "MoEAlltoAllTokenDispatcher"}, names
    losses = []
    for step in range(1, 5):
        losses.append(trainer.forward_backward(step))
        trainer.update(step)
    trainer.close()
    return losses


@pytest.mark.slow
@pytest.mark.megatron
def test_megatron_trains_as_with_alltoall() -> None:
    """moe_token_dispatcher_type=flex, backend deepep: losses of alltoall to five digits over four steps of bf16."""
    flex = run_ranks(2, _train, "flex", timeout=150.0)
    plain = run_ranks(2, _train, "alltoall", timeout=150.0)
    assert flex[0] == flex[1] and plain[0] == plain[1]
    assert flex[0] == pytest.approx(plain[0], rel=1e-5)
    assert abs(flex[0][0] - flex[0][-1]) > 0.02, "nothing was learnt"
