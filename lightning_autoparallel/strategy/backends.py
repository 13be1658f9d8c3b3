"""``process_group_backend``: what starts collectives, one name, or one for each type of device."""

from __future__ import annotations

import torch.distributed as dist

from lightning_autoparallel.errors import ConfigError, did_you_mean


def check_backend(backend: str | None) -> None:
    """Whether torch knows ``"gloo"``, ``"nccl"``, or each name of ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ConfigError: it does not, or a device is named twice, or the text has another form.
    """
    if backend is None:
        return
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    devices: list[str] = []
    for part in backend.split(","):
        device, colon, name = part.strip().rpartition(":")
        if name.lower() not in known:
            raise ConfigError(
                f"process_group_backend={backend!r}: {name!r} is no backend: torch has {', '.join(known)}; write one "
                f"of them, or one for each type of device, as in 'cpu:gloo,cuda:nccl'{did_you_mean(name, known)}"
            )
        if ("," in backend and not colon) or device in devices or (colon and not device):
            raise ConfigError(
                f"process_group_backend={backend!r}: several backends are written with a type of device each, and "
                "every type once, as in 'cpu:gloo,cuda:nccl'"
            )
        devices.append(device)


def check_backend_on(backend: str, device_type: str) -> None:
    """Whether ``backend`` can move tensors of the devices that training is on.

    Raises:
        ConfigError: it names none for them, or torch was built without it.
    """
    by_device = dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())
    if device_type not in by_device:
        raise ConfigError(
            f"process_group_backend={backend!r} has none for {device_type}, which training is on: "
            f"add '{device_type}:{dist.Backend.default_device_backend_map.get(device_type, 'gloo')}'"
        )
    missing = [name for name in by_device.values() if not _is_built(str(name))]
    if missing:
        raise ConfigError(f"process_group_backend={backend!r}: this torch was built without {missing[0]}")


def _is_built(name: str) -> bool:
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return checks[name]() if name in checks else True
