"""The job file funcpipe.toml: options for all verbs, in one place.

Its tables are `model`, `data`, `platform`, `plan` and `training`. A key is the name of an option, such as
`global-batch`, or one of `_PLACES`; a value is read as on the command line, by the option's own type. Options on the
command line win. In a folder with a job file the profile is profile.json and the plan is plan.json, unless it says
otherwise, so that `funcpipe profile`, `funcpipe optimize` and `funcpipe train` need no options.
"""

import argparse
import difflib
import itertools
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcpipe.cli.options import Verb
from funcpipe.errors import InputError

NAME = "funcpipe.toml"

_PLANNING = ("profile", "optimize", "provision")
_TRAINING = ("train", "verify")
_EVALUATION = ("evaluate", "predict")
_OF_RUNS = ("status", "watch", "stop", "clean", "export", "key")

_PLACES: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "model": {
        "factory": tuple((verb, "model") for verb in ("profile", *_TRAINING, *_EVALUATION)),
        "block": tuple((verb, "blocks") for verb in ("profile", *_TRAINING, *_EVALUATION)),
        "teacher": tuple((verb, "teachers") for verb in ("profile", *_TRAINING)),
        "profile": (("profile", "output"), *((verb, "profile") for verb in _PLANNING[1:])),
    },
    "data": {
        "train": tuple((verb, "data") for verb in _TRAINING),
        "validation": (("train", "validation_data"), ("evaluate", "data")),
    },
    "platform": {
        "name": tuple((verb, "platform") for verb in _PLANNING),
        "spec": tuple((verb, "spec") for verb in (*_PLANNING, "train", *_EVALUATION)),
        "profile-on": (("profile", "on"),),
        "run-on": tuple((verb, "platform") for verb in ("train", *_EVALUATION)),
        "like": tuple((verb, "like") for verb in ("train", *_EVALUATION)),
        "storage": tuple((verb, "storage") for verb in ("train", *_EVALUATION, *_OF_RUNS, "logs")),
        "cloud": (("deploy", "cloud"), ("destroy", "cloud")),
        "deployment": (("deploy", "name"), ("destroy", "name"), ("logs", "name")),
        "region": (("deploy", "region"), ("destroy", "region"), ("logs", "region")),
        "requirements": (("deploy", "requirements"),),
        "repository": (("deploy", "repository"),),
    },
    "plan": {
        "file": (
            *(("optimize", "output"), ("explain", "plan"), ("simulate", "plan")),
            *((verb, "plan") for verb in (*_TRAINING, *_EVALUATION, "deploy")),
        )
    },
    "training": {
        "run": (("train", "run_name"), *((verb, "name") for verb in _OF_RUNS), ("logs", "about")),
        "output": (("train", "output"),),
        "loss": tuple((verb, "loss") for verb in (*_TRAINING, "evaluate")),
        "metric": (("train", "metrics"), ("evaluate", "metrics")),
    },
}
"""Keys that are not the name of one option, and the argument of each verb that they set."""

_OPTIONS = {"model": ("profile",), "plan": ("optimize",), "training": _TRAINING}
"""The verbs whose other options a table takes by their names."""

_DEFAULTS = {("model", "profile"): "profile.json", ("plan", "file"): "plan.json"}
_NOT_HERE = {
    "help",
    "json",
    "verbose",
    "quiet",
    "job",
    "what_if",
    "pareto",
    "figure",
    "trace",
    "take_over",
    "from_start",
    "dry_run",
    "yes",
}
"""Options of one command, which a job file cannot have."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value of the file for one argument of a verb, and the key that gave it."""

    action: argparse.Action
    value: Any
    key: str


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse `arguments` together with the job file. Raises InputError for a file that cannot be used."""
    verbs = verbs_of(parser)
    verb = arguments[0] if arguments else ""
    path = _path_of(arguments)
    if verb not in verbs or path is None:
        return parser.parse_args(arguments)
    found = _values(verbs, _read(path), path)[verb]
    given = _given_in_shell(verbs[verb], arguments[1:])
    for exclusive in verbs[verb]._mutually_exclusive_groups:
        group = {action.dest for action in exclusive._group_actions}
        keys = [found[name].key for name in found if name in group]
        if not group & given and len(keys) > 1:
            raise InputError(f"{path}: {' and '.join(keys)} exclude each other: keep one")
        given |= group if group & given else set()
    for name in found.keys() - given:
        _set_default(found[name])
    return parser.parse_args(arguments)


def verbs_of(parser: argparse.ArgumentParser) -> Mapping[str, Verb]:
    """The parser of each verb."""
    (action,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    verbs: Mapping[str, Verb] = action.choices
    return verbs


def _path_of(arguments: Sequence[str]) -> str | None:
    """The file that `--job` names, or the one of the current folder."""
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        if word == "--job" and following is not None:
            return following
        if word.startswith("--job="):
            return word.removeprefix("--job=")
    return NAME if os.path.exists(NAME) else None


def _read(path: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    for name, table in tables.items():
        if name not in _PLACES:
            raise InputError(f"{path}: unknown table [{name}]{_hint(name, _PLACES)}; there are {', '.join(_PLACES)}")
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name} must be a table, [{name}], got {table!r}")
    return tables


def _values(
    verbs: Mapping[str, argparse.ArgumentParser], tables: Mapping[str, Mapping[str, Any]], path: str
) -> Mapping[str, dict[str, _Given]]:
    """The arguments that the file sets, by verb. All are checked, whichever verb was called."""
    found: dict[str, dict[str, _Given]] = {verb: {} for verb in verbs}
    for (table, key), value in _DEFAULTS.items():
        for verb, action in _actions(verbs, table)[key]:
            found[verb][action.dest] = _Given(action, value, f"{table}.{key}")
    for table, entries in tables.items():
        known = _actions(verbs, table)
        for written, value in entries.items():
            key = written.replace("_", "-")
            if key not in known:
                raise InputError(f"{path}: unknown key {written!r} in [{table}]{_hint(key, known)}")
            for verb, action in known[key]:
                name = f"{table}.{key}"
                found[verb][action.dest] = _Given(action, _converted(action, value, f"{path}: {name}"), name)
    return found


def _actions(
    verbs: Mapping[str, argparse.ArgumentParser], table: str
) -> Mapping[str, list[tuple[str, argparse.Action]]]:
    """The keys of a table, and the arguments of verbs that each sets."""
    places = _PLACES[table]
    known = {key: [(verb, _argument(verbs[verb], dest)) for verb, dest in where] for key, where in places.items()}
    taken = {where for table in _PLACES.values() for places in table.values() for where in places}
    for verb in _OPTIONS.get(table, ()):
        for action in verbs[verb]._actions:
            if action.option_strings and action.dest not in _NOT_HERE and (verb, action.dest) not in taken:
                known.setdefault(action.option_strings[-1].removeprefix("--"), []).append((verb, action))
    return known


def _argument(verb: argparse.ArgumentParser, dest: str) -> argparse.Action:
    (action,) = [action for action in verb._actions if action.dest == dest]
    return action


def _converted(action: argparse.Action, value: Any, place: str) -> Any:
    """`value` as the command line would have read it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{place} must be true or false, got {value!r}")
        return value
    if isinstance(action, argparse._AppendAction):
        return [_one(action, item, place) for item in (value if isinstance(value, list) else [value])]
    return _one(action, ",".join(map(str, value)) if isinstance(value, list) else value, place)


def _one(action: argparse.Action, value: Any, place: str) -> Any:
    if isinstance(value, bool | dict | list):
        raise InputError(f"{place} must be a string or a number, got {value!r}")
    try:
        read = str(value) if not callable(action.type) else action.type(str(value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"{place} {error}") from error
    if action.choices is not None and read not in action.choices:
        raise InputError(f"{place} must be one of {', '.join(map(repr, action.choices))}, got {value!r}")
    return read


def _given_in_shell(verb: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """The arguments that the command line gives: those that do not keep the None that they begin with."""
    actions = list(_without_help(verb._actions))
    before = [(action.required, action.nargs) for action in actions]
    for action in actions:
        _may_be_left_out(action)
    namespace = argparse.Namespace(**{action.dest: None for action in actions})
    verb.parse_args(words, namespace)
    for action, (required, nargs) in zip(actions, before, strict=True):
        action.required, action.nargs = required, nargs
        default = action.default if not action.option_strings else None
        if getattr(namespace, action.dest) is default:
            setattr(namespace, action.dest, None)
    return {action.dest for action in actions if getattr(namespace, action.dest) is not None}


def _without_help(actions: Iterable[argparse.Action]) -> Iterator[argparse.Action]:
    return (action for action in actions if not isinstance(action, argparse._HelpAction))


def _set_default(given: _Given) -> None:
    given.action.default = given.value
    _may_be_left_out(given.action)


def _may_be_left_out(action: argparse.Action) -> None:
    action.required = False
    if not action.option_strings:
        action.nargs = argparse.OPTIONAL


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
