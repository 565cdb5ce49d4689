"""The GPUs of functions on Function Compute, and the hosts that go with them."""

from dataclasses import dataclass

from funcpipe.core import MB, FunctionSize
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A kind of GPU, of which a function has a whole one: its memory, and the processors and memories that go with it,
    at most so much or one of these.
    """

    kind: str
    memory_gb: int
    vcpu: float | tuple[float, ...]
    host_mb: int | tuple[int, ...]

    def admits(self, size: FunctionSize) -> bool:
        """Return True if functions may have a host of that size with it."""
        vcpu = size.vcpu in self.vcpu if isinstance(self.vcpu, tuple) else size.vcpu <= self.vcpu
        memory = size.memory_mb in self.host_mb if isinstance(self.host_mb, tuple) else size.memory_mb <= self.host_mb
        return vcpu and memory


CARDS = {
    "T4": Card(kind="fc.gpu.tesla.1", memory_gb=16, vcpu=8, host_mb=32_768),
    "A10": Card(kind="fc.gpu.ampere.1", memory_gb=24, vcpu=8, host_mb=32_768),
    "Ada": Card(kind="fc.gpu.ada.1", memory_gb=48, vcpu=(4, 8, 16), host_mb=(32_768, 65_536, 98_304)),
    "Hopper": Card(kind="fc.gpu.hopper.1", memory_gb=96, vcpu=(16,), host_mb=(98_304,)),
}
"""By the names of accelerators, as the vendor's FAQ about billing has them ("What resource usage items are involved
when running a GPU-accelerated instance?", read 2026-11): only whole cards. The A10 is not in it any more; that it goes
with what a third of its memory allows, as in older pages, is an assumption.
"""


def card_of(size: FunctionSize) -> Card | None:
    """Return the GPU of functions of that size, None if they have none; raises InvalidValue for one that there is not.

    Planned memory is that of a card in GB of 10^9 bytes at least: functions have whole ones.
    """
    if size.accelerator is None:
        return None
    card = CARDS.get(size.accelerator.name)
    if card is None:
        raise InvalidValue("GPU", size.accelerator.name, f"must be one of {', '.join(CARDS)}")
    if not card.memory_gb * 10**9 // MB <= size.accelerator.memory_mb <= card.memory_gb * 1024:
        rule = f"must be that of a whole {size.accelerator.name}, {card.memory_gb} GB: functions have no parts of it"
        raise InvalidValue("GPU memory", size.accelerator.memory_mb, rule)
    return card
