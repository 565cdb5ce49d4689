"""Help pages, and how the command sets up the log."""

import importlib
import logging
import re

import pytest

import funcpipe
from funcpipe.cli import main
from funcpipe.cli.job_file import verbs_of
from funcpipe.cli.parser import build_parser
from funcpipe.partitioner import solvers

VERBS = (
    *("profile", "optimize", "explain", "simulate", "provision", "fit-loss", "train", "train-server", "verify"),
    *("report", "platforms", "status", "watch", "stop", "clean", "key", "deploy", "destroy", "logs", "completion"),
)

HELP = ("--help", "--help-all")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: funcpipe {verb} [options]")
    assert f"example:\n  funcpipe {verb}" in text or f"$(funcpipe {verb} " in text


def test_what_examples_name_is_in_the_package() -> None:
    pages = [verb.format_help() for verb in verbs_of(build_parser()).values()]
    named = {name for page in pages for name in re.findall(r"([\w.]+:\w+)", page.partition("example:")[2])}
    ours = {name for name in named if name.startswith("funcpipe.")}
    assert len(ours) >= 4
    for name in ours:
        module, _, factory = name.partition(":")
        assert callable(getattr(importlib.import_module(module), factory))
    assert not {name for name in named - ours if not name.startswith(("aws-lambda", "file"))}


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"funcpipe {funcpipe.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", funcpipe.__version__)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_verbs_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--global-batch" in script
    assert "simulate" in script


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*words])
    return " ".join(capsys.readouterr().out.split())


def test_the_overview_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[: lines.index("example:")])) <= 80
    listed = [line[14:].split()[0] for line in lines if line.startswith("  ") and not line.startswith("  funcpipe")]
    assert listed == list(verbs_of(build_parser()))


@pytest.mark.parametrize("verb", ["optimize", "train"])
def test_a_dozen_options_come_first(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = verbs_of(build_parser())[verb]
    assert 12 <= len(parser.common) <= 13
    common, everything = (set(re.findall(r"--[\w-]+", help_of(verb, word, capsys=capsys))) for word in HELP)
    assert {*parser.common, "--help-all"} <= common
    assert everything >= common
    assert len(everything) > 2 * len(parser.common)


def test_help_tells_every_verb_every_solver_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    overview = help_of("--help", capsys=capsys)
    assert all(f" {verb} " in overview for verb in VERBS)
    planning = help_of("optimize", "--help-all", capsys=capsys)
    assert all(solver in planning for solver in solvers())
    training = help_of("train", "--help-all", capsys=capsys)
    assert "waited this long for a message (default: 300)" in training
    assert "-vv adds details (or set FUNCPIPE_LOG=info, FUNCPIPE_LOG=debug) -q" in training


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
