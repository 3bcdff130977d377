"""Compile the Jinja source of a chat template as transformers does, find the variables that it
reads, and give them defaults."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError

# Unicode noncharacters, which do not occur in text, mark the ends of a {% generation %} block while
# rendering.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
#: Variables of a template that are not arguments of the user.
_GIVEN = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True)
class CompiledTemplate:
    """A template that can be rendered.

    Args:
        render: returns the text for the variables of the template.
        identifiers: the names and strings in the source.
        variables: names of the variables that the template reads before it sets them, apart from
            the chat itself.
    """

    render: Callable[..., str]
    identifiers: frozenset[str]
    variables: frozenset[str]


def compile_template(source: str) -> CompiledTemplate:
    """Compile a template.

    Raises:
        ConfigError: the source is not valid Jinja.
    """
    import jinja2

    environment = _environment()
    try:
        identifiers = {
            str(value).strip("'\"")
            for _, kind, value in environment.lex(source)
            if kind in ("name", "string")
        }
        variables = _read_variables(environment, source)
        render = environment.from_string(source).render
        return CompiledTemplate(render, frozenset(identifiers), variables)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            "the chat template is not valid Jinja: {message} in line {lineno}",
            code="invalid-template",
            message=error.message,
            lineno=error.lineno,
        ) from error


def with_defaults(source: str, arguments: Mapping[str, JsonValue]) -> str:
    """Return the source of a template whose variables have these values, unless they are given."""
    statements = (
        f"{{% set {name} = {name} if {name} is defined else {_literal(value)} %}}"
        for name, value in sorted(arguments.items())
    )
    return "".join(statements) + source


def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` marks the text of the assistant."""

        tags = {"generation"}  # noqa: RUF012  (jinja reads it from the class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

        def _wrap(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's built-in filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _read_variables(environment: Any, source: str) -> frozenset[str]:
    """Return the variables that are read before they are set. A variable that is set first is the
    template's own, even where a branch without that statement reads it."""
    from jinja2 import meta

    tree = environment.parse(source)
    undeclared = meta.find_undeclared_variables(tree) - _GIVEN - set(environment.globals)
    first_use: dict[str, bool] = {}
    for name, is_read in _uses(tree):
        first_use.setdefault(name, is_read)
    return frozenset(name for name in undeclared if first_use.get(name, False))


def _uses(node: Any) -> Iterator[tuple[str, bool]]:
    """Yield the variables below a node in the order in which they are evaluated, each with whether
    it is read."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        yield node.name, node.ctx == "load"
        return
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.AssignBlock):
        children.sort(key=lambda child: child is node.target)  # set after its value is known
    elif isinstance(node, nodes.For):
        children.sort(key=lambda child: child is not node.iter)
    for child in children:
        yield from _uses(child)


def _literal(value: Any) -> str:
    """Return a value of JSON as a Jinja expression."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        items = (f"{json.dumps(str(key))}: {_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    # Jinja decodes the escapes of JSON, but not pairs of surrogates.
    return json.dumps(value, ensure_ascii=False)
