import os
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import write
from funcpipe.errors import FormatError, InvalidValue
from funcpipe.platforms.catalog import load_spec, open_storage, spec_names


@pytest.mark.parametrize("name", spec_names())
def test_the_specifications_that_ship_can_be_read_and_say_where_they_come_from(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert spec.source
    assert spec.as_of


def test_local_functions_share_the_processors_of_this_machine() -> None:
    assert load_spec("local").shared_cores == len(os.sched_getaffinity(0))


def test_a_specification_of_one_s_own_is_read_from_its_file(tmp_path: Path) -> None:
    spec = replace(load_spec("aws-lambda"), name="mine", latency_s=0.5)
    write(spec, tmp_path / "mine.json")
    assert load_spec(str(tmp_path / "mine.json")) == spec


def test_an_unknown_platform_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidValue, match=r"must be one of aws-lambda.*local.*got 'azure'"):
        load_spec("azure")
    with pytest.raises(FormatError):
        load_spec(os.devnull)


@pytest.mark.parametrize("url", ["", "x", "file://", "file://host/folder", "s4://bucket", "s3://", "s3://b?region="])
def test_an_unknown_storage_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="must be a URL such as file:///"):
        open_storage(url)


def test_a_url_with_credentials_is_refused_without_showing_them() -> None:
    with pytest.raises(InvalidValue, match="must not hold credentials") as refused:
        open_storage("s3://me:secret@bucket/prefix")
    assert "secret" not in str(refused.value)


def test_a_storage_opens_by_its_url(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    open_storage(folder.as_uri()).put("k", b"1")
    assert (folder / "k").read_bytes() == b"1"
