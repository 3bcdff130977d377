"""What exists on a rank during a step of sharded training, beside its shards."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parallel.cost import Workload


@dataclass
class GatheredUnit:
    """Bytes of the parameters that FSDP gathers together: a block, the embedding, the head, or the
    root with all other parameters.

    Args:
        weights: when they are gathered. The message in which they arrive has the same size.
        gradients: bytes of the gradients of the gathered weights.
        message: the gradients as they are reduce-scattered.
        shards: a rank's parts of the reduced gradients.
        largest: bytes of the parameter with the largest gradient.
        fused, smallest_fused: bytes of all gradients of fused experts, and of the smallest one.
    """

    weights: int = 0
    gradients: int = 0
    message: int = 0
    shards: int = 0
    largest: int = 0
    fused: int = 0
    smallest_fused: int = 0


@dataclass(frozen=True)
class StepTimeline:
    """What exists during a step in addition to the shards of the weights and the optimizer's state.

    Args:
        embedding, head: empty if the root has their weights.
        experts: the experts of each block, if they are units of their own because other ranks share
            them; else empty.
        saved: bytes that each block saves for backward.
        reshards: whether the weights of blocks and embedding are freed after forward (stage 3).
        ends_tied: whether the embedding and the head share a weight.
        gathers_experts: whether the experts are sharded, so that they arrive in messages.
    """

    root: GatheredUnit
    embedding: GatheredUnit
    blocks: Sequence[GatheredUnit]
    head: GatheredUnit
    experts: Sequence[GatheredUnit]
    saved: Sequence[int]
    work: Workload
    num_shards: int
    reshards: bool
    ends_tied: bool
    gathers_experts: bool = True

    def peak_bytes(self) -> int:
        """Return the peak of activations, gathered weights, messages and gradients."""
        num = self.work.micro_batches
        # Stage 2 frees the weights in the last backward. Gradients are added to the gradients of
        # the micro-batches before.
        passes = [(self.reshards or number == num - 1, number > 0) for number in range(min(num, 3))]
        if num > 2:
            passes[-1] = (True, True)
        return round(max(self._forward(), *(self._backward(*each) for each in passes)))

    def _forward(self) -> float:
        """Return the peak until the loss is computed.

        FSDP frees the message of a unit when the weights of the next have been copied out of
        theirs, or at the end of the forward.
        """
        root, embedding, head = self.root.weights, self.embedding.weights, self.head.weights
        first, before, last = (self._block(index) for index in (0, -2, -1))
        gradients = self._all_shards() if self.work.micro_batches > 1 else 0
        activations = self.work.activations
        saved = activations.other_micro_batches + activations.at_loss
        gathered = self._gathered()
        with_message = gathered - head + last.weights
        in_block = with_message + saved + (last.weights if self.reshards else 0)
        at_end = gathered + saved + activations.ends
        moments = [
            2 * root + 2 * embedding,
            # The message of the embedding or of the root exists until the first block is gathered.
            root + (embedding or root) + 2 * first.weights + (0 if self.reshards else embedding),
            # The weights of the last block are copied out.
            in_block + before.weights - (self.saved[-1] if self.saved else 0),
            # The message of the experts replaces the message of the block.
            in_block - last.weights + self._arriving(-1) + activations.in_forward
            if self.experts
            else in_block + (activations.in_forward or activations.temporary),
            # The weights of the head are copied out.
            with_message + 2 * head + saved,
            at_end + (head or last.weights) + activations.loss.in_model,
            at_end + activations.loss.forward,
        ]
        return gradients + max(moments)

    def _block(self, index: int) -> GatheredUnit:
        """Return a block, or the root if there is no such block."""
        return self.blocks[index] if -len(self.blocks) <= index < len(self.blocks) else self.root

    def _backward(self, frees: bool, accumulates: bool) -> float:
        """Return the peak of a backward.

        The root is gathered until the end, the head until backward reaches the blocks, and each
        block when backward reaches it, while the next one's message arrives. The gradients of a
        unit exist in full at its end, with the message of the unit before.

        Args:
            frees: whether the weights of a unit are freed after its backward.
            accumulates: whether the shards of all gradients exist already.
        """
        root, embedding, head, blocks = self.root, self.embedding, self.head, self.blocks
        activations = self.work.activations
        shards = self._all_shards() if accumulates else 0
        moments = [shards + self._backward_of_loss()]
        saved = activations.other_micro_batches + sum(self.saved)
        gathered = self._gathered() - (head.weights if frees else 0)
        moments += self._reduction(head, saved + shards + gathered + self._prefetched(len(blocks)))
        message = head.message
        shards += 0 if accumulates else head.shards
        # Without a unit of its own, the gradient of the head exists until the end.
        of_head = 0 if head.weights else root.largest
        for number in reversed(range(len(blocks))):
            block = blocks[number]
            weights = gathered
            if self.reshards:
                weights += block.weights + self._prefetched(number)
            present = shards + weights + of_head + message
            moments += self._experts(number, present, saved, message)
            if self.experts and self.experts[number].weights:
                present += self.experts[number].message - message
                shards += 0 if accumulates else self.experts[number].shards
            saved -= self.saved[number]
            moments.append(present + saved + block.gradients)
            message = block.message
            shards += 0 if accumulates else block.shards
            gathered -= block.weights if frees and not self.reshards else 0
        others = saved + shards + gathered + message
        if self.reshards:  # The weights of the embedding are copied out if it is trained.
            moments.append(others + (2 if embedding.gradients else 1) * embedding.weights)
            others += embedding.weights
        # Of a tied weight, both gradients and their sum.
        gradients = (3 if self.ends_tied else 1) * root.gradients
        moments.append(others + gradients + embedding.gradients)
        # At the end, FSDP frees and reduces the root before the embedding.
        others += embedding.gradients - message - (root.weights if frees else 0)
        moments += self._reduction(root, others, is_tied=self.ends_tied)
        others -= embedding.gradients + (embedding.weights if frees else 0)
        others += 0 if accumulates else root.shards
        moments += self._reduction(embedding, others)
        return max(moments)

    def _experts(self, number: int, present: float, saved: float, message: int) -> list[float]:
        """Return the bytes at the moments of the backward of a block until the gradients of its
        experts are reduced; without experts, when the gradient of its largest matrix is computed,
        with which backward begins.

        Args:
            present: bytes of weights, gradients and messages.
            saved: what this block and the blocks before it have saved.
            message: bytes of the message among ``present``.
        """
        block, activations = self.blocks[number], self.work.activations.of_layer(number)
        saved_and_repeated = saved + activations.recomputed
        if not self.experts or not self.experts[number].weights:
            computing = activations.of_block(block.largest, block.smallest_fused, block.fused)
            return [present + saved_and_repeated + computing]
        experts = self.experts[number]
        computing = activations.of_block(block.largest, experts.smallest_fused, experts.fused)
        complete = present + saved - self.saved[number] + experts.gradients
        return [
            # The experts are gathered.
            present + saved + self._arriving(number),
            present + saved_and_repeated + experts.weights + computing,
            # Their message exists while backward repeats their forward pass.
            present + saved_and_repeated + self._arriving(number) + activations.in_repeated_experts,
            # Their gradients are complete, and then in their message.
            complete + experts.weights,
            complete + experts.message - message,
        ]

    def _arriving(self, number: int) -> int:
        """Return the bytes of the experts of a block and of the message in which they arrive."""
        return (2 if self.gathers_experts else 1) * self.experts[number].weights

    def _reduction(
        self, unit: GatheredUnit, present: float, is_tied: bool = False
    ) -> tuple[float, float]:
        """Return the bytes when the gradients of a unit are in their message, and when their sums
        are received: FSDP frees the gradients before, except the last one, and casts the sums.

        Args:
            present: bytes of everything else.
        """
        last = 0 if is_tied else unit.largest
        received = unit.message // self.num_shards
        received += unit.shards if received != unit.shards else 0
        present += unit.message
        return present + unit.gradients, present + received + last

    def _prefetched(self, number: int) -> int:
        """Return the bytes of the message that arrives during the backward of a block, or of the
        head after the last block."""
        before = self.blocks[number - 1] if number else self.embedding
        return before.weights if self.reshards else 0

    def _backward_of_loss(self) -> float:
        """Return the peak from the start of a backward to the last block."""
        activations, loss = self.work.activations, self.work.activations.loss
        saved = activations.other_micro_batches + activations.at_loss + activations.ends
        saved += self._gathered()
        largest = (self.head if self.head.weights else self.root).largest
        of_head = loss.output_gradient + largest + loss.input_gradient
        of_head = loss.backward if loss.in_chunks else of_head
        return saved + max(loss.backward, of_head + self._prefetched(len(self.blocks)))

    def _gathered(self) -> int:
        """Return the bytes of the weights that are gathered when backward reaches the head."""
        gathered = self.root.weights + self.head.weights
        if self.reshards:
            return gathered
        return gathered + self.embedding.weights + sum(block.weights for block in self.blocks)

    def _all_shards(self) -> int:
        units = (self.root, self.embedding, self.head, *self.blocks, *self.experts)
        return sum(unit.shards for unit in units)
