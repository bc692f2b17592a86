"""The Trainer of transformers on a Llama of two layers: accumulation, unequal token counts, clipping, warm-up.

torchrun --standalone --nproc-per-node 2 trainer_llama.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        print(f"rank {args.process_index} step {state.global_step} logs {logs!r}", flush=True)


def collate(rows):
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        labels[i, : len(row)] = row
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def main():
    set_seed(4)
    rows = [torch.randint(1, 60, (int(length),)) for length in torch.randint(4, 24, (64,))]
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        model = LlamaForCausalLM(config)
        trainer = Trainer(model, arguments, collate, rows, callbacks=[PrintLoss()])
        trainer.train()


if __name__ == "__main__":
    main()
