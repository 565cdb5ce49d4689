"""The pages of the documentation, and their blocks of code: which of them are run, and which are not and why."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import SkipTest

from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from funcpipe.cli import main
from funcpipe.cli.commands import parse as parse_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = tuple(
    sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
    )
)

RUN = ("python", "shell", "toml")
"""Languages of blocks that are run: a file of settings is written where the page's commands find it."""

SHOWN = ("text",)
"""Languages of blocks that nobody types: diagrams and what programs print."""

WHY_NOT = (
    "needs an AWS account",
    "needs an Alibaba Cloud account",
    "needs a cluster or rented machines",
    "installs packages",
    "runs all tests or more",
    "shows a part of a longer program",
)
"""The reasons for which a block may be marked as one that no test runs."""

_FENCE = re.compile(r"^ *```(.*)$", re.MULTILINE)
_FILE = re.compile(r"# ([\w.]+\.(?:py|toml))\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page, and why it is not run; None if it is."""

    page: str
    line: int
    language: str
    text: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(page: str) -> list[str]:
    """The languages of the fenced blocks of a page, in order; empty where none is named."""
    return _FENCE.findall((ROOT / page).read_text())[::2]


def parse(page: str, folder: Path | None = None) -> Document:
    """The page as a document of sybil, whose blocks run in `folder`."""
    evaluators: dict[str, Callable[[Example], None]] = {
        "python": _Python(folder),
        "shell": _Shell(folder),
        "toml": _File(folder),
    }
    parsers = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
    return Sybil(parsers=[*parsers, SkipParser()], path=str(ROOT)).parse(ROOT / page)


def blocks(page: str) -> Iterator[Block]:
    """All blocks of a page that are run or marked, hidden ones left out."""
    marked: str | None = None
    for example in parse(page).examples():
        if isinstance(example.parsed, tuple):
            action, reason = example.parsed
            assert action == "next", f"{page}:{example.line}: mark every block by itself"
            marked = (reason or "").strip().strip('"')
        else:
            text = example.document.text[example.region.start :]
            if not text.lstrip().startswith("<!--"):
                yield Block(page, example.line, _language(example.region, text), str(example.parsed), marked)
            marked = None


def run(page: str, folder: Path) -> tuple[int, int]:
    """Run a page's blocks in order, in `folder`, where it is the current one; how many were run and skipped."""
    document = parse(page, folder)
    document.namespace["__name__"] = "__main__"  # what is defined there travels to functions by value
    done = skipped = 0
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest:
            skipped += 1
        else:
            done += not isinstance(example.parsed, tuple)
    return done, skipped


def _language(region: Region, text: str) -> str:
    found = _FENCE.match(text)
    assert found is not None
    return found.group(1)


class _Python:
    """Runs a block; one that begins with the comment `# NAME.py` is also written to that file."""

    def __init__(self, folder: Path | None) -> None:
        self._write = _File(folder)
        self._evaluate = PythonEvaluator()

    def __call__(self, example: Example) -> None:
        if _FILE.match(example.parsed):
            self._write(example)
        else:
            self._evaluate(example)


class _File:
    """Writes a block to the file that its first line names."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __call__(self, example: Example) -> None:
        assert self._folder is not None
        named = _FILE.match(example.parsed)
        assert named is not None, f"{example.path}:{example.line}: the first line must be `# NAME`"
        file = self._folder / named.group(1)
        file.write_text(example.parsed)
        if file.suffix == ".toml":
            assert parse_options(["optimize", "--job", str(file)])  # which checks all values


class _Shell:
    """Runs a block's commands in order, to the first that fails: our own in this process, without a new interpreter."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __call__(self, example: Example) -> None:
        assert not set("|&;<>$`") & set(example.parsed), f"{example.path}:{example.line}: plain commands only"
        for words in commands(example.parsed):
            if words[0] == "funcpipe":
                code, printed = self._ours(words[1:])
            else:
                code, printed = self._others(words)
            assert code == 0, f"{example.path}:{example.line}: {shlex.join(words)}: {printed}"

    def _ours(self, arguments: list[str]) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            return main(arguments), printed.getvalue()

    def _others(self, words: list[str]) -> tuple[int, str]:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=self._folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a block for a shell; lines that end with a backslash go on.

    `first && second` are two commands, and where the output goes is left out.
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word in ("&&", "||", "|", ";", "&"):
                yield words
                words = []
            elif word == ">":
                next(lexer)
            else:
                words.append(word)
        if words:
            yield words
