"""The verb sweep."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.estimate import ask
from funcpipe.cli.factories import check_names, load_data, load_factory, made
from funcpipe.cli.files import check_model_file, write_file, write_somewhere
from funcpipe.cli.options import FACTORY, Choice, argument, group, option, setting, whole
from funcpipe.cli.train import storage_url
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import Plan, RunLimits, Validation, read
from funcpipe.core.json_form import to_plain
from funcpipe.core.process import say, write_out
from funcpipe.core.texts import printable
from funcpipe.errors import InputError

if TYPE_CHECKING:
    from funcpipe.sweep.budget import SweepEstimate
    from funcpipe.sweep.study import SweepStatus
    from funcpipe.sweep.sweep import Sweep

_SAMPLERS = ("tpe", "random", "qmc", "cmaes")
_PRUNERS = ("none", "median", "halving", "hyperband")


class _OnlyEstimated(Exception):
    """The estimate is known, and nothing is to be started."""


@verb(
    "funcpipe sweep funcpipe.examples.spirals:trial --trials 20 --data funcpipe.examples.spirals:train_data \\\n"
    "    --validation-data funcpipe.examples.spirals:held_out --global-batch 128 --epochs 6 --pruner median",
    argument(
        FACTORY, "factory that takes a trial of Optuna, or an item, and returns a FuncPipe or a Candidate", "make"
    ),
    option("--trials N", "trials to train, those of a sweep that is resumed included", whole()),
    option(f"--items {FACTORY}", "factory of a list; one trial is trained for each item, which the factory takes"),
    group(
        "training",
        training.data("data.train"),
        option(f"--validation-data {FACTORY}|URL", "what trials are validated on", needed=True, key="data.validation"),
        training.METRICS,
        option("--monitor NAME", "the value of a trial: val_loss, or a metric", None, "val_loss"),
        setting(
            "training.monitor-mode", "whether the best is the smallest or the largest", Choice(("min", "max")), "min"
        ),
        option("--epochs N", "passes over the data", whole(), 1),
        option("--plan FILE", "plan for all trials (default: the cheapest, for --global-batch)", reads=True),
        option("--global-batch N", "samples in a step, where no plan is given", whole()),
        setting("model.micro-batch N", "samples computed at a time, where no plan is given (default: all)", whole()),
        training.seed_setting("the sampler, and the order of the data"),
    ),
    group(
        "search",
        option(f"--sampler NAME|{FACTORY}", f"how settings are drawn: {', '.join(_SAMPLERS)}", None, "tpe"),
        option(f"--pruner NAME|{FACTORY}", f"which trials end early: {', '.join(_PRUNERS)}", None, "none"),
    ),
    training.RUN_PLATFORM,
    training.LIKE_SETTING,
    group(
        "sweep",
        option("--run NAME", "name of the new sweep (default: a random one)", to="name"),
        option("--resume NAME", "go on with this sweep, and the trials that it has begun"),
        option("--take-over", "go on with it though another command runs it, which is ended", key=""),
    ),
    training.FAULTS,
    group(
        "limits: No trial starts that is not expected to end within them; those that reach one can be resumed.",
        option("--max-functions N", "functions at once (default: as many as the platform has)", whole()),
        *training.RARE_LIMITS,
        option("--dry-run", "say what the sweep is expected to take and to cost, and start nothing", key=""),
        option("--yes", "do not ask whether the expected cost is right", key=""),
    ),
    group(
        "output",
        option("-o --output FILE", "write the state_dict of the best trial's model", writes=""),
        option("--page FILE", "write a page with all trials and Optuna's figures", writes=""),
    ),
    common=(
        *("--trials", "--data", "--validation-data", "--monitor", "--epochs", "--global-batch", "--pruner"),
        *("--platform", "--storage", "--resume", "--max-functions", "--max-usd", "--dry-run", "--output", "--page"),
    ),
)
def sweep(options: Options) -> None:
    """Train many settings of a model side by side, as Optuna suggests them, and find the best."""
    check_names({"the factory": options.make, "--data": options.data, "--validation-data": options.validation_data})
    check_model_file(options.output)
    if (options.trials is None) is (options.items is None):
        raise InputError("give --trials N, or --items MODULE:FACTORY for a sweep over a list")
    plan = None if options.plan is None else read(Plan, options.plan)
    if plan is None and options.global_batch is None:
        raise InputError("give --plan FILE, or --global-batch N for the cheapest plan")
    training.load_torch(options.platform)
    search = _sweep_of(options, plan)
    run = training.run_of(options)
    limits = RunLimits(max_usd=options.max_usd, deadline_s=options.deadline_s)
    settings = {key: run[key] for key in ("platform", "like", "faults", "settings")}
    with _shown(options) as shown:
        try:
            result = search.run(
                options.trials,
                **settings,
                limits=limits,
                max_functions=options.max_functions,
                confirm=partial(_confirm, options),
                show=shown,
            )
        except _OnlyEstimated:
            return
    if options.page:
        from funcpipe.show.sweeps import write_sweep_page

        write_file(partial(write_sweep_page, result), options.page)
    best = result.status.best
    if options.output is not None and best is not None:
        write_somewhere(result.model.state_dict(), options.output, best.run)
    summary = {"format": result.status.FORMAT, **to_plain(result.status), "best": None if best is None else best.number}
    summary |= {"is_complete": result.is_complete, "model": options.output, "page": options.page}
    show.show(options.json, show.as_json(summary), partial(show.sweep, result))
    url = storage_url(options)
    if url is not None and best is not None and not options.json:
        write_out(f"  write it:   funcpipe run export {best.run} --storage {url} -o model.safetensors")


def _sweep_of(options: Options, plan: Plan | None) -> "Sweep":
    """Return the sweep as options say it."""
    from funcpipe.sweep.sweep import Sweep

    validation = Validation(
        data=load_data(options.validation_data),
        metrics=training.metrics_of(options),
        monitor=options.monitor,
        mode=options.monitor_mode,
    )
    return Sweep(
        load_factory(options.make),
        data=load_data(options.data),
        validation=validation,
        metric=options.monitor,
        direction="minimize" if options.monitor_mode == "min" else "maximize",
        epochs=options.epochs,
        seed=options.seed,
        plan=plan,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        sampler=_sampler(options.sampler, options.seed),
        pruner=_pruner(options.pruner),
        items=None if options.items is None else list(made(options.items, "a function that returns a list")),
    )


def _confirm(options: Options, estimate: "SweepEstimate") -> None:
    if options.dry_run:
        draw = partial(estimate.line, options.max_usd)
        show.show(options.json, show.as_json(to_plain(estimate)), draw)
        raise _OnlyEstimated
    if not options.json and not options.quiet:
        say(estimate.line(options.max_usd))
    ask(options, [estimate.line(options.max_usd)])


@contextlib.contextmanager
def _shown(options: Options) -> Iterator["Callable[[SweepStatus], None] | None"]:
    """Show the sweep while it goes on: a table on a terminal, elsewhere a line for each trial that ends."""
    if options.json or options.quiet:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    from funcpipe.show.terminal import Terminal, draw

    console, ended = Terminal(), set[int]()
    if not console.is_terminal:

        def line(status: "SweepStatus") -> None:
            now = {trial.number for trial in status.trials if trial.state not in ("running", "waiting")}
            if now - ended:
                ended.update(now)
                write_out(printable(status.line()))

        yield line
        return
    sketch = Terminal(file=io.StringIO(), force_terminal=True, width=console.width)
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def table(status: "SweepStatus") -> None:
            with sketch.capture() as captured:
                draw(show.sweep_status(status), sketch)
            live.update(Text.from_ansi(captured.get()), refresh=True)

        yield table


def _sampler(name: str, seed: int) -> Any:
    """Return Optuna's sampler of that name, or what a factory of the user returns."""
    from optuna import samplers

    known = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "qmc": samplers.QMCSampler,
        "cmaes": samplers.CmaEsSampler,
    }
    return _made_by_name("sampler", name, known, seed=seed)


def _pruner(name: str) -> Any:
    """Return Optuna's pruner of that name, or what a factory of the user returns."""
    from optuna import pruners

    known = {
        "none": pruners.NopPruner,
        "median": pruners.MedianPruner,
        "halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
    }
    return _made_by_name("pruner", name, known)


def _made_by_name(what: str, name: str, known: Mapping[str, Callable[..., Any]], **keywords: Any) -> Any:
    if ":" in name:
        return made(name, f"a function that makes a {what} of Optuna")
    if name not in known:
        raise InputError(f"--{what} must be one of {', '.join(known)}, or MODULE:FACTORY, got {name!r}")
    return known[name](**keywords)
