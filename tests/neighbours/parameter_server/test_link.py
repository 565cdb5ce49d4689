import threading

import pytest

from funcpipe.neighbours.parameter_server.ray_group import SharedLink


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("link", "own", "seconds"),
    [(10.0, None, 8.0), (None, 20.0, 4.0), (10.0, 20.0, 8.0), (40.0, 20.0, 4.0), (None, None, 0.0)],
)
def test_a_transfer_takes_what_the_narrower_end_allows(link: float | None, own: float | None, seconds: float) -> None:
    clock = Clock()
    SharedLink(link, clock=clock, sleep=clock.sleep).transfer(80, own)
    assert clock() - 100.0 == pytest.approx(seconds)


def test_transfers_at_once_share_the_link() -> None:
    """By a clock that stands still, so that it does not matter when threads run: all pieces pass one after another."""
    slept: list[float] = []
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    link = SharedLink(10.0, clock=lambda: 0.0, sleep=sleep)
    threads = [threading.Thread(target=link.transfer, args=(80,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(slept) == pytest.approx(24.0)
