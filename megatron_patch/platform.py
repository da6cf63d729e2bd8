"""Megatron on devices that are not CUDA: the CPU (gloo) and MUSA.

Megatron-core asks `torch.cuda` for its device, streams, events and random state, and writes device="cuda" in some
places. On the CPU those calls get stand-ins with the same contract (a CPU has one in-order queue, so a stream or an
event has nothing to wait for). On MUSA, torch_musa has functions of the same names. Nothing here is in force where
the device is CUDA. Verified: CPU, megatron-core 0.16.1 and 0.19.2. Prepared, not run: MUSA.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import sys
import types
from typing import Any

import torch

from comm_core.runtime import device as devices
from comm_core.runtime import env
from megatron_patch.patches import ANY, MISSING, Patch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)
_MUSA_NAMES = (
    *("current_device", "set_device", "device_count", "synchronize", "empty_cache"),
    *("current_stream", "default_stream", "stream", "Stream", "Event"),
    *("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats"),
)


class _Stream:
    """The one in-order queue of a CPU."""

    device = _CPU
    stream_id = device_index = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: work is done when the call that issued it returns."""

    def wait_event(self, event: Any) -> None:
        """As wait_stream."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """As wait_stream."""

    def query(self) -> bool:
        """Always done."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *unused: object) -> None:
        return None

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as CUDA gives them."""
        return (0, -1)


class _Event:
    """An event of a CPU: recorded work has already run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


def _constant(value: Any) -> Any:
    return lambda original: lambda *args, **kwargs: value


def _value(value: Any) -> Any:
    return lambda original: value


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _factory_on_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return factory


def _to_on_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_CPU if isinstance(a, str | torch.device) and _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _type_as_cuda_for_optimizer(original: Any) -> Any:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not args and not kwargs and "cuda" not in result:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core.optimizer"):
                return result.replace("torch.", "torch.cuda.")
        return result

    return type_


def _same_tensor(original: Any) -> Any:
    return lambda self, *args, **kwargs: self


def _torch_patches() -> list[Patch]:
    stream = _Stream()
    reason_stream = "streams and events: a CPU has one in-order queue"
    reason_state = "random state lives in torch's CPU generator"
    reason_memory = "memory statistics: the CPU allocator keeps none"
    table: list[tuple[str, Any, str]] = [
        ("current_device", _constant(_CPU), "the device of new tensors"),
        ("set_device", _constant(None), "there is one CPU device"),
        ("device_count", lambda _: env.local_world_size, "one CPU device a process"),
        ("synchronize", _constant(None), reason_stream),
        ("empty_cache", _constant(None), reason_memory),
        ("current_stream", _constant(stream), reason_stream),
        ("default_stream", _constant(stream), reason_stream),
        ("stream", lambda _: lambda stream=None: contextlib.nullcontext(), reason_stream),
        ("is_current_stream_capturing", _constant(False), "no graphs are captured on a CPU"),
        ("Stream", _value(_Stream), reason_stream),
        ("Event", _value(_Event), reason_stream),
        ("get_rng_state", lambda _: lambda *a, **k: torch.get_rng_state(), reason_state),
        ("set_rng_state", lambda _: lambda state, *a, **k: torch.set_rng_state(state), reason_state),
        # torch.manual_seed would call torch.cuda.manual_seed again, hence the generator itself.
        ("manual_seed", lambda _: lambda seed: torch.default_generator.manual_seed(int(seed)), reason_state),
        ("manual_seed_all", _constant(None), reason_state),
        ("memory_allocated", _constant(0), reason_memory),
        ("max_memory_allocated", _constant(0), reason_memory),
        ("memory_reserved", _constant(0), reason_memory),
        ("max_memory_reserved", _constant(0), reason_memory),
        ("memory_stats", lambda _: lambda *a, **k: collections.defaultdict(int), reason_memory),
        ("reset_peak_memory_stats", _constant(None), reason_memory),
        ("nvtx.range_push", _constant(None), "profiler ranges need a CUDA profiler"),
        ("nvtx.range_pop", _constant(None), "profiler ranges need a CUDA profiler"),
        ("random.get_rng_state", lambda _: lambda *a, **k: torch.get_rng_state(), reason_state),
        ("random.set_rng_state", lambda _: lambda state, *a, **k: torch.set_rng_state(state), reason_state),
    ]
    patches = [Patch(f"torch.cuda:{name}", make, ANY, reason) for name, make, reason in table]
    literal = 'literal device="cuda" in pipeline schedules, gradient clipping and optimizers'
    patches += [Patch(f"torch:{name}", _factory_on_cpu, ANY, literal) for name in _FACTORIES]
    patches += [
        Patch("torch:Tensor.to", _to_on_cpu, ANY, literal),
        Patch("torch:Tensor.cuda", _same_tensor, ANY, literal),
        Patch("torch:nn.Module.cuda", _same_tensor, ANY, literal),
        Patch("torch:Tensor.record_stream", _constant(None), ANY, reason_stream),
        Patch(
            "torch:Tensor.type",
            _type_as_cuda_for_optimizer,
            ANY,
            "optimizers accept 'torch.cuda.*Tensor' alone; only calls from megatron.core.optimizer are answered so",
        ),
    ]
    return patches


def _paged_stash_stub(original: Any) -> Any:
    if original is not MISSING or importlib.util.find_spec("triton") is not None:
        return original
    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")

    def needs_triton(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Megatron's paged stash needs triton, which has no CPU build")

    stub.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    stub.paged_stash_copy_kernel = stub.paged_stash_pop_kernel = needs_triton  # type: ignore[attr-defined]
    return stub


def before_import(device: str) -> list[Patch]:
    """Patches for a kind of device that must be in force before `import megatron.core`."""
    if device != "cpu":
        return []
    return [
        Patch(
            "sys:modules[megatron.core.transformer.moe.ops.paged_stash]",
            _paged_stash_stub,
            ">=0.17",
            "megatron.core imports triton unconditionally through this module",
        )
    ]


def after_import(device: str) -> list[Patch]:
    """Patches for a kind of device that need Megatron imported; applying them imports it."""
    return {"cpu": _cpu, "musa": _musa}.get(device, list)() + _local_implementation()


def _attention_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def _attention_forward(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)

    return forward


def _empty_class(original: Any) -> Any:
    return original if isinstance(original, type) else type("TransformerEngineAbsent", (), {})


def _to_host(original: Any) -> Any:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        return tensor.cpu().numpy() if as_numpy else tensor.cpu()

    return maybe_move_tensor_to_cpu


def _if_missing(value: Any) -> Any:
    return lambda original: value if original is MISSING else original


def _local_implementation() -> list[Patch]:
    """What Megatron's own (not Transformer Engine) modules lack, on any device: MLA, and names of absent packages."""
    core = "megatron.core"
    attention = f"{core}.transformer.dot_product_attention:DotProductAttention"
    mla = f"{core}.transformer.multi_latent_attention"
    reason_mla = "the local attention rejects the head sizes of MLA (k_channels, v_channels)"
    reason_te = "a name that only exists where Transformer Engine is installed"
    fp8 = type("FP8GlobalStateManager", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    null = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731
    return [
        Patch(f"{attention}.__init__", _attention_init, ANY, reason_mla),
        Patch(f"{attention}.forward", _attention_forward, ANY, "views of MLA's projections are not contiguous"),
        Patch(f"{mla}:TELinear", _empty_class, ANY, reason_te),
        Patch(f"{mla}:TEColumnParallelLinear", _empty_class, ANY, reason_te),
        Patch(f"{core}.tensor_parallel.random:FP8GlobalStateManager", _if_missing(fp8), ANY, reason_te),
        Patch(f"{core}.tensor_parallel.random:activation_recompute_forward", _if_missing(null), ANY, reason_te),
        Patch(f"{core}.tensor_parallel.random:fp8_autocast", _if_missing(null), ANY, reason_te),
        Patch(f"{core}.transformer.moe.moe_utils:te_general_gemm", _if_missing(None), "<0.17", reason_te),
    ]


def _cpu() -> list[Patch]:
    """Everything Megatron needs to run on the CPU, after it was imported."""
    core = "megatron.core"
    host = "all-to-all split sizes are moved to the host only if they are on CUDA"
    random = "random state lives in torch's CPU generator"
    return [
        *_torch_patches(),
        Patch(
            "torch._dynamo.config:disable",
            _value(True),
            ANY,
            "compiling Megatron's small fusions takes longer than a run",
        ),
        Patch(
            f"{core}.tensor_parallel.random:_set_cuda_rng_state",
            lambda _: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
            ANY,
            random,
        ),
        Patch(
            f"{core}.tensor_parallel.random:_get_cuda_rng_state",
            lambda _: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
            ANY,
            random,
        ),
        Patch(f"{core}.transformer.moe.moe_utils:maybe_move_tensor_to_cpu", _to_host, ANY, host),
        Patch(f"{core}.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", _to_host, ANY, host),
    ]


def _musa() -> list[Patch]:
    """Redirects Megatron's `torch.cuda` calls to `torch.musa`. Prepared after torch_musa's documentation, not run."""
    module = devices.accelerator("musa")
    reason = "torch_musa has the same call under torch.musa"
    return [Patch(f"torch.cuda:{name}", _value(getattr(module, name)), ANY, reason) for name in _MUSA_NAMES]
