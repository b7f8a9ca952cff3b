"""Numba, as every compiled function of the product is made with it: no settings of a folder, and no foreign cache.

It reads ``.numba_config.yaml`` where a process works, at its import and at each compilation, and loads compiled code
from where that says. Here it finds no such file, and its cache lies where only the user can write, or nowhere.

Numba lists the files of its cache in an index. Two processes that compile at once both take the next free name there,
so that the index gives one kernel the code of another: then a sum is a product, in each process from then on. Here a
file holds one compiled function and says which, and nothing lists it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numpy as np

from firmware_sim.folders import in_empty_folder, own_folder

with in_empty_folder():
    import numba as _numba
    import numba.extending as _  # noqa: F401 - makes it part of the package
    from numba.core import compiler as _compiler
    from numba.core import config as _config
    from numba.core import serialize as _serialization

numba: Any = _numba
config: Any = _config
_compile_result: Any = _compiler.CompileResult
_serialize: Any = _serialization.dumps
config._config_fname = os.path.join(os.devnull, "none")
config.reload_config()

__all__ = ["CompiledFiles", "compiled", "numba"]

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledFiles:
    """The compiled forms of one function, a file each, under the interface that numba's dispatchers have for a cache.

    A form is one for its arguments' types, for the processor and for what the function's closure holds. A file is read
    only if it was written for this very form, options, versions, texts of source files and constants; else another
    takes its place. Several processes may write one form; the last stays. A file that cannot be read or written counts
    as not there.
    """

    def __init__(self, folder: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.cache_path = folder
        code, sources = function.__code__, sorted(_sources(function).items())
        versions = (numba.__version__, llvmlite.__version__, code.co_firstlineno, code.co_code)
        self._made_of = repr((versions, sorted(options.items()), sources)).encode()
        held = _serialize(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        self._function = (code.co_filename, function.__qualname__, held)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the form for a signature; None if it has to be compiled."""
        context.refresh()
        form = self._form(signature, context.codegen())
        try:
            content = self._place(form).read_bytes()
        except OSError:
            return None
        seal, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if seal != self._seal(body):
            return None
        written_for, parts = pickle.loads(body)  # noqa: S301 - from a folder of the user's own, as the modules are
        return _compile_result._rebuild(context, *parts) if written_for == form else None

    def save_overload(self, signature: Any, compiled_form: Any) -> None:
        """Write a form that was compiled, if another process can use it."""
        if compiled_form.lifted or compiled_form.library.has_dynamic_globals:
            return
        form = self._form(signature, compiled_form.codegen)
        body = _serialize((form, compiled_form._reduce()))
        try:
            with tempfile.TemporaryDirectory(dir=self.cache_path) as folder:
                written = Path(folder, "form")
                written.write_bytes(self._seal(body) + body)
                written.replace(self._place(form))
        except OSError:
            return

    def _form(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), self._function

    def _place(self, form: Any) -> Path:
        return Path(self.cache_path, hashlib.sha256(repr(form).encode()).hexdigest())

    def _seal(self, body: bytes) -> bytes:
        return hashlib.sha256(self._made_of + body).digest()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A function that numba compiles at its first call, or reads from the user's own cache."""
    kernel = numba.njit(**options)(function)
    folder = _folder()
    if folder is not None:
        with contextlib.suppress(OSError):  # no source file lies there
            kernel._cache = CompiledFiles(folder, function, options)
    return kernel


def _sources(function: Callable[..., Any]) -> dict[str, object]:
    """What a function is compiled from: the texts of its file and of its helpers' files, and their modules' constants.

    Constants may come from other files, or depend on the machine.
    """
    file = function.__code__.co_filename
    found: dict[str, object] = {file: _text(file)}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        helper = getattr(value, "py_func", None)
        if helper is not None:
            found |= _sources(helper)
        elif isinstance(value, (bool, int, float, str, tuple, np.generic)):
            found[f"{file}:{name}"] = value
        elif isinstance(value, np.ndarray):
            found[f"{file}:{name}"] = (value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
    return found


@cache
def _text(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def _folder() -> str | None:
    return own_folder(f"compiled-{sys.implementation.cache_tag}")
