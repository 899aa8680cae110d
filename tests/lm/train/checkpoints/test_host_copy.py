"""What is copied for a checkpoint stays as it was, whatever training does next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from homing.lm import device as host_device
from homing.lm.train.checkpoints import manager as snapshot_module
from homing.lm.train.checkpoints.manager import Snapshot


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)[1:3]}
    taken = Snapshot().take(weights=weights)["weights"]
    weights["a"].fill_(9.0)
    assert taken["a"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert taken["b"].untyped_storage().nbytes() == 8  # safetensors refuses views of something larger


def test_the_memory_of_the_one_before_is_used_again() -> None:
    snapshot, tensors = Snapshot(), {"a": torch.zeros(5)}
    first = snapshot.take(x=tensors)["x"]["a"]
    assert snapshot.take(x={"a": torch.ones(5)})["x"]["a"].data_ptr() == first.data_ptr()
    assert first.tolist() == [1.0] * 5
    assert snapshot.take(x={"a": torch.ones(6)})["x"]["a"].shape == (6,)


def test_a_copy_larger_than_the_memory_has_no_room() -> None:
    assert Snapshot().has_room(weights={"a": torch.zeros(10)})
    assert not Snapshot().has_room(weights={"a": torch.empty(2**50, device="meta")})


def test_what_is_held_already_needs_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2000}
    monkeypatch.setattr(snapshot_module, "free_host_bytes", lambda: free["bytes"])
    snapshot, small = Snapshot(), {"a": torch.zeros(100)}
    assert snapshot.has_room(weights=small, optimizer=small)
    snapshot.take(weights=small, optimizer=small)
    free["bytes"] = 1200  # what the copies took
    assert snapshot.has_room(weights=small, optimizer=small)
    assert not snapshot.has_room(weights=small, optimizer={"a": torch.zeros(300)})


def test_pinned_memory_comes_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(snapshot_module, "free_host_bytes", lambda: 3000)
    for num, has_room in ((256, True), (512, True), (513, False)):  # of four bytes, plus a quarter as margin
        tensor = torch.zeros(num).as_subclass(OnCard)
        assert Snapshot().has_room(weights={"a": tensor}) == has_room


def test_the_free_memory_of_a_container_is_that_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  64 kB\nMemAvailable:  48 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 9000\ninactive_file 10000\n")
    monkeypatch.setattr(host_device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_device, "_CGROUPS", ((tmp_path / "memory.max", tmp_path / "memory.current"),))
    assert host_device.free_host_bytes() == 48 * 1024
    (tmp_path / "memory.max").write_text("40000\n")
    assert host_device.free_host_bytes() == 40000 - 30000 + 10000, "what files hold is given up"
    monkeypatch.setattr(host_device, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(host_device, "_CGROUPS", ())
    assert host_device.free_host_bytes() is None
    assert Snapshot().has_room(weights={"a": torch.empty(2**50, device="meta")}), (
        "if free memory is unknown, there is room"
    )
