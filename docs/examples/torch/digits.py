"""Handwritten digits, learnt by three replicas; one is killed on the way, and started again."""

import math
import multiprocessing
import sys

import torch
from shmacc.errors import WorkerDiedError
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shmacc.torch import Replica, StepSampler, SyncReplicas, clip_grad_norm_, optimizer_of

REPLICAS, UPDATES, BATCH = 3, 150, 32
PROCESSES = multiprocessing.get_context("forkserver")  # imports torch once, which takes seconds
PROCESSES.set_forkserver_preload(["torch", "sklearn.datasets", "shmacc.torch"])


def make_model():
    torch.manual_seed(0)  # the replicas' initial parameters do not matter
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def data():
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)


def compute(rank):
    torch.set_num_threads(1)
    model, (images, labels) = make_model(), data()
    learnt = TensorDataset(images[:1500], labels[:1500])
    with Replica(model, "digits", rank, timeout=60) as replica:
        # One that is started again goes on with the batch of the step, until the training ends.
        sampler = StepSampler(learnt, replica, BATCH)
        for inputs, expected in DataLoader(learnt, batch_sampler=sampler):
            nn.functional.cross_entropy(model(inputs), expected).backward()
            replica.step()  # in place of optimizer.step() and zero_grad()


def rate(step):
    return 0.0015 * (1 + math.cos(math.pi * step / UPDATES))


def start(rank):
    process = PROCESSES.Process(target=compute, args=(rank,))
    process.start()
    return process


if __name__ == "__main__":
    torch.set_num_threads(1)  # more only on processors that the replicas leave free
    model = make_model()
    how = {
        "optimizer": optimizer_of(torch.optim.Adam(model.parameters())),
        "schedule": rate,
        "if_exists": "replace",  # a run goes on with nothing that an earlier one has left
    }
    with SyncReplicas(model, "digits", total_num_replicas=REPLICAS, **how) as replicas:
        processes = [start(rank) for rank in range(REPLICAS)]
        while replicas.global_step < UPDATES:
            try:
                with replicas.round(timeout=60, on_death="raise"):  # .grad is the replicas' mean
                    clip_grad_norm_(model, 1.0)
            except WorkerDiedError as error:
                if error.reasons != ("killed",):
                    raise  # what a replica has raised
                processes[1] = start(1)
                continue
            if replicas.global_step == 50:
                processes[1].kill()
    for process in processes:
        process.join()
    images, labels = data()
    right = (model.eval()(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean()
    print(f"{right:.1%} of the digits that were not learnt from are recognised")
    assert right > 0.85, "it was 0.9 and more"
    sys.exit(any(process.exitcode for process in processes))
