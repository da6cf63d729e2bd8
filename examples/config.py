"""The settings of a training run: a YAML file, typed and strict, with command line overrides.

A wrong setting must be found before four processes have started to wait for each other. So the file is read into
frozen pydantic models that know every key, every type and every bound, and `Config.validate_layout` checks what no
single key can tell: whether layers fill the stages, experts divide by the ranks, microbatches fill the pipeline.
Every mistake becomes one `UsageError`: what was given, what is allowed, what to do.

    config, arguments = parse(["--config", "examples/configs/tiny_cpu.yaml", "--set", "train.lr=1e-3"])
    config.validate_layout(world_size=4)
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from comm_core.runtime.errors import UsageError
from examples import layout_rules

DEFAULT_CONFIG = "examples/configs/tiny_cpu.yaml"
_LONGEST_SHOWN = 80


class _Section(BaseModel):
    """Common behaviour of all sections: unknown keys and silent conversions are errors, values never change."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Shape of the model: MLA attention, `num_dense_layers` dense layers, then MoE layers with a shared expert."""

    num_layers: int = Field(ge=1)
    num_dense_layers: int = Field(ge=0)
    hidden: int = Field(ge=8)
    num_attention_heads: int = Field(ge=1)
    ffn_hidden: int = Field(ge=1)
    q_lora_rank: int = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_head_dim: int = Field(ge=1)
    qk_pos_emb_head_dim: int = Field(ge=2)
    v_head_dim: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    num_topk: int = Field(ge=1)
    moe_ffn_hidden: int = Field(ge=1)
    shared_expert_ffn_hidden: int = Field(ge=1)
    num_groups: int = Field(ge=1)
    group_topk: int = Field(ge=1)
    routed_scaling_factor: float = Field(gt=0)
    expert_bias_update_rate: float = Field(ge=0)
    seq_aux_loss_coeff: float = Field(ge=0)
    init_std: float = Field(gt=0)
    vocab_size: int = Field(ge=257, le=65536)


class ParallelConfig(_Section):
    """How the model is spread over ranks and which layer and schedule do the work."""

    ep_size: int = Field(ge=1)
    pp_size: int = Field(ge=1)
    schedule: Literal["dualpipev", "1f1b"]
    moe_layer: Literal["mt_moe", "megatron"]
    split_weight_grad: bool

    @property
    def num_stages(self) -> int:
        """Pieces the layers are cut into: two a rank under the V placement of dualpipev, one a rank for 1f1b."""
        return 2 * self.pp_size if self.schedule == "dualpipev" else self.pp_size

    @property
    def min_microbatches(self) -> int:
        """Fewest microbatches the schedule can run: 2P-1 for dualpipev."""
        return 2 * self.pp_size - 1 if self.schedule == "dualpipev" else 1


class TrainConfig(_Section):
    """Length, batch, optimizer. Steps count from 1; `lr_decay_steps` is where the cosine ends (null: at `steps`)."""

    steps: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    num_microbatches: int = Field(ge=1)
    seq_length: int = Field(ge=2)
    lr: float = Field(gt=0)
    min_lr: float = Field(ge=0)
    warmup_steps: int = Field(ge=0)
    lr_decay_steps: int | None = Field(default=None, ge=1)
    weight_decay: float = Field(ge=0)
    clip_grad: float = Field(ge=0)
    dtype: Literal["fp32", "bf16"]
    seed: int = Field(ge=0, lt=2**31)

    def learning_rate(self, step: int) -> float:
        """Rate of a step (from 1): linear warm-up to `lr`, then a cosine down to `min_lr`, which it keeps.

        A pure function of the step, so that a resumed run needs no scheduler state.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        end = self.lr_decay_steps or self.steps
        done = min(1.0, (step - self.warmup_steps) / max(1, end - self.warmup_steps))
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))


class DataConfig(_Section):
    """What is learnt: a UTF-8 text file, or null for the reference texts that come with Python."""

    file: str | None = None


class CheckpointConfig(_Section):
    """A checkpoint every `interval` steps and after the last one; the newest `keep` stay."""

    interval: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)


class TraceConfig(_Section):
    """Which steps are recorded, counted from the first step that a process runs (the very first ones are slow)."""

    first_step: int = Field(default=3, ge=1)
    num_steps: int = Field(default=2, ge=0)


class Config(_Section):
    """All settings of one run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trace: TraceConfig = TraceConfig()
    output: str = Field(default="runs", min_length=1)

    @property
    def run_folder(self) -> Path:
        """Where report, trace, metrics and checkpoints go."""
        return Path(self.output) / self.name

    @property
    def data_folder(self) -> Path:
        """Where prepared data is kept, shared by all runs; no run can have this name."""
        return Path(self.output) / ".data"

    def traced_steps(self, start_step: int = 1) -> range:
        """Steps to record when this process starts with `start_step`: moved forward where the run ends earlier."""
        first = min(start_step + self.trace.first_step - 1, self.train.steps - self.trace.num_steps + 1)
        first = max(first, start_step)
        return range(first, min(first + self.trace.num_steps, self.train.steps + 1))

    def validate_layout(self, world_size: int) -> None:
        """Checks what needs several settings or the number of processes.

        Raises:
            UsageError: the first rule that does not hold.
        """
        for holds, given, allowed, fix in layout_rules.all_rules(self, world_size):
            if not holds:
                raise UsageError(given, allowed=allowed, fix=fix)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number (YAML 1.1 takes it for text) and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping; a repeated key is an error instead of a silent last-one-wins."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: {_line(str(error))}", allowed="valid YAML", fix="correct that line") from None


def _line(text: object) -> str:
    """Any text as one line of bounded length, for messages."""
    line = " ".join(str(text).split())
    return line if len(line) <= 2 * _LONGEST_SHOWN else line[: 2 * _LONGEST_SHOWN - 3] + "..."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Reads a configuration file.

    Args:
        path: the YAML file.
        overrides: values that replace the file's, by dotted key (`{"train.steps": 20}`).

    Raises:
        UsageError: a missing or unreadable file, an unknown or missing key, a value of the wrong type or out of bounds.
    """
    overrides = dict(overrides or {})
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"configuration file {str(path)!r}: {reason}",
            allowed="a readable YAML file",
            fix=f"give its path with --config, for example {DEFAULT_CONFIG}",
        ) from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UsageError(
            f"{path}: holds {type(values).__name__}, not settings",
            allowed="sections " + ", ".join(Config.model_fields),
            fix=f"start from {DEFAULT_CONFIG}",
        )
    for key, value in overrides.items():
        _put(values, key.split("."), value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, str(path), overrides) from None


def _put(values: dict[Any, Any], keys: Sequence[str], value: Any) -> None:
    """Sets a nested key; what stands in the way is replaced, and the type check then names it."""
    for key in keys[:-1]:
        inner = values.get(key)
        if not isinstance(inner, dict):
            inner = values[key] = {}
        values = inner
    values[keys[-1]] = value


def _explain(error: ValidationError, path: str, overrides: Mapping[str, Any]) -> UsageError:
    """The first problem that pydantic found, in our words."""
    problems = error.errors(include_url=False, include_context=False)
    # A misspelt key is also a missing one: the spelling is what to tell.
    first = min(problems, key=lambda problem: problem["type"] not in ("extra_forbidden", "invalid_key"))
    key = ".".join(str(part) for part in first["loc"])
    given_here = any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in overrides)
    source = "on the command line" if given_here else f"in {path}"
    more = f" ({error.error_count() - 1} more problems follow)" if error.error_count() > 1 else ""
    if first["type"] in ("extra_forbidden", "invalid_key"):
        known = _keys_beside(first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "remove it"
        return UsageError(f"unknown key {key!r} {source}", allowed=", ".join(known), fix=fix + more)
    if first["type"] == "missing":
        return UsageError(
            f"no value for {key!r} {source}", allowed="a value for every key", fix=f"add it; see {DEFAULT_CONFIG}{more}"
        )
    allowed = _line(first["msg"]).removeprefix("Input should be ").removeprefix("String should ")
    if first["type"] == "string_pattern_mismatch":
        allowed = "letters, digits, '.', '_' and '-', a letter or digit first"
    return UsageError(f"{key}={_shown(first['input'])} {source}", allowed=allowed, fix="change the value" + more)


def _keys_beside(location: Sequence[int | str]) -> list[str]:
    """The allowed keys of the section that a dotted location lies in."""
    section: type[BaseModel] = Config
    for part in location[:-1]:
        field = section.model_fields[str(part)].annotation
        candidates = [field, *get_args(field)]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(section.model_fields)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing and exiting from inside a rank."""

    def error(self, message: str) -> NoReturn:
        """Turns argparse's complaint into our one line."""
        raise UsageError(
            f"command line: {_line(message)}", allowed="the options that --help lists", fix="correct the command"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every example understands."""
    parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="FILE", help="settings (default: %(default)s)")
    parser.add_argument("--data", metavar="FILE", help="train on this UTF-8 text file (data.file)")
    parser.add_argument("--steps", type=int, metavar="N", help="number of training steps (train.steps)")
    parser.add_argument("--name", help="name of the run's folder (name)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "musa"), help="what to compute on")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="replace any setting; repeatable"
    )


def from_arguments(arguments: argparse.Namespace) -> Config:
    """The configuration that parsed options ask for; `--data`, `--steps` and `--name` win over `--set`.

    Raises:
        UsageError: as `load`, and for a `--set` that is not KEY=VALUE.
    """
    overrides: dict[str, Any] = {}
    for item in arguments.set:
        key, equals, value = item.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UsageError(
                f"--set {_shown(item)}", allowed="SECTION.KEY=VALUE", fix="write it like --set train.lr=1e-3"
            )
        overrides[key] = _parse_yaml(value, f"--set {key}")
    named = {"data.file": arguments.data, "train.steps": arguments.steps, "name": arguments.name}
    overrides.update({key: value for key, value in named.items() if value is not None})
    return load(arguments.config, overrides)


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> tuple[Config, argparse.Namespace]:
    """Reads the command line (`sys.argv` by default): the configuration, and the options that are not settings.

    Raises:
        UsageError: anything wrong with either. `--help` prints and exits as usual.
    """
    parser = Parser(description=description)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return from_arguments(arguments), arguments
