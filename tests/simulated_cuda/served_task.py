"""A click model whose loss checks the device of the rank."""

from paceline.tasks.recommend import RecommendTask


class ServedClicks(RecommendTask):
    """Fails if its batch or a weight is not on ``task_args.device``. Tables are on servers."""

    def loss(self, model, batch):
        tensors = [batch["label"], *(each for each in model.parameters() if not each.is_meta)]
        assert {tensor.device.type for tensor in tensors} == {self.config.task_args["device"]}
        return super().loss(model, batch)
