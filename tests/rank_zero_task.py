"""A task with which work that rank 0 does alone is slow, and makes progress.

``task_args``: ``slow``, one of ``save_model``, ``shards``, ``upload`` and ``evaluate``, or
``stand_still`` for a ``save_model`` that makes no progress; and ``seconds``, how long it takes.
"""

import os
import shutil
import time

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import writer

#: Number of pieces of the slow work.
PIECES = 25


class SlowRankZero(paceline.Task):
    def build_datasets(self):
        self.pause_s = float(self.config.task_args["seconds"]) / PIECES
        slow = self.config.task_args["slow"]
        if slow == "upload":
            LocalFileSystem.put_file = self.put_file
        if slow == "shards" and os.environ.get("RANK") == "1":
            writer._CHUNK_BYTES = 6 * SIZE // PIECES  # of the weights and their state in AdamW
            self.write, writer._write = writer._write, self.write_slowly
        return TensorDataset(torch.ones(16, 1)), TensorDataset(torch.ones(PIECES, 1))

    def build_model(self):
        return nn.Linear(SIZE, 1, bias=False)

    def loss(self, model, batch):
        return model(batch[0].expand(-1, SIZE)).square().sum()

    def evaluate(self, model, batch):
        if self.config.task_args["slow"] == "evaluate":
            time.sleep(self.pause_s)
        return {"loss": self.loss(model, batch)}

    def save_model(self, model, folder):
        slow = self.config.task_args["slow"]
        if slow == "stand_still":
            time.sleep(self.pause_s * PIECES)
        if slow == "save_model":
            for number in range(PIECES):
                time.sleep(self.pause_s)
                (folder / f"piece-{number}").write_text("written")
        super().save_model(model, folder)

    def put_file(self, source, target, callback=None, **_):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # A checkpoint has several files, of which one is as large as all others together.
        if source.endswith(".safetensors"):
            for _ in range(PIECES):
                time.sleep(self.pause_s)
                callback.relative_update(1)
        shutil.copyfile(source, target)

    def write_slowly(self, sink, digest, data, tick):
        def pause():
            time.sleep(self.pause_s)
            tick()

        self.write(sink, digest, data, pause)


#: Number of the model's weights.
SIZE = 5000
