"""The measured speed of a storage."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Seconds of the requests of one kind with a body of one byte: their median and 95th percentile."""

    median_s: float
    p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """The measurements of one process at the storage URL `storage`: `requests` of each kind, and bandwidths.

    Bandwidths are those of one stream, and of `streams` at once together, from bodies of up to `body_bytes` each.
    """

    FORMAT: ClassVar[str] = "funcpipe.storage/1"

    storage: str
    requests: int
    put: RequestTimes
    get: RequestTimes
    empty_get: RequestTimes
    streams: int
    body_bytes: int
    upload_bytes_s: float
    download_bytes_s: float
    upload_together_bytes_s: float
    download_together_bytes_s: float
