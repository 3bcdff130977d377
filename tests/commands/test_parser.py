"""Test the command line: help, errors, overrides and completion."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import parse

from paceline.cli import VERBS, build_parser, main
from paceline.config.load import load_config
from paceline.config.overrides import split_cli
from paceline.core.errors import ConfigError

_HEAVY_MODULES = ("torch", "transformers", "datasets", "ray", "numpy", "fastapi")
#: Modules that the help texts of most commands do not need.
_SCHEMA_MODULES = ("pydantic", "paceline.config.schema")


@pytest.mark.parametrize("verb", ["", *VERBS, "data count", "data stats", "data preview"])
def test_help_imports_no_heavy_module(verb: str) -> None:
    without_schema = verb not in ("ui", "explain", "ray")
    heavy = (*_HEAVY_MODULES, *(_SCHEMA_MODULES if without_schema else ()))
    code = (
        "import sys\n"
        "from paceline.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        f"print(sorted(set({heavy}) & set(sys.modules)), file=sys.stderr)"
    )
    args = [*verb.split(), "--help"]
    completed = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    assert completed.stderr == "[]\n"
    assert completed.stdout.startswith(f"usage: paceline {verb}".rstrip())
    assert "example:" in completed.stdout


def test_help_fits_the_terminal_and_names_each_default_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    parser = build_parser(VERBS)
    assert "\nbefore a run:\n" in parser.format_help()
    for command in (parser, *parser.commands.values()):
        text = command.format_help().partition("example:")[0]
        assert max(map(len, text.splitlines())) <= 60, command.prog
        for option in (*command.options.values(), *command.positionals):
            assert (option.help or "").count("default: ") <= 1, option
    assert "paceline config [KEY] [options]" in parser.commands["config"].format_help()
    assert "RUN [QUESTION ...]" in parser.commands["generate"].format_help()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["plann"], "`paceline plann`: unknown command"),
        (["plan", "--world-size", "two"], "`--world-size two` is not an integer"),
        (["plan", "--world-size"], "`--world-size` needs a value"),
        (["plan", "--json=1"], "`--json` accepts no value"),
        (["plan", "--world-siz", "2"], "did you mean `--world-size`?"),
        (
            ["watch"],
            "`paceline watch` has missing or unexpected arguments. Allowed: paceline watch RUN",
        ),
        (["watch", "a", "b"], "`paceline watch a b` has missing or unexpected arguments"),
        (["watch", "a", "--onc"], "did you mean `--once`?"),
        (["explain", "ddp", "--html", "a.html"], "To fix: use `--output`"),
        (["generate", "a"], "needs a question"),
        (["generate", "a", "--serve", "--seed", "1"], "`--seed` is not supported with `--serve`"),
        (["ui", "--port", "70000"], "to 65535"),
    ],
)
def test_reports_invalid_usage(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_accepts_options_anywhere_and_underscores_in_names() -> None:
    args = parse("generate", "a", "--max_new_tokens=5", "Why?", "--temperature", "-0.5", "--json")
    expected = {
        "run_dir": Path("a"), "questions": ["Why?"], "max_new_tokens": 5, "temperature": -0.5,
        "json": True, "serve": False,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    "tokens",
    [
        ["lora.rank=4", "--learning_rate", "-1e-4", "--max_steps=3"],
        ["--lora_target", "q_proj", "v_proj", "--bf16", "x=--json y"],
        ["--warmup-steps", "0", "--adam_beta1", ".9", "model=a b"],
        ["-x", "--", "--max_steps"],
    ],
)
def test_passes_overrides_on_unchanged(tokens: list[str]) -> None:
    args = parse("plan", "--world-size", "2", "--json", *tokens)
    assert vars(args)["config_tokens"] == tokens
    assert vars(args)["world_size"] == 2


@pytest.mark.parametrize("tokens", [["-x"], ["--"], ["--max_steps"], ["three"], ["--x", "-y=1"]])
def test_invalid_overrides_have_the_error_of_the_config(
    tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(*split_cli(tokens))
    assert main(["plan", *tokens]) == 2
    assert capsys.readouterr().err == f"error: {caught.value.printed()}\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["pl"], ["plan"]),
        (["plan", "--wo"], ["--world-size"]),
        (["data", "st"], ["stats"]),
        (["data", "count", "--unit", ""], ["words", "tokens"]),
        (["bench", "collectives", "--algorithms", "r"], ["ring"]),
        (["explain", "all"], ["all-reduce"]),
        (["train", "--dry"], ["--dry-run"]),
    ],
)
def test_bash_completion_suggests_matches(
    args: list[str], expected: list[str], bash_script: str
) -> None:
    line = " ".join(repr(arg) for arg in ["paceline", *args])
    code = (
        f"{bash_script}\nCOMP_WORDS=({line}); COMP_CWORD={len(args)}; _paceline\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    completed = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines() == expected


@pytest.fixture(scope="module")
def bash_script() -> str:
    return completion_script("bash")


def completion_script(shell: str) -> str:
    command = [sys.executable, "-m", "paceline", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_completions_list_every_verb(shell: str) -> None:
    script = completion_script(shell)
    assert all(verb in script for verb in VERBS)
    assert "world-size" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
