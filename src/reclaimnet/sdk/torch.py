"""PyTorch's state as a tree that can be saved: tensors become arrays, and come back as tensors.

    from reclaimnet import sdk
    from reclaimnet.sdk import torch as rn_torch

    with sdk.job() as job:
        parts = {"model": model, "optimizer": optimizer}
        saved = job.restore(lambda: rn_torch.state(step=0, **parts))
        step = rn_torch.load(saved, **parts)["step"]
        ...
        job.step(step, lambda: rn_torch.state(step=step, **parts))

The random generators of the CPU and of all visible GPUs are part of it.
"""

from typing import Any, Final

import torch

_TENSOR: Final = "torch.Tensor"
_OWN_DTYPES: Final = {
    torch.bfloat16: torch.int16,
    **{
        getattr(torch, name): torch.uint8
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}
"""Types numpy does not know, and those of the same size their bits are carried in."""
_RNG: Final = "torch.rng"


def state(**parts: Any) -> dict[str, Any]:
    """One tree of all parts: whatever has a `state_dict` gives it, other values are themselves."""
    tree = {
        name: to_tree(part.state_dict() if hasattr(part, "state_dict") else part)
        for name, part in parts.items()
    }
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    tree[_RNG] = to_tree({"cpu": torch.get_rng_state(), "gpus": gpus})
    return tree


def load(saved: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Put each part's saved state back into it, and the random generators' too; returns the
    saved values of all that have no `load_state_dict`, such as the step."""
    rest = {}
    for name, tree in saved.items():
        if name == _RNG:
            _load_rng(from_tree(tree))
        elif name in parts:
            parts[name].load_state_dict(from_tree(tree))
        else:
            rest[name] = from_tree(tree)
    return rest


def to_tree(value: Any) -> Any:
    """The value with arrays in place of tensors. On the CPU they share the tensors' memory: the
    save, which follows at once, makes the copy."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        carrier = _OWN_DTYPES.get(tensor.dtype)
        array = (tensor if carrier is None else tensor.view(carrier)).numpy()
        return {_TENSOR: str(tensor.dtype).removeprefix("torch."), "array": array}
    if isinstance(value, dict):
        return {key: to_tree(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_tree(item) for item in value)
    return value


def from_tree(tree: Any) -> Any:
    """Tensors, on the CPU, in place of arrays; `load_state_dict` moves them where they belong."""
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return torch.from_numpy(tree["array"]).view(getattr(torch, tree[_TENSOR]))
        return {key: from_tree(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(from_tree(item) for item in tree)
    return tree


def _load_rng(rng: dict[str, Any]) -> None:
    torch.set_rng_state(rng["cpu"])
    # On a machine with another number of GPUs only those that both have can go on.
    for index, gpu in enumerate(rng["gpus"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(gpu, index)
