"""Settings: every mistake is found, named in one line, and told from every other."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import yaml

from comm_core.runtime.errors import UsageError
from examples import config as settings

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "configs" / "tiny_cpu.yaml"


def load(**overrides: object) -> settings.Config:
    return settings.load(TINY, {key.replace("__", "."): value for key, value in overrides.items()})


def problem(*argv: str, world_size: int = 4, path: Path = TINY) -> str:
    """The one line that a command line ends with."""
    with pytest.raises(UsageError) as caught:
        config, _ = settings.parse(["--config", str(path), *argv])
        config.validate_layout(world_size)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    assert "; allowed: " in text
    return text


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    config = settings.load(path)
    config.validate_layout(config.parallel.pp_size * config.parallel.ep_size)
    config.validate_layout(2 * config.parallel.pp_size * config.parallel.ep_size)
    assert config.name == path.stem


def test_the_default_configuration_is_found_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, arguments = settings.parse([])
    assert config == settings.load(TINY)
    assert (arguments.resume, arguments.device) == (False, "auto")


def test_options_and_their_order() -> None:
    config, arguments = settings.parse(
        [
            *("--config", str(TINY), "--data", "a b.txt", "--steps", "7", "--name", "second", "--resume"),
            *("--set", "train.lr=1e-4", "--set", "train.steps=9", "--set", "train.dtype=bf16", "--set", "output=/x=y"),
            *("--device", "cpu"),
        ]
    )
    assert (config.data.file, config.train.steps, config.name) == ("a b.txt", 7, "second")
    assert (config.train.lr, config.train.dtype, config.output) == (1e-4, "bf16", "/x=y")
    assert (arguments.resume, arguments.device) == (True, "cpu")
    assert config.run_folder == Path("/x=y/second") and config.data_folder == Path("/x=y/.data")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--set", "train.lrr=3"], "unknown key 'train.lrr' on the command line"),
        (["--set", "train.lrr=3"], "did you mean 'lr'?"),
        (["--set", "optimizer.lr=3"], "unknown key 'optimizer' on the command line; allowed: name, model, parallel"),
        (["--set", "train.steps=2.0"], "train.steps=2.0 on the command line; allowed: a valid integer"),
        (["--set", "train.steps=true"], "train.steps=True"),
        (["--set", "train.steps='20'"], "train.steps='20'"),
        (["--set", "train.lr=fast"], "train.lr='fast' on the command line; allowed: a valid number"),
        (["--set", "train.lr=.inf"], "allowed: a finite number"),
        (["--set", "train.lr=-1"], "allowed: greater than 0"),
        (["--set", "train.dtype=fp16"], "train.dtype='fp16' on the command line; allowed: 'fp32' or 'bf16'"),
        (["--set", "train=3"], "train=3"),
        (["--set", "train.lr.x=3"], "train.lr={'x': 3} on the command line"),
        (["--set", "parallel.schedule=gpipe"], "allowed: 'dualpipev' or '1f1b'"),
        (["--set", "train.lr"], "--set 'train.lr'; allowed: SECTION.KEY=VALUE"),
        (["--set", "train.lr={a: 1"], "--set train.lr: "),
        (["--name", "../elsewhere"], "name='../elsewhere' on the command line; allowed: letters, digits"),
        (["--name", ".data"], "name='.data'"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--config", "absent.yaml"], "configuration file 'absent.yaml': No such file or directory"),
        (["--config", "."], "configuration file '.': Is a directory"),
    ],
)
def test_mistakes_of_one_setting(argv: list[str], expected: str) -> None:
    assert expected in problem(*argv)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (
            {},
            3,
            "3 processes with parallel.pp_size=2 and parallel.ep_size=2; allowed: a multiple of pp_size * ep_size = 4",
        ),
        ({}, 2, "2 processes"),
        (
            {"train.num_microbatches": 2},
            4,
            "train.num_microbatches=2 with schedule dualpipev on pp_size=2; allowed: at least",
        ),
        ({"model.num_layers": 6}, 4, "model.num_layers=6 with parallel.pp_size=2, which makes 4 stages"),
        ({"model.num_layers": 3, "parallel.schedule": "1f1b"}, 4, "which makes 2 stages (1 a pipeline rank for 1f1b)"),
        ({"parallel.ep_size": 3}, 6, "model.num_experts=8 with parallel.ep_size=3"),
        ({"model.num_groups": 3}, 4, "model.num_experts=8 with model.num_groups=3"),
        ({"model.group_topk": 5}, 4, "model.group_topk=5 with model.num_groups=2"),
        (
            {"model.num_topk": 3, "model.group_topk": 2},
            4,
            "model.num_topk=3 with model.group_topk=2; allowed: a multiple of group_topk",
        ),
        ({"model.num_topk": 6}, 4, "model.num_topk=6 with model.group_topk=1 of groups of 4; allowed: 1 to 4 experts"),
        ({"model.num_dense_layers": 5}, 4, "model.num_dense_layers=5 with model.num_layers=4"),
        ({"model.hidden": 60}, 4, "model.hidden=60; allowed: a multiple of 8; use 64"),
        ({"model.qk_pos_emb_head_dim": 7}, 4, "model.qk_pos_emb_head_dim=7; allowed: an even number"),
        ({"train.min_lr": 1.0}, 4, "train.min_lr=1.0 with train.lr=0.006"),
    ],
)
def test_mistakes_of_several_settings(overrides: dict[str, object], world_size: int, expected: str) -> None:
    argv = [text for key, value in overrides.items() for text in ("--set", f"{key}={value}")]
    assert expected in problem(*argv, world_size=world_size)


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b"])
def test_fewest_microbatches_and_layers_that_fill_the_stages(pp_size: int, schedule: str) -> None:
    stages, fewest = (2 * pp_size, 2 * pp_size - 1) if schedule == "dualpipev" else (pp_size, 1)
    values = load(parallel__pp_size=pp_size, parallel__schedule=schedule).model_dump()
    for layers in range(1, 17):
        for microbatches in range(1, 9):
            values["model"]["num_layers"], values["train"]["num_microbatches"] = layers, microbatches
            config = settings.Config.model_validate(values)
            if layers % stages == 0 and microbatches >= fewest and (schedule == "1f1b" or pp_size > 1):
                config.validate_layout(2 * pp_size)
            else:
                with pytest.raises(UsageError):
                    config.validate_layout(2 * pp_size)


def test_a_fix_that_a_message_proposes_works() -> None:
    problem("--set", "model.num_layers=5")
    load(model__num_layers=8).validate_layout(4)
    assert "set model.num_layers=8 " in problem("--set", "model.num_layers=5")
    assert "set train.num_microbatches=3 " in problem("--set", "train.num_microbatches=1")
    load(train__num_microbatches=3).validate_layout(4)


def test_mistakes_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    good = TINY.read_text()

    def told(text: str) -> str:
        path.write_text(text)
        return problem(path=path)

    misspelt = told(good.replace("  hidden: 64", "  hiden: 64"))
    assert f"unknown key 'model.hiden' in {path}" in misspelt and "did you mean 'hidden'?" in misspelt
    assert "no value for 'model.hidden'" in told(good.replace("  hidden: 64\n", ""))
    assert "key 'hidden' twice" in told(good.replace("  hidden: 64", "  hidden: 64\n  hidden: 32"))
    assert "unknown key" in told(good + "3: 4\n")
    assert "not settings" in told("just text")
    assert "not settings" in told("")
    assert str(path) in told("a: [1\nb: 2")
    assert "could not determine a constructor" in told(good + "evil: !!python/object/apply:os.getcwd []\n")
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in problem(path=path)
    assert "<script>" in told(good.replace("  hidden: 64", "  hidden: '<script>\\n\\n</script>'"))


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    for text, value in (("1e-3", 1e-3), ("1.0e-3", 1e-3), ("1E3", 1e3), ("5", 5.0), (".5", 0.5), ("0.25", 0.25)):
        config, _ = settings.parse(["--config", str(TINY), "--set", f"train.lr={text}"])
        assert config.train.lr == value and isinstance(config.train.lr, float)


def test_a_configuration_survives_a_round_trip(tmp_path: Path) -> None:
    config = load(data__file="x.txt", train__lr=1.5e-7)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert settings.load(path) == config


def test_learning_rate() -> None:
    train = load(train__lr=0.5, train__min_lr=0.1, train__warmup_steps=10, train__lr_decay_steps=110).train
    assert [train.learning_rate(step) for step in (1, 5, 10)] == [0.05, 0.25, 0.5]
    assert train.learning_rate(60) == pytest.approx(0.3, abs=1e-15)
    assert train.learning_rate(110) == pytest.approx(0.1, abs=1e-15) == train.learning_rate(10_000)
    for step in random.Random(random.random()).sample(range(10, 111), 20):
        expected = 0.1 + 0.4 * math.cos(math.pi * (step - 10) / 200) ** 2
        assert train.learning_rate(step) == pytest.approx(expected, rel=1e-12)


def test_more_steps_do_not_change_the_rate_of_the_first_ones() -> None:
    short, long = load(train__steps=50).train, load(train__steps=400).train
    assert [short.learning_rate(step) for step in range(1, 51)] == [long.learning_rate(step) for step in range(1, 51)]
    free = load(train__steps=50, train__lr_decay_steps=None, train__warmup_steps=0).train
    assert free.learning_rate(50) == pytest.approx(free.min_lr, rel=1e-12)


@pytest.mark.parametrize(
    ("steps", "start", "first_step", "num_steps", "expected"),
    [
        (200, 1, 3, 2, [3, 4]),
        (200, 101, 3, 2, [103, 104]),
        (4, 1, 3, 2, [3, 4]),
        (3, 1, 3, 2, [2, 3]),
        (1, 1, 3, 2, [1]),
        (200, 200, 3, 2, [200]),
        (200, 1, 3, 0, []),
        (5, 6, 3, 2, []),
    ],
)
def test_traced_steps(steps: int, start: int, first_step: int, num_steps: int, expected: list[int]) -> None:
    config = load(train__steps=steps, trace__first_step=first_step, trace__num_steps=num_steps)
    assert list(config.traced_steps(start)) == expected
