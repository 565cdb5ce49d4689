"""Platforms that run functions, and storages that hold objects."""

from funcpipe.core.root_links import require_full_name

require_full_name(__name__)
