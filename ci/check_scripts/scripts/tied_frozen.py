"""A language model with tied embeddings and a frozen first layer, labels with ignore_index, gradients averaged by DDP.

torchrun --standalone --nproc-per-node 2 tied_frozen.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LanguageModel(nn.Module):
    def __init__(self, words=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Embedding(32, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.position.requires_grad_(False)

    def forward(self, tokens, labels):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.head(torch.tanh(self.hidden(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(LanguageModel())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    torch.manual_seed(1 + rank)
    for step in range(4):
        tokens = torch.randint(0, 40, (6, 13))
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(3, 13, (6,)).tolist()):
            labels[row, length:] = -100
        loss = model(tokens[:, :-1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
