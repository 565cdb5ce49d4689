"""The verbs for runs that are under way, were left, or have ended: status, logs, stop, clean, export."""

import dataclasses
import json
import logging
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from funcpipe import show
from funcpipe.cli.factories import check_names, make_model
from funcpipe.cli.files import (
    check_holds,
    check_model_file,
    free_model_file,
    is_folder,
    write_model,
    write_optimizer,
    write_shards,
)
from funcpipe.cli.options import FACTORY, Choice, argument, group, not_negative, option, positive, whole
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import to_text
from funcpipe.core.logs import PRINTED, LogLine, merged
from funcpipe.core.process import write_out
from funcpipe.errors import InputError, RunUnknown
from funcpipe.platforms.catalog import LOCAL, open_platform, open_storage

if TYPE_CHECKING:
    from torch import nn

_WHERE = "--storage file:///tmp/runs"
LEVELS = ("debug", "info", "warning", "error")

RUN = argument("RUN", "name of the run", "name", key="training.run")

DEPLOYMENT = [
    option("--name NAME", "the deployment's name", None, "funcpipe", key="platform.deployment"),
    option("--region REGION", "the region (default: the environment's)", key="platform.region"),
]

STORAGE = option("--storage URL", "where the run keeps its objects", needed=True, key="platform.storage")


@verb(
    f"funcpipe run status RUN {_WHERE}",
    RUN,
    STORAGE,
    option("--key", "print the run's key instead, whose holder can act for the run from elsewhere"),
)
def status(options: Options) -> int:
    """Show the status of a run; ends with 1 if it has failed, with 3 if work is left and no function is alive."""
    if options.key:
        _show_key(options)
        return 0
    from funcpipe.client.control.status import status as find_status

    found = find_status(open_storage(options.storage), options.name, open_platform)
    show.show(options.json, to_text(found), partial(show.run_status, found, options.storage))
    return found.verdict.exit_code


@verb(
    f"funcpipe run stop RUN {_WHERE}",
    RUN,
    STORAGE,
    option("--wait SECONDS", "end the functions at once if they have not stopped after this time", not_negative, 60.0),
)
def stop(options: Options) -> None:
    """Stop a run at a saved step, so that it can be resumed."""
    from funcpipe.client.control.stopping import stop as stop_run

    found = stop_run(open_storage(options.storage), options.name, open_platform, wait_s=options.wait)
    show.show(options.json, to_text(found), partial(show.run_status, found, options.storage))


@verb(f"funcpipe run clean RUN {_WHERE}", RUN, STORAGE, option("--take-over", "even if another command trains the run"))
def clean(options: Options) -> None:
    """End a run's functions and delete all of its objects."""
    from funcpipe.client.control.stopping import clean as clean_run

    count = clean_run(open_storage(options.storage), options.name, open_platform, take_over=options.take_over)
    summary = {"run": options.name, "objects": count}
    show.show(
        options.json,
        show.as_json(summary),
        lambda: f"run {options.name}: {count} objects deleted",
    )


@verb(
    f"funcpipe run export RUN {_WHERE} -o model.safetensors",
    RUN,
    STORAGE,
    option("--step N", "the model after N steps (default: the newest saved)", whole(0)),
    option(
        "-o --output FILE",
        "the file: .safetensors, or .pt or .pth with torch.save (default: model.safetensors); without an extension, a "
        "folder of safetensors files, of which one at a time is in memory",
        writes="",
    ),
    option("--optimizer", "write what the optimiser keeps instead, into a folder"),
    option(
        f"--merged {FACTORY}",
        "factory of the run's model, with adapters of peft, called on the meta device: write the base model with these "
        "merged in",
    ),
)
def export(options: Options) -> None:
    """Write the model of a run to a file or a folder: of one that has finished, was stopped, or still trains."""
    path = free_model_file() if options.output is None else str(options.output)
    from funcpipe.client.follow.export import load_saved

    if options.optimizer and not is_folder(path):
        raise InputError(f"--optimizer writes a folder, and {path} has an extension; give -o FOLDER")
    if options.optimizer and options.merged:
        raise InputError("--optimizer writes no model, and --merged does; give one of them")
    if not is_folder(path):
        check_model_file(path)
    model = _model_of(options.merged) if options.merged else None
    saved = load_saved(options.name, storage=options.storage, step=options.step, opened=is_folder(path))
    if options.optimizer:
        write_optimizer(saved.state, path)
    elif is_folder(path):
        write_shards(saved.state_dict(model), path)
    else:
        held = dict(saved.state_dict(model))
        check_holds(path, held)
        write_model(held, path)
    what = "optimizer" if options.optimizer else "model"
    summary = {"run": options.name, "step": saved.step, "steps": saved.steps, what: path}
    said = f"run {options.name}: the {what} after step {saved.step} of {saved.steps}: {path}"
    show.show(options.json, show.as_json(summary), lambda: said)


def _model_of(factory: str) -> "nn.Module":
    """The model that the factory makes, without contents."""
    import torch

    check_names({"--merged": factory})
    with torch.device("meta"):
        return make_model(factory)


def _show_key(options: Options) -> None:
    """Print the key of a run's newest generation. Its holder can act for the run."""
    from funcpipe.client.control.stopping import run_key

    found = run_key(open_storage(options.storage), options.name)
    show.show(options.json, show.as_json({"run": options.name, "key": found.text}), lambda: found.text)


@verb(
    "funcpipe run logs run-20261122-100000-1a2b3c4d --level warning",
    argument(
        "RUN",
        "the run; or aws or aliyun, for what all functions and builds of a deployment there have written lately",
        "about",
        key="training.run",
    ),
    option("--platform URL", "the deployment that it runs on (default: this machine)", one_of="where"),
    option("--storage URL", "the storage where it says what it runs on", one_of="where", key="platform.storage"),
    option("--worker NAME", "only lines of this worker, such as s0.r1"),
    option("--level", "only lines of this level or above; what is printed is info", Choice(LEVELS)),
    group(
        "of aws or aliyun",
        DEPLOYMENT,
        option("--minutes N", "of the last so many", positive, 60.0),
        option("--containing TEXT", "only lines with this text"),
    ),
)
def logs(options: Options) -> None:
    """Print the log of a run, or all that a deployment has written lately."""
    from funcpipe.cli.deploy import CLOUDS, cloud_of

    if options.about in CLOUDS:
        for text in cloud_of(options.about).logs(options, time.time() - 60 * options.minutes):
            if not write_out(json.dumps(text) if options.json else text):
                break
        return
    for line in _lines_of(options.about, platform=options.platform, storage=options.storage):
        if _is_wanted(line, worker=options.worker, level=options.level):
            text = json.dumps(dataclasses.asdict(line)) if options.json else str(line)
            if not write_out(text):
                break


def _lines_of(run: str, *, platform: str | None, storage: str | None) -> tuple[LogLine, ...]:
    """The lines of `run`, merged in time: those of its functions, and those of its client if that was here.

    Raises InputError where nothing is known of the run.
    """
    from funcpipe.platforms.local.output import read_logs
    from funcpipe.platforms.local.platform import LocalPlatform

    if storage is not None:
        from funcpipe.runstate.generations import newest_record
        from funcpipe.runstate.signing import signed

        try:
            found = open_platform(newest_record(signed(open_storage(storage)), run).platform)
        except RunUnknown as error:
            raise InputError(f"{error}; without --storage, its logs may still be there") from None
    else:
        found = LocalPlatform(f"{LOCAL}:") if platform in (None, LOCAL) else open_platform(platform)
    kept = found.logs(run) if isinstance(found, LocalPlatform) else chain(found.logs(run), read_logs(run))
    lines = merged(run, kept)
    if not lines:
        where = f"on {platform}" if platform else f"on {found.url}" if storage else "on this machine"
        raise InputError(
            f"there are no logs of a run {run!r} {where}; --platform URL names the deployment that it ran on"
        )
    return lines


def _is_wanted(line: LogLine, *, worker: str | None, level: str | None) -> bool:
    """Return True if a line is of `worker`, and at least of `level`."""
    name = "INFO" if line.level == PRINTED else line.level
    least = 0 if level is None else logging.getLevelNamesMapping()[level.upper()]
    return worker in (None, line.worker) and logging.getLevelNamesMapping().get(name, logging.INFO) >= least
