"""GPU memory through NVML: the real Python library on a driver that is made of its own data types.

There is no GPU on the machines these tests usually run on; where there is one, it is read as well.
"""

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.gpu.memory import FRESH_FOR, Meter
from reclaimnet.model.units import GIB

pytestmark = pytest.mark.needs("pynvml")


class Driver:
    """The functions of libnvidia-ml that we need, by their C names; GPUs are (uuid, used)."""

    def __init__(self, nvml: Any, *gpus: tuple[bytes, int]) -> None:
        self.nvml = nvml
        self.gpus = list(gpus)
        self.lost: set[int] = set()
        self.asked = 0

    def nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802
        return 0 if self.gpus else self.nvml.NVML_ERROR_DRIVER_NOT_LOADED

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def nvmlErrorString(self, result: int) -> bytes:  # noqa: N802
        return b"no driver"

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        if index.value in self.lost:
            return int(self.nvml.NVML_ERROR_GPU_IS_LOST)
        assert isinstance(device._obj, self.nvml.c_nvmlDevice_t)
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = self.gpus[self._index(device)][0]
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = b"NVIDIA A100"
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        assert isinstance(memory._obj, self.nvml.c_nvmlMemory_t)
        self.asked += 1
        memory._obj.total = 40 * GIB
        memory._obj.used = self.gpus[self._index(device)][1]
        memory._obj.free = memory._obj.total - memory._obj.used
        return 0

    def _index(self, device: Any) -> int:
        value: int = ctypes.cast(ctypes.pointer(device), ctypes.POINTER(ctypes.c_void_p))[0]
        return value - 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    library = importlib.import_module("pynvml")
    monkeypatch.setattr(library, "_nvmlGetFunctionPointer_cache", {})
    return library


def installed(nvml: Any, monkeypatch: pytest.MonkeyPatch, *gpus: tuple[bytes, int]) -> Driver:
    driver = Driver(nvml, *gpus)
    monkeypatch.setattr(nvml, "nvmlLib", driver)
    return driver


def test_each_gpu_is_read_with_its_own_name_and_age(nvml, monkeypatch) -> None:
    installed(nvml, monkeypatch, (b"GPU-a", 10 * GIB), (b"GPU-b", 39 * GIB))
    meter = Meter(lambda: 7)
    assert [(v.gpu, v.at, v.total, v.used) for v in meter.read()] == [
        ("GPU-a", 7, 40 * GIB, 10 * GIB),
        ("GPU-b", 7, 40 * GIB, 39 * GIB),
    ]
    assert [gpu.id for gpu in find.found()] == ["GPU-a", "GPU-b"]
    meter.close()


def test_the_driver_is_not_asked_more_often_than_needed_and_never_for_an_old_number(
    nvml, monkeypatch
) -> None:
    driver = installed(nvml, monkeypatch, (b"GPU-a", GIB))
    now = [0]
    meter = Meter(lambda: now[0])
    meter.read()
    meter.read()
    assert driver.asked == 1
    driver.gpus[0] = (b"GPU-a", 2 * GIB)
    now[0] = FRESH_FOR
    (vram,) = meter.read()
    assert (vram.used, vram.at) == (2 * GIB, FRESH_FOR)


def test_a_gpu_that_fell_off_the_bus_does_not_hide_the_others(nvml, monkeypatch) -> None:
    driver = installed(nvml, monkeypatch, (b"GPU-a", GIB), (b"GPU-b", GIB))
    driver.lost.add(0)
    assert [vram.gpu for vram in Meter(lambda: 0).read()] == ["GPU-b"]


def test_without_a_driver_there_is_nothing_to_read(nvml, monkeypatch) -> None:
    installed(nvml, monkeypatch)
    assert Meter(lambda: 0).read() == ()


@pytest.mark.needs("gpu")
def test_a_real_gpu_says_how_much_it_has() -> None:
    meter = Meter(lambda: 0)
    assert all(0 < vram.used <= vram.total for vram in meter.read())
    assert meter.read()
    meter.close()
