"""How ``schedule_overlap`` orders the calls of a graph: what is known of them, clocks, live bytes, the scheduler."""

from lightning_autoparallel.passes.scheduling.calls import Calls, read_calls
from lightning_autoparallel.passes.scheduling.known import KnownOrders
from lightning_autoparallel.passes.scheduling.list_scheduler import ScheduleOptions, schedule

__all__ = ["Calls", "KnownOrders", "ScheduleOptions", "read_calls", "schedule"]
