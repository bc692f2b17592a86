"""torchtune 0.6.1: accumulated gradients differ from those of one batch, because tokens are counted before the shift.

Run with python, with torchao 0.13: the recipe trains one step on four texts, as one batch and as two micro-batches. It
prints how far the change is from the exact gradient of the mean over all predicted tokens: 4e-07 and 0.01.
"""

import contextlib
import importlib.util
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from torchtune.models.llama3_1 import llama3_1

HERE, TUNE = Path(__file__).stem, "torchtune.training."
ROWS = [([7, 3, 9, 4], 1), ([5, 8, 2, 6, 1, 3], 0), ([4, 9, 1, 7, 2], 2), ([3, 6, 5, 8, 9, 2, 4, 1], 0)]
OPTIONS = f"""model._component_={HERE}.model dataset._component_={HERE}.dataset
optimizer._component_=torch.optim.SGD optimizer.lr=1.0 loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss
checkpointer._component_={TUNE}FullModelTorchTuneCheckpointer checkpointer.checkpoint_files=[first.pt] seed=0 epochs=1
checkpointer.recipe_checkpoint=null checkpointer.model_type=LLAMA3_2 resume_from_checkpoint=False shuffle=False
metric_logger._component_={TUNE}metric_logging.DiskLogger log_every_n_steps=1 log_peak_memory_stats=False device=cpu
dtype=fp32 compile=False optimizer_in_bwd=False enable_activation_checkpointing=False enable_activation_offloading=False
max_steps_per_epoch=1 clip_grad_norm=null tokenizer._component_=types.SimpleNamespace tokenizer.pad_id=0""".split()


def model():
    return llama3_1(16, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=16, intermediate_dim=32)


def dataset(tokenizer=None, **options):
    return [{"tokens": text, "labels": [-100] * prompt + text[prompt:]} for text, prompt in ROWS]


def trained(folder, rows):
    (recipes,) = importlib.util.find_spec("recipes").submodule_search_locations
    out = Path(tempfile.mkdtemp())
    sys.argv = ["tune", "--config", f"{folder}/config.yaml", *OPTIONS, f"output_dir={out}", f"batch_size={rows}"]
    sys.argv += [f"checkpointer.checkpoint_dir={folder}", f"checkpointer.output_dir={out}"]
    sys.argv += [f"metric_logger.log_dir={out}", f"gradient_accumulation_steps={4 // rows}"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(f"{recipes}/full_finetune_single_device.py", run_name="__main__")
    return torch.load(next(out.rglob("model-*.bin")), weights_only=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    exact, folder = model().double(), Path(tempfile.mkdtemp())
    first = {name: weight.detach().float() for name, weight in exact.named_parameters()}
    Path(folder, "config.yaml").write_text("{}")
    torch.save(first, folder / "first.pt")
    outputs = torch.cat([exact(torch.tensor([text]))[0, :-1] for text, _ in ROWS])
    labels = torch.tensor([label for row in dataset() for label in row["labels"][1:]])
    torch.nn.functional.cross_entropy(outputs, labels).backward()
    right = torch.cat([weight.grad.flatten() for weight in exact.parameters()])
    for rows in (4, 2):
        after = trained(folder, rows)
        change = torch.cat([(weight - after[name]).double().flatten() for name, weight in first.items()])
        print(f"micro-batches of {rows}: {float((change - right).norm() / right.norm()):.2g}")
