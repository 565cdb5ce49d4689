"""The commands for a run that goes on, or was stopped, without the one that started it."""

import shlex


def commands(run: str, storage: str | None, *, watch: str = "watch it") -> tuple[str, ...]:
    """For a run whose objects lie in `storage`, the commands to watch or resume it, show it, stop it, delete it."""
    where = f"{shlex.quote(run)} --storage {shlex.quote(storage or 'URL')}"
    return (
        f"  {watch + ':':<11} funcpipe train ... --resume {where}",
        f"  {'status:':<11} funcpipe status {where}",
        f"  {'stop it:':<11} funcpipe stop {where}",
        f"  {'delete it:':<11} funcpipe clean {where}",
    )
