"""How a verb is declared, what its help page says, and how a mistake on a command line is reported."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from funcpipe.cli.options import (
    SET,
    Argument,
    Declared,
    Option,
    Setting,
    declared,
    flags,
    flat,
    group,
    hint,
    named,
    option,
)
from funcpipe.core.process import write_out
from funcpipe.errors import InputError


class Options(SimpleNamespace):
    """The values of a verb's options by name, with its `command` and the function to `run` with them.

    Those that are `given` on the command line, `--set` included, come neither from a job file nor from a default.
    """


def fields_of(kind: type, options: Options) -> dict[str, Any]:
    """The fields of a dataclass that options are called after, with what the options say."""
    return {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}


_OF_ALL = "of every verb"
"""The group of the options that every verb has: the page of `funcpipe --help` lists them."""


class Verb(click.Command):
    """A verb. If some of its options are `common`, only `--help-all` shows the others; settings it alone shows."""

    def __init__(self, *, example: str, common: Sequence[str], table: str, about: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.example, self.common, self.table, self.help = example, common, table, about

    @property
    def settings(self) -> list[Setting]:
        """What the job file and `--set` alone say."""
        return [one for one in self.params if isinstance(one, Setting)]

    @property
    def own_flags(self) -> list[Option]:
        """The options that not every verb has."""
        return [one for one in flags(self) if one.group != _OF_ALL]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; an option may be shortened as far as it is the only one that begins so."""
        names = [name for param in flags(self) for name in param.opts if name.startswith("--")]
        whole = []
        for word in args:
            name, equals, value = word.partition("=")
            near = [known for known in names if known.startswith(name) and len(name) > 2]
            whole.append(f"{near[0]}{equals}{value}" if len(near) == 1 else word)
        return super().parse_args(ctx, whole)

    def page(self, ctx: click.Context, *, everything: bool = False) -> str:
        """The page of `--help`; with `everything`, that of `--help-all`."""
        arguments = [one for one in declared(self) if isinstance(one, Argument)]
        formatter = ctx.make_formatter()
        words = [str(one.metavar) if one.required else f"[{one.metavar}]" for one in arguments]
        words += [f"{one.opts[-1]} {one.metavar}" for one in self.own_flags if one.required]
        formatter.write_usage(ctx.command_path, " ".join(["[options]", *words]), prefix="usage: ")
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        sections: dict[str, list[Declared]] = {"positional arguments": [*arguments]}
        if everything or not self.common:
            for one in sorted(self.own_flags, key=lambda one: one.group != ""):
                sections.setdefault(one.group or "options", []).append(one)
        else:
            by_name = {name: one for one in self.own_flags for name in one.opts}
            sections["common options"] = [by_name[name] for name in self.common]
        if everything:
            sections[_SETTINGS] = [*self.settings]
        for title, listed in sections.items():
            _write_section(ctx, formatter, title, listed)
        more = "" if everything else self._more()
        return f"{formatter.getvalue()}\n{more}{_SEE_ALL}\n\nexample:\n  {self.example}"

    def _more(self) -> str:
        """What the page of `--help` leaves out."""
        hidden = len(self.own_flags) - len(self.common) if self.common else 0
        parts = [
            f"{count} {what}" for count, what in ((hidden, "more options"), (len(self.settings), "settings")) if count
        ]
        return f"--help-all lists {' and '.join(parts)}.\n" if parts else ""


_SETTINGS = "settings: For --set KEY=VALUE, or in the job file as NAME below [TABLE]."
_SEE_ALL = "funcpipe --help lists the options of every verb, such as --set, --job and --json."


def _write_section(ctx: click.Context, formatter: click.HelpFormatter, title: str, listed: Sequence[Declared]) -> None:
    heading, _, about = title.partition(": ")
    rows = [row for row in (one.get_help_record(ctx) for one in listed) if row is not None]
    if rows:
        with formatter.section(heading):
            if about:
                formatter.write_text(about)
                formatter.write_paragraph()
            formatter.write_dl(rows, col_max=24)


def page(words: str, help: str, text: Callable[[click.Context], str]) -> Option:
    """An option, as `--help`, which prints a text and ends the command."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            write_out(text(ctx).rstrip("\n"))
            ctx.exit()

    found = option(words, help, key="")
    found.is_eager, found.callback, found.expose_value = True, show, False
    return found


def verb(
    example: str, *params: Declared | Sequence[Option], common: Sequence[str] = (), table: str = "", about: str = ""
) -> Callable[[Callable[[Options], int | None]], Verb]:
    """Make a verb of a function. `table` is that of the job file in which its options have keys."""

    def made(run: Callable[[Options], int | None]) -> Verb:
        def parsed(**values: Any) -> Options:
            context = click.get_current_context()
            words = [name for name in values if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
            given = [*words, *context.meta.get(SET, ())]
            path = context.command_path.partition(" ")[2]
            return Options(run=run, verb=path, command=context.command, given=given, **values)

        return Verb(
            name=run.__name__.replace("_", "-"),
            callback=parsed,
            params=[*flat(params), *of_all()],
            example=example,
            common=common,
            table=table,
            about=about,
            add_help_option=False,
            context_settings={"max_content_width": 100},
        )

    return made


class _Pair(click.ParamType[str]):
    """KEY=VALUE, of which a shell completes the key."""

    name = "pair"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The keys of the verb that begin so."""
        keys = [one.key_in(ctx.command) for one in declared(ctx.command)]
        return [CompletionItem(f"{key}=") for key in keys if key and key.startswith(incomplete)]


def of_all() -> list[Option]:
    """The options of every verb."""
    text = "file with options and settings of all verbs (default: funcpipe.toml, if it is here)"
    job = option("--job FILE", text, key="")
    text = "set what the verb's --help-all lists, such as training.patience=3; may be repeated"
    chosen = option("--set KEY=VALUE ...", text, _Pair(), key="", to="chosen")
    for one in (job, chosen):
        one.is_eager, one.callback, one.expose_value = True, _read_settings, False
    text = "log to stderr what happens; -vv adds details (or set FUNCPIPE_LOG=info, FUNCPIPE_LOG=debug)"
    verbose = Option(["-v", "--verbose"], count=True, help=text)
    verbose.one_of, verbose.key = "volume", ""
    found = [
        chosen,
        job,
        option("--json", "print the result as JSON", key=""),
        verbose,
        option("-q --quiet", "no progress bar, and log errors only", one_of="volume", key=""),
        page("-h --help", "show the help page of a verb, or this one", _page_of),
        page("--help-all", "show all options and settings of a verb", lambda ctx: _page_of(ctx, everything=True)),
    ]
    return group(_OF_ALL, found)


def rows(ctx: click.Context, listed: Iterable[Option]) -> str:
    """Options as a page lists them."""
    formatter = ctx.make_formatter()
    with formatter.indentation():
        formatter.write_dl([one.get_help_record(ctx) for one in listed], col_max=24)
    return formatter.getvalue()


def _page_of(ctx: click.Context, *, everything: bool = False) -> str:
    assert isinstance(ctx.command, Verb), "it is an option of verbs"
    return ctx.command.page(ctx, everything=everything)


def _read_settings(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Read the job file and `--set` once both are known."""
    from funcpipe.cli.job_file import read_into

    known = ctx.meta.setdefault("funcpipe.settings", {})
    known[param.name] = value
    if known.keys() == {"job", "chosen"} and not ctx.resilient_parsing:
        read_into(ctx, known["job"], known["chosen"])


def refusal(error: click.UsageError) -> InputError:
    """What is wrong on a command line, as an error of ours: the argument, the fact and, where there is one, a hint."""
    context, text = error.ctx, error.format_message()
    if isinstance(error, click.MissingParameter) and context is not None:
        given = {name for name, value in context.params.items() if value not in (None, ())}
        given |= (context.default_map or {}).keys()
        missing = [one for one in context.command.params if one.required and one.name not in given]
        text = f"the following arguments are required: {', '.join(map(named, missing))}"
    elif isinstance(error, click.NoSuchOption):
        text = f"unrecognized arguments: {error.option_name}{_instead(error)}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        text = f"argument {named(error.param)}: {error.message}"
    return InputError(f"{text} (see {context.command_path} --help)" if context is not None else text)


def _instead(error: click.NoSuchOption) -> str:
    """What may have been meant by an option that is none: the setting of that name, or an option of a like one."""
    command = error.ctx.command if error.ctx is not None else None
    settings = command.settings if isinstance(command, Verb) else []
    for one in settings:
        if one.opts[-1] == error.option_name:
            return f"; it is a setting: --set {one.key}={one.metavar}"
    return hint(error.option_name, error.possibilities or ())
