"""Frozen dataclasses to JSON and back, with errors that name the file and the field.

The JSON form follows from the dataclass: field names are keys, tuples are arrays, enums are their values; a field
marked `IF_CHANGED` is left out while it has its default. JSON has no NaN and no infinities: such a float, as the loss
of a model that diverges, becomes its name, a string. A class that can be a whole document names its format and version
in `FORMAT`.
"""

import dataclasses
import difflib
import functools
import json
import math
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from funcpipe.errors import FormatError, InvalidValue


class Document(Protocol):
    """A dataclass that can be a whole JSON document."""

    FORMAT: ClassVar[str]


D = TypeVar("D", bound=Document)

IF_CHANGED: Mapping[str, bool] = {"written only if changed": True}
"""The metadata of a field that is only written if it differs from its default, so that older versions read the rest."""

OBSERVED = "observed_here"
"""What a command prints with `--json` beside the fields of a prediction: what earlier runs took here."""


def to_text(value: Document, *, indent: int | None = 1) -> str:
    """Return the JSON document of `value`, its format first; in one line if `indent` is None, which is much faster."""
    return json.dumps({"format": value.FORMAT, **to_plain(value)}, indent=indent, allow_nan=False) + "\n"


def from_text(kind: type[D], text: str | bytes, *, source: str) -> D:
    """Read a document of `kind`; every FormatError begins with `source`, a file name."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f"{source}: expected a JSON object, got {_shape(data)}")
    check_format(data.get("format"), kind.FORMAT, source)
    fields = {key: item for key, item in data.items() if key not in ("format", OBSERVED)}
    return typing.cast(D, from_plain(kind, fields, source=source))


def write(value: Document, path: str | Path) -> None:
    """Write the document of `value` to `path`, replacing an existing file."""
    Path(path).write_text(to_text(value), encoding="utf-8")


def read(kind: type[D], path: str | Path) -> D:
    """Read a document of `kind` from the file `path`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FormatError(f"{path}: cannot be read: there is no such file{_writer(kind.FORMAT)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return from_text(kind, text, source=str(path))


def to_plain(value: Any) -> Any:
    """Return `value` as dict, list, str, int, finite float, bool and None."""
    if type(value) in (str, int, bool, type(None)):
        return value  # as most values are
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(item) for name, item in _written(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, data: Any, *, source: str, field: str = "") -> Any:
    """Invert `to_plain`: return `data` as a value of type `kind`, found in `field` of `source`."""
    read, of = _reader(kind)
    return read(of, data, source, field)


@functools.cache
def _reader(kind: Any) -> tuple[Callable[[Any, Any, str, str], Any], Any]:
    """Return the function that reads values of type `kind`, and what of the type it has to know."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _from_union, typing.get_args(kind)
    if origin is tuple:
        return _from_array, typing.get_args(kind)[0]
    if origin is Mapping:
        return _from_mapping, typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _from_object, kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _from_choice, kind
    return _from_number if kind is float else _expect, kind


def _from_array(kind: Any, data: Any, source: str, field: str) -> tuple[Any, ...]:
    read, of = _reader(kind)
    return tuple(read(of, item, source, f"{field}[{i}]") for i, item in enumerate(_expect(list, data, source, field)))


def _from_mapping(kinds: Any, data: Any, source: str, field: str) -> dict[Any, Any]:
    key_kind, (read, of) = kinds[0], _reader(kinds[1])
    return {
        _key(key_kind, key, source, field): read(of, item, source, f"{field}.{key}")
        for key, item in _expect(dict, data, source, field).items()
    }


def _written(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass that are written, with their values."""
    kind: type = type(value)
    for name, default in _field_defaults(kind):
        item = getattr(value, name)
        if item != default:
            yield name, item


@functools.cache
def _field_defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the fields, with the value at which each is left out: its default, or one that equals nothing."""
    return tuple(
        (field.name, field.default if field.metadata == IF_CHANGED else dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    )


@functools.cache
def _field_readers(kind: type) -> Mapping[str, tuple[Callable[[Any, Any, str, str], Any], Any, bool]]:
    """Return how each field is read, as `_reader` does, and whether it has no default."""
    kinds, missing = typing.get_type_hints(kind), dataclasses.MISSING
    needed = {field.name: field.default is field.default_factory is missing for field in dataclasses.fields(kind)}
    return {name: (*_reader(kinds[name]), need) for name, need in needed.items()}


def _from_object(kind: type, data: Any, source: str, field: str) -> Any:
    entries = _expect(dict, data, source, field)
    fields, values = _field_readers(kind), {}
    for key in entries.keys() - fields.keys():
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(f"{source}: unknown field {_join(field, key)!r} is ignored{hint}", stacklevel=2)
    for name, (read, of, needed) in fields.items():
        if name in entries:
            values[name] = read(of, entries[name], source, _join(field, name))
        elif needed:
            raise FormatError(f"{source}: field {_join(field, name)!r} is missing")
    try:
        return kind(**values)
    except InvalidValue as error:
        place = _join(field, error.field)
        raise FormatError(f"{source}: field {place!r} {error.rule}, got {error.value!r}") from error


def _from_union(choices: Any, data: Any, source: str, field: str) -> Any:
    if data is None and type(None) in choices:
        return None
    kinds = [choice for choice in choices if choice is not type(None)]
    if len(kinds) == 1:
        return from_plain(kinds[0], data, source=source, field=field)
    if type(data) not in kinds:
        raise FormatError(
            f"{source}: field {field!r} must be {' or '.join(_NAMES[kind] for kind in kinds)}, got {_shape(data)}"
        )
    return data


def _from_choice(kind: type[Enum], data: Any, source: str, field: str) -> Enum:
    try:
        return kind(data)
    except ValueError:
        choices = ", ".join(repr(choice.value) for choice in kind)
        raise FormatError(f"{source}: field {field!r} must be one of {choices}, got {data!r}") from None


def _from_number(_: type, data: Any, source: str, field: str) -> float:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if abs(data) <= sys.float_info.max if is_number else data in _NOT_FINITE:
        return float(data)
    raise FormatError(f"{source}: field {field!r} must be a finite number, got {_shape(data)}")


def _key(kind: Any, text: str, source: str, field: str) -> Any:
    """Return a key of an object, which JSON writes as text."""
    if kind is not int:
        return text
    if not text.removeprefix("-").isdecimal():
        raise FormatError(f"{source}: the keys of field {field!r} must be integers, got {text!r}")
    return int(text)


def _expect(kind: type, data: Any, source: str, field: str) -> Any:
    if type(data) is not kind:
        place = f"field {field!r}" if field else "the document"
        raise FormatError(f"{source}: {place} must be {_NAMES[kind]}, got {_shape(data)}")
    return data


_NOT_FINITE = ("nan", "inf", "-inf")

_NAMES = {list: "an array", dict: "an object", int: "an integer", str: "a string", bool: "true or false"}


def _shape(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def check_format(found: Any, expected: str, source: str) -> None:
    """Raise FormatError unless the field `format` of the document in `source` is `expected`."""
    if found == expected:
        return
    if found is None:
        raise FormatError(f"{source}: field 'format' is missing; expected {expected!r}{_writer(expected)}")
    family, _, version = expected.partition("/")
    if isinstance(found, str) and found.startswith(family + "/"):
        raise FormatError(
            f"{source}: field 'format' is {found!r}, but this funcpipe reads version {version} ({expected!r}); "
            "write the file again with this version, or use the version that wrote it"
        )
    raise FormatError(f"{source}: field 'format' is {found!r}, expected {expected!r}{_writer(expected)}")


_WRITERS = {
    "funcpipe.profile": "a profile is written by `funcpipe profile`",
    "funcpipe.plan": "a plan is written by `funcpipe optimize`",
    "funcpipe.platform": "a platform's specification is written by `funcpipe platforms show NAME --json`",
    "funcpipe.trace": "a trace is written by `funcpipe simulate --trace` and `funcpipe train --trace`",
}


def _writer(expected: str) -> str:
    """Return the name of the program that writes documents of this format, if users have such."""
    return f"; {writer}" if (writer := _WRITERS.get(expected.partition("/")[0])) else ""
