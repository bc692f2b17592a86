"""Published scripts for learners: tutorials and implementations of papers."""

from __future__ import annotations

from script import PICTURES, Script


def lesson(folder: str, covers: str, samples: int = 400, **more: object) -> Script:
    """Return a lesson of yunjey's tutorial, which has batches of 100."""
    whole = f"tutorials/{folder}"
    settings: dict[str, object] = {
        "source": "yunjey/pytorch-tutorial",
        "folder": whole,
        "also": (whole,),
        "needs": PICTURES,
        "environment": {"CHECK_SCRIPTS_SAMPLES": str(samples)},
        **more,
    }
    name = f"yunjey {folder.rpartition('/')[2]}".replace("_", "-")
    return Script(name, "python main.py", covers, **settings)  # type: ignore[arg-type]


def gan(name: str, covers: str, **more: object) -> Script:
    """Return one of eriklindernoren's GANs."""
    folder = f"implementations/{name}"
    settings: dict[str, object] = {
        "source": "eriklindernoren/PyTorch-GAN",
        "folder": folder,
        "also": (folder,),
        "needs": PICTURES,
        **more,
    }
    command = f"python {name}.py --n_epochs 1 --batch_size 8"
    return Script(f"pytorch-gan {name.replace('_', '-')}", command, covers, **settings)  # type: ignore[arg-type]


TEACHING = (
    lesson("01-basics/linear_regression", "a full batch in every step", needs=("matplotlib",)),
    lesson("01-basics/logistic_regression", "SGD on flattened pictures"),
    lesson("01-basics/feedforward_neural_network", "Adam over several epochs"),
    lesson("02-intermediate/convolutional_neural_network", "BatchNorm"),
    lesson("02-intermediate/deep_residual_network", "a learning rate that is set by hand every 20 epochs", 100),
    lesson("02-intermediate/recurrent_neural_network", "LSTM whose forward creates zero states"),
    lesson(
        "02-intermediate/bidirectional_recurrent_neural_network",
        "LSTM in both directions",
        accepted=("right in part",),
        because="the backward direction uses only its first step, so its recurrent weights get no gradient",
    ),
    lesson("03-advanced/generative_adversarial_network", "GAN: gradients of both networks are zeroed together", 200),
    lesson("03-advanced/variational_autoencoder", "a loss that is a sum, not a mean", 256),
    gan("gan", "the generator's backward pass leaves gradients in the discriminator"),
    gan(
        "wgan",
        "weights clamped by hand after each step",
        accepted=("right in part",),
        because="nothing says what clamping should make of the discriminator's weights",
    ),
    gan("wgan_gp", "a gradient penalty by autograd.grad"),
    gan("infogan", "three optimizers; one holds the parameters of the other two"),
    gan("acgan", "two losses in one backward pass"),
    gan("aae", "an optimizer over two networks"),
)
