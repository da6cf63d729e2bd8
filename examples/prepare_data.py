"""From text to what Megatron trains on: a byte-pair tokenizer and an indexed dataset, made once and reused.

A fresh machine has no corpus and may have no network. So the default text is the language reference that every
CPython ships for its `help()` (`pydoc_data.topics`, a document a topic); any UTF-8 file takes its place. The tokenizer
works on bytes, so that no input is ever unknown to it.

What is prepared depends on the text and the vocabulary alone. It lives in a folder named by the hash of both, is
written beside it and renamed when complete: an interrupted preparation leaves nothing that a later run could mistake
for data, and a second run finds the first one's work.

    python examples/prepare_data.py --data my.txt      # prepares and prints what it made
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comm_core.runtime.errors import MissingPackageError, MTMoEError, UsageError

END_OF_DOCUMENT = "<|endoftext|>"
TRAIN_PARTS, VALID_PARTS = 969, 31
"""Documents in training and validation, of a thousand."""

_FORMAT = 1
_LONGEST_DOCUMENT = 8192


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared text. Plain data: one rank prepares, any other can be sent this object.

    Attributes:
        folder: absolute path of the folder that holds everything below.
        source: what was prepared, for people.
        content_hash: SHA-256 of the documents and the settings, in hexadecimal.
        vocab_size: ids are below it; smaller than asked for where the text has too few different words.
        eod: id that ends every document.
        num_documents, num_tokens: of the whole text, end-of-document tokens included.
        num_train_documents, num_train_tokens: of the leading part that is trained on.
    """

    folder: str
    source: str
    content_hash: str
    vocab_size: int
    eod: int
    num_documents: int
    num_tokens: int
    num_train_documents: int
    num_train_tokens: int

    @property
    def prefix(self) -> str:
        """Megatron's name of the dataset: `prefix.bin` and `prefix.idx`."""
        return str(Path(self.folder) / "text")

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer, in the format of the `tokenizers` library."""
        return Path(self.folder) / "tokenizer.json"

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that are kept for validation."""
        return self.num_tokens - self.num_train_tokens


def prepare(text_file: str | Path | None, folder: str | Path, vocab_size: int, *, min_tokens: int = 1024) -> Prepared:
    """Prepares a text, or finds it prepared. Call it on one rank; the others wait and are sent the result.

    Args:
        text_file: a UTF-8 text file, whose paragraphs become documents; None: Python's reference texts.
        folder: where prepared texts are kept; made if missing.
        vocab_size: tokens of the vocabulary, at least 257 (all bytes and the end of a document).
        min_tokens: fewest tokens that must remain for training (a sample needs seq_length + 1).

    Raises:
        UsageError: a missing, empty, binary or too small text, a folder that can not be written.
        MissingPackageError: no `tokenizers`, no Megatron-core.
    """
    if not 257 <= vocab_size <= 65536:
        raise UsageError(f"vocab_size={vocab_size}", allowed="257 to 65536", fix="change model.vocab_size")
    documents, source = read_documents(text_file)
    content_hash = _hash(documents, vocab_size)
    try:
        root = Path(folder).resolve()
        root.mkdir(parents=True, exist_ok=True)
        target = root / content_hash[:16]
        prepared = _find(target, content_hash) or _make(documents, source, content_hash, target, vocab_size)
    except OSError as error:
        raise UsageError(
            f"data folder {str(folder)!r}: {error.strerror or error}",
            allowed="a folder that can be written, with space left",
            fix="change output in the configuration",
        ) from None
    if prepared.num_train_tokens < min_tokens:
        raise UsageError(
            f"data {source}: {prepared.num_train_tokens} tokens for training",
            allowed=f"at least {min_tokens} tokens",
            fix="give a longer text with --data or lower train.seq_length",
        )
    return prepared


def read_documents(text_file: str | Path | None) -> tuple[list[str], str]:
    """The documents of a text file (its paragraphs) or of Python's reference texts, and a name for the source.

    Raises:
        UsageError: a missing, unreadable, empty or binary file.
    """
    if text_file is None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise UsageError(
                "data: this Python has no pydoc_data", allowed="a text file", fix="give one with --data FILE"
            ) from None
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return [topics[name] for name in sorted(topics)], f"reference texts of Python {version}"
    path = Path(text_file)
    problem = {"allowed": "a UTF-8 text file", "fix": "give its path with --data FILE, or leave the option out"}
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"data file {str(text_file)!r}: {error.strerror or error}", **problem) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"data file {str(text_file)!r}: byte {error.start} is not UTF-8 text", **problem) from None
    if "\0" in text:
        raise UsageError(f"data file {str(text_file)!r}: binary, it holds zero bytes", **problem)
    documents = list(_paragraphs(text))
    if not documents:
        raise UsageError(f"data file {str(text_file)!r}: empty", **problem)
    return documents, f"{path.name} ({len(raw)} bytes)"


def _paragraphs(text: str) -> Iterator[str]:
    """Runs of lines between blank ones; long runs are cut, so that no document is the whole text."""
    lines: list[str] = []
    length = 0
    for line in (*text.splitlines(), ""):
        if lines and (not line.strip() or length + len(line) > _LONGEST_DOCUMENT):
            yield "\n".join(lines) + "\n"
            lines, length = [], 0
        for start in range(0, len(line) if line.strip() else 0, _LONGEST_DOCUMENT):
            lines.append(line[start : start + _LONGEST_DOCUMENT])
            length += len(lines[-1]) + 1
            if length > _LONGEST_DOCUMENT:
                yield "\n".join(lines) + "\n"
                lines, length = [], 0


def _hash(documents: Sequence[str], vocab_size: int) -> str:
    """Changes with every document, every border between two, the vocabulary and the format of the folder."""
    digest = hashlib.sha256(f"{_FORMAT} {vocab_size} {TRAIN_PARTS} {VALID_PARTS}".encode())
    for document in documents:
        raw = document.encode("utf-8", "surrogatepass")
        digest.update(f"\n{len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def _find(folder: Path, content_hash: str) -> Prepared | None:
    """What lies in `folder`, if it is complete and of the right content."""
    try:
        stamp: dict[str, Any] = json.loads((folder / "stamp.json").read_text())
        whole = all((folder / name).stat().st_size == size for name, size in stamp["files"].items())
        prepared = Prepared(**{**stamp["prepared"], "folder": str(folder)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return prepared if whole and prepared.content_hash == content_hash else None


def _make(documents: Sequence[str], source: str, content_hash: str, target: Path, vocab_size: int) -> Prepared:
    """Writes everything to a folder beside `target` and renames it: a reader sees all of it or nothing."""
    tokenizer = _train_tokenizer(documents, vocab_size)
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        lengths = _write_indexed(documents, tokenizer, temporary / "text")
        tokenizer.save(str(temporary / "tokenizer.json"))
        num_train = round(TRAIN_PARTS / (TRAIN_PARTS + VALID_PARTS) * len(lengths))  # as Megatron rounds its split
        prepared = Prepared(
            folder=str(target),
            source=source,
            content_hash=content_hash,
            vocab_size=tokenizer.get_vocab_size(),
            eod=tokenizer.token_to_id(END_OF_DOCUMENT),
            num_documents=len(lengths),
            num_tokens=sum(lengths),
            num_train_documents=num_train,
            num_train_tokens=sum(lengths[:num_train]),
        )
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / "stamp.json").write_text(json.dumps({"files": sizes, "prepared": asdict(prepared)}, indent=1))
        temporary.chmod(0o755)
        if target.exists():
            # Somebody else finished first, or what lies there is damaged: in either case ours is complete.
            shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return prepared


def _train_tokenizer(documents: Sequence[str], vocab_size: int) -> Any:
    """A byte-level byte-pair tokenizer of at most `vocab_size` tokens."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise MissingPackageError(
            "tokenizers", needed_for="preparing a text", install="pip install tokenizers"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    # A text that spells the end-of-document token out must not end its document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _write_indexed(documents: Sequence[str], tokenizer: Any, prefix: Path) -> list[int]:
    """Writes Megatron's indexed dataset, a document an item with its end token; returns the documents' lengths."""
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise MissingPackageError(
            "megatron-core",
            needed_for=f"writing a dataset ({error})",
            install="pip install 'mt-moe[megatron]'",
        ) from None
    import numpy

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    lengths = []
    for start in range(0, len(documents), 1024):
        for encoding in tokenizer.encode_batch(list(documents[start : start + 1024]), add_special_tokens=False):
            ids = numpy.array([*encoding.ids, end], dtype=numpy.uint16)
            builder.add_document(ids, [len(ids)])
            lengths.append(len(ids))
    builder.finalize(f"{prefix}.idx")
    return lengths


def main() -> int:
    """Prepares the text of a configuration and prints what was made; 2 where the input can not be used."""
    import megatron_patch
    from examples import config as settings

    try:
        config, _ = settings.parse(description="Prepares the text that a configuration trains on.")
        megatron_patch.apply(device="cpu")
        prepared = prepare(
            config.data.file, config.data_folder, config.model.vocab_size, min_tokens=config.train.seq_length + 1
        )
    except MTMoEError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    print(
        f"{prepared.source}: {prepared.num_documents} documents, {prepared.num_tokens} tokens"
        f" of {prepared.vocab_size} kinds, in {prepared.folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
