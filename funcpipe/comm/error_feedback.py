"""The rounding errors of a replica's contributions and sums, to be added in the next step.

With 8 bits much is lost in a step, but nothing over many: whatever a message leaves out is kept and sent later. Both
halves are fed back, as both are rounded: each replica keeps what its contribution lost, and the adder keeps what the
sum lost, as in DoubleSqueeze (Tang et al., ICML 2019) and in Communication-Efficient Distributed Blockwise Momentum SGD
with Error-Feedback (Zheng et al., NeurIPS 2019).

With a scale of 1, gradients of 0.4 in three steps, and a scale that 127.0 in the same block fixes:

    step    to send    sent    kept
    1       0.4        0       0.4
    2       0.8        1       -0.2
    3       0.2        0       0.2
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class ErrorFeedback:
    """The rounding errors that one replica keeps: `sent` of its contributions, `summed` of its sums, both in fp32.

    `sent` has an element for each of the gradient, and `summed` one for each that the replica sums, in the order of the
    `ranges` [start, stop) of the gradient. All are 0 in the beginning.
    """

    def __init__(self, elements: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.sent = torch.zeros(elements)
        self.summed = torch.zeros(sum(stop - start for start, stop in ranges))
        self._places: dict[tuple[int, int], slice] = {}
        offset = 0
        for start, stop in ranges:
            self._places[start, stop] = slice(offset, offset + stop - start)
            offset += stop - start

    def of_sum(self, start: int, stop: int) -> Tensor:
        """Return the rounding errors of the sum of the elements [start, stop), one of the ranges; a view."""
        return self.summed[self._places[start, stop]]

    def clear(self) -> None:
        """Forget what is kept, as after a step that is left out."""
        self.sent.zero_()
        self.summed.zero_()
