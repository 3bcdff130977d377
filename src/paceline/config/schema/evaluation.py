"""The section ``evaluation``."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.schema.base import Names, Section


class LmEval(Section):
    """What lm-evaluation-harness evaluates when a run is done."""

    tasks: Names = Field(description="Names of tasks or groups of tasks.")
    include_path: str | None = Field(None, description="Folder with further tasks as YAML files.")
    limit: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of rows of each task. null: all."
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="Number of examples in each prompt. null: as the task defines it."
    )
    batch_size: int = Field(8, ge=1, description="Number of prompts per forward pass.")
    apply_chat_template: bool = Field(
        False, description="Format the prompts with the chat template of the tokenizer."
    )


class Evaluation(Section):
    """Evaluation on the validation data."""

    mode: Literal["distributed", "rank0"] = Field(
        "distributed",
        description=(
            "`distributed`: every rank evaluates a part, exact to the last row. `rank0`: rank 0"
            " evaluates everything, for comparison."
        ),
    )
    num_samples: int = Field(
        3,
        ge=0,
        le=100,
        description=(
            "Answers generated for held-out prompts at each evaluation and recorded with"
            " their references (`sft`, `pretrain`); training is not affected. 0 disables"
            " them."
        ),
    )
    max_new_tokens: int = Field(
        64, ge=1, description="Maximum length of a generated answer in tokens."
    )
    metrics: Names = Field(
        default_factory=list,
        description=(
            "Metrics of text at each evaluation: of the predicted tokens (`token_accuracy`,"
            " `perplexity`) or of generated answers (`exact_match`, `f1`, `rouge`, `bleu`, `chrf`,"
            " `ter`, or a function of yours as `./metrics.py:function`)."
        ),
    )
    metric_rows: Annotated[int, Field(ge=1)] | None = Field(
        100,
        description=(
            "Rows of the validation data, spread evenly, for which answers are generated for"
            " `metrics`. null: all rows."
        ),
    )
    lm_eval: LmEval | None = Field(
        None,
        description=(
            "Evaluate the trained model with lm-evaluation-harness when the run is done (extra"
            " `lm-eval`)."
        ),
    )
