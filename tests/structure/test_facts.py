"""Test that every figure of `facts.py` is at its limit, and what the figures count."""

from pathlib import Path

import facts
import pytest
from fact_sources import CHECKOUT, Source

#: The docstrings' share of the lines, in percent, may fall as little as it may rise.
MIN_DOCSTRING_PERCENT = 11.8
LIMITS = facts.read_limits()


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return facts.count_figures(CHECKOUT)


@pytest.mark.parametrize("name", facts.FIGURES)
def test_figure_is_at_its_limit(name: str, figures: dict[str, float]) -> None:
    limit, figure = LIMITS[name]["limit"], figures[name]
    if limit is None:
        return
    hint = f"`python tests/structure/facts.py --list {name}` may show which"
    assert figure <= limit, f"{name} rose from {limit} to {figure}: {hint}"
    assert figure == limit or name in facts.SIZES, (
        f"{name} fell from {limit} to {figure}: run `python tests/structure/facts.py --write`"
    )


def test_every_figure_has_a_limit_and_a_description() -> None:
    assert LIMITS.keys() == facts.FIGURES.keys()
    assert [name for name, figure in facts.FIGURES.items() if not figure.__doc__] == []


def test_docstrings_keep_their_share(figures: dict[str, float]) -> None:
    assert figures["docstring_percent"] >= MIN_DOCSTRING_PERCENT


def test_writing_never_raises_a_limit() -> None:
    limits: dict[str, facts.Limit] = {
        "orders": {"limit": 5, "target": 3},
        "token_writers": {"limit": 4, "target": 1},
        "source_lines": {"limit": 5000, "target": 1},
        "strategy_abstract_methods": {"limit": None, "target": 5},
    }
    counted = dict.fromkeys(limits, 4.0) | {"token_writers": 6.0, "source_lines": 1000.0}
    assert {name: each["limit"] for name, each in facts.lowered(limits, counted).items()} == {
        "orders": 4,
        "token_writers": 4,
        "source_lines": 1010,
        "strategy_abstract_methods": None,
    }


#: Figure → files of a checkout, in which it counts 2.
PLANTED: dict[str, dict[str, str]] = {
    "runtime_checkable": {
        "data/a.py": "@runtime_checkable\nclass A(Protocol): ...\n"
        "@typing.runtime_checkable\nclass B(Protocol): ...\nclass C(Protocol): ..."
    },
    "strategy_probes": {
        "train/a.py": "isinstance(self.strategy, A)\ngetattr(x, 'strategy')\nisinstance(part, A)",
        "parallel/b.py": "for part in parts_of(strategy): hasattr(part, 'x')",
        "explain/c.py": "isinstance(strategy, A)",
    },
    "core_imports_catalogue": {
        "strategies/ddp/a.py": "",
        "parallel/zero1/b.py": "import paceline.strategies.ddp.a",
        "train/c.py": "def f():\n    from paceline.strategies.ddp import a\n",
        "launch/d.py": "from paceline.parallel.zero1.b import b",
        "explain/e.py": "from paceline.strategies.ddp.a import b",
        "strategies/ddp/__init__.py": "",
    },
    "server_texts": {"train/a.py": "# serves\nx.expendable_ranks()", "api.py": "serves = 1"},
    "mode_comparisons": {
        "train/a.py": "layout.strategy == 'ddp'\nmode in ('zero3', 'x')",
        "health/a.py": "loss == 'ddp'\nmode == 'x'",
        "verify/b.py": "mode == 'ddp'",
    },
    "planner_mode_comparisons": {
        "planner/a.py": "mode == 'ddp'\nmode == 'deepspeed'\nstrategy.name in {'zero1', 'ddp'}"
    },
    "folder_cycles": {
        "data/a/x.py": "from paceline.data.b import y",
        "data/b/y.py": "import paceline.data.a.z\nfrom paceline.data import c",
        "data/a/z.py": "from paceline.data.a import x",
        "data/c.py": "",
        "train/a/x.py": "from paceline.train import b",
        "train/b.py": "from paceline.train import c",
        "train/c.py": "from paceline.train.a import y",
        "train/a/y.py": "",
    },
    "private_imports": {
        "data/a.py": "from paceline.data.b import _x, y",
        "data/c.py": "from paceline.data import b\nb._z\nb.__doc__",
        "data/b.py": "",
    },
    "records_of_a_run": {
        "launch/a.py": "@dataclass(frozen=True)\nclass A: ...\nclass B(TypedDict): ...\n"
        "class C: ...\nclass D(NamedTuple): ...",
        "api.py": "def run(a: 'A | None', c: C) -> list[B]: ...",
    },
    "long_signatures": {
        "api.py": "def f(a, b, c, d, e, f, *, g): ...\ndef h(a, b, c, d, e, f): ...",
        "launch/a.py": "def f(a, b, c, d, e, f, g, h): ...",
    },
    "callback_registrations": {
        "train/setup.py": "trainer.callbacks.add(a)\ncallbacks.add_user(b)\nnames.add(c)",
        "train/callback_setup.py": "callbacks.add(a)",
    },
    "unsupported_modes_in_launch": {
        "launch/a.py": "raise ConfigError(f'`parallel.mode: {mode}` is not supported here')\n"
        "raise ConfigError('`parameter_server.x: y` is ' 'not supported')\n"
        "raise ConfigError('`model` is not supported')"
    },
    "parsed_messages": {
        "config/a.py": "problem.what.endswith('x')\nre.match(a, error.fix)\nprint(error.what)"
    },
    "modules_with_error_patterns": {
        "launch/a.py": "re.compile('connection (closed|reset)')",
        "cluster/b.py": "'closed by peer' in text",
        "data/c.py": "raise RunError('the connection closed by peer')",
    },
    "duplicate_classes": {
        "data/a.py": "class A: ...\nclass B: ...\nclass C: ...",
        "train/b.py": "class A: ...\nclass B: ...\nclass _C: ...",
    },
    "elliptic_lines": {"data/a.py": "# that of x\n'Those of y'\nthatof = 1"},
    "args_entries_of": {
        "data/a.py": 'def f(a, b, c):\n    """Do.\n\n    Args:\n        a: of x.\n'
        '        b, c: of y.\n        d: number of z.\n    """\n'
    },
    "long_functions": {
        "data/a.py": "\n".join(
            f"def f{lines}():\n" + "    pass\n" * (lines - 1) for lines in (80, 81, 90)
        )
    },
}


@pytest.mark.parametrize("name", PLANTED)
def test_figure_counts_what_it_says(name: str, tmp_path: Path) -> None:
    for path, text in PLANTED[name].items():
        file = tmp_path / "src" / "paceline" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert facts.FIGURES[name](Source(tmp_path)) == 2


def test_tests_that_match_messages_and_codes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "with pytest.raises(ConfigError, match='a'): ...\n"
        "with pytest.raises((ConfigError, OSError), match='b'): ...\n"
        "with pytest.raises(RunError, match='c'): ...\n"
        "with raises_config(ConfigError, code='d'): ...\n"
        "with pytest.raises(ConfigError) as caught: ...\n"
        "assert caught.value.code == 'e' and other.value.code == 'f'\n",
        encoding="utf-8",
    )
    source = Source(tmp_path)
    assert facts.FIGURES["tests_matching_messages"](source) == 2
    assert facts.FIGURES["tests_matching_codes"](source) == 2
