"""From text to samples: nothing lost, nothing made twice, every sample a function of seed and index."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import megatron_patch
from comm_core.runtime.errors import UsageError
from examples import data, prepare_data
from examples.prepare_data import Prepared, prepare
from tests.dist import run_ranks
from tests.examples.second_megatron import run_with_second_megatron

pytestmark = pytest.mark.megatron

SEQ_LENGTH = 32


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    megatron_patch.apply(device="cpu", split_weight_grad=False)
    yield
    megatron_patch.revert()


def write_text(path: Path, *, num_paragraphs: int = 200, seed: int = 0) -> list[str]:
    """A text of random words, with accents and an emoji, so that bytes and characters differ."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdeéßж🙂 '\t", k=rng.randint(2, 7))).strip() or "x" for _ in range(80)]
    paragraphs = ["\n".join(" ".join(rng.choices(words, k=8)) for _ in range(3)) for _ in range(num_paragraphs)]
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    return paragraphs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text.txt")
    return prepare(folder / "text.txt", folder / "prepared", 300)


def documents_of(prepared: Prepared) -> list[numpy.ndarray[Any, Any]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [numpy.array(document) for document in IndexedDataset(prepared.prefix)]


def digest(samples: data.Samples, indices: range) -> str:
    state = hashlib.sha256()
    for index in indices:
        state.update(samples[index]["tokens"].numpy().tobytes() + samples[index]["labels"].numpy().tobytes())
    return state.hexdigest()


# ---- text


def test_the_default_text_is_the_reference_of_this_python() -> None:
    documents, source = prepare_data.read_documents(None)
    assert len(documents) > 50 and sum(map(len, documents)) > 300_000
    assert any("lambda" in document for document in documents)
    assert source.startswith("reference texts of Python 3.")


def test_paragraphs_become_documents(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n   \r\n  three\r\n\r\nfour")
    assert prepare_data.read_documents(path)[0] == ["one\ntwo\n", "  three\n", "four\n"]


def test_a_text_without_blank_lines_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    lines = [f"line {number} " + "x" * (number % 300) for number in range(500)]
    path.write_text("\n".join(lines))
    documents, _ = prepare_data.read_documents(path)
    assert len(documents) > 5 and max(map(len, documents)) < 2 * prepare_data._LONGEST_DOCUMENT
    assert "".join(documents).split("\n") == [*lines, ""]
    path.write_text("y" * 100_000)
    documents, _ = prepare_data.read_documents(path)
    assert len(documents) > 5 and "".join(documents).replace("\n", "") == "y" * 100_000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"", "empty"),
        (b" \n\n\t\n", "empty"),
        (b"text\0text" * 1000, "binary, it holds zero bytes"),
        ("é".encode("latin-1") * 5000, "byte 0 is not UTF-8 text"),
        (b"too short\n", "tokens for training; allowed: at least 1024 tokens"),
    ],
)
def test_a_text_that_can_not_be_used(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        prepare(path, tmp_path / "prepared", 300)
    assert expected in str(caught.value) and "text.txt" in str(caught.value) and "\n" not in str(caught.value)


def test_folders_and_sizes_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        prepare(tmp_path, tmp_path / "prepared", 300)
    with pytest.raises(UsageError, match="data file ''"):
        prepare("", tmp_path / "prepared", 300)
    write_text(tmp_path / "text.txt")
    with pytest.raises(UsageError, match=r"File exists|Not a directory"):
        prepare(tmp_path / "text.txt", tmp_path / "text.txt", 300)
    with pytest.raises(UsageError, match="vocab_size=256"):
        prepare(tmp_path / "text.txt", tmp_path / "prepared", 256)
    assert not (tmp_path / "prepared").exists()


# ---- preparation


def test_what_is_written_decodes_to_the_text(tmp_path: Path) -> None:
    paragraphs = write_text(tmp_path / "text.txt")
    # A text that spells the special token must not end its document there.
    tricky = f"before {prepare_data.END_OF_DOCUMENT} after"
    (tmp_path / "text.txt").write_text("\n\n".join([*paragraphs, tricky]))
    made = prepare(tmp_path / "text.txt", tmp_path / "prepared", 300)
    assert made.vocab_size <= 300 and made.num_documents == len(paragraphs) + 1
    documents, tokenizer = documents_of(made), data.Tokenizer(made)
    assert len(documents) == made.num_documents and sum(map(len, documents)) == made.num_tokens
    for document, text in zip(documents, [*paragraphs, tricky], strict=True):
        assert document[-1] == made.eod and made.eod not in document[:-1] and document.max() < made.vocab_size
        assert tokenizer.detokenize(document[:-1].tolist()) == text + "\n"
        assert tokenizer.tokenize(text + "\n") == document[:-1].tolist()
    assert made.num_train_documents == round(0.969 * made.num_documents)
    assert made.num_train_tokens == sum(map(len, documents[: made.num_train_documents]))


def test_the_same_text_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "text.txt")
    first = prepare(tmp_path / "text.txt", tmp_path / "prepared", 300)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "_make", lambda *unused: pytest.fail("prepared again"))
        assert prepare(tmp_path / "text.txt", tmp_path / "prepared", 300) == first
    others = [prepare(tmp_path / "text.txt", tmp_path / "prepared", 280)]
    with (tmp_path / "text.txt").open("a") as file:
        file.write("more")
    others.append(prepare(tmp_path / "text.txt", tmp_path / "prepared", 300))
    assert len({first.folder, *(other.folder for other in others)}) == 3
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == sorted(
        Path(one.folder).name for one in (first, *others)
    )


@pytest.mark.parametrize("damage", ["text.bin", "text.idx", "tokenizer.json", "stamp.json"])
def test_damaged_data_is_made_again(tmp_path: Path, damage: str) -> None:
    write_text(tmp_path / "text.txt")
    first = prepare(tmp_path / "text.txt", tmp_path / "prepared", 300)
    path = Path(first.folder) / damage
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert prepare(tmp_path / "text.txt", tmp_path / "prepared", 300) == first
    assert path.read_bytes() == whole
    path.unlink()
    assert prepare(tmp_path / "text.txt", tmp_path / "prepared", 300) == first
    assert path.read_bytes() == whole


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "text.txt")

    def full(*unused: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "_write_indexed", full)
        with pytest.raises(UsageError, match="No space left on device"):
            prepare(tmp_path / "text.txt", tmp_path / "prepared", 300)
    assert list((tmp_path / "prepared").iterdir()) == []
    assert prepare(tmp_path / "text.txt", tmp_path / "prepared", 300).num_tokens > 0


# ---- samples


def reference_epoch(prepared: Prepared, seed: int) -> numpy.ndarray[Any, Any]:
    """The samples of one epoch, [samples, SEQ_LENGTH + 1], after the definition: shuffle documents, cut, shuffle."""
    state = numpy.random.RandomState(seed)
    order = numpy.arange(prepared.num_train_documents, dtype=numpy.int32)
    state.shuffle(order)
    documents = documents_of(prepared)
    stream = numpy.concatenate([documents[place] for place in order])
    count = (len(stream) - 1) // SEQ_LENGTH
    windows = numpy.stack([stream[i * SEQ_LENGTH : (i + 1) * SEQ_LENGTH + 1] for i in range(count)])
    places = numpy.arange(count, dtype=numpy.uint32)
    state.shuffle(places)
    return windows[places]


@pytest.mark.parametrize("seed", [1, 98765])
def test_samples_follow_the_definition(prepared: Prepared, seed: int) -> None:
    train, valid = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=seed)
    expected = reference_epoch(prepared, seed)
    assert train.samples_per_epoch == len(expected) > 100
    for index in range(len(expected)):
        sample = train[index]
        assert numpy.array_equal(sample["tokens"].numpy(), expected[index, :-1])
        assert numpy.array_equal(sample["labels"].numpy(), expected[index, 1:])
    assert valid is not None and valid.samples_per_epoch >= 1


def test_later_epochs_hold_the_same_samples_in_another_order(prepared: Prepared) -> None:
    train, _ = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=5)
    count = train.samples_per_epoch
    epochs = [[tuple(train[epoch * count + i]["tokens"].tolist()) for i in range(count)] for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    with pytest.raises(IndexError):
        train[-1]


def test_samples_depend_on_seed_and_index_alone(prepared: Prepared) -> None:
    far = range(0, 1000, 7)
    first, _ = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=3)
    again, _ = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=3)
    other, _ = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=4)
    # Reading other samples before must not matter.
    for index in (999, 3, 500):
        again[index]
    assert digest(first, far) == digest(again, far) != digest(other, far)


def test_batches(prepared: Prepared) -> None:
    train, _ = data.build_datasets(prepared, seq_length=SEQ_LENGTH, seed=1)
    tokens, labels, loss_mask, position_ids = data.batch(train, range(3, 7))
    for tensor in (tokens, labels, loss_mask, position_ids):
        assert tensor.shape == (4, SEQ_LENGTH)
    assert (tokens.dtype, labels.dtype, position_ids.dtype) == (torch.int64,) * 3 and loss_mask.dtype == torch.float32
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and torch.equal(tokens[2], train[5]["tokens"])
    assert bool((loss_mask == 1).all()) and position_ids[3].tolist() == list(range(SEQ_LENGTH))


def test_microbatches_of_many_ranks_are_those_of_one() -> None:
    rng = random.Random(random.random())
    for _ in range(20):
        ranks, count, size, step = (rng.randint(1, high) for high in (4, 6, 3, 50))
        alone: dict[str, Any] = {"step": step, "rank": 0, "num_ranks": 1, "micro_batch_size": size}
        many = [
            data.microbatch_indices(
                step=step, microbatch=m, rank=r, num_ranks=ranks, num_microbatches=count, micro_batch_size=size
            )
            for m in range(count)
            for r in range(ranks)
        ]
        assert many == [
            data.microbatch_indices(microbatch=m, num_microbatches=ranks * count, **alone) for m in range(ranks * count)
        ]
        flat = [index for indices in many for index in indices]
        total = ranks * count * size
        assert flat == list(range((step - 1) * total, step * total))


def test_a_text_shorter_than_a_sample(prepared: Prepared) -> None:
    with pytest.raises(UsageError, match="seq_length=1000000; allowed: at least seq_length"):
        data.build_datasets(prepared, seq_length=1_000_000, seed=1)
    # Long enough to train, too short to spare a sample for validation.
    length = prepared.num_valid_tokens
    train, valid = data.build_datasets(prepared, seq_length=length, seed=1)
    assert valid is None and train.samples_per_epoch == (prepared.num_tokens - 1) // length


def _ranks_build(rank: int, prepared: Prepared) -> tuple[str, str, str]:
    megatron_patch.apply(device="cpu", split_weight_grad=False)
    try:
        data.build_datasets(prepared, seq_length=1_000_000, seed=1)
        problem = "none"
    except UsageError as error:
        problem = type(error).__name__
    train, valid = data.build_datasets(prepared, seq_length=48, seed=11)
    assert valid is not None
    return problem, digest(train, range(0, 300, 3)), digest(valid, range(5))


def test_ranks_of_a_group_build_what_one_process_builds(prepared: Prepared) -> None:
    found = run_ranks(2, _ranks_build, prepared, timeout=120.0)
    train, valid = data.build_datasets(prepared, seq_length=48, seed=11)
    assert valid is not None
    assert found == [("UsageError", digest(train, range(0, 300, 3)), digest(valid, range(5)))] * 2


_SECOND = """
import sys
import megatron_patch
megatron_patch.apply(device="cpu", split_weight_grad=False)
from examples import data, prepare_data
from tests.examples.test_data import SEQ_LENGTH, digest
import megatron.core
made = prepare_data.prepare(sys.argv[1], sys.argv[2], 300)
train, _ = data.build_datasets(made, seq_length=SEQ_LENGTH, seed=77)
print(megatron.core.__version__, made.content_hash, digest(train, range(0, 900, 3)))
"""


def test_both_megatron_versions_give_the_same_samples(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    printed = run_with_second_megatron(_SECOND, str(tmp_path / "text.txt"), str(tmp_path / "second"))
    version, content_hash, samples = printed.split()
    assert version.startswith("0.19.")
    made = prepare(tmp_path / "text.txt", tmp_path / "first", 300)
    train, _ = data.build_datasets(made, seq_length=SEQ_LENGTH, seed=77)
    assert (content_hash, samples) == (made.content_hash, digest(train, range(0, 900, 3)))
    for name in ("text.bin", "text.idx", "tokenizer.json"):
        assert (Path(made.folder) / name).read_bytes() == (
            tmp_path / "second" / made.content_hash[:16] / name
        ).read_bytes()
