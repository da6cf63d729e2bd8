"""What README and docs/schedules.md say of schedules is what the simulator prints."""

import re
import shlex

import pytest

from dualpipe.__main__ import main
from dualpipe.compare import Report, report
from dualpipe.costs import parse
from dualpipe.schedule import build
from tests import rules

PAGE = (rules.ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
README = (rules.ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ python -m dualpipe ([^\n]*)\n(.*?)```", PAGE, re.S)
COLUMNS = [(32, "FB=3"), (32, "FB=3,a2a=1"), (8, "FB=3,a2a=1")]
ROWS = [("1f1b", None), ("interleaved", 2), ("interleaved_pairs", 2), ("interleaved_pairs", 4), ("zbv", None),
        ("dualpipev", None), ("dualpipe", None)]  # fmt: skip


def test_the_page_has_its_commands():
    assert len(BLOCKS) == PAGE.count("```console") >= 5


@pytest.mark.parametrize(("command", "output"), BLOCKS)
def test_a_command_of_the_page_prints_what_stands_below_it(capsys, command, output):
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == output


def measured(name: str, stages: int | None, microbatches: int, costs: str) -> Report | None:
    if name == "dualpipe" and microbatches < 16:
        return None
    return report(build(name, 8, microbatches, stages_per_rank=stages, allow_few=True), parse(costs))


def row(name: str, stages: int | None) -> str:
    found = [measured(name, stages, *column) for column in COLUMNS]
    assert found[0] is not None
    low, high = min(found[0].peak_activations), max(found[0].peak_activations)
    cells = ["-" if item is None else f"{item.makespan:g}" for item in found]
    title = f"`{name}`" + (f", {stages} stages a rank" if stages else "")
    title += f", {found[0].copies}x parameters" if found[0].copies > 1 else ""
    return f"| {title} | {' | '.join(cells)} | {f'{high:g}' if low == high else f'{low:g} to {high:g}'} |"


def test_the_table_of_the_readme():
    (table,) = re.findall(r"<!-- schedules:begin -->\n(.*?)<!-- schedules:end -->", README, re.S)
    assert table.strip().splitlines()[2:] == [row(*item) for item in ROWS]


def test_what_the_words_say_follows_from_the_numbers():
    """The sentences around the tables, as inequalities."""
    alone, long, few = COLUMNS
    times = {
        (item, column): found.makespan
        for item in ROWS
        for column in COLUMNS
        if (found := measured(*item, *column)) is not None
    }
    vee, zero, pairs, finer = (ROWS[5], ROWS[4], ROWS[2], ROWS[3])
    # Communication that nothing need hide, or that is hidden otherwise: zbv is the shortest.
    assert min(times, key=lambda key: times[key] if key[1] == alone else 1e9)[0] == zero
    # Communication as long as computation: pairs win, and those of interleaved 1F1B are level with the V or ahead.
    assert times[vee, long] < 0.75 * times[zero, long] and times[finer, long] < times[pairs, long] <= times[vee, long]
    assert times[pairs, long] > 0.99 * times[vee, long]
    # Few microbatches: hardly any pair, and the V is behind.
    assert times[pairs, few] < times[zero, few] < times[vee, few]
    memory = {item: max(measured(*item, *long).peak_activations) for item in ROWS}  # type: ignore[union-attr]
    assert memory[zero] < memory[vee] < memory[finer] < memory[pairs]


def test_the_share_of_forwards_in_pairs():
    (low, high, low_4, high_4) = map(
        int, re.search(r"(\d+) to (\d+) % are in a pair.*?(\d+) to (\d+) %", PAGE, re.S).groups()
    )
    assert "with 8 microbatches on 8 ranks, none" in PAGE
    for microbatches, wanted in ((8, (0, 0)), (16, (low, high)), (32, (low_4, high_4))):
        schedule = build("dualpipev", 8, microbatches, allow_few=True)
        shares = [100 * sum(bool(a.parts) for a in actions) / (2 * microbatches) for actions in schedule.ranks]
        assert shares == sorted(shares) and (round(shares[0]), round(shares[-1])) == wanted
