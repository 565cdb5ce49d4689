"""The kind of a document."""

import json
from pathlib import Path

from funcpipe.errors import FormatError


def document_format(path: str) -> str | None:
    """The format that a JSON file names; None if it names none. Raises FormatError if it cannot be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    form = data.get("format") if isinstance(data, dict) else None
    return form if isinstance(form, str) else None
