"""Test the count of live tensors that `paceline explain memory` shows."""

import torch

from paceline.explain.allocations import LiveStorages


def test_storages_count_from_their_allocation_until_they_are_freed() -> None:
    before = torch.ones(1000)
    with LiveStorages() as live:
        first = before * 2
        assert live.total_bytes == 4000
        view = first.view(10, 100)
        view.add_(1)
        assert live.total_bytes == 4000  # neither a view nor an operation in place allocates
        second = first + first
        assert live.total_bytes == live.peak_bytes == 8000
        assert live.bytes_of([first, view, before]) == 4000
        del second
        assert live.total_bytes == 4000
        del first
        assert live.total_bytes == 4000  # the view still needs it
        del view
        assert live.total_bytes == 0
        assert live.peak_bytes == 8000
