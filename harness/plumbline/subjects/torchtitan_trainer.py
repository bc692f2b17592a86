"""torchtitan: its Trainer, with gradients that FSDP2 sums and a loss divided by the tokens of all ranks.

torchtitan builds its components from configurations. The job supplies the components that users write: model, loss,
data, optimizers, schedules. torchtitan supplies the loop, accumulation, clipping, sharding, checkpoints and mean loss.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import current_job
from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by, stand_ins
from plumbline.subjects.torch_fsdp import COMPUTES_ON_A_CPU, MASTER_WEIGHTS, units

# torchtitan queries the accelerator when it is imported, and needs triton for one way to send tokens to experts.
KERNELS = {"torchtitan.distributed.minimal_async_ep": "triton"}
WITHOUT_A_GPU = patch("torch._utils._get_available_device_type", lambda: "cuda" if torch.cuda.is_available() else "cpu")

with installed_by("pip install torchtitan"), stand_ins(KERNELS), WITHOUT_A_GPU:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.config import Configurable, ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.protocols.model import BaseModel
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.tools.utils import NoColor
    from torchtitan.trainer import Trainer

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "several-optimizers", "checkpoint", "metrics", "frozen-parameters",
    "nested-outputs",
]  # fmt: skip
PRECISIONS = ["32", MASTER_WEIGHTS]


@subject(
    name="torchtitan",
    backends=["none", "ddp", "fsdp", "hsdp"],
    precisions={"cuda": PRECISIONS, "cpu": PRECISIONS if COMPUTES_ON_A_CPU else []},
    capabilities=CAPABILITIES,
    library="torchtitan",
    data="iterations",
    buffers="per-rank",
    gradients="float32",
)
def train(job):
    with as_long_as_needed(), on_gloo() if job.comm == "gloo" else nullcontext():
        configuration(job).build().train()


def as_long_as_needed():
    """Return a context in which torchtitan's first rank does not sleep for two seconds at the end."""
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    return patch("torchtitan.trainer.time", clock)


def on_gloo():
    """Return a context in which torchtitan does not change timeouts, which needs a barrier that gloo lacks."""
    return patch("torchtitan.distributed.utils.set_pg_timeouts", lambda *args, **options: None)


def configuration(job):
    replicas = job.world_size if job.backend == "ddp" else job.mesh.get("replicate", 1)
    return Trainer.Config(
        model_spec=ModelSpec("job", "job", JobModel.Config(), sharded, None, None, None),
        tokenizer=NoTokenizer.Config(),
        loss=JobLoss.Config(),
        dataloader=JobLoader.Config(),
        optimizer=JobOptimizers.Config(),
        lr_scheduler=JobSchedulers.Config(),
        metrics=JobMetrics.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=job.batch_size,
            global_batch_size=job.global_batch_size * job.accumulate,
            max_norm=float("inf") if job.clip_norm is None else job.clip_norm,
            steps=job.stop_after_step or job.steps,
            seq_len=1,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if job.precision == MASTER_WEIGHTS else "float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicas,
            data_parallel_shard_degree=job.world_size // replicas,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=job.checkpoint_dir is not None,
            folder=job.checkpoint_dir or "unused",
            last_save_model_only=False,
            load_only=job.resume,
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=job.seed, enable_structured_logging=False),
    )


def configuration_of(part):
    """Return a subclass of a torchtitan component's configuration, which builds the class that it is defined in."""
    return dataclass(kw_only=True, slots=True)(type("Config", (part.Config,), {}))


class JobModel(BaseModel):
    """The job's model, shaped like a torchtitan decoder for sharding: with layers, but no embeddings, norm or head."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Ignores the trainer's configuration."""

        def update_from_config(self, *, config, **others):
            pass

        def get_nparams_and_flops(self, model, seq_len):
            return sum(one.numel() for one in model.parameters()), 1

    tok_embeddings = norm = lm_head = None
    enable_weight_tying = False

    def __init__(self, config):
        super().__init__()
        with torch.device("cpu"):  # torchtitan builds models on "meta" and calls init_states() later
            self.model = current_job().model()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.float()
        self.initial = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    @property
    def layers(self):
        return {f"{number}": layer for number, layer in enumerate(units(self.model))}

    def verify_module_protocol(self):
        """Accept torch modules."""

    @torch.no_grad()
    def init_states(self, *, buffer_device=None):
        for name, value in self.model.state_dict().items():
            initial = self.initial[name].to(value.device)
            if isinstance(value, DTensor):
                initial = distribute_tensor(initial, value.device_mesh, value.placements)
            value.copy_(initial)

    def forward(self, batch):
        return self.model(batch), batch


def sharded(model, *, parallel_dims, training, parallelism, **others):
    """Shard the model like torchtitan's decoders, with float32 master weights and reductions in float32."""
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(names),
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        pp_enabled=False,
    )
    if torch.distributed.get_backend() == "gloo":
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale gradients while it reduces them
    return model


class JobLoss(BaseLoss):
    """The job's loss, a mean over a batch, weighted for the mean over all samples or labels of a step."""

    Config = configuration_of(BaseLoss)

    def __init__(self, config, *, compile_config=None):
        self.fn = current_job().loss

    def __call__(self, pred, labels, global_valid_tokens, **others):
        return self.fn(*pred) * (labels != IGNORE_INDEX).sum() / global_valid_tokens, {}


class JobLoader(BaseDataLoader):
    """Yields batches of this rank's samples, epoch after epoch."""

    Config = configuration_of(BaseDataLoader)

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **others):
        job = current_job()
        self.job, self.samples, self.step = job, 0, local_batch_size * dp_world_size
        self.sampler = DistributedSampler(job.dataset, dp_world_size, dp_rank, shuffle=job.shuffle, seed=job.seed)
        self.loader = DataLoader(job.dataset, local_batch_size, sampler=self.sampler)

    def __iter__(self):
        epoch, drawn = divmod(self.samples, len(self.job.dataset))
        while True:
            self.sampler.set_epoch(epoch)
            for number, batch in enumerate(self.loader):
                if number * self.step >= drawn:
                    self.samples = epoch * len(self.job.dataset) + (number + 1) * self.step
                    batch = {name: column.to(self.job.device) for name, column in batch.items()}
                    yield {"input": batch}, batch.get("labels", batch["index"])
            epoch, drawn = epoch + 1, 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


class JobOptimizers(OptimizersContainer):
    """The job's optimizers in torchtitan's container, which steps all of them."""

    Config = configuration_of(OptimizersContainer)

    def __init__(self, config, *, model_parts):
        [model] = self.model_parts = model_parts
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizers = current_job().optimizers(model.parameters())
        groups = [group for one in self.optimizers for group in one.param_groups]
        for group in groups:
            group["param_names"] = [names[parameter] for parameter in group["params"]]
        self._post_init([parameter for group in groups for parameter in group["params"]])

    def state_dict(self):
        with current_job().trial():  # torch takes a step with zero gradients to create the states
            return super().state_dict()

    def load_state_dict(self, state_dict):
        with current_job().trial():
            super().load_state_dict(state_dict)


class JobSchedulers(LRSchedulersContainer):
    """The job's schedules in torchtitan's container."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """Builds JobSchedulers instead of torchtitan's own schedule."""

        def build(self, *, optimizers, training_steps):
            return JobSchedulers(optimizers)

    def __init__(self, optimizers):
        self.schedulers = [one for one in map(current_job().scheduler, optimizers) if one is not None]

    def state_dict(self):
        return super().state_dict() if self.schedulers else {}

    def load_state_dict(self, state_dict):
        if self.schedulers:
            super().load_state_dict(state_dict)


class JobMetrics(MetricsProcessor):
    """Reports torchtitan's mean loss of each step, without reading the device's memory statistics."""

    Config = configuration_of(MetricsProcessor)

    def __init__(self, config, **others):
        memory = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="", get_peak_stats=lambda: memory)
        self.config, self.color = config, NoColor()
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def log(self, step, global_avg_loss, *others, **more):
        current_job().log("loss", global_avg_loss)


class NoTokenizer(Configurable):
    """Replaces the tokenizer, because samples are not texts."""

    Config = configuration_of(Configurable)

    def __init__(self, config, **others):
        pass
