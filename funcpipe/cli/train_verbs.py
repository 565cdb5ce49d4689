"""The verbs train and verify."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show as render
from funcpipe.cli.evaluate_verbs import check_validation, validation_of
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import write_file
from funcpipe.cli.model_files import check_holds, check_model_file, free_model_file, write_somewhere
from funcpipe.cli.train_cost import confirm, dry_run
from funcpipe.cli.train_values import (
    checked_plan,
    fault_tolerance,
    load_torch,
    model_with,
    run_limits,
    run_settings,
    storage_url,
)
from funcpipe.client.prepare.precheck import precheck
from funcpipe.client.prepare.session import open_session
from funcpipe.core import Plan, RunSettings, to_text, write_trace
from funcpipe.core.json_form import to_plain
from funcpipe.errors import Disagreement
from funcpipe.platforms.catalog import LOCAL, is_deployment

if TYPE_CHECKING:
    from funcpipe.client.follow.results import RunResult


def train(options: argparse.Namespace) -> None:
    """Train a model on functions, by a plan.

    The trained model is written to a file, unless the run keeps it in its storage and no file is wanted.
    """
    check_validation(options)
    output, plan = _model_file(options), checked_plan(options)
    settings = _settings(options, plan)
    if not options.dry_run:
        _precheck(options, plan, settings["settings"])
    load_torch(options.platform)
    pipe, validation = model_with(options, plan), validation_of(options)
    if output is not None:
        check_holds(output, pipe.model.state_dict())
    if options.dry_run:
        dry_run(options, plan, pipe, validation)
        return
    settings |= {"validation": validation, "confirm": partial(confirm, options, plan)}
    if options.detach:
        run = pipe.start(load_data(options.data), **settings)
        render.show(options.json, render.as_json({"run": run}), partial(render.detached, run, storage_url(options)))
        return
    from funcpipe.cli.train_loggers import callbacks

    given = callbacks(options.log, quiet=options.json or options.quiet)
    result = pipe.train(load_data(options.data), **settings, callbacks=given, progress=False)
    written = _write(result, output, options)
    summary: dict[str, Any] = {"run": result.run, "losses": result.losses, "cost_usd": result.bill.cost_usd}
    summary |= {"bill": to_plain(result.bill), "trace": options.trace, "model": output}
    summary["skipped_steps"] = result.skipped_steps
    if result.validations:
        summary["validations"] = [{"step": report.step, **report.values} for report in result.validations]
        summary["best_step"] = result.best_step
    draw = partial(render.training_result, result, plan.estimate, written, _kept_in(options))
    render.show(options.json, render.as_json(summary), draw)


def _precheck(options: argparse.Namespace, plan: Plan, settings: RunSettings) -> None:
    """Make the checks that do not need torch; of a deployment that is opened later, only if the run has a name."""
    if not is_deployment(options.platform) or settings.name or settings.resume:
        with open_session(options.platform, options.like, settings, detached=options.detach) as session:
            precheck(session, plan, settings)


def _write(result: "RunResult", output: str | None, options: argparse.Namespace) -> dict[str, str | None]:
    """Write the files that are wanted of a run; returns their paths by content."""
    if options.trace:
        write_file(partial(write_trace, result.trace), options.trace)
    if output is not None:
        write_somewhere(result.state_dict(), output, result.run)
    if options.averaged_output:
        write_somewhere(result.averaged_state_dict(), options.averaged_output, f"{result.run}-averaged")
    if options.best:
        write_somewhere(result.best_state_dict(), options.best, f"{result.run}-best")
    if options.loss_output:
        write_somewhere(result.loss_state_dict(), options.loss_output, f"{result.run}-loss")
    averaged, best, loss = options.averaged_output, options.best, options.loss_output
    return {"trace": options.trace, "model": output, "averaged": averaged, "best": best, "loss": loss}


def verify(options: argparse.Namespace) -> None:
    """Train a few steps on local functions and in one process, and compare every tensor."""
    plan = checked_plan(options)
    load_torch(LOCAL)
    pipe = model_with(options, plan)
    found = pipe.verify(
        load_data(options.data),
        steps=options.steps,
        plan=plan,
        seed=options.seed,
        tolerance=options.tolerance,
        message_deadline_s=options.message_deadline,
    )
    render.show(options.json, to_text(found), partial(render.verification, found))
    first = found.first_difference
    if first is not None:
        raise Disagreement(
            f"the first layer that differs is {first.layer}: {first.name} is off by {first.difference:.2e}, "
            f"more than {found.allowed(first):.2e} of what training changed in it, the limit by {first.yardstick.value}"
        )


def _model_file(options: argparse.Namespace) -> str | None:
    """The file for the trained model: the one that was named, or a default where it would be lost otherwise.

    In a deployment's own storage it would be: objects expire there.
    """
    check_model_file(options.averaged_output)
    check_model_file(options.best)
    check_model_file(options.loss_output)
    if options.detach or options.output is not None or (options.keep_model and options.storage is not None):
        check_model_file(options.output)
        return str(options.output) if options.output is not None else None
    return free_model_file()


def _keeps_model(options: argparse.Namespace) -> bool:
    return options.keep_model and (options.storage is not None or is_deployment(options.platform))


def _kept_in(options: argparse.Namespace) -> str | None:
    """The storage in which the model stays, if it does."""
    return storage_url(options) if _keeps_model(options) else None


def _settings(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The common arguments of `FuncPipe.train` and `FuncPipe.start`."""
    return {
        "epochs": options.epochs,
        "platform": options.platform,
        "like": options.like,
        "plan": plan,
        "seed": options.seed,
        "faults": fault_tolerance(options),
        "limits": run_limits(options),
        "settings": run_settings(options),
    }
