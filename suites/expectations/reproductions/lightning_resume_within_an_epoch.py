"""Lightning 2.6.6: training that resumes within an epoch starts that epoch's samples again.

Prints samples 0 to 3 for the training that stops after step 4. The resumed one prints 0 and 1 instead of 4 and 5.
"""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        print("sample", int(batch))
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


folder, model = tempfile.mkdtemp(), _Model()
model.weight = torch.nn.Parameter(torch.ones(1))
for said, steps, resumed in (("stopped after step 4", 4, None), ("resumed", -1, f"{folder}/last.ckpt")):
    print("lightning", lightning.__version__, "- samples 0 to 5 in order,", said)
    saved = lightning.pytorch.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=4)
    trainer = lightning.Trainer(max_epochs=1, max_steps=steps, accelerator="cpu", callbacks=[saved], **QUIET)
    trainer.fit(model, DataLoader(torch.arange(6.0)), ckpt_path=resumed)
