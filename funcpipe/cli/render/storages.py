"""The measurements of a storage, in a terminal."""

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table
from funcpipe.core import StorageReport
from funcpipe.core.texts import number_text


def storage_report(report: StorageReport, console: Console) -> None:
    """Latencies of small requests and bandwidths of large bodies."""
    requests = {"put": report.put, "get": report.get, "get of nothing": report.empty_get}
    print_table(
        console,
        f"{report.storage}: {report.requests} requests of each kind",
        (Column("request", text=True), Column("median ms"), Column("p95 ms")),
        [
            (name, number_text(times.median_s * 1e3, 2), number_text(times.p95_s * 1e3, 2))
            for name, times in requests.items()
        ],
    )
    together = f"{report.streams} streams MB/s"
    rows = [
        ("up", report.upload_bytes_s, report.upload_together_bytes_s),
        ("down", report.download_bytes_s, report.download_together_bytes_s),
    ]
    print_table(
        console,
        f"bodies of at most {report.body_bytes / 1e6:.0f} MB",
        (Column("direction", text=True), Column("one stream MB/s"), Column(together)),
        [(name, f"{one / 1e6:.0f}", f"{several / 1e6:.0f}") for name, one, several in rows],
    )
