"""The evaluation of the FuncPipe paper, one script for each question; `python -m experiments.paper` runs them all."""
