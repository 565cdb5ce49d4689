"""The common parts of all verbs' options: a verb and its help page, choices, logging."""

import argparse
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from funcpipe.cli.numbers import positive
from funcpipe.core.process import write_out

FACTORY = "MODULE:FACTORY"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help page with a usage line of what is required, and with the default of every option that has one."""

    def __init__(self, prog: str, width: int | None = None) -> None:
        super().__init__(prog, max_help_position=28, width=width)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        """The usage without what may be left out, which the groups below it list."""
        required = [action for action in actions if action.required or not action.option_strings]
        words = [" ".join([*action.option_strings[-1:], _placeholder(action)]) for action in required]
        super().add_usage(usage or " ".join(["%(prog)s", "[options]", *words]), required, [], prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or not action.option_strings or "(default:" in text:
            return text
        if action.nargs == 0 or default is None or default == []:
            return text
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"


class Verb(argparse.ArgumentParser):
    """The parser of a verb. If some of its options are `common`, only `--help-all` shows the others."""

    def __init__(self, *, summary: str = "", common: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **settings)
        self.summary, self.common = summary, common
        if common:
            self.add_argument("--help-all", action=PrintAndExit, page=Verb.format_all, help="show all options and exit")

    def format_help(self) -> str:
        """The page of `--help`."""
        if not self.common:
            return self.format_all()
        options = {name: action for action in self._actions for name in action.option_strings}
        page = self.formatter_class(prog=self.prog)
        page.add_usage(None, self._actions, [])
        page.add_text(self.description)
        page.start_section("positional arguments")
        page.add_arguments(action for action in self._actions if not action.option_strings)
        page.end_section()
        page.start_section("common options")
        page.add_arguments(options[name] for name in (*self.common, "--help-all"))
        page.end_section()
        page.add_text(self.epilog)
        return page.format_help()

    def format_all(self) -> str:
        """The page of `--help-all`."""
        return super().format_help()


class PrintAndExit(argparse._HelpAction):
    """An action, as that of `--help`, which prints the text that `page` returns for the parser."""

    def __init__(self, option_strings: Sequence[str], *, page: Callable[[Any], str], **settings: Any) -> None:
        super().__init__(option_strings, **settings)
        self._page = page

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print, and end the command."""
        write_out(self._page(parser).rstrip())
        parser.exit()


def _placeholder(action: argparse.Action) -> str:
    text = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest)
    return f"[{text}]" if action.nargs == argparse.OPTIONAL else str(text)


def add_verb(
    verbs: Any, name: str, summary: str, example: str, module: str, common: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Add a verb with a function of its name (_ for -) in `module` of `funcpipe.cli`, imported when it is called."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        summary=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        common=common,
    )

    def run(options: argparse.Namespace) -> int | None:
        function: Callable[[argparse.Namespace], int | None] = getattr(
            importlib.import_module(f"funcpipe.cli.{module}"), name.replace("-", "_")
        )
        return function(options)

    verb.set_defaults(run=run, verb=name)
    verb.add_argument(
        "--job",
        metavar="FILE",
        help="file with options of this and other verbs (default: funcpipe.toml, if it is here)",
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    volume = verb.add_mutually_exclusive_group()
    volume.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log to stderr what happens; -vv adds details (or set FUNCPIPE_LOG=info, FUNCPIPE_LOG=debug)",
    )
    volume.add_argument("-q", "--quiet", action="store_true", help="no progress bar, and log errors only")
    return verb


def add_choice(verb: argparse._ActionsContainer, name: str, choices: list[str], default: str, help_text: str) -> None:
    """Add an option that takes one of `choices`."""
    verb.add_argument(name, choices=choices, default=default, help=help_text)


def add_platform(verb: argparse._ActionsContainer, *, default: str | None) -> None:
    """Add the option of the platform to plan for, by name or from a file."""
    choice = verb.add_mutually_exclusive_group()
    text = "platform to plan for, with ?region=REGION for another region; `funcpipe platforms` lists them"
    choice.add_argument(
        "--platform", metavar="NAME", default=default, help=text if default else f"{text} (default: the profile's)"
    )
    choice.add_argument("--spec", metavar="FILE", help="a platform specification of your own, instead of --platform")


def add_model(verb: argparse._ActionsContainer) -> None:
    """Add the option of the model, a factory."""
    verb.add_argument("model", metavar=FACTORY, help="factory that returns the model, an nn.Module")


def add_loss(verb: argparse._ActionsContainer) -> None:
    """Add the option of the loss."""
    verb.add_argument(
        "--loss",
        metavar="MODULE:FUNCTION",
        default="torch.nn.functional:cross_entropy",
        help="loss of output and target, or `own` if the model's output has a `loss`",
    )


def add_blocks(verb: argparse._ActionsContainer) -> None:
    """Add the option of modules that are not divided."""
    verb.add_argument(
        "--block",
        dest="blocks",
        action="append",
        default=[],
        metavar="PATH",
        help="make the module at this path one layer, whatever is inside; may be given several times",
    )


def add_teachers(verb: argparse._ActionsContainer) -> None:
    """Add the option of parts of the model that average others."""
    verb.add_argument(
        "--teacher",
        dest="teachers",
        action="append",
        default=[],
        metavar="STUDENT:TEACHER:DECAY",
        help="after each step let the module at the path TEACHER become DECAY of itself and 1 - DECAY of the one at "
        "STUDENT; may be given several times; give the same to profile and to train",
    )


def add_precision(verb: argparse._ActionsContainer, *, default: str | None) -> None:
    """Add the option of the precision."""
    also = "" if default else " (default: the plan's)"
    verb.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        default=default,
        help=f"compute in this format under autocast, with parameters in fp32{also}",
    )


def add_limits(verb: argparse._ActionsContainer) -> None:
    """Add the limits of a run's cost and time."""
    verb.add_argument("--max-usd", type=positive, metavar="USD", help="stop before the run costs more than this")
    verb.add_argument("--deadline", type=positive, metavar="SECONDS", help="stop before the run takes longer than this")


def add_measuring(verb: argparse._ActionsContainer) -> None:
    """Add the options of functions that are started to measure."""
    verb.add_argument("--like", metavar="NAME", help="give local functions the limits of this platform")
    verb.add_argument("--max-usd", type=positive, metavar="USD", help="spend no more than this on functions")
