"""The command line as a whole: its verbs, in the order in which they are used."""

import importlib
from collections.abc import Mapping, Sequence

import click

from funcpipe.cli.options import Choice, argument, hint
from funcpipe.cli.verbs import Options, Verb, page, refusal, verb
from funcpipe.core.process import write_out

_VERBS = {
    "start here": {
        "fit": ("fit", "profile, plan and train a model, in one"),
        "profile": ("measure", "measure the layers of a model"),
        "optimize": ("plan", "choose cuts, function sizes and replicas"),
        "train": ("train", "train a model on functions, by a plan"),
    },
    "plans": {
        "explain": ("plan", "say why a plan is the way it is"),
        "simulate": ("plan", "run one iteration of a plan on a virtual clock"),
        "verify": ("train", "compare a short run with training in one process"),
        "report": ("report", "show a plan or a run as a page, with its prediction"),
        "compare": ("report", "show plans, or traces of runs, side by side"),
        "history": ("report", "show what earlier runs have taught about predictions"),
    },
    "models": {
        "evaluate": ("evaluate", "measure loss and metrics in eval mode, on functions"),
        "predict": ("evaluate", "write a model's outputs for all samples, in order"),
        "sweep": ("sweep", "train many settings side by side, and find the best"),
    },
    "run": {
        "status": ("run", "show what each worker of a run is doing"),
        "watch": ("watch", "show a run as it goes: workers, losses, dollars"),
        "logs": ("run", "show what a run's functions logged, merged in time"),
        "stop": ("run", "stop a run at a saved step, to resume it later"),
        "clean": ("run", "end a run's functions and delete all of its objects"),
        "export": ("run", "write the model of a run, as it was saved last"),
        "key": ("run", "print a run's key, to supervise it from elsewhere"),
    },
    "clouds": {
        "platforms": ("measure", "list, show or measure platform specifications"),
        "deploy": ("deploy", "set up storage, role, functions, or rent machines"),
        "destroy": ("deploy", "remove what deploy made, with all that lies in it"),
    },
    "provision": {
        "compare": ("provision", "compare ways to do a job, by functions and machines"),
        "fit-loss": ("provision", "fit how the loss of runs falls, for provision"),
        "train": ("server", "train around a parameter server, as provision chose"),
    },
    "shell": {"completion": ("commands", "print a script by which a shell completes options")},
}
"""The verbs by group, in the order in which the help page lists them; the module and the summary of each."""

_GROUPS = {
    "run": "Watch, stop or clean a run, or take from it what it has kept",
    "provision": "Compare what functions and machines take and cost, and train on those that were chosen",
}
"""The groups whose name comes before that of the verb."""

OLD_NAMES = {name: f"run {name}" for name in ("status", "watch", "logs", "stop", "clean", "export", "key")}
OLD_NAMES |= {"fit-loss": "provision fit-loss", "train-server": "provision train"}
"""Verbs' former names, which scripts may use."""

_ABOVE = """\
usage: funcpipe VERB [options]

Train PyTorch models on serverless functions: fit; or profile, optimize, train.

"""

_BELOW = """
example:
  funcpipe fit my_model:make --data my_model:data --epochs 3
  funcpipe fit my_model:make --data my_model:data --epochs 3 --platform aws-lambda://NAME --dry-run

The verbs of `run` and `provision` follow these words: `funcpipe run status`.
`funcpipe VERB --help` lists a verb's options, `funcpipe --version` the version.
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
        if self._group:
            return list(_VERBS[self._group])
        return [name for group, verbs in _VERBS.items() for name in ([group] if group in _GROUPS else verbs)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, or the group of verbs, of this name."""
        if cmd_name not in self.list_commands():
            return None
        return Commands(cmd_name) if cmd_name in _GROUPS else _verb(self._group, cmd_name)

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
        """All verbs by group, each in a line; or those of this group."""
        lines = []
        for group, verbs in _VERBS.items():
            for place, (name, (_, summary)) in enumerate(verbs.items()):
                if self._group in ("", group):
                    lines.append(f"  {'' if place else group:10}  {name:12}  {summary}\n")
        above = f"usage: {ctx.command_path} VERB [options]\n\n{_GROUPS.get(self._group)}.\n\n"
        return "".join([above, *lines] if self._group else [_ABOVE, *lines, _BELOW])

    def verbs(self) -> Mapping[str, Verb]:
        """All verbs by what one types."""
        all_names = [(group if group in _GROUPS else "", name) for group, verbs in _VERBS.items() for name in verbs]
        return {f"{group} {name}".strip(): _verb(group, name) for group, name in all_names}


def _verb(group: str, name: str) -> Verb:
    module, summary = next(verbs[name] for title, verbs in _VERBS.items() if name in verbs and group in ("", title))
    found: Verb = getattr(importlib.import_module(f"funcpipe.cli.{module}"), name.replace("-", "_"))
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
    if first == "provision" and (not others or others[0] not in {*_VERBS["provision"], "-h", "--help"}):
        return ["provision", "compare", *others]
    return words


@verb('eval "$(funcpipe completion bash)"', argument("{bash,zsh,fish}", "which shell", "shell", Choice(SHELLS)))
def completion(options: Options) -> None:
    """Print the script by which a shell asks this command what it completes to."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(options.shell)
    assert found is not None, "click knows these shells"
    write_out(found(Commands(), {}, "funcpipe", _COMPLETE).source())
