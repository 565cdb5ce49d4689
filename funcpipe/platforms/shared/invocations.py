"""Streams of logs that several invocations have written to, one after the other: which line is of which."""

from collections.abc import Callable, Iterable, Iterator

from funcpipe.core.logs import RawLine


def by_invocation(stream: str, events: Iterable[tuple[float, str]], begins: Callable[[str], bool]) -> Iterator[RawLine]:
    """Yield the lines of the `events` of one stream, moments with their texts in order.

    `begins` knows the text with which an invocation begins; what comes before the first, as the environment is made
    ready for it, is of the first.
    """
    number, has_begun = 0, False
    for time_s, text in events:
        if begins(text):
            number += has_begun
            has_begun = True
        for line in text.splitlines() or [""]:
            yield RawLine(function=f"{stream}/{number}", text=line, time_s=time_s)
