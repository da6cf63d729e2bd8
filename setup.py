"""What is installed: four packages with the kernels' sources, and nothing else. No compiler is needed.

Tools are configured in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

# Ranges, not pins: an existing torch (a CUDA or MUSA build) must satisfy them and stay. `make` pins by constraints.txt.
REQUIRES = ["torch>=2.11", "einops>=0.8", "numpy>=1.26", "packaging>=24"]
MEGATRON = [
    "megatron-core>=0.16.1,<0.20",
    "psutil>=5.9",  # Megatron's distributed checkpoints
    "pydantic>=2.7",  # the settings of the examples
    "pyyaml>=6.0",
    "tokenizers>=0.19",
    "tqdm>=4.66",
]
DEV = [
    "codespell>=2.4",
    "hypothesis>=6.100",
    "import-linter>=2.17",
    "mypy>=2.0",
    "pytest>=9.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.17",
    "setuptools>=77",  # the packaging test builds a wheel without an isolated environment
    "types-psutil",
    "types-PyYAML",
]

setup(
    name="mt-moe",
    version="0.1.0",
    description="Expert-parallel communication, an MoE layer and DualPipe schedules for Megatron-core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["comm_core", "comm_core.*", "mt_moe", "dualpipe", "megatron_patch"]),
    # Compiled at first use where there is a compiler: installing needs none.
    package_data={"comm_core.kernels": ["*.h", "*.cuh", "*.cu", "*.mu"]},
    install_requires=REQUIRES,
    extras_require={"megatron": MEGATRON, "te": ["transformer-engine[pytorch]>=2.9"], "dev": MEGATRON + DEV},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
