"""Training that does not resume in the state in which it stopped."""

from __future__ import annotations

import copy

from expect import known_bad
from resumable import Run

PLAIN = ["checkpoint/ddp/1x2/32", "checkpoint/ddp/1x3/16"]
ELASTIC = ["checkpoint-elastic/ddp/1x2/32", "checkpoint-elastic/ddp/1x3/32"]
WINDOWS = ["checkpoint-windows/ddp/1x2/32", "checkpoint-windows/ddp/1x3/32"]


class Forgetful(Run):
    """Leaves some entries out of its checkpoints."""

    def __init__(self, job, *forgotten):
        super().__init__(job)
        self.forgotten = forgotten

    def state(self):
        return {name: value for name, value in super().state().items() if name not in self.forgotten}


@known_bad("checkpoint", causes=["optimizer-state-dropped"], on=[*PLAIN, *ELASTIC, *WINDOWS])
def optimizer_state_dropped(job):
    """Does not save the optimizer: momentum or moments restart from zero."""
    Forgetful(job, "optimizer").train()


@known_bad("checkpoint", causes=["scheduler-not-restored"], on=PLAIN)
def scheduler_not_restored(job):
    """Does not save the scheduler, which starts again."""
    Forgetful(job, "scheduler").train()


@known_bad("checkpoint", causes=["scale-not-restored"], on=["checkpoint/ddp/1x2/16", "checkpoint/none/1x1/16"])
def scaler_not_restored(job):
    """Does not save the loss scale, which starts at its first value and overflows again."""
    Forgetful(job, "scaler").train()


@known_bad("checkpoint", causes=["position-not-restored"], on=[*PLAIN, *ELASTIC, "checkpoint/none/1x1/32"])
def position_not_restored(job):
    """Does not save the position in the epoch, so the epoch's first batches are trained on twice."""
    Forgetful(job, "batches").train()


@known_bad("checkpoint", causes=["epoch-not-restored"], on=[*PLAIN, *ELASTIC])
def epoch_not_restored(job):
    """Does not save the epoch: resumes at the right position, but in the first epoch."""
    Forgetful(job, "epoch").train()


@known_bad("checkpoint", causes=["trained-all-over-again"], on=[*PLAIN, *ELASTIC])
def nothing_but_weights_and_optimizer(job):
    """Saves neither the epoch nor the position, so all epochs are trained again."""
    Forgetful(job, "epoch", "batches", "steps").train()


@known_bad(
    "checkpoint", causes=["weights-not-loaded"], on=["checkpoint/ddp/1x2/32", "checkpoint/none/1x1/32", *ELASTIC]
)
def weights_not_loaded(job):
    """Does not restore the weights, as when ``strict=False`` hides that no key matches."""
    Forgetful(job, "model").train()


@known_bad("checkpoint", causes=["loaded-on-some-ranks"], on=[*PLAIN, *ELASTIC, "checkpoint/ddp/1x3/32"])
def only_rank_zero_loads(job):
    """Only rank 0 loads the weights, after DDP's broadcast: the other ranks keep their initial weights."""
    run = Run(job)
    if job.rank > 0:
        run.parts = lambda: {"optimizer": run.optimizer}
    run.train()


@known_bad("checkpoint", causes=["optimizer-state-on-some-ranks"], on=[*PLAIN, *ELASTIC])
def only_rank_zero_loads_the_optimizer(job):
    """Only rank 0 loads the optimizer state; all ranks load the weights."""
    run = Run(job)
    read = run.read
    run.read = lambda: {k: v for k, v in read().items() if k != "optimizer" or job.rank == 0}
    run.train()


@known_bad("checkpoint", causes=["buffers-not-restored"], on=PLAIN)
def buffers_not_loaded(job):
    """Loads parameters, but not buffers."""
    run = Run(job)
    load = run.load

    def load_parameters(saved):
        load({**saved, "model": {**saved["model"], **dict(run.bare.named_buffers())}})

    run.load = load_parameters
    run.train()


@known_bad("checkpoint", causes=["epoch-not-restored"], on=[*PLAIN, *ELASTIC])
def first_epochs_order_replayed(job):
    """Does not call ``set_epoch`` after resuming: https://github.com/huggingface/accelerate/issues/4071."""
    run = Run(job)
    draw = run.draw
    if job.resume:
        run.draw = lambda epoch: draw(0)
    run.train()


@known_bad("checkpoint", causes=["order-drawn-anew"], on=[*PLAIN, *ELASTIC])
def order_drawn_anew(job):
    """Uses another sampler seed after resuming."""
    run = Run(job)
    if job.resume:
        job.seed += 100
    run.train()


@known_bad("checkpoint", causes=["batch-left-out-after-resuming"], on=[*PLAIN, *ELASTIC])
def a_batch_left_out(job):
    """Saves a position that is one batch too far, so one batch is skipped after resuming."""
    run = Run(job)
    state = run.state
    run.state = lambda: {**state(), "batches": run.batches + 1}
    run.train()


@known_bad("checkpoint", causes=["position-in-other-units"], on=WINDOWS)
def position_counted_in_steps(job):
    """Saves the position in steps, and skips that many batches after resuming."""
    run = Run(job)
    state = run.state
    run.state = lambda: {**state(), "batches": run.batches // job.accumulate}
    run.train()


@known_bad("checkpoint", causes=["position-of-each-rank"], on=ELASTIC)
def position_of_each_rank(job):
    """Counts samples per rank, which is wrong if the number of ranks changes."""
    run = Run(job)
    state, load = run.state, run.load
    run.state = lambda: {**state(), "samples": run.batches * job.batch_size}
    run.load = lambda saved: load({**saved, "batches": saved["samples"] // job.batch_size})
    run.train()


@known_bad("checkpoint", causes=["too-many-steps-left"], on=PLAIN)
def epochs_counted_anew(job):
    """Trains the full number of epochs after resuming, on top of the epochs before."""
    if job.resume:
        job.epochs += 1
    Run(job).train()


@known_bad("checkpoint", causes=["weights-of-another-step"], on=[*PLAIN, *ELASTIC])
def saved_before_the_step(job):
    """Saves the weights from before the step, and everything else from after it."""
    run = Run(job)
    step, state, early = run.step, run.state, {}

    def step_after_saving():
        early.update(copy.deepcopy(run.bare.state_dict()))
        step()

    run.step = step_after_saving
    run.state = lambda: {**state(), "model": early}
    run.train()


@known_bad("checkpoint", causes=["optimizer-state-stale"], on=[*PLAIN, *ELASTIC])
def optimizer_saved_before_the_step(job):
    """Saves the optimizer state from before the step, and the weights from after it."""
    run = Run(job)
    step, state, early = run.step, run.state, {}

    def step_after_saving():
        early.update(copy.deepcopy(run.optimizer.state_dict()["state"]))
        step()

    run.step = step_after_saving
    run.state = lambda: {**state(), "optimizer": {**state()["optimizer"], "state": early}}
    run.train()


def change_optimizer_state(job, change):
    """Train; apply ``change`` to the saved optimizer state, a dict by parameter index."""
    run = Run(job)
    state = run.state

    def changed():
        saved = copy.deepcopy(state())
        saved["optimizer"]["state"] = change(saved["optimizer"]["state"])
        return saved

    run.state = changed
    run.train()


@known_bad("checkpoint", causes=["optimizer-state-in-part"], on=[*PLAIN, *ELASTIC])
def momentum_of_one_parameter_lost(job):
    """Does not save the optimizer state of one parameter."""
    change_optimizer_state(job, lambda state: {place: own for place, own in state.items() if place != 1})


@known_bad("checkpoint", causes=["optimizer-state-in-part"], on=ELASTIC)
def state_of_one_group_lost(job):
    """Saves only the first parameter group's optimizer state: that of AdamW's matrices, not of its vectors."""
    change_optimizer_state(job, lambda state: {place: own for place, own in state.items() if place < 2})


@known_bad("checkpoint", causes=["optimizer-count-lost"], on=ELASTIC)
def count_of_steps_lost(job):
    """Saves Adam's moments but not its step count, so bias correction starts again."""
    change_optimizer_state(job, lambda state: {k: {**own, "step": own["step"] * 0} for k, own in state.items()})


@known_bad("checkpoint", causes=["optimizer-state-rounded"], on=[*PLAIN, *ELASTIC])
def optimizer_state_rounded(job):
    """The optimizer's tensors are saved in 16 bits, to halve the file."""

    def rounded(own):
        return {name: value.bfloat16().float() if name != "step" else value for name, value in own.items()}

    change_optimizer_state(job, lambda state: {place: rounded(own) for place, own in state.items()})


@known_bad("checkpoint", causes=["rounded-when-saved"], on=[*PLAIN, *ELASTIC])
def weights_rounded(job):
    """Weights are saved in 16 bits, to halve the file."""
    run = Run(job)
    state = run.state
    run.state = lambda: {**state(), "model": {k: own.half() for k, own in state()["model"].items()}}
    run.train()


@known_bad("checkpoint", causes=["scheduler-stepped-once-too-often"], on=PLAIN)
def scheduler_stepped_once_more(job):
    """Steps the scheduler after loading it."""
    run = Run(job)
    load = run.load

    def load_and_step(saved):
        load(saved)
        run.scheduler.step()

    run.load = load_and_step
    run.train()


@known_bad(
    "checkpoint", causes=["scheduler-counts-skipped-steps"], on=["checkpoint/ddp/1x2/16", "checkpoint/none/1x1/16"]
)
def schedule_set_to_the_number_of_steps(job):
    """Sets the scheduler to the number of steps, including skipped ones."""
    run = Run(job)
    load = run.load

    def load_and_set(saved):
        load(saved)
        run.scheduler.last_epoch = run.steps

    run.load = load_and_set
    run.train()


@known_bad("checkpoint", causes=["stopped-elsewhere"], on=PLAIN)
def stops_after_the_epoch(job):
    """Writes checkpoints only at the end of an epoch, so it stops after the first epoch."""
    run = Run(job)
    stop, job.stop_after_step = job.stop_after_step, None
    if stop is not None:
        job.epochs = 1
    run.train()
    if stop is not None:
        run.save()


@known_bad("checkpoint", causes=["weights-not-loaded"], on=[*PLAIN, *ELASTIC])
def never_resumes(job):
    """Saves a checkpoint, but ignores it and starts from scratch."""
    job.resume = False
    Run(job).train()


@known_bad("checkpoint", causes=["wrong-after-resuming"], on=["checkpoint/ddp/1x2/32", "checkpoint-elastic/ddp/1x3/32"])
def not_synchronised_after_resuming(job):
    """Trains the bare model instead of the DDP-wrapped one after resuming."""
    run = Run(job)
    if job.resume:
        run.model = run.bare
    run.train()


@known_bad("checkpoint", causes=["interruption-broke"], on=["checkpoint/ddp/1x2/32"])
def cannot_be_resumed(job):
    """Declares that it can resume, but raises."""
    if job.resume:
        raise NotImplementedError("resuming is for the next release")
    Run(job).train()


@known_bad("checkpoint", causes=["interruption-broke"], on=ELASTIC)
def cannot_be_resumed_by_others(job):
    """Refuses a checkpoint that was saved by another number of ranks."""
    run = Run(job)
    state, load = run.state, run.load
    run.state = lambda: {**state(), "world": job.world_size}

    def load_if_equal(saved):
        if saved["world"] != job.world_size:
            raise ValueError(f"saved by {saved['world']} ranks, resumed by {job.world_size}")
        load(saved)

    run.load = load_if_equal
    run.train()


@known_bad("checkpoint", "data", causes=["order-depends-on-the-devices"], on=ELASTIC)
def order_depends_on_the_number_of_ranks(job):
    """Adds the world size to the seed, which shows only if training resumes on another number of ranks."""
    job.seed += job.world_size
    Run(job).train()
