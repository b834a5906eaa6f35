"""Context parallelism for train_gpt.py: the ranks of `torchrun` share each sequence, with or without FSDP2."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from gpt import GPT, Attend, Backend
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typer import BadParameter

from tileattn.parallel import Plan


def own_gpu() -> torch.device:
    """The GPU of this process, as torchrun numbers them, made the current one: "cuda" then means it."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


class Context:
    """The ranks that share a sequence. Each has all parameters, or, with FSDP2, a part of them.

    Args:
        ranks: how many; torchrun must have started as many processes.
        seqlen: of the whole sequence.
        device: "cpu", with gloo, or "cuda", with NCCL.
        fsdp: whether parameters, gradients and optimizer states are sharded over the same ranks.
    """

    def __init__(self, ranks: int, seqlen: int, device: str, fsdp: bool) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) != ranks:
            raise BadParameter(
                f"--context-parallel {ranks} needs {ranks} processes, got {os.environ.get('WORLD_SIZE', 1)}: "
                f"torchrun --nproc-per-node {ranks} examples/train_gpt.py --context-parallel {ranks}"
            )
        if device == "cuda":
            dist.init_process_group("nccl", device_id=own_gpu())
        else:
            dist.init_process_group("gloo")
        self.plan, self.ranks, self.fsdp = Plan(None, seqlen), ranks, fsdp
        self.rank = self.plan.rank
        self.mesh = init_device_mesh(device, (ranks,)) if fsdp else None

    def attend(self, backend: Backend) -> Attend:
        """Causal attention on shards."""
        named = None if backend == Backend.tileattn else backend.value
        return functools.partial(self.plan.attention, causal=True, backend=named)

    def prepare(self, model: GPT) -> None:
        """Tells the model the positions of this rank's rows, and shards its parameters with FSDP2."""
        for block in model.blocks:
            block.positions = self.plan.positions
        if self.mesh is not None:
            fully_shard(model, mesh=self.mesh)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss whose gradient each rank computes: FSDP2 averages gradients over ranks, and we need their sum."""
        return loss * self.ranks if self.fsdp else loss

    def sum_gradients(self, model: GPT) -> None:
        """Adds the gradients of all ranks; FSDP2 has done so already."""
        for parameter in model.parameters() if not self.fsdp else ():
            dist.all_reduce(parameter.grad)

    def total(self, loss: Tensor) -> Tensor:
        """The sum of a number over all ranks."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss

    def whole(self, model: GPT) -> GPT:
        """The model with all parameters, for rank 0 alone: it sees whole sequences, and uses no transfers."""
        if isinstance(model, FSDPModule):
            model.unshard()
        for block in model.blocks:
            block.positions = None
        return model

    def close(self) -> None:
        """Waits for all ranks and ends the group."""
        dist.barrier()
        dist.destroy_process_group()
