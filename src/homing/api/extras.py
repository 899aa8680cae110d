"""Report a missing optional dependency (extra) before a verb fails deep inside an import.

need(extra, verb)   raises MissingExtra, with the command that installs it
need_for_export     the same for one kind of export
export_hint         returns the `homing export` command, and how to install a package that it needs
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from homing.errors import MissingExtra
from homing.pip_command import pip_install

__all__ = ["export_hint", "need", "need_for_export"]

_LM = ("torch", "numpy", "safetensors", "tokenizers", "rustbpe", "gigatoken", "jinja2", "zstandard")
_EXPORT = {
    "hf": ("transformers",),
    "merged": ("transformers",),
    "adapter": ("transformers", "peft"),
    "gguf": ("gguf",),
    "ollama": ("gguf",),
}
_MODULES = {"lm": _LM, "hub": ("huggingface_hub",), "web": ("prometheus_client", "starlette", "uvicorn")}


def need(extra: str, *, verb: str, where: str = "") -> None:
    """Raise MissingExtra if a package of the extra is absent, without importing any.

    `where`: the option or place that needs the extra, for the message.
    """
    if missing := _absent(_MODULES[extra]):
        error = MissingExtra(verb, extra, missing)
        error.what = f"`homing {verb}`{where} needs the extra `{extra}`."
        raise error


def need_for_export(kind: str, *, verb: str) -> None:
    """Raise MissingExtra if this kind of export cannot be written or verified here.

    Only the packages for this kind are required: a GGUF export does not need transformers, and an hf export does not
    need gguf.
    """
    if missing := _absent((*_LM, *_EXPORT[kind])):
        raise MissingExtra(verb, "export", missing)


def export_hint(model: str) -> str:
    """Return the export command to type next, and how to install its extra if a package is missing."""
    missing = _absent((*_LM, *_EXPORT["hf"]))
    first = f"   (needs {missing} first: {pip_install('export')})" if missing else ""
    return f"Use it elsewhere: homing export {model}{first}"


def _absent(modules: Iterable[str]) -> str:
    return next((module for module in modules if find_spec(module) is None), "")
