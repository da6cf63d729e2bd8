"""The command line, as a user runs it."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import dualpipe
from dualpipe.__main__ import main
from dualpipe.schedule import dualpipev, from_csv, with_communication


def show(capsys, *arguments):
    try:
        status = main(["show", *arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_formats(capsys, tmp_path):
    sizes = ("dualpipev", "--ranks", "4", "--microbatches", "10")
    status, text, _ = show(capsys, *sizes)
    assert status == 0 and text.splitlines()[0].split() == ["time", "rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert len(text.splitlines()) == 67
    _, csv, _ = show(capsys, *sizes, "--format", "csv", "--comm")
    assert from_csv(csv, like=dualpipev(4, 10)) == with_communication(dualpipev(4, 10))
    target = tmp_path / "v.svg"
    status, nothing, _ = show(capsys, *sizes, "--format", "svg", "--output", str(target))
    assert (status, nothing) == (0, "")
    assert "DualPipeV: 4 ranks, 10 microbatches" in ElementTree.parse(target).getroot()[0].text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zbv", "--ranks", "4", "--microbatches", "6", "--stages-per-rank", "3"), "stages a rank"),
        (("dualpipe", "--ranks", "3", "--microbatches", "8"), "an even number of ranks"),
        (("dualpipe", "--ranks", "4", "--microbatches", "6"), "at least 2*ranks = 8"),
        (("zigzag", "--ranks", "4", "--microbatches", "6"), "1f1b, dualpipe, dualpipev"),
        (("1f1b", "--ranks", "four", "--microbatches", "6"), "--ranks"),
        (("1f1b", "--ranks", "4"), "--microbatches"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--format", "png"), "png"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--output", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_status_2(capsys, arguments, words):
    status, out, err = show(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_as_a_module_without_torch_distributed():
    code = (
        "import runpy, sys; sys.argv = ['dualpipe', 'show', '1f1b', '--ranks', '2', '--microbatches', '2']\n"
        "try: runpy.run_module('dualpipe', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch.distributed' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1F0" in done.stdout


def test_every_exported_name_loads():
    for name in dualpipe.__all__:
        assert getattr(dualpipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dualpipe.nothing
