"""An interface to the trainer for models that compute their own loss, given loaders, an optimizer and a criterion."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plumbline.devices.types import accelerators
from plumbline.trainer.connector import devices_for, one_of, whole
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.module import Module, in_mode
from plumbline.trainer.nested import batch_length, map_tensors
from plumbline.trainer.optimizers import parameters_of
from plumbline.trainer.strategies import split
from plumbline.trainer.trainer import Trainer


class TrainLoop:
    """Trains a model on one device or many, and evaluates it.

    The model must have a method ``get_loss(batch, criterion, device)``, which returns the scalar loss of a batch.
    Validation and ``evaluate`` need ``get_loss_eval(batch, criterion, device)``, which returns a mean over the batch;
    ``predict`` needs ``get_predictions(batch, device)``. These methods call the model as ``self(...)``.

    After ``fit``, model and optimizer have the trained state, even if other processes trained. ``epochs`` counts all
    epochs so far. ``metrics`` holds the ``loss`` of the last step, and the ``val_loss`` after the last epoch. Both are
    means over the samples of all ranks.

    Args:
        model: The model, on any device. ``fit`` moves it and the criterion.
        train_loader: A DataLoader as for one device. With several ranks, each gets its share of the samples.
        val_loader: The loader for validation after each epoch, shared in the same way. None: no validation.
        test_loader: The default loader of ``evaluate`` and ``predict``.
        optimizer: An optimizer over parameters of ``model``.
        criterion: A function or module that is passed to ``get_loss``.
        gpu_mode: ``"single"``: one device. ``"dp"``: the model's forward is split over the devices of this process, and
            the criterion sees the outputs of the whole batch. ``"ddp"``: a process for each device, with its own
            batches; gradients are averaged. ``"balanced"``: a process for each device, with a part of the model.
            ``fit`` starts the processes, unless torchrun or srun has started them.
        use_amp: Whether forward and loss run under float16 autocast, with loss scaling.
        accelerator: ``"cpu"`` (several devices are simulated), ``"auto"``, or a torch device type such as ``"cuda"``.
        seed: The seed for the order of the data.
        start_method: ``"fork"`` or ``"spawn"`` for processes that ``fit`` starts. None: fork if there is no device.

    Raises:
        MisconfigurationError: A method is missing, or arguments contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any,
        val_loader: Any,
        test_loader: Any,
        optimizer: Optimizer,
        criterion: Any,
        gpu_mode: str = "single",
        use_amp: bool = False,
        *,
        accelerator: str = "auto",
        seed: int = 0,
        start_method: str | None = None,
    ) -> None:
        one_of("gpu_mode", gpu_mode, ("single", "dp", "ddp", "balanced"))
        one_of("accelerator", accelerator, ("auto", "cpu", *accelerators()))
        needed = {
            "get_loss": True,
            "get_loss_eval": val_loader is not None or test_loader is not None,
            "get_predictions": test_loader is not None,
        }
        check_model(model, [method for method in needed if needed[method]])
        check_optimizer(optimizer, model)
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.train_loader, self.val_loader, self.test_loader = train_loader, val_loader, test_loader
        self.gpu_mode = gpu_mode
        self.use_amp, self.accelerator = use_amp, accelerator
        self.seed, self.start_method = seed, start_method
        self.epochs = 0
        self.metrics: dict[str, float] = {}

    def fit(self, num_epochs: int, num_nodes: int = 1, node_rank: int = 0, num_gpus: int | None = None) -> None:
        """Train for ``num_epochs`` epochs. Another call continues where this one ended.

        Args:
            num_epochs: Passes over ``train_loader``.
            num_nodes: With ``ddp`` and ``balanced``, the number of nodes on which ``fit`` is called, with MASTER_ADDR
                and MASTER_PORT set.
            node_rank: The index of this node, from 0, unless torchrun or srun sets it.
            num_gpus: The number of devices on each node. None: all, or one with ``single``.

        Raises:
            MisconfigurationError: This cannot be trained. Nothing has been started.
            RankError: A process that was started here has failed.
        """
        if self.train_loader is None:
            raise MisconfigurationError("There is nothing to fit: give TrainLoop a train_loader.")
        whole("num_epochs", num_epochs, 0)
        whole("num_nodes", num_nodes, 1)
        whole("node_rank", node_rank, 0)
        whole("num_gpus", num_gpus, 1, optional=True)
        if node_rank >= num_nodes:
            raise MisconfigurationError(
                f"node_rank={node_rank} does not exist among num_nodes={num_nodes}: count nodes from 0."
            )
        if num_nodes > 1 and self.gpu_mode not in ("ddp", "balanced"):
            raise MisconfigurationError(
                f"num_nodes={num_nodes} cannot be trained with gpu_mode={self.gpu_mode!r}: use gpu_mode='ddp'."
            )
        single = self.gpu_mode == "single"
        if single and num_gpus not in (None, 1):
            raise MisconfigurationError(f"num_gpus={num_gpus} contradicts gpu_mode='single': use 'dp' or 'ddp'.")
        trainer = Trainer(
            gpus=num_gpus or (1 if single else -1),
            num_nodes=num_nodes,
            node_rank=node_rank,
            distributed_backend=None if single else self.gpu_mode,
            accelerator=self.accelerator,
            use_amp=self.use_amp,
            max_epochs=num_epochs,
            seed=self.seed + self.epochs,  # an epoch's order depends on the sum of this seed and the epoch's number
            start_method=self.start_method,
        )
        weights = [list(group["params"]) for group in self.optimizer.param_groups]
        trainer.fit(Trained(self.model, self.criterion, self.optimizer, self.train_loader, self.val_loader))
        if not trainer.optimizers or self.gpu_mode == "balanced":  # other processes have trained copies or parts
            assert trainer.checkpoint is not None
            for group, whole_group in zip(self.optimizer.param_groups, weights, strict=True):
                group["params"] = whole_group
            self.optimizer.load_state_dict(trainer.checkpoint()["optimizers"][0])
        self.metrics = trainer.metrics
        self.epochs += num_epochs

    def evaluate(self, loader: Any = None) -> float:
        """Return the mean of ``get_loss_eval`` over all samples of ``loader``, by default of ``test_loader``.

        This process evaluates all samples on one device, even if there are several ranks.
        """
        answers = self._ask("get_loss_eval", loader, self.criterion)
        total = sum(float(torch.as_tensor(loss).double().mean()) * samples for loss, samples in answers)
        return total / sum(samples for _, samples in answers)

    def predict(self, loader: Any = None) -> Any:
        """Return the concatenated outputs of ``get_predictions`` for all batches, on the CPU.

        Tensors are concatenated along dim 0, also within tuples and dicts, and lists are joined. As with ``evaluate``,
        this process predicts all samples on one device.
        """
        return concatenate([answer for answer, _ in self._ask("get_predictions", loader)])

    def _ask(self, method: str, loader: Any, *arguments: Any) -> list[tuple[Any, int]]:
        check_model(self.model, [method])
        loader = self.test_loader if loader is None else loader
        if loader is None:
            raise MisconfigurationError("There is no data: give a loader here, or TrainLoop a test_loader.")
        kind, count = devices_for(self.accelerator)
        on_device = self.accelerator != "cpu" and count > 0
        device = torch.device(kind if on_device else "cpu")  # the current device, which on a rank is its own
        for part in (self.model, self.criterion):
            if isinstance(part, nn.Module):
                part.to(device)
        answers = []
        autocast = torch.autocast(device.type, torch.float16, enabled=self.use_amp)
        with torch.no_grad(), in_mode(self.model, training=False), autocast:
            for batch in loader:
                answer = getattr(self.model, method)(moved(batch, device), *arguments, device)
                answers.append((moved(answer, torch.device("cpu")), batch_length(batch) or 1))
        if not answers:
            raise MisconfigurationError("The loader has no batches: it needs samples, or drop_last=False.")
        return answers


class Trained(Module):
    """The Trainer's module for a model. Its training step is the model's ``get_loss``.

    With ddp, the forward of DistributedDataParallel contains the whole step, so ``get_loss`` can call the model in any
    way. With dp, only the model's own forward is split, because the loss needs the whole batch.
    """

    def __init__(self, model: Any, criterion: Any, optimizer: Optimizer, train_loader: Any, val_loader: Any) -> None:
        super().__init__()
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.loaders = train_loader, val_loader
        self.splitting: Any = nullcontext()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        device = self.trainer.device
        with self.splitting:
            loss = self.model.get_loss(moved(batch, device), self.criterion, device)
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise MisconfigurationError(
                f"get_loss of {type(self.model).__name__} returned {found}, not a scalar tensor: return loss.mean()."
            )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        device = self.trainer.device
        with self.splitting:
            return self.model.get_loss_eval(moved(batch, device), self.criterion, device)

    def configure_optimizers(self) -> Optimizer:
        """Return the user's optimizer, with its state copied to this rank's device."""
        if self.optimizer.state:
            self.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        return self.optimizer

    def configure_dp(self, model: nn.Module, devices: list[torch.device]) -> nn.Module:
        if len(devices) > 1:
            self.splitting = SplitForward(self.model, devices)
        return model

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]


class SplitForward:
    """A context in which the model's forward splits its batch over the devices and gathers outputs on the first."""

    def __init__(self, model: nn.Module, devices: list[torch.device]) -> None:
        self.model = model
        self.split = split(ClassForward(model), devices)

    def __enter__(self) -> None:
        self.model.forward = lambda *inputs, **named: self.split(inputs, named)

    def __exit__(self, *_: object) -> None:
        del self.model.forward


class ClassForward(nn.Module):
    """Calls the forward of the model's class, even while the instance's forward is replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return type(self.model).forward(self.model, *inputs, **named)


def check_model(model: Any, methods: list[str]) -> None:
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"The model is a {type(model).__name__}: give a torch.nn.Module.")
    arguments = {"get_predictions": "batch, device"}
    for method in methods:
        if not callable(getattr(model, method, None)):
            signature = f"{method}({arguments.get(method, 'batch, criterion, device')})"
            raise MisconfigurationError(f"{type(model).__name__} has no {method}: write the method {signature}.")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise MisconfigurationError(
            f"The optimizer is a {type(optimizer).__name__}: give one of torch.optim, over model.parameters()."
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [p for p in parameters_of(optimizer) if id(p) not in own]
    if foreign:
        raise MisconfigurationError(
            f"The optimizer has a parameter of shape {tuple(foreign[0].shape)} that is not the model's: create it over "
            "parameters of the same model that TrainLoop is given."
        )


def moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), value)


def concatenate(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else torch.stack(parts)
    if isinstance(first, dict):
        return {name: concatenate([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(concatenate(list(places)) for places in zip(*parts, strict=True))
    return list(itertools.chain(*parts)) if isinstance(first, list) else parts
