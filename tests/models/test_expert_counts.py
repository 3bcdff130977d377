"""The tokens of each expert are counted once, without padding and without repeated passes."""

from types import SimpleNamespace

import pytest
import torch
from families import build_model
from torch.utils.checkpoint import checkpoint

from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.models.experts.counts import count_experts, record_aux_loss
from paceline.models.experts.layers import find_expert_layers
from paceline.train.callbacks.experts import ExpertRecorder

LENGTHS = (12, 5)
NUM_TOKENS = sum(LENGTHS)
#: Family → number of its layers with experts. Of the last five, transformers returns no logits.
MIXTURES = {
    "mixtral": 2,
    "qwen3_moe": 1,
    "olmoe": 2,
    "granitemoe": 2,
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "gpt_oss": 2,
    "llama4_text": 1,
    "qwen3_5_moe_text": 2,
}


def make_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 8192, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", MIXTURES)
def test_each_token_has_its_experts(name: str) -> None:
    model = build_model(name).train()
    counter = count_experts(model, torch.device("cpu"))
    assert counter is not None
    assert len(counter.layers) == MIXTURES[name]
    batch = make_batch()
    with counter.counting(batch):
        loss = model(**batch).logits.sum()
    loss.backward()
    model(**batch)  # outside of the micro-batch
    assert counter.tokens.sum(1).tolist() == [2 * NUM_TOKENS] * MIXTURES[name]
    assert counter.tokens.shape[1] == 4


def test_counts_are_the_choices_of_the_routers() -> None:
    model = build_model("mixtral").train()
    counter = count_experts(model, torch.device("cpu"))
    assert counter is not None
    batch = make_batch()
    with counter.counting(batch):
        output = model(**batch, output_router_logits=True)
    is_token = batch["attention_mask"].reshape(-1).bool()
    for logits, tokens in zip(output.router_logits, counter.tokens, strict=True):
        chosen = logits[is_token].topk(2, dim=-1).indices
        assert torch.bincount(chosen.reshape(-1), minlength=4).tolist() == tokens.tolist()


def test_evaluation_and_recomputation_do_not_count() -> None:
    model = build_model("mixtral").train()
    counter = count_experts(model, torch.device("cpu"))
    assert counter is not None
    batch = make_batch()
    with counter.counting(batch):
        loss = checkpoint(lambda: model(**batch).logits.sum(), use_reentrant=False)
        with torch.no_grad():
            model(**batch)
        model.eval()(**batch)
        record_aux_loss(torch.tensor(2.0))
    model.train()
    loss.backward()
    assert counter.tokens.sum(1).tolist() == [2 * NUM_TOKENS] * 2
    assert float(counter.aux_loss) == 2.0
    counter.clear()
    record_aux_loss(torch.tensor(2.0))
    assert int(counter.tokens.sum()) == 0
    assert float(counter.aux_loss) == 0.0


def test_dense_models_have_no_counter() -> None:
    model = build_model("qwen2")
    assert find_expert_layers(model) == []
    assert count_experts(model, torch.device("cpu")) is None


def test_padding_that_cannot_be_told_is_counted_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build_model("mixtral").train()
    counter = count_experts(model, torch.device("cpu"))
    assert counter is not None
    batch = make_batch()
    row = {name: tensor[:1] for name, tensor in batch.items()}
    recorder = ExpertRecorder(
        counter,
        SimpleNamespace(has_data=False),
        Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu")),
        False,
    )
    with counter.counting(batch):  # a task that passes one row after the other
        model(**row)
        model(**row)
    assert [getattr(record.msg, "code", None) for record in caplog.records] == [
        "experts-count-padding"
    ]
    assert int(counter.unmasked) == 2 * 2 * max(LENGTHS)  # two rows in two layers
    recorder.on_step_end(SimpleNamespace(outcome="updated"), None)
    recorder.update_total()
    assert recorder.report(1)["with_padding"] == 2 * 2 * max(LENGTHS)
    resumed = ExpertRecorder(recorder.counter, recorder.strategy, recorder.world, False)
    resumed.load_state_dict(recorder.state_dict())
    resumed.update_total()
    assert resumed.report(1)["with_padding"] == 2 * 2 * max(LENGTHS)
    whole = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    with counter.counting(whole):  # no padding, so nothing is wrong
        model(**row)
    assert int(counter.unmasked) == 0
