"""What a build makes of an archive: files with the modes that the archive gives them, and who can read them.

After docs.aws.amazon.com/lambda/latest/dg/images-create.html, 2026-11: a function runs as a user with few rights, who
must be able to read all of its files. The RUN lines of a Dockerfile are not run.
"""

import io
import stat
import zipfile
from pathlib import Path


def unpack(archive: bytes, folder: Path) -> None:
    """What COPY takes from an unpacked archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for entry in opened.infolist():
            Path(opened.extract(entry, folder)).chmod(stat.S_IMODE(entry.external_attr >> 16))


def unreadable(folder: Path) -> Path | None:
    """A file or folder that a user cannot read who neither owns it nor is root; None if there is none.

    What functions write beside their code, and replace at any moment, is not of the image.
    """
    for path in folder.rglob("*"):
        if "__pycache__" in path.parts:
            continue
        needed = 0o005 if path.is_dir() else 0o004
        if path.stat().st_mode & needed != needed:
            return path
    return None
