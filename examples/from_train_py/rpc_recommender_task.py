"""The Paceline side of rpc_recommender.py: a model whose embedding table is a `Table`."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.models.recommend import Table


class Users(Table):
    @torch.no_grad()
    def fill(self, target, start):
        target.zero_()


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = Users(1000, 16)
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids, features):
        starts = torch.arange(len(ids) + 1)  # one id per sample
        vectors = self.users(self.users.fetch(ids), starts)
        return self.top(torch.cat([vectors, features], dim=1)).squeeze(1)


class Clicks(paceline.Task):
    def build_datasets(self):
        generator = torch.Generator().manual_seed(1)
        users = torch.randint(0, 1000, (640,), generator=generator)
        features = torch.randn(640, 8, generator=generator)
        clicks = (features.sum(dim=1) + (users % 7 - 3) > 0).float()
        return TensorDataset(users, features, clicks), None

    def build_model(self):
        return ClickModel()

    def loss(self, model, batch):
        ids, features, clicks = batch
        logits = model(ids, features)
        return functional.binary_cross_entropy_with_logits(logits, clicks, reduction="sum")
