"""An interrupted training ends like an uninterrupted one."""

from __future__ import annotations

import pytest
import torch

from plumbline.trainer import MisconfigurationError, Trainer
from plumbline.trainer.checkpoints import read, write


@pytest.fixture
def scheduled(problem):
    class Scheduled(problem.Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            by_step = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 9], 0.7)
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]

    return Scheduled


def trainer_for(world, **options):
    backend = "ddp" if world > 1 else None
    options = {"max_epochs": 3, "precision": 64, **options}
    return Trainer(gpus=world, distributed_backend=backend, accelerator="cpu", accumulate_grad_batches=2, **options)


def test_resuming_in_the_middle_of_epoch_2_with_other_ranks(problem, scheduled, tmp_path):
    whole = scheduled(batch_size=2, samples=32)
    trainer_for(1, max_epochs=3)  # a trainer that is never used leaves nothing behind
    whole_trainer = trainer_for(2)
    whole_trainer.fit(whole)

    # 32 samples in batches of 4 over all ranks: 8 micro-batches, 4 steps an epoch; 6 steps are epoch 1, batch
    # 4.
    path = str(tmp_path / "at-{step}.ckpt")
    first = scheduled(batch_size=2, samples=32)
    trainer_for(2, max_steps=6, checkpoint_every=3, checkpoint_path=path).fit(first)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["at-3.ckpt", "at-6.ckpt"]
    saved = read(tmp_path / "at-6.ckpt")
    assert (saved["epoch"], saved["batches"], saved["global_step"]) == (1, 4, 6)

    for world, batch_size in ((1, 4), (4, 1), (2, 2)):
        resumed = scheduled(batch_size=batch_size, samples=32, log=None)
        torch.nn.init.zeros_(resumed.net[0].weight)  # nothing of the new module may remain
        trainer = trainer_for(world)
        trainer.fit(resumed, ckpt_path=tmp_path / "at-6.ckpt")
        assert problem.same_weights(resumed.net, whole.net, 1e-12), world
        assert trainer.global_step == whole_trainer.global_step == 12
        rates = [t.checkpoint()["optimizers"][0]["param_groups"][0]["lr"] for t in (trainer, whole_trainer)]
        assert rates[0] == rates[1] == pytest.approx(0.1 * 0.7**3 * 0.9**3)

    with pytest.raises(MisconfigurationError, match="do not divide into batches of 3"):
        trainer_for(1).fit(scheduled(batch_size=3, samples=32), ckpt_path=tmp_path / "at-6.ckpt")
    with pytest.raises(MisconfigurationError, match="different optimizers, schedulers or precision"):
        trainer_for(1).fit(problem.Regression(batch_size=4, samples=32), ckpt_path=tmp_path / "at-6.ckpt")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_amp_restores_scale_and_masters(problem, tmp_path, level):
    def fit(steps=None, **options):
        module = problem.Regression().float()
        module.dataset.inputs, module.dataset.targets = (
            module.dataset.inputs.float(),
            module.dataset.targets.float(),
        )
        trainer = Trainer(accelerator="cpu", precision=16, amp_level=level, max_epochs=2, max_steps=steps)
        trainer.fit(module, **options)
        return module, trainer

    whole, whole_trainer = fit()
    _, interrupted = fit(steps=7)
    interrupted.save_checkpoint(tmp_path / "deep" / "seven.ckpt")
    resumed, trainer = fit(ckpt_path=tmp_path / "deep" / "seven.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    final, expected = trainer.checkpoint()["precision"], whole_trainer.checkpoint()["precision"]
    assert final["scaler"] == expected["scaler"]
    assert final.keys() == expected.keys() == ({"scaler"} if level == "O1" else {"scaler", "masters"})


def test_the_end_of_an_epoch_is_resumed_as_such(problem, scheduled, tmp_path):
    whole, resumed = scheduled(), scheduled()
    trainer_for(1).fit(whole)
    trainer_for(1, max_steps=3, checkpoint_every=3, checkpoint_path=tmp_path / "c").fit(scheduled())
    assert read(tmp_path / "c")["batches"] == 5, "written before the epoch's end: its schedulers have yet to step"
    trainer_for(1).fit(resumed, ckpt_path=tmp_path / "c")
    assert problem.same_weights(whole.net, resumed.net, 0)


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    write({"a": 1}, tmp_path / "c")

    def breaks(checkpoint, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(OSError, match="disk full"):
        write({"a": 2}, tmp_path / "c")
    assert read(tmp_path / "c") == {"a": 1}
