"""Gloo groups of the package run on one thread each."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.torch_compat.collectives import can_order_ranks, new_ordered_groups
from lightning_autoparallel.torch_compat.gloo import _devices
from tests.support.worlds import Worlds

TORCHS_OWN, OURS = 2, 1


def runloops() -> int:
    """Worker threads of all gloo groups of this process."""
    time.sleep(0.3)  # threads name themselves once they run
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def made() -> tuple[int, int, int, bool]:
    """Threads that a group of torch's, a mesh (two axes and both as one) and a control group add; is the mesh alone?"""
    start = runloops()
    dist.new_group()
    plain = runloops()
    mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": 2, "tp": 1}), "cpu")
    meshed = runloops()
    ControlGroup(dist.default_pg_timeout)
    own = mesh.submesh(("dp_shard",)).get_group() is not dist.group.WORLD
    return plain - start, meshed - plain, runloops() - meshed, own


def test_groups_of_the_package_have_one_thread_and_none_is_the_default_group(worlds: Worlds):
    axes = 2
    for answer in worlds(2).run(made):
        assert answer == (TORCHS_OWN, axes * OURS, OURS, True)


def timeout_of_a_mesh() -> float:
    """Seconds, where those of the default group are 77 while the mesh is made."""
    world = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = world.options._timeout
    world._set_default_timeout(timedelta(seconds=77))
    group = build_mesh(MeshSpec.from_mapping({"dp_shard": 2}), "cpu").device_mesh.get_group()
    world._set_default_timeout(before)
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_mesh_keeps_the_timeout_of_the_default_group(worlds: Worlds):
    assert worlds(2).run(timeout_of_a_mesh) == [77, 77]


def interface_of_a_first_group(name: str) -> str:
    """What making the devices of a world's first group says, where GLOO_SOCKET_IFNAME names an interface."""
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=name), mock.patch.object(dist, "is_initialized", bool):
        try:
            return f"{len(_devices())} device(s)"
        except RuntimeError as error:
            return str(error)


def test_the_named_interface_is_used_on_every_group():
    assert interface_of_a_first_group("lo") == interface_of_a_first_group("") == "1 device(s)"
    assert interface_of_a_first_group("lo,lo") == "2 device(s)"
    assert "none-such0" in interface_of_a_first_group("none-such0")


def timeouts_of_other_groups() -> list[float]:
    """Seconds: of a mesh made without options of our own, as off gloo, and of a group with its ranks in an order."""
    cpu = torch.device("cpu")
    world = dist.group.WORLD._get_backend(cpu)
    before = world.options._timeout
    world._set_default_timeout(timedelta(seconds=77))
    with mock.patch("lightning_autoparallel.mesh.own_gloo_groups", lambda device_type: None):
        mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": 2, "tp": 1}), "cpu")
    groups = [submesh.get_group() for submesh in mesh.submeshes.values()]
    if can_order_ranks():
        new_ordered_groups([[1, 0]], "backwards")
        groups.append(dist.distributed_c10d._resolve_process_group("backwards"))
    found = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    world._set_default_timeout(before)
    return found


def test_every_group_has_the_timeout_of_the_default_group(worlds: Worlds):
    for found in worlds(2).run(timeouts_of_other_groups):
        assert len(found) >= 2 and set(found) == {77}
