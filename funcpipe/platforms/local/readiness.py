"""How functions of a host start: each way is tried a few times, then the one that takes least is taken.

A function is forked from the host, which has torch and our modules, or from the template of its stage. A template is
made once it may pay: when a function of the stage is ready that will hand over, or when it is not the first one. So it
is loaded while nothing waits for it. As Pronghorn does with snapshots (Kohli et al., EuroSys 2024), what starts take is
measured, and decides.
"""

import asyncio
import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from funcpipe.core.start import Readiness, StartTimes
from funcpipe.platforms.local.template import Template

TRIES = 2
"""So many starts of each readiness are measured before the better one is taken."""

_KEPT = 8
_MOST_TEMPLATES = 8
_CHUNK = 4096


class StartChooser:
    """Chooses the readiness of the next start by what those before took: first the one that was tried least."""

    def __init__(self) -> None:
        self._begun: dict[Readiness, int] = defaultdict(int)
        self._seconds: dict[Readiness, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def choose(self, offered: Collection[Readiness]) -> Readiness:
        """Return one of those `offered`, the least ready first; of equals the readier one."""
        fewest = min(offered, key=lambda one: (self._begun[one], -list(Readiness).index(one)))
        chosen = fewest if self._begun[fewest] < TRIES else min(offered, key=self.expected_s)
        self._begun[chosen] += 1
        return chosen

    def record(self, readiness: Readiness, seconds: float) -> None:
        """Record what a start took."""
        self._seconds[readiness].append(seconds)

    def expected_s(self, readiness: Readiness) -> float:
        """Return the median of the last starts; infinity before the first."""
        return median(self._seconds[readiness] or [float("inf")])


@dataclass(eq=False)
class _Stage:
    """The starts of functions with the code of one digest."""

    chooser: StartChooser = field(default_factory=StartChooser)
    template: Template | None = None
    has_template: bool = False
    begun: int = 0


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start that has begun: from the `template`, if there is one; the function `says` when it is ready."""

    template: Template | None
    says: int


class Starts:
    """The starts of all functions of a host, by the code of their stages."""

    def __init__(self, make: Callable[[str], Template]) -> None:
        """`make` begins a template for functions such as the one of a payload."""
        self._make = make
        self._stages: dict[str, _Stage] = {}

    def begin(self, payload: str) -> Start | None:
        """Begin a start; None for a function that has no stage, such as a watchdog."""
        invocation = json.loads(payload)
        if "parameters" not in invocation:
            return None
        stage = self._stages.setdefault(invocation["bundle_sha256"], _Stage())
        stage.begun += 1
        offered = [Readiness.IMPORTED]
        if stage.template is not None and stage.template.is_ready:
            offered.append(Readiness.TEMPLATE)
        chosen = stage.chooser.choose(offered)
        told, says = os.pipe()
        asyncio.get_running_loop().add_reader(told, self._told, told, stage, payload)
        return Start(template=stage.template if chosen is Readiness.TEMPLATE else None, says=says)

    def lost(self, pid: int) -> bool:
        """Do without the template that was the process `pid`; returns False if that was none."""
        for stage in self._stages.values():
            if stage.template is not None and stage.template.pid == pid:
                self._end(stage)
                return True
        return False

    def close(self) -> None:
        """End all templates."""
        for stage in self._stages.values():
            self._end(stage)

    def _told(self, told: int, stage: _Stage, payload: str) -> None:
        """A function is ready, or has ended before."""
        asyncio.get_running_loop().remove_reader(told)
        data = os.read(told, _CHUNK)
        os.close(told)
        if not data:
            return
        found = json.loads(data)
        stage.chooser.record(Readiness(found["readiness"]), found["seconds"])
        hands_over = json.loads(payload)["faults"]["lifetime_s"] is not None
        if not stage.has_template and (stage.begun > 1 or hands_over):
            self._begin_template(stage, payload)

    def _begin_template(self, stage: _Stage, payload: str) -> None:
        having = [other for other in self._stages.values() if other.template is not None]
        if len(having) >= _MOST_TEMPLATES:
            self._end(having[0])
        stage.has_template = True
        with suppress(OSError):  # there are too many processes: functions start without it
            stage.template = template = self._make(payload)
            asyncio.get_running_loop().add_reader(template.connection.fileno(), self._loaded, stage, template)

    def _loaded(self, stage: _Stage, template: Template) -> None:
        asyncio.get_running_loop().remove_reader(template.connection.fileno())
        if not template.heard() and stage.template is template:
            self._end(stage)

    def _end(self, stage: _Stage) -> None:
        template, stage.template = stage.template, None
        if template is not None:
            asyncio.get_running_loop().remove_reader(template.connection.fileno())
            template.end()


def tell(says: int) -> Callable[[StartTimes], None]:
    """Return what tells the host, in a function, that it is ready."""

    def ready(times: StartTimes) -> None:
        told: dict[str, Any] = {"readiness": times.readiness.value, "seconds": times.seconds}
        with suppress(OSError):  # the host has ended, and ends this function
            os.write(says, json.dumps(told).encode())
            os.close(says)

    return ready
