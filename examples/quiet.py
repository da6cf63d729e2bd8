"""Keeps the screen for what the reader can act on: Megatron's notes about absent optional packages are not that."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Hides warnings and log lines that Megatron and torch print for every run on a CPU; errors stay."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine|GPTModel).*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)
