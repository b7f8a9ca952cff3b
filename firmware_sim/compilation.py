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
import marshal
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
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

__all__ = ["compiled", "numba"]

_WITHOUT_REFERENCES = 2
"""A version of marshal's format: later ones depend on what else holds a constant."""
_NOT_KEPT = (OSError, TypeError, ValueError)
"""Errors after which a function is compiled each time: no source file, a constant that cannot be written, no space."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_SETTINGS = (
    "BOUNDSCHECK",
    "OPT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "ENABLE_AVX",
    "DISABLE_INTEL_SVML",
    "DEBUGINFO_DEFAULT",
)
_VERSIONS = (
    sys.version,
    numba.__version__,
    llvmlite.__version__,
    np.__version__,
    [str(getattr(config, name, None)) for name in _SETTINGS],
)


class CompiledFiles:
    """The compiled forms of one function, a file each, under the interface that numba's dispatchers have for a cache.

    A form is one for its arguments' types, for the processor and for what the function's closure holds. A file is read
    only if it was written for this very form, code, options, versions, texts of source files and constants of modules;
    else another takes its place. Several processes may write one form; the last stays. A file that cannot be read or
    written counts as not there.

    Attributes:
        cache_path: where they lie.
        mark: for the names of the function's symbols, by which LLVM finds code: numba numbers them by the order in
            which a process compiles, so that two processes give one name to different code.
    """

    def __init__(self, folder: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.cache_path, self._compiled = folder, function
        held = _serialize(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        code = function.__code__
        self._function = (code.co_filename, code.co_qualname, held)
        self._code = (marshal.dumps(code, _WITHOUT_REFERENCES), _plain(options), _text(code.co_filename))
        self.mark = hashlib.sha256(repr((self._function, self._code)).encode()).hexdigest()[:16]

    @cached_property
    def _made_of(self) -> bytes:
        """What a form is made of: as it is when the first is compiled, which keeps constants of modules as they are."""
        return repr((_VERSIONS, self._code, sorted(_sources(self._compiled, {}).items()))).encode()

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the form for a signature; None if it has to be compiled."""
        context.refresh()
        form = self._form(signature, context.codegen())
        try:
            content = self._place(form).read_bytes()
            seal, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if seal != self._seal(body):
                return None
        except _NOT_KEPT:
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
        except _NOT_KEPT:
            return

    def _form(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), self._function

    def _place(self, form: Any) -> Path:
        return Path(self.cache_path, hashlib.sha256(repr(form).encode()).hexdigest())

    def _seal(self, body: bytes) -> bytes:
        return hashlib.sha256(self._made_of + body).digest()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A function that numba compiles at its first call, or reads from the user's own cache.

    What it takes from modules are constants, NumPy's functions and other compiled functions.
    """
    folder = _folder()
    kept = None
    if folder is not None:
        with contextlib.suppress(*_NOT_KEPT):
            kept = CompiledFiles(folder, function, options)
            function.__qualname__ = f"{function.__code__.co_qualname}_{kept.mark}"
    kernel = numba.njit(**options)(function)
    if kept is not None:
        kernel._cache = kept
    return kernel


def _sources(function: Callable[..., Any], found: dict[str, object]) -> dict[str, object]:
    """What a function is compiled from: texts and options of its helpers, and constants of modules.

    Constants may come from other files, or depend on the machine.
    """
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    file = function.__code__.co_filename
    for name in {name for code in codes for name in code.co_names}:
        value: Any = function.__globals__.get(name)
        helper = getattr(value, "py_func", None)
        if helper is None:
            found[f"{file}:{name}"] = _plain(value)
        elif f"{file}:{name}" not in found:
            found[f"{file}:{name}"] = (_text(helper.__code__.co_filename), _plain(value.targetoptions))
            _sources(helper, found)
    return found


def _plain(value: object) -> object:
    """A constant in a form whose ``repr`` says all of it; of what else a module holds, its name."""
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(each)) for each in value)
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in sorted(value.items())]
    if isinstance(value, (np.ndarray, np.generic, float, complex)):
        array = np.asarray(value)
        return (type(value).__name__, array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
    if isinstance(value, (bool, int, str, bytes, type(None))):
        return value
    return type(value).__name__, getattr(value, "__name__", "")


@cache
def _text(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@cache
def _folder() -> str | None:
    return own_folder(f"compiled-{sys.implementation.cache_tag}")
