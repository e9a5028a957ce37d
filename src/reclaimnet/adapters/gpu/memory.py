"""The memory of GPUs, as NVML sees it; nothing where there is no NVML."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

from reclaimnet.model.market import GpuId, Vram
from reclaimnet.model.units import SECOND

FRESH_FOR: Final = SECOND
"""Asking the driver takes milliseconds: it is not asked with every look at the host's memory."""


class Meter:
    """Reads all GPUs of the machine. A GPU that cannot be read is left out, and asked again."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._nvml: Any = None
        self._read: tuple[Vram, ...] = ()
        self._read_at: int | None = None
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except (ImportError, OSError):
            return
        except Exception as error:
            if not type(error).__name__.startswith("NVMLError"):
                raise
            return
        self._nvml = nvml

    def read(self) -> tuple[Vram, ...]:
        """By index; each says when it was read."""
        now = self._now()
        if self._nvml is None or (self._read_at is not None and now - self._read_at < FRESH_FOR):
            return self._read
        nvml, found = self._nvml, []
        for index in range(self._count()):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                gpu = nvml.nvmlDeviceGetUUID(handle)
                gpu = gpu.decode() if isinstance(gpu, bytes) else gpu
                found.append(
                    Vram(gpu=GpuId(gpu), at=now, total=int(memory.total), used=int(memory.used))
                )
        self._read, self._read_at = tuple(found), now
        return self._read

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError:
            return 0
