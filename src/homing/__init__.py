"""homing: from raw text to your own language model on a rented GPU, and home again.

Importing this loads neither torch nor a provider SDK; each verb loads what it needs.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """The version is looked up when it is first asked for: what reads it is a third of the start of a small program."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("homing")
    except PackageNotFoundError:  # run from source, as on a machine where nothing can be installed
        found = "0+source"
    globals()[name] = found
    return found
