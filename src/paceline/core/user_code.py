"""Import Python files and modules of the user, and report errors with the line that raised them.

Packages that a run does not use can be hidden from libraries, but never from code of the user.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from paceline.core.errors import ConfigError, did_you_mean, first_line

#: The packages that :func:`hide_packages` has hidden in this process.
_hidden: set[str] = set()


def hide_packages(names: Iterable[str]) -> None:
    """Make packages appear as not installed in this process, unless they are already imported. Only
    for processes that belong to Paceline."""
    for name in names:
        if name not in sys.modules:
            # Python's own way to make `import` and `find_spec` report that there is no such module.
            sys.modules[name] = None  # type: ignore[assignment]
            _hidden.add(name)


def show_packages() -> None:
    """Undo :func:`hide_packages`, for code of the user, which may import these packages."""
    while _hidden:
        name = _hidden.pop()
        if sys.modules.get(name) is None:
            sys.modules.pop(name, None)


def import_user_module(
    location: str, setting: str, form: str, *, keeps_name: bool = False
) -> ModuleType:
    """Import a file (``./file.py``, relative to the working directory) or a module by its dotted
    name.

    Args:
        setting: config key and value, for error messages.
        form: what the setting accepts, for error messages.
        keeps_name: whether the module of a file must have the name of the file. Otherwise, if
            another module has that name, the name is derived from the path of the file.

    Raises:
        ConfigError: the file or module does not exist, or it raised.
    """
    show_packages()
    path = Path(location).expanduser().resolve()
    try:
        if not location.endswith(".py"):
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(location)
        if path.is_file():
            return _import_file(path, setting, keeps_name)
    except ConfigError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{location}.".startswith(f"{missing}."):
            raise ConfigError(
                "`{setting}`: module {missing} not found (searched the environment and {cwd})",
                code="missing-module",
                allowed=form,
                fix="check the name, install the package, or give a file: ./file.py:NAME",
                setting=setting,
                missing=f"{missing!r}",
                cwd=Path.cwd(),
            ) from error
        raise user_error(f"`{setting}`: {location} cannot be imported", error, path) from error
    siblings = [file.name for file in path.parent.glob("*.py")]
    raise ConfigError(
        "`{setting}`: file not found: {path}",
        code="missing-user-file",
        allowed="{form}, a path relative to the current folder ({cwd})",
        fix=did_you_mean(path.name, siblings, "check the path", f"{Path(location).parent / '{}'}"),
        setting=setting,
        path=path,
        form=form,
        cwd=Path.cwd(),
    )


def _import_file(path: Path, setting: str, keeps_name: bool) -> ModuleType:
    name = path.stem if _has_free_name(path) else None
    if name is None and keeps_name:
        raise ConfigError(
            "`{setting}`: a module named {stem} already exists",
            code="module-exists",
            fix="give the file another name",
            setting=setting,
            stem=path.stem,
        )
    if name is None:  # derived from the path, so that it is the same in every process
        name = f"paceline_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    # As for a script, its folder comes first, so that it can import the files next to it. Worker
    # processes of a data loader receive the same sys.path and find the module by its name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _has_free_name(path: Path) -> bool:
    """Return whether no other module has the name of the file."""
    if not path.stem.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        spec = None
    if path.stem in sys.modules:
        file = getattr(sys.modules[path.stem], "__file__", None)
    else:
        file = str(path) if spec is None else spec.origin
    return file is not None and Path(file).resolve() == path


#: Methods of an environment that are not tools, besides those that begin with an underscore.
_NOT_TOOLS = ("reset", "get_reward")


def load_environment(text: str) -> type:
    """Return the class of environments that ``./file.py:NAME`` or ``package.module:NAME`` names.

    Raises:
        ConfigError: there is no such class, it has no method ``reset`` or no tools, or user code
            raised an exception.
    """
    location, _, name = text.strip().rpartition(":")
    form = "./file.py:NAME or package.module:NAME"
    module = import_user_module(location, f"grpo.environment: {text}", form)
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        problem = f"{name} in {location} is not a class"
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            "`grpo.environment: {text}`: {problem}",
            code="unknown-environment",
            allowed="classes in it: {names}",
            fix=did_you_mean(name, names, "check the name"),
            text=text,
            problem=problem if hasattr(module, name) else f"{location} has no class {name}",
            names=", ".join(names) or "none",
        )
    methods = "no method `reset`" if not callable(getattr(found, "reset", None)) else ""
    if methods or not tool_methods(found):
        raise ConfigError(
            "`grpo.environment: {text}`: the class has {problem}",
            code="not-an-environment",
            allowed="a class with the method `reset(self, **kwargs)`, and a public method for each"
            " tool",
            text=text,
            problem=methods or "no public method that could be a tool",
        )
    _check_constructor(found, text)
    return found


def _check_constructor(environment: type, text: str) -> None:
    """Raise ConfigError if a class of environments cannot be called without arguments."""
    try:
        inspect.signature(environment).bind()
    except ValueError:  # a class written in C
        return
    except TypeError as error:
        raise ConfigError(
            "`grpo.environment: {text}`: the class cannot be called without arguments: {reason}",
            code="environment-with-arguments",
            fix="give the parameters of `__init__` defaults, or name a subclass without them",
            text=text,
            reason=error,
        ) from error


def tool_methods(environment: type) -> dict[str, Callable[..., object]]:
    """Return the methods of a class of environments that a model may call, by name."""
    return {
        name: method
        for name, method in inspect.getmembers(environment, predicate=inspect.isfunction)
        if name not in _NOT_TOOLS and not name.startswith("_")
    }


def error_summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def user_error(
    text: str, error: BaseException, path: Path | None = None, fix: str | None = None
) -> ConfigError:
    """Return the error for user code that raised an exception, with the line of the user's file
    ``path``, or else the last line of the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        location = f"{error.filename}, line {error.lineno}"
        return ConfigError(
            "{text}: {kind}: {msg} ({location})",
            code="import-failed",
            fix=fix,
            text=text,
            kind=type(error).__name__,
            msg=error.msg,
            location=location,
        )
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if path is not None and frame.filename == str(path)]
    frame = (user_frames or frames)[-1]
    line = f": `{frame.line}`" if frame.line else ""
    place = f"({frame.filename}, line {frame.lineno}{line})"
    return ConfigError(
        "{text}: {reason} {place}",
        code="user-code-failed",
        fix=fix,
        text=text,
        reason=error_summary(error),
        place=place,
    )
