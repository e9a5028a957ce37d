"""PyTorch's state goes through an image and comes back; skipped where there is no PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from reclaimnet.sdk import image  # noqa: E402
from reclaimnet.sdk import torch as rn_torch  # noqa: E402

pytestmark = pytest.mark.needs("torch")


def through_an_image(tree, directory):
    packed = image.pack(tree, image.Layout())
    buffer = image.map_image(directory, packed.size)
    image.write(packed, directory, buffer)
    return image.load(directory)[0]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e5m2", "complex64"]
)
def test_tensors_of_every_type_come_back(dtype, tmp_path):
    tensor = torch.arange(12).reshape(3, 4).t().to(getattr(torch, dtype))
    back = rn_torch.from_tree(through_an_image(rn_torch.to_tree({"t": tensor}), tmp_path))["t"]
    assert back.dtype == tensor.dtype
    assert back.stride() == tensor.stride()
    arrays = [rn_torch.to_tree(each)["array"] for each in (back, tensor)]
    assert arrays[0].tobytes() == arrays[1].tobytes()


def test_training_goes_on_in_the_same_bits(tmp_path):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def train(parts, steps):
        for _ in range(steps):
            parts["optimizer"].zero_grad()
            parts["model"](torch.randn(16, 4)).square().mean().backward()
            parts["optimizer"].step()
        return [p.detach().clone() for p in parts["model"].parameters()]

    parts = make()
    train(parts, 5)
    saved = through_an_image(rn_torch.state(step=5, **parts), tmp_path)
    whole = train(parts, 5)
    again = make()
    assert rn_torch.load(saved, **again) == {"step": 5}
    for one, other in zip(whole, train(again, 5), strict=True):
        assert torch.equal(one, other)
