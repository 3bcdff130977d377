"""`paceline explain context`: attention over a row whose tokens are divided among ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import torch

from paceline.core.files import human_bytes
from paceline.data.collate import segment_inputs
from paceline.data.context.rows import RowDivision, divide_row
from paceline.distributed.call_log import CountedCall
from paceline.distributed.traffic import log_calls
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import Cell, Check, DrawnMessage, DrawnRow, Tone
from paceline.messages.pages import PageText
from paceline.models.attention import packed_attention
from paceline.models.context.blocks import AttentionBlock, RingStep, TokenRange, ring_steps
from paceline.models.context.gather import grouped_heads
from paceline.models.context.kernels import BlockOutput, CpuBlocks, visible_keys
from paceline.models.context.ring import Ring, ring_attention
from paceline.models.context.ulysses import ulysses_attention
from paceline.models.kernels.fused_attention import States

_HEAD_SIZE = 4
_TOLERANCE = 1e-5
_ABOUT = {
    "ring": (
        "Two samples share a row that is too long for one rank. It is cut into two chunks per rank,"
        " and rank r has chunk r from the front and chunk r from the back, so all ranks compute"
        " equally many pairs of a query and a key. In step s, each rank computes with the keys of"
        " the rank s places before it, and meanwhile receives the keys of the next step. Only keys"
        " are sent to which some query attends: tokens before it, of its own sample."
    ),
    "ulysses": (
        "Two samples share a row that is too long for one rank, and each rank has some of its"
        " tokens. Before attention, an all-to-all gives each rank all tokens of its share of the"
        " heads. It computes them as if the row were not divided. Another all-to-all gives it back"
        " all heads of its own tokens. Backward makes the same two exchanges in reverse."
    ),
}


#: ``from``, ``to``: ranks; ``positions``: positions in the row of the tokens whose keys or
#: gradients are sent; ``to`` and ``positions`` are missing in an all-to-all.
ShownSend = TypedDict(
    "ShownSend",
    {"from": int, "to": NotRequired[int], "positions": NotRequired[list[int]], "bytes": int},
)


class ShownStep(TypedDict):
    """A step in the JSON output."""

    phase: str
    step: int
    what: str
    sends: list[ShownSend]


@dataclass
class _RecordingBlocks(CpuBlocks):
    """The kernel of ring attention, which notes the blocks that it computes.

    Args:
        computed: the blocks of each call in forward.
    """

    computed: list[tuple[AttentionBlock, ...]] = field(default_factory=list)

    def forward(
        self, states: States, blocks: Sequence[AttentionBlock], scale: float
    ) -> Iterator[BlockOutput]:
        self.computed.append(tuple(blocks))
        return super().forward(states, blocks, scale)


class ContextTopic(RankTopic):
    """Run forward and backward of attention over a divided row on real ranks.

    The figures: ``algorithm, ranks, samples`` (their lengths), ``positions`` (of each rank's
    tokens), and ``steps: [{phase, step, what, sends: [{from, to, positions, bytes}]}]``; with
    ``ring``, also ``pairs`` (of each rank in each step). The sends of ``ulysses`` are all-to-alls,
    without ``to`` and ``positions``.

    Attributes:
        forward_calls, backward_calls: counted calls of this rank.
        computed: with ``ring``, the blocks of each step.
        errors: largest differences of the output and of the gradients from one rank's results.
    """

    def run(self) -> None:
        world, size = self.world, self.world.size
        self.division = divide_row((size + 1, 3 * size - 1), size)
        self.own = self.division.positions(world.rank).tolist()
        self.about = _ABOUT[self.options.algorithm]
        self.title = PageText(
            "Context parallelism ({algorithm}): a row of {tokens:token} on {ranks:rank}",
            algorithm=self.options.algorithm,
            tokens=self.division.num_tokens,
            ranks=size,
        )
        # Every rank has as many heads as there are ranks, so `ulysses` can divide them.
        *states, grad = _make_states(self.division.num_tokens, size)
        parts = [state[self.own].clone().requires_grad_() for state in states]
        kernel = _RecordingBlocks()
        self.ring_steps = ring_steps(self.division.lengths, size, world.rank)
        with self.count_traffic():
            with log_calls() as self.forward_calls:
                output = self._attend((parts[0], parts[1], parts[2]), kernel)
            with log_calls() as self.backward_calls:
                output.backward(grad[self.own])
        self.computed = kernel.computed
        results = [output.detach(), *(part.grad for part in parts)]
        expected = _whole_row(states, grad, self.division)
        self.errors = [
            float((result - whole[self.own]).abs().max())
            for result, whole in zip(results, expected, strict=True)
            if result is not None
        ]

    def _attend(self, states: States, kernel: CpuBlocks) -> torch.Tensor:
        if self.options.algorithm == "ring":
            scale = _HEAD_SIZE**-0.5
            return ring_attention(states, Ring(self.world, self.ring_steps, scale, kernel))

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return _packed((query, key, value), self.division)

        return ulysses_attention(states, self.division, self.world, attend)

    def rank_frames(self) -> Iterator[RankFrame]:
        if self.options.algorithm == "ring":
            return self._ring_frames()
        return self._ulysses_frames()

    # -- ring

    def _ring_frames(self) -> Iterator[RankFrame]:
        names = _names(self.division)
        needed = _needed(self.division)
        attended = [0] * len(self.own)
        forward = dict(self._steps_of(self.forward_calls, is_forward=True))
        backward = dict(self._steps_of(self.backward_calls, is_forward=False))

        def rows(changed: Sequence[int], keys: Sequence[str]) -> tuple[DrawnRow, ...]:
            cells = []
            for index, position in enumerate(self.own):
                total = needed[position]
                tone: Tone = "new" if index in changed else ""
                if attended[index] == total and index not in changed:
                    tone = "done"
                text = PageText(
                    "{name}: {count} of {total}",
                    name=names[position],
                    count=attended[index],
                    total=total,
                )
                cells.append(Cell(text, fill=attended[index] / total, tone=tone))
            received = tuple(Cell(name) for name in keys) or (Cell("", tone="idle"),)
            return DrawnRow("queries", tuple(cells)), DrawnRow("keys at hand", received)

        yield RankFrame(
            "Each rank has two chunks of the row. A query shows to how many of its keys it has"
            " attended: the tokens of its sample up to itself.",
            rows((), [names[position] for position in self.own]),
            is_key=True,
        )
        for number, step in enumerate(self.ring_steps):
            changed = self._attended(number, attended)
            source = self.division.positions(step.source).tolist()
            keys = [names[source[index]] for index in _indices(step.received)]
            caption = _CAPTIONS[number > 0]
            yield RankFrame(
                PageText(caption, step=number),
                rows(changed, keys),
                phase="forward",
                messages=self._messages(forward.get(("keys", number)), step.sent, self.own, "keys"),
                is_key=True,
            )
        last = rows((), [names[position] for position in self.own])
        for number, step in enumerate(self.ring_steps[1:], 1):
            source = self.division.positions(step.source).tolist()
            yield RankFrame(
                PageText(
                    "Backward, step {step}: the same keys are sent again, because they were not"
                    " kept.",
                    step=number,
                ),
                last,
                phase="backward",
                messages=self._messages(
                    backward.get(("keys", number)), step.sent, self.own, "keys"
                ),
            )
            yield RankFrame(
                PageText(
                    "Backward, step {step}: the gradients of received keys and values return to"
                    " their rank, which adds them up.",
                    step=number,
                ),
                last,
                phase="backward",
                messages=self._messages(
                    backward.get(("gradients", number)), step.received, source, "gradients"
                ),
                is_key=number == 1,
            )

    def _attended(self, number: int, attended: list[int]) -> list[int]:
        """Add the pairs that were computed in a step. Return the queries that they belong to."""
        changed = set()
        for block in self.computed[number]:
            like = torch.empty(0)
            pairs = visible_keys(block.num_queries, block.num_keys, block.window, like).sum(1)
            for query, count in enumerate(pairs.tolist(), block.queries[0]):
                attended[query] += count
                changed.add(query)
        return sorted(changed)

    def _steps_of(
        self, calls: Sequence[CountedCall], is_forward: bool
    ) -> Iterator[tuple[tuple[str, int], CountedCall]]:
        """Yield each call with what it sends and its step. A rank makes no call for a step in which
        it neither sends nor receives."""
        order = [("keys", 1)]
        for number in range(1, len(self.ring_steps)):
            order.append(("keys", number + 1))
            if not is_forward:
                order.append(("gradients", number))
        left = iter(calls)
        for kind, number in order:
            if number < len(self.ring_steps):
                step = self.ring_steps[number]
                if step.sent or step.received:
                    yield (kind, number), next(left)

    def _messages(
        self,
        call: CountedCall | None,
        ranges: Sequence[TokenRange],
        positions: Sequence[int],
        kind: str,
    ) -> tuple[DrawnMessage, ...]:
        names = _names(self.division)
        sent = [names[positions[index]] for index in _indices(ranges)]
        template = "keys and values of {names}" if kind == "keys" else "gradients of {names}"
        return tuple(
            DrawnMessage(
                self.world.rank, target, PageText(template, names=_short(sent)), size_bytes
            )
            for target, size_bytes in (() if call is None else call.messages)
        )

    # -- ulysses

    def _ulysses_frames(self) -> Iterator[RankFrame]:
        names = _names(self.division)
        rank, size = self.world.rank, self.world.size
        own = tuple(Cell(names[position], ranks=(rank,)) for position in self.own)
        holders = {
            position: holder
            for holder in range(size)
            for position in self.division.positions(holder).tolist()
        }
        row = tuple(
            Cell(names[position], ranks=(holders[position],), tone="new")
            for position in range(self.division.num_tokens)
        )

        def heads(count: int) -> tuple[Cell, ...]:
            return tuple(
                Cell(
                    PageText("head {head}", head=head),
                    tone="" if count == size or head == rank else "idle",
                )
                for head in range(size)
            )

        def drawn(tokens: tuple[Cell, ...], num_heads: int) -> tuple[DrawnRow, ...]:
            return DrawnRow("tokens", tokens), DrawnRow("heads", heads(num_heads))

        yield RankFrame(
            "Each rank has the queries, keys and values of all heads, for its tokens.",
            drawn(own, size),
            is_key=True,
        )
        captions = (
            "An all-to-all: each rank now has all tokens of one head, in the order of the row, and"
            " computes their attention.",
            "Another all-to-all: each rank has the output of all heads, for its tokens.",
            "Backward: the gradients of the output go to the rank that computed the head.",
            "Backward: the gradients of queries, keys and values return to the rank of the token.",
        )
        labels = ("queries, keys, values", "output", "gradient", "gradients")
        calls = [*self.forward_calls, *self.backward_calls]
        for number, (caption, label, call) in enumerate(zip(captions, labels, calls, strict=True)):
            is_divided = number % 2 == 0
            yield RankFrame(
                caption,
                drawn(row if is_divided else own, 1 if is_divided else size),
                calls=[call],
                label=label,
                phase="forward" if number < 2 else "backward",
                is_key=True,
            )

    # -- what holds for both

    def checks(self) -> list[Check]:
        checks = [
            self.check_ranks("same output as on one rank", self.errors[0] <= _TOLERANCE),
            self.check_ranks("same gradients as on one rank", max(self.errors[1:]) <= _TOLERANCE),
        ]
        if self.options.algorithm == "ring":
            pairs = sum(sum(each) for each in self._pairs())
            checks.append(
                Check.equal("pairs of a query and a key", pairs, sum(_needed(self.division)))
            )
        return checks

    def _pairs(self) -> list[list[int]]:
        """Return how many pairs each rank has computed in each step."""
        own = []
        for blocks in self.computed:
            counts = [
                int(visible_keys(b.num_queries, b.num_keys, b.window, torch.empty(0)).sum())
                for b in blocks
            ]
            own.append(sum(counts))
        return self.gather(own)

    def facts(self) -> dict[str, str]:
        sent = self.gather(self.counted_bytes)
        facts = {
            "Tokens per rank": str(len(self.own)),
            "Sent by the rank that sends most": human_bytes(max(sent)),
        }
        if self.options.algorithm == "ring":
            facts["Pairs of each rank"] = ", ".join(str(sum(each)) for each in self._pairs())
        return facts

    def add_figures(self) -> None:
        size = self.world.size
        self.figures.update(
            samples=list(self.division.lengths),
            positions=[self.division.positions(rank).tolist() for rank in range(size)],
            steps=self._figures_of_steps(),
        )
        if self.options.algorithm == "ring":
            self.figures["pairs"] = self._pairs()

    def _figures_of_steps(self) -> list[ShownStep]:
        """Return what was sent in each step, in the order in which the steps are shown."""
        phases = (("forward", self.forward_calls), ("backward", self.backward_calls))
        sends: dict[tuple[str, str, int], list[ShownSend]] = {}
        for phase, calls in phases:
            if self.options.algorithm == "ring":
                named = list(self._steps_of(calls, phase == "forward"))
            else:
                named = [(("all-to-all", number), call) for number, call in enumerate(calls, 1)]
            for (kind, number), call in named:
                sends.setdefault((phase, kind, number), []).extend(self._sends(kind, number, call))
        gathered = self.gather(sends)
        steps: list[ShownStep] = []
        for key in sorted({key for each in gathered for key in each}, key=_order):
            phase, kind, number = key
            shown = [send for each in gathered for send in each.get(key, ())]
            steps.append({"phase": phase, "step": number, "what": kind, "sends": shown})
        return steps

    def _sends(self, kind: str, number: int, call: CountedCall) -> list[ShownSend]:
        rank = self.world.rank
        if kind == "all-to-all":
            return [{"from": rank, "bytes": call.size_bytes}]
        step: RingStep = self.ring_steps[number]
        if kind == "keys":
            ranges, positions = step.sent, self.own
        else:
            ranges = step.received
            positions = self.division.positions(step.source).tolist()
        return [
            {
                "from": rank,
                "to": target,
                "positions": [positions[index] for index in _indices(ranges)],
                "bytes": size_bytes,
            }
            for target, size_bytes in call.messages
        ]


_CAPTIONS = (
    "Step {step}: each rank attends to its own keys. The keys of step 1 are already on their way.",
    "Step {step}: with the received keys, the results are merged by their log-sum-exp.",
)


def _order(key: tuple[str, str, int]) -> tuple[bool, int, bool]:
    phase, kind, number = key
    return phase == "backward", number, kind == "gradients"


def _names(division: RowDivision) -> list[str]:
    """Return a name for each token: the letter of its sample, and its position in the sample."""
    return [
        f"{chr(ord('A') + sample)}{position}"
        for sample, length in enumerate(division.lengths)
        for position in range(length)
    ]


def _needed(division: RowDivision) -> list[int]:
    """Return to how many keys each token of the row attends."""
    return [position + 1 for length in division.lengths for position in range(length)]


def _indices(ranges: Sequence[TokenRange]) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, …, {names[-1]}"


def _make_states(num_tokens: int, heads: int) -> list[torch.Tensor]:
    """Return queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_tokens, heads, _HEAD_SIZE, generator=generator) for _ in range(4)]


def _packed(states: States, division: RowDivision) -> torch.Tensor:
    query, key, value = states
    heads = grouped_heads(query.shape[1], key.shape[1])
    segments = segment_inputs(division.lengths)
    output, _ = packed_attention(heads, query, key, value, None, **segments)
    return output


def _whole_row(
    states: Sequence[torch.Tensor], grad: torch.Tensor, division: RowDivision
) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values on one rank."""
    query, key, value = (state.clone().requires_grad_() for state in states)
    rows = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
    output = _packed((rows[0], rows[1], rows[2]), division).squeeze(0)
    grads = torch.autograd.grad(output, (query, key, value), grad)
    return [output.detach(), *grads]
