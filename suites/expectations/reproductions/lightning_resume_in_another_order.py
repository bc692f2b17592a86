"""Lightning 2.6.6, one device: a training that validates draws another order when it resumes with the same seed.

Prints the samples of a training that stops after step 1, and those of the resumed one. Without validation, the resumed
training starts the epoch again, in the same order.
"""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        print("samples", batch.int().tolist())

    validation_step = configure_optimizers = lambda self, *args: None


folder, model = tempfile.mkdtemp(), _Model()
for said, steps, resumed in (("stopped after step 1", 1, None), ("resumed", -1, f"{folder}/last.ckpt")):
    print("lightning", lightning.__version__, "- seed 1,", said)
    lightning.seed_everything(1)
    saved = lightning.pytorch.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=1)
    options = {"max_epochs": 1, "max_steps": steps, "val_check_interval": 1, "num_sanity_val_steps": 0, **QUIET}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[saved], **options)
    trainer.fit(model, DataLoader(torch.arange(6.0), 2, shuffle=True), DataLoader(torch.ones(2)), ckpt_path=resumed)
