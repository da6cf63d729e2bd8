"""Samples of a prepared text through Megatron's own GPTDataset, in an order that depends on nothing but the seed.

Megatron shuffles all epochs of a run together, so there the order of samples changes with the number of steps. A run
that is stopped, resumed and prolonged must see what an uninterrupted one sees, on any number of ranks. So one epoch
is taken from Megatron, `Samples` orders the later ones, and sample i is a function of (seed, i).
`microbatch_indices` deals the samples out such that N ranks with M microbatches see in one step exactly what one rank
sees with N * M.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import torch

from comm_core.runtime.errors import MissingPackageError, UsageError
from examples.prepare_data import TRAIN_PARTS, VALID_PARTS, Prepared

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Tokenizer:
    """The tokenizer of a prepared text, with the names that Megatron's datasets ask for.

    Attributes:
        vocab_size: number of ids.
        eod, eos: id that ends a document.
        pad: an id that no text contains, so that nothing is ever masked by mistake.
    """

    pad = -1

    def __init__(self, prepared: Prepared) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(prepared.tokenizer_file))
        self._backend.encode_special_tokens = True
        self.vocab_size = prepared.vocab_size
        self.eod = self.eos = prepared.eod
        self.unique_identifiers = {"class": "byte_level_bpe", "content": prepared.content_hash}

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end of document."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def detokenize(self, ids: list[int]) -> str:
        """The text of ids; ends of documents are spelt out."""
        return str(self._backend.decode(ids, skip_special_tokens=False))


class Samples:
    """An endless sequence of samples: `samples[i]` depends on the text, the sequence length, the seed and i alone.

    Each is what Megatron's GPTDataset gives: a dictionary with `tokens`, `labels` (the tokens one place on),
    `loss_mask` and `position_ids`, each [seq_length].
    """

    def __init__(self, epoch: Any, seed: int) -> None:
        self._epoch, self._seed = epoch, seed
        self.samples_per_epoch = len(epoch)
        self._order: tuple[int, Any] = (0, numpy.arange(self.samples_per_epoch))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`, counted from 0 through all epochs."""
        if index < 0:
            raise IndexError(f"sample {index} does not exist")
        epoch, place = divmod(index, self.samples_per_epoch)
        if self._order[0] != epoch:
            # Megatron has shuffled the first epoch itself; the others are permutations of it.
            order = numpy.arange(self.samples_per_epoch)
            if epoch:
                numpy.random.Generator(numpy.random.PCG64([self._seed, epoch])).shuffle(order)
            self._order = (epoch, order)
        sample: dict[str, torch.Tensor] = self._epoch[int(self._order[1][place])]
        return sample


def build_datasets(prepared: Prepared, *, seq_length: int, seed: int) -> tuple[Samples, Samples | None]:
    """Builds training and validation samples; validation is None where the text is too short to spare any.

    Works before and after `torch.distributed` is initialised. After, every rank of the default group must call it:
    rank 0 writes the index files, the others wait for a barrier and read them.

    Args:
        prepared: what `prepare` returned, the same on every rank.
        seq_length: tokens a sample.
        seed: of the order of documents and samples.

    Raises:
        UsageError: the text is shorter than one sample (on every rank alike).
        MissingPackageError: no Megatron-core, or one without its compiled dataset helpers (on every rank alike).
    """
    if prepared.num_train_tokens <= seq_length:
        raise UsageError(
            f"data {prepared.source}: {prepared.num_train_tokens} tokens for training with seq_length={seq_length}",
            allowed=f"at least seq_length + 1 = {seq_length + 1} tokens",
            fix="give a longer text with --data or lower train.seq_length",
        )
    _require_helpers()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    has_valid = prepared.num_valid_tokens > seq_length
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prepared.prefix], None),
        split=f"{TRAIN_PARTS},{VALID_PARTS},0" if has_valid else "1,0,0",
        path_to_cache=str(Path(prepared.folder) / "cache"),
        tokenizer=Tokenizer(prepared),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
    return Samples(train, seed), Samples(valid, seed) if has_valid else None


def _require_helpers() -> None:
    """Every rank must know of a missing helper: the one that fails inside the builder leaves the others waiting."""
    try:
        found = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    except ImportError:
        found = False
    if not found:
        raise MissingPackageError(
            "megatron-core with its compiled dataset helpers",
            needed_for="reading a dataset",
            install="pip install 'mt-moe[megatron]'",
        )


def microbatch_indices(
    *, step: int, microbatch: int, rank: int, num_ranks: int, num_microbatches: int, micro_batch_size: int
) -> range:
    """Samples of one microbatch. Microbatch m of N ranks' rank r is microbatch m * N + r of a single rank.

    Args:
        step: from 1.
        microbatch: from 0, below `num_microbatches`.
        rank: place among the ranks that see different data.
        num_ranks: number of those ranks.
        num_microbatches: a step, for each rank.
        micro_batch_size: samples a microbatch.
    """
    place = ((step - 1) * num_microbatches + microbatch) * num_ranks + rank
    return range(place * micro_batch_size, (place + 1) * micro_batch_size)


def batch(samples: Samples, indices: range | list[int]) -> Batch:
    """Stacks samples: tokens, labels, loss_mask, position_ids, each [len(indices), seq_length], on the CPU.

    Tokens, labels and positions are int64, the loss mask is float32 (1 counts).
    """
    rows = [samples[index] for index in indices]
    tokens, labels, loss_mask, position_ids = (
        torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask", "position_ids")
    )
    return tokens, labels, loss_mask, position_ids
