"""Begins a process of the product: ``python -E -P -S _begin.py FOLDER MODULE [ARGUMENT …]``, as ``processes`` calls it.

Installed code alone is found: neither the working folder nor ``PYTHONPATH`` is looked into, and no ``sitecustomize`` is
run. The product's own packages come from where this file lies, and nothing else does unless that is where the
interpreter's packages are installed. What FOLDER holds comes last: the module's own, where it is none of the product's.
"""

import os
import runpy
import site
import sys
from importlib.machinery import ModuleSpec, PathFinder

OWN = ("firmware_sim", "monitor", "inspector", "analysis", "chipwitness")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLACES = [_ROOT, os.path.join(_ROOT, "analysis", "names")]


class _Own:
    """Finds the product's packages, wherever else such names are."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _PLACES) if name in OWN else None


def _enter() -> None:
    setattr(site, "execsitecustomize", lambda: None)  # noqa: B010
    setattr(site, "execusercustomize", lambda: None)  # noqa: B010
    site.main()
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if os.path.realpath(_ROOT) not in map(os.path.realpath, installed):
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != os.path.realpath(_ROOT)]
    sys.meta_path.insert(0, _Own)


if __name__ == "__main__":
    _enter()
    _folder, _module, *_arguments = sys.argv[1:]
    if _folder:
        sys.path.append(_folder)
    sys.argv = [sys.argv[0], *_arguments]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
