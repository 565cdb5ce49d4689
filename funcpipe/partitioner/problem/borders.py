"""Where stages may begin and end, and what follows from that for every plan.

By hand: 6 layers, cuts pinned before layers 2 and 4, at most 3 stages. The stage [0, 1) is admitted by itself, but a
plan with it has at least 4 stages; what remains are [0, 2), [2, 4) and [4, 6). No stage holds layers on both sides of
position 2, so every plan has a cut there: layers 1 and 2 lie in different *sections*.
"""

from collections.abc import Callable
from dataclasses import dataclass

_NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """The stages that plans of at most `most` stages can have.

    `stops[first]` are the positions where a stage that begins with layer `first` may end; `fewest_before[first]` is the
    least number of stages in front of it. Layers of different `section` are never in one stage.
    """

    most: int
    stops: tuple[tuple[int, ...], ...]
    fewest_before: tuple[int, ...]
    section: tuple[int, ...]

    @classmethod
    def of(cls, layers: int, *, most: int | None = None, admits: Callable[[int, int], bool] | None = None) -> "Borders":
        """The borders of stages that `admits` admits (None: all), in plans of any number of stages unless `most`."""
        most = layers if most is None else min(most, layers)
        stops = [
            [stop for stop in range(first + 1, layers + 1) if admits is None or admits(first, stop)]
            for first in range(layers)
        ]
        before, behind = [0] + [_NEVER] * layers, [_NEVER] * layers + [0]
        for first in range(layers):
            for stop in stops[first]:
                before[stop] = min(before[stop], before[first] + 1)
        for first in reversed(range(layers)):
            behind[first] = min((behind[stop] + 1 for stop in stops[first]), default=_NEVER)
        possible = [
            tuple(stop for stop in stops[first] if before[first] + 1 + behind[stop] <= most) for first in range(layers)
        ]
        section, furthest, number = [], 1, 0
        for layer in range(layers):
            if layer and furthest <= layer:
                number += 1
            furthest = max(furthest, *possible[layer], 0)
            section.append(number)
        return cls(most=most, stops=tuple(possible), fewest_before=tuple(before), section=tuple(section))

    def most_behind(self, first: int) -> int:
        """How many stages there may be from layer `first` on."""
        return self.most - self.fewest_before[first]
