"""Python files and modules of a user, by the name that a config gives them."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from paceline.core.errors import ConfigError, nearest


def import_user_module(where: str, setting: str, value: str) -> ModuleType:
    """Import a file (``./file.py``, from the current folder) or a module by its dotted name.

    Every process imports a file under its own name, so that it can name what is in it as
    ``file:attribute``.

    Args:
        setting, value: of the config, for messages.

    Raises:
        ConfigError: there is no such file or module, or it raises.
    """
    try:
        if where.endswith(".py"):
            return _import_file(Path(where).expanduser(), setting, value)
        return import_module(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`{setting}: {value}` cannot be imported: {type(error).__name__}: {error}",
            allowed="./file.py:SPEC, or package.module:SPEC on Python's path (PYTHONPATH)",
        ) from error


def _import_file(path: Path, setting: str, value: str) -> ModuleType:
    if not path.is_file():
        near = nearest(path.name, [one.name for one in path.parent.glob("*.py")])
        raise ConfigError(
            f"`{setting}: {value}`: there is no file {path.resolve()}",
            allowed=f"./file.py:SPEC, a path from the current folder ({Path.cwd()})",
            fix=f"did you mean {path.parent / near}?" if near else "check the path",
        )
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:
        raise ConfigError(
            f"`{setting}: {value}`: a module named {path.stem} is already imported",
            fix="give the file another name",
        )
    if str(path.parent) not in sys.path:  # it may import the files beside it
        sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
