"""Help pages, and how the command sets up the log."""

import importlib
import logging
import re

import pytest

import funcpipe
from funcpipe.cli import main
from funcpipe.cli.commands import OLD_NAMES, Commands
from funcpipe.cli.options import flags, option
from funcpipe.core import TrainingSpec
from funcpipe.partitioner import solvers

VERBS = tuple(Commands().verbs())

HELP = ("--help", "--help-all")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What examples name is in the package."""
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: funcpipe {verb} [options]")
    example = text.partition("example:")[2]
    assert f"  funcpipe {verb}" in example or f"$(funcpipe {verb} " in example
    for name in re.findall(r"([\w.]+:\w+)", example):
        module, _, factory = name.partition(":")
        if module.startswith("funcpipe."):
            assert callable(getattr(importlib.import_module(module), factory))
        else:
            assert module in ("aws-lambda", "file")


@pytest.mark.parametrize(("old", "new"), [*OLD_NAMES.items(), ("provision", "provision compare")])
def test_former_names_of_verbs_still_work(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--storage", "URL"] if new.startswith("run") else []
    for name in (old, new):
        assert main([*name.split(), *words]) == 2
        assert f"(see funcpipe {new} --help)" in capsys.readouterr().err


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"funcpipe {funcpipe.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", funcpipe.__version__)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_asks_the_command_how_words_go_on(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_FUNCPIPE_COMPLETE={shell}_complete" in script
    monkeypatch.setenv("_FUNCPIPE_COMPLETE", f"{shell}_complete")

    def completed(words: str, begun: str) -> set[str]:
        monkeypatch.setenv("COMP_WORDS", f"funcpipe {words} {begun}")
        monkeypatch.setenv("COMP_CWORD", begun if shell == "fish" else str(1 + len(words.split())))
        with pytest.raises(SystemExit):
            main([])
        told = capsys.readouterr().out.splitlines()
        assert told
        if shell == "zsh":  # the kind, the word and its help, each in a line
            return set(told[1::3])
        return {line.partition(",")[2].partition("\t")[0] for line in told}

    assert completed("", "") >= {verb.split()[0] for verb in VERBS}
    for verb in VERBS:
        names = {name for one in flags(Commands().verbs()[verb]) for name in one.opts if name.startswith("--")}
        assert completed(verb, "--") == names
    asked = {
        ("run", "sta"): {"status"},
        ("train --set", "training.em"): {"training.ema="},
        ("optimize --numerics", "b"): {"bf16"},
        ("optimize", "--gl"): {"--global-batch"},
    }
    assert {words: completed(*words) for words in asked} == asked


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*words])
    return " ".join(capsys.readouterr().out.split())


def test_the_overview_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 56
    assert max(map(len, lines[: lines.index("example:")])) <= 80
    listed = [line[2:20].strip() for line in lines[: lines.index("every verb:")] if line.startswith("  ")]
    assert listed == [*VERBS]


@pytest.mark.parametrize("verb", ["fit", "train", "sweep"])
def test_what_most_people_need_comes_first(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Commands().verbs()[verb]
    common, everything = (set(re.findall(r"--[\w-]+", help_of(verb, word, capsys=capsys))) for word in HELP)
    assert {*parser.common, "--help-all"} <= common
    assert {name for one in parser.own_flags for name in one.opts if name.startswith("--")} <= everything
    first = help_of(verb, "--help", capsys=capsys)
    hidden = len(parser.own_flags) - len(parser.common)
    assert f"--help-all lists {hidden} more options and {len(parser.settings)} settings." in first


def test_the_settings_come_last_by_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train", "--help-all", capsys=capsys).partition("settings: For --set KEY=VALUE, or")[2]
    assert "training.ema DECAY keep the exponential moving average" in text
    assert (
        "training.rehearsal {true,false} train on one micro-batch here before anything starts, to find mistakes (d"
        in text
    )
    assert "--epochs N" not in text


def test_help_tells_every_verb_every_solver_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    overview = help_of("--help", capsys=capsys)
    assert all(f" {verb} " in overview for verb in VERBS)
    planning = help_of("optimize", "--help-all", capsys=capsys)
    assert all(solver in planning for solver in solvers())
    training = help_of("train", "--help-all", capsys=capsys)
    assert "waited this long for a message (default: 300)" in training
    assert "-vv adds details (or set FUNCPIPE_LOG=info, FUNCPIPE_LOG=debug) -q" in overview


@pytest.mark.parametrize(
    ("words", "environment", "level"),
    [
        ([], None, "WARNING"),
        ([], "info", "INFO"),
        (["-v"], None, "INFO"),
        (["-vv"], "error", "DEBUG"),
        (["-q"], "debug", "ERROR"),
    ],
)
def test_the_command_sets_up_the_log(
    words: list[str], environment: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("funcpipe")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    if environment is None:
        monkeypatch.delenv("FUNCPIPE_LOG", raising=False)
    else:
        monkeypatch.setenv("FUNCPIPE_LOG", environment)
    assert main(["platforms", *words]) == 0
    assert logging.getLevelName(log.getEffectiveLevel()) == level
    assert len(log.handlers) == 1


def test_an_unknown_level_of_the_log_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUNCPIPE_LOG", "loud")
    assert main(["platforms"]) == 2
    assert "must" in capsys.readouterr().err


def test_an_option_for_a_number_is_no_flag() -> None:
    with pytest.raises(AssertionError, match="--outer-lr: say what follows"):
        option("--outer-lr", "how far replicas go to their mean when they meet", of=TrainingSpec)
