"""Platforms that run functions, and storages that hold objects."""

from funcpipe.core.distribution import require_full_name

require_full_name(__name__)
