"""Says which extra a verb needs before it fails deep inside an import."""

from __future__ import annotations

from importlib.util import find_spec

from homing.errors import MissingExtra

__all__ = ["need"]

_LM = ("torch", "numpy", "safetensors", "tokenizers", "rustbpe", "gigatoken", "jinja2", "zstandard")
_MODULES = {"lm": _LM, "export": (*_LM, "gguf", "transformers"), "hub": ("huggingface_hub",)}


def need(extra: str, *, verb: str) -> None:
    """Raises MissingExtra if a package of the extra is absent; imports none of them."""
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise MissingExtra(verb, extra, module)
