"""Beside the engine, which they import: a parameter server, provisioning, and the history of runs."""
