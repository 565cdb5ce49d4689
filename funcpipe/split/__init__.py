"""A layer graph is cut into stages, each a module of its own that can be sent to another process."""

from funcpipe.split.bundle import dump_stage, load_stage
from funcpipe.split.cut import split, stage_bounds
from funcpipe.split.stage import StageModule

__all__ = ["StageModule", "dump_stage", "load_stage", "split", "stage_bounds"]
