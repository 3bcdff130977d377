"""Training on all GPUs of a machine with nn.DataParallel."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(1)
images = torch.randn(640, 64, generator=generator)
labels = (images @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
loader = DataLoader(TensorDataset(images, labels), batch_size=64)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
model = nn.DataParallel(model)  # divides each batch among the GPUs; without a GPU it does nothing
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}")
torch.save(model.module.state_dict(), "model.pt")
