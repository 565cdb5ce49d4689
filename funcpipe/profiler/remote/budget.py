"""The time that probe functions may run: within their lifetime, and within a budget of dollars."""

from collections.abc import Sequence

from funcpipe.core import FunctionSize, PlatformSpec
from funcpipe.core.texts import usd_text
from funcpipe.errors import InputError

_LIFETIME_SHARE = 0.8  # of a function's lifetime; the rest is for its start and its last layer


class Budget:
    """The dollars to spend on functions of a platform; None for no limit."""

    def __init__(self, spec: PlatformSpec, max_usd: float | None) -> None:
        self._spec = spec
        self._max_usd = max_usd
        self.spent_usd = 0.0

    def longest_s(self, sizes: Sequence[FunctionSize]) -> float:
        """Return how long functions of these sizes may run after their invocation, within lifetime and budget.

        Raises InputError if that is too short to measure anything.
        """
        lifetime_s = float("inf") if self._spec.lifetime_s is None else self._spec.lifetime_s
        longest_s = lifetime_s + self._spec.cold_start_s
        if self._max_usd is not None:
            left_usd = self._max_usd - self.spent_usd - len(sizes) * self._spec.price_invocation_usd
            longest_s = min(longest_s, left_usd / max(sum(size.price_usd_s for size in sizes), 1e-12))
        if self.working_s(longest_s) < 1:
            raise InputError(
                f"${self._max_usd:g} is too little: ${usd_text(self.spent_usd)} is spent, the rest does not pay for a "
                f"second of {len(sizes)} functions of {self._spec.name}; allow more dollars or fewer sizes"
            )
        return longest_s

    def working_s(self, longest_s: float) -> float:
        """Return the part of that time in which a function may start new measurements."""
        return min((longest_s - self._spec.cold_start_s) * _LIFETIME_SHARE, 1e6)

    def spend(self, size: FunctionSize, seconds: float) -> None:
        """Add the price of a function of this size that ran for `seconds`."""
        self.spent_usd += self._spec.price_invocation_usd + seconds * size.price_usd_s
