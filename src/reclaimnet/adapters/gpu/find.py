"""Which GPUs a machine has: those that NVML sees, or those that its owner declares."""

import importlib
from typing import Any

from reclaimnet.model.market import Gpu, GpuId, NodeId


def declared(node: NodeId, count: int) -> tuple[Gpu, ...]:
    """GPUs by the owner's word, for machines without NVML and for trying things out."""
    return tuple(Gpu(id=GpuId(f"GPU-{node}-{index}"), index=index) for index in range(count))


def allocated(node: NodeId, count: int, visible: str) -> tuple[Gpu, ...]:
    """Those GPUs of the machine that a batch system gave us (CUDA_VISIBLE_DEVICES), by index or
    UUID; as many declared ones where there is no NVML."""
    words = [word.strip() for word in visible.split(",") if word.strip()]
    real = tuple(gpu for gpu in found() if str(gpu.index) in words or gpu.id in words)
    return real or declared(node, count)


def found() -> tuple[Gpu, ...]:
    """The GPUs that NVML sees; none if there is no NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except (ImportError, OSError):
        return ()
    except Exception as error:
        if type(error).__name__.startswith("NVMLError"):
            return ()
        raise
    try:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        id=GpuId(_text(nvml.nvmlDeviceGetUUID(handle))),
        index=index,
        model=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
