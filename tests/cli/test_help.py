"""Help pages, and how the command sets up the log."""

import logging

import pytest

from funcpipe.cli import main
from funcpipe.partitioner.catalog import solvers

VERBS = (
    *("profile", "optimize", "explain", "simulate", "train", "verify", "report", "platforms"),
    *("status", "stop", "clean", "key", "deploy", "destroy", "logs"),
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: funcpipe {verb} [options]")
    assert f"example:\n  funcpipe {verb}" in text


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_tells_every_verb_every_solver_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    overview = help_of(capsys=capsys)
    assert all(f" {verb} " in overview for verb in VERBS)
    planning = help_of("optimize", capsys=capsys)
    assert all(solver in planning for solver in solvers())
    training = help_of("train", capsys=capsys)
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
