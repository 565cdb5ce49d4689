"""Cut a layer graph into stages: modules that can be sent to other processes."""

from funcpipe.model.split.bundle import dump_stage, load_stage
from funcpipe.model.split.cut import split, stage_bounds
from funcpipe.model.split.stage import StageModule

__all__ = ["StageModule", "dump_stage", "load_stage", "split", "stage_bounds"]
