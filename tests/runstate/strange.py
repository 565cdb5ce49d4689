"""Objects of others that lie below the name of a run, and beside it."""

from funcpipe.core import WATCH_PREFIX

RUN = "run-1"

BELOW = (
    *("2024/images.bin", "run.json", "finished.json", "stage/s0.bundle", "checkpoints/s0/00000004.s0.r0.json"),
    *("generations", "generations/README", "generations/0000.txt", "generations/0000-xyz", "generations/0000/a"),
    *("owner", "owner/me", "owner/leases/mine", "owner/leases/00000001", "owner/heartbeats/00000000.zz"),
    *("server", "server/data/images.bin", "server/checkpoints/best.pt", "server/work/f0/0000/00000000"),
    *("gold/run.json", "g1/run.json", "g00001/run.json", "g0000-xyz/run.json", "leases/s0.r0/00000000"),
    *("layers/0.bundle", "0", "generations/0000 ", "g0000/", "g0000-ab/notes.txt", "g0000-ab/leases/x", "ä/ö"),
)
"""Names that no run writes, some of which come close."""

BESIDE = (
    f"{RUN}-2/generations/0000",
    f"{RUN}0/run.json",
    f"{RUN}",
    "other/x",
    f"{WATCH_PREFIX}{RUN}/notes",
    f"{WATCH_PREFIX}x/g0000",
)


def strange(run: str = RUN) -> dict[str, bytes]:
    """Objects of others: each has bytes of its own."""
    keys = [*(f"{run}/{name}" for name in BELOW), *BESIDE]
    return {key: f"of others: {number}".encode() for number, key in enumerate(keys)}
