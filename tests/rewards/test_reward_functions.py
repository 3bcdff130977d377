"""Test which reward functions are accepted before a run starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.rewards.functions import check_reward_sources, load_function, needed_columns

FUNCTIONS = """
import functools

def length(completions, **kwargs):
    return [len(text) for text in completions]

def solved(completions, solution, step, hint=None, **kwargs):
    return [0.0] * len(completions)

def without_kwargs(completions, answer):
    return [0.0] * len(completions)

def positional(completions, /, **kwargs):
    return [0.0] * len(completions)

def stateful(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)

def logging(completions, log_extra=None, **kwargs):
    return [0.0] * len(completions)

class Judge:
    def __call__(self, prompts, completions, verdict, **kwargs):
        return [0.0] * len(completions)

judge = Judge()
short = functools.partial(length, limit=3)
number = 5
"""


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    # Each test has a module of its own.
    path = tmp_path / f"rewards_of_{request.node.name.partition('[')[0]}.py"
    path.write_text(FUNCTIONS)
    return path


def config_of(*rewards: dict[str, object]) -> Config:
    return Config.model_validate(
        {"model": "m", "dataset": "d", "task": "grpo", "rewards": list(rewards)}
    )


def test_columns_are_those_that_the_rewards_require(file: Path) -> None:
    config = config_of(
        {"function": f"{file}:length"},
        {"function": f"{file}:solved"},
        {"function": f"{file}:judge"},
        {"function": f"{file}:short"},
        {"function": f"{file}:logging"},
        {"name": "exact"},
        {"name": "choice", "column": "solution"},
        {"name": "format"},
        {"model": "./model"},
    )
    assert needed_columns(config) == ["solution", "verdict", "answer"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("lenght", "unknown-reward-function"),
        ("number", "unknown-reward-function"),
        ("Judge", "unknown-reward-function"),
        ("without_kwargs", "reward-signature"),
        ("positional", "reward-signature"),
        ("stateful", "reward-signature"),
    ],
)
def test_rejects_what_cannot_be_called(file: Path, name: str, code: str) -> None:
    with raises_error(ConfigError, code=code, naming=name):
        check_reward_sources(config_of({"function": f"{file}:{name}"}))


def test_suggests_a_similar_name(file: Path) -> None:
    with raises_error(ConfigError, code="unknown-reward-function") as caught:
        load_function(f"{file}:lenght")
    assert "length" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "missing-user-file"), ("x = (", "import-failed"), ("1 / 0", "user-code-failed")],
)
def test_rejects_files_that_cannot_be_imported(
    tmp_path: Path, content: str | None, code: str
) -> None:
    path = tmp_path / f"broken_{code.replace('-', '_')}.py"
    if content is not None:
        path.write_text(content)
    with raises_error(ConfigError, code=code):
        check_reward_sources(config_of({"function": f"{path}:length"}))


def test_rejects_missing_module() -> None:
    with raises_error(ConfigError, code="missing-module"):
        check_reward_sources(config_of({"function": "no_such_package.rewards:length"}))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not-a-reward-model"),
        ({"architectures": ["BertForSequenceClassification"]}, "not-a-reward-model"),
        (
            {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {"0": "a", "1": "b", "2": "c"},
            },
            "not-a-reward-model",
        ),
        (
            {"architectures": ["BertForTokenClassification"], "id2label": {"0": "a"}},
            "not-a-reward-model",
        ),
        ({}, "not-a-reward-model"),
        (None, "reward-model-missing"),
    ],
)
def test_rejects_models_without_one_label(
    tmp_path: Path, content: dict[str, object] | None, code: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with raises_error(ConfigError, code=code, naming=str(tmp_path)):
        check_reward_sources(config_of({"model": str(tmp_path)}))


def test_accepts_model_with_one_label(tmp_path: Path) -> None:
    content = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    check_reward_sources(config_of({"model": str(tmp_path)}))


def test_adapter_is_not_a_reward_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises_error(ConfigError, code="reward-model-missing") as caught:
        check_reward_sources(config_of({"model": str(tmp_path)}))
    assert "export" in str(caught.value.fix)


def test_math_needs_its_package() -> None:
    program = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from paceline.config.schema import Config\n"
        "from paceline.rewards.functions import check_reward_sources\n"
        "check_reward_sources(Config.model_validate(dict(model='m', dataset='d', task='grpo',"
        " rewards=[dict(name='math')])))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'paceline[math]'" in done.stderr
    assert "ConfigError" in done.stderr


def test_processes_import_no_torch() -> None:
    program = (
        "import sys, paceline.rewards.worker, paceline.rewards.scorer\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
