"""A clock for tests of waiting."""

from dataclasses import dataclass, field


@dataclass
class Clock:
    """A clock that only pauses move."""

    now_s: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
