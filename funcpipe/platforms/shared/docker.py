"""Images built and pushed by the user's docker."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.shared.package import MOST_IMAGE_BYTES, Package


class Docker:
    """The program `docker`, or one that understands the same arguments."""

    def __init__(self, program: str = "docker") -> None:
        self.program = program

    def runs(self) -> bool:
        """Return True if it is installed and has its daemon."""
        try:
            return subprocess.run([self.program, "version"], capture_output=True).returncode == 0
        except OSError:
            return False

    def build(self, package: Package, image: str) -> None:
        """Make `image` from `package`; raises PlatformRefused if it is larger than clouds admit."""
        with tempfile.TemporaryDirectory(prefix="funcpipe-image-") as folder:
            package.write(Path(folder))
            self._do("build", "--platform", "linux/amd64", "--provenance=false", "--tag", image, folder)  # no index
        size = int(self._do("image", "inspect", "--format", "{{.Size}}", image))
        if size > MOST_IMAGE_BYTES:
            raise PlatformRefused(
                f"the image has {size / 1e9:.1f} GB, functions admit {MOST_IMAGE_BYTES / 1e9:.1f} GB unpacked; "
                "take packages out of --requirements"
            )

    def login(self, registry: str, *, user: str, password: str) -> None:
        """Log in to a registry; the password is not among the arguments."""
        self._do("login", "--username", user, "--password-stdin", registry, standard_input=password)

    def push(self, image: str) -> None:
        """Send `image` to its registry."""
        self._do("push", image)

    def has_pushed(self, image: str) -> bool:
        """Return True if the registry has `image`."""
        return subprocess.run([self.program, "manifest", "inspect", image], capture_output=True).returncode == 0

    def _do(self, *arguments: str, standard_input: str = "") -> str:
        command: Sequence[str] = (self.program, *arguments)
        done = subprocess.run(command, input=standard_input, capture_output=True, text=True)
        if done.returncode:
            raise PlatformError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-2000:]}")
        return done.stdout
