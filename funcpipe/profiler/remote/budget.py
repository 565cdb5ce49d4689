"""How long functions that measure may take: within their lifetime, and within what may be spent."""

from collections.abc import Sequence

from funcpipe.core import FunctionSize, PlatformSpec
from funcpipe.errors import InputError

_LIFE_SHARE = 0.8  # of what a function has, the rest is for its start and its last layer


class Budget:
    """Dollars that may be spent on functions of a platform; None for any number."""

    def __init__(self, spec: PlatformSpec, max_usd: float | None) -> None:
        self._spec = spec
        self._max_usd = max_usd
        self.spent_usd = 0.0

    def longest_s(self, sizes: Sequence[FunctionSize]) -> float:
        """How long functions of these sizes may run, from their invocation; raises InputError when that is too short.

        All that is spent stays within the budget if those that run longer are stopped.
        """
        life_s = float("inf") if self._spec.lifetime_s is None else self._spec.lifetime_s
        longest_s = life_s + self._spec.cold_start_s
        if self._max_usd is not None:
            left_usd = self._max_usd - self.spent_usd - len(sizes) * self._spec.price_invocation_usd
            longest_s = min(longest_s, left_usd / max(sum(size.price_usd_s for size in sizes), 1e-12))
        if self.working_s(longest_s) < 1:
            raise InputError(
                f"${self._max_usd:g} are too little: ${self.spent_usd:.6f} are spent, and {len(sizes)} functions of "
                f"{self._spec.name} more could not work for a second; allow more, or fewer sizes"
            )
        return longest_s

    def working_s(self, longest_s: float) -> float:
        """Of that time, how much a function is to use before it begins nothing new."""
        return min((longest_s - self._spec.cold_start_s) * _LIFE_SHARE, 1e6)

    def spend(self, size: FunctionSize, seconds: float) -> None:
        """Note that a function of this size ran so long."""
        self.spent_usd += self._spec.price_invocation_usd + seconds * size.price_usd_s
