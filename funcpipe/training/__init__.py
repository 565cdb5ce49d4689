"""The computation of one replica of a stage, such that the result equals that of one process."""
