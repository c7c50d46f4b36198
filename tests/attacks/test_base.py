"""A model is left as it was found, whatever it is and whatever happens."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from diffattn.attacks import PGD
from diffattn.attacks.base import guarded, logits_of
from diffattn.threat_model import Linf

THREAT = Linf("12/255")
ATTACK = PGD(steps=3)


class Network(nn.Module):
    """A convolution, batch norm and dropout, with one frozen parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32, 4)
        )
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


def problem():
    torch.manual_seed(0)
    model = Network().eval()
    images = torch.rand(16, 3, 4, 4)
    return model, images, model(images).argmax(dim=1)


def state(model):
    return {
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "identity": [id(tensor) for tensor in [*model.parameters(), *model.buffers()]],
    }


def same(first, second):
    def equal(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return all(equal(a, b) for key in first for a, b in zip(first[key], second[key], strict=True))


@pytest.mark.parametrize("mode", ["eval", "train", "mixed"])
def test_flags_buffers_and_gradients_are_what_they_were(mode):
    model, images, labels = problem()
    nn.functional.cross_entropy(model(images), labels).backward()
    model.train(mode == "train")
    if mode == "mixed":
        model.layers[1].train()
    before = state(model)
    result = ATTACK(model, images, labels, THREAT)
    assert same(before, state(model))
    assert any(flag.startswith("randomised: ") for flag in result.flags) == (mode != "eval")
    assert all("call model.eval()" in flag for flag in result.flags)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_attack_leaves_no_trace(error):
    model, images, labels = problem()
    model.train()
    before, generator = state(model), torch.random.get_rng_state()

    def interrupt(done, total):
        assert not any(parameter.requires_grad for parameter in model.parameters())
        raise error

    with pytest.raises(error):
        ATTACK(model, images, labels, THREAT, batch_size=4, progress=interrupt)
    assert same(before, state(model))
    assert torch.equal(generator, torch.random.get_rng_state())
    assert torch.is_grad_enabled()


def test_inputs_are_not_touched():
    model, images, labels = problem()
    given = images.clone(), labels.clone()

    def in_place(x):
        return model(x.sub_(0.5).div_(0.25))

    labels = in_place(images.clone()).argmax(dim=1)
    result = ATTACK(in_place, images, labels, THREAT)
    assert torch.equal(images, given[0])
    assert result.n_clean_correct == 16
    assert result.adversarial is not images
    assert not result.adversarial.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_changes_nothing(context):
    model, images, labels = problem()
    expected = ATTACK(model, images, labels, THREAT)
    with context():
        result = ATTACK(model, images * 1, labels * 1, THREAT)  # inference tensors under inference_mode
        assert not torch.is_grad_enabled()
    assert torch.equal(result.adversarial, expected.adversarial)
    assert (result.status == expected.status).all()
    assert not result.adversarial.is_inference()


def test_a_model_made_in_inference_mode_is_refused_with_the_reason():
    with torch.inference_mode():
        model, images, labels = problem()
    with pytest.raises(ValueError, match=r"got inference tensors: build or load the model outside torch.inference"):
        ATTACK(model, images, labels, THREAT)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks, and hides it
def test_any_callable_will_do():
    model, images, labels = problem()
    expected = ATTACK(model, images, labels, THREAT)
    outputs = {
        "a function": model.forward,
        "a lambda": lambda x: model(x) + 0,
        "an output with logits": lambda x: SimpleNamespace(logits=model(x), loss=None),
        "compiled": torch.compile(model, backend="eager"),
    }
    for name, callable_ in outputs.items():
        result = ATTACK(callable_, images, labels, THREAT)
        assert torch.equal(result.adversarial, expected.adversarial), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore")  # torch's own, of its process groups
def test_a_model_under_data_parallel_will_do(tmp_path):
    model, images, labels = problem()
    expected = ATTACK(model, images, labels, THREAT)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for training in (False, True):
            wrapped.train(training)
            before = state(wrapped)
            result = ATTACK(wrapped, images, labels, THREAT)
            assert same(before, state(wrapped))
            assert training or torch.equal(result.adversarial, expected.adversarial)
        nn.functional.cross_entropy(wrapped(images), labels).backward()  # it still trains
        assert model.layers[5].weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x.flatten(1)[:, 0], r"must return float logits \[16, classes\].*got shape \(16,\)"),
        (lambda x: x.flatten(1)[:1], r"got shape \(1, 48\)"),
        (lambda x: x.flatten(1).argmax(dim=1), r"got shape \(16,\)"),
        (lambda x: {"logits": x.flatten(1)}, "got dict"),
        (lambda x: x.flatten(1)[:, :2].detach(), "must depend differentiably on the images; got logits without"),
        (
            lambda x: torch.ones(len(x), 2, requires_grad=True) * 2,
            "differentiably .* got logits that do not depend",
        ),
    ],
)
def test_a_model_that_gives_no_logits_is_refused(output, message):
    with pytest.raises(ValueError, match=message):
        ATTACK(output, torch.rand(16, 3, 4, 4), torch.zeros(16, dtype=torch.int64), THREAT)


def test_half_precision_logits_are_widened():
    assert logits_of(lambda x: x.half(), torch.rand(2, 3)).dtype == torch.float32
    assert logits_of(lambda x: x, torch.rand(2, 3).double()).dtype == torch.float64


def test_guarded_turns_everything_on_and_back():
    model, _, _ = problem()
    with torch.no_grad(), guarded(model, 0, "test"):
        assert torch.is_grad_enabled()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with guarded(model, 0, "test"):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
