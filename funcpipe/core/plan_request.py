"""The request that a plan answers: the profile, the platform, and decisions of the user."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core.platform import PlatformSpec
from funcpipe.core.profile import ModelProfile
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Decisions that a plan must follow; layers are named as in the model's graph.

    A stage begins with each layer of `cuts`; the layers of one group of `together`, and all between them, share a
    stage. `sizes` fixes by layer the function size of the stage that holds it. Every function has `memory_mb`, if that
    is given, and no more than `max_memory_mb`; at most `max_functions` run at once; `replicas` are the degrees of data
    parallelism to choose from. Where the training names degrees too, a degree must be among both.
    """

    FORMAT: ClassVar[str] = "funcpipe.pins/1"

    cuts: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict, hash=False)
    memory_mb: int | None = None
    max_memory_mb: int | None = None
    max_functions: int | None = None
    replicas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("memory_mb", "max_memory_mb", "max_functions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(name, value, "must be at least 1")
        for i, degree in enumerate(self.replicas or ()):
            if degree < 1:
                raise InvalidValue(f"replicas[{i}]", degree, "must be at least 1")


NO_PINS = Pins()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The request that a plan answers: with it, the plan can be found and judged again."""

    profile: ModelProfile
    spec: PlatformSpec
    pins: Pins = NO_PINS
