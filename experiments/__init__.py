"""One short script for each figure or table, and the models that they share."""
