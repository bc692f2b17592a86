"""Trainers that start their ranks themselves, in all possible ways, and ranks that end in all possible ways."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from right_training import fit, for_ever
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader

from plumbline import subject

SCRIPT = Path(__file__).with_name("script.py")


def child(place, job, model, settings):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # pickling shares the model's memory
    if settings.get("sums"):
        settings = {"factor": float(job.world_size)}
    fit(job, model=model, rank=job.node_rank * job.gpus + place, **settings)


def starting(job, method, settings):
    start_processes(child, (job, job.model(), settings), job.gpus, start_method=method)


def declare(name, method, settings=None):
    @subject(name=name, backends=["ddp"], launch="node")
    def train(job):
        starting(job, method, settings or {})

    globals()[name] = train


def broken_batch():
    raise RuntimeError("the third batch is broken")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


WAYS_TO_END = {"raises": broken_batch, "is-killed": be_killed, "exits": leave, "hangs": for_ever}


def finish(place, job, model):
    child(place, job, model, {})
    job.finished()
    be_killed()


@subject(name="kills-what-has-finished", backends=["ddp"], launch="node")
def kills_what_has_finished(job):
    processes = [multiprocessing.Process(target=finish, args=(index, job, job.model())) for index in range(job.gpus)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


declare("spawns", "spawn")
declare("forks", "fork")
declare("spawns-and-sums", "spawn", {"sums": True})
declare("forks-and-sums", "fork", {"sums": True})
declare("forks-and-loads-with-workers", "fork", {"workers": 1})
for method in ("spawn", "fork"):
    for ends, in_the_middle in WAYS_TO_END.items():
        declare(f"{method}-{ends}", method, {"in_the_middle": in_the_middle})


def run_script(job, *arguments):
    """Run the script with torchrun, on this node of several."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.gpus}"]
    nodes = [f"--nnodes={job.num_nodes}", f"--node-rank={job.node_rank}"]
    place = [f"--master-addr={os.environ['MASTER_ADDR']}", f"--master-port={os.environ['MASTER_PORT']}"]
    subprocess.run([*launcher, *nodes, *place, str(SCRIPT), *arguments], check=True)


def declare_script(name, *arguments):
    @subject(name=name, backends=["ddp"], launch="node")
    def train(job):
        run_script(job, *arguments)

    globals()[name] = train


declare_script("script")
for ends in WAYS_TO_END:
    declare_script(f"script-{ends}", ends)


@subject(name="plain-scripts", backends=["ddp"], launch="node")
def plain_scripts(job):
    """Start one script per rank, with torchrun's environment variables."""
    running = []
    for index in range(job.gpus):
        told = {"RANK": job.node_rank * job.gpus + index, "LOCAL_RANK": index, "WORLD_SIZE": job.world_size}
        variables = os.environ | {name: str(value) for name, value in told.items()}
        running.append(subprocess.Popen([sys.executable, str(SCRIPT)], env=variables))
    assert not any(process.wait() for process in running)


@subject(name="trains-itself", backends=["none", "ddp"], launch="node")
def trains_itself(job):
    """Run the first rank in this process, and start the others."""
    own = job.model()
    others = multiprocessing.get_context("fork")
    started = [others.Process(target=child, args=(index, job, own, {})) for index in range(1, job.gpus)]
    for process in started:
        process.start()
    fit(job, model=own, rank=job.node_rank * job.gpus)
    for process in started:
        process.join()


@subject(name="waits-for-nobody", backends=["ddp"], launch="node")
def waits_for_nobody(job):
    start_processes(child, (job, job.model(), {}), job.gpus, join=False, start_method="fork")


@subject(name="trains-alone", backends=["ddp"], launch="node")
def trains_alone(job):
    start_processes(alone, (job, job.model()), job.gpus, start_method="fork")


def alone(place, job, model):
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, batch_size=job.batch_size):
        optimizer.zero_grad()
        job.loss(model(batch), batch).backward()
        optimizer.step()


@subject(name="two-of-a-rank", backends=["ddp"], launch="node")
def two_of_a_rank(job):
    """Start both ranks twice, each time in a separate world."""
    for port in (0, 1):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + port)
        start_processes(child, (job, job.model(), {}), job.gpus, start_method="fork")


@subject(name="does-nothing", backends=["none", "ddp"], launch="node")
def does_nothing(job):
    job.model()


@subject(name="raises-first", backends=["none", "ddp"], launch="node")
def raises_first(job):
    raise ValueError("there is nothing to start")


@subject(name="raises-last", backends=["ddp"], launch="node")
def raises_last(job):
    starting(job, "fork", {})
    raise ValueError("what was trained cannot be read")


@subject(name="raises-meanwhile", backends=["ddp"], launch="node")
def raises_meanwhile(job):
    settings = {"in_the_middle": for_ever}
    start_processes(child, (job, job.model(), settings), job.gpus, join=False, start_method="fork")
    raise ValueError("nobody is waited for")


@subject(name="raises-early", backends=["ddp"], launch="node")
def raises_early(job):
    start_processes(refuse, (), job.gpus, start_method="fork")


def refuse(place):
    raise ValueError("no data")


@subject(name="cannot-be-pickled", backends=["ddp"], launch="node")
def cannot_be_pickled(job):
    start_processes(lambda place: None, (), job.gpus, start_method="spawn")


@subject(name="first-dies", backends=["ddp"], launch="node")
def first_dies(job):
    start_processes(child, (job, job.model(), {"in_the_middle": for_ever}), job.gpus, join=False, start_method="fork")
    os._exit(3)


@subject(name="leaves-everything", backends=["ddp"], launch="node")
def leaves_everything(job):
    """Leave processes of every kind behind, and files."""
    for arguments in ({}, {"start_new_session": True}):
        print("child", subprocess.Popen(["sleep", "1000"], **arguments).pid, flush=True)
    manager = multiprocessing.get_context("spawn").Manager()
    print("child", manager._process.pid, flush=True)
    handle, path = tempfile.mkstemp()
    print("files", os.path.dirname(path), flush=True)
    lock = multiprocessing.get_context("spawn").Lock()
    starting(job, "fork", {})
    del lock, handle


@subject(name="prints-its-environment", backends=["ddp", "ddp2"], launch="node")
def prints_its_environment(job):
    names = ("NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "RANK", "TORCHELASTIC_USE_AGENT_STORE")
    print(" ".join(os.environ.get(name, "-") for name in names), job.rank, job.node_rank, job.gpus, flush=True)
