"""The command line as a whole: its verbs, in the order in which they are used."""

import importlib
from collections.abc import Mapping, Sequence

import click

from funcpipe.cli.options import Choice, Option, argument, hint
from funcpipe.cli.verbs import Options, Verb, of_all, page, refusal, rows, verb
from funcpipe.core.process import write_out

_VERBS = {
    "train a model": {
        "fit": ("fit", "profile, plan and train, in one"),
        "sweep": ("sweep", "train many settings side by side, and find the best"),
        "evaluate": ("evaluate", "measure loss and metrics in eval mode, on functions"),
        "predict": ("evaluate", "write a model's outputs for all samples, in order"),
    },
    "step by step": {
        "profile": ("measure", "measure the layers of a model"),
        "optimize": ("plan", "choose cuts, function sizes and replicas"),
        "train": ("train", "train by a plan, or by a way of `provision compare`"),
        "verify": ("train", "compare a short run with training in one process"),
    },
    "understand plans and runs": {
        "explain": ("plan", "say why a plan is the way it is"),
        "simulate": ("plan", "run one iteration of a plan on a virtual clock"),
        "report": ("report", "show a plan or a run as a page, or several side by side"),
        "history": ("report", "show what earlier runs have taught about predictions"),
    },
    "look after runs": {
        "run status": ("run", "show what each worker of a run is doing"),
        "run watch": ("watch", "show a run as it goes: workers, losses, dollars"),
        "run logs": ("run", "show what a run's functions logged, merged in time"),
        "run stop": ("run", "stop a run at a saved step, to resume it later"),
        "run clean": ("run", "end a run's functions and delete all of its objects"),
        "run export": ("run", "write the model of a run, as it was saved last"),
    },
    "choose functions or machines": {
        "provision compare": ("provision", "compare what both take and cost"),
        "provision fit-loss": ("provision", "fit how the loss of runs falls, for that"),
    },
    "set up": {
        "platforms": ("measure", "list, show or measure platform specifications"),
        "deploy": ("deploy", "set up storage, role, functions, or rent machines"),
        "destroy": ("deploy", "remove what deploy made, with all that lies in it"),
        "completion": ("commands", "print a script by which a shell completes options"),
    },
}
"""The verbs by what a person wants, in the order in which the help page lists them; the module and summary of each."""

_GROUPS = {
    "run": "Watch, stop or clean a run, or take from it what it has kept",
    "provision": "Compare what functions and machines take and cost",
}
"""The words that come before the names of some verbs."""

OLD_NAMES = {name: f"run {name}" for name in ("status", "watch", "logs", "stop", "clean", "export")}
OLD_NAMES |= {"fit-loss": "provision fit-loss"}
"""Verbs' former names, which scripts may use."""

_ABOVE = """\
usage: funcpipe VERB [options]

Train PyTorch models on serverless functions: fit; or profile, optimize, train.

"""

_BELOW = """
example:
  funcpipe fit my_model:make --data my_model:data --epochs 3
  funcpipe fit my_model:make --data my_model:data --epochs 3 --platform aws-lambda://NAME --dry-run

Exit code: 0 done, 1 a run failed, 2 bad input.
"""

SHELLS = ("bash", "zsh", "fish")
_COMPLETE = "_FUNCPIPE_COMPLETE"


class Commands(click.Group):
    """The command `funcpipe`, or a group of its verbs, each imported when it is called."""

    def __init__(self, group: str = "") -> None:
        super().__init__(
            group or "funcpipe",
            no_args_is_help=False,
            add_help_option=False,
            params=[page("-h --help", "show this help message and exit", self._page)],
        )
        self._group = group
        if not group:
            self.params.append(page("--version", "print the version", _version))

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        """The names of verbs, and of groups."""
        paths = [path.split() for verbs in _VERBS.values() for path in verbs]
        if self._group:
            return [path[-1] for path in paths if path[0] == self._group]
        return list(dict.fromkeys(path[0] for path in paths))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, or the group of verbs, of this name."""
        if cmd_name not in self.list_commands():
            return None
        return Commands(cmd_name) if cmd_name in _GROUPS else _verb(f"{self._group} {cmd_name}".strip())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words up to the verb; raises UsageError if there is none."""
        if not args and not ctx.resilient_parsing:
            ctx.fail("the following arguments are required: VERB")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find what the first word names; raises UsageError with what it may have meant."""
        names = self.list_commands()
        if args[0] not in names and not ctx.resilient_parsing:
            near = hint(args[0], names) or f" (choose from {', '.join(names)})"
            ctx.fail(f"argument VERB: invalid choice: {args[0]!r}{near}")
        return super().resolve_command(ctx, args)

    def _page(self, ctx: click.Context) -> str:
        """All verbs by what a person wants, each in a line; or those of this group."""
        lines = []
        for title, verbs in _VERBS.items():
            listed = {path: summary for path, (_, summary) in verbs.items() if self._group in ("", path.split()[0])}
            if listed:
                lines += [f"{title}:\n", *(f"  {path:18}  {summary}\n" for path, summary in listed.items())]
        if self._group:
            return "".join([f"usage: {ctx.command_path} VERB [options]\n\n{_GROUPS[self._group]}.\n\n", *lines[1:]])
        everywhere = [*of_all(), *(one for one in self.params if isinstance(one, Option) and "--version" in one.opts)]
        return "".join([_ABOVE, *lines, "every verb:\n", rows(ctx, everywhere), _BELOW])

    def verbs(self) -> Mapping[str, Verb]:
        """All verbs by what one types."""
        return {path: _verb(path) for verbs in _VERBS.values() for path in verbs}


def _verb(path: str) -> Verb:
    module, summary = next(verbs[path] for verbs in _VERBS.values() if path in verbs)
    name = path.split()[-1].replace("-", "_")
    found: Verb = getattr(importlib.import_module(f"funcpipe.cli.{module}"), name)
    found.help = found.help or f"{summary[0].upper()}{summary[1:]}."
    return found


def _version(_: click.Context) -> str:
    from funcpipe import __version__

    return f"funcpipe {__version__}"


def parse(words: Sequence[str]) -> Options:
    """What to run and with which options. Raises InputError, or SystemExit once a page of help is printed."""
    try:
        found = Commands().main(list(_renamed(words)), "funcpipe", standalone_mode=False, complete_var=_COMPLETE)
    except click.UsageError as error:
        raise refusal(error) from None
    if not isinstance(found, Options):
        raise SystemExit(0)
    return found


def _renamed(words: Sequence[str]) -> Sequence[str]:
    """`words` with a verb's name of today for a former one; `provision` without a verb compares."""
    first, *others = words or [""]
    if first in OLD_NAMES:
        return [*OLD_NAMES[first].split(), *others]
    if first == "provision" and (not others or others[0] not in {*Commands(first).list_commands(), "-h", "--help"}):
        return ["provision", "compare", *others]
    return words


@verb('eval "$(funcpipe completion bash)"', argument("{bash,zsh,fish}", "which shell", "shell", Choice(SHELLS)))
def completion(options: Options) -> None:
    """Print the script by which a shell asks this command what it completes to."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(options.shell)
    assert found is not None, "click knows these shells"
    write_out(found(Commands(), {}, "funcpipe", _COMPLETE).source())
