"""DeepSpeed's trainers: one subject, with a file for each group of backends."""

from plumbline.subjects.released import installed_by

with installed_by("pip install deepspeed"):
    from plumbline.subjects.deepspeed_pipeline import train as train_pipeline
    from plumbline.subjects.deepspeed_trainer import train, train_zero

__all__ = ["train", "train_pipeline", "train_zero"]
