"""The verbs for runs that are under way, were left, or have ended: status, stop, clean, export, key."""

import argparse
from functools import partial

from funcpipe import show as render
from funcpipe.cli.model_files import check_holds, check_model_file, free_model_file, write_model
from funcpipe.core import to_text
from funcpipe.core.process import write_out
from funcpipe.platforms.catalog import open_platform, open_storage


def status(options: argparse.Namespace) -> int:
    """Show the status of a run; ends with 1 if it has failed, with 3 if work is left and no function is alive."""
    from funcpipe.client.control.stopping import status as find_status

    found = find_status(open_storage(options.storage), options.name, open_platform)
    render.show(options.json, to_text(found), partial(render.run_status, found, options.storage))
    return found.verdict.exit_code


def stop(options: argparse.Namespace) -> None:
    """Stop a run at a saved step, so that it can be resumed."""
    from funcpipe.client.control.stopping import stop as stop_run

    found = stop_run(open_storage(options.storage), options.name, open_platform, wait_s=options.wait)
    render.show(options.json, to_text(found), partial(render.run_status, found, options.storage))


def clean(options: argparse.Namespace) -> None:
    """End a run's functions and delete all of its objects."""
    from funcpipe.client.control.stopping import clean as clean_run

    count = clean_run(open_storage(options.storage), options.name, open_platform, take_over=options.take_over)
    summary = {"run": options.name, "objects": count}
    render.show(
        options.json,
        render.as_json(summary),
        lambda console: console.print(f"run {options.name}: {count} objects deleted"),
    )


def export(options: argparse.Namespace) -> None:
    """Write the model of a run to a file: of one that has finished, was stopped, or still trains."""
    path = free_model_file() if options.output is None else str(options.output)
    check_model_file(path)
    from funcpipe.client.follow.export import load_saved

    saved = load_saved(options.name, storage=options.storage, step=options.step)
    state = saved.state_dict()
    check_holds(path, state)
    write_model(state, path)
    summary = {"run": saved.run, "step": saved.step, "steps": saved.steps, "model": path}
    said = f"run {saved.run}: the model after step {saved.step} of {saved.steps}: {path}"
    render.show(options.json, render.as_json(summary), lambda console: console.print(said, soft_wrap=True))


def key(options: argparse.Namespace) -> None:
    """Print the key of a run's newest generation. Its holder can act for the run."""
    from funcpipe.client.control.stopping import run_key

    found = run_key(open_storage(options.storage), options.name)
    render.show(options.json, render.as_json({"run": options.name, "key": found.text}), lambda _: write_out(found.text))
