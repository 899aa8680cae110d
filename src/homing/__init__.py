"""homing: train your own language model from raw text on a rented GPU, and fetch it to your computer.

    run = homing.Run.new("first", preset="tiny", text=["books/*.txt"])
    run.prep()
    run.launch(spend_limit=12, confirm=True)

Importing this package loads neither torch nor a provider SDK, because each name below is loaded when it is first used.
The types of the names are in `__init__.pyi`.
"""

import importlib

_FROM = {
    "Model": "homing.api.model",
    "Run": "homing.api.run",
    "load": "homing.api.model",
    "offers": "homing.api.run",
    "runs": "homing.api.run",
    **dict.fromkeys(
        (
            "DataError",
            "HomingError",
            "IntegrityError",
            "LimitReached",
            "MissingExtra",
            "NoOffer",
            "ProviderRefused",
            "RunFailed",
            "RunFileError",
            "StillBilling",
            "StoreError",
            "UsageError",
        ),
        "homing.errors",
    ),
}

__all__ = ["__version__", *_FROM]

__version__: str


def __getattr__(name: str) -> object:
    """Load a public name on first access.

    The version is read on first access too, because importing importlib.metadata takes a third of a small program's
    start-up time.
    """
    if name in _FROM:
        found: object = getattr(importlib.import_module(_FROM[name]), name)
    elif name == "__version__":
        found = _version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("homing")
    except PackageNotFoundError:  # running from a source tree; homing is not installed
        return "0+source"
