"""Modules named `transformer_engine...` that answer with Ottava's names, and the import hook that provides them."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ottava.compat.gathers import lend_hooks, take_hooks_back
from ottava.compat.names import ALIASES, FOREIGN, INSTEAD, SOURCES, VERSION
from ottava.compat.tensors import lend_attributes, take_attributes_back

ROOT, COMPILED = "transformer_engine", "transformer_engine_torch"


def missing(full_name: str, known: Sequence[str]) -> str:
    """What to say about a name that Ottava does not have; known: the names of the same module that it has."""
    parent, _, name = full_name.rpartition(".")
    text = f"Ottava does not have `{full_name}`."
    instead = INSTEAD.get(full_name, INSTEAD.get(name, INSTEAD.get(parent)))
    if instead is not None:
        return f"{text} {instead}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{text} The nearest name that it has is `{parent}.{near[0]}`." if near else text


class StandIn(ModuleType):
    """One `transformer_engine` module: Ottava's public names, and a message for the others."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ in (ROOT, f"{ROOT}.pytorch"):
            return VERSION
        if name == "__all__":
            return self.__dir__()
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = ALIASES.get(f"{self.__name__}.{name}", f"{self.__name__}.{name}")
        if module in SOURCES:
            return importlib.import_module(module)
        for source in self.sources():
            if name in getattr(source, "__all__", ()) or _is_public(source, name):
                return getattr(source, name)
        raise AttributeError(missing(f"{self.__name__}.{name}", self.__dir__()), name=name, obj=self)

    def __dir__(self) -> list[str]:
        children = [n.rpartition(".")[2] for n in SOURCES if n.rpartition(".")[0] == self.__name__]
        return sorted({*children, *(n for source in self.sources() for n in _public_names(source))})

    def fill(self) -> None:
        """Takes the names over now, so that torch.compile sees an ordinary module; the first source that has a name wins."""
        for source in self.sources():
            for name in _public_names(source):
                self.__dict__.setdefault(name, getattr(source, name))

    def sources(self) -> Iterator[ModuleType]:
        for name in SOURCES[self.__name__]:
            try:
                yield importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:  # it is there, but something that it needs is not
                    raise


def _public_names(source: ModuleType) -> list[str]:
    return getattr(source, "__all__", [n for n in vars(source) if _is_public(source, n)])


def _is_public(source: ModuleType, name: str) -> bool:
    """Defined by Ottava; what a module merely imported (torch, ...) is not its name."""
    return not name.startswith("_") and str(getattr(getattr(source, name, None), "__module__", "")).startswith("ottava")


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-ins, and refuses what belongs to TransformerEngine and has none."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in SOURCES:
            # All are packages: `from module import name` then asks this finder about a missing name, and the user sees its message.
            return ModuleSpec(fullname, self, is_package=True)
        if fullname in FOREIGN or fullname.startswith((f"{ROOT}.", f"{COMPILED}.")):
            parent = sys.modules.get(fullname.rpartition(".")[0])
            # Without a `name`, because importlib swallows the error of a submodule that carries its own.
            raise ModuleNotFoundError(missing(fullname, dir(parent) if isinstance(parent, StandIn) else ()))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name, f"Ottava in the place of {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, StandIn)
        module.fill()


_FINDER = _Finder()
_REPLACED: dict[str, ModuleType] = {}


def _loaded() -> list[str]:
    return [n for n in sys.modules if n in FOREIGN or n in SOURCES or n.startswith(f"{ROOT}.")]


def install() -> None:
    """From now on `import transformer_engine` gives Ottava. A TransformerEngine that was imported before is set aside."""
    if _FINDER in sys.meta_path:
        return
    for name in _loaded():
        _REPLACED[name] = sys.modules.pop(name)
    sys.meta_path.insert(0, _FINDER)
    lend_attributes()
    lend_hooks()
    for name in SOURCES:
        importlib.import_module(name)


def uninstall() -> None:
    """Undoes `install`."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    take_attributes_back()
    take_hooks_back()
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(_REPLACED)
    _REPLACED.clear()


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a `with` block (and no change if it was installed already)."""
    before = _FINDER in sys.meta_path
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
