"""CollectiveMonitor: what it logs, prints, remembers and warns about."""

import csv
import warnings

import pytest
import torch

from lightning_autoparallel.callbacks import CollectiveMonitor
from lightning_autoparallel.callbacks.launches import LaunchHistory, steps_table
from lightning_autoparallel.callbacks.tables import render_table
from lightning_autoparallel.errors import ConfigError


def _cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def _key(axes, kind="launches"):
    """A logger's name for axes: some loggers refuse commas."""
    return f"autoparallel/{kind}/{axes.replace(',', '-')}"


def _logged(trainer):
    with open(f"{trainer.logger.log_dir}/metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_launches_are_logged_at_the_trainers_cadence(run):
    trainer = run(CollectiveMonitor())
    expected = {"dp_shard": 3.0, "dp_replicate,dp_shard": 1.0, "total": 4.0}
    for metrics in (trainer.logged_metrics, trainer.callback_metrics):
        assert {axes: float(metrics[_key(axes)]) for axes in expected} == expected
    assert not any("," in name for name in trainer.logged_metrics)
    rows = _logged(trainer)
    assert [row["step"] for row in rows] == ["1", "3"]
    assert all(float(row[_key(axes)]) == count for row in rows for axes, count in expected.items())


def test_predicted_launches_are_logged_beside_the_measured_ones(run, reporting, launches):
    with pytest.warns(UserWarning, match="did not launch"):
        trainer = run(CollectiveMonitor(), strategy=reporting([launches, {"dp_shard": 2, "tp": 5}]))
    logged = trainer.logged_metrics
    both = {
        axes: (float(logged[_key(axes, "predicted_launches")]), float(logged[_key(axes)]))
        for axes in ("dp_shard", "dp_replicate,dp_shard", "tp", "total")
    }
    assert both == {"dp_shard": (3, 2), "dp_replicate,dp_shard": (1, 0), "tp": (0, 5), "total": (4, 7)}


def test_a_second_table_goes_step_by_step(run, reporting, launches, capsys):
    fewer = {**launches, "dp_shard": 2}
    with pytest.warns(UserWarning, match="did not launch"):
        run(CollectiveMonitor(), strategy=reporting([launches, launches, fewer, launches]))
    out = capsys.readouterr().out
    table = out[out.index("step by step") :].splitlines()
    assert [_cells(line) for line in table if "dp_shard" in line] == [
        ["0 to 1", "dp_shard", "3", "3"],
        ["0 to 1", "dp_replicate,dp_shard", "1", "1"],
        ["2", "dp_shard", "3", "2", "-1"],
        ["2", "dp_replicate,dp_shard", "1", "1"],
        ["3", "dp_shard", "3", "3"],
        ["3", "dp_replicate,dp_shard", "1", "1"],
    ]


def test_a_long_history_shows_its_last_rows():
    history = LaunchHistory()
    for step in range(30):
        history.add({"tp": 1}, {"tp": step})
    text = render_table(steps_table(history))
    assert "steps 0 to 9 are not shown" in text
    rows = [_cells(line) for line in text.splitlines() if " tp " in line]
    assert (len(rows), rows[0], rows[-1]) == (20, ["10", "tp", "1", "10", "+9"], ["29", "tp", "1", "29", "+28"])


def test_axes_that_a_step_does_not_use_are_logged_as_zero(run, reporting, launches):
    with pytest.warns(UserWarning, match="did not launch"):
        trainer = run(CollectiveMonitor(), strategy=reporting([launches, {"dp_shard": 3}]))
    assert float(trainer.logged_metrics["autoparallel/launches/dp_replicate-dp_shard"]) == 0
    assert float(trainer.logged_metrics["autoparallel/launches/total"]) == 3


def test_the_last_steps_are_remembered(run, launches):
    monitor = CollectiveMonitor(history=3)
    run(monitor)
    assert monitor.launches == [launches] * 3
    short = CollectiveMonitor()
    run(short)
    assert short.launches == [launches] * 4


def test_one_table_shows_predicted_beside_measured(run, capsys):
    run(CollectiveMonitor(), epochs=2)
    out = capsys.readouterr().out
    assert out.count("gloo launches per step on one rank") == 1
    assert "predicted: counted in the final graphs; measured: launches of the last training step" in out
    assert "\x1b" not in out
    rows = [_cells(line) for line in out.splitlines() if "_step " in line]
    assert rows == [
        ["training_step", "forward", "all_gather", "dp_shard", "2", "3.0 KiB"],
        ["training_step", "backward", "all_gather", "dp_shard", "1", "1.0 KiB"],
        ["training_step", "backward", "all_reduce", "dp_replicate,dp_shard", "1", "4 B"],
        ["validation_step", "inference", "all_gather", "dp_shard", "2", "3.0 KiB"],
        ["training_step", "all", "all", "dp_shard", "3", "4.0 KiB", "3"],
        ["training_step", "all", "all", "dp_replicate,dp_shard", "1", "4 B", "1"],
        ["training_step", "all", "all", "total", "4", "4.0 KiB", "4"],
    ]


def test_other_ranks_print_nothing(run, reporting, capsys, monkeypatch):
    monitor, strategy = CollectiveMonitor(), reporting()
    trainer = run(monitor, strategy=strategy, fit=False)
    monkeypatch.setattr(type(strategy), "is_global_zero", False)
    monitor.on_train_epoch_end(trainer, None)
    assert "launches" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "device", "title"),
    [
        ("nccl", "cuda", "NCCL launches"),
        ("cpu:gloo,cuda:nccl", "cuda", "NCCL launches"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo launches"),
        ("gloo", "cuda", "gloo launches"),
        (None, "cpu", "gloo launches"),
    ],
)
def test_the_title_names_the_library(run, reporting, capsys, monkeypatch, backend, device, title):
    monitor, strategy = CollectiveMonitor(), reporting()
    trainer = run(monitor, strategy=strategy, fit=False)
    strategy.process_group_backend = backend
    monkeypatch.setattr(type(strategy), "root_device", torch.device(device))
    monitor.on_train_epoch_end(trainer, None)
    assert title in capsys.readouterr().out


def test_a_difference_is_warned_about_once(run, reporting, launches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(CollectiveMonitor(), strategy=reporting([launches, {**launches, "tp": 7, "dp_shard": 2}]))
    messages = [str(warning.message) for warning in caught if "final graphs" in str(warning.message)]
    assert len(messages) == 1
    assert "(dp_shard: 2 measured, 3 predicted; tp: 7 measured, 0 predicted)" in messages[0]


def test_every_group_that_differs_is_warned_about_with_its_first_step(run, reporting, launches):
    fewer, other = {**launches, "dp_shard": 2}, {**launches, "dp_shard": 2, "tp": 7}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(CollectiveMonitor(), strategy=reporting([launches, fewer, other, other]))
    messages = [str(warning.message) for warning in caught if "final graphs" in str(warning.message)]
    assert [message.partition(" did not")[0] for message in messages] == ["training step 1", "training step 2"]
    assert "(dp_shard: 2 measured, 3 predicted)" in messages[0]
    assert "(tp: 7 measured, 0 predicted)" in messages[1]


def test_agreement_is_silent(run):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*final graphs.*")
        run(CollectiveMonitor())


def test_another_strategy_is_refused(run):
    with pytest.raises(ConfigError, match=r"CollectiveMonitor reads .* strategy is SingleDeviceStrategy; use"):
        run(CollectiveMonitor(), strategy="auto")
