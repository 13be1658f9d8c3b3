"""A strategy that reports what it is told to, under a real Trainer on one CPU process."""

from collections.abc import Mapping

import lightning
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_autoparallel.contracts import CollectiveCount, PassReport, PlanReport

FORWARD = {"all_gather": {"dp_shard": CollectiveCount(count=2, size_bytes=3 * 1024)}}
BACKWARD = {
    "all_gather": {"dp_shard": CollectiveCount(count=1, size_bytes=1024)},
    "all_reduce": {"dp_replicate,dp_shard": CollectiveCount(count=1, size_bytes=4)},
}
LAUNCHES = {"dp_shard": 3, "dp_replicate,dp_shard": 1}


class ReportingStrategy(SingleDeviceStrategy):
    """Trains on one device, and reports captures and launches as AutoParallelStrategy does."""

    process_group_backend = "gloo"

    def __init__(self, reports: Mapping[str, PlanReport], launches: list[dict[str, int]]) -> None:
        super().__init__("cpu")
        self.reports: dict[str, PlanReport] = {}
        self.measured_launches: dict[str, int] = {}
        self.predicted_launches: dict[str, int] = {}
        self._to_capture = dict(reports)
        self._to_launch = launches

    def setup(self, trainer):
        super().setup(trainer)
        self._capture("training_step")

    def training_step(self, *args, **kwargs):
        self.measured_launches = self._to_launch.pop(0) if len(self._to_launch) > 1 else self._to_launch[0]
        self.predicted_launches = self.reports["training_step"].launches()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args, **kwargs):
        self._capture("validation_step")
        return super().validation_step(*args, **kwargs)

    def _capture(self, name):
        if name in self._to_capture:
            self.reports[name] = self._to_capture[name]


class _RunTrainer:
    def __init__(self, directory):
        self.directory = directory

    def __call__(self, *callbacks, strategy=None, epochs=1, fit=True, **options):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy or ReportingStrategy(_reports(), [LAUNCHES]),
            logger=CSVLogger(self.directory, name="logs"),
            callbacks=list(callbacks),
            max_epochs=epochs,
            **{"limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 2, **options},
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if fit:
            trainer.fit(BoringModel())
        return trainer


@pytest.fixture
def run(tmp_path):
    """Fit a BoringModel for some epochs of 4 steps, logged every second step."""
    return _RunTrainer(tmp_path)


@pytest.fixture
def reporting():
    """Make a ReportingStrategy for given launches of each step (the last one repeated) and predicted peak."""
    return lambda launches=(LAUNCHES,), peak=None: ReportingStrategy(_reports(peak), list(launches))


@pytest.fixture
def training_report():
    """The report of a training step, nothing predicted but counts."""
    return _reports()["training_step"]


@pytest.fixture
def launches():
    """What a training step of the reports launches."""
    return dict(LAUNCHES)


def _reports(peak: int | None = None) -> dict[str, PlanReport]:
    common = {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "plan": "hsdp", "timings_s": {"capture": 0.5}}
    done = PassReport(
        name="merge_identical_collectives",
        graph="training_step",
        seconds=0.25,
        nodes_before=90,
        nodes_after=87,
        before={"all_gather": {"dp_shard": CollectiveCount(count=5, size_bytes=20)}},
        after=FORWARD,
        notes=("3 merged",),
    )
    return {
        "training_step": PlanReport(
            graph="training_step",
            collectives={"forward": FORWARD, "backward": BACKWARD},
            saved_bytes=2048,
            parameters_bytes=3 * 1024**2,
            gradients_bytes=2 * 1024**2,
            passes=(done,),
            predicted_peak_bytes=peak,
            **common,
        ),
        "validation_step": PlanReport(
            graph="validation_step",
            collectives={"inference": FORWARD},
            saved_bytes=0,
            parameters_bytes=3 * 1024**2,
            gradients_bytes=0,
            **common,
        ),
    }
