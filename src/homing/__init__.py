"""homing: from raw text to your own language model on a rented GPU, and home again.

Importing this package loads neither torch nor a provider SDK; each verb loads what it needs.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """Look up the version on first access: importlib.metadata takes a third of the start-up time of a small program."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("homing")
    except PackageNotFoundError:  # run from a source tree without installation
        found = "0+source"
    globals()[name] = found
    return found
