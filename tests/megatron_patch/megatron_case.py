"""What the multi-process tests of megatron_patch share: patches, groups and small configurations in a rank."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

import megatron_patch
from examples.config import Config, load

CONFIG = "examples/configs/tiny_cpu.yaml"


def start(config: Config, *, split: bool = True) -> None:
    """Patches and Megatron's groups in this rank; torch.distributed is initialised already."""
    from examples.quiet import quiet

    warnings.simplefilter("ignore")
    quiet()
    megatron_patch.apply("cpu", split_weight_grad=split)
    from examples import model

    model.setup_parallel(config)


def configure(**overrides: Any) -> Config:
    """The tiny configuration with dotted keys written with two underscores."""
    return load(CONFIG, {key.replace("__", "."): value for key, value in overrides.items()})


def moe_submodules(transformer_config: Any) -> Any:
    """The submodules of the last layer's MoE in the stock spec, for either Megatron version."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    mlp = get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=False).layer_specs[-1].submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def seed_weights(module: torch.nn.Module, offset: int) -> None:
    """Random weights; experts differ by rank, everything else is equal on all ranks."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            generator = torch.Generator().manual_seed(index + (1000 * (offset + 1) if ".experts" in f".{name}" else 0))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
