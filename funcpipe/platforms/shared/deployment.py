"""Buckets with data that functions may read, besides the bucket of their deployment."""

import re
from dataclasses import dataclass

from funcpipe.errors import InvalidValue

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9!_.'()/=-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBucket:
    """Data that functions may read: the objects of bucket `name` below `prefix`, or all if there is none."""

    name: str
    prefix: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidValue("data bucket", self.name, "must be a bucket's name, with or without /PREFIX behind it")
        if not _PREFIX.fullmatch(self.prefix):  # in policies, * and ? stand for other letters, and $ for variables
            raise InvalidValue("prefix of a data bucket", self.prefix, "must be letters, digits and !_.'()/=-")

    @property
    def objects(self) -> str:
        """The objects, as policies name them behind what is in front of a bucket's name."""
        return f"{self.name}/{self.below}"

    @property
    def below(self) -> str:
        """The keys, as a pattern of policies."""
        return f"{self.prefix}/*" if self.prefix else "*"


def data_bucket(text: str) -> DataBucket:
    """The one that is written as NAME or NAME/PREFIX, such as on a command line; `s3://` or `oss://` may precede it."""
    name, _, prefix = text.removeprefix("s3://").removeprefix("oss://").partition("/")
    return DataBucket(name=name, prefix=prefix.strip("/"))
