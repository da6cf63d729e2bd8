"""What every test shares: one thread a process, a seed that a failure prints, and Megatron's version in the header."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random

import pytest
import torch


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option: the seed of a run to repeat."""
    parser.addoption("--seed", type=int, default=None, help="seed of every test; a fresh one each by default")


def pytest_report_header() -> str:
    """Versions that decide what a run has shown."""
    return f"torch {torch.__version__}, megatron-core {_version('megatron-core')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of megatron_patch, and skips what this machine can not run, saying so."""
    for item in items:
        if "megatron_patch" in item.path.parts:
            item.add_marker("megatron")
        if item.get_closest_marker("megatron") and importlib.util.find_spec("megatron") is None:
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed: pip install 'mt-moe[megatron]'"))


@pytest.fixture(autouse=True)
def fresh_random_data(request: pytest.FixtureRequest) -> int:
    """Seeds torch and random anew for each test; a failure prints the seed, `--seed` repeats it."""
    torch.set_num_threads(1)
    given = request.config.getoption("seed")
    seed = random.SystemRandom().randrange(2**31) if given is None else int(given)
    random.seed(seed)
    torch.manual_seed(seed)
    print(f"repeat with --seed {seed}")
    return seed
