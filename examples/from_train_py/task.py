"""The Paceline side of the first four scripts: their model, data and loss, and nothing else."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


class Digits(paceline.Task):
    def build_datasets(self):
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(640, 64, generator=generator)
        labels = (images @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
        return TensorDataset(images, labels), None

    def build_model(self):
        torch.manual_seed(0)  # the seed of the scripts; without it: train_args.seed
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum")
