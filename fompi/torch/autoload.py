"""`torch.distributed.init_process_group("fompi")` without an import of fompi.

torch calls `register` at the end of `import torch`, because it is an entry point `torch.backends`. It starts no MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fompi.mpi import environment


def register() -> None:
    """Make the backend "fompi" and the init method "fompi://" known to `torch.distributed`."""
    from torch import distributed

    if not distributed.is_available() or "fompi" in distributed.Backend.backend_list:
        return
    before = dict(distributed.Backend.default_device_backend_map)
    distributed.Backend.register_backend("fompi", _create, extended_api=True, devices=["cpu", "cuda"])
    distributed.Backend.default_device_backend_map.update(before)
    from fompi.torch import private

    distributed.register_rendezvous_handler("fompi", _meet)
    private.extend_env_method(_meet)
    if environment.value("FOMPI_REPORT") != "0" or environment.is_set("FOMPI_RECORD"):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from fompi.runtime.report import mark_update

        register_optimizer_step_post_hook(lambda optimizer, *_: mark_update(id(optimizer)))  # it ends a step
    from fompi.torch import swap

    if swap.is_wanted():
        swap.swap()


def _create(*options: Any) -> Any:
    return import_module("fompi.torch.creation").create(*options)


def _meet(*args: Any, **options: Any) -> Any:
    return import_module("fompi.torch.store").meet(*args, **options)
