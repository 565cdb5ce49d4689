"""What is printed commands no terminal, and a reader that leaves is no failure."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from funcpipe.cli import main
from funcpipe.core import MB, LayerProfile, ModelProfile, TensorProfile, write
from funcpipe.core.process import say, write_out
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.terminal import Terminal

EVIL = "layer\x1b]0;title\x9c\x1b[31m\u202e\ud800"
SHOWN = "layer\ufffd]0;title\ufffd\ufffd[31m\ufffd\ufffd"


@contextmanager
def unread(name: str) -> Iterator[None]:
    """A stream, standard output or error, that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, name, stream)
        yield
        stream.flush()


@pytest.mark.parametrize(
    "verb", [["platforms"], ["platforms", "--json"], ["completion", "bash"], ["--version"], ["--help"]]
)
def test_a_reader_that_has_read_enough_is_no_failure(verb: list[str]) -> None:
    with unread("stdout"):
        try:
            code: object = main(verb)
        except SystemExit as end:  # after a page
            code = end.code
    assert code in (0, None)


def test_a_message_that_nobody_reads_changes_no_exit_code(tmp_path: Path) -> None:
    with unread("stderr"):
        assert main(["explain", str(tmp_path / "none.json"), "none.json"]) == 2


def test_what_is_lost_elsewhere_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loses(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("funcpipe.cli.measure.load_spec", loses)
    assert main(["platforms"]) == 2
    assert "Broken pipe" in capsys.readouterr().err


def test_whether_anybody_still_reads_is_known() -> None:
    with unread("stdout"):
        assert not write_out("one")
        assert write_out("two")  # goes nowhere


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_writes_its_files_and_nothing_else_into_them(
    closed: str, tmp_path: Path
) -> None:
    write(profile(), tmp_path / "profile.json")
    command = f"{sys.executable} -m funcpipe optimize profile.json --global-batch 8 -o plan.json {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "plan.json").read_text().startswith('{\n "format": "funcpipe.plan/')


def test_control_characters_of_others_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().print(EVIL)
    Terminal().print(Text(EVIL, style="bold"))
    say(EVIL)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [SHOWN, SHOWN]
    assert shown.err == f"{SHOWN}\n"


def test_styles_are_still_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Terminal().print("bold", style="bold")
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m\n"


def test_a_message_of_any_length_leaves_room_for_what_was_there_before(capsys: pytest.CaptureFixture[str]) -> None:
    say("<html>" + 10_000_000 * "x" + "</html>")
    shown = capsys.readouterr().err
    assert len(shown) < 50_000
    assert shown.startswith("<html>xxx")
    assert shown.endswith("xxx</html>\n")


def test_a_stranger_s_profile_and_plan_are_shown_by_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(profile(EVIL), "profile.json")
    shown = {}
    for verb in (
        ["optimize", "profile.json", "--global-batch", "8", "--set", f"plan.cut={EVIL}"],
        ["explain", "plan.json", "profile.json"],
        ["simulate", "plan.json", "profile.json", "--gantt", "--trace", "trace.json"],
        ["report", "plan.json", "plan.json"],
        ["report", "plan.json", "profile.json", "trace.json", "-o", "report.html"],
    ):
        assert main(verb) == 0, capsys.readouterr().err
        found = capsys.readouterr()
        shown[verb[0]] = found.out + found.err
    assert not any("\x1b" in text or "\ud800" in text for text in shown.values())
    assert SHOWN in " ".join(shown["explain"].split())
    assert "title" in Path("report.html").read_text(encoding="utf-8")


def profile(name: str = "layer") -> ModelProfile:
    spec = load_spec("local")
    layer = LayerProfile(
        name=name,
        parameter_bytes=1_000_000,
        activation_bytes=1_000_000,
        forward_s=tuple(0.2 for _ in spec.sizes),
        backward_s=tuple(0.4 for _ in spec.sizes),
    )
    return ModelProfile(
        model="chain",
        micro_batch=4,
        platform="local",
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=300 * MB,
        layers=(replace(layer, name="first"), layer),
        tensors=(TensorProfile(name="t", producer=0, consumers=(1,), forward_bytes=10**6, backward_bytes=10**6),),
    )
