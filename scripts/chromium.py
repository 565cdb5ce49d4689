"""Install Debian's Chromium, if there is no Chromium yet, for the tests that open reports in a browser."""

import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
"""What the program is called, by distribution."""


def main() -> None:
    if any(map(shutil.which, NAMES)):
        return
    subprocess.run(["apt-get", "update", "--quiet"], check=True)
    subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", "chromium"], check=True)


if __name__ == "__main__":
    main()
