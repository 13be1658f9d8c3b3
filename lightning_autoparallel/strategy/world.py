"""The strategy's processes: how they start, the mesh they form, and what they tell each other."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import (
    ParallelStrategy,
    Trainer,
    all_gather_if_available,
    default_process_group_backend,
    distributed_is_initialized,
    init_process_group,
    is_called_by_loop,
    keep_samplers,
    pl_worker_init_function,
    rank_zero_only,
    rank_zero_warn,
    reset_seed,
    sync_if_available,
)
from lightning_autoparallel.lightning_compat.hooks import around_hooks
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place
from lightning_autoparallel.strategy.attempts import is_restartable, store_of_attempt
from lightning_autoparallel.strategy.backends import check_backend, check_backend_on
from lightning_autoparallel.strategy.gathered_ranks import gathered_with_gradients
from lightning_autoparallel.strategy.launch import check_launch
from lightning_autoparallel.strategy.launcher import RankLauncher, end_process
from lightning_autoparallel.strategy.logged import ALREADY_GLOBAL
from lightning_autoparallel.strategy.met_batches import met_before_batches
from lightning_autoparallel.strategy.roll_call import RollCall
from lightning_autoparallel.strategy.shared_rows import SharedRows
from lightning_autoparallel.torch_compat.default_world import backend_of
from lightning_autoparallel.torch_compat.freed_memory import give_back_memory, keep_freed_memory
from lightning_autoparallel.torch_compat.gloo import one_gloo_thread


class WorldStrategy(ParallelStrategy):
    """Processes on a mesh. Values of ranks are joined over the data-parallel ranks: other axes hold the same rows."""

    def __init__(self, spec: MeshSpec, process_group_backend: str | None, timeout: timedelta) -> None:
        super().__init__()
        check_backend(process_group_backend)
        self.spec = spec
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self._mesh: ParallelMesh | None = None
        self._control: ControlGroup | None = None
        self._shared_rows: SharedRows | None = None  # where several ranks have parts of one batch shard
        self._roll_call = RollCall(timeout, self._end_process)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled, with a Trainer, starts anew: it has the settings, and nothing of this process."""
        return {**super().__getstate__(), "_mesh": None, "_control": None, "_shared_rows": None}  # type: ignore[misc]

    # -- what the launch looks like ----------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks: Lightning then gives each its rows, in an order that all of them know.

        A single one has the rows in the order, and the tuners, of one device. Ranks of which none has rows of its own
        (``{"tp": 2}``) have the order of their loader, too, drawn from the seed anew.
        """
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh with its flattened sub-meshes.

        Raises:
            ConfigError: the processes have not been started yet.
        """
        if self._mesh is None:
            raise ConfigError(
                "the device mesh exists once the Trainer has started its processes: from configure_model on"
            )
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's view of the mesh, there from ``configure_model`` on."""
        return self.mesh.device_mesh

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows."""
        return self._batch_shard()[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rows are shared out over the batch axes only; known before the processes have met, for who counts batches."""
        index, shards = self._batch_shard()
        return {"num_replicas": shards, "rank": index}

    def _batch_shard(self) -> tuple[int, int]:
        return self.spec.resolve(self.world_size).batch_shard(self.global_rank)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_launch(self.spec, self.num_processes * self.num_nodes)
        self._launcher = RankLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._roll_call, self.timeout
        )

    def setup_environment(self) -> None:
        """Start the process group and build the mesh, once."""
        super().setup_environment()
        self.set_world_ranks()
        keep_freed_memory(self.root_device)
        if self.world_size > 1:  # ranks draw alike; a single one goes on, as one device does
            reset_seed()
        if self._mesh is None:
            self._start_process_group()
            self._mesh = build_mesh(self.spec, self.root_device.type)
            shards = [self._mesh.spec.batch_shard(rank)[0] for rank in range(self.world_size)]
            self._control = ControlGroup(self.timeout, shards if len(set(shards)) < len(shards) else ())
            if self._control.shards:
                self._shared_rows = SharedRows(self._control, self.root_device, rank_zero_warn)
        self._roll_call.start()
        if self._shared_rows is not None:
            self._shared_rows.begin()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.device_mesh
        if self._shared_rows is not None and self._mesh.data_parallel_size == 1:
            keep_samplers(self.lightning_module.trainer)

    def leave_world(self, well: bool) -> None:
        """What began with ``setup_environment`` ends; it went ``well``, or others are to be told that it did not."""
        self._roll_call.stop(well)
        give_back_memory(self.root_device)

    def _start_process_group(self) -> None:
        self.process_group_backend = self.process_group_backend or default_process_group_backend(self.root_device)
        check_backend_on(self.process_group_backend, self.root_device.type)
        assert self.cluster_environment is not None
        device_id = self.root_device if self.root_device.type != "cpu" else None
        with one_gloo_thread():
            init_process_group(
                self.cluster_environment,
                self.process_group_backend,
                timeout=self.timeout,
                device_id=device_id,
                store=self._own_store(),
            )
        # Lightning leaves gloo groups to the interpreter's exit, where their threads may abort the process.
        atexit.register(_destroy_process_groups)

    def _own_store(self) -> dist.Store | None:
        """By which ranks meet, if not by the one that torch makes."""
        assert self.cluster_environment is not None
        if dist.is_initialized() or not is_restartable():
            return None
        return store_of_attempt(
            self.cluster_environment.global_rank(), self.cluster_environment.world_size(), self.timeout
        )

    def _end_process(self, reason: str) -> None:
        assert isinstance(self._launcher, RankLauncher)
        end_process(reason, self._launcher.procs)

    def set_world_ranks(self) -> None:
        """Say which process this is, as soon as there is a Trainer: before ``fit`` some things are for one only."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- as many batches on every rank -------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Ranks agree on the number of batches before the first: one that has fewer would leave the others waiting."""
        assert self.lightning_module is not None
        self._check_batches("train", [self.lightning_module.trainer.num_training_batches])

    def on_validation_start(self) -> None:
        """The same before a validation, or the sanity check."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._check_batches(
            "val", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )

    def on_test_start(self) -> None:
        """The same before a test."""
        assert self.lightning_module is not None
        self._check_batches("test", self.lightning_module.trainer.num_test_batches)

    def on_predict_start(self) -> None:
        """The same before a prediction."""
        assert self.lightning_module is not None
        self._check_batches("predict", self.lightning_module.trainer.num_predict_batches)

    def _check_batches(self, kind: str, batches: Sequence[float]) -> None:
        assert self._control is not None
        if self._control.agrees(repr(batches)):
            return
        everyone = self._control.gather(list(batches))
        if not all(isinstance(theirs, list) for theirs in everyone):
            places = [f"the start of {kind} batches" if isinstance(theirs, list) else theirs for theirs in everyone]
            raise other_place(places)
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise ConfigError(
            f"ranks have other numbers of {kind} batches: rank 0 {everyone[0]}, rank {rank} {everyone[rank]}, by "
            "loader; each step is one of all ranks. Let the Trainer share rows out (use_distributed_sampler=True), "
            f"give ranks as many rows each, or set limit_{kind}_batches to what all have"
        )

    # -- the same rows on ranks of one batch shard -------------------------------------------------------------------

    def draws_by_shard(self, dataloader: object) -> object:
        """A loader whose samplers are about to draw, and whose workers Lightning would seed by rank."""
        if self._shared_rows is None:
            return dataloader
        self._shared_rows.follow_generators()
        if isinstance(dataloader, DataLoader):
            drawing = (dataloader, dataloader.sampler, dataloader.batch_sampler)
            given = dict.fromkeys(getattr(each, "generator", None) for each in drawing)
            self._shared_rows.follow([each for each in given if isinstance(each, torch.Generator)])
        is_asked = bool(int(os.environ.get("PL_SEED_WORKERS", 0)))  # seed_everything(workers=True)
        if is_asked and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self._batch_shard()[0])
        return dataloader

    @contextlib.contextmanager
    def together_between_steps(self, trainer: Trainer) -> Iterator[None]:
        """While open, ranks meet before each batch; those of a batch shard draw alike behind an epoch's first hooks."""
        assert self._control is not None
        shared = self._shared_rows
        draws = contextlib.nullcontext() if shared is None else around_hooks(shared.followed_behind)
        with draws, met_before_batches(trainer, self._control):
            yield

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch on the device; in a loop ranks of one batch shard have the same rows, see ``shared_rows.py``."""
        module = self.lightning_module
        if self._shared_rows is not None and module is not None and is_called_by_loop(module, "batch_to_device"):
            stage = module.trainer.state.stage
            batch = self._shared_rows.same(f"{stage and stage.value} dataloader {dataloader_idx}", batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- talking -----------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not distributed_is_initialized():
            return
        if backend_of(self.root_device.type) == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``."""
        if not distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over ``group``; anything else as it is.

        Unless a group is given, over the data-parallel ranks, and then averaged over those that have the same rows.
        """
        if not isinstance(tensor, Tensor) or group is ALREADY_GLOBAL:
            return tensor
        if isinstance(tensor, DTensor):  # a number of parameters, which is no plain tensor; a copy's memory is its own
            tensor = tensor.full_tensor().clone()
        if group is not None or self._mesh is None:
            return sync_if_available(tensor, group, reduce_op=reduce_op)
        rows = self._mesh.data_parallel_axes
        for axes in (rows, tuple(axis for axis in self._mesh.spec.names if axis not in rows)):
            if self._mesh.active(axes):
                # ranks with the same rows may have other numbers, of a clock or of the rank: all shall have one
                how = "mean" if axes != rows and reduce_op in ("sum", dist.ReduceOp.SUM) else reduce_op
                tensor = sync_if_available(tensor, self._mesh.submesh(axes).get_group(), reduce_op=how)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensors of ``group``, the data-parallel ranks unless given, stacked by rank.

        The world is no group that was given: ``LightningModule.all_gather`` names it where nobody did.
        """
        if self._mesh is not None and (group is None or group is dist.group.WORLD):
            if self._mesh.data_parallel_size == 1:
                return tensor.unsqueeze(0)
            group = self._mesh.submesh(self._mesh.data_parallel_axes).get_group()
            if sync_grads:
                return gathered_with_gradients(tensor, group)
        return all_gather_if_available(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any rank, decided so; over every rank, whatever its rows."""
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = sync_if_available(votes, None, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes > 0)


def _destroy_process_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
