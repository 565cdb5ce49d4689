"""The job file funcpipe.toml, and `--set KEY=VALUE`: options and settings of all verbs, by one name.

Its tables are those of TABLES. A key is the name of an option, such as `global-batch`, or the `key` with which an
option or a setting is declared; a value is read as on the command line, by the option's own type. The command line
wins. In a folder with a job file the profile is profile.json and the plan is plan.json, unless it says otherwise, so
that `funcpipe profile`, `funcpipe optimize` and `funcpipe train` need no options.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from funcpipe.cli.commands import Commands
from funcpipe.cli.options import JOB_FILE, SET, Declared, declared, hint
from funcpipe.errors import InputError

NAME = "funcpipe.toml"
TABLES = ("model", "data", "platform", "plan", "training", "simulation", "provision")

_DEFAULTS = {"model.profile": "profile.json", "plan.file": "plan.json"}


def read_into(ctx: click.Context, named: str | None, given: Sequence[str]) -> None:
    """Make the defaults of a verb of what the job file says, and what is `given` as KEY=VALUE.

    The file is that which is named, or that of the current folder. All that it says is checked, whichever verb was
    called. Raises InputError for a file that cannot be used, and for keys and values that are none.
    """
    path, root = named or NAME, ctx.find_root().command
    if not isinstance(root, Commands):
        return
    found: dict[str, Any] = {}
    if named is not None or os.path.exists(path):
        found = _from_file(path, root).get(ctx.command_path.partition(" ")[2], {})
        ctx.meta[JOB_FILE] = path
    chosen = _from_words(ctx, root, given)
    decided = {one.one_of for one, _ in chosen if one.one_of}
    rivals = {one.name for one in declared(ctx.command) if one.one_of in decided}
    kept = {name: value for name, value in found.items() if name not in rivals}
    ctx.default_map = {**kept, **{one.name or "": value for one, value in chosen}}
    ctx.meta[SET] = {one.name: one.key_in(ctx.command) for one, _ in chosen}


def _from_file(path: str, root: Commands) -> Mapping[str, dict[str, Any]]:
    """What the file says, by verb and by the names of its options."""
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
    return found


def _from_words(ctx: click.Context, root: Commands, given: Sequence[str]) -> list[tuple[Declared, Any]]:
    """The options and settings of the verb that KEY=VALUE set, with their values; of several of one key, the last.

    Raises InputError.
    """
    by_key = {key: one for one in declared(ctx.command) if (key := one.key_in(ctx.command))}
    found: dict[str, Any] = {}
    for text in given:
        written, equals, value = text.partition("=")
        key = written.strip().replace("_", "-")
        if not equals:
            raise InputError(f"--set takes KEY=VALUE, such as --set training.patience=3, got {text!r}")
        if key not in by_key:
            raise InputError(f"--set {written}: {_why_unknown(key, ctx, root)}")
        one = by_key[key]
        read = _converted(one, _bool_in(value) if _is_bool(one) else value, f"--set {key}")
        found[key] = [*found.get(key, []), *read] if getattr(one, "multiple", False) else read
    first: dict[str, str] = {}
    for key in found:
        what = by_key[key].one_of
        if what and first.setdefault(what, key) != key:
            raise InputError(f"--set {first[what]} and --set {key} exclude each other: keep one")
    return [(by_key[key], value) for key, value in found.items()]


def _why_unknown(key: str, ctx: click.Context, root: Commands) -> str:
    """Why this verb has no such key, with what may have been meant."""
    known = _keys(root)
    if key in known:
        verbs = ", ".join(dict.fromkeys(verb for verb, _ in known[key]))
        return f"{ctx.command_path} has no such setting, only {verbs}"
    same = [name for name in known if name.partition(".")[2] == key]
    near = f"; did you mean {same[0]!r}?" if same else hint(key, known)
    return f"there is no such setting{near} (see {ctx.command_path} --help-all)"


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
    if _is_bool(param):
        if not isinstance(value, bool):
            raise InputError(f"{place} must be true or false, got {value!r}")
        return value
    if getattr(param, "multiple", False):
        return [_one(param, item, place) for item in (value if isinstance(value, list) else [value])]
    return _one(param, ",".join(map(str, value)) if isinstance(value, list) else value, place)


def _is_bool(param: Declared) -> bool:
    return param.type is click.BOOL or (isinstance(param, click.Option) and param.is_flag)


def _bool_in(text: str) -> bool | str:
    """The value that `true` or `false` stands for; any other text as it is."""
    return {"true": True, "false": False}.get(text, text)


def _one(param: Declared, value: Any, place: str) -> str:
    if isinstance(value, bool | dict | list):
        raise InputError(f"{place} must be a string or a number, got {value!r}")
    try:
        param.type.convert(str(value), param, None)
    except click.BadParameter as error:
        raise InputError(f"{place} {error.message}") from error
    return str(value)
