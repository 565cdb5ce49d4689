"""The files that `funcpipe provision --json` has printed, as other verbs read them."""

import os
from pathlib import Path

from funcpipe.core import Plan, read
from funcpipe.core.provision import Provision, ProvisionTable
from funcpipe.errors import FormatError, InputError


def chosen_way(path: str, way: str | None) -> tuple[Provision, str]:
    """The provision in a file, or the way of a table that was recommended or named; and the market that it is of.

    Raises InputError or FormatError.
    """
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


def plan_in(path: str, way: str | None) -> Plan:
    """The plan in a file, or that of a way that `funcpipe provision --json` has printed, as `chosen_way` finds it.

    Raises InputError or FormatError.
    """
    if not os.path.exists(path) or not _is_table(path):
        if way is not None:
            raise InputError(
                f"--way names {way}, but {path} has no ways: leave it out, or give as --plan what "
                "`funcpipe provision --json` has printed"
            )
        return read(Plan, path)
    found, _ = chosen_way(path, way)
    if found.plan is None:
        raise InputError(
            f"the way {found.way} rents machines and has no plan: train by it with funcpipe train-server, or name the "
            "way funcpipe with --way"
        )
    return found.plan


def _is_table(path: str) -> bool:
    try:
        return f'"{ProvisionTable.FORMAT}"' in Path(path).read_text(encoding="utf-8")[:100]
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}; `funcpipe provision --json` prints it") from error
