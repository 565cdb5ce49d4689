"""A command as it is sent."""

from collections.abc import Iterator

_LARGE_BYTES = 64 * 1024
_BLOCK_BYTES = 1024 * 1024  # sent by one call, so that the timeout is one of silence and not of the whole object


def blocks(*words: str | bytes | memoryview) -> Iterator[bytes | memoryview]:
    """Yield a command as what is to be sent in turn; large words are not copied, as they are by hiredis."""
    head = b"*%d\r\n" % len(words)
    for word in words:
        body = word.encode() if isinstance(word, str) else word
        head += b"$%d\r\n" % len(body)
        if len(body) < _LARGE_BYTES:
            head += bytes(body) + b"\r\n"
            continue
        yield head
        yield from (body[start : start + _BLOCK_BYTES] for start in range(0, len(body), _BLOCK_BYTES))
        head = b"\r\n"
    yield head
