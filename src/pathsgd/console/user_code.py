"""From ``package.module:name`` or ``file.py:name`` to a user's model. An exception in the user's code becomes
a PathError of one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from pathsgd.errors import PathError


@dataclass(frozen=True)
class Reference:
    """A name in a module, and where the module is found."""

    text: str
    module: str
    """Dotted; for a file in a package its name in that package, for any other file its stem."""
    name: str
    folder: Path
    """What has to be on the import path."""
    file: Path | None = None

    @staticmethod
    def parse(text: str) -> Reference:
        """
        >>> reference = Reference.parse("mypkg.models:resnet.small")
        >>> reference.module, reference.name
        ('mypkg.models', 'resnet.small')
        """
        where, _, name = text.rpartition(":")
        if not where or not _is_dotted(name):
            raise PathError(f"expected package.module:name or path/to/file.py:name, got {text!r}")
        if not where.endswith(".py"):
            if not _is_dotted(where):
                raise PathError(
                    f"{where!r} is neither a module (package.module) nor a file (path/to/file.py)"
                )
            return Reference(text, where, name, Path.cwd())
        file = Path(where).resolve()
        if not file.is_file():
            raise PathError(f"there is no file {where}")
        parts, folder = [file.stem], file.parent
        while (folder / "__init__.py").is_file():
            parts, folder = [folder.name, *parts], folder.parent
        return Reference(text, ".".join(parts), name, folder, file)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Puts the module's folder and the current one first on the import path, as for a script."""
        added = list(dict.fromkeys([str(self.folder), os.getcwd()]))
        sys.path[:0] = added
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for folder in added:
                if folder in sys.path:
                    sys.path.remove(folder)

    def make_model(self, *arguments: Any, **keywords: Any) -> nn.Module:
        """Calls what has this name; a model already made is returned as it is.

        Raises:
            PathError: It cannot be imported or called, or is no model.
        """
        found = self._find(self._import())
        if isinstance(found, nn.Module):
            if keywords:
                raise PathError(f"{self.text} is a model already: --arguments are for a factory")
            return found
        if not callable(found):
            raise PathError(f"{self.text} is a {type(found).__name__}, not a model or a factory of models")
        try:
            made = found(*arguments, **keywords)
        except (Exception, SystemExit) as error:
            raise PathError(f"{self.text} raised {describe(error)}") from error
        if not isinstance(made, nn.Module):
            raise PathError(f"{self.text} returned a {type(made).__name__}, not an nn.Module")
        return made

    def _import(self) -> ModuleType:
        try:
            if self.file is not None and "." not in self.module:
                return _import_file(self.file)
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name and f"{self.module}.".startswith(f"{error.name}."):
                raise PathError(
                    f"there is no module {error.name!r} in the current folder or among installed packages"
                ) from error
            raise PathError(f"importing {self.module} raised {describe(error)}") from error
        except (Exception, SystemExit) as error:
            raise PathError(f"importing {self.file or self.module} raised {describe(error)}") from error
        if self.file is not None and Path(module.__file__ or "").resolve() != self.file:
            raise PathError(f"{self.file} is {self.module}, which was imported from {module.__file__}")
        return module

    def _find(self, module: ModuleType) -> Any:
        found: Any = module
        reached = self.text.rpartition(":")[0]
        for part in self.name.split("."):
            if not hasattr(found, part):
                raise PathError(f"there is no {part!r} in {reached}")
            found, reached = getattr(found, part), f"{reached}.{part}"
        return found


def describe(error: BaseException) -> str:
    """An exception in the user's code in one line, with the place where it was raised."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # A call with wrong arguments fails here, and a syntax error names its own place.
    if not frames or frames[-1].filename == __file__ or frames[-1].filename.startswith("<"):
        return text
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _import_file(file: Path) -> ModuleType:
    """Imports a file that is in no package, under a name that hides no module of the same stem."""
    name = f"_pathsgd_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
