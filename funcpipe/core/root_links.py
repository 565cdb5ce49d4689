"""Guards packages that have a link in the repository's root against being imported through it."""


def require_full_name(name: str) -> None:
    """Raise ImportError if a package of funcpipe is imported as `name` without `funcpipe.` before it.

    It would be loaded twice, and classes that look the same would differ.
    """
    if not name.startswith("funcpipe."):
        raise ImportError(f"import funcpipe.{name} instead of {name}, which is a link to it")
