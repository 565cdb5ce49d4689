"""Functions that measure: what their platform gives them, and how long a model's layers take there."""
