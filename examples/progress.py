"""What a run tells while it runs: a line a step on the screen of rank 0, a row a step in metrics.jsonl.

The file is the record that report and comparisons read, so a step must stand in it exactly once whatever happened:
rows are flushed as they are written, a line torn by a crash is dropped, and a resumed run first removes the rows of
the steps that it is about to repeat.

    with Progress(folder / "metrics.jsonl", total_steps=200, start_step=1) as progress:
        progress.step(Row(step=1, loss=6.2, grad_norm=1.5, tokens_per_s=4000.0, imbalance=1.3))
        ...
        progress.finish([folder / "report.html"])
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from comm_core.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """What is recorded of a step.

    Attributes:
        step: counted from 1.
        loss: mean over the step's tokens, in nats.
        grad_norm: global 2-norm of the gradients before clipping.
        tokens_per_s: tokens of all ranks by the wall time of the step.
        imbalance: largest over mean number of tokens an expert got.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    imbalance: float

    def line(self, total_steps: int) -> str:
        """The row for the screen, in columns that stay in place."""
        width = len(str(total_steps))
        return (
            f"step {self.step:{width}d}/{total_steps}  loss {self.loss:.6f}  grad norm {self.grad_norm:.6f}"
            f"  {self.tokens_per_s:8,.0f} tokens/s  expert load max/mean {self.imbalance:.2f}"
        )

    def to_json(self) -> str:
        """The row as a line of metrics.jsonl; a number that is not finite, which JSON can not hold, becomes null."""
        values = {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}
        return json.dumps(values, allow_nan=False)


def read(path: str | Path) -> list[Row]:
    """Reads metrics.jsonl; null becomes NaN, and a last line that a crash tore off is ignored.

    Raises:
        UsageError: a missing file, or a line that is no row.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(
            f"metrics {str(path)!r}: {error.strerror}", allowed="the metrics.jsonl of a run", fix="train first"
        ) from None
    rows = []
    names = [field.name for field in fields(Row)]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            values: dict[str, Any] = json.loads(line)
            floats = {name: math.nan if values[name] is None else float(values[name]) for name in names[1:]}
            rows.append(Row(step=int(values["step"]), **floats))
        except (ValueError, TypeError, KeyError):
            # Every complete row ends with a newline, so only what follows the last one can be torn.
            if number == len(lines):
                break
            raise UsageError(
                f"metrics {str(path)!r}, line {number}: {line[:60]!r}",
                allowed="an object with " + ", ".join(names),
                fix="remove the line",
            ) from None
    return rows


class Progress:
    """Screen and metrics of rank 0; use as a context manager, so that bar and file are closed whatever happens.

    Args:
        path: metrics.jsonl; rows before `start_step` are kept, later ones removed (all of them for a new run).
        total_steps: the last step.
        start_step: the first step of this process, above 1 when resuming.
        stream: where lines go; standard output by default. A terminal also gets a progress bar.
    """

    def __init__(
        self, path: str | Path, *, total_steps: int, start_step: int = 1, stream: IO[str] | None = None
    ) -> None:
        self._path, self._total = Path(path), total_steps
        self._stream = sys.stdout if stream is None else stream
        self.rows = self._keep_before(start_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps,
                initial=start_step - 1,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
                leave=False,
            )

    def _keep_before(self, start_step: int) -> list[Row]:
        """Rewrites the file with the rows before a step; the old file stays until the new one is complete."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = (
            [row for row in read(self._path) if row.step < start_step] if start_step > 1 and self._path.exists() else []
        )
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, self._path)
        return rows

    def step(self, row: Row) -> None:
        """Prints and records a finished step."""
        self.rows.append(row)
        self._file.write(row.to_json() + "\n")
        self._file.flush()
        self.say(row.line(self._total))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {row.loss:.4f}", refresh=False)
            self._bar.update()

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def finish(self, files: Iterable[str | Path]) -> None:
        """Ends the bar and prints the closing line: first and last loss and the files written."""
        self.close()
        written = ", ".join(str(path) for path in files)
        if self.rows:
            first, last = self.rows[0], self.rows[-1]
            ratio = f" ({last.loss / first.loss:.0%} of the first)" if first.loss else ""
            text = f"loss {first.loss:.6f} at step {first.step}, {last.loss:.6f} at step {last.step}{ratio}"
        else:
            text = "no steps"
        self.say(f"{text}; wrote {written}")

    def close(self) -> None:
        """Ends the bar and closes the file."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._file.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
