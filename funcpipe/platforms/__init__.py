"""Where functions run and objects live."""

from funcpipe.core.root_links import require_full_name

require_full_name(__name__)
