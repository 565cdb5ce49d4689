"""A property that is computed once for each instance, without a lock.

`functools.cached_property` of Python 3.11 holds one lock for all instances of a class while it computes: while one
client waits for its storage, all others of the same process would wait too. Later versions have no lock, as here.
"""

import functools
from typing import Any, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: TID251 - the one place that may
    """A property that an instance computes when it is first read. Threads that read it at once may all compute it;
    the value that is there first is the one that all of them get.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        """Return the value, or this property itself where it is read from the class."""
        if instance is None:
            return self
        values, name = instance.__dict__, str(self.attrname)
        return values[name] if name in values else values.setdefault(name, self.func(instance))
