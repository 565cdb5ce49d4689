"""`funcpipe deploy sky`: the task file that SkyPilot rents a provision's machines by."""

import argparse
from dataclasses import replace
from pathlib import Path

from funcpipe.cli.files import write_file
from funcpipe.core import read
from funcpipe.core.provision import Provision, ProvisionTable
from funcpipe.errors import FormatError, InputError
from funcpipe.platforms.machine_catalog import load_market
from funcpipe.platforms.ray.sky_task import SkyJob, sky_text
from funcpipe.platforms.shared.package import read_requirements

_OF_FUNCTIONS = (
    "plan",
    "sizes",
    "data_bucket",
    "repository",
    "spec",
    "no_watchdog",
    "print_deployer_policy",
    "account",
)


def write_sky_file(options: argparse.Namespace) -> None:
    """Write the task file of the way that was recommended, or named; raises InputError."""
    other = [name for name in _OF_FUNCTIONS if getattr(options, name)]
    if other:
        raise InputError(f"--{other[0].replace('_', '-')} is for functions of a cloud, and deploy sky rents machines")
    if options.provision is None or options.command is None or options.template_only is None:
        raise InputError(
            "deploy sky writes a task file: say which machines with --provision ways.json (funcpipe provision --json), "
            "what runs on them with --run 'funcpipe train …', and where to write it with --template-only sky.yaml"
        )
    chosen, market = _provision(options.provision, options.way)
    found = load_market(options.market or market)
    job = SkyJob(command=options.command, name=options.name, requirements=read_requirements(options.requirements))
    text = sky_text(chosen, found if options.region is None else replace(found, region=options.region), job)
    write_file(lambda path: Path(path).write_text(text, encoding="utf-8"), options.template_only)


def _provision(path: str, way: str | None) -> tuple[Provision, str]:
    """The provision in a file, or the one of a table, and the market that it is of."""
    if _is_table(path):
        table = read(ProvisionTable, path)
        name = way or table.recommended
        if name is None:
            raise InputError(f"no way in {path} does the job: {table.why}")
        found = {each.way: each for each in table.provisions}
        if name not in found:
            raise InputError(f"--way must be one of {', '.join(found)}, as in {path}, got {name!r}")
        return found[name], table.market
    alone = read(Provision, path)
    if way not in (None, alone.way):
        raise InputError(f"{path} has one way, {alone.way}, and --way names {way}")
    return alone, "aws"


def _is_table(path: str) -> bool:
    try:
        return f'"{ProvisionTable.FORMAT}"' in Path(path).read_text(encoding="utf-8")[:100]
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}; `funcpipe provision --json` prints it") from error
