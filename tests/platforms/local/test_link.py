from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.errors import InvalidValue
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.throttle import Link, Throttled, link_of, read_link
from tests.platforms.local.test_limits import spec

rates = st.floats(1, 1e12)


@given(
    link=st.builds(Link, latency_s=st.floats(0, 10), upload_bytes_s=rates, download_bytes_s=rates)
    | st.builds(
        Link,
        latency_s=st.floats(0, 10),
        upload_bytes_s=rates,
        download_bytes_s=rates,
        shared_bytes_s=rates,
        shared=st.text(min_size=1),
    ),
    url=st.sampled_from(["file:///tmp/a%20folder", "s3://bucket/prefix?endpoint=http://h:1&region=r"]),
)
def test_a_link_is_read_back_from_the_url_and_replaces_the_one_there_was(link: Link, url: str) -> None:
    there, _, fragment = link.on(url).partition("#")
    assert there == url
    assert read_link(fragment) == link
    other = Link(latency_s=0, upload_bytes_s=1, download_bytes_s=1)
    assert link.on(other.on(url)) == link.on(url)


def test_a_storage_opens_through_its_link(tmp_path: Path) -> None:
    link = Link(latency_s=0, upload_bytes_s=1e9, download_bytes_s=1e9, shared_bytes_s=1e9, shared=str(tmp_path))
    store = open_storage(link.on((tmp_path / "objects").as_uri()))
    assert isinstance(store, Throttled)
    store.put("k", b"12345678")
    assert store.get("k") == b"12345678"
    assert {path.name for path in tmp_path.iterdir()} == {"objects", "upload", "download"}


def test_functions_share_the_platform_s_cap() -> None:
    assert link_of(spec(), spec().sizes[0], "/f").shared is None
    capped = link_of(spec(shared_bytes_s=1e8), spec().sizes[0], "/f")
    assert (capped.shared_bytes_s, capped.shared) == (1e8, "/f")


@pytest.mark.parametrize(
    "fragment", ["x", "latency_s=1", "latency_s=a&upload_bytes_s=1&download_bytes_s=1", "shared=1"]
)
def test_a_fragment_that_tells_no_link_is_refused(fragment: str) -> None:
    with pytest.raises(InvalidValue, match="must read latency_s="):
        read_link(fragment)
