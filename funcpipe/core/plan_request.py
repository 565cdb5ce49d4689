"""What a plan is made from: a profile, a platform, and decisions that it must follow (Pins)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.platform import PlatformSpec
from funcpipe.core.profile import ModelProfile


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
        checks.all_at_least(self, 1, "memory_mb", "max_memory_mb", "max_functions")
        for i, degree in enumerate(self.replicas or ()):
            checks.at_least(f"replicas[{i}]", degree, 1)


NO_PINS = Pins()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The request that a plan answers: with it, the plan can be found and judged again."""

    profile: ModelProfile
    spec: PlatformSpec
    pins: Pins = NO_PINS
