"""Count the bytes of tensors from their allocation until they are freed."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from paceline.distributed.torch_compat import TorchDispatchMode, tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations of this thread allocate within the block.

    Attributes:
        total_bytes: bytes of those that exist now; ``peak_bytes``: their maximum.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # address → bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Views and operations in place return the storage of an input.
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in inputs:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._sizes or not storage.nbytes():
            return
        self._sizes[address] = storage.nbytes()
        self.total_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        # The Python object of a storage exists as long as the storage.
        weakref.finalize(storage, self._remove, address)

    def _remove(self, address: int) -> None:
        self.total_bytes -= self._sizes.pop(address, 0)

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the counted bytes of the storages of ``tensors``."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return sum(self._sizes.get(address, 0) for address in addresses)
