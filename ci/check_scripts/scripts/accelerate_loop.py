"""Accelerate on two processes: accumulate(), clipping, a schedule, sequences of unequal length.

accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 4)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.out(hidden)


def collate(rows):
    tokens = pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "labels": torch.where(tokens > 0, tokens % 4, -100)}


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(17)
    rows = [torch.randint(1, 30, (int(length),)) for length in torch.randint(3, 12, (64,))]
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            logits = model(batch["tokens"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"rank {accelerator.process_index} batch {index} loss {loss.item()!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
