"""A local history of runs: predicted and observed values, which correct later predictions."""
