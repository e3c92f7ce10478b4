from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from reef.errors import EngineError
from reef.inference.local.slices import whole
from reef.inference.local.tensor_file import read_tensors, warm


def test_every_tensor_is_a_slice(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert len(list(read_tensors(tmp_path / "x.safetensors"))) == 2
    found = whole(read_tensors(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 9])
def test_what_is_no_tensor_file_is_an_error_that_names_it(tmp_path, content):
    if content is not None:
        (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"x\.safetensors"):
        whole(read_tensors(tmp_path / "x.safetensors"))


def test_warming_reads_what_it_can_and_never_fails(tmp_path):
    warm(tmp_path / "nowhere")
    (tmp_path / "directory").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "weights").write_bytes(bytes(3 << 20))
    before = read_bytes()
    warm(tmp_path)
    assert read_bytes() - before >= 3 << 20


def read_bytes() -> int:
    """What this process has read so far, from disk or memory (proc(5))."""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("this system does not tell")
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))
