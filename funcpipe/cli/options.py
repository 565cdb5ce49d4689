"""How options and arguments are declared and read.

An option reads as on a help page: `option("--epochs N", "passes over the data", whole(), 1)`. What is wanted rarely is
a setting, `setting("training.ema DECAY", ...)`, which the job file and `--set training.ema=0.999` give. What other
parts of the command line need to know of both stands there, too: the key in a job file, and whether it names a file to
read or write.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

import click

from funcpipe.errors import InputError

FACTORY = "MODULE:FACTORY"

JOB_FILE = "funcpipe.job_file"
"""Where a context has the path of the job file."""

SET = "funcpipe.set"
"""Where a context has what `--set` has set: keys by the names of options and settings."""

_MOST = 10**9
"""More samples, steps, functions or megabytes than any job has, and still fast to plan with."""


def whole(low: int = 1, high: int = _MOST) -> Callable[[str], int]:
    """The reader of a whole number from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}, got {text!r}")
        return value

    return read


def number(*, above: float | None = None, low: float | None = None) -> Callable[[str], float]:
    """The reader of a finite number: any, one above `above`, or one that is at least `low`."""
    rule = "a number" if above is None and low is None else f"above {above:g}" if low is None else f"at least {low:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (above is not None and value <= above) or (low is not None and value < low):
            raise ValueError(f"must be {rule}, got {text!r}")
        return value

    return read


positive = number(above=0)
"""Seconds, dollars, rates: anything above 0."""

not_negative = number(low=0)
"""A share, or what time is worth: 0 or more."""

Kind = Callable[[str], Any] | type[Enum] | click.ParamType[Any]
"""How the text of an option is read: by a function that raises ValueError, or as one of a few choices."""


class _Read(click.ParamType[Any]):
    """A value that a function reads, which says what is wrong."""

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text; what is no text has been read."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Choice(click.Choice[str]):
    """One of a few words: themselves, the members of an Enum, or `none` for None."""

    def __init__(self, words: Iterable[str | Enum], *, none: str | None = None) -> None:
        self._meant: dict[str, str | Enum | None] = {none: None} if none is not None else {}
        self._meant |= {str(word.value) if isinstance(word, Enum) else word: word for word in words}
        super().__init__(list(self._meant))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The member, or the word, that `value` names."""
        if isinstance(value, Enum):
            return value
        if value not in self.choices:
            self.fail(f"must be one of {', '.join(map(repr, self.choices))}, got {value!r}", param, ctx)
        return self._meant[value]


class Declared(click.Parameter):
    """An option or an argument, with what the verbs' common machinery needs to know of it."""

    group = ""
    """The heading below which the help page lists it, and after a colon what the page says there."""
    one_of = ""
    """What it decides, as do others of which only one may be given."""
    key: str | None = None
    """Its key in the job file, TABLE.KEY: None stands for its name in the verb's table, an empty one for none."""
    reads = False
    writes: str | None = None
    """The kind of document that it names a file for, empty for any other file; None if it names no output."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Refuse what excludes each other, and what is no value; an option beats what the job file says instead."""
        if not ctx.resilient_parsing:
            self._check(ctx, opts)
        return super().handle_parse_result(ctx, opts, args)

    def _check(self, ctx: click.Context, opts: Mapping[str, Any]) -> None:
        known = {name for param in flags(ctx.command) for name in param.opts}
        value = opts.get(self.name or "")
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and text.startswith("--") and text.partition("=")[0] in known:
                raise click.BadParameter("expected one argument", ctx, self)
        rivals = [one for one in declared(ctx.command) if one.one_of == self.one_of] if self.one_of else []
        given = [one for one in rivals if one.name in opts and one is not self]
        chosen = [key for one in [self, *rivals] if (key := ctx.meta.get(SET, {}).get(one.name))]
        if chosen and self.name in opts:
            raise click.BadParameter(f"not allowed with --set {chosen[0]}", ctx, self)
        in_file = [one for one in rivals if one.name in (ctx.default_map or {})]
        if given and self.name in opts:
            raise click.BadParameter(f"not allowed with argument {named(given[0])}", ctx, self)
        if given:
            ctx.default_map = {name: value for name, value in (ctx.default_map or {}).items() if name != self.name}
        elif len(in_file) > 1 and self.name not in opts:
            keys = " and ".join(one.key_in(ctx.command) for one in in_file)
            raise InputError(f"{ctx.meta[JOB_FILE]}: {keys} exclude each other: keep one")

    def key_in(self, verb: click.Command) -> str:
        """The key of the job file, TABLE.KEY, that sets it for `verb`; empty if there is none."""
        table = getattr(verb, "table", "")
        if self.key is not None or not table:
            return self.key or ""
        return f"{table}.{self.opts[-1].removeprefix('--')}"


def declared(command: click.Command) -> list[Declared]:
    """The options, settings and arguments of a verb."""
    return [one for one in command.params if isinstance(one, Declared)]


def flags(command: click.Command) -> "list[Option]":
    """The options of a verb that are words of a command."""
    return [one for one in command.params if isinstance(one, Option) and not isinstance(one, Setting)]


P = TypeVar("P", bound=Declared)


class Option(Declared, click.Option):
    """An option."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The row of the help page, with the default if there is one."""
        names, text, default = ", ".join(self.opts), self.help or "", self.default
        if self.is_flag or self.count:
            return names, text
        if isinstance(default, str | int | float) and not self.required and "(default:" not in text:
            text = f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"
        return f"{names} {self.make_metavar(ctx)}", text


class Setting(Option):
    """What only the job file and `--set KEY=VALUE` say."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Do without a word of the command line."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """The row of the help page, with the key as name."""
        text = super().get_help_record(ctx)[1] if self.type is not click.BOOL else self.help or ""
        if self.type is click.BOOL and self.default:
            text = f"{text} (default: true)"
        return f"{self.key} {self.make_metavar(ctx)}", text


class Argument(Declared, click.Argument):
    """A positional argument."""


def option(
    words: str,
    help: str,
    kind: Kind | None = None,
    default: Any = None,
    *,
    of: type | None = None,
    to: str = "",
    needed: bool = False,
    one_of: str = "",
    key: str | None = None,
    reads: bool = False,
    writes: str | None = None,
) -> Option:
    """Declare an option by its names and, unless it is a flag, what follows, with `...` if it may be repeated.

    Its value is called `to`. If that is a field of the dataclass `of`, it has the field's default and choices.
    """
    names = [word for word in words.split() if word.startswith("-")]
    metavar, _, more = words.removeprefix(" ".join(names)).strip().partition(" ")
    kind, default = _read_as(kind, default, of, to or names[-1].removeprefix("--").replace("-", "_"))
    if isinstance(kind, Choice) and not metavar:
        metavar = "{" + ",".join(kind.choices) + "}"
    assert metavar or (kind is None and (default is None or isinstance(default, bool))), f"{words}: say what follows"
    settings: dict[str, Any] = {"is_flag": True, "default": bool(default), "flag_value": not default}
    if metavar:
        settings = {**_valued(metavar, kind, default), "multiple": bool(more), "required": needed}
    found = Option([*names, to] if to else names, help=help, **settings)
    found.one_of, found.key, found.reads, found.writes = one_of, key, reads, writes
    return found


def setting(
    words: str,
    help: str,
    kind: Kind | None = None,
    default: Any = None,
    *,
    of: type | None = None,
    to: str = "",
    one_of: str = "",
    reads: bool = False,
    writes: str | None = None,
) -> Setting:
    """Declare a setting by its key, TABLE.NAME, and what its value is, if it is not true or false, or a choice.

    With `...` it may be repeated. The rest is as of `option`.
    """
    key, _, rest = words.partition(" ")
    metavar, _, more = rest.partition(" ")
    name = key.partition(".")[2]
    kind, default = _read_as(kind, default, of, to or name.replace("-", "_"))
    if isinstance(kind, Choice) and not metavar:
        metavar = "{" + ",".join(kind.choices) + "}"
    if not metavar:
        metavar, kind, default = "{true,false}", click.BOOL, bool(default)
    names = [f"--{name}", to] if to else [f"--{name}"]
    found = Setting(names, help=help, hidden=True, multiple=bool(more), **_valued(metavar, kind, default))
    found.one_of, found.key, found.reads, found.writes = one_of, key, reads, writes
    return found


def _read_as(kind: Kind | None, default: Any, of: type | None, field: str) -> tuple[Kind | None, Any]:
    """How a text is read, and the default: those of the field of `of`, where there is one."""
    if of is not None:
        default = next(each.default for each in fields(of) if each.name == field)
        kind = kind or (type(default) if isinstance(default, Enum) else None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Choice(kind), default
    return (_Read(kind) if kind is not None and not isinstance(kind, click.ParamType) else kind), default


def _valued(metavar: str, kind: Kind | None, default: Any) -> dict[str, Any]:
    """The arguments of click for what has a value."""
    shown = {} if default is None else {"default": default.value if isinstance(default, Enum) else default}
    return {
        "metavar": metavar,
        "type": kind or (click.Path(readable=False) if metavar == "FILE" else click.STRING),
        **shown,
    }


def argument(
    words: str,
    help: str,
    to: str,
    kind: click.ParamType[Any] | None = None,
    default: str | None = None,
    *,
    needed: bool = True,
    key: str = "",
    reads: bool = False,
) -> Argument:
    """Declare a positional argument; with `...` after its name there may be several."""
    metavar, _, more = words.partition(" ")
    settings: dict[str, Any] = {"nargs": -1} if more else {"default": default} if default else {}
    found = Argument([to], metavar=metavar, help=help, type=kind, required=needed, **settings)
    found.key, found.reads = key, reads
    return found


def group(title: str, *options: Option | Iterable[Option]) -> list[Option]:
    """Put options below a heading of the help page; after a colon, `title` has a sentence about them."""
    found = [copy(one) for one in flat(options)]
    for one in found:
        one.group = title
    return found


def flat(given: Iterable[P | Iterable[P]]) -> list[P]:
    """Options, and lists of options, as one list."""
    return [one for each in given for one in ([each] if isinstance(each, Declared) else each)]


def named(param: click.Parameter) -> str:
    """The name of an option, a setting or an argument in a message."""
    if isinstance(param, Setting):
        return f"--set {param.key}"
    return "/".join(param.opts) if isinstance(param, click.Option) else str(param.metavar or param.name)


def hint(name: str, known: Iterable[str]) -> str:
    """A question for what is near to `name`, if anything is."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
