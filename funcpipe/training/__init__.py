"""What one replica of a stage computes, so that the result equals that of one process."""
