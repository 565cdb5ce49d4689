"""An ordinary module, its loss and its optimiser, with the verbs around them: profile, optimize, simulate, train."""

from funcpipe.api.fit import FuncPipe

__all__ = ["FuncPipe"]
