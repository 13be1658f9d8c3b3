"""What lies at a place is there whole, before and after it is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autoparallel.checkpoint import Location
from lightning_autoparallel.errors import CheckpointError


@pytest.fixture(params=["file", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file, or a folder of shards."""
    path = tmp_path / "run.ckpt"
    if request.param == "file":
        path.write_text("before")
    else:
        path.mkdir()
        for name in ("meta.pt", ".metadata"):
            (path / name).write_text("before")
    return path


def content(path: Path) -> str:
    return (path / "meta.pt" if path.is_dir() else path).read_text()


def stage(location: Location) -> None:
    location.prepare()
    for name in ("meta.pt", ".metadata"):
        (Path(location.staging().path) / name).write_text("after")


def test_a_folder_takes_the_place_of_what_was_there(place: Path):
    location = Location(str(place))
    stage(location)
    assert content(place) == "before"
    location.publish()
    assert place.is_dir()
    assert content(place) == "after"
    assert list(place.parent.iterdir()) == [place]


def test_what_was_there_comes_back_where_it_is_not_replaced(place: Path):
    with pytest.raises(OSError, match="disk"), Location(str(place)).replaced():
        assert not place.exists()
        raise OSError("disk full")
    assert content(place) == "before"
    assert list(place.parent.iterdir()) == [place]


def test_what_was_there_comes_back_after_a_kill(place: Path):
    location = Location(str(place))
    place.rename(place.parent / ".run.ckpt.replaced")
    location.put_back()
    assert content(place) == "before"


def test_other_folders_are_left_alone(tmp_path: Path):
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="is a folder, but no checkpoint: remove it or choose another name"):
        Location(str(tmp_path)).prepare()
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
