"""`funcpipe deploy sky`: the task file that SkyPilot rents a provision's machines by."""

import argparse
from dataclasses import replace
from pathlib import Path

from funcpipe.cli.files import write_file
from funcpipe.cli.provision_files import chosen_way
from funcpipe.errors import InputError
from funcpipe.platforms.machine_catalog import load_market
from funcpipe.platforms.ray.sky_task import SkyJob, sky_text
from funcpipe.platforms.shared.package import read_requirements

_OF_FUNCTIONS = (
    "plan",
    "sizes",
    "base_image",
    "data_bucket",
    "repository",
    "registry_instance",
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
    chosen, market = chosen_way(options.provision, options.way)
    found = load_market(options.market or market)
    job = SkyJob(command=options.command, name=options.name, requirements=read_requirements(options.requirements))
    text = sky_text(chosen, found if options.region is None else replace(found, region=options.region), job)
    write_file(lambda path: Path(path).write_text(text, encoding="utf-8"), options.template_only)
