"""A module divided into stages on real ranks trains like on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from plumbline.trainer import MisconfigurationError, Module, RankError, Trainer
from plumbline.trainer.balanced import planning
from plumbline.trainer.balanced.stage_plan import Stage
from plumbline.trainer.trainer import drawn_seed


def balanced(devices, micro_batches=4, **options):
    options = {"precision": 64, "max_epochs": 1, **options}
    return Trainer(
        gpus=devices, distributed_backend="balanced", accelerator="cpu", micro_batches=micro_batches, **options
    )


def one_device(**options):
    return Trainer(accelerator="cpu", **{"precision": 64, "max_epochs": 1, **options})


class Task(Module):
    """Three batches of 8 samples; ``batch_size`` is that of one device that accumulates micro-batches."""

    shape: tuple[int, ...] = (5,)
    samples = 24

    def __init__(self, batch_size=8):
        super().__init__()
        torch.manual_seed(3)
        self.batch_size = batch_size
        self.build()

    def data(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        return TensorDataset(inputs, torch.randn(self.samples, 1, generator=generator))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.compute(inputs), targets)

    def compute(self, inputs):
        return self.net(inputs)

    def validation_step(self, batch, batch_idx):
        return {"mse": self.training_step(batch, batch_idx)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(self.data(), batch_size=self.batch_size, shuffle=True)


class Perceptron(Task):
    def build(self):
        self.net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))


class Validated(Perceptron):
    def val_dataloader(self):
        return DataLoader(self.data(), batch_size=5)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, mask):
        scores = self.mix(self.norm(hidden)) @ hidden.transpose(1, 2)
        return hidden + self.out(scores.masked_fill(mask, -1e4).softmax(-1) @ hidden)


class Language(Task):
    """Tied embedding and head, weights outside of blocks, and code between the blocks."""

    def build(self):
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.Parameter(torch.randn(4, 6))
        self.layers = nn.ModuleList(Layer(6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def data(self):
        return TensorDataset(torch.randint(11, (24, 5), generator=torch.Generator().manual_seed(1)))

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device).triu(1)
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


class FunctionalHead(Language):
    """The head is not a module, but uses the embedding's weight."""

    def build(self):
        super().build()
        del self.head
        self.head = lambda hidden: hidden @ self.embedding.weight.T


class Convolutions(Task):
    """BatchNorm, in-place activations, and a shape that is read between blocks."""

    shape = (2, 6, 6)

    def build(self):
        self.features = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        )
        self.head = nn.Linear(16, 1)

    def compute(self, inputs):
        features = self.features(inputs)
        return self.head(features.view(features.size(0), -1))


class Skips(Task):
    """Uses the first layer's output again after the third."""

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))
        self.head = nn.Linear(5, 1)

    def compute(self, inputs):
        first = hidden = self.layers[0](inputs)
        for number, layer in enumerate(self.layers[1:], start=1):
            hidden = layer(hidden).tanh() + (first if number == 3 else 0)
        return self.head(hidden)


class Repeated(Task):
    """One layer that is called several times."""

    def build(self):
        self.first, self.layer, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def compute(self, inputs):
        hidden = self.first(inputs)
        for _ in range(3):
            hidden = self.layer(hidden).tanh()
        return self.head(hidden)


class Frozen(Perceptron):
    """A frozen weight, and one that is not used."""

    def build(self):
        super().build()
        self.net[2].weight.requires_grad_(False)
        self.net[0].register_parameter("unused", nn.Parameter(torch.ones(3)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Choosing(Perceptron):
    """A layer in the middle of a stage that some batches skip."""

    def build(self):
        self.first, self.chosen, self.last = nn.Linear(5, 30), nn.Linear(30, 30), nn.Linear(30, 1)
        self.wide = nn.Linear(30, 30)

    def configure_blocks(self):
        return [self.first, self.wide, self.chosen, self.last]

    def compute(self, inputs):
        hidden = self.wide(self.first(inputs))
        return self.last(self.chosen(hidden) if self.trainer.global_step != 1 else hidden)


class TakingTurns(Perceptron):
    def configure_optimizers(self):
        halves = list(self.net[:2].parameters()), list(self.net[2:].parameters())
        return [torch.optim.SGD(halves[0], lr=0.05), torch.optim.Adam(halves[1], lr=0.01)]


class Scheduled(Perceptron):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def differences(left, right):
    """Return each parameter's and buffer's difference, in units of its largest value."""
    pairs = zip(left.state_dict().items(), right.state_dict().values(), strict=True)
    return {name: float((a - b).abs().max() / b.abs().max().clamp_min(1)) for (name, a), b in pairs}


def trained_alike(
    kind, devices, tolerance=1e-12, micro_batches=4, whole=False, stages=None, device_memory=None, **options
):
    """Train in stages, and on one device that accumulates the same micro-batches or, with ``whole``, takes batches."""
    accumulate = 1 if whole else micro_batches
    many, one = kind(), kind(batch_size=8 // accumulate)
    start = {name: value.clone() for name, value in many.state_dict().items()}
    trainer = balanced(devices, micro_batches, stages=stages, device_memory=device_memory, **options)
    trainer.fit(many)
    accumulate *= options.pop("accumulate_grad_batches", 1)
    reference = one_device(accumulate_grad_batches=accumulate, **options)
    reference.fit(one)
    assert any(not torch.equal(value, start[name]) for name, value in many.state_dict().items())
    assert {name: gap for name, gap in differences(many, one).items() if gap > tolerance} == {}
    assert trainer.global_step == reference.global_step
    assert trainer.metrics == pytest.approx(reference.metrics, rel=tolerance, abs=tolerance)
    return trainer


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        (Perceptron, 1), (Perceptron, 2), (Language, 2), (Language, 3), (FunctionalHead, 3), (Convolutions, 2),
        (Convolutions, 3), (Skips, 2), (Repeated, 3), (Frozen, 2), (Scheduled, 2),
    ],
)  # fmt: skip
def test_stages_train_what_one_device_does(kind, devices):
    trained_alike(kind, devices)


def divide(monkeypatch, *stages):
    """Plan these stages, whatever was measured."""
    monkeypatch.setattr(planning, "partition", lambda *_: stages)
    monkeypatch.setattr(planning, "improved", lambda best, _: best)


def test_a_block_within_a_stage_may_be_left_out(monkeypatch):
    divide(monkeypatch, Stage(0, 1), Stage(1, 4))
    trained_alike(Choosing, 2)


def test_a_block_where_stages_meet_may_not_be_left_out(monkeypatch):
    divide(monkeypatch, Stage(0, 2), Stage(2, 4))
    with pytest.raises(RankError, match=r"The step calls last where chosen was called.*configure_blocks"):
        balanced(2).fit(Choosing())


def test_several_optimizers_take_turns():
    # With accumulation, one device would step the first optimizer before the second one's last micro-batch.
    trained_alike(TakingTurns, 2, whole=True)


@pytest.mark.parametrize("kind", [Perceptron, Language])
def test_the_norm_is_that_of_all_stages_and_counts_a_tied_weight_once(kind):
    trained_alike(kind, 2, gradient_clip_val=0.05, accumulate_grad_batches=2)


def test_validation_sees_whole_batches_and_all_ranks_know_it():
    trainer = trained_alike(Validated, 2)
    assert set(trainer.metrics) == {"loss", "mse"}


class Overflowing(Perceptron):
    """In the second step, the first stage has an infinite gradient."""

    def training_step(self, batch, batch_idx):
        weight = self.net[0].weight
        if not weight._backward_hooks:
            weight.register_hook(lambda gradient: gradient * (torch.inf if self.trainer.global_step == 1 else 1))
        return super().training_step(batch, batch_idx)


# Gradients of each weight are added in one device's order, so weights are equal except for the tied one. Therefore, it
# is trained with float32 gradients.
@pytest.mark.parametrize(
    ("kind", "precision", "level"),
    [(Language, "bf16", "O1"), (Language, 16, "O1"), (Perceptron, 16, "O2"), (Overflowing, 16, "O1")],
)
def test_half_precision_and_steps_that_all_stages_skip(kind, precision, level):
    trained_alike(kind, 2, tolerance=1e-6, precision=precision, amp_level=level)


@pytest.mark.parametrize(("before", "after", "level"), [(2, 1, "O1"), (1, 2, "O1"), (2, 3, "O2")])
def test_a_checkpoint_goes_on_with_another_number_of_devices(before, after, level, tmp_path):
    options = {"precision": 16, "amp_level": level, "max_epochs": 2, "gradient_clip_val": 0.1}
    whole, resumed = Perceptron(), Perceptron()
    straight = balanced(2, **options)
    straight.fit(whole)
    path = tmp_path / "{step}.ckpt"
    first = balanced(before, **{**options, "max_steps": 4}, checkpoint_every=4, checkpoint_path=path)
    first.fit(Perceptron())
    second = balanced(after, **options)
    second.fit(resumed, ckpt_path=tmp_path / "4.ckpt")
    assert {name: gap for name, gap in differences(resumed, whole).items() if gap > 1e-6} == {}
    assert (second.global_step, second.current_epoch) == (6, 2)
    second.save_checkpoint(tmp_path / "end.ckpt")
    plain = Perceptron()
    one_device(**{**options, "max_epochs": 3}).fit(plain, ckpt_path=tmp_path / "end.ckpt")
    assert max(differences(plain, whole).values()) > 1e-6


def test_dropout_differs_between_stages_and_comes_again():
    class Block(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.linear = nn.Linear(5, outputs)

        def forward(self, x):
            return self.linear(nn.functional.dropout(x, 0.5, self.training))

    class Dropping(Task):
        def build(self):
            # Two blocks for two stages: with more, measured times would choose the partition, and so the masks.
            self.net = nn.Sequential(Block(5), Block(1))

    trained = []
    for seed in (0, 0, 1):
        module = Dropping()
        torch.manual_seed(seed)
        balanced(2).fit(module)
        trained.append(module)
    first, again, other = trained
    assert max(differences(first, again).values()) == 0
    assert max(differences(first, other).values()) > 0


def test_batches_that_do_not_divide_are_refused_before_ranks_start():
    module = Perceptron()
    module.samples = 27
    with pytest.raises(MisconfigurationError, match="A batch of 3 samples does not divide into 4 micro-batches"):
        balanced(2).fit(module)
    with pytest.raises(MisconfigurationError, match="micro_batches=2 works with distributed_backend='balanced' only"):
        Trainer(gpus=2, distributed_backend="ddp", accelerator="cpu", micro_batches=2)


@pytest.mark.parametrize("source", ["drawn from a generator", "drawn anew in the dataset", "streamed"])
def test_all_stages_see_the_batches_of_one_device(source):
    class Noisy(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.randn(5), torch.randn(1)  # for each sample again, like augmentation

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(Perceptron().data()))

    class Drawing(Perceptron):
        def train_dataloader(self):
            data, sampler = self.data(), None
            if source == "drawn from a generator":
                sampler = RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(5))
            elif source == "drawn anew in the dataset":
                data = Noisy()
            else:
                data = Stream()
            return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    many, one = Drawing(), Drawing()
    torch.manual_seed(0)
    balanced(2).fit(many)
    torch.manual_seed(0)
    torch.manual_seed(drawn_seed())  # like the trainer seeds the ranks that it starts
    one_device().fit(one)
    assert max(differences(many, one).values()) < 1e-12


def test_the_plan_fits_the_memory_or_is_refused():
    class Wide(Perceptron):
        def build(self):
            self.net = nn.Sequential(nn.Linear(5, 400), nn.Linear(400, 400), nn.Linear(400, 400), nn.Linear(400, 1))

    weights = 400 * 400 * 8
    module = Wide()
    # A 400 × 400 layer with gradient and Adam's state has 4 of these; a backward adds a fifth for the gradient.
    balanced(2, None, device_memory=6 * weights).fit(module)
    with pytest.raises(RankError, match=r"net\.1.* does not fit"):
        balanced(2, None, device_memory=3 * weights).fit(Wide())


class Wide(Perceptron):
    """Three fifths of the weights, and of Adam's state, are in two layers that two devices may share."""

    width = 200

    def build(self):
        self.net = nn.Sequential(
            nn.Linear(5, self.width), nn.Linear(self.width, self.width), nn.Linear(self.width, self.width),
            nn.Linear(self.width, 1),
        )  # fmt: skip


WEIGHTS = Wide.width**2 * 8  # bytes of a layer


def test_what_one_device_refuses_trains_on_as_many_as_it_names():
    # A 200 × 200 layer with gradient and Adam's state has 4 of these; a backward adds a fifth for the gradient.
    refusal = rf"does not fit.*2 devices of {6 * WEIGHTS:,} bytes each would suffice"
    with pytest.raises(MisconfigurationError, match=refusal):
        balanced(1, None, device_memory=6 * WEIGHTS).fit(Wide())
    trainer = trained_alike(Wide, 2, device_memory=6 * WEIGHTS)
    peaks = trainer.balance.measured.stage_peak_bytes
    assert peaks == pytest.approx(trainer.balance.plan.predicted.stage_peak_bytes, rel=0.1)
    assert all(4 * WEIGHTS < peak <= 6 * WEIGHTS for peak in peaks)
    assert str(trainer.balance).count("peak") == 2


@pytest.mark.parametrize("where", ["in a forward", "in an optimizer"])
def test_a_stage_that_takes_more_than_planned_is_refused(where):
    class Hoarding(Wide):
        def compute(self, inputs):
            if where == "in a forward" and self.trainer.rank == 1:
                self.hoard = torch.zeros(4 * WEIGHTS // 8, dtype=torch.float64)
            return super().compute(inputs)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            if where == "in an optimizer" and self.trainer.rank == 1:
                layer = self.net[2].weight
                optimizer.register_step_post_hook(
                    lambda *_: optimizer.state[layer].update(hoard=torch.zeros(4 * WEIGHTS // 8, dtype=torch.float64))
                )
            return optimizer

    sentence = rf"Stage 1 \(net.2 to net.3\) needs .* bytes, as measured, and its device may hold {6 * WEIGHTS:,}"
    with pytest.raises(RankError, match=sentence):
        balanced(2, device_memory=6 * WEIGHTS).fit(Hoarding())


@pytest.mark.parametrize(
    ("kind", "devices", "stages", "micro_batches"),
    [(Validated, 2, 1, 4), (Validated, 4, 2, 4), (Language, 4, 2, 8), (Language, 6, 3, 2)],
)
def test_replicas_of_stages_train_what_one_device_does(kind, devices, stages, micro_batches):
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    trainer = trained_alike(kind, devices, micro_batches=micro_batches, stages=stages, **options)
    assert (len(trainer.balance.plan.stages), trainer.balance.plan.replicas) == (stages, devices // stages)


def test_the_number_of_stages_is_chosen_and_may_be_less_than_the_devices():
    class Short(Task):
        def build(self):
            self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    trainer = trained_alike(Short, 4)  # it cannot have 4 stages
    assert len(trainer.balance.plan.stages) == trainer.balance.plan.replicas == 2
    assert "2 replicas of 2 stages" in str(trainer.balance)
    with pytest.raises(MisconfigurationError, match="stages=3 does not divide the 4 devices"):
        balanced(4, stages=3)


def test_batch_norm_has_the_statistics_of_the_first_replica():
    class FirstHalves(Convolutions):
        """The first replica's half of each batch."""

        def training_step(self, batch, batch_idx):
            return super().training_step([tensor[: len(tensor) // 2] for tensor in batch], batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    class Still(Convolutions):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    many, one = Still(), FirstHalves()
    balanced(4, 2, stages=2).fit(many)
    one_device().fit(one)
    assert max(differences(many, one).values()) < 1e-12


def test_a_checkpoint_of_replicas_goes_on_without_them(tmp_path):
    options = {"precision": 16, "max_epochs": 2, "gradient_clip_val": 0.1}
    whole, resumed = Perceptron(), Perceptron()
    balanced(2, **options).fit(whole)
    first = balanced(4, **options, stages=2, checkpoint_every=4, checkpoint_path=tmp_path / "{step}.ckpt")
    first.fit(Perceptron())
    balanced(2, **options).fit(resumed, ckpt_path=tmp_path / "4.ckpt")
    assert {name: gap for name, gap in differences(resumed, whole).items() if gap > 1e-6} == {}


def test_the_trainer_says_what_was_planned_and_measured():
    trainer = balanced(2)
    trainer.fit(Perceptron())
    plan, measured = trainer.balance.plan, trainer.balance.measured
    assert [stage.first for stage in plan.stages] + [plan.stages[-1].last] == [0, plan.stages[0].last, 5]
    assert all(0 < seconds < measured.step_seconds for seconds in measured.stage_seconds)
    assert "2 stages, 4 micro-batches" in str(trainer.balance)
    assert "net.0" in str(trainer.balance)


def test_a_plan_is_shown_without_training():
    module, trained = Perceptron(), Perceptron()
    balance = balanced(2, None).plan_stages(module)
    assert "2 stages" in str(balance)
    assert balance.plan.picture().startswith("<svg")
    assert max(differences(module, trained).values()) == 0
    with pytest.raises(MisconfigurationError, match="Only distributed_backend='balanced' plans stages"):
        one_device().plan_stages(module)


def test_modules_that_cannot_be_parted_are_refused():
    class Whole(Task):
        def build(self):
            self.net = nn.Linear(5, 1)

    with pytest.raises(RankError, match=r"Whole can be cut into 1 block \(net\).*configure_blocks"):
        balanced(2).fit(Whole())
