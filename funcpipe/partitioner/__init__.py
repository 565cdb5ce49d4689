"""From a profile, a platform and a wish to a plan: where to cut, how much memory, how many replicas."""

from funcpipe.core.root_links import require_full_name

require_full_name(__name__)
