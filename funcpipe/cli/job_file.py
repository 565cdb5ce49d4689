"""The job file funcpipe.toml: options for all verbs, in one place.

Its tables are `model`, `data`, `platform`, `plan` and `training`. A key is the name of an option, such as
`global-batch`, or the `key` with which an option is declared; a value is read as on the command line, by the option's
own type. Options on the command line win. In a folder with a job file the profile is profile.json and the plan is
plan.json, unless it says otherwise, so that `funcpipe profile`, `funcpipe optimize` and `funcpipe train` need no
options.
"""

import os
import tomllib
from collections.abc import Mapping
from typing import Any

import click

from funcpipe.cli.commands import Commands
from funcpipe.cli.options import JOB_FILE, Declared, declared, hint
from funcpipe.errors import InputError

NAME = "funcpipe.toml"
TABLES = ("model", "data", "platform", "plan", "training")

_DEFAULTS = {"model.profile": "profile.json", "plan.file": "plan.json"}


def read_into(ctx: click.Context, named: str | None) -> None:
    """Make what the job file says the defaults of a verb: the file that is named, or that of the current folder.

    All that it says is checked, whichever verb was called. Raises InputError for a file that cannot be used.
    """
    path, root = named or NAME, ctx.find_root().command
    if not isinstance(root, Commands) or (named is None and not os.path.exists(path)):
        return
    tables, known = _read(path), _keys(root)
    found: dict[str, dict[str, Any]] = {}
    for name, default in _DEFAULTS.items():
        for verb, param in known[name]:
            found.setdefault(verb, {})[param.name or ""] = default
    for table, entries in tables.items():
        for written, value in entries.items():
            key = written.replace("_", "-")
            if f"{table}.{key}" not in known:
                near = hint(key, [name.partition(".")[2] for name in known if name.startswith(f"{table}.")])
                raise InputError(f"{path}: unknown key {written!r} in [{table}]{near}")
            for verb, param in known[f"{table}.{key}"]:
                found.setdefault(verb, {})[param.name or ""] = _converted(param, value, f"{path}: {table}.{key}")
    ctx.default_map = found.get(ctx.command_path.partition(" ")[2], {})
    ctx.meta[JOB_FILE] = path


def _keys(root: Commands) -> Mapping[str, list[tuple[str, Declared]]]:
    """The keys of the file as TABLE.KEY, and the arguments of verbs that each sets."""
    found: dict[str, list[tuple[str, Declared]]] = {}
    for name, verb in root.verbs().items():
        for param in declared(verb):
            if key := param.key_in(verb):
                found.setdefault(key, []).append((name, param))
    return found


def _read(path: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    for name, table in tables.items():
        if name not in TABLES:
            raise InputError(f"{path}: unknown table [{name}]{hint(name, TABLES)}; there are {', '.join(TABLES)}")
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, [{name}], got {table!r}")
    return tables


def _converted(param: Declared, value: Any, place: str) -> Any:
    """`value` as the command line would have given it: a text, several, or what a flag stands for."""
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"{place} must be true or false, got {value!r}")
        return param.flag_value if value else param.default
    if getattr(param, "multiple", False):
        return [_one(param, item, place) for item in (value if isinstance(value, list) else [value])]
    return _one(param, ",".join(map(str, value)) if isinstance(value, list) else value, place)


def _one(param: Declared, value: Any, place: str) -> str:
    if isinstance(value, bool | dict | list):
        raise InputError(f"{place} must be a string or a number, got {value!r}")
    try:
        param.type.convert(str(value), param, None)
    except click.BadParameter as error:
        raise InputError(f"{place} {error.message}") from error
    return str(value)
