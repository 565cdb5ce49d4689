"""The messages between stages that a worker on an accelerator has on its host, and their copies to and from the device.

    get → `got` | copy → `receive` | forward or backward | `take` → copy | `sent` → put

A stage on the processor receives messages as they are got, and its puts take them.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Task, copy_of
from funcpipe.training.device import Device

Message = Mapping[str, Tensor]


class MessageCopies:
    """The messages of a step or batch that are on the host, by the tasks that copy them."""

    def __init__(
        self, device: Device, *, take: Callable[[Task], Message], receive: Callable[[Task, Message], None]
    ) -> None:
        """`take` takes from the stage the message that a task puts or copies, `receive` gives it one got or copied."""
        self._device = device
        self._take = take
        self._receive = receive
        self._messages: dict[Task, Message] = {}

    def begin(self) -> None:
        """Begin a step or a batch."""
        self._messages = {}

    def got(self, get: Task, message: Message) -> None:
        """Keep the message that `get` has read for its copy."""
        if self._device.is_host:
            self._receive(get, message)
        else:
            self._messages[copy_of(get)] = message

    def to_device(self, copy: Task) -> TaskResult:
        """Copy a message to the device."""
        message = self._messages.pop(copy)
        self._receive(copy, message)
        return _result(message)

    def to_host(self, copy: Task) -> TaskResult:
        """Copy a message to the host."""
        self._messages[copy] = message = self._take(copy)
        return _result(message)

    def sent(self, put: Task) -> Message:
        """Return the message that `put` is to send."""
        return self._take(put) if self._device.is_host else self._messages.pop(copy_of(put))


def _result(message: Message) -> TaskResult:
    return TaskResult(sum(tensor.nbytes for tensor in message.values()))
