"""Timing of a function by the clock of the host, device work included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from comm_core.runtime import device as devices


def bench(  # noqa: D417 (described together)
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Mean, least and largest time of a call in seconds; the first of `num_tests` is left out.

    Args:
        fn: what to time.
        num_warmups, num_tests: calls before, calls timed.
        post_fn: called after each, outside the time.
        flush_l2: accepted; caches are left as they are.
    """
    device = devices.current()
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        times.append(_timed(fn, device))
        if post_fn is not None:
            post_fn()
    counted = times[1:] or times
    return sum(counted) / len(counted), min(counted), max(counted)


def bench_kineto(  # noqa: D417 (described together)
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Mean time of `fn` in seconds, under every name asked for: there are no kernels of those names to be told apart.

    Args:
        fn: what to time.
        kernel_names: one name, or several: then a tuple of as many times is returned.
        num_tests: calls timed.
        barrier_comm_profiling: wait for all ranks before each call, by `barrier` or the default group's.
        num_kernels_per_period: more than one: each time is a list of as many, the total shared out evenly.
        suppress_kineto_output, trace_path, flush_l2: accepted; nothing is profiled.
    """
    device, total = devices.current(), 0.0
    fn()
    for _ in range(num_tests):
        if barrier_comm_profiling:
            (barrier or dist.barrier)()
        total += _timed(fn, device)
    mean = total / num_tests
    one: Any = mean if num_kernels_per_period == 1 else [mean / num_kernels_per_period] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else (one,) * len(kernel_names)


def _timed(fn: Callable[[], Any], device: Any) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    fn()
    devices.synchronize(device)
    return time.perf_counter() - start
