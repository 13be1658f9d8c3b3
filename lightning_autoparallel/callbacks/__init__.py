"""Callbacks that show what was planned beside what is measured; they read, and never change, the training."""

from lightning_autoparallel.callbacks.collective_monitor import CollectiveMonitor
from lightning_autoparallel.callbacks.peak_memory import PeakMemoryMonitor
from lightning_autoparallel.callbacks.plan_report import PlanReportCallback

__all__ = ["CollectiveMonitor", "PeakMemoryMonitor", "PlanReportCallback"]
