"""homing: from raw text to your own language model on a rented GPU, and home again.

Importing this loads neither torch nor a provider SDK; each verb loads what it needs.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("homing")
except PackageNotFoundError:  # run from source, as on a machine where nothing can be installed
    __version__ = "0+source"
